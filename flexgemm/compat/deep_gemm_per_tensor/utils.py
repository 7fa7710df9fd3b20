"""deep_gemm_per_tensor.utils: how its programs time a kernel and judge a result. Timing needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_FLUSH_BYTES = 256 * 2**20  # more than the L2 of any GPU


def bench(fn: Callable[[], Any], num_warmups: int = 5, num_tests: int = 10, high_precision: bool = False) -> float:
    """Milliseconds of one call between CUDA events. high_precision: first keeps the GPU busy, for a head start."""
    torch.cuda.synchronize()
    _flush()
    for _ in range(num_warmups):
        fn()
    if high_precision:
        torch.cuda._sleep(20_000_000)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(num_tests):
        fn()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / num_tests


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    barrier_comm_profiling: bool = False,
    flush_l2: bool = True,
    with_multiple_kernels: bool = False,
) -> float | tuple[float, ...]:
    """Seconds of one launch of the kernels whose names contain each of kernel_names, by torch's profiler.

    Raises RuntimeError unless just one kernel has the name, or with_multiple_kernels any number. The other arguments
    are accepted; nothing is printed.
    """
    fn()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_tests):
            if flush_l2:
                _flush()
            fn()
        torch.cuda.synchronize()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    kernels = profiler.key_averages()
    times = []
    for name in names:
        found = [kernel for kernel in kernels if name in kernel.key]
        if not found or (len(found) > 1 and not with_multiple_kernels):
            raise RuntimeError(f"kernel_names: expected one kernel with {name!r} in its name, got {len(found)}")
        total = sum(kernel.self_device_time_total for kernel in found)
        times.append(total / sum(kernel.count for kernel in found) / 1e6)
    return times[0] if isinstance(kernel_names, str) else tuple(times)


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """1 - 2 <x, y> / (<x, x> + <y, y>) in float64."""
    x, y = x.double(), y.double()
    return 1 - 2 * (x * y).sum() / (x * x + y * y).sum()


def count_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the tensors, and of tuples of tensors among them."""
    return sum(count_bytes(t) if isinstance(t, tuple) else t.numel() * t.element_size() for t in tensors)


def _flush() -> None:
    torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda").zero_()
