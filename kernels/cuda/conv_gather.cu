/*
 * Forward and input gradient of sparse convolution: one implicit-GEMM kernel,
 *
 *     out[m, :] = activation(scale * sum_v W_v . in[map[v, m], :] + bias + residual[m, :])
 *
 * in which a CTA owns block_m rows x block_n channels of `out` and the reduction runs over (offset v, input channel).
 * Rows of `in` are gathered straight into shared memory by 16-byte cp.async, zeros for missing neighbours; offsets at
 * which no row of the tile has a neighbour are skipped. The input gradient is the same sum over the mirrored (or
 * transposed) map with W_v transposed, which costs nothing but another way of reading W_v out of shared memory, and
 * nothing is added.
 *
 * The offsets may be cut into slices, whose sums meet in the workspace (conv_reduce.cu). A tile's rows are block_m
 * slots in a row of `order` when the plan takes one, which brings rows with the same missing neighbours together: those
 * of all offsets, or of a group of them, where each group has an order of its own and is a slice or several. Every row
 * is computed the same way wherever it is.
 *
 * float8 rows of `in` may have a scale each. Every row of a tile gathers another one at each offset, so that it is the
 * sums of a step that are multiplied by it, where they are promoted to float32.
 *
 * Portable family: mma.sync, ldmatrix, cp.async; sm_80 and later.
 */
#include "conv_gather.cuh"
#include "conv_plain_sum.cuh"
#include "mma_tile.cuh"

namespace flexgemm {
namespace {

/* Fills `offsets` with the offsets of a slice, in rising order, at which any of a tile's kBlockM rows has a neighbour;
 * returns how many. Warps look at the offsets in turn, a batch at a time so that its loads are in flight together; the
 * first warp then packs the answers. */
template <class Shape>
__device__ int find_offsets(const GatherParams &p, int slice, const int64_t *tile_rows, uint16_t *offsets) {
    constexpr int kBatch = 8;
    __shared__ bool any[FG_MAX_VOLUME];
    __shared__ int count;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int begin = p.first_offset(slice), length = ceil_div(p.end_offset(slice) - begin, p.splits);
    for (int first = warp; first < length; first += kBatch * Shape::kWarps) {
        bool found[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int index = first + i * Shape::kWarps;
            const int32_t *map = p.map_at(begin + index * p.splits);
            found[i] = false;
#pragma unroll
            for (int r = 0; r < Shape::kBlockM; r += 32) {
                const int64_t m = tile_rows[r + lane];
                if (index < length && m >= 0) found[i] |= static_cast<uint32_t>(map[m]) < p.in_rows;
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int index = first + i * Shape::kWarps;
            const bool found_by_any = __any_sync(~0u, found[i]);
            if (lane == 0 && index < length) any[index] = found_by_any;
        }
    }
    __syncthreads();
    if (warp == 0) {
        int packed = 0;
        for (int index = lane; index - lane < length; index += 32) {
            const bool found = index < length && any[index];
            const unsigned int mask = __ballot_sync(~0u, found);
            if (found)
                offsets[packed + __popc(mask & ((1u << lane) - 1))] = static_cast<uint16_t>(begin + index * p.splits);
            packed += __popc(mask);
        }
        if (lane == 0) count = packed;
    }
    __syncthreads();
    return count;
}

template <MathMode kMode, Major kMajorB, class Shape>
struct GatherKernel {
    using Bits = typename Math<kMode>::Bits;
    using Sums = Accumulator<kMode, Shape>;
    using TileA = OperandTile<Bits, Shape::kBlockM, Major::kK>;
    using TileB = OperandTile<Bits, Shape::kBlockN, kMajorB>;
    static constexpr int kStageBytes = TileA::kBytes + TileB::kBytes;
    static constexpr int kSharedBytes = Shape::kStages * kStageBytes;
    static constexpr int kRowsPerThread = TileA::kRows * TileA::kChunksPerRow / Shape::kThreads;
    static constexpr int kChunksB = TileB::kRows * TileB::kChunksPerRow / Shape::kThreads;
    /* Between one chunk of a thread and its next lie whole rows: a thread keeps its chunk column. */
    static constexpr int kRowStepA = Shape::kThreads / TileA::kChunksPerRow;
    static constexpr int kRowStepB = Shape::kThreads / TileB::kChunksPerRow;
    static_assert(Shape::kThreads % TileA::kChunksPerRow == 0 && Shape::kThreads % TileB::kChunksPerRow == 0,
                  "threads cover whole rows of a tile");
    static_assert(TileA::kRows % kRowStepA == 0 && TileB::kRows % kRowStepB == 0, "every thread copies alike");

    const GatherParams &p;
    const int64_t *tile_rows; /* (kBlockM) in shared memory */
    const int group, n0;      /* n0 within the group */

    __device__ static int64_t group_weights(const GatherParams &p) {
        return static_cast<int64_t>(p.columns) * p.volume * p.depth;
    }

    /* The input rows behind this thread's chunks at one offset. */
    __device__ void fetch_rows(int32_t (&rows)[kRowsPerThread], int v) const {
        const int32_t *map = p.map_at(v);
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
            const int64_t m = tile_rows[threadIdx.x / TileA::kChunksPerRow + i * kRowStepA];
            rows[i] = m >= 0 ? map[m] : -1;
        }
    }

    __device__ void load_a(char *tile, const int32_t (&rows)[kRowsPerThread], int k) const {
        const int row = threadIdx.x / TileA::kChunksPerRow, chunk = threadIdx.x % TileA::kChunksPerRow;
        const Bits *in = static_cast<const Bits *>(p.in) + static_cast<int64_t>(group) * p.depth;
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
            const bool present = static_cast<uint32_t>(rows[i]) < p.in_rows;
            const Bits *source = in + (present ? rows[i] : 0) * p.in_stride;
            load_chunk(tile + TileA::offset(row + i * kRowStepA, chunk), source, k + chunk * TileA::kPerChunk, p.depth,
                       present, p.in_aligned);
        }
    }

    __device__ void load_b(char *tile, int v, int k) const {
        const int row = threadIdx.x / TileB::kChunksPerRow, chunk = threadIdx.x % TileB::kChunksPerRow;
        /* K-major rows are output channels and run along k; MN-major rows are input channels and run along n. */
        const int first = kMajorB == Major::kK ? n0 : k, rows = kMajorB == Major::kK ? p.columns : p.depth;
        const int column = (kMajorB == Major::kK ? k : n0) + chunk * TileB::kPerChunk;
        const int columns = kMajorB == Major::kK ? p.depth : p.columns;
        const Bits *weight = static_cast<const Bits *>(p.weight) + group * group_weights(p);
#pragma unroll
        for (int i = 0; i < kChunksB; ++i) {
            const int r = row + i * kRowStepB;
            const bool present = first + r < rows;
            const int64_t source = (static_cast<int64_t>(present ? first + r : 0) * p.volume + v) * columns;
            load_chunk(tile + TileB::offset(r, chunk), weight + source, column, columns, present, p.weight_aligned);
        }
    }

    __device__ __noinline__ static float plain_sum_of(const GatherParams &p, int group, int slice, int64_t m, int n) {
        const PlainOperands plain = {static_cast<const float *>(p.in) + static_cast<int64_t>(group) * p.depth,
                                     static_cast<const float *>(p.weight) + group * group_weights(p), p.in_stride,
                                     p.depth, kMajorB == Major::kK};
        return plain_sum(p, plain, slice, m, n);
    }

    /* The scales of the input rows behind this thread's sums at one offset, of float8. */
    __device__ void fetch_scales(float (&scale)[Sums::kRows], int v) const {
        const int32_t *map = p.map_at(v);
#pragma unroll
        for (int i = 0; i < Sums::kRows; ++i) {
            const int64_t m = tile_rows[Sums::row(i)];
            const uint32_t row = m >= 0 && p.row_scales ? static_cast<uint32_t>(map[m]) : UINT32_MAX;
            scale[i] = row < p.in_rows ? p.product_scale * p.row_scales[row] : p.product_scale;
        }
    }

    /* `offsets`: the `count` offsets of a slice at which the tile has neighbours. */
    __device__ void run(char *shared, int slice, const uint16_t *offsets, int count) const {
        Sums acc;
        acc.clear();
        [[maybe_unused]] float scale[Sums::kRows];
        const int k_steps = ceil_div(p.depth, TileA::kDepth), steps = count * k_steps;

        /* The loader runs kStages - 1 steps ahead. It asks for the map entries of the offset after its own as soon as
         * it starts on one, so that they have arrived when they are needed. */
        int32_t rows[kRowsPerThread], next_rows[kRowsPerThread];
        int entry = 0, k_step = 0;
        if (steps > 0) {
            fetch_rows(rows, offsets[0]);
            fetch_rows(next_rows, offsets[count > 1 ? 1 : 0]);
        }
        auto load = [&](int stage) {
            char *a = shared + stage * kStageBytes;
            load_a(a, rows, k_step * TileA::kDepth);
            load_b(a + TileA::kBytes, offsets[entry], k_step * TileA::kDepth);
            if (++k_step < k_steps) return;
            k_step = 0;
            ++entry;
#pragma unroll
            for (int i = 0; i < kRowsPerThread; ++i) rows[i] = next_rows[i];
            if (entry + 1 < count) fetch_rows(next_rows, offsets[entry + 1]);
        };

#pragma unroll
        for (int stage = 0; stage < Shape::kStages - 1; ++stage) {
            if (stage < steps) load(stage);
            ptx::cp_async_commit();
        }
        int stage = 0, load_stage = Shape::kStages - 1;
        for (int step = 0; step < steps; ++step) {
            ptx::cp_async_wait<Shape::kStages - 2>();
            __syncthreads(); /* this stage has arrived for all, and all are done with the one about to be refilled */
            if (step + Shape::kStages - 1 < steps) load(load_stage);
            ptx::cp_async_commit();
            const char *a = shared + stage * kStageBytes;
            if constexpr (kMode == MathMode::kFloat8) {
                if (step % k_steps == 0) fetch_scales(scale, offsets[step / k_steps]);
                acc.template multiply_float8<TileA, TileB>(a, a + TileA::kBytes, p.in_format, p.weight_format, scale);
            } else {
                acc.template multiply<TileA, TileB>(a, a + TileA::kBytes);
            }
            stage = stage + 1 < Shape::kStages ? stage + 1 : 0;
            load_stage = load_stage + 1 < Shape::kStages ? load_stage + 1 : 0;
        }

        const auto row_of = [this](int slot) { return tile_rows[slot]; };
        if constexpr (kMode == MathMode::kIeee)
            acc.replace_not_finite(n0, [&](int slot, int n) {
                return row_of(slot) >= 0 && n < p.columns ? plain_sum_of(p, group, slice, row_of(slot), n) : 0.0f;
            });
        const int64_t first_column = static_cast<int64_t>(group) * p.columns;
        if (p.partials) {
            const int64_t row = static_cast<int64_t>(p.columns) * p.channel_groups;
            acc.store(row_of, p.partials + slice * p.rows * row + first_column, row, n0, p.columns);
        } else if constexpr (kMode == MathMode::kFloat8) {
            with_float_type(p.added_dtype, [&](auto type) {
                using T = decltype(type);
                acc.template finish<T>(row_of, n0, p.columns, p.epilogue.from_column<T>(first_column));
            });
            if (p.epilogue.scale_out) acc.divide(*p.epilogue.scale_out);
            with_out_type(p.out_dtype, [&](auto type) { store<decltype(type)>(acc, row_of, first_column); });
        } else {
            using T = typename Math<kMode>::Element;
            if constexpr (kMajorB == Major::kK)
                acc.template finish<T>(row_of, n0, p.columns, p.epilogue.from_column<T>(first_column));
            store<T>(acc, row_of, first_column);
        }
    }

    template <typename T, typename RowOf>
    __device__ void store(const Sums &acc, const RowOf &row_of, int64_t first_column) const {
        acc.store(row_of, static_cast<T *>(p.out) + first_column, p.out_stride, n0, p.columns);
    }
};

/* blockIdx.x: tile, groups of channels and tiles of these of the same rows side by side so that they share the gathered
 * rows in L2;
 * blockIdx.y: slice of the offsets. */
template <MathMode kMode, Major kMajorB, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtasPerSm) conv_gather_kernel(const GatherParams p) {
    extern __shared__ __align__(128) char shared[];
    __shared__ uint16_t offsets[FG_MAX_VOLUME];
    __shared__ int64_t tile_rows[Shape::kBlockM];
    const int64_t m0 = static_cast<int64_t>(blockIdx.x / p.column_tiles) * Shape::kBlockM;
    const int column_tile = static_cast<int>(blockIdx.x % p.column_tiles), in_group = p.column_tiles / p.channel_groups;
    const int group = column_tile / in_group, n0 = column_tile % in_group * Shape::kBlockN;
    const int slice = static_cast<int>(blockIdx.y);
    for (int slot = threadIdx.x; slot < Shape::kBlockM; slot += Shape::kThreads)
        tile_rows[slot] = p.row_of(m0 + slot, slice);
    __syncthreads();
    const int count = find_offsets<Shape>(p, slice, tile_rows, offsets);
    if (p.partials && count == 0) return; /* nobody reads the partial sums of rows without neighbours */
    const GatherKernel<kMode, kMajorB, Shape> kernel = {p, tile_rows, group, n0};
    kernel.run(shared, slice, offsets, count);
}

template <MathMode kMode, Major kMajorB, class Shape>
fg_status launch(GatherParams p, cudaStream_t stream, fg_error *error) {
    using Kernel = GatherKernel<kMode, kMajorB, Shape>;
    const int64_t column_tiles = static_cast<int64_t>(ceil_div(p.columns, Shape::kBlockN)) * p.channel_groups;
    const int64_t tiles = ceil_div<int64_t>(p.rows, Shape::kBlockM) * column_tiles;
    if (tiles > INT32_MAX)
        return fg_fail(error, FG_ERROR_VALUE, "out: %lld rows need %lld tiles, more than one launch can have",
                       static_cast<long long>(p.rows), static_cast<long long>(tiles));
    p.column_tiles = static_cast<int>(column_tiles);
    constexpr auto kernel = conv_gather_kernel<kMode, kMajorB, Shape>;
    const fg_status status = allow_shared<kernel>(Kernel::kSharedBytes, error);
    if (status != FG_OK) return status;
    const dim3 grid(static_cast<unsigned int>(tiles), static_cast<unsigned int>(p.slices()));
    kernel<<<grid, Shape::kThreads, Kernel::kSharedBytes, stream>>>(p);
    FG_CUDA(cudaGetLastError());
    p.columns *= p.channel_groups; /* whose partial sums lie side by side, as in `out` */
    return p.partials ? reduce_slices(p, 0, stream, error) : FG_OK;
}

/* The tiles of fg_plan_conv. */
template <MathMode kMode, Major kMajorB>
fg_status launch_shape(const GatherParams &p, const fg_plan &plan, cudaStream_t stream, fg_error *error) {
    if (plan.block_m == 128 && plan.block_n == 128) return launch<kMode, kMajorB, LargeTile<kMode>>(p, stream, error);
    if (plan.block_m == 128 && plan.block_n == 64)
        return launch<kMode, kMajorB, TileShape<128, 64, 2, 2, 3>>(p, stream, error);
    return launch<kMode, kMajorB, TileShape<64, 64, 2, 2, 4>>(p, stream, error);
}

template <Major kMajorB>
fg_status launch_mode(const GatherParams &p, const fg_plan &plan, fg_dtype dtype, fg_precision precision,
                      cudaStream_t stream, fg_error *error) {
    if constexpr (kMajorB == Major::kK) /* float8 has no input gradient */
        if (fg_is_float8(dtype)) return launch_shape<MathMode::kFloat8, kMajorB>(p, plan, stream, error);
    if (dtype == FG_FLOAT16) return launch_shape<MathMode::kFloat16, kMajorB>(p, plan, stream, error);
    if (dtype == FG_BFLOAT16) return launch_shape<MathMode::kBFloat16, kMajorB>(p, plan, stream, error);
    if (precision == FG_PRECISION_TF32) return launch_shape<MathMode::kTf32, kMajorB>(p, plan, stream, error);
    return launch_shape<MathMode::kIeee, kMajorB>(p, plan, stream, error);
}

}  // namespace

fg_status launch_gather_portable(const GatherParams &p, const fg_plan &plan, fg_dtype dtype, fg_precision precision,
                                 bool weight_is_k_major, cudaStream_t stream, fg_error *error) {
    return weight_is_k_major ? launch_mode<Major::kK>(p, plan, dtype, precision, stream, error)
                             : launch_mode<Major::kMN>(p, plan, dtype, precision, stream, error);
}

}  // namespace flexgemm
