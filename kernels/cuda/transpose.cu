/*
 * Transposition of the matrices of a batch, in square tiles through shared memory: 128 bytes of a row by eight threads
 * on either side, 16 bytes at a time where addresses allow it.
 */
#include "transpose.cuh"

#include <algorithm>
#include <utility>

#include "vector.cuh"

namespace flexgemm {
namespace {

constexpr int kVectors = 8; /* of a row of a tile */

template <typename T>
constexpr int kTile = kVectors * kChannels<T>;

/* Tiles of bytes are the largest: of more vectors a thread would not keep the elements in registers. */
template <typename T>
constexpr int kThreads = sizeof(T) == 1 ? 512 : 256;

struct TransposeArgs {
    const void *from;
    void *to;
    int64_t rows, columns, batch;       /* of `from` */
    int64_t from_step, from_batch_step; /* elements */
    int64_t to_step, to_batch_step;
    bool from_aligned, to_aligned; /* each row begins at a multiple of 16 bytes */

    template <typename T>
    __host__ __device__ int64_t tiles_down() const {
        return ceil_div<int64_t>(rows, kTile<T>);
    }
    template <typename T>
    __host__ __device__ int64_t tiles_across() const {
        return ceil_div<int64_t>(columns, kTile<T>);
    }
};

/* Where row `row` of a tile lies in `column`, a row of it transposed: its vectors change places, so that threads with
 * neighbouring vectors of a row write to different banks. */
template <typename T>
__device__ __forceinline__ int place_of(int row, int column) {
    constexpr int kCount = kChannels<T>;
    return (row / kCount ^ column / kCount) * kCount + row % kCount;
}

/* A vector of a transposed row, or the first `count` elements of it. */
template <typename T>
__device__ __forceinline__ void store(T *to, const T *vector, bool aligned, int64_t count) {
    if (aligned && count >= kChannels<T>) {
        *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(vector);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < kChannels<T> && i < count; ++i) to[i] = vector[i];
}

template <typename T>
__global__ void __launch_bounds__(kThreads<T>, 1024 / kThreads<T>)
    transpose_kernel(const __grid_constant__ TransposeArgs args) {
    constexpr int kCount = kChannels<T>, kRowsAtOnce = kThreads<T> / kVectors, kPasses = kTile<T> / kRowsAtOnce;
    using Vec = Vector<T, kCount>;
    __shared__ alignas(16) T tile[kTile<T>][kTile<T>]; /* column, place of the row */
    const int64_t across = args.tiles_across<T>(), down = args.tiles_down<T>();
    const int64_t tiles = across * down * args.batch;
    const int place = threadIdx.x % kVectors * kCount, line = threadIdx.x / kVectors;
    for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
        const int64_t above = index / across, first_column = (index - above * across) * kTile<T>;
        const int64_t batch = above / down, first_row = (above - batch * down) * kTile<T>;
        const T *from = static_cast<const T *>(args.from) + batch * args.from_batch_step;
        T *to = static_cast<T *>(args.to) + batch * args.to_batch_step;

        Vec vector[kPasses];
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int64_t row = first_row + line + pass * kRowsAtOnce, column = first_column + place;
            const T *x = from + row * args.from_step + column;
            if (row < args.rows && args.from_aligned && column + kCount <= args.columns) {
                vector[pass] = Vec::load(x);
            } else {
                for (int i = 0; i < kCount; ++i)
                    vector[pass].element[i] = row < args.rows && column + i < args.columns ? x[i] : T{};
            }
        }
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass)
            for (int i = 0; i < kCount; ++i)
                tile[place + i][place_of<T>(line + pass * kRowsAtOnce, place + i)] = vector[pass].element[i];
        __syncthreads();
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int local = line + pass * kRowsAtOnce;
            const int64_t column = first_column + local, row = first_row + place;
            if (column >= args.columns) break;
            store(to + column * args.to_step + row, &tile[local][place_of<T>(place, local)], args.to_aligned,
                  args.rows - row);
        }
        __syncthreads();
    }
}

template <typename T>
fg_status launch(TransposeArgs args, int max_blocks, const fg_queue *queue, fg_error *error) {
    const auto aligned = [](const void *data, int64_t step, int64_t batch_step) {
        return rows_are_vectors<T>(data, step, 0) && batch_step % kChannels<T> == 0;
    };
    args.from_aligned = aligned(args.from, args.from_step, args.from_batch_step);
    args.to_aligned = aligned(args.to, args.to_step, args.to_batch_step);
    const int64_t tiles = args.tiles_down<T>() * args.tiles_across<T>() * args.batch;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(tiles, max_blocks));
    transpose_kernel<T><<<blocks, kThreads<T>, 0, stream_of(queue)>>>(args);
    FG_CUDA(cudaGetLastError());
    return FG_OK;
}

int64_t padded(int64_t length, fg_dtype dtype) {
    const int64_t unit = 16 / static_cast<int64_t>(fg_dtype_size(dtype));
    return ceil_div(length, unit) * unit;
}

/* Of matrices that lie in memory: one that was expanded to all of a batch is there once. */
int64_t batch_of(const fg_tensor &matrix) {
    if (matrix.ndim < 3) return 1;
    return matrix.strides[0] == 0 ? std::min<int64_t>(matrix.shape[0], 1) : matrix.shape[0];
}

}  // namespace

fg_tensor transposed(const fg_tensor &matrix, void *workspace) {
    const int row_axis = matrix.ndim - 2, column_axis = matrix.ndim - 1;
    fg_tensor result = matrix;
    result.data = workspace;
    std::swap(result.shape[row_axis], result.shape[column_axis]);
    result.strides[row_axis] = padded(matrix.shape[row_axis], matrix.dtype);
    result.strides[column_axis] = 1;
    if (matrix.ndim == 3 && matrix.strides[0] != 0)
        result.strides[0] = result.shape[row_axis] * result.strides[row_axis];
    return result;
}

size_t transposed_bytes(const fg_tensor &matrix) {
    const int64_t rows = padded(matrix.shape[matrix.ndim - 2], matrix.dtype), columns = matrix.shape[matrix.ndim - 1];
    return static_cast<size_t>(batch_of(matrix) * columns * rows) * fg_dtype_size(matrix.dtype);
}

fg_status transpose(const fg_tensor &from, const fg_tensor &to, int max_blocks, const fg_queue *queue,
                    fg_error *error) {
    const int row_axis = from.ndim - 2, column_axis = from.ndim - 1;
    TransposeArgs args = {};
    args.from = from.data;
    args.to = to.data;
    args.rows = from.shape[row_axis];
    args.columns = from.shape[column_axis];
    args.batch = batch_of(from);
    args.from_step = from.strides[row_axis];
    args.to_step = to.strides[row_axis];
    if (from.ndim == 3) {
        args.from_batch_step = from.strides[0];
        args.to_batch_step = to.strides[0];
    }
    if (args.rows == 0 || args.columns == 0 || args.batch == 0) return FG_OK;
    switch (fg_dtype_size(from.dtype)) {
        case 1:
            return launch<uint8_t>(args, max_blocks, queue, error);
        case 2:
            return launch<uint16_t>(args, max_blocks, queue, error);
        default:
            return launch<uint32_t>(args, max_blocks, queue, error);
    }
}

}  // namespace flexgemm
