/*
 * Forward and input gradient of sparse convolution by an explicit matrix: rows of `in` gathered side by side,
 *
 *     matrix[m, (v, k)] = in[map[v, m], k], zeros for missing neighbours         out = matrix . weight^T
 *
 * and the GEMM kernels. It moves each gathered row twice more than the kernels that gather on the way to the
 * multiplication, and multiplies the zeros; it is what they are compared with. The matrix is made and multiplied some
 * rows at a time, as the plan says, so that the workspace stays small beside large scenes. The forward pass has its
 * weight (columns, volume, depth) as the product needs it; the input gradient transposes it first.
 */
#include <algorithm>

#include "backend.cuh"
#include "conv_gather.cuh"
#include "transpose.cuh"

namespace flexgemm {
namespace {

constexpr int kThreads = 256;

unsigned int blocks_for(int64_t elements) {
    const int64_t blocks = ceil_div<int64_t>(elements, kThreads);
    return static_cast<unsigned int>(blocks < (1 << 20) ? blocks : 1 << 20);
}

/* Rows [first, first + count) of the matrix. A row of `in` is `words` words, `pitch` apart. */
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    im2col_kernel(const GatherParams p, int64_t pitch, int64_t words, int64_t first, int64_t count, Word *matrix) {
    const int64_t total = count * p.volume * words;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
         i += static_cast<int64_t>(gridDim.x) * kThreads) {
        const int64_t column = i / words, word = i % words; /* of offsets, within one */
        const auto row =
            static_cast<uint32_t>(p.map_at(static_cast<int>(column % p.volume))[first + column / p.volume]);
        matrix[i] = row < p.in_rows ? static_cast<const Word *>(p.in)[row * pitch + word] : Word{};
    }
}

/* Rows [first, first + count) of the output, when a residual is to be added. */
template <typename T>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(const float *sums, const GatherParams p, int64_t first, int64_t count) {
    const T *bias = static_cast<const T *>(p.epilogue.bias), *residual = static_cast<const T *>(p.epilogue.residual);
    const int64_t total = count * p.columns;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
         i += static_cast<int64_t>(gridDim.x) * kThreads) {
        const int64_t row = first + i / p.columns, column = i % p.columns;
        float sum = sums[i];
        if (bias) sum += to_float(bias[column]);
        if (residual) sum += to_float(residual[row * p.epilogue.residual_stride + column]);
        static_cast<T *>(p.out)[row * p.out_stride + column] = from_float<T>(activated(sum, p.epilogue.activation));
    }
}

/* ---- host ---- */

fg_tensor matrix_of(void *data, int64_t rows, int64_t columns, fg_dtype dtype, int device) {
    fg_tensor tensor = {};
    tensor.data = data;
    tensor.shape[0] = rows;
    tensor.shape[1] = columns;
    tensor.strides[0] = columns;
    tensor.strides[1] = 1;
    tensor.ndim = 2;
    tensor.dtype = dtype;
    tensor.device_type = FG_CUDA;
    tensor.device_index = device;
    tensor.present = true;
    return tensor;
}

fg_tensor vector_of(void *data, int64_t length, fg_dtype dtype, int device) {
    fg_tensor tensor = matrix_of(data, length, 1, dtype, device);
    tensor.ndim = 1;
    return tensor;
}

size_t aligned(int64_t bytes) { return static_cast<size_t>(ceil_div<int64_t>(bytes, 256) * 256); }

/* The workspace holds the transposed weight, rows of the matrix, their float32 sums, and what the product asks for. */
struct ExplicitConv {
    const GatherParams &p;
    const fg_queue *queue;
    fg_dtype dtype;
    fg_precision precision;
    bool transposes;
    int64_t chunk; /* rows of the matrix at a time */

    int64_t k() const { return static_cast<int64_t>(p.volume) * p.depth; }
    size_t weight_bytes() const {
        return transposes ? aligned(k() * p.columns * static_cast<int64_t>(fg_dtype_size(dtype))) : 0;
    }
    size_t matrix_bytes() const { return aligned(chunk * k() * static_cast<int64_t>(fg_dtype_size(dtype))); }
    size_t sums_bytes() const {
        return !p.epilogue.residual ? 0 : aligned(chunk * p.columns * static_cast<int64_t>(sizeof(float)));
    }

    /* Rows [first, first + count): into `out`, or, where a residual is to be added, as float32 sums. */
    fg_gemm_params product(char *workspace, size_t workspace_bytes, int64_t first, int64_t count) const {
        const int device = queue->device_index;
        char *matrix = workspace + weight_bytes(), *sums = matrix + matrix_bytes();
        fg_gemm_params params = {};
        params.layout = FG_GEMM_DENSE;
        params.a = matrix_of(matrix, count, k(), dtype, device);
        params.b = matrix_of(transposes ? workspace : const_cast<void *>(p.weight), p.columns, k(), dtype, device);
        params.alpha = 1.0f;
        params.precision = precision;
        if (p.epilogue.residual) {
            params.out = matrix_of(sums, count, p.columns, FG_FLOAT32, device);
        } else {
            char *out = static_cast<char *>(p.out) + first * p.out_stride * static_cast<int64_t>(fg_dtype_size(dtype));
            params.out = matrix_of(out, count, p.columns, dtype, device);
            params.out.strides[0] = p.out_stride;
            params.activation = p.epilogue.activation;
            if (p.epilogue.bias) params.bias = vector_of(const_cast<void *>(p.epilogue.bias), p.columns, dtype, device);
        }
        const size_t before = weight_bytes() + matrix_bytes() + sums_bytes();
        const int64_t bytes = static_cast<int64_t>(workspace_bytes - before);
        params.workspace = vector_of(workspace + before, bytes, FG_UINT8, device);
        return params;
    }

    /* What a product needs, of the usual number of rows or of what the last one is left. */
    fg_status gemm_bytes(size_t *bytes, fg_error *error) const {
        *bytes = 0;
        for (const int64_t count : {chunk, p.rows % chunk}) {
            size_t needed = 0;
            const fg_gemm_params params = product(nullptr, 0, 0, count);
            const fg_status status = gemm_workspace(&params, queue, &needed, error);
            if (status != FG_OK) return status;
            if (needed > *bytes) *bytes = needed;
        }
        return FG_OK;
    }

    /* The matrices (rows, columns) of all offsets, whose rows take turns in memory. */
    fg_tensor matrices_of(void *data, int64_t rows, int64_t columns) const {
        fg_tensor tensor = matrix_of(data, rows, columns, dtype, queue->device_index);
        tensor.ndim = 3;
        const int64_t shape[] = {p.volume, rows, columns}, strides[] = {columns, p.volume * columns, 1};
        std::copy_n(shape, 3, tensor.shape);
        std::copy_n(strides, 3, tensor.strides);
        return tensor;
    }

    fg_status transpose_weight(void *out, fg_error *error) const {
        const fg_tensor weight = matrices_of(const_cast<void *>(p.weight), p.depth, p.columns);
        return transpose(weight, matrices_of(out, p.columns, p.depth), INT32_MAX, queue, error);
    }

    template <typename Word>
    void gather(void *matrix, int64_t first, int64_t count, cudaStream_t stream) const {
        const int64_t size = static_cast<int64_t>(fg_dtype_size(dtype)), word = static_cast<int64_t>(sizeof(Word));
        const int64_t words = p.depth * size / word;
        im2col_kernel<Word><<<blocks_for(count * p.volume * words), kThreads, 0, stream>>>(
            p, p.in_stride * size / word, words, first, count, static_cast<Word *>(matrix));
    }

    template <typename T, typename Bits>
    fg_status run(char *workspace, size_t workspace_bytes, fg_error *error) const {
        const cudaStream_t stream = stream_of(queue);
        if (transposes) {
            const fg_status status = transpose_weight(workspace, error);
            if (status != FG_OK) return status;
        }
        for (int64_t first = 0; first < p.rows; first += chunk) {
            const int64_t count = p.rows - first < chunk ? p.rows - first : chunk;
            const fg_gemm_params params = product(workspace, workspace_bytes, first, count);
            if (k() > 0) {
                if (p.in_aligned)
                    gather<uint4>(params.a.data, first, count, stream);
                else
                    gather<Bits>(params.a.data, first, count, stream);
                FG_CUDA(cudaGetLastError());
            }
            const fg_status status = gemm(&params, queue, error);
            if (status != FG_OK) return status;
            if (!p.epilogue.residual) continue;
            finish_kernel<T><<<blocks_for(count * p.columns), kThreads, 0, stream>>>(
                static_cast<const float *>(params.out.data), p, first, count);
            FG_CUDA(cudaGetLastError());
        }
        return FG_OK;
    }
};

}  // namespace

fg_status conv_explicit_workspace(const GatherParams &p, const fg_plan &plan, const fg_queue *queue, fg_dtype dtype,
                                  fg_precision precision, bool weight_is_k_major, size_t *bytes, fg_error *error) {
    *bytes = 0;
    if (p.rows == 0 || p.columns == 0) return FG_OK;
    const ExplicitConv conv = {p, queue, dtype, precision, !weight_is_k_major, plan.block_m};
    const fg_status status = conv.gemm_bytes(bytes, error);
    *bytes += conv.weight_bytes() + conv.matrix_bytes() + conv.sums_bytes();
    return status;
}

fg_status conv_explicit(const GatherParams &p, const fg_plan &plan, const fg_queue *queue, fg_dtype dtype,
                        fg_precision precision, bool weight_is_k_major, const fg_tensor &workspace, fg_error *error) {
    const ExplicitConv conv = {p, queue, dtype, precision, !weight_is_k_major, plan.block_m};
    char *data = static_cast<char *>(workspace.data);
    const size_t bytes = static_cast<size_t>(workspace.shape[0]);
    if (dtype == FG_FLOAT16) return conv.run<__half, uint16_t>(data, bytes, error);
    if (dtype == FG_BFLOAT16) return conv.run<__nv_bfloat16, uint16_t>(data, bytes, error);
    return conv.run<float, uint32_t>(data, bytes, error);
}

}  // namespace flexgemm
