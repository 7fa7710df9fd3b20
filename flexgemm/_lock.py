"""Locks that outlive a fork."""

from __future__ import annotations

from contextlib import AbstractContextManager
from os import register_at_fork
from threading import RLock
from typing import Any


class ProcessLock:
    """A re-entrant lock, for as long as the process lives: `with lock.held(): ...`

    A forked process has another one, since no thread is left there that might hold the one before.
    """

    def __init__(self) -> None:
        self._renew()
        register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = RLock()

    def held(self) -> AbstractContextManager[Any]:
        return self._lock
