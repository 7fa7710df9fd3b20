/*
 * What goes on beside the threads: mbarriers, cp.async and the tensor copies of TMA.
 */
#pragma once

#include <cuda.h>

#include "scheduler.h"

namespace simt {

/* What the emulated cuTensorMapEncodeTiled leaves in a CUtensorMap. */
struct TensorMap {
    uint32_t magic;
    uint8_t rank, element_bytes, swizzle, nan_fill;
    const char *data;
    uint32_t last[5]; /* size of each axis less one */
    uint32_t box[5];
    uint64_t pitch[4]; /* bytes of axes 1, 2, ... */
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "it is kept there");
constexpr uint32_t kTensorMapMagic = 0x7e2501a9;

struct TensorCopy {
    enum { kLoad, kStore, kAdd, kCommit } kind; /* the last one: the end of a group of stores */
    TensorMap map;
    int64_t at[5];
    Block *block;             /* that issued it */
    uint32_t shared, barrier; /* addresses within every block that receives it */
    uint32_t blocks;          /* a bit for each of them */
};

/* A shared address as PTX has it: within the own block, or one that mapa made. */
struct Place {
    Block *block;
    uint32_t address;
};
Place place_of(uint64_t address);
uint64_t remote_address(uint32_t address, uint32_t rank);

/* 16-byte chunks change places within rows of 128 (mode 1), 64 (2) or 32 (3) bytes; 0: none. */
inline uint32_t swizzled(uint32_t address, int mode) {
    const uint32_t bits = mode == 1 ? 7 : mode == 2 ? 3 : mode == 3 ? 1 : 0;
    return address ^ ((address >> 7 & bits) << 4);
}

/* To another block of the cluster, with the mbarrier there that the bytes count on: 16 of st.async, or a copy from the
 * own block's shared memory. */
struct RemoteStore {
    Place to;
    uint32_t barrier;
    uint32_t words[4];
    Place from; /* of a copy; else its block is NULL */
    uint32_t bytes;
};

extern const char *const kWaitsForMBarrier; /* its address and parity, for wait() */

void mbarrier_init(uint32_t address, uint32_t arrivals);
void mbarrier_arrive(Place barrier, int64_t bytes);
void mbarrier_wait(uint32_t address, uint32_t parity);
bool mbarrier_passed(uint32_t address, uint32_t parity); /* without a wait */

void copy_async(const Copy &copy);
void copy_async_wait(size_t groups); /* until at most so many are under way */
void tensor_copy(const TensorCopy &copy);
void tensor_store(const TensorCopy &copy);
void tensor_store_wait(size_t groups); /* until at most so many may still read shared memory */
void store_remote(const RemoteStore &store);

void check_written(Block &block, uint32_t address, uint64_t issued, uint64_t fenced);
void note_written(Block &block, uint32_t address, uint32_t bytes, int32_t by);

/* Lets one thing land that is under way; false when there is none. */
bool land(Cluster &cluster);
void check_exit(Thread &thread);

}  // namespace simt
