"""Hash tables in FlexGEMM's form: two tensors that the caller allocates, and that name the table from then on.

What is inserted is kept in a HashTable of flexgemm for as long as the tensor of keys lives; the tensors themselves are
not written. Keys and values are uint32 or uint64; the value of a missing key has all bits set.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

from flexgemm import HashTable

_tables: WeakIdKeyDictionary = WeakIdKeyDictionary()


def hashmap_insert(
    hashmap_keys: torch.Tensor, hashmap_values: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """keys (M), values (M)."""
    _table(hashmap_keys, hashmap_values, None).insert(_signed(keys), _signed(values))


def hashmap_lookup(hashmap_keys: torch.Tensor, hashmap_values: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The values (M) of keys (M)."""
    return _unsigned(_table(hashmap_keys, hashmap_values, None).lookup(_signed(keys)))


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
    _table(hashmap_keys, hashmap_values, (W, H, D)).insert(coords, _signed(values))


def hashmap_insert_3d_idx_as_val(
    hashmap_keys: torch.Tensor, hashmap_values: torch.Tensor, coords: torch.Tensor, W: int, H: int, D: int
) -> None:
    """The same with the number of each row as its value."""
    _table(hashmap_keys, hashmap_values, (W, H, D)).insert(coords)


def hashmap_lookup_3d(
    hashmap_keys: torch.Tensor, hashmap_values: torch.Tensor, coords: torch.Tensor, W: int, H: int, D: int
) -> torch.Tensor:
    """The values (M) of coords (M, 4)."""
    return _unsigned(_table(hashmap_keys, hashmap_values, (W, H, D)).lookup(coords))


def _table(keys: torch.Tensor, values: torch.Tensor, extents: tuple[int, int, int] | None) -> HashTable:
    """The table that a tensor of keys names; made when it is first used."""
    if keys not in _tables:
        shape: tuple[int, ...] | None = None
        key_dtype = "int32" if keys.element_size() == 4 else "int64"
        if extents is not None:
            w, h, d = extents
            shape, key_dtype = (min(2**31 - 1, (2**63 - 1) // (w * h * d)), w, h, d), "int64"
        value_dtype = "int32" if values.element_size() == 4 else "int64"
        _tables[keys] = HashTable(
            max(len(keys), 1), like=_signed(keys), shape=shape, key_dtype=key_dtype, value_dtype=value_dtype
        )
    table: HashTable = _tables[keys]
    return table


def _signed(x: torch.Tensor) -> torch.Tensor:
    return x.view({4: torch.int32, 8: torch.int64}[x.element_size()])


def _unsigned(x: torch.Tensor) -> torch.Tensor:
    return x.view({4: torch.uint32, 8: torch.uint64}[x.element_size()])
