"""deep_gemm_per_tensor.jit_kernels: products of e4m3 matrices without scales, written into `out`, not by autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import flexgemm.torch as ft
from flexgemm._arguments import as_int, renamed, type_name
from flexgemm._voxels import is_sequence
from flexgemm.compat.deep_gemm_per_tensor.jit_kernels.utils import (
    ceil_div,
    get_m_alignment_for_contiguous_layout,
    get_num_sms,
    set_num_sms,
)
from flexgemm.torch.dispatch import expect_tensor

_NAMES = {"a": "lhs", "b": "rhs"}  # of flexgemm's arguments here


@torch.no_grad()
def gemm_per_tensor_fp8_fp8_bf16_nt(lhs: torch.Tensor, rhs: torch.Tensor, out: torch.Tensor) -> None:
    """out (m, n) bfloat16 = lhs (m, k) . rhs (n, k)^T."""
    _expect(out, torch.bfloat16, lhs=lhs, rhs=rhs)
    with renamed(_NAMES):
        ft.gemm_nt(lhs, rhs, out=out)


@torch.no_grad()
def m_grouped_gemm_per_tensor_fp8_fp8_bf16_nt_contiguous(
    lhs: torch.Tensor, rhs: torch.Tensor, out: torch.Tensor, m_indices: torch.Tensor
) -> None:
    """Row i of out (sum of m, n) bfloat16 = lhs[i] . rhs[m_indices[i]]^T, rhs (g, n, k), m_indices int32, -1 for
    rows of padding, which are left alone; groups begin at multiples of get_m_alignment_for_contiguous_layout()."""
    _expect(out, torch.bfloat16, lhs=lhs, rhs=rhs)
    with renamed(_NAMES):
        ft.m_grouped_gemm_nt_contiguous(lhs, rhs, _flat(m_indices, "m_indices"), out=out)


@torch.no_grad()
def m_grouped_gemm_per_tensor_fp8_fp8_bf16_nt_masked(
    lhs: torch.Tensor, rhs: torch.Tensor, out: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> None:
    """The first masked_m[g] rows of out[g] (g, m_max, n) bfloat16 = lhs[g] . rhs[g]^T; any m_max."""
    _expect(out, torch.bfloat16, lhs=lhs, rhs=rhs)
    with renamed(_NAMES):
        ft.m_grouped_gemm_nt_masked(lhs, rhs, _flat(masked_m, "masked_m"), expected_m, out=out)


@torch.no_grad()
def wgrad_gemm_per_tensor_fp8_fp8_fp32_nt(lhs: torch.Tensor, rhs: torch.Tensor, out: torch.Tensor) -> None:
    """out (m, n) float32 += lhs (m, k) . rhs (n, k)^T."""
    _expect(out, torch.float32, lhs=lhs, rhs=rhs)
    with renamed(_NAMES):
        ft.wgrad_gemm_nt(lhs, rhs, out=out)


@torch.no_grad()
def k_grouped_wgrad_gemm_per_tensor_fp8_fp8_fp32_nt(
    lhs: torch.Tensor, rhs: torch.Tensor, out: torch.Tensor, batch_sizes: Sequence[int]
) -> None:
    """out[i] (g, m, n) float32 += lhs_i . rhs_i^T, where lhs and rhs are flat: the matrices (m, k_i), and (n, k_i), one
    after the other, k_i = batch_sizes[i]."""
    _expect(out, torch.float32, lhs=lhs, rhs=rhs)
    if not is_sequence(batch_sizes):
        raise TypeError(f"batch_sizes: expected a sequence of ints, got {type_name(batch_sizes)}")
    batch_sizes = [as_int(k, "batch_sizes", least=0) for k in batch_sizes]
    if out.ndim != 3 or len(batch_sizes) != out.shape[0]:
        raise ValueError(f"out: expected ({len(batch_sizes)}, m, n) to match batch_sizes, got {tuple(out.shape)}")
    total = sum(batch_sizes)
    for name, x, rows in (("lhs", lhs, out.shape[1]), ("rhs", rhs, out.shape[2])):
        if x.ndim != 1 or x.numel() != rows * total:
            raise ValueError(
                f"{name}: expected ({rows * total},), {rows} rows of all batch_sizes, got {tuple(x.shape)}"
            )
    pieces = (x.split([rows * k for k in batch_sizes]) for x, rows in ((lhs, out.shape[1]), (rhs, out.shape[2])))
    for k, a, b, result in zip(batch_sizes, *pieces, out, strict=True):
        ft.wgrad_gemm_nt(a.view(out.shape[1], k), b.view(out.shape[2], k), out=result)


def _flat(x: torch.Tensor, name: str) -> torch.Tensor:
    """What has a number for each row or group, in whatever shape."""
    expect_tensor(x, name)
    return x.flatten()


def _expect(out: torch.Tensor, dtype: torch.dtype, **factors: torch.Tensor) -> None:
    """The dtypes that each function's name tells."""
    for name, x in factors.items():
        expect_tensor(x, name)
        if x.dtype is not torch.float8_e4m3fn:
            raise TypeError(f"{name}: expected float8_e4m3fn, got {x.dtype}")
    expect_tensor(out, "out")
    if out.dtype is not dtype:
        raise TypeError(f"out: expected {dtype}, got {out.dtype}")


__all__ = [
    "ceil_div",
    "gemm_per_tensor_fp8_fp8_bf16_nt",
    "get_m_alignment_for_contiguous_layout",
    "get_num_sms",
    "k_grouped_wgrad_gemm_per_tensor_fp8_fp8_fp32_nt",
    "m_grouped_gemm_per_tensor_fp8_fp8_bf16_nt_contiguous",
    "m_grouped_gemm_per_tensor_fp8_fp8_bf16_nt_masked",
    "set_num_sms",
    "wgrad_gemm_per_tensor_fp8_fp8_fp32_nt",
]
