"""deep_gemm_per_tensor.jit_kernels.utils."""

from __future__ import annotations

from flexgemm.gemm import get_m_alignment_for_contiguous_layout, get_num_sms, set_num_sms


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


__all__ = ["ceil_div", "get_m_alignment_for_contiguous_layout", "get_num_sms", "set_num_sms"]
