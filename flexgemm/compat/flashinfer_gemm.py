"""flashinfer.gemm's products over flexgemm: bmm_fp8 and SegmentGEMMWrapper."""

from __future__ import annotations

from typing import Any

import torch

import flexgemm
from flexgemm.gemm import product

__all__ = ["SegmentGEMMWrapper", "bmm_fp8"]


def bmm_fp8(
    A: torch.Tensor,
    B: torch.Tensor,
    A_scale: torch.Tensor,
    B_scale: torch.Tensor,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
    backend: str = "cublas",
) -> torch.Tensor:
    """A_scale * B_scale * (A . B) of each matrix of a batch.

    A: (b, m, k), B: (b, k, n), e4m3 or e5m2; B column-major, as of a transposed (b, n, k), or row-major.
    A_scale, B_scale: float32, one element. dtype: float16, bfloat16 or float32. out: (b, m, n) of dtype.
    backend: accepted; there is one.
    """
    row_major = B.stride(-1) == 1 and B.stride(-2) != 1
    scales: Any = {"scale_a": A_scale.reshape(()), "scale_b": B_scale.reshape(())}
    result: torch.Tensor = product(
        "batched", A, B if row_major else B.transpose(-2, -1), b_row_major=row_major, out=out, out_dtype=dtype, **scales
    )
    return result


class SegmentGEMMWrapper:
    """Products of consecutive segments of rows, each with a weight of its own: adapters.

    float_workspace_buffer, backend: accepted; flexgemm takes its own workspace from torch when it needs one.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor | None = None, backend: str = "auto") -> None:
        self.reset_workspace_buffer(float_workspace_buffer)

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any = None) -> None:
        """Accepted."""

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        batch_size: int,
        weight_column_major: bool,
        out: torch.Tensor | None = None,
        seg_lens: torch.Tensor | None = None,
        seg_indptr: torch.Tensor | None = None,
        weight_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """y[segment i] = x[segment i] . weights[weight_indices[i]].

        x: (sum of lengths, d_in). weights: (w, d_out, d_in) with weight_column_major, else (w, d_in, d_out).
        seg_lens: (batch_size,), or seg_indptr: (batch_size + 1,), where the segments begin and the last one ends.
        weight_indices: (batch_size,); by default segment i has weight i.
        out: (sum of lengths, d_out); by default of x's dtype, bfloat16 for FP8.
        Lengths, their sums and indices may lie on the CPU, as flashinfer's programs have them.

        An older order of the arguments has no `out`: seg_lens or seg_indptr by position are recognised.
        """
        if out is not None and out.ndim == 1 and not out.is_floating_point():
            out, seg_lens, seg_indptr, weight_indices = None, out, seg_lens, _first(seg_indptr, weight_indices)
        elif out is None and seg_lens is not None and len(seg_lens) == batch_size + 1:
            seg_lens, seg_indptr, weight_indices = None, seg_lens, _first(seg_indptr, weight_indices)
        if seg_lens is None and seg_indptr is None:
            raise ValueError("seg_lens, seg_indptr: expected one of them, got None")
        given, need = (seg_indptr, batch_size + 1) if seg_indptr is not None else (seg_lens, batch_size)
        if given is None or given.shape != (need,):
            name = "seg_lens" if seg_indptr is None else "seg_indptr"
            raise ValueError(f"{name}: expected ({need},), got {None if given is None else tuple(given.shape)}")
        given = given.to(x.device)
        where: Any = {"seg_lens": given} if seg_indptr is None else {"offsets": given}
        indices = None if weight_indices is None else weight_indices.to(x.device)
        how: Any = {"weight_indices": indices, "weight_column_major": weight_column_major, "out": out}
        result: torch.Tensor = flexgemm.segment_gemm(x, weights, **where, **how)
        return result

    forward = run


def _first(*tensors: torch.Tensor | None) -> torch.Tensor | None:
    return next((x for x in tensors if x is not None), None)
