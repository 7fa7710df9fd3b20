"""Host microseconds that one call on CUDA tensors costs besides what any implementation pays for: its kernel launches
and its allocations.

The wall time of 1,000 calls on tiny tensors, without a flush, minus the same number of bare launches and of
`torch.empty`. Calls are queued in batches with a wait in between, so that the GPU's queue never fills and blocks the
host. The bare launch is `torch.cuda._sleep`, the leanest launch that torch offers; torch's own `a.add_(1)` is reported
beside it. Of a call that launches several kernels more is taken off than they cost, since launches in a row are
cheaper: a map may come out below zero. `_C` rows are the extension alone, on outputs and workspaces made before;
`autograd.Function` is one that allocates its output, less that, with as many arguments as a convolution has: the floor
of a layer that is recorded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import flexgemm
from benchmarks import scenes
from benchmarks.results import Row, kernel_family
from benchmarks.run import Run
from benchmarks.timing import DEVICE
from flexgemm import _C
from flexgemm.torch.nn import SparseTensor, SubMConv3d

BATCHES, CALLS = 20, 50  # 1,000 calls
SIDE = 128  # of the products
GROUPS = 4
CHANNELS = 16
COUNTED = 8  # calls under the profiler


def host_us(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds until each call returns, the median over batches. They take turns, so that whatever else the host
    does meets a call and what is taken off it alike."""
    per_call: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(BATCHES + 2):  # two to warm up
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            per_call[name].append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(us[2:]) for name, us in per_call.items()}


def launches(call: Callable[[], Any]) -> int:
    """Kernels, copies and fills that one call queues."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(COUNTED):
            call()
        torch.cuda.synchronize()
    on_device = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in trace.events())
    if on_device == 0:
        raise RuntimeError("the profiler saw no kernel, so launches cannot be taken off")
    return round(on_device / COUNTED)


def allocations(call: Callable[[], Any]) -> int:
    """Requests that one call makes of torch's allocator."""
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)


def calls() -> dict[str, Callable[[], Any]]:
    """Public functions, which allocate, and the extension's, which do not."""
    torch.manual_seed(0)
    a = torch.randn(SIDE, SIDE, device=DEVICE).to(torch.float8_e4m3fn)
    b = torch.randn(GROUPS, SIDE, SIDE, device=DEVICE).to(torch.float8_e4m3fn)
    offsets = torch.tensor([SIDE * (g + 1) // GROUPS for g in range(GROUPS)], dtype=torch.int32, device=DEVICE)
    product = torch.empty(SIDE, SIDE, dtype=torch.bfloat16, device=DEVICE)

    scene = scenes.sphere(8)
    coords = torch.from_numpy(scene.coords).to(DEVICE)
    feats = torch.randn(scene.n, CHANNELS, dtype=torch.float16, device=DEVICE)
    weight = torch.randn(CHANNELS, 3, 3, 3, CHANNELS, dtype=torch.float16, device=DEVICE)
    bias = torch.randn(CHANNELS, dtype=torch.float16, device=DEVICE)
    nmap = flexgemm.neighbor_map(coords, scene.shape)
    x = SparseTensor(feats, coords, scene.shape)
    neighbors, out = torch.empty_like(nmap.map), torch.empty_like(feats)

    triple = {"shape": scene.shape, "kernel_size": (3, 3, 3), "dilation": (1, 1, 1)}
    return {
        "gemm_nt": partial(flexgemm.gemm_nt, a, b[0]),
        "gemm_nt(scale_out)": partial(flexgemm.gemm_nt, a, b[0], scale_out=torch.ones((), device=DEVICE)),
        "m_grouped_gemm_nt": partial(flexgemm.m_grouped_gemm_nt, a, b, offsets),
        "submanifold_conv3d": partial(flexgemm.submanifold_conv3d, feats, weight, bias, neighbor_map=nmap),
        "neighbor_map": partial(flexgemm.neighbor_map, coords, scene.shape),
        "SubMConv3d": partial(_layer().requires_grad_(False), x),
        "SubMConv3d, recorded": partial(_layer(), x),
        "_C.gemm": _raw(_C.gemm, _C.gemm_workspace, a, b[0], product),
        "_C.gemm(offsets)": _raw(_C.gemm, _C.gemm_workspace, a, b, product, offsets=offsets),
        "_C.conv_forward": _raw(_C.conv_forward, _C.conv_forward_workspace, feats, weight, bias, nmap.map, out),
        "_C.neighbor_map": _raw(_C.neighbor_map, _C.neighbor_map_workspace, coords, neighbors, **triple),
    }


def _layer() -> SubMConv3d:
    return SubMConv3d(CHANNELS, CHANNELS, dtype=torch.float16, device=DEVICE)


class _Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, feats: Any, weight: Any, *others: Any) -> torch.Tensor:
        ctx.save_for_backward(feats, weight)
        return _allocate()

    @staticmethod
    def backward(ctx: Any, grad_out: Any) -> Any:
        raise NotImplementedError


def _raw(function: Callable[..., None], workspace_of: Callable[..., int], *args: Any, **kwargs: Any) -> partial[None]:
    nbytes = workspace_of(*args, **kwargs)
    workspace = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE) if nbytes else None
    return partial(function, *args, workspace=workspace, **kwargs)


def _allocate() -> torch.Tensor:
    """By torch's quickest way: a size that comes as a tuple takes it half as long again."""
    return torch.empty(SIDE, SIDE, dtype=torch.bfloat16, device=DEVICE)


def run(run: Run) -> None:
    """Takes seconds and is noisy on a busy host: all of it is measured anew each time."""
    counter, layer = torch.zeros(SIDE, device=DEVICE), _layer()
    references: dict[str, Callable[[], Any]] = {
        "bare_launch": partial(torch.cuda._sleep, 1),
        "torch.empty": _allocate,
        "torch.add_": partial(counter.add_, 1),
        "autograd.Function": partial(_Empty.apply, counter, layer.weight, layer.bias, None, None),
    }
    made = {}
    for op, call in calls().items():
        with run.guarded(f"overhead {op}"):
            call()
            made[op] = call
    whole_us = host_us(references | made)  # before the profiler comes, which slows every launch down from then on
    launch, allocation = whole_us["bare_launch"], whole_us["torch.empty"]
    for op in references:
        us = whole_us[op] - (allocation if op == "autograd.Function" else 0)
        run.record({"suite": "overhead", "op": op, "us": round(us, 2)})
    for op, call in made.items():
        with run.guarded(f"overhead {op}"):
            kernels, buffers = launches(call), allocations(call)
            row: Row = {
                "suite": "overhead",
                "op": op,
                "family": kernel_family("" if "neighbor_map" in op else "float16"),
            }
            row |= {"us": round(whole_us[op] - kernels * launch - buffers * allocation, 2)}
            run.record(row | {"call_us": round(whole_us[op], 2), "launches": kernels, "allocations": buffers})
