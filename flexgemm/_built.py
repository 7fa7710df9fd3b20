"""What is built once, on one stream, for work on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexgemm import _C
from flexgemm._arrays import Array, Stream


class Built:
    """What is built when it is first asked for, on the stream that is current then, and serves all later work: other
    streams wait until it is there. A thread that asks at the same time may build it as well, but never reads it early.
    """

    value: Any  # None: not built yet or, where that is done, nothing at all
    done: bool  # whether any work may read it at once

    def __init__(self, value: Any = None, *, done: bool = False) -> None:
        self.value = value
        self.done = done
        self._mark: object | None = None  # behind the building, until that is known to be over

    def keep(self, value: Any, array: Array, stream: Stream) -> None:
        """Of what has just been built where work on the array goes; not while that is captured, because then it is
        there only when the graph has been replayed."""
        self._mark = _C.mark(array, stream=stream)
        self.value = value

    def get(self, array: Array, stream: Stream) -> Any:
        """The value, for work where work on the array goes: that waits for it. None where nothing has been built, and
        where that work is captured and would have to wait."""
        value, mark = self.value, self._mark  # in this order, opposite to that in which they are written
        if value is None or mark is None:
            return value
        if _C.passed(mark):
            self.done, self._mark = True, None
            return value
        return value if _C.wait_for(mark, array, stream=stream) else None

    def of(self, array: Array, stream: Stream, build: Callable[[], Any]) -> Any:
        """The value as of `get`, built if need be. What is built while that work is captured is its graph's alone."""
        value = self.get(array, stream)
        if value is None:
            value = build()
            if not _C.is_capturing(array, stream=stream):
                self.keep(value, array, stream)
        return value

    def __getstate__(self) -> dict[str, Any]:
        """Of copies: they are made behind the building."""
        return {"value": self.value, "done": self.done or self.value is not None, "_mark": None}
