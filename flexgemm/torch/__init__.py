"""flexgemm for torch: operations that autograd, torch.autocast, torch.compile and torch.func know."""

from flexgemm.torch.ops import (
    neighbor_map,
    sparse_conv3d,
    sparse_conv3d_backward,
    sparse_inverse_conv3d,
    submanifold_conv3d,
    submanifold_conv3d_backward,
)
from flexgemm.torch.pooling import global_pool, sparse_pool3d, sparse_upsample3d
from flexgemm.torch.products import (
    batched_gemm_nt,
    gemm_nt,
    m_grouped_gemm_nt,
    m_grouped_gemm_nt_contiguous,
    m_grouped_gemm_nt_masked,
    n_grouped_gemm_nt,
    quantize,
)
from flexgemm.torch.sampling import devoxelize, grid_sample_3d, reduce_points

__all__ = [
    "batched_gemm_nt",
    "devoxelize",
    "gemm_nt",
    "global_pool",
    "grid_sample_3d",
    "m_grouped_gemm_nt",
    "m_grouped_gemm_nt_contiguous",
    "m_grouped_gemm_nt_masked",
    "n_grouped_gemm_nt",
    "neighbor_map",
    "quantize",
    "reduce_points",
    "sparse_conv3d",
    "sparse_conv3d_backward",
    "sparse_inverse_conv3d",
    "sparse_pool3d",
    "sparse_upsample3d",
    "submanifold_conv3d",
    "submanifold_conv3d_backward",
]
