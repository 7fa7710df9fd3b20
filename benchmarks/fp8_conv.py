"""Submanifold convolution in FP8 for inference, and the same in fp16 beside it.

fp8_fwd has a scale for each row of feats and each output channel, as quantize gives them; both write fp16.
"""

from __future__ import annotations

from functools import partial

import torch

import flexgemm
from benchmarks.check import TOLERANCE, ConvReference, judge_result, judge_similarity
from benchmarks.scenes import Scene
from benchmarks.timing import DEVICE
from benchmarks.work import Case, Work

SCENES = (("sphere64", 1024), ("sphere128", 512), ("sphere256", 256), ("sphere512", 128), ("sphere1024", 64))
DTYPES = {"fp8_fwd": "float8_e4m3fn", "fp16_fwd": "float16"}
# 1 - cosine-like similarity of an fp16 row with the exact product: rounding, and what sums promoted every 128 products
# lose. Sums that are not promoted lose 1e-6.
FP16_OUT_DIFF = 8e-8


def cases() -> list[Case]:
    return [
        Case(op, scene, partial(make, op, channels), dtype=dtype, channels=channels)
        for scene, channels in SCENES
        for op, dtype in DTYPES.items()
    ]


def make(op: str, channels: int, scene: Scene) -> Work:
    torch.manual_seed(0)
    dtype, kernel = torch.float16, (scene.kernel,) * 3
    feats = torch.randn(scene.n, channels, device=DEVICE, dtype=dtype)
    weight = torch.randn(channels, scene.volume * channels, device=DEVICE, dtype=dtype)
    weight *= (scene.volume * channels) ** -0.5
    bias = torch.randn(channels, device=DEVICE, dtype=dtype)
    nmap = flexgemm.neighbor_map(torch.from_numpy(scene.coords).to(DEVICE), scene.shape, kernel_size=scene.kernel)
    scales = {}
    meant = feats, weight
    if op == "fp8_fwd":
        feats, of_rows = flexgemm.quantize(feats, granularity="row")
        weight, of_channels = flexgemm.quantize(weight, granularity="row")
        scales = {"scale_feats": of_rows, "scale_weight": of_channels, "out_dtype": dtype}
        meant = feats.double() * of_rows[:, None], weight.double() * of_channels[:, None]
    shape = channels, *kernel, channels
    reference = ConvReference(scene, meant[0], meant[1].view(shape), bias, bias)

    def judge(out: torch.Tensor) -> None:
        expected = reference.forward()
        judge_result("out", out, reference.rows, expected, TOLERANCE["float16"])
        if op == "fp8_fwd":
            judge_similarity("out", out[reference.rows], expected, FP16_OUT_DIFF)

    call = partial(flexgemm.submanifold_conv3d, feats, weight.view(shape), bias, neighbor_map=nmap, **scales)
    moved = scene.n * channels * (feats.element_size() + 2) + weight.nbytes + 4 * scene.pairs
    flops = 2.0 * scene.pairs * channels**2
    return Work(call, judge, scene.n, moved, flops, "float8" if op == "fp8_fwd" else "float16")
