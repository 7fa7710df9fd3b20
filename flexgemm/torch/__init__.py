"""flexgemm for torch: operations that autograd, torch.autocast, torch.compile and torch.func know."""

from flexgemm.torch import _requires  # noqa: F401  first
from flexgemm.torch import experts as _experts  # noqa: F401  programs may hold its operators
from flexgemm.torch.codes import decode_seq, encode_seq, sort_coords
from flexgemm.torch.ops import (
    neighbor_map,
    sparse_conv3d,
    sparse_conv3d_backward,
    sparse_inverse_conv3d,
    submanifold_conv3d,
    submanifold_conv3d_backward,
)
from flexgemm.torch.pooling import broadcast_samples, global_pool, sparse_pool3d, sparse_upsample3d
from flexgemm.torch.products import (
    batched_gemm_nt,
    gemm_nt,
    k_grouped_wgrad_gemm_nt,
    m_grouped_gemm_nt,
    m_grouped_gemm_nt_contiguous,
    m_grouped_gemm_nt_masked,
    n_grouped_gemm_nt,
    quantize,
    segment_gemm,
    wgrad_gemm_nt,
)
from flexgemm.torch.sampling import devoxelize, grid_sample_3d, reduce_points, unique_coords, voxelize

__all__ = [
    "batched_gemm_nt",
    "broadcast_samples",
    "decode_seq",
    "devoxelize",
    "encode_seq",
    "gemm_nt",
    "global_pool",
    "grid_sample_3d",
    "k_grouped_wgrad_gemm_nt",
    "m_grouped_gemm_nt",
    "m_grouped_gemm_nt_contiguous",
    "m_grouped_gemm_nt_masked",
    "n_grouped_gemm_nt",
    "neighbor_map",
    "quantize",
    "reduce_points",
    "segment_gemm",
    "sort_coords",
    "sparse_conv3d",
    "sparse_conv3d_backward",
    "sparse_inverse_conv3d",
    "sparse_pool3d",
    "sparse_upsample3d",
    "submanifold_conv3d",
    "submanifold_conv3d_backward",
    "unique_coords",
    "voxelize",
    "wgrad_gemm_nt",
]
