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

__all__ = [
    "batched_gemm_nt",
    "gemm_nt",
    "global_pool",
    "m_grouped_gemm_nt",
    "m_grouped_gemm_nt_contiguous",
    "m_grouped_gemm_nt_masked",
    "n_grouped_gemm_nt",
    "neighbor_map",
    "quantize",
    "sparse_conv3d",
    "sparse_conv3d_backward",
    "sparse_inverse_conv3d",
    "sparse_pool3d",
    "sparse_upsample3d",
    "submanifold_conv3d",
    "submanifold_conv3d_backward",
]
