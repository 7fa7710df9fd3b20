"""The state that every suite shares while it runs: the results so far, the clock, and the words on the screen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.check import Wrong
from benchmarks.results import Results, Row, describe, figures


class OutOfTime(Exception):
    """The step's time is over; what is measured is stored, and running it again goes on from there."""


@dataclass
class Run:
    results: Results
    deadline: float  # in time.monotonic()
    failures: list[str] = field(default_factory=list)

    def pending(self, rows: list[Row]) -> list[Row]:
        """The identities in `rows` that the file lacks. Starts no case past the deadline."""
        left = [row for row in rows if row not in self.results]
        if left and time.monotonic() > self.deadline:
            raise OutOfTime
        return left

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def record(self, row: Row, progress: str = "") -> None:
        self.results.add(row)
        print(f"{progress}{describe(row)}: {figures(row)}", flush=True)

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """A failure inside is said and counted, and the run goes on with what comes after the block."""
        try:
            yield
        except Wrong as error:
            self.fail(f"{what}: WRONG RESULT, not timed: {error}")
        except Exception as error:
            self.fail(f"{what}: {type(error).__name__}: {error}")

    def fail(self, message: str) -> None:
        self.failures.append(message)
        print(message, flush=True)
