/*
 * The only inline assembly of the project: thin, named wrappers around single PTX instructions. Fragment layouts are
 * those of the PTX ISA, section "Matrix fragments for mma"; lane = threadIdx.x % 32, group = lane / 4,
 * thread_in_group = lane % 4.
 */
#pragma once

#include <cstdint>

namespace ptx {

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/* Keeps a sum in one register: the compiler would add its terms to each address that is made from it. */
__device__ __forceinline__ void hold(uint64_t &sum) { asm("" : "+l"(sum)); }

/* 2^x and 1 / x, to about 2^-22 of them; subnormal numbers are zeros. */
__device__ __forceinline__ float exp2(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ float reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

/* Asynchronous 16-byte copy global -> shared, L2 only. Copies `valid` ? 16 : 0 bytes and fills the rest with zeros;
 * the source is not read when nothing is copied. */
__device__ __forceinline__ void cp_async_16(void *shared, const void *global, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}

/* 16 bytes, or zeros without reading the source. What surrounds the source is brought into L2 as well. */
__device__ __forceinline__ void cp_async_16_or_zeros(void *shared, const void *global, bool zeros) {
    asm volatile(
        "{\n\t"
        ".reg .pred zeros;\n\t"
        "setp.ne.b32 zeros, %2, 0;\n\t"
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, zeros;\n\t"
        "}" ::"r"(shared_address(shared)),
        "l"(global), "r"(static_cast<int>(zeros))
        : "memory");
}

/* The same through L1, for rows that the CTA soon asks for again. */
__device__ __forceinline__ void cp_async_16_or_zeros_cached(void *shared, const void *global, bool zeros) {
    asm volatile(
        "{\n\t"
        ".reg .pred zeros;\n\t"
        "setp.ne.b32 zeros, %2, 0;\n\t"
        "cp.async.ca.shared.global.L2::128B [%0], [%1], 16, zeros;\n\t"
        "}" ::"r"(shared_address(shared)),
        "l"(global), "r"(static_cast<int>(zeros))
        : "memory");
}

/* Brings the line of 128 bytes into L2, if it is not there, and waits for nothing. */
__device__ __forceinline__ void prefetch_l2(const void *global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
}

/* Asynchronous 4-byte copy global -> shared. */
__device__ __forceinline__ void cp_async_4(void *shared, const void *global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

/* The same, or a zero without reading the source. */
__device__ __forceinline__ void cp_async_4_or_zero(void *shared, const void *global, bool zero) {
    asm volatile(
        "{\n\t"
        ".reg .pred zero;\n\t"
        "setp.ne.b32 zero, %2, 0;\n\t"
        "cp.async.ca.shared.global.L2::128B [%0], [%1], 4, zero;\n\t"
        "}" ::"r"(shared_address(shared)),
        "l"(global), "r"(static_cast<int>(zero))
        : "memory");
}

/* 16 bytes, of which the first `bytes` (0 to 16) are copied: the ragged end of a row. */
__device__ __forceinline__ void cp_async_16_partial(void *shared, const void *global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Waits until at most `Pending` of this thread's committed groups are in flight. */
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/* Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8. */
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/* The same way back. */
__device__ __forceinline__ void stmatrix_x4(void *row, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(void *row, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* D += A.B, A 16x16 row, B 16x8 column, float32 accumulators. */
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* D += A.B, A 16x8 row, B 8x8 column, tf32 operands (float32 bits whose low 13 bits the hardware ignores). */
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* D += A.B, A 16x32 row, B 32x8 column, fp8 operands in any mix; sm_89 and later, a trap before. */
template <bool kAIsE5m2, bool kBIsE5m2>
__device__ __forceinline__ void mma_fp8(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    if constexpr (!kAIsE5m2 && !kBIsE5m2) {
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else if constexpr (!kAIsE5m2 && kBIsE5m2) {
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else if constexpr (kAIsE5m2 && !kBIsE5m2) {
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
            "{%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
#else
    asm volatile("trap;");
#endif
}

/* float32 -> tf32, round to nearest. */
__device__ __forceinline__ uint32_t to_tf32(float x) {
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
}

/* ---- Hopper (sm_90a): mbarrier, bulk tensor copies (TMA), warpgroup MMA, register reallocation ---- */

__device__ __forceinline__ void mbarrier_init(uint64_t *barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

/* Makes initialised barriers visible to the copy engine. */
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* Arrives, and adds `bytes` that copies must deliver before the phase completes. */
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

/* Arrives once this thread's cp.async so far have landed; one of the arrivals that the barrier was initialised for. */
__device__ __forceinline__ void mbarrier_arrive_after_cp_async(uint64_t *barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* Waits for the end of the phase of that parity; the phase before the first counts as one of parity 1 that is over. */
__device__ __forceinline__ void mbarrier_wait_parity(uint64_t *barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

/* Whether the phase of that parity has ended, without waiting for it. */
__device__ __forceinline__ bool mbarrier_test_parity(uint64_t *barrier, uint32_t parity) {
    uint32_t ended;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(ended)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return ended != 0;
}

/* mbarrier_wait_parity where other blocks of the cluster complete the phase. */
__device__ __forceinline__ void mbarrier_wait_cluster(uint64_t *barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

/* Fetches the 128-byte descriptor ahead of its first use. */
__device__ __forceinline__ void prefetch_tensor_map(const void *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Box at element coordinates (x innermost, a multiple of 16 bytes: any other is an illegal instruction) -> shared
 * memory; its bytes count on `barrier`. Coordinates may lie outside the tensor: what is outside arrives as zeros. */
__device__ __forceinline__ void tma_load_3d(void *shared, const void *map, uint64_t *barrier, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(shared_address(shared)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

/* Asks L2 for the box. */
__device__ __forceinline__ void tma_prefetch_3d(const void *map, int x, int y, int z) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y),
                 "r"(z)
                 : "memory");
}

/* How L2 keeps what is read once: such lines are the first that make room, one for another. What was written before and
 * waits in L2 for its way to memory is not driven out by them, which would take as many bytes of the memory's time. */
__device__ __forceinline__ uint64_t l2_evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    return policy;
}

/* tma_load_3d of what L2 keeps by that policy. */
__device__ __forceinline__ void tma_load_3d(void *shared, const void *map, uint64_t *barrier, int x, int y, int z,
                                            uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(shared)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "l"(policy)
        : "memory");
}

/* The same box to the same place of every block of the cluster in `blocks` (a bit each), each counting on its own
 * barrier. */
__device__ __forceinline__ void tma_load_3d_multicast(void *shared, const void *map, uint64_t *barrier, int x, int y,
                                                      int z, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(shared)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(blocks)
        : "memory");
}

/* Shared memory -> box at element coordinates, as the copies above but the other way; what lies outside the tensor is
 * not written. The copy reads what was stored before fence_proxy_async, and is part of this thread's next group. */
__device__ __forceinline__ void tma_store_3d(const void *map, const void *shared, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(shared_address(shared)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

/* The same, but added to what is there. */
__device__ __forceinline__ void tma_add_3d(const void *map, const void *shared, int x, int y, int z) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
        "r"(shared_address(shared)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ __forceinline__ void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/* Waits until at most `Pending` of this thread's committed groups still read shared memory. */
template <int Pending>
__device__ __forceinline__ void tma_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

/* Waits until all of this thread's committed groups have been written. */
__device__ __forceinline__ void tma_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ uint32_t cluster_block_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* In a launch that may begin before the kernels in front of it have ended: waits until they have, and what they wrote
 * is visible. In any other, and before sm_90, it returns at once. */
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* When all blocks of a kernel have said so or ended, the launch behind it may begin, if it is one that may: blocks of
 * both share the multiprocessors then. */
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* All threads of all blocks of the cluster. */
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* The same in two halves, between which a thread goes on. Of what was done before it, it orders initialised barriers
 * (fence_mbarrier_init) and nothing else. */
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/* Arrives at the same barrier of another block of the cluster. Orders no other memory access: release at cluster scope
 * would be a full memory barrier each time. */
__device__ __forceinline__ void mbarrier_arrive_remote(uint64_t *barrier, uint32_t block) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(block)
        : "memory");
}

/* Where another block of the cluster has what `shared` is in this one. */
__device__ __forceinline__ uint32_t remote_address(const void *shared, uint32_t block) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(shared)), "r"(block));
    return remote;
}

/* Four floats to the place in another block of the cluster that `shared` is in this one; they count as 16 bytes on
 * `barrier` there, and who has waited for it by mbarrier_wait_cluster sees them. */
__device__ __forceinline__ void store_remote(float *shared, const float (&value)[4], uint64_t *barrier,
                                             uint32_t block) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(
            remote_address(shared, block)),
        "r"(remote_address(barrier, block)), "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3])
        : "memory");
}

/* Bytes of shared memory, a multiple of 16, to the place in another block of the cluster that `to` is in this one; they
 * count on `barrier` there. The copy reads what was stored before fence_proxy_async. */
__device__ __forceinline__ void copy_remote(void *to, const void *from, uint32_t bytes, uint64_t *barrier,
                                            uint32_t block) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     remote_address(to, block)),
                 "r"(shared_address(from)), "r"(bytes), "r"(remote_address(barrier, block))
                 : "memory");
}

/* Orders this thread's view of shared memory (ordinary stores and cp.async that it has waited for) before later reads
 * by wgmma and the copy engine. */
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* Barrier 1..15 among `threads` threads of the CTA (0 is __syncthreads). */
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Arrives without waiting: the others' named_barrier counts it. */
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Registers that each thread of a block has at launch when `blocks` of them are to fit a multiprocessor: all that
 * setmaxnreg can divide anew. A warpgroup that takes more than others gave back waits for ever. */
constexpr int registers_at_launch(int threads, int blocks = 1) { return 65536 / (threads * blocks) / 8 * 8; }

/* The same value, but not to the compiler's knowledge: what follows from it is computed where it stands, and does not
 * hold registers in a loop before it. */
__device__ __forceinline__ int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

template <typename T>
__device__ __forceinline__ T *opaque(T *pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
}

/* A value that all lanes of a warp have, in a uniform register: so is what follows from it alone. A loop that such
 * values control needs no others for its counters and addresses. */
__device__ __forceinline__ uint32_t uniform(uint32_t value) { return __reduce_max_sync(0xffffffffu, value); }

__device__ __forceinline__ int uniform(int value) { return static_cast<int>(uniform(static_cast<uint32_t>(value))); }

/* Gives registers back to the pool, or takes more from it; the whole warpgroup together. */
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

constexpr int kWarpgroup = 128; /* threads */

/* True in one thread of a warp that is all here, the same one each time. The compiler knows that it is one: what the
 * copy engine is told goes into uniform registers as it is, where another condition takes a loop over lanes. It stands
 * first in a condition of several: behind another one, the compiler makes that loop again. */
__device__ __forceinline__ bool elect() {
    uint32_t elected;
    asm volatile("{\n.reg .pred elected;\nelect.sync _|elected, 0xffffffff;\nselp.u32 %0, 1, 0, elected;\n}\n"
                 : "=r"(elected));
    return elected != 0;
}

/* Orders register accesses before the wgmma that follow. */
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/* Waits until at most `Pending` committed groups are in flight. */
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/* Pins accumulators: no use of them moves across this point, such as from behind a wait to before it. */
template <int kCount>
__device__ __forceinline__ void wgmma_hold(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/* The same for operands in registers, which nothing else may use until the wait. */
template <int kCount>
__device__ __forceinline__ void wgmma_hold(uint32_t (&a)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

/* Descriptor of rows of 128 bytes of K in shared memory, swizzled as TMA's 128-byte mode does, the first of them at a
 * multiple of 1024 bytes. Eight rows are one swizzle atom of 1024 bytes (the stride); the leading offset has no meaning
 * within an atom. Adding n moves 16 n bytes along K. Transposed, a row is 64 elements of M or N, and K runs from row to row;
 * `leading_bytes` lie between one block of 64 and the next. */
__device__ __forceinline__ uint64_t wgmma_descriptor(const void *shared, uint32_t leading_bytes = 16) {
    constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kStride = uint64_t{1024 / 16} << 32;
    const uint64_t leading = static_cast<uint64_t>(leading_bytes / 16) << 16;
    return kSwizzle128 | kStride | leading | ((shared_address(shared) & 0x3ffffu) >> 4);
}

/* The descriptor of what lies `bytes` (a multiple of 16) behind. Only its lower word changes: the upper one stays a
 * constant, which needs no register. */
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t descriptor, int bytes) {
    return (descriptor >> 32 << 32) | (static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes / 16));
}

/* Pins a descriptor: it is made here, not where it is used. */
__device__ __forceinline__ void wgmma_hold(uint64_t &descriptor) {
    uint32_t low = static_cast<uint32_t>(descriptor);
    asm volatile("" : "+r"(low));
    descriptor = (descriptor >> 32 << 32) | low;
}

/* The same of a warp in uniform registers, where wgmma wants it. */
__device__ __forceinline__ uint64_t wgmma_uniform(uint64_t descriptor) {
    return (descriptor >> 32 << 32) | uniform(static_cast<uint32_t>(descriptor));
}

/* D = A.B^T, or D += A.B^T when `accumulate`: 64 rows of A and 8, 24 or a multiple of 16 up to 256 of B
 * (overloads), 32 bytes of K, float32 accumulators. Warp w of the warpgroup holds rows 16 w .. 16 w + 15, each thread
 * d[4 j + 2 half + i] = row group + 8 half, column 8 j + 2 thread_in_group + i. _km: A lies transposed, K x M; _kn: B
 * does, K x N. FG_LIST_n: the names of n sums, FG_SUMS_n: themselves; FG_WGMMA_OF is told the numbers of the operands
 * behind them. */
#define FG_LIST_4 "%0, %1, %2, %3"
#define FG_LIST_8 FG_LIST_4 ", %4, %5, %6, %7"
#define FG_LIST_12 FG_LIST_8 ", %8, %9, %10, %11"
#define FG_LIST_16 FG_LIST_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FG_LIST_24 FG_LIST_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FG_LIST_32 FG_LIST_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FG_LIST_40 FG_LIST_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FG_LIST_48 FG_LIST_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FG_LIST_56 FG_LIST_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FG_LIST_64 FG_LIST_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FG_LIST_72 FG_LIST_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FG_LIST_80 FG_LIST_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FG_LIST_88 FG_LIST_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FG_LIST_96 FG_LIST_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FG_LIST_104 FG_LIST_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FG_LIST_112 FG_LIST_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FG_LIST_120 FG_LIST_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FG_LIST_128 FG_LIST_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define FG_FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FG_SUMS_4(d) FG_FOUR(d, 0)
#define FG_SUMS_8(d) FG_SUMS_4(d), FG_FOUR(d, 4)
#define FG_SUMS_12(d) FG_SUMS_8(d), FG_FOUR(d, 8)
#define FG_SUMS_16(d) FG_SUMS_8(d), FG_FOUR(d, 8), FG_FOUR(d, 12)
#define FG_SUMS_24(d) FG_SUMS_16(d), FG_FOUR(d, 16), FG_FOUR(d, 20)
#define FG_SUMS_32(d) FG_SUMS_24(d), FG_FOUR(d, 24), FG_FOUR(d, 28)
#define FG_SUMS_40(d) FG_SUMS_32(d), FG_FOUR(d, 32), FG_FOUR(d, 36)
#define FG_SUMS_48(d) FG_SUMS_40(d), FG_FOUR(d, 40), FG_FOUR(d, 44)
#define FG_SUMS_56(d) FG_SUMS_48(d), FG_FOUR(d, 48), FG_FOUR(d, 52)
#define FG_SUMS_64(d) FG_SUMS_56(d), FG_FOUR(d, 56), FG_FOUR(d, 60)
#define FG_SUMS_72(d) FG_SUMS_64(d), FG_FOUR(d, 64), FG_FOUR(d, 68)
#define FG_SUMS_80(d) FG_SUMS_72(d), FG_FOUR(d, 72), FG_FOUR(d, 76)
#define FG_SUMS_88(d) FG_SUMS_80(d), FG_FOUR(d, 80), FG_FOUR(d, 84)
#define FG_SUMS_96(d) FG_SUMS_88(d), FG_FOUR(d, 88), FG_FOUR(d, 92)
#define FG_SUMS_104(d) FG_SUMS_96(d), FG_FOUR(d, 96), FG_FOUR(d, 100)
#define FG_SUMS_112(d) FG_SUMS_104(d), FG_FOUR(d, 104), FG_FOUR(d, 108)
#define FG_SUMS_120(d) FG_SUMS_112(d), FG_FOUR(d, 112), FG_FOUR(d, 116)
#define FG_SUMS_128(d) FG_SUMS_120(d), FG_FOUR(d, 120), FG_FOUR(d, 124)
#define FG_WGMMA_OF(name, kind, tail, columns, count, a_, b_, accumulate_)                                             \
    __device__ __forceinline__ void name(float (&d)[count], uint64_t a, uint64_t b, int accumulate) {                  \
        asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #accumulate_                               \
                     ", 0;\n"                                                                                          \
                     "wgmma.mma_async.sync.aligned.m64n" #columns kind " {" FG_LIST_##count                            \
                     "}, %" #a_ ", %" #b_ ", accumulate, 1, 1" tail ";\n}\n"                                           \
                     : FG_SUMS_##count(d)                                                                              \
                     : "l"(a), "l"(b), "r"(accumulate));                                                               \
    }
#define FG_WGMMA(name, kind, tail)                                                                                     \
    FG_WGMMA_OF(name, kind, tail, 8, 4, 4, 5, 6)                                                                       \
    FG_WGMMA_OF(name, kind, tail, 16, 8, 8, 9, 10)                                                                     \
    FG_WGMMA_OF(name, kind, tail, 24, 12, 12, 13, 14)                                                                  \
    FG_WGMMA_OF(name, kind, tail, 32, 16, 16, 17, 18)                                                                  \
    FG_WGMMA_OF(name, kind, tail, 48, 24, 24, 25, 26)                                                                  \
    FG_WGMMA_OF(name, kind, tail, 64, 32, 32, 33, 34)                                                                  \
    FG_WGMMA_OF(name, kind, tail, 80, 40, 40, 41, 42)                                                                  \
    FG_WGMMA_OF(name, kind, tail, 96, 48, 48, 49, 50)                                                                  \
    FG_WGMMA_OF(name, kind, tail, 112, 56, 56, 57, 58)                                                                 \
    FG_WGMMA_OF(name, kind, tail, 128, 64, 64, 65, 66)                                                                 \
    FG_WGMMA_OF(name, kind, tail, 144, 72, 72, 73, 74)                                                                 \
    FG_WGMMA_OF(name, kind, tail, 160, 80, 80, 81, 82)                                                                 \
    FG_WGMMA_OF(name, kind, tail, 176, 88, 88, 89, 90)                                                                 \
    FG_WGMMA_OF(name, kind, tail, 192, 96, 96, 97, 98)                                                                 \
    FG_WGMMA_OF(name, kind, tail, 208, 104, 104, 105, 106)                                                             \
    FG_WGMMA_OF(name, kind, tail, 224, 112, 112, 113, 114)                                                             \
    FG_WGMMA_OF(name, kind, tail, 240, 120, 120, 121, 122)                                                             \
    FG_WGMMA_OF(name, kind, tail, 256, 128, 128, 129, 130)

FG_WGMMA(wgmma_f16, "k16.f32.f16.f16", ", 0, 0")
FG_WGMMA(wgmma_bf16, "k16.f32.bf16.bf16", ", 0, 0")
FG_WGMMA(wgmma_f16_km, "k16.f32.f16.f16", ", 1, 0")
FG_WGMMA(wgmma_bf16_km, "k16.f32.bf16.bf16", ", 1, 0")
FG_WGMMA(wgmma_f16_kn, "k16.f32.f16.f16", ", 0, 1")
FG_WGMMA(wgmma_bf16_kn, "k16.f32.bf16.bf16", ", 0, 1")
FG_WGMMA(wgmma_f16_km_kn, "k16.f32.f16.f16", ", 1, 1")
FG_WGMMA(wgmma_bf16_km_kn, "k16.f32.bf16.bf16", ", 1, 1")
FG_WGMMA(wgmma_tf32, "k8.f32.tf32.tf32", "")
FG_WGMMA(wgmma_e4m3_e4m3, "k32.f32.e4m3.e4m3", "")
FG_WGMMA(wgmma_e4m3_e5m2, "k32.f32.e4m3.e5m2", "")
FG_WGMMA(wgmma_e5m2_e4m3, "k32.f32.e5m2.e4m3", "")
FG_WGMMA(wgmma_e5m2_e5m2, "k32.f32.e5m2.e5m2", "")

/* The same with A in registers, which keep their values until the product has been waited for: a[2 step + half] is row
 * group + 8 half, word thread_in_group + 4 step of K. */
#define FG_WGMMA_REGISTERS_OF(name, kind, tail, columns, count, a_0, a_1, a_2, a_3, b_, accumulate_)                   \
    __device__ __forceinline__ void name(float (&d)[count], const uint32_t (&a)[4], uint64_t b, int accumulate) {      \
        asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #accumulate_                               \
                     ", 0;\n"                                                                                          \
                     "wgmma.mma_async.sync.aligned.m64n" #columns kind " {" FG_LIST_##count                            \
                     "}, {%" #a_0 ", %" #a_1 ", %" #a_2 ", %" #a_3 "}, %" #b_ ", accumulate, 1, 1" tail ";\n}\n"       \
                     : FG_SUMS_##count(d)                                                                              \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                           \
    }
#define FG_WGMMA_REGISTERS(name, kind, tail)                                                                           \
    FG_WGMMA_REGISTERS_OF(name, kind, tail, 32, 16, 16, 17, 18, 19, 20, 21)                                            \
    FG_WGMMA_REGISTERS_OF(name, kind, tail, 64, 32, 32, 33, 34, 35, 36, 37)                                            \
    FG_WGMMA_REGISTERS_OF(name, kind, tail, 128, 64, 64, 65, 66, 67, 68, 69)
FG_WGMMA_REGISTERS(wgmma_f16_from_registers, "k16.f32.f16.f16", ", 0")
FG_WGMMA_REGISTERS(wgmma_bf16_from_registers, "k16.f32.bf16.bf16", ", 0")
FG_WGMMA_REGISTERS(wgmma_f16_kn_from_registers, "k16.f32.f16.f16", ", 1")
FG_WGMMA_REGISTERS(wgmma_bf16_kn_from_registers, "k16.f32.bf16.bf16", ", 1")
FG_WGMMA_REGISTERS(wgmma_tf32_from_registers, "k8.f32.tf32.tf32", "")

#undef FG_WGMMA
#undef FG_WGMMA_OF
#undef FG_WGMMA_REGISTERS
#undef FG_WGMMA_REGISTERS_OF

}  // namespace ptx
