/*
 * What the sm_90a kernels share: operand tiles that wgmma reads out of shared memory, and tensor maps for the copy
 * engine.
 *
 * All operand tiles are made of 128-byte rows in the 128-byte swizzle: 16-byte chunk c of row r is stored as chunk
 * c ^ (r % 8) of that row, counted from an address that is a multiple of 1024. The copy engine writes it that way
 * (CU_TENSOR_MAP_SWIZZLE_128B), and the kernels that gather rows by hand do the same.
 *
 *   K-major:  row = one mn, 64 16-bit elements of k.
 *   MN-major: row = one k, 64 16-bit elements of mn; a wider tile is such blocks of 64 one after another.
 */
#pragma once

#include <cuda.h>

#include "common.cuh"
#include "ptx.cuh"

namespace flexgemm {

constexpr int kSwizzleRowBytes = 128;
constexpr int kSwizzleAtomBytes = 8 * kSwizzleRowBytes; /* the pattern repeats; tiles start at multiples of it */
constexpr int kWarpgroup = 128;                         /* threads */

/* A wgmma matrix descriptor: address bits 4..17 in bits 0..13, leading byte offset / 16 in bits 16..29, stride byte
 * offset / 16 in bits 32..45, swizzle in bits 62..63 (1 = 128 bytes). The stride is from eight rows to the next eight;
 * `leading` is from one block of 64 to the next of an MN-major tile and not used by a K-major one. A descriptor moves
 * along its tile by adding bytes / 16. */
__device__ __forceinline__ uint64_t matrix_descriptor(const void *tile, int leading) {
    constexpr uint64_t kFixed = uint64_t{1} << 62 | static_cast<uint64_t>(kSwizzleAtomBytes / 16) << 32;
    return kFixed | static_cast<uint64_t>(leading / 16) << 16 | (ptx::shared_address(tile) & 0x3ffff) >> 4;
}

/* A tensor map of a contiguous 3-D tensor, extents and box fastest axis first. The driver's encoder is looked up at run
 * time: the module does not link against the driver, so that it can be imported without one. */
inline fg_status encode_tensor_map(CUtensorMap *map, CUtensorMapDataType type, int element_bytes, const void *data,
                                   const int64_t (&extent)[3], const int (&box)[3], fg_error *error) {
    static void *const entry = [] {
        void *found = nullptr;
        cudaDriverEntryPointQueryResult result;
        const cudaError_t status =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
        return status == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr;
    }();
    if (entry == nullptr) return fg_fail(error, FG_ERROR_DEVICE, "the CUDA driver has no cuTensorMapEncodeTiled");

    const cuuint64_t extents[3] = {static_cast<cuuint64_t>(extent[0]), static_cast<cuuint64_t>(extent[1]),
                                   static_cast<cuuint64_t>(extent[2])};
    const cuuint64_t strides[2] = {extents[0] * element_bytes, extents[0] * extents[1] * element_bytes};
    const cuuint32_t boxes[3] = {static_cast<cuuint32_t>(box[0]), static_cast<cuuint32_t>(box[1]),
                                 static_cast<cuuint32_t>(box[2])};
    const cuuint32_t steps[3] = {1, 1, 1};
    const CUresult status = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
        map, type, 3, const_cast<void *>(data), extents, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status == CUDA_SUCCESS) return FG_OK;
    return fg_fail(error, FG_ERROR_DEVICE, "cuTensorMapEncodeTiled: error %d", static_cast<int>(status));
}

}  // namespace flexgemm
