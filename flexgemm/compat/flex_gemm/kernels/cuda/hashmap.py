"""Hash tables in FlexGEMM's form: two tensors of the caller's, keys and values, and nothing besides.

An empty slot has a key with all bits set; the caller fills the keys with it, to begin with or anew. Keys and values are
uint32 or uint64; the value of a missing key has all bits set. A key that is inserted again gets its new value. Which
slot a key has is up to flexgemm, and the last slot stays free: N keys need at least N + 1.
"""

from __future__ import annotations

from typing import Any

import torch

from flexgemm import _C
from flexgemm._arguments import renamed
from flexgemm._arrays import library_of

_NAMES = {"table_keys": "hashmap_keys", "table_values": "hashmap_values"}  # of the extension's arguments here
_ANY_WAY = 2**62  # how far a key may lie from its first slot: lookups go on to the key or to a free slot


def hashmap_insert(
    hashmap_keys: torch.Tensor, hashmap_values: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """keys (M), values (M)."""
    _insert(hashmap_keys, hashmap_values, _signed(keys, "keys"), _signed(values, "values"), None)


def hashmap_lookup(hashmap_keys: torch.Tensor, hashmap_values: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The values (M) of keys (M)."""
    return _lookup(hashmap_keys, hashmap_values, _signed(keys, "keys"), None)


def hashmap_insert_3d(
    hashmap_keys: torch.Tensor,
    hashmap_values: torch.Tensor,
    coords: torch.Tensor,
    values: torch.Tensor,
    W: int,
    H: int,
    D: int,
) -> None:
    """coords (M, 4) int32 [batch, x, y, z], values (M)."""
    _insert(hashmap_keys, hashmap_values, coords, _signed(values, "values"), _grid(hashmap_keys, W, H, D))


def hashmap_insert_3d_idx_as_val(
    hashmap_keys: torch.Tensor, hashmap_values: torch.Tensor, coords: torch.Tensor, W: int, H: int, D: int
) -> None:
    """The same with the number of each row as its value."""
    _insert(hashmap_keys, hashmap_values, coords, None, _grid(hashmap_keys, W, H, D))


def hashmap_lookup_3d(
    hashmap_keys: torch.Tensor, hashmap_values: torch.Tensor, coords: torch.Tensor, W: int, H: int, D: int
) -> torch.Tensor:
    """The values (M) of coords (M, 4)."""
    return _lookup(hashmap_keys, hashmap_values, coords, _grid(hashmap_keys, W, H, D))


def _insert(
    hashmap_keys: torch.Tensor,
    hashmap_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    grid: tuple[int, ...] | None,
) -> None:
    if len(keys) == 0:
        return
    table = _table(hashmap_keys, hashmap_values, longest=0)
    given: Any = None if values is None else values.contiguous()
    with renamed(_NAMES):
        library_of(keys, "keys").run(_C.hash_insert, keys.contiguous(), given, *table, shape=grid, replace=True)


def _lookup(
    hashmap_keys: torch.Tensor, hashmap_values: torch.Tensor, keys: torch.Tensor, grid: tuple[int, ...] | None
) -> torch.Tensor:
    if len(keys) == 0:
        return hashmap_values.new_empty((0,))
    table = _table(hashmap_keys, hashmap_values, longest=_ANY_WAY)
    out = keys.new_empty((len(keys),), dtype=table[1].dtype)
    with renamed(_NAMES):
        library_of(keys, "keys").run(_C.hash_lookup, keys.contiguous(), *table, out, shape=grid)
    return out.view(hashmap_values.dtype)


def _table(hashmap_keys: torch.Tensor, hashmap_values: torch.Tensor, longest: int) -> tuple[torch.Tensor, ...]:
    """The table as the extension takes it: keys, values and its state, which is not kept from call to call."""
    if len(hashmap_keys) < 2:
        raise ValueError(f"hashmap_keys: expected at least 2 slots, got {len(hashmap_keys)}")
    state = torch.full((2,), longest, dtype=torch.int64, device=hashmap_keys.device)
    return _signed(hashmap_keys, "hashmap_keys"), _signed(hashmap_values, "hashmap_values"), state


def _grid(hashmap_keys: torch.Tensor, *extents: int) -> tuple[int, ...]:
    """As many samples of these extents as keys can number."""
    voxels = max(extents[0] * extents[1] * extents[2], 1)
    numbers = 2**32 if hashmap_keys.element_size() == 4 else 2**63 - 1
    if voxels > numbers:
        raise ValueError(f"hashmap_keys: expected uint64 for {voxels} voxels a sample, got {hashmap_keys.dtype}")
    return min(2**31 - 1, numbers // voxels), *extents


def _signed(x: torch.Tensor, name: str) -> torch.Tensor:
    if x.element_size() not in (4, 8) or x.is_floating_point():
        raise TypeError(f"{name}: expected uint32 or uint64, got {x.dtype}")
    return x.view(torch.int32 if x.element_size() == 4 else torch.int64)
