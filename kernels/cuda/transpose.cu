/*
 * Transposition of the matrices of a batch, in tiles of 32 x 32 elements through shared memory, so that both the reads
 * and the writes of a warp are adjacent.
 */
#include "transpose.cuh"

#include <algorithm>
#include <utility>

namespace flexgemm {
namespace {

constexpr int kTile = 32, kRowsAtOnce = 8;

struct TransposeArgs {
    const void *from;
    void *to;
    int64_t rows, columns, batch;       /* of `from` */
    int64_t from_step, from_batch_step; /* elements */
    int64_t to_step, to_batch_step;

    __host__ __device__ int64_t tiles_down() const { return ceil_div<int64_t>(rows, kTile); }
    __host__ __device__ int64_t tiles_across() const { return ceil_div<int64_t>(columns, kTile); }
    __host__ __device__ int64_t tiles() const { return tiles_down() * tiles_across() * batch; }
};

template <typename T>
__global__ void __launch_bounds__(kTile *kRowsAtOnce) transpose_kernel(const __grid_constant__ TransposeArgs args) {
    __shared__ T tile[kTile][kTile + 4 / sizeof(T)]; /* one bank further with each row */
    const int64_t across = args.tiles_across(), down = args.tiles_down(), tiles = args.tiles();
    for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
        const int64_t above = index / across, first_column = (index - above * across) * kTile;
        const int64_t batch = above / down, first_row = (above - batch * down) * kTile;
        const T *from = static_cast<const T *>(args.from) + batch * args.from_batch_step;
        T *to = static_cast<T *>(args.to) + batch * args.to_batch_step;
        for (int i = threadIdx.y; i < kTile; i += kRowsAtOnce) {
            const int64_t row = first_row + i, column = first_column + threadIdx.x;
            if (row < args.rows && column < args.columns) tile[i][threadIdx.x] = from[row * args.from_step + column];
        }
        __syncthreads();
        for (int i = threadIdx.y; i < kTile; i += kRowsAtOnce) {
            const int64_t row = first_row + threadIdx.x, column = first_column + i;
            if (row < args.rows && column < args.columns) to[column * args.to_step + row] = tile[threadIdx.x][i];
        }
        __syncthreads();
    }
}

template <typename T>
fg_status launch(const TransposeArgs &args, int max_blocks, const fg_queue *queue, fg_error *error) {
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(args.tiles(), max_blocks));
    transpose_kernel<T><<<blocks, dim3(kTile, kRowsAtOnce), 0, stream_of(queue)>>>(args);
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
