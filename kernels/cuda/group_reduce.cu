/*
 * Entries of an index list grouped by the row that they name, and sums and maxima over such groups, in a fixed order.
 *
 * Groups are found by CUB's stable radix sort and a binary search for each row. A group of lanes reduces one group of
 * entries, one after the other. Groups of more than kLong entries would keep it busy long after the others are done:
 * those are cut where the list of entries passes multiples of kLong, and their parts meet in the order of the list. A
 * stretch of kLong entries holds parts of two long groups at most: of the one that its first entry belongs to, and of
 * the one that its last entry does.
 *
 *     workspace of group_rows:   keys (P) | sorted keys (P) | positions (P) | what CUB needs
 *     workspace of group_reduce: parts (stretches, 2, C)
 */
#include "backend.cuh"
#include "common.cuh"
#include "lanes.cuh"
#include "sort_pairs.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;
constexpr int kLong = 512;
constexpr int kAhead = 4; /* rows that are on their way while the ones before are added */
constexpr size_t kAlignment = 256;

/* ---- groups ---- */

__global__ void __launch_bounds__(kThreads)
    key_kernel(const int32_t *indices, int64_t count, int64_t rows, uint32_t *keys) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= count) return;
    const int32_t row = indices[i];
    keys[i] = static_cast<uint32_t>(row >= 0 && row < rows ? row : rows);
}

/* The first position whose key is not below `key`. */
__device__ int64_t lower_bound(const uint32_t *keys, int64_t count, uint32_t key) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (keys[middle] < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

__global__ void __launch_bounds__(kThreads)
    start_kernel(const uint32_t *sorted, int64_t count, int32_t *starts, int64_t size) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (row < size) starts[row] = static_cast<int32_t>(lower_bound(sorted, count, static_cast<uint32_t>(row)));
}

struct RowsWorkspace {
    uint32_t *keys, *sorted;
    int32_t *positions;
    void *sort;
    size_t bytes;

    RowsWorkspace(const fg_group_rows_params &p, size_t sort_bytes) {
        const size_t array =
            ceil_div(static_cast<size_t>(p.order.shape[0]) * sizeof(uint32_t), kAlignment) * kAlignment;
        char *at = static_cast<char *>(p.workspace.data);
        keys = reinterpret_cast<uint32_t *>(at);
        sorted = reinterpret_cast<uint32_t *>(at + array);
        positions = reinterpret_cast<int32_t *>(at + 2 * array);
        sort = at + 3 * array;
        bytes = 3 * array + sort_bytes;
    }
};

/* Keys are rows, and one more for entries that are none. */
int key_bits(const fg_group_rows_params &p) {
    int bits = 1;
    while ((p.starts.shape[0] - 1) >> bits) ++bits;
    return bits;
}

/* With temporary == NULL it only tells the bytes that it needs there. */
cudaError_t sort_entries(const fg_group_rows_params &p, const RowsWorkspace &workspace, void *temporary, size_t *bytes,
                         cudaStream_t stream) {
    return sort_pairs(temporary, bytes, workspace.keys, workspace.sorted, workspace.positions,
                      static_cast<int32_t *>(p.order.data), p.order.shape[0], key_bits(p), stream);
}

/* ---- reduction ---- */

struct Sum {
    float value = 0.0f;

    __device__ void add(float term, int32_t) { value += term; }
    __device__ void add(const Sum &other) { value += other.value; }
    __device__ int32_t row() const { return -1; }
};

/* Of equal terms the first stays. */
struct Maximum {
    float value = 0.0f;
    int32_t source = -1;

    __device__ void add(float term, int32_t from) {
        if (source >= 0 && !(term > value) && !(isnan(term) && !isnan(value))) return;
        value = term;
        source = from;
    }
    __device__ void add(const Maximum &other) {
        if (other.source >= 0) add(other.value, other.source);
    }
    __device__ int32_t row() const { return source; }
};

/* Quotients of numbers below 2^31 by one divisor: a product with 2^(31 + bits) / divisor, rounded up, where 2^bits is
 * not below the divisor. */
struct Divisor {
    uint32_t factor;
    int shift;

    explicit Divisor(uint32_t divisor) : factor(0), shift(31) {
        while (uint64_t{1} << (shift - 31) < divisor) ++shift;
        factor = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);
    }
    __device__ uint32_t quotient(uint32_t number) const {
        return static_cast<uint32_t>(static_cast<uint64_t>(number) * factor >> shift);
    }
};

template <class T>
struct Problem {
    RowsOf<const T> src;
    RowsOf<T> out;
    const int32_t *order, *starts;
    const float *weights;
    int32_t *argmax;
    uint32_t entries; /* below 2^31 */
    Divisor terms;    /* entries of a row of src */
    bool mean;

    explicit Problem(const fg_group_reduce_params &p)
        : src(p.src),
          out(p.out),
          order(static_cast<const int32_t *>(p.order.data)),
          starts(static_cast<const int32_t *>(p.starts.data)),
          weights(static_cast<const float *>(p.weights.data)),
          argmax(static_cast<int32_t *>(p.argmax.data)),
          entries(static_cast<uint32_t>(p.order.shape[0])),
          terms(p.order.shape[0] > 0 ? static_cast<uint32_t>(p.order.shape[0] / p.src.shape[0]) : 1),
          mean(p.mode == FG_POOL_MEAN) {}

    /* Nothing past the entries, whatever the starts say. */
    __device__ int64_t start(int64_t group) const {
        const int64_t at = starts[group];
        return at < 0 ? 0 : at < entries ? at : entries;
    }

    /* The last group that begins at or before a position: the one that it belongs to. */
    __device__ int64_t group_of(int64_t position) const {
        int64_t low = 0, high = out.rows - 1;
        while (low < high) {
            const int64_t middle = (low + high + 1) / 2;
            if (starts[middle] <= position)
                low = middle;
            else
                high = middle - 1;
        }
        return low;
    }

    template <int kVector, class Reduction>
    __device__ void reduce(Reduction (&result)[kVector], uint32_t begin, uint32_t end, int64_t c) const {
        const char *const column = reinterpret_cast<const char *>(src.data + c);
        const int64_t pitch = src.stride * static_cast<int64_t>(sizeof(T));
        for (uint32_t i = begin; i < end; i += kAhead) {
            Vector<T, kVector> piece[kAhead];
            float weight[kAhead];
            uint32_t entry[kAhead], row[kAhead];
#pragma unroll
            for (int k = 0; k < kAhead; ++k) entry[k] = i + k < end ? static_cast<uint32_t>(order[i + k]) : ~0u;
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
                row[k] = terms.quotient(entry[k]);
                weight[k] = 1.0f;
                if (entry[k] >= entries) continue;
                piece[k] = *reinterpret_cast<const Vector<T, kVector> *>(column + row[k] * pitch);
                if (weights) weight[k] = weights[entry[k]];
            }
#pragma unroll
            for (int k = 0; k < kAhead; ++k) {
                if (entry[k] >= entries) continue;
#pragma unroll
                for (int j = 0; j < kVector; ++j)
                    result[j].add(weight[k] * to_float(piece[k].element[j]), static_cast<int32_t>(row[k]));
            }
        }
    }

    template <int kVector, class Reduction>
    __device__ void write(const Reduction (&result)[kVector], int64_t group, int64_t size, int64_t c) const {
        float value[kVector];
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
            value[j] = mean && size > 0 ? result[j].value / static_cast<float>(size) : result[j].value;
            if (argmax) argmax[group * out.columns + c + j] = result[j].row();
        }
        store_piece(out.row(group) + c, value);
    }
};

template <class Reduction, int kVector, class T>
__global__ void __launch_bounds__(kLaneThreads) short_group_kernel(Problem<T> p, int log_lanes) {
    const LaneGroup lanes(log_lanes);
    const int64_t group = lanes.number;
    if (group >= p.out.rows) return;
    const int64_t begin = p.start(group), end = p.start(group + 1);
    if (end - begin > kLong) return;
    for (int64_t c = lanes.lane * kVector; c < p.out.columns; c += lanes.lanes * kVector) {
        Reduction result[kVector];
        p.reduce(result, begin, end, c);
        p.write(result, group, end - begin, c);
    }
}

/* One group of lanes a stretch of the entries: its parts of long groups. */
template <class Reduction, int kVector, class T>
__global__ void __launch_bounds__(kLaneThreads) part_kernel(Problem<T> p, Reduction *parts, int log_lanes) {
    const LaneGroup lanes(log_lanes);
    const int64_t first = lanes.number * kLong;
    if (first >= p.entries) return;
    const int64_t last = first + kLong < p.entries ? first + kLong : p.entries;
    int64_t before = -1;
    for (int side = 0; side < 2; ++side) {
        const int64_t position = side == 0 ? first : last - 1, group = p.group_of(position);
        int64_t begin = p.start(group), end = p.start(group + 1);
        if (end - begin <= kLong || group == before || position < begin) continue; /* in front of all groups */
        before = group;
        begin = begin > first ? begin : first;
        end = end < last ? end : last;
        for (int64_t c = lanes.lane * kVector; c < p.out.columns; c += lanes.lanes * kVector) {
            Reduction result[kVector];
            p.reduce(result, begin, end, c);
#pragma unroll
            for (int j = 0; j < kVector; ++j) parts[(2 * lanes.number + side) * p.out.columns + c + j] = result[j];
        }
    }
}

template <class Reduction, int kVector, class T>
__global__ void __launch_bounds__(kLaneThreads) long_group_kernel(Problem<T> p, const Reduction *parts, int log_lanes) {
    const LaneGroup lanes(log_lanes);
    const int64_t group = lanes.number;
    if (group >= p.out.rows) return;
    const int64_t begin = p.start(group), end = p.start(group + 1);
    if (end - begin <= kLong) return;
    for (int64_t c = lanes.lane * kVector; c < p.out.columns; c += lanes.lanes * kVector) {
        Reduction result[kVector];
        for (int64_t stretch = begin / kLong; stretch * kLong < end; ++stretch) {
            const int side = stretch * kLong < begin ? 1 : 0; /* only its first stretch begins with another group */
            const Reduction *part = parts + (2 * stretch + side) * p.out.columns + c;
#pragma unroll
            for (int j = 0; j < kVector; ++j) result[j].add(part[j]);
        }
        p.write(result, group, end - begin, c);
    }
}

template <class Reduction>
size_t part_bytes(const fg_group_reduce_params &p) {
    if (p.order.shape[0] <= kLong) return 0;
    const int64_t stretches = ceil_div<int64_t>(p.order.shape[0], kLong);
    return static_cast<size_t>(2 * stretches * p.out.shape[1]) * sizeof(Reduction);
}

template <class Reduction, int kVector, class T>
fg_status reduce_groups(const fg_group_reduce_params &p, cudaStream_t stream, fg_error *error) {
    const Problem<T> problem(p);
    const int log_lanes = log_lanes_for(p.out.shape[1], kVector);
    unsigned int blocks = 0;
    const fg_status status = lane_blocks(p.out.shape[0], log_lanes, "out", &blocks, error);
    if (status != FG_OK) return status;
    short_group_kernel<Reduction, kVector, T><<<blocks, kLaneThreads, 0, stream>>>(problem, log_lanes);
    FG_CUDA(cudaGetLastError());
    if (p.order.shape[0] <= kLong) return FG_OK;

    Reduction *parts = static_cast<Reduction *>(p.workspace.data);
    const int64_t stretches = ceil_div<int64_t>(p.order.shape[0], kLong);
    const unsigned int part_blocks = static_cast<unsigned int>(ceil_div<int64_t>(stretches, kLaneThreads >> log_lanes));
    part_kernel<Reduction, kVector, T><<<part_blocks, kLaneThreads, 0, stream>>>(problem, parts, log_lanes);
    FG_CUDA(cudaGetLastError());
    long_group_kernel<Reduction, kVector, T><<<blocks, kLaneThreads, 0, stream>>>(problem, parts, log_lanes);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

}  // namespace

fg_status group_rows_workspace(const fg_group_rows_params *p, const fg_queue *queue, size_t *bytes, fg_error *error) {
    *bytes = 0;
    if (p->order.shape[0] == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    size_t sort = 0;
    FG_CUDA(sort_entries(*p, RowsWorkspace(*p, 0), nullptr, &sort, stream_of(queue)));
    *bytes = RowsWorkspace(*p, sort).bytes;
    return FG_OK;
}

fg_status group_rows(const fg_group_rows_params *p, const fg_queue *queue, fg_error *error) {
    const int64_t count = p->order.shape[0], size = p->starts.shape[0];
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const cudaStream_t stream = stream_of(queue);
    if (count == 0) {
        FG_CUDA(cudaMemsetAsync(p->starts.data, 0, static_cast<size_t>(size) * sizeof(int32_t), stream));
        return FG_OK;
    }
    size_t sort = 0;
    FG_CUDA(sort_entries(*p, RowsWorkspace(*p, 0), nullptr, &sort, stream));
    const RowsWorkspace workspace(*p, sort);
    const unsigned int blocks = static_cast<unsigned int>(ceil_div<int64_t>(count, kThreads));
    key_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const int32_t *>(p->indices.data), count, size - 1,
                                                workspace.keys);
    FG_CUDA(cudaGetLastError());
    FG_CUDA(number_rows(workspace.positions, count, stream));
    FG_CUDA(sort_entries(*p, workspace, workspace.sort, &sort, stream));
    start_kernel<<<static_cast<unsigned int>(ceil_div<int64_t>(size, kThreads)), kThreads, 0, stream>>>(
        workspace.sorted, count, static_cast<int32_t *>(p->starts.data), size);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

fg_status group_reduce_workspace(const fg_group_reduce_params *p, const fg_queue *, size_t *bytes, fg_error *) {
    *bytes = p->out.shape[0] == 0 ? 0 : p->mode == FG_POOL_MAX ? part_bytes<Maximum>(*p) : part_bytes<Sum>(*p);
    return FG_OK;
}

fg_status group_reduce(const fg_group_reduce_params *p, const fg_queue *queue, fg_error *error) {
    if (p->out.shape[0] == 0 || p->out.shape[1] == 0) return FG_OK;
    const DeviceGuard guard(queue->device_index);
    FG_CUDA(guard.status());
    const bool aligned = is_aligned(p->src, 16) && is_aligned(p->out, 16);
    return dispatch_rows(p->src.dtype, aligned, [&](auto *element, auto vector) -> fg_status {
        using T = std::remove_pointer_t<decltype(element)>;
        return p->mode == FG_POOL_MAX ? reduce_groups<Maximum, vector(), T>(*p, stream_of(queue), error)
                                      : reduce_groups<Sum, vector(), T>(*p, stream_of(queue), error);
    });
}

}  // namespace flexgemm
