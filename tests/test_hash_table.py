"""The hash table against a dictionary: of equal keys the lowest row wins, and the first call unless told otherwise."""

from __future__ import annotations

import threading
import time

import guarded
import numpy as np
import pytest
import scenes
from calls import place
from hypothesis import given
from hypothesis import strategies as st

import flexgemm
from flexgemm import _C
from flexgemm._arrays import Library

WORDS = [np.int32, np.int64]
COUNTS = [0, 1, 2, 63, 64, 65, 255, 257, 5000]


def random_words(rng, n, dtype):
    """Any bits, -1 (which marks an empty slot) and its neighbours among them."""
    words = np.frombuffer(rng.bytes(n * dtype().nbytes), dtype).copy()
    words[: min(n, 4)] = [-1, 0, -2, np.iinfo(dtype).min][:n]
    return rng.permutation(words)


def insert_all(table, keys, values):
    """What a dictionary does: a key that is there already is left alone."""
    for key, value in zip(keys.tolist(), values.tolist(), strict=True):
        table.setdefault(key, value)
    return table


def look_up(table, keys, dtype):
    return np.array([table.get(key, -1) for key in keys.tolist()], dtype)


def check(backend, table, contents, keys, dtype):
    got = backend.numpy(table.lookup(backend.array(keys)))
    np.testing.assert_array_equal(got, look_up(contents, keys, dtype), strict=True)


@pytest.mark.parametrize("key_dtype", WORDS)
@pytest.mark.parametrize("value_dtype", WORDS)
@pytest.mark.parametrize("n", COUNTS)
def test_values_of_keys(backend, n, key_dtype, value_dtype):
    rng = np.random.default_rng(n)
    keys, values = random_words(rng, n, key_dtype), random_words(rng, n, value_dtype)
    keys = keys[rng.integers(0, n, n)] if n else keys  # a third of them twice or more
    table = flexgemm.HashTable.build(backend.array(keys), backend.array(values))
    assert (table.key_dtype, table.value_dtype) == (key_dtype.__name__, value_dtype.__name__)
    contents = insert_all({}, keys, values)
    check(backend, table, contents, keys, value_dtype)
    check(backend, table, contents, random_words(rng, 100, key_dtype), value_dtype)
    assert not table.overflowed


@pytest.mark.parametrize("value_dtype", ["int32", "int64"])
@pytest.mark.parametrize("key_dtype", WORDS)
def test_without_values_a_key_has_its_lowest_row(backend, key_dtype, value_dtype):
    keys = np.random.default_rng(0).integers(-500, 500, 3000).astype(key_dtype)
    table = flexgemm.HashTable.build(backend.array(keys), value_dtype=value_dtype)
    check(backend, table, insert_all({}, keys, np.arange(3000)), np.arange(-600, 600).astype(key_dtype), value_dtype)


@pytest.mark.parametrize("with_values", [False, True])
def test_a_key_keeps_the_value_it_was_given_first(backend, with_values):
    rng = np.random.default_rng(0)
    table = flexgemm.HashTable(4000, like=backend.array(np.zeros(1, np.int32)))
    contents = {}
    for n in (1000, 0, 1, 2500):
        keys, values = rng.integers(-1, 3000, n), rng.integers(-(2**31), 2**31, n).astype(np.int32)
        table.insert(backend.array(keys), backend.array(values) if with_values else None, check=True)
        insert_all(contents, keys, values if with_values else np.arange(n))
        check(backend, table, contents, np.arange(-5, 3005), np.int32)


@pytest.mark.parametrize("with_values", [False, True])
def test_values_of_keys_that_are_there_can_be_replaced(backend, with_values):
    rng = np.random.default_rng(0)
    table = flexgemm.HashTable(3100, like=backend.array(np.zeros(1, np.int32)))
    contents = {}
    for n in (1000, 0, 1, 2500):
        keys, values = rng.integers(-1, 3000, n), rng.integers(-(2**31), 2**31, n).astype(np.int32)
        given = backend.array(values) if with_values else None
        table.insert(backend.array(keys), given, replace=True, check=True)
        contents |= insert_all({}, keys, values if with_values else np.arange(n))
        check(backend, table, contents, np.arange(-5, 3005), np.int32)
    keys = np.arange(-1, 500)  # and so they are kept again
    table.insert(backend.array(keys), backend.array(np.zeros(501, np.int32)), check=True)
    check(backend, table, insert_all(contents, keys, np.zeros(501, int)), np.arange(-5, 3005), np.int32)


def test_a_table_holds_nothing_until_something_is_inserted(backend):
    table = flexgemm.HashTable(5, like=backend.array(np.zeros(1, np.int32)))
    assert not table.overflowed
    check(backend, table, {}, np.array([-1, 0, 5]), np.int32)


def test_two_first_insertions_keep_the_keys_of_both(backend, monkeypatch):
    halves = [backend.array(half) for half in np.split(np.arange(100), 2)]
    table = flexgemm.HashTable(200, like=halves[0])
    table._fresh = True  # as on a GPU, where the first insertion clears the table
    run = Library.run

    def slowly(*arguments, **how):
        time.sleep(0.1)
        run(*arguments, **how)

    monkeypatch.setattr(Library, "run", slowly)
    threads = [threading.Thread(target=table.insert, args=(half,)) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (backend.numpy(table.lookup(backend.array(np.arange(100)))) >= 0).all()


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 64, 100, 1000, 1001])
def test_any_capacity_can_be_filled_to_the_last_slot(backend, capacity):
    keys = np.random.default_rng(0).permutation(np.arange(-1, capacity))  # -1 has a slot of its own
    table = flexgemm.HashTable.build(backend.array(keys), capacity=capacity)
    assert not table.overflowed
    contents = insert_all({}, keys, np.arange(len(keys)))
    check(backend, table, contents, np.arange(-2, 2 * capacity), np.int32)  # half of them in vain
    table.insert(backend.array(keys[::-1].copy()), check=True)  # which needs no room
    check(backend, table, contents, keys, np.int32)


@pytest.mark.parametrize("capacity, n", [(1, 2), (64, 65), (100, 5000)])
@pytest.mark.parametrize("with_values", [False, True])
def test_one_key_too_many_is_an_error_and_no_hang(backend, capacity, n, with_values):
    keys = backend.array(np.arange(n))
    values = backend.array(np.arange(n, dtype=np.int32)) if with_values else None
    table = flexgemm.HashTable(capacity, like=keys)
    with pytest.raises(ValueError, match="^keys: "):
        table.insert(keys, values, check=True)
    assert table.overflowed
    if backend.name == "cuda":
        silent = flexgemm.HashTable(capacity, like=keys)
        silent.insert(keys, values)
        assert silent.overflowed
        found = backend.numpy(silent.lookup(keys))
        assert (found >= 0).sum() == capacity
        assert np.isin(found, [-1, *range(n)]).all()


@pytest.mark.parametrize("shape", [(3, 20, 30, 40), (2, 2**20, 2**20, 2**20)])
@pytest.mark.parametrize("offset", [0, 1])
def test_voxels_as_keys(backend, shape, offset):
    coords = scenes.far_corner(2000, shape) if shape[1] > 100 else np.stack(
        [np.random.default_rng(0).integers(0, s, 2000) for s in shape], axis=1
    ).astype(np.int32)  # fmt: skip
    table = flexgemm.HashTable.build(backend.array(coords), shape=shape)
    assert table.key_dtype == ("int32" if np.prod(np.asarray(shape, object)) <= 2**32 else "int64")
    rows = {}
    for row, coord in enumerate(map(tuple, coords.tolist())):
        rows.setdefault(coord, row)
    outside = np.array([[-1, 0, 0, 0], [shape[0], 0, 0, 0], [0, 0, 0, shape[3]], [0, 0, -1, 2]], np.int32)
    queries = np.concatenate([coords - [0, 1, 0, 0], coords, outside]).astype(np.int32)
    found = backend.numpy(table.lookup(backend.array(queries)))
    expected = [rows.get(c, -1) for c in map(tuple, queries.tolist())]
    np.testing.assert_array_equal(found, expected)
    for word in (None, "int64"):
        arrays = guarded.hash_insert(
            backend, coords, None, 4001, "int32", word=word, shape=shape, clear=True, offset=offset
        )
        found = guarded.hash_lookup(backend, queries, *arrays, value_dtype="int32", shape=shape, offset=offset)
        np.testing.assert_array_equal(found, expected)


def test_voxels_outside_are_inserted_nowhere(backend):
    shape = (1, 4, 4, 4)
    coords = np.array([[0, 0, 0, 0], [0, 4, 0, 0], [0, 1, 0, 0]], np.int32)
    if backend.name == "cpu":
        with pytest.raises(ValueError, match="row 1 is"):
            flexgemm.HashTable.build(coords, shape=shape)
        return
    table = flexgemm.HashTable.build(backend.array(coords), shape=shape, capacity=2)
    assert backend.numpy(table.lookup(backend.array(coords))).tolist() == [0, -1, 2]
    assert not table.overflowed


@pytest.mark.parametrize("key_dtype", WORDS)
@pytest.mark.parametrize("word", [None, "int32", "int64"])
def test_nothing_but_the_table_is_written(backend, word, key_dtype):
    """Keys and values in arrays of their own, or side by side as words of slots."""
    if word == "int32" and key_dtype is np.int64:
        with pytest.raises(TypeError, match="keys"):
            guarded.hash_insert(backend, np.zeros(3, key_dtype), None, 9, "int32", word=word, clear=True)
        return
    rng = np.random.default_rng(0)
    keys, values = random_words(rng, 300, key_dtype), random_words(rng, 300, np.int32)
    keys = keys[rng.integers(0, 300, 300)]

    def insert(*given, **how):
        return guarded.hash_insert(backend, *given, 431, "int32", word=word, **how)

    def holds(table, keys, contents):
        found = guarded.hash_lookup(backend, keys, *table, value_dtype="int32")
        np.testing.assert_array_equal(found, look_up(contents, keys, np.int32))

    for first in (values, None):
        table = insert(keys, first, clear=True)
        contents = insert_all({}, keys, np.arange(300) if first is None else first)
        holds(table, keys, contents)
        more = random_words(rng, 50, key_dtype)
        table = insert(more, values[:50], initial=table)
        insert_all(contents, more, values[:50])
        holds(table, more, contents)
        table = insert(keys, values, initial=table, replace=True)
        contents |= insert_all({}, keys, values)
        holds(table, keys, contents)


@given(st.lists(st.lists(st.integers(-4, 30), max_size=40), max_size=4), st.integers(35, 50), st.booleans())
def test_it_is_a_dictionary(backend, batches, capacity, wide):
    dtype = np.int64 if wide else np.int32
    table = flexgemm.HashTable(capacity, like=backend.array(np.zeros(1, np.int32)), key_dtype=dtype.__name__)
    contents = {}
    for batch in batches:
        keys, values = np.array(batch, dtype), np.arange(len(batch), dtype=np.int32) + 100 * len(contents)
        table.insert(backend.array(keys), backend.array(values))
        insert_all(contents, keys, values)
    check(backend, table, contents, np.arange(-6, 34).astype(dtype), np.int32)


@pytest.mark.parametrize(
    "argument, wrong, error",
    [
        ("keys", np.zeros((5, 3), np.int32), ValueError),
        ("keys", np.zeros((5, 4), np.int32), ValueError),
        ("keys", np.zeros(5, np.float32), TypeError),
        ("keys", np.zeros((5, 2, 2), np.int32), ValueError),
        ("values", np.zeros(4, np.int32), ValueError),
        ("values", np.zeros(5, np.float32), TypeError),
        ("values", [1, 2, 3, 4, 5], TypeError),
        ("values", "12345", TypeError),
        ("capacity", 0, ValueError),
        ("capacity", 2**62, ValueError),
        ("capacity", "3", TypeError),
        ("capacity", 3.0, TypeError),
        ("capacity", float("nan"), TypeError),
        ("value_dtype", "float32", ValueError),
        ("shape", (1, 2, 3), ValueError),
    ],
)
def test_impossible_arguments_are_named(backend, argument, wrong, error):
    arguments = {"keys": np.zeros(5, np.int32), argument: wrong}
    with pytest.raises(error, match=f"^{argument}: "):
        flexgemm.HashTable.build(**place(backend, arguments))


def test_values_have_a_dtype_of_their_own(backend):
    keys, values = (backend.array(np.zeros(5, dtype)) for dtype in (np.int32, np.int64))
    for value_dtype in ("int64", np.int64, np.dtype("int64")):
        assert flexgemm.HashTable.build(keys, values, value_dtype=value_dtype).value_dtype == "int64"
    with pytest.raises(ValueError, match="^value_dtype: expected None or int64, the dtype of values, got int32"):
        flexgemm.HashTable.build(keys, values, value_dtype="int32")


@pytest.mark.parametrize("option", ["replace", "check"])
def test_what_is_merely_true_is_no_bool(backend, option):
    keys = backend.array(np.zeros(5, np.int32))
    table = flexgemm.HashTable(10, like=keys, key_dtype="int32")
    with pytest.raises(TypeError, match=f"^{option}: expected a bool, got str"):
        table.insert(keys, **{option: "no"})
    assert (backend.numpy(table.lookup(keys)) == -1).all()


@pytest.mark.parametrize("n, capacity", [(0, 1), (1, 2), (50, 100)])
def test_half_of_the_slots_stay_free_by_default(backend, n, capacity):
    assert flexgemm.HashTable.build(backend.array(np.arange(n))).capacity == capacity


def test_a_table_needs_a_capacity(backend):
    with pytest.raises(TypeError, match="^capacity: expected an int, got NoneType"):
        flexgemm.HashTable(None, like=backend.array(np.zeros(1, np.int32)))


@pytest.mark.parametrize("name", ["key_dtype", "value_dtype"])
def test_keys_and_values_are_of_32_or_64_bits(backend, name):
    like = backend.array(np.zeros(1, np.int32))
    with pytest.raises(ValueError, match=f"^{name}: expected int32 or int64, got float32$"):
        flexgemm.HashTable(5, like=like, **{name: "float32"})
    assert getattr(flexgemm.HashTable(5, like=like, **{name: np.int64}), name) == "int64"


def test_an_insertion_that_is_refused_leaves_the_table_empty(backend):
    table = flexgemm.HashTable(5, like=backend.array(np.zeros(1, np.int32)))
    with pytest.raises(ValueError, match="^values: "):
        table.insert(backend.array(np.arange(3)), backend.array(np.arange(2, dtype=np.int32)))
    assert not table.overflowed
    check(backend, table, {}, np.arange(3), np.int32)


def test_keys_and_values_of_another_dtype(backend):
    table = flexgemm.HashTable(5, like=backend.array(np.zeros(1, np.int32)))
    with pytest.raises(TypeError, match="keys"):
        table.insert(backend.array(np.zeros(3, np.int32)))
    with pytest.raises(TypeError, match="values"):
        table.insert(backend.array(np.zeros(3, np.int64)), backend.array(np.zeros(3, np.int64)))
    with pytest.raises(TypeError, match="keys"):
        table.lookup(backend.array(np.zeros(3, np.int32)))
    with pytest.raises(ValueError, match=r"keys: expected \(N,\)"):
        table.lookup(backend.array(np.zeros((3, 4), np.int64)))


@pytest.mark.parametrize("shape", [(2, 2**20, 2**20, 2), (2, 2**16, 2**16, 1), (1, 2**32 + 1, 1, 1)])
def test_more_voxels_than_32_bits_number(backend, shape):
    like, voxel = backend.array(np.zeros(1, np.int32)), backend.array(np.zeros((1, 4), np.int32))
    with pytest.raises(ValueError, match="shape"):
        flexgemm.HashTable(5, like=like, shape=shape, key_dtype="int32").insert(voxel)


def test_as_many_voxels_as_32_bits_number(backend):
    """The first of 2^32 has the key 0, the last the key of all ones."""
    voxels = np.array([[0, 0, 0, 0], [1, 2**16 - 1, 2**15 - 1, 0], [1, 0, 0, 0]], np.int32)
    table = flexgemm.HashTable(5, like=backend.array(voxels), shape=(2, 2**16, 2**15, 1), key_dtype="int32")
    table.insert(backend.array(voxels[:2]))
    np.testing.assert_array_equal(backend.numpy(table.lookup(backend.array(voxels))), [0, 1, -1])


def test_bitwise_repeat(backend):
    keys = backend.array(np.random.default_rng(0).integers(0, 2000, 20_000))
    first = backend.numpy(flexgemm.HashTable.build(keys).lookup(keys))
    for _ in range(5):
        np.testing.assert_array_equal(backend.numpy(flexgemm.HashTable.build(keys).lookup(keys)), first)


def test_a_table_needs_two_slots():
    with pytest.raises(ValueError, match="table_keys"):
        _C.hash_lookup(
            np.zeros(1, np.int64), *(np.zeros(1, np.int64),) * 2, np.zeros(2, np.int64), np.zeros(1, np.int64)
        )
    with pytest.raises(ValueError, match="table_keys"):
        _C.hash_lookup(np.zeros(1, np.int64), np.zeros((9, 3), int), None, np.zeros(2, np.int64), np.zeros(1, np.int64))


def first_slots(keys, capacity):
    """Where each key is looked for first (kernels/cuda/hash_table.cuh)."""
    mask, slots = 2**64 - 1, []
    for key in keys.tolist():
        h = (key ^ key >> 33) * 0xFF51AFD7ED558CCD & mask
        h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53 & mask
        slots.append((h ^ h >> 33) * capacity >> 64)
    return np.array(slots)


def keys_of_slot(slot, capacity, n):
    """The first n numbers that would rather lie there."""
    keys = np.arange(n * 2 * capacity)
    keys = keys[first_slots(keys, capacity) == slot][:n]
    assert len(keys) == n
    return keys


def key_of(h):
    """The key that has this hash: each step of the hash, taken back."""
    mask = 2**64 - 1
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        h = (h ^ h >> 33) * pow(factor, -1, 2**64) & mask
    return h ^ h >> 33


def test_keys_of_the_first_and_the_last_hashes(backend):
    """A GPU takes keys by stretches of the upper halves of their hashes, of which each ends in front of the next."""
    hashes = [upper << 32 | 12345 for upper in (0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)]
    keys = np.array([key_of(h) for h in hashes], np.uint64).view(np.int64)
    capacity = 2**16
    slots = first_slots(keys.view(np.uint64), capacity)
    np.testing.assert_array_equal(slots, [h * capacity >> 64 for h in hashes])
    table = flexgemm.HashTable.build(backend.array(keys), capacity=capacity)
    check(backend, table, insert_all({}, keys, np.arange(len(keys))), keys, np.int32)


@pytest.mark.parametrize("n", [64, 65, 66, 67, 73, 130])
def test_keys_that_all_begin_at_one_slot(backend, n):
    """The last lies n - 1 slots behind it: up to 64 are looked at anyway, more have to be noted."""
    capacity = 200
    keys = keys_of_slot(7, capacity, n)
    table = flexgemm.HashTable.build(backend.array(keys), capacity=capacity)
    check(backend, table, insert_all({}, keys, np.arange(n)), keys, np.int32)


@pytest.mark.parametrize("n", [65, 130])
def test_a_table_that_overflowed_goes_on_with_the_keys_that_it_has(backend, n):
    """Also with those that lie as far as others are looked for, and further."""
    capacity = 200
    far = keys_of_slot(7, capacity, n)
    others = np.setdiff1d(np.arange(40_000), far)[: capacity - len(far)]
    there = np.concatenate([far, others])
    table = flexgemm.HashTable.build(backend.array(there), capacity=capacity)
    with pytest.raises(ValueError, match="^keys: "):
        table.insert(backend.array(np.array([50_000, 50_001])), check=True)
    values = np.arange(capacity, dtype=np.int32)[::-1].copy()
    table.insert(backend.array(there), backend.array(values), replace=True)
    np.testing.assert_array_equal(backend.numpy(table.lookup(backend.array(there))), values)


def test_of_equal_keys_the_lowest_row_wins_in_a_call_that_overflows(backend):
    """Also of those that lie far, which other rows look for while the table is found to be full."""
    capacity = 200
    far = keys_of_slot(7, capacity, 400)
    for seed in range(20):
        rows = np.random.default_rng(seed).permutation(np.repeat(far, 64))
        table = flexgemm.HashTable(capacity, like=backend.array(rows))
        with pytest.raises(ValueError, match="^keys: "):
            table.insert(backend.array(rows), check=True)
        distinct, first = np.unique(rows, return_index=True)
        values = backend.numpy(table.lookup(backend.array(distinct)))
        there = values >= 0
        assert there.sum() == capacity
        np.testing.assert_array_equal(values[there], first[there])


def test_clearing_writes_all_of_a_slot(backend):
    """Of 64-bit words, too, which have keys and values of 32 bits."""
    keys, before = np.array([5, 6], np.int32), (np.full((9, 2), 0x12345678_00000000), None, np.zeros(2, np.int64))
    slots, *_ = guarded.hash_insert(backend, keys, keys, 9, "int32", word="int64", clear=True, initial=before)
    taken = slots[:, 0].astype(np.int32) != -1
    assert taken.sum() == 2
    assert (slots[~taken] == -1).all()
