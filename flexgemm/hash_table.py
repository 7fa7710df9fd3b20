"""A hash table from integers or voxels to integers, in memory of the caller's array library."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from flexgemm import _C
from flexgemm._arguments import as_bool, as_int, dtype_name, renamed
from flexgemm._arrays import Array, Library, Stream, library_of
from flexgemm._lock import ProcessLock
from flexgemm._voxels import Shape, grid_shape, rows_of_four

WORDS = ("int32", "int64")
MOST_KEYS = 2**59 - 2  # the bytes of their slots and of that of -1 are a number of 63 bits
_clearing = ProcessLock()  # else two first insertions clear each other's keys; of all tables: locks cannot be copied
SLOTS_PER_KEY = 2  # of `build`: half of the slots stay free, so that a key lies near its first slot


class HashTable:
    """Keys of 32 or 64 bits, each with a value of 32 or 64 bits.

    Keys are integers, any of them, or voxels: rows [batch, x, y, z] of a grid whose `shape` the table was made with.
    Values are any integers; a key that is missing has the value -1 (all bits set).

    Of equal keys in one insertion the lowest row wins, whatever the scheduling. A key that is there already keeps its
    value, or gets the new one with replace=True. Keys are not removed.

    A table holds at most `capacity` keys besides -1, which has a slot of its own. One key too many is an error: on the
    CPU `insert` raises ValueError; on a GPU, where nothing waits for the result, `overflowed` tells, and `insert` with
    check=True raises. Which keys are missing then is not determined. Insertion and lookup end whatever the table holds;
    they take longer the fuller it is.

    The first insertion also empties a table: where that is captured in a CUDA graph, each replay does, and nothing else
    may use the table before one.

        table = HashTable.build(keys)               # key -> its row
        rows = table.lookup(queries)                # -1 where there is none

    Memory is of the array library of `like`, or of the keys that `build` is given: 8 bytes a slot of 32-bit keys and
    values, else 16, and while inserting up to 4 bytes a slot and 8 a key more.
    """

    capacity: int  # keys that it has room for
    shape: Shape | None  # (B, W, H, D) where keys are voxels
    key_dtype: str  # "int32" or "int64"
    value_dtype: str  # "int32" or "int64"
    native: tuple[Array, None, Array]  # slots and state as the extension takes them

    def __init__(
        self,
        capacity: int,
        *,
        like: Array,
        shape: Sequence[int] | None = None,
        key_dtype: str = "int64",
        value_dtype: str = "int32",
        device: str | None = None,
        stream: Stream = None,
    ) -> None:
        """An empty table.

        capacity: keys that it has room for, at least 1.
        like: any array; the table's memory is of its library, where it is.
        shape: (B, W, H, D) when keys are voxels; their numbers must fit key_dtype (int32: 2**32 voxels).
        key_dtype, value_dtype: "int32" or "int64".
        device: "cuda" or "cuda:1" puts the table of a NumPy `like` on a GPU, where NumPy keys are then computed.
        stream: a CUDA stream (an int or an object with __cuda_stream__) instead of the array library's current one.
        """
        library = library_of(like, "like", device, stream)
        self.capacity = as_int(capacity, "capacity")
        if not 1 <= self.capacity <= MOST_KEYS:
            raise ValueError(f"capacity: expected 1 to {MOST_KEYS}, got {capacity}")
        self.shape = None if shape is None else grid_shape(shape)
        self.key_dtype = dtype_name(key_dtype, "key_dtype", WORDS)
        self.value_dtype = dtype_name(value_dtype, "value_dtype", WORDS)
        self._device = device
        word = "int32" if self.key_dtype == self.value_dtype == "int32" else "int64"
        slots = library.empty((self.capacity + 1, 2), word, like)  # a key beside its value: one trip to memory for both
        self.native = slots, None, library.empty((2,), "int64", like)
        self._fresh = True  # not cleared yet: on a GPU the first insertion does that too
        if not library.on_gpu(like):  # where one that fails tells afterwards whether the table is full
            self._clear(library)

    @classmethod
    def build(
        cls,
        keys: Array,
        values: Array | None = None,
        *,
        shape: Sequence[int] | None = None,
        capacity: int | None = None,
        value_dtype: str | None = None,
        device: str | None = None,
        stream: Stream = None,
    ) -> HashTable:
        """A table of these keys.

        keys: (N,) int32 or int64; or voxels (N, 4) int32 with their shape (B, W, H, D).
        values: (N,) int32 or int64; by default the number of each key's row.
        capacity: 2 N by default.
        value_dtype: of the numbers of rows; "int32" by default. Of `values` their own.

        Raises by argument name as `insert` does.
        """
        library = library_of(keys, "keys", device, stream)
        if len(keys.shape) not in (1, 2):
            raise ValueError(f"keys: expected (N,) or voxels (N, 4), got {tuple(keys.shape)}")
        if values is not None:
            own = _word(library, values, "values")
            if value_dtype is not None and dtype_name(value_dtype, "value_dtype", WORDS) != own:
                raise ValueError(f"value_dtype: expected None or {own}, the dtype of values, got {value_dtype}")
            value_dtype = own
        if shape is None:
            key_dtype = _word(library, keys, "keys")
        else:
            key_dtype = "int32" if _C.sequence_bits(shape=grid_shape(shape), mode="bxyz") <= 32 else "int64"
        count = max(SLOTS_PER_KEY * int(keys.shape[0]), 1) if capacity is None else capacity
        table = cls(
            count,
            like=keys,
            shape=shape,
            key_dtype=key_dtype,
            value_dtype=value_dtype or "int32",
            device=device,
            stream=stream,
        )
        table.insert(keys, values, stream=stream)
        return table

    def insert(
        self,
        keys: Array,
        values: Array | None = None,
        *,
        replace: bool = False,
        check: bool = False,
        stream: Stream = None,
    ) -> HashTable:
        """Puts the keys that the table lacks into it, and returns the table.

        keys: (N,) of the table's key dtype; of a table with a shape voxels (N, 4) int32.
        values: (N,) of the table's value dtype; by default the number of each key's row, counted from 0.
        replace: keys that are there already get their value of this call too.
        check: raise ValueError when the table is full; synchronises. The CPU always raises. On a GPU voxels outside the
            shape are left out, on the CPU they raise.
        """
        library = library_of(keys, "keys", self._device, stream)
        check = as_bool(check, "check")
        keys = self._expected(library, keys)
        if values is not None:
            values = _of_dtype(library, library.contiguous(values, "values"), "values", self.value_dtype)
        self._insert(library, keys, values, replace)
        if check and self._overflowed(library):
            raise ValueError(f"keys: expected a table with room for them, got one of capacity {self.capacity}")
        return self

    def lookup(self, keys: Array, *, stream: Stream = None) -> Array:
        """(N,) of the table's value dtype: the value of each key, -1 where the table lacks it. Voxels outside the
        shape are in no table."""
        library = library_of(keys, "keys", self._device, stream)
        keys = self._expected(library, keys)
        if self._fresh:
            self._clear(library)
        out = library.empty((keys.shape[0],), self.value_dtype, keys)
        library.run(_C.hash_lookup, keys, *self.native, out, shape=self.shape)
        return library.result(out)

    @property
    def overflowed(self) -> bool:
        """Whether a key did not fit. Synchronises the current stream."""
        return self._overflowed(library_of(self.native[2], "state"))

    def _overflowed(self, library: Library) -> bool:
        return not self._fresh and bool(library.host(self.native[2])[0])

    def _expected(self, library: Library, keys: Array) -> Array:
        if self.shape is not None:
            return rows_of_four(library, keys, "keys")
        keys = library.contiguous(keys, "keys")
        if len(keys.shape) != 1:
            raise ValueError(f"keys: expected (N,), since the table has no shape, got {tuple(keys.shape)}")
        return _of_dtype(library, keys, "keys", self.key_dtype)

    def _clear(self, library: Library) -> None:
        shape, dtype = ((0,), self.key_dtype) if self.shape is None else ((0, 4), "int32")
        self._insert(library, library.empty(shape, dtype, self.native[2]), None, False)

    def _insert(self, library: Library, keys: Array, values: Array | None, replace: bool) -> None:
        with _clearing.held() if self._fresh else nullcontext():
            how = {"shape": self.shape, "clear": self._fresh, "replace": replace}
            with renamed({"table_keys": "keys"}):
                library.run(_C.hash_insert, keys, values, *self.native, **how)
            self._fresh = False

    def __repr__(self) -> str:
        kind = "integers" if self.shape is None else f"voxels in {self.shape}"
        return f"HashTable({kind}, capacity={self.capacity})"


def _word(library: Library, x: Array, name: str) -> str:
    """The dtype of keys or values, which must be one that a table has."""
    library.accept(x, name)
    dtype = library.dtype(x)
    if dtype not in WORDS:
        raise TypeError(f"{name}: expected dtype int32 or int64, got {dtype}")
    return dtype


def _of_dtype(library: Library, x: Array, name: str, dtype: str) -> Array:
    """x, whose dtype must be the table's: the extension would put narrower ones into its slots as well."""
    if library.dtype(x) != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, as the table's, got {library.dtype(x)}")
    return x
