/*
 * A hash table in arrays of the caller's: open addressing with linear probing, one thread a key.
 *
 * Threads race for slots; for which row's value a key ends up with they do not: a slot that was free when the call
 * began goes to the lowest row that asked for it, and so does any slot whose value is to be replaced. Three kernels:
 * `mark` notes which slots keep their values, `claim` gives every key a slot and every slot the lowest row, `write`
 * lets those rows store their values. A new table whose values are the numbers of the rows needs one kernel: the value
 * itself is the minimum. Where such a table is larger than L2 it is filled stretch by stretch, of a size that stays
 * there: the keys are read anew for each, in order, which takes less time than each key's own trip to memory.
 *
 *     workspace: owners uint32 (S) | slots int64 (N)
 */
#include <algorithm>

#include "backend.cuh"
#include "coords.cuh"
#include "hash_table.cuh"
#include "voxel_number.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;
constexpr int kKeysPerThread = 16, kKeysAhead = 4; /* of one that looks for those of a stretch */
constexpr uint32_t kFree = ~0u; /* owner of a slot for the taking; rows are counted from 1, so that none precedes 0 */

/* ---- what is looked for ---- */

template <class K>
struct IntegerKeys {
    using Key = K;
    const Key *keys;
    int64_t count;

    IntegerKeys(const fg_tensor &tensor, const int64_t (&)[4])
        : keys(static_cast<const Key *>(tensor.data)), count(tensor.shape[0]) {}

    __device__ bool get(int64_t n, Key *key) const {
        *key = keys[n];
        return true;
    }
};

template <class K>
struct VoxelKeys {
    using Key = K;
    Coords coords;
    VoxelNumbers<Key> number;
    int64_t count;

    VoxelKeys(const fg_tensor &tensor, const int64_t (&shape)[4])
        : coords(tensor), number(shape), count(tensor.shape[0]) {}

    __device__ bool get(int64_t n, Key *key) const {
        const int4 c = coords[n];
        *key = number(c);
        return number.bounds.contain(c);
    }
};

/* The values of a table's slots. */
template <class Value>
struct Values {
    Value *data;
    int64_t stride;

    explicit Values(const fg_tensor &tensor) : data(static_cast<Value *>(tensor.data)), stride(tensor.strides[0]) {}

    __device__ Value *at(int64_t slot) const { return data + slot * stride; }
};

/* ---- kernels ---- */

__device__ int64_t thread_number() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

template <class Key>
__global__ void __launch_bounds__(kThreads) mark_kernel(KeyTable<Key> table, bool replace, uint32_t *owners) {
    const int64_t slot = thread_number();
    if (slot <= table.capacity) owners[slot] = replace || *table.at(slot) == table.kEmpty ? kFree : 0;
}

template <class Source>
__global__ void __launch_bounds__(kThreads)
    claim_kernel(Source source, KeyTable<typename Source::Key> table, uint32_t *owners, int64_t *slots) {
    const int64_t n = thread_number();
    if (n >= source.count) return;
    typename Source::Key key;
    const int64_t slot = source.get(n, &key) ? table.claim(key) : -1;
    slots[n] = slot;
    if (slot >= 0) atomicMin(&owners[slot], static_cast<uint32_t>(n + 1));
}

/* values == NULL: the numbers of the rows. */
template <class Value>
__global__ void __launch_bounds__(kThreads) write_kernel(const int64_t *slots, const uint32_t *owners, int64_t count,
                                                         const Value *values, Values<Value> table_values) {
    const int64_t n = thread_number();
    if (n >= count) return;
    const int64_t slot = slots[n];
    if (slot < 0 || owners[slot] != static_cast<uint32_t>(n + 1)) return;
    *table_values.at(slot) = values ? values[n] : static_cast<Value>(n);
}

/* Keys whose hash has an upper half of [begin, last], and so their slots in one stretch of the table. A warp reads some
 * hundred, several before the first is looked at, and queues those that it wants, so that all of its lanes wait for the
 * trips of a key together. */
template <class Source, class Value>
__global__ void __launch_bounds__(kThreads) number_kernel(Source source, KeyTable<typename Source::Key> table,
                                                          uint32_t begin, uint32_t last, Values<Value> table_values) {
    using Key = typename Source::Key;
    struct Entry {
        Key key;
        int32_t row;
    };
    __shared__ Entry queues[kThreads / 32][2 * 32];
    Entry *const queue = queues[threadIdx.x / 32];
    const int lane = threadIdx.x % 32;
    int queued = 0;
    const auto insert = [&](int entries) {
        if (lane < entries) {
            const int64_t slot = table.claim(queue[lane].key);
            if (slot >= 0) atomicMin(table_values.at(slot), static_cast<Value>(queue[lane].row));
        }
        __syncwarp();
    };
    for (int step = 0; step < kKeysPerThread; step += kKeysAhead) {
        const int64_t n = (static_cast<int64_t>(blockIdx.x) * kKeysPerThread + step) * kThreads + threadIdx.x;
        Key key[kKeysAhead] = {};
        bool exists[kKeysAhead];
#pragma unroll
        for (int i = 0; i < kKeysAhead; ++i)
            exists[i] = n + i * kThreads < source.count && source.get(n + i * kThreads, &key[i]);
#pragma unroll
        for (int i = 0; i < kKeysAhead; ++i) {
            const bool wanted = exists[i] && static_cast<uint32_t>(table.hash(key[i]) >> 32) - begin <= last - begin;
            const uint32_t lanes = __ballot_sync(~0u, wanted);
            if (wanted)
                queue[queued + __popc(lanes & ((1u << lane) - 1))] = {key[i], static_cast<int32_t>(n + i * kThreads)};
            queued += __popc(lanes);
            __syncwarp();
            if (queued < 32) continue;
            insert(32);
            queued -= 32;
            if (lane < queued) queue[lane] = queue[32 + lane];
            __syncwarp();
        }
    }
    insert(queued);
}

template <class Source, class Value>
__global__ void __launch_bounds__(kThreads)
    lookup_kernel(Source source, KeyTable<typename Source::Key> table, Values<const Value> table_values, Value *out) {
    const int64_t n = thread_number();
    if (n >= source.count) return;
    typename Source::Key key;
    const int64_t slot = source.get(n, &key) ? table.find(key) : -1;
    out[n] = slot < 0 ? ~Value{0} : *table_values.at(slot);
}

/* ---- insert ---- */

bool needs_owners(const fg_hash_insert_params &p) { return p.keys.shape[0] > 0 && (!p.clear || p.values.present); }

struct Workspace {
    uint32_t *owners;
    int64_t *slots;
    size_t bytes;

    explicit Workspace(const fg_hash_insert_params &p) {
        const size_t size = static_cast<size_t>(p.table_keys.shape[0]) * sizeof(uint32_t);
        const size_t owner_bytes = ceil_div<size_t>(size, 256) * 256;
        owners = static_cast<uint32_t *>(p.workspace.data);
        slots = reinterpret_cast<int64_t *>(static_cast<char *>(p.workspace.data) + owner_bytes);
        bytes = needs_owners(p) ? owner_bytes + static_cast<size_t>(p.keys.shape[0]) * sizeof(int64_t) : 0;
    }
};

constexpr int64_t kMaxStretches = 16; /* more readings of all keys take as long as their trips to memory */

/* Stretches that L2 can hold one of. */
fg_status stretches_of(size_t table_bytes, int64_t *stretches, fg_error *error) {
    int device = 0, l2_bytes = 0;
    FG_CUDA(cudaGetDevice(&device));
    FG_CUDA(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device));
    const int64_t needed = static_cast<int64_t>(table_bytes) / std::max(l2_bytes, 1) + 1;
    *stretches = std::min(needed, kMaxStretches);
    return FG_OK;
}

template <class Source, class Value>
fg_status insert(const fg_hash_insert_params &p, cudaStream_t stream, fg_error *error) {
    using Key = typename Source::Key;
    const int64_t count = p.keys.shape[0], size = p.table_keys.shape[0];
    const size_t pitch = static_cast<size_t>(p.table_keys.strides[0]) * sizeof(Key);
    const bool joint = pitch > sizeof(Key);
    const KeyTable<Key> table(p.table_keys, p.state);
    const Values<Value> table_values(p.table_values);
    if (p.clear) {
        FG_CUDA(cudaMemsetAsync(table.keys, 0xFF, static_cast<size_t>(size) * pitch, stream));
        if (!joint)
            FG_CUDA(cudaMemsetAsync(table_values.data, 0xFF, static_cast<size_t>(size) * sizeof(Value), stream));
        FG_CUDA(cudaMemsetAsync(table.state, 0, sizeof(KeyTableState), stream));
    }
    if (count == 0) return FG_OK;
    const unsigned int blocks = static_cast<unsigned int>(ceil_div<int64_t>(count, kThreads));
    const Source source(p.keys, p.shape);
    if (!needs_owners(p)) {
        int64_t stretches = 0;
        const size_t slot_bytes = joint ? pitch : sizeof(Key) + sizeof(Value);
        const fg_status status = stretches_of(static_cast<size_t>(size) * slot_bytes, &stretches, error);
        if (status != FG_OK) return status;
        const unsigned int parts = static_cast<unsigned int>(ceil_div<int64_t>(count, kThreads * kKeysPerThread));
        const int64_t hashes = 1ll << 32, step = ceil_div(hashes, stretches);
        for (int64_t begin = 0; begin < hashes; begin += step) {
            const int64_t last = std::min(begin + step, hashes) - 1;
            number_kernel<Source, Value><<<parts, kThreads, 0, stream>>>(source, table, static_cast<uint32_t>(begin),
                                                                         static_cast<uint32_t>(last), table_values);
            FG_CUDA(cudaGetLastError());
        }
        return FG_OK;
    }
    const Workspace workspace(p);
    unsigned int slot_blocks = 0;
    const fg_status status = grid_for(size, kThreads, "table_keys", &slot_blocks, error);
    if (status != FG_OK) return status;
    mark_kernel<Key><<<slot_blocks, kThreads, 0, stream>>>(table, p.replace, workspace.owners);
    FG_CUDA(cudaGetLastError());
    claim_kernel<Source><<<blocks, kThreads, 0, stream>>>(source, table, workspace.owners, workspace.slots);
    FG_CUDA(cudaGetLastError());
    write_kernel<Value><<<blocks, kThreads, 0, stream>>>(workspace.slots, workspace.owners, count,
                                                         static_cast<const Value *>(p.values.data), table_values);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

template <class Source, class Value>
fg_status lookup(const fg_hash_lookup_params &p, cudaStream_t stream, fg_error *error) {
    using Key = typename Source::Key;
    const KeyTable<Key> table(p.table_keys, p.state);
    unsigned int blocks = 0;
    const fg_status status = grid_for(p.keys.shape[0], kThreads, "keys", &blocks, error);
    if (status != FG_OK) return status;
    lookup_kernel<Source, Value><<<blocks, kThreads, 0, stream>>>(
        Source(p.keys, p.shape), table, Values<const Value>(p.table_values), static_cast<Value *>(p.out.data));
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

/* Calls the instance for the kind and width of keys and the width of values. */
template <class Params, class Call>
fg_status dispatch(const Params &p, const Call &call) {
    const bool voxels = p.keys.ndim == 2, narrow = p.table_keys.dtype == FG_INT32;
    if (voxels)
        return narrow ? call(static_cast<VoxelKeys<uint32_t> *>(nullptr))
                      : call(static_cast<VoxelKeys<Word> *>(nullptr));
    return narrow ? call(static_cast<IntegerKeys<uint32_t> *>(nullptr))
                  : call(static_cast<IntegerKeys<Word> *>(nullptr));
}

}  // namespace

fg_status hash_insert_workspace(const fg_hash_insert_params *p, const fg_queue *, size_t *bytes, fg_error *) {
    *bytes = Workspace(*p).bytes;
    return FG_OK;
}

fg_status hash_insert(const fg_hash_insert_params *p, const fg_queue *queue, fg_error *error) {
    if (p->keys.shape[0] >= INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "keys: expected fewer than %lld, got %lld",
                       static_cast<long long>(INT32_MAX), static_cast<long long>(p->keys.shape[0]));
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    return dispatch(*p, [&](auto *source) {
        using Source = std::remove_pointer_t<decltype(source)>;
        return p->table_values.dtype == FG_INT32 ? insert<Source, uint32_t>(*p, stream_of(queue), error)
                                                 : insert<Source, Word>(*p, stream_of(queue), error);
    });
}

fg_status hash_lookup(const fg_hash_lookup_params *p, const fg_queue *queue, fg_error *error) {
    if (p->keys.shape[0] == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    return dispatch(*p, [&](auto *source) {
        using Source = std::remove_pointer_t<decltype(source)>;
        return p->table_values.dtype == FG_INT32 ? lookup<Source, uint32_t>(*p, stream_of(queue), error)
                                                 : lookup<Source, Word>(*p, stream_of(queue), error);
    });
}

}  // namespace flexgemm
