"""The segments of a neighbour map: whatever places a backend gives, the records must say the pairs of the map."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
from reference import assert_segments

KERNELS = [(1, 1, 1), (2, 2, 2), (3, 3, 3), (2, 4, 4), (1, 1, 7), (3, 1, 1), (1, 5, 5)]
ALL_TILES = pytest.mark.parametrize("tiles", [2, 4, 8])


def random_map(rows, kernel_size, *, inputs=None, share=0.5, spread=40, seed=0):
    """Neighbours within `spread` rows of where a column lies among the inputs: few distinct ones in a segment."""
    rng = np.random.default_rng(seed)
    volume, inputs = int(np.prod(kernel_size)), rows if inputs is None else inputs
    near = np.arange(rows) * inputs // max(rows, 1) + rng.integers(-spread, spread + 1, (volume, rows))
    there = (rng.random((volume, rows)) < share) & (near >= 0) & (near < inputs)
    return np.where(there, near, -1).astype(np.int32)


def check(backend, nmap, kernel_size, tiles, *, order=None, in_rows=None, **layout):
    """The places that the segments have in use."""
    order = np.arange(nmap.shape[1], dtype=np.int32) if order is None else order
    in_rows = nmap.shape[1] if in_rows is None else in_rows
    segments = guarded.segment_map(backend, nmap, order, kernel_size, tiles, in_rows, **layout)
    return assert_segments(segments, nmap, order, kernel_size, tiles, in_rows)


@ALL_TILES
@pytest.mark.parametrize("kernel_size", KERNELS)
def test_kernel_sizes(backend, kernel_size, tiles):
    assert check(backend, random_map(700, kernel_size), kernel_size, tiles).all()


@ALL_TILES
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 127, 128, 129, 511, 513, 1025])
def test_row_counts(backend, rows, tiles):
    assert len(check(backend, random_map(rows, (3, 3, 3)), (3, 3, 3), tiles)) == -(-rows // (64 * tiles))


@ALL_TILES
def test_segments_are_of_the_columns_as_the_order_has_them(backend, tiles):
    nmap = random_map(1500, (3, 3, 3))
    order = np.arange(1500, dtype=np.int32)
    for start in range(0, 1500, 128):
        order[start : start + 128] = np.random.default_rng(start).permutation(order[start : start + 128])
    assert check(backend, nmap, (3, 3, 3), tiles, order=order[::-1].copy()).all()


@pytest.mark.parametrize("inputs", [100, 3000])
def test_a_map_may_be_to_other_rows_than_its_own(backend, inputs):
    assert check(backend, random_map(700, (2, 2, 2), inputs=inputs), (2, 2, 2), 4, in_rows=inputs).all()


def test_a_scene_along_a_curve_needs_few_places(backend):
    coords, shape = scenes.shell(32)
    nmap = reference.neighbor_map(coords, shape, (3, 3, 3), (1, 1, 1))
    order = np.argsort(reference.encode_seq(coords, shape, "z_order"), kind="stable").astype(np.int32)
    in_use = check(backend, nmap, (3, 3, 3), 8, order=order)
    assert in_use.all()
    assert in_use[:-1].max() < 2 * 512


def test_rows_with_the_same_neighbours_keep_their_order(backend):
    rng = np.random.default_rng(0)
    nmap = random_map(5, (3, 3, 3), inputs=200)[:, rng.integers(0, 5, 1000)]
    order = rng.permutation(1000).astype(np.int32)
    segments = guarded.segment_map(backend, nmap, order, (3, 3, 3), 8, 200)
    assert_segments(segments, nmap, order, (3, 3, 3), 8, 200)
    place = np.argsort(order)
    for rows in segments[:, 16 : 16 + 512]:
        rows = rows[rows >= 0]
        masks = (nmap[:, rows] >= 0).T
        same = (masks[1:] == masks[:-1]).all(axis=1)
        assert (~same).sum() == 4  # five kinds side by side
        assert (place[rows][1:] > place[rows][:-1])[same].all()


@ALL_TILES
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_segment_has_as_many_places_as_it_says(backend, tiles, more):
    """Exactly full, with one to spare and with one too many."""
    rows, distinct = 64 * tiles, 184 * tiles - 1 + more
    flat = np.arange(27 * rows)
    nmap = np.where(flat < distinct, 7 * flat, np.where(flat % 3, 7 * (flat % distinct), -1))
    nmap = np.random.default_rng(0).permutation(nmap).reshape(27, rows).astype(np.int32)
    in_use = check(backend, nmap, (3, 3, 3), tiles, in_rows=7 * distinct)
    assert in_use == ([distinct + 1] if more <= 0 else [0])


@ALL_TILES
def test_too_many_places_are_said_and_no_others_suffer(backend, tiles):
    """Segments of rows from everywhere between those of rows that lie together."""
    rows = 64 * tiles
    nmap = random_map(4 * rows, (3, 3, 3), spread=10)
    rng = np.random.default_rng(0)
    nmap[:, rows : 2 * rows] = rng.integers(0, 2**30, (27, rows))
    nmap[:, 3 * rows :] = rng.integers(0, 2**30, (27, rows))
    in_use = check(backend, nmap, (3, 3, 3), tiles, in_rows=2**31 - 1)
    assert (in_use > 0).tolist() == [True, False, True, False]


def test_rows_that_share_all_their_low_bits_are_told_apart(backend):
    nmap = np.where(random_map(512, (3, 3, 3)) >= 0, np.arange(512) // 2 << 22, -1).astype(np.int32)
    assert check(backend, nmap, (3, 3, 3), 8, in_rows=2**31 - 1) == 257


@ALL_TILES
def test_entries_that_are_no_rows_are_no_neighbours(backend, tiles):
    nmap = random_map(700, (3, 3, 3))
    rng = np.random.default_rng(1)
    for wrong in (-2, -(2**31), 650, 700, 2**31 - 1):
        nmap[rng.random(nmap.shape) < 0.05] = wrong
    assert check(backend, nmap, (3, 3, 3), tiles, in_rows=650).all()
    assert (check(backend, nmap, (3, 3, 3), tiles, in_rows=0) == 1).all()


@ALL_TILES
def test_entries_of_the_order_that_are_no_columns_are_rows_behind_the_last(backend, tiles):
    nmap = random_map(700, (3, 3, 3))
    order = np.arange(700, dtype=np.int32)
    rng = np.random.default_rng(1)
    for wrong in (-1, -(2**31), 700, 2**31 - 1):
        order[rng.random(700) < 0.05] = wrong
    assert check(backend, nmap, (3, 3, 3), tiles, order=order).all()


def test_a_full_mask_of_32_offsets(backend):
    nmap = np.zeros((32, 130), np.int32)
    assert check(backend, nmap, (2, 4, 4), 2, in_rows=1).tolist() == [2, 2]


def test_sizes_beyond_32_bits_of_rows_are_no_limit(backend):
    assert check(backend, random_map(100, (3, 3, 3)), (3, 3, 3), 2, in_rows=2**40).all()


def test_everything_but_the_places_repeats(backend):
    nmap = random_map(1000, (3, 3, 3))
    order = np.arange(1000, dtype=np.int32)
    first = guarded.segment_map(backend, nmap, order, (3, 3, 3), 4, 1000)
    again = guarded.segment_map(backend, nmap, order, (3, 3, 3), 4, 1000)
    np.testing.assert_array_equal(first[:, : 16 + 256], again[:, : 16 + 256])
