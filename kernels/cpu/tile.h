/*
 * What convolution and GEMM share: an operand packed into panels, and the product of a tile of rows with one block of
 * it. Along k the operand is cut into blocks of at most FG_BLOCK_K rows, so that a panel of a block stays in the L1
 * cache while the rows of a tile pass by:
 *
 *     packed operand (k, n): block 0 | block 1 | ...      each block: panels as in simd.h, block_k * padded_n floats
 */
#ifndef FLEXGEMM_CPU_TILE_H
#define FLEXGEMM_CPU_TILE_H

#include "backend.h"
#include "simd.h"

enum { FG_BLOCK_K = 128 };

typedef struct {
    int64_t k, n;
    int64_t padded_n; /* n rounded up to whole vectors */
    int64_t panels;   /* of one block */
    int64_t blocks;   /* of k, of block_k rows each but the last */
    int64_t block_k;
} fg_packing;

fg_packing fg_packing_of(const fg_simd *simd, int64_t k, int64_t n);

/* Rows of k in a block. */
static inline int64_t fg_block_rows(const fg_packing *packing, int64_t block) {
    return fg_min(packing->block_k, packing->k - block * packing->block_k);
}

/* Where a (k, n) operand lies: element (p, j) is p * k_stride + j * n_stride elements after data; one stride is 1. */
typedef struct {
    const void *data;
    fg_dtype dtype;
    int64_t k_stride, n_stride;
} fg_operand;

/* Packs one panel of one block; `packed` is the start of the whole packed operand. */
void fg_pack_panel(const fg_simd *simd, const fg_packing *packing, const fg_operand *operand, int64_t block,
                   int64_t panel, float *packed);

/* c[i][0 .. n) += a[i] . columns [n_begin, n_begin + n) of one block. a[i] points at the block's first element of a
 * row. n_begin is a multiple of simd->panel, and c[i] has room for n rounded up to whole vectors. */
void fg_multiply_block(const fg_simd *simd, const fg_packing *packing, const float *packed, int64_t block,
                       int64_t n_begin, int64_t n, int64_t rows, const float *const *a, float *const *c);

#endif
