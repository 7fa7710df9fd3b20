/*
 * Transposition of the matrices of a batch, in square tiles through shared memory: 128 bytes of a row on either side,
 * 16 at a time where addresses allow it (turned_tile.cuh).
 */
#include "transpose.cuh"

#include <algorithm>

#include "turned_tile.cuh"

namespace flexgemm {
namespace {

/* Rows whose elements of one column make 4 bytes. */
template <typename T>
constexpr int kPacked = 4 / sizeof(T);

/* Of a tile, down and across. */
template <typename T>
constexpr int kTile = kLineBytes / sizeof(T);

struct TransposeArgs {
    const void *from;
    void *to;
    int64_t rows, columns;              /* of `from` */
    int64_t from_step, from_batch_step; /* elements */
    int64_t to_step, to_batch_step;
    uint32_t across, down, tiles;  /* tiles of a matrix, and of all of a batch, fewer than 2^31 */
    bool from_aligned, to_aligned; /* each row begins at a multiple of 16 bytes */
};

/* Element `i` of each of these vectors, in one word. */
template <typename T>
__device__ __forceinline__ uint32_t packed(const Words (&vector)[kPacked<T>], int i) {
    const int at = i / kPacked<T>, part = i % kPacked<T>;
    if constexpr (sizeof(T) == 1) {
        const unsigned both = part * 0x11 + 0x40;
        const uint32_t low = __byte_perm(vector[0].word[at], vector[1].word[at], both);
        return __byte_perm(low, __byte_perm(vector[2].word[at], vector[3].word[at], both), 0x5410);
    } else if constexpr (sizeof(T) == 2) {
        return __byte_perm(vector[0].word[at], vector[1].word[at], part ? 0x7632 : 0x5410);
    } else {
        return vector[0].word[at];
    }
}

/* Blocks of a multiprocessor at a time. They read their next tile while one goes out; tiles of 4-byte elements, which
 * have a quarter of the bytes, have a block each. */
template <typename T>
constexpr int kResident = 8;
template <>
constexpr int kResident<uint16_t> = 6;
template <>
constexpr int kResident<uint8_t> = 3;

template <typename T>
struct Tile {
    int64_t batch, first_row, first_column;

    __device__ __forceinline__ Tile(const TransposeArgs &args, uint32_t index) {
        const uint32_t above = index / args.across;
        batch = above / args.down;
        first_row = static_cast<int64_t>(above % args.down) * kTile<T>;
        first_column = static_cast<int64_t>(index % args.across) * kTile<T>;
    }
};

template <typename T>
__global__ void __launch_bounds__(kTurningThreads, kResident<T>)
    transpose_kernel(const __grid_constant__ TransposeArgs args) {
    constexpr int kCount = kChannels<T>, kRows = kPacked<T>;
    __shared__ TurnedTile<kCount> turned;
    const int place = threadIdx.x % kLineVectors, line = threadIdx.x / kLineVectors;
    Words vector[kRows];
    const auto load = [&](const Tile<T> &tile) {
        const T *from = static_cast<const T *>(args.from) + tile.batch * args.from_batch_step;
        const int64_t column = tile.first_column + place * kCount;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int64_t row = tile.first_row + line * kRows + i, count = row < args.rows ? args.columns - column : 0;
            vector[i] = load_words(from + row * args.from_step + column, args.from_aligned, count);
        }
    };
    Tile<T> tile(args, blockIdx.x);
    load(tile);
    for (uint32_t index = blockIdx.x; index < args.tiles; index += gridDim.x) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) *turned.word(place * kCount + i, line) = packed<T>(vector, i);
        const Tile<T> done = tile;
        if (index + gridDim.x < args.tiles) { /* while this one goes out */
            tile = Tile<T>(args, index + gridDim.x);
            load(tile);
        }
        __syncthreads();
        T *to = static_cast<T *>(args.to) + done.batch * args.to_batch_step;
        turned.store(to + done.first_column * args.to_step + done.first_row, args.to_step,
                     args.columns - done.first_column, args.rows - done.first_row, args.to_aligned);
        __syncthreads();
    }
}

template <typename T>
fg_status launch(TransposeArgs args, int64_t batch, int max_blocks, const fg_queue *queue, fg_error *error) {
    int num_sms = 0, compute_capability = 0;
    const fg_status status = device_properties(queue->device_index, &num_sms, &compute_capability, error);
    if (status != FG_OK) return status;
    args.from_aligned = in_vectors<T>(args.from, args.from_step, args.from_batch_step);
    args.to_aligned = in_vectors<T>(args.to, args.to_step, args.to_batch_step);
    const int64_t across = ceil_div<int64_t>(args.columns, kTile<T>), down = ceil_div<int64_t>(args.rows, kTile<T>);
    const int64_t tiles = across * down * batch;
    if (tiles > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "expected fewer than 2^31 tiles of what is transposed, got %lld",
                       static_cast<long long>(tiles));
    args.across = static_cast<uint32_t>(across);
    args.down = static_cast<uint32_t>(down);
    args.tiles = static_cast<uint32_t>(tiles);
    const int64_t at_once = sizeof(T) == 4 ? tiles : num_sms * kResident<T>;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>({tiles, at_once, max_blocks}));
    transpose_kernel<T><<<blocks, kTurningThreads, 0, stream_of(queue)>>>(args);
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
    fg_tensor result = fg_exchanged(&matrix);
    result.data = workspace;
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
    args.from_step = from.strides[row_axis];
    args.to_step = to.strides[row_axis];
    if (from.ndim == 3) {
        args.from_batch_step = from.strides[0];
        args.to_batch_step = to.strides[0];
    }
    const int64_t batch = batch_of(from);
    if (args.rows == 0 || args.columns == 0 || batch == 0) return FG_OK;
    switch (fg_dtype_size(from.dtype)) {
        case 1:
            return launch<uint8_t>(args, batch, max_blocks, queue, error);
        case 2:
            return launch<uint16_t>(args, batch, max_blocks, queue, error);
        default:
            return launch<uint32_t>(args, batch, max_blocks, queue, error);
    }
}

}  // namespace flexgemm
