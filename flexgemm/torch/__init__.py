"""flexgemm for torch: operations that autograd, torch.autocast, torch.compile and torch.func know."""

from flexgemm.torch.ops import (
    gemm_nt,
    m_grouped_gemm_nt,
    neighbor_map,
    quantize,
    submanifold_conv3d,
    submanifold_conv3d_backward,
)

__all__ = [
    "gemm_nt",
    "m_grouped_gemm_nt",
    "neighbor_map",
    "quantize",
    "submanifold_conv3d",
    "submanifold_conv3d_backward",
]
