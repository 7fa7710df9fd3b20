/*
 * Matrix instructions: ldmatrix, mma.sync and wgmma. Products of 8- and 16-bit and tf32 numbers are exact in
 * float32; sums are kept in float32.
 */
#pragma once

#include "ptx.h"
#include "scheduler.h"

namespace simt {

/* One warp's share of a wgmma.mma_async: 16 rows of A. */
struct Wgmma {
    const Instruction *instruction;
    float *sums[32]; /* each lane's first accumulator */
    uint64_t a, b;   /* descriptors */
    bool holds;      /* A comes in registers: its 16 rows of k */
    float held[16 * 32];
    bool accumulate, done;
    uint64_t group, issued, fenced; /* times */
};

/* Accumulators between the first wgmma that adds to them and the wait for the last. */
struct Sums {
    std::vector<float> value; /* 16 rows of n */
    std::vector<float> left;  /* as the last wait left them */
    int pending = 0;
    uint64_t fences = 0; /* at that time */
};

struct WgmmaQueue {
    std::vector<Wgmma> products;
    uint64_t groups = 0; /* committed */
    uint64_t fences = 0; /* wgmma.fence so far */
    uint64_t count = 0;  /* products so far */
    std::unordered_map<const float *, Sums> sums;
};

void load_matrices(Frame *const *lanes, const Instruction &instruction);
void store_matrices(Frame *const *lanes, const Instruction &instruction);
void multiply(Frame *const *lanes, const Instruction &instruction);
void wgmma_fence(Frame *const *lanes, const Instruction &instruction);
void wgmma_multiply(Frame *const *lanes, const Instruction &instruction);
void wgmma_commit(Frame *const *lanes, const Instruction &instruction);
void wgmma_wait(Frame *const *lanes, const Instruction &instruction);

}  // namespace simt
