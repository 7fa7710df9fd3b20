"""flexgemm: submanifold sparse 3-D convolution and FP8 products, in hand-written C and CUDA C.

The functions take and give arrays of torch, NumPy, CuPy or JAX alike (docs/arrays.md). Importing this package imports
NumPy and the extension, nothing else; `flexgemm.torch` holds what only torch needs and is imported on demand.
"""

try:
    from flexgemm._C import DeviceArray, build_info, device_count, device_info
except ModuleNotFoundError as error:
    if error.name != "flexgemm._C":
        raise
    need = "leave this folder to import an installed flexgemm, or build it here (pip install -e ., make build)"
    raise ImportError(f"flexgemm: {__path__[0]} holds sources without a built extension: {need}") from error
from flexgemm.conv import (
    sparse_conv3d,
    sparse_conv3d_backward,
    sparse_inverse_conv3d,
    submanifold_conv3d,
    submanifold_conv3d_backward,
)
from flexgemm.gemm import (
    batched_gemm_nt,
    gemm_nt,
    get_m_alignment_for_contiguous_layout,
    get_num_sms,
    interleave_gate_up,
    k_grouped_wgrad_gemm_nt,
    m_grouped_gemm_nt,
    m_grouped_gemm_nt_contiguous,
    m_grouped_gemm_nt_masked,
    n_grouped_gemm_nt,
    segment_gemm,
    set_num_sms,
    wgrad_gemm_nt,
)
from flexgemm.grid_sample import SampleMap, grid_sample_3d, grid_sample_3d_backward, sample_map
from flexgemm.hash_table import HashTable
from flexgemm.pool import (
    broadcast_samples,
    global_pool,
    global_pool_backward,
    sparse_pool3d,
    sparse_pool3d_backward,
    sparse_upsample3d,
)
from flexgemm.quantization import quantize
from flexgemm.serialize import decode_seq, encode_seq, sort_coords
from flexgemm.voxel import NeighborMap, neighbor_map, sparse_conv_map
from flexgemm.voxelize import Voxels, devoxelize, reduce_points, unique_coords, voxelize

__version__: str = build_info()["version"]

__all__ = [
    "DeviceArray",
    "HashTable",
    "NeighborMap",
    "SampleMap",
    "Voxels",
    "batched_gemm_nt",
    "broadcast_samples",
    "build_info",
    "decode_seq",
    "device_count",
    "device_info",
    "devoxelize",
    "encode_seq",
    "gemm_nt",
    "get_m_alignment_for_contiguous_layout",
    "get_num_sms",
    "global_pool",
    "global_pool_backward",
    "grid_sample_3d",
    "grid_sample_3d_backward",
    "interleave_gate_up",
    "k_grouped_wgrad_gemm_nt",
    "m_grouped_gemm_nt",
    "m_grouped_gemm_nt_contiguous",
    "m_grouped_gemm_nt_masked",
    "n_grouped_gemm_nt",
    "neighbor_map",
    "quantize",
    "reduce_points",
    "sample_map",
    "segment_gemm",
    "set_num_sms",
    "sort_coords",
    "sparse_conv3d",
    "sparse_conv3d_backward",
    "sparse_conv_map",
    "sparse_inverse_conv3d",
    "sparse_pool3d",
    "sparse_pool3d_backward",
    "sparse_upsample3d",
    "submanifold_conv3d",
    "submanifold_conv3d_backward",
    "unique_coords",
    "voxelize",
    "wgrad_gemm_nt",
]
