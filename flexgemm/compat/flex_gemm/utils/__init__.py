"""flex_gemm.utils: the store of tuning results. flexgemm plans without tuning, so it is always empty."""

from __future__ import annotations

from typing import Any


def get_autotune_cache() -> dict[str, Any]:
    """Nothing is tuned."""
    return {}


def save_autotune_cache(path: str | None = None) -> None:
    """Accepted; there is nothing to save."""


def load_autotune_cache(path_or_cache: str | dict[str, Any] | None = None) -> None:
    """Accepted; there is nothing that could use it."""


__all__ = ["get_autotune_cache", "load_autotune_cache", "save_autotune_cache"]
