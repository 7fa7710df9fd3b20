"""The segments of a neighbour map: whatever places a backend gives, the records must say the pairs of the map."""

from __future__ import annotations

import copy
import pickle

import guarded
import map_segments
import numpy as np
import pytest
import reference
import scenes
from map_segments import assert_segments
from memory import hopper
from verdicts import assert_conv_rows

import flexgemm
from flexgemm import _C

KERNELS = [(1, 1, 1), (2, 2, 2), (3, 3, 3), (2, 4, 4), (1, 1, 7), (3, 1, 1), (1, 5, 5)]
ALL_TILES = pytest.mark.parametrize("tiles", [2, 4])


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
    in_use = check(backend, nmap, (3, 3, 3), 4, order=order)
    assert in_use.all()
    assert in_use[:-1].max() < 2 * 256 + 64


def test_rows_with_the_same_neighbours_keep_their_order(backend):
    rng = np.random.default_rng(0)
    nmap = random_map(5, (3, 3, 3), inputs=200)[:, rng.integers(0, 5, 1000)]
    order = rng.permutation(1000).astype(np.int32)
    segments = guarded.segment_map(backend, nmap, order, (3, 3, 3), 4, 200)
    assert_segments(segments, nmap, order, (3, 3, 3), 4, 200)
    place = np.argsort(order)
    for rows in segments[:, 16 : 16 + 256]:
        rows = rows[rows >= 0]
        masks = (nmap[:, rows] >= 0).T
        same = (masks[1:] == masks[:-1]).all(axis=1)
        assert (~same).sum() == 4  # five kinds side by side
        assert (place[rows][1:] > place[rows][:-1])[same].all()


@ALL_TILES
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_segment_has_as_many_places_as_it_says(backend, tiles, more):
    """Exactly full, with one to spare and with one too many."""
    rows, distinct = 64 * tiles, map_segments.segment_places(tiles) - 1 + more
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
    assert check(backend, nmap, (3, 3, 3), 4, in_rows=2**31 - 1).tolist() == [129, 129]


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


@ALL_TILES
def test_a_convolution_reads_what_is_made_here(backend, tiles):
    coords, shape = scenes.shell(16)
    nmap = reference.neighbor_map(coords, shape)
    order = np.argsort(reference.encode_seq(coords, shape, "z_order"), kind="stable").astype(np.int32)
    segments = guarded.segment_map(backend, nmap, order, (3, 3, 3), tiles, len(coords))
    rng = np.random.default_rng(0)
    feats, weight = (scenes.values(rng, s, "float16") for s in ((len(coords), 64), (64, 3, 3, 3, 64)))
    how = {"segments": segments, "algorithm": "masked_implicit_gemm"}
    out = guarded.conv_forward(backend, feats, weight, None, nmap, **how)
    assert_conv_rows(out, reference.conv_forward(feats, weight, None, nmap), "float16")


# ---- of a NeighborMap ----


def check_segments_of(nmap):
    segments = nmap.segments()
    num_sms = _C.device_info("cuda", 0)["num_sms"]
    tiles = _C.plan_segment_tiles(rows=nmap.num_voxels, num_sms=num_sms)
    coords, rows = nmap.coords, nmap.num_voxels
    order = np.argsort(reference.encode_seq(coords, nmap.shape, "z_order"), kind="stable").astype(np.int32)
    assert_segments(segments.numpy(), nmap.map, order, nmap.kernel_size, tiles, rows)


@pytest.mark.parametrize("kernel_size", [3, (1, 5, 5), (3, 1, 1)])
def test_layers_find_the_segments_of_their_map(backend, kernel_size):
    if not hopper(backend):
        pytest.skip("segments are for Hopper")
    coords, shape = scenes.scene(5000)
    nmap = flexgemm.neighbor_map(coords, shape, kernel_size, device="cuda")
    check_segments_of(nmap)
    assert nmap.segments() is nmap.segments()
    assert nmap.freeze().segments() is nmap.segments()


def test_codes_of_64_bits_do_as_well(backend):
    if not hopper(backend):
        pytest.skip("segments are for Hopper")
    shape = (1, 2**20, 2**20, 2**20)
    check_segments_of(flexgemm.neighbor_map(scenes.far_corner(5000, shape), shape, device="cuda"))


def test_freezing_builds_them(backend):
    nmap = flexgemm.neighbor_map(*scenes.scene(5000), device=backend.device).freeze()
    assert (nmap._segments.value is not None) == hopper(backend)


@pytest.mark.parametrize(
    ("kernel_size", "dilation"), [(1, 1), (2, 1), (5, 1), (3, 2), ((3, 3, 3), (1, 1, 2)), ((3, 2, 3), 1)]
)
def test_maps_without_segments(backend, kernel_size, dilation):
    coords, shape = scenes.scene(5000)
    assert flexgemm.neighbor_map(coords, shape, kernel_size, dilation, device=backend.device).segments() is None


def test_few_rows_other_outputs_and_long_codes_have_none(backend):
    coords, shape = scenes.scene(5000)
    assert flexgemm.neighbor_map(coords[:30], shape, device=backend.device).segments() is None
    assert flexgemm.neighbor_map(coords[:0], shape, device=backend.device).segments() is None
    assert flexgemm.neighbor_map(coords, shape, device=backend.device).inverse.segments() is None
    strided = flexgemm.sparse_conv_map(coords, shape, 3, 2, 1, device=backend.device)
    assert strided.segments() is None
    assert strided.inverse.segments() is None
    assert flexgemm.neighbor_map(coords, (1, 2**40, 64, 64), device=backend.device).segments() is None


def test_copies_build_their_own(backend):
    nmap = flexgemm.neighbor_map(*scenes.scene(5000), device=backend.device).freeze()
    for other in (copy.deepcopy(nmap), pickle.loads(pickle.dumps(nmap))):
        assert (other.segments() is not None) == hopper(backend)
    assert copy.copy(nmap).segments() is nmap.segments()


def test_another_stream_waits_until_they_are_done(cuda, monkeypatch):
    nmap = flexgemm.neighbor_map(*scenes.scene(5000), device="cuda")
    waited, wait_for = [], _C.wait_for
    with monkeypatch.context() as pending:
        pending.setattr(_C, "passed", lambda mark: False)
        pending.setattr(_C, "wait_for", lambda mark, array, stream: waited.append(stream) or wait_for(mark, array))
        built = nmap.segments(stream=2)
        assert built is not None
        assert nmap.segments() is built
        assert waited == [2, None]
    assert nmap.segments() is built


def test_marks(backend):
    array = backend.array(np.zeros(3, np.float32))
    mark = _C.mark(array)
    assert _C.wait_for(mark, array)
    assert _C.passed(mark) or backend.name == "cuda"  # a GPU may take its time
    for call in (lambda: _C.passed(3), lambda: _C.wait_for("mark", array)):
        with pytest.raises(TypeError, match=r"mark: expected what mark\(\) returns, got <class"):
            call()
    for function in (_C.mark, _C.is_capturing):
        with pytest.raises(TypeError, match="array: expected"):
            function(3)


def test_a_captured_stream_waits_for_nothing(graphs):
    array = graphs.array(np.zeros(3, np.float32))
    mark, answers = _C.mark(array), []
    graphs.capture(lambda: answers.append(_C.wait_for(mark, array, stream=graphs.stream)))
    assert answers[-1] is False  # the call before the capture may wait
    assert _C.wait_for(mark, array, stream=graphs.stream)


def test_none_are_built_while_a_graph_is_captured(graphs):
    """They would be the graph's; those that are there already are used."""
    coords, shape = scenes.scene(5000)
    how = {"device": "cuda", "stream": graphs.stream}
    nmap, other = (flexgemm.neighbor_map(coords, shape, **how) for _ in range(2))
    given, code = graphs.array(coords), graphs.empty((5000,), "int32")
    found = []

    def capture():
        def work():
            capturing = _C.is_capturing(given, stream=graphs.stream)
            found.append((capturing, (nmap if capturing else other).segments(graphs.stream)))
            _C.encode_seq(given, code, shape=shape, stream=graphs.stream)

        graphs.capture(work)
        return found[-1]

    assert capture() == (True, None)
    assert not _C.is_capturing(given, stream=graphs.stream)
    segments = nmap.segments(graphs.stream)
    capturing, those = capture()
    assert capturing
    assert those is segments


@pytest.mark.parametrize("wrong", [[1], None, 3])
def test_capturing_asks_for_an_array(wrong):
    assert _C.is_capturing(np.zeros(3)) is False
    with pytest.raises(TypeError, match="array: expected an array"):
        _C.is_capturing(wrong)
