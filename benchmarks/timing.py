"""How every GPU time is taken: after a rest, CUDA events around one Python call, L2 flushed before it, the median of
many.

The events enclose the whole call, so that host work shows where it outlasts the GPU's and the flush before it, some
80 us. torch is used for its events and buffers only.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

DEVICE = "cuda"
FLUSH_BYTES = 256 << 20  # several times any L2
REST_SECONDS = 0.1  # the power limit looks back some tens of milliseconds: no time depends on what was timed before
WARMUP_MS = 20.0
MEASURE_MS = 100.0
MIN_REPEATS = 20
ESTIMATE_REPEATS = 5


class Timer:
    """Owns the buffer that flushes L2."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=DEVICE)

    def median_ms(self, call: Callable[[], Any]) -> float:
        """Milliseconds of one call: a rest, 20 ms of warm-up, then 100 ms or 20 repeats, whichever is more."""
        call()  # first use loads the kernels
        torch.cuda.synchronize()
        time.sleep(REST_SECONDS)
        with_flush = sum(self._run(call, ESTIMATE_REPEATS, flush_timed=True)) / ESTIMATE_REPEATS
        self._run(call, max(1, math.ceil(WARMUP_MS / with_flush)))
        return statistics.median(self._run(call, max(MIN_REPEATS, math.ceil(MEASURE_MS / with_flush))))

    def _run(self, call: Callable[[], Any], repeats: int, flush_timed: bool = False) -> list[float]:
        """Queues all repeats without waiting in between, as a program would; waits once at the end."""
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        for start, end in zip(starts, ends, strict=True):
            if flush_timed:
                start.record()
            self._flush.zero_()
            if not flush_timed:
                start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
