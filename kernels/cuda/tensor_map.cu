/*
 * Encoding of tensor maps. The driver's encoder is looked up at run time, so that the module links without libcuda and
 * imports on a machine that has no driver.
 */
#include "tensor_map.cuh"

#include <cudaTypedefs.h>

#include <atomic>

namespace flexgemm {

static fg_status encode(CUtensorMap *map, CUtensorMapDataType type, const TensorRows &rows, int box_rows,
                        int box_groups, fg_error *error,
                        CUtensorMapL2promotion fetched = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    static std::atomic<void *> encoder; /* threads that meet here store the same pointer */
    void *found = encoder.load(std::memory_order_relaxed);
    if (found == nullptr) {
        cudaDriverEntryPointQueryResult result;
        FG_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
        if (result != cudaDriverEntryPointSuccess)
            return fg_fail(error, FG_ERROR_DEVICE,
                           "the CUDA driver has no cuTensorMapEncodeTiled: it must be 12.0 or later");
        encoder.store(found, std::memory_order_relaxed);
    }

    /* An axis of one element still needs a legal pitch. */
    const int64_t row_pitch = rows.rows == 1 ? ceil_div<int64_t>(rows.row_bytes, 16) * 16 : rows.row_pitch;
    const int64_t group_pitch = rows.groups == 1 ? row_pitch * rows.rows : rows.group_pitch;
    const int size = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 1;
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(rows.row_bytes / size), static_cast<cuuint64_t>(rows.rows),
                                static_cast<cuuint64_t>(rows.groups)};
    const cuuint64_t pitches[] = {static_cast<cuuint64_t>(row_pitch), static_cast<cuuint64_t>(group_pitch)};
    const cuuint32_t box[] = {static_cast<cuuint32_t>(128 / size), static_cast<cuuint32_t>(box_rows),
                              static_cast<cuuint32_t>(box_groups)};
    const cuuint32_t steps[] = {1, 1, 1};
    const auto ask_driver = [&] {
        return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found)(
            map, type, 3, const_cast<void *>(rows.data), sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
            CU_TENSOR_MAP_SWIZZLE_128B, fetched, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    CUresult status = ask_driver();
    if (status == CUDA_ERROR_INVALID_CONTEXT) { /* a new thread: its device is current, but not yet for the driver */
        int device = 0;
        FG_CUDA(cudaGetDevice(&device));
        FG_CUDA(cudaSetDevice(device));
        status = ask_driver();
    }
    if (status != CUDA_SUCCESS)
        return fg_fail(error, FG_ERROR_DEVICE, "cuTensorMapEncodeTiled: error %d", static_cast<int>(status));
    return FG_OK;
}

fg_status encode_tensor_map(CUtensorMap *map, const TensorRows &rows, int box_rows, int box_groups, fg_error *error) {
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, rows, box_rows, box_groups, error);
}

fg_status encode_lines_map(CUtensorMap *map, const TensorRows &rows, int box_rows, int box_groups, fg_error *error) {
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, rows, box_rows, box_groups, error,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

fg_status encode_sums_map(CUtensorMap *map, const TensorRows &rows, int box_rows, int box_groups, fg_error *error) {
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, rows, box_rows, box_groups, error);
}

}  // namespace flexgemm
