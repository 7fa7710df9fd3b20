/* Packing of operands into panels, and the loop over panels of one product. */
#include "tile.h"

#include <string.h>

fg_packing fg_packing_of(const fg_simd *simd, int64_t k, int64_t n) {
    fg_packing packing = {.k = k, .n = n};
    packing.padded_n = fg_ceil_div(n, simd->lanes) * simd->lanes;
    packing.panels = fg_ceil_div(n, simd->panel);
    packing.blocks = fg_ceil_div(k, FG_BLOCK_K);
    packing.block_k = packing.blocks > 0 ? fg_ceil_div(k, packing.blocks) : 0;
    return packing;
}

/* All panels before column j of a block are full, so the panel at j starts after k * j floats. */
static int64_t panel_start(const fg_packing *packing, int64_t block, int64_t j) {
    return block * packing->block_k * packing->padded_n + fg_block_rows(packing, block) * j;
}

void fg_pack_panel(const fg_simd *simd, const fg_packing *packing, const fg_operand *operand, int64_t block,
                   int64_t panel, float *packed) {
    const int64_t k = fg_block_rows(packing, block), j = panel * simd->panel;
    const int64_t columns = fg_min(simd->panel, packing->n - j), width = fg_min(simd->panel, packing->padded_n - j);
    const int64_t size = (int64_t)fg_dtype_size(operand->dtype);
    const int64_t k_bytes = operand->k_stride * size, n_bytes = operand->n_stride * size;
    const char *source = (const char *)operand->data + block * packing->block_k * k_bytes + j * n_bytes;
    float *target = packed + panel_start(packing, block, j);

    if (columns < width) memset(target, 0, (size_t)(k * width) * sizeof(float));
    if (operand->n_stride == 1) {
        for (int64_t p = 0; p < k; p++)
            simd->to_float[operand->dtype](target + p * width, source + p * k_bytes, columns);
    } else {
        float column[FG_BLOCK_K];
        for (int64_t i = 0; i < columns; i++) {
            simd->to_float[operand->dtype](column, source + i * n_bytes, k);
            for (int64_t p = 0; p < k; p++) target[p * width + i] = column[p];
        }
    }
}

void fg_multiply_block(const fg_simd *simd, const fg_packing *packing, const float *packed, int64_t block,
                       int64_t n_begin, int64_t n, int64_t rows, const float *const *a, float *const *c) {
    const int64_t k = fg_block_rows(packing, block);
    for (int64_t j = n_begin; j < n_begin + n; j += simd->panel) {
        const int64_t width = fg_min(simd->panel, packing->padded_n - j);
        simd->multiply(rows, k, width, a, packed + panel_start(packing, block, j), c, j - n_begin);
    }
}
