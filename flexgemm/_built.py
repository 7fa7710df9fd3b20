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

    # The value and the mark behind its building, None once that is known to be over: one attribute, so that a thread
    # never has the one without the other.
    _kept: tuple[Any, object | None] | None

    def __init__(self, value: Any = None, *, done: bool = False) -> None:
        """Nothing yet; or, where that is done, a value that any work may read, or None: there is none to be built."""
        self._kept = (value, None) if done else None

    @property
    def value(self) -> Any:
        """The value, which may be still in the building: only `get` and `ready` give it to be read."""
        kept = self._kept
        return None if kept is None else kept[0]

    @property
    def done(self) -> bool:
        """Whether any work may read the value at once, as far as is known."""
        kept = self._kept
        return kept is not None and kept[1] is None

    @property
    def ready(self) -> Any:
        """The value where it is done, or None."""
        kept = self._kept
        return kept[0] if kept is not None and kept[1] is None else None

    def keep(self, value: Any, array: Array, stream: Stream) -> None:
        """Of what has just been built where work on the array goes. While that is captured nothing is kept, because it
        is there only when the graph has been replayed. What another thread has kept meanwhile stays."""
        if _C.is_capturing(array, stream=stream):
            return
        mark = _C.mark(array, stream=stream)
        if self._kept is None:
            self._kept = value, mark

    def settle(self) -> Built:
        """Asks the device whether the building is over; returns itself."""
        kept = self._kept
        if kept is not None and kept[1] is not None and _C.passed(kept[1]):
            self._kept = kept[0], None
        return self

    def get(self, array: Array, stream: Stream) -> Any:
        """The value, for work where work on the array goes: that waits for it. None where nothing has been built, and
        where that work is captured and would have to wait."""
        kept = self.settle()._kept
        if kept is None:
            return None
        value, mark = kept
        return value if mark is None or _C.wait_for(mark, array, stream=stream) else None

    def of(self, array: Array, stream: Stream, build: Callable[[], Any]) -> Any:
        """The value as of `get`, built if need be. What is built while that work is captured is its graph's alone."""
        value = self.get(array, stream)
        if value is None:
            value = build()
            self.keep(value, array, stream)
        return value

    def __getstate__(self) -> dict[str, Any]:
        """For copies and files, which are made on any stream: without what is still in the building."""
        kept = self.settle()._kept
        return {"_kept": kept if kept is not None and kept[1] is None else None}
