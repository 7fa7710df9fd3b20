"""The FP8 grouped product of a small mixture of experts, against float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import flexgemm

TOKENS, EXPERTS, IN_FEATURES, OUT_FEATURES = 1024, 8, 512, 256


@dataclass
class Result:
    group_sizes: list[int]
    error_dequantised: float  # against the exact product of what was multiplied: the arithmetic's own error
    error_unquantised: float  # against the exact product of the float32 inputs: what the cast to FP8 costs


def mixture_of_experts(rng: np.random.Generator, device: str) -> Result:
    """Routes random tokens to random experts by a softmax's largest score; e4m3, a scale per row, float32 out."""
    tokens = rng.normal(size=(TOKENS, IN_FEATURES)).astype(np.float32)
    weights = rng.normal(0, IN_FEATURES**-0.5, (EXPERTS, OUT_FEATURES, IN_FEATURES)).astype(np.float32)
    expert = np.argmax(tokens @ rng.normal(size=(IN_FEATURES, EXPERTS)).astype(np.float32), axis=1)
    tokens = tokens[np.argsort(expert, kind="stable")]
    sizes = np.bincount(expert, minlength=EXPERTS)
    offsets = np.cumsum(sizes).astype(np.int32)

    a, scale_a = flexgemm.quantize(tokens, granularity="row", device=device)
    b, scale_b = flexgemm.quantize(weights.reshape(-1, IN_FEATURES), granularity="row", device=device)
    b, scale_b = b.reshape(weights.shape), scale_b.reshape(EXPERTS, OUT_FEATURES)
    out = flexgemm.m_grouped_gemm_nt(
        a, b, offsets, scale_a=scale_a, scale_b=scale_b, out_dtype="float32", device=device
    )

    dequantised_a = a.astype(np.float64) * scale_a[:, None]
    dequantised_b = b.astype(np.float64) * scale_b[..., None]
    return Result(
        sizes.tolist(),
        relative_error(out, exact_product(dequantised_a, dequantised_b, offsets)),
        relative_error(out, exact_product(tokens.astype(np.float64), weights.astype(np.float64), offsets)),
    )


def exact_product(a: NDArray[np.float64], b: NDArray[np.float64], offsets: NDArray[np.int32]) -> NDArray[np.float64]:
    return np.concatenate([rows @ w.T for rows, w in zip(np.split(a, offsets[:-1]), b, strict=True)])


def relative_error(x: NDArray[np.float32], reference: NDArray[np.float64]) -> float:
    """||x - reference|| / ||reference||"""
    return float(np.linalg.norm(x - reference) / np.linalg.norm(reference))
