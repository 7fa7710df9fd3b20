"""The neighbour map against a dictionary of coordinates."""

from __future__ import annotations

import copy
import itertools
import time

import guarded
import numpy as np
import pytest
import reference
import scenes

import flexgemm
from flexgemm import _C

KERNELS = [
    (1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 4, 4), (5, 5, 5), (6, 6, 6), (7, 7, 7),
    (3, 1, 1), (1, 1, 7), (1, 3, 5), (2, 3, 4), (7, 2, 1),
]  # fmt: skip
DILATIONS = [(1, 1, 1), (2, 2, 2), (1, 2, 3)]
ROWS = [0, 1, 63, 64, 65, 127, 129, 3000]


def check(backend, coords, shape, kernel_size=(3, 3, 3), dilation=(1, 1, 1), transposed=False):
    nmap = guarded.neighbor_map(backend, coords, shape, kernel_size, dilation, transposed=transposed)
    expected = reference.neighbor_map(coords, shape, kernel_size, dilation, transposed)
    np.testing.assert_array_equal(nmap, expected)
    return nmap


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("dilation", DILATIONS)
@pytest.mark.parametrize("kernel_size", KERNELS)
def test_kernel_sizes_and_dilations(backend, grid_around, kernel_size, dilation, transposed):
    coords, shape = scenes.scene(400, seed=1)
    nmap = check(backend, coords, grid_around(coords, shape), kernel_size, dilation, transposed)
    centre = (kernel_size[0] // 2 * kernel_size[1] + kernel_size[1] // 2) * kernel_size[2] + kernel_size[2] // 2
    np.testing.assert_array_equal(nmap[centre], np.arange(400))  # every voxel is its own neighbour


@pytest.mark.parametrize("n", ROWS)
def test_row_counts(backend, grid_around, n):
    coords, shape = scenes.scene(n)
    check(backend, coords, grid_around(coords, shape))


@pytest.mark.parametrize("batch", [1, 2, 3, 64, 512])
def test_samples_of_a_batch_do_not_see_each_other(backend, grid_around, batch):
    coords, shape = scenes.scene(1500, batch=batch, density=0.5)
    nmap = check(backend, coords, grid_around(coords, shape))
    sources, rows = nmap[nmap >= 0], np.nonzero(nmap >= 0)[1]
    np.testing.assert_array_equal(coords[sources, 0], coords[rows, 0])


def test_a_real_surface(backend, grid_around):
    coords, shape = scenes.shell(16)
    check(backend, coords, grid_around(coords, shape))


@pytest.mark.parametrize(
    "shape",
    [
        (1, 64, 64, 64),  # 2^15 cells, the most that have a place each however few have voxels
        (1, 64, 64, 65),
        (1, 65, 63, 33),  # the last cells of an axis reach out of the grid
        (3, 1, 999, 7),
        (2, 37, 2, 51),
        (1, 1, 1, 2**16),
        (1, 1, 1, 2**16 + 1),
        (2**15, 1, 1, 1),
        (2**15, 1, 1, 3),
    ],
)
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
def test_far_corner_of_any_grid(backend, shape, transposed):
    """All voxels of its last samples, rows and columns, as far as they are 500, and rows outside where they may be."""
    far = np.asarray(shape) - 1
    reach = np.minimum(shape, (2, 7, 6, 6))
    coords = far - np.stack(np.unravel_index(np.random.default_rng(1).permutation(np.prod(reach)), reach), axis=1)
    coords = coords.astype(np.int32)
    if backend.name == "cuda":
        coords = np.insert(coords, np.arange(16) % len(coords), beyond(coords[0], shape), axis=0)
    check(backend, coords, shape, (3, 3, 3), (1, 1, 1), transposed)
    check(backend, coords, shape, (4, 3, 2), (1, 2, 3), transposed)


@pytest.mark.parametrize("n, table", [(15_000, "hash"), (22_000, "direct")])
def test_large_grids_that_are_full_enough(backend, n, table):
    shape = (1, 65, 64, 64)
    assert _C.plan_voxel_table(rows=n, shape=shape) == table
    flat = np.random.default_rng(0).permutation(np.prod(shape))
    coords, queries = (
        np.stack(np.unravel_index(part, shape), axis=1).astype(np.int32) for part in (flat[:n], flat[n - 150 : n + 50])
    )
    kernel = (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)
    nmap = guarded.sparse_map(backend, coords, shape, queries, shape, *kernel)
    np.testing.assert_array_equal(nmap, reference.sparse_map(coords, shape, queries, shape, *kernel))


@pytest.mark.parametrize(
    "shape",
    [
        (2, 2**20, 2**20, 2**20),  # 2^61 cells
        (1, 2**31, 2**15, 2**16),  # x + 1 passes 2^31 - 1
        (8, 1024, 2**31, 1024),
        (1, 1024, 1024, 2**31),
        (2**31, 1024, 1024, 1024),
        (1, 1290, 1290, 1291),  # just above 2^31 cells
        (1, 4000, 1000, 7990),  # just below and above 4 * 10^9 runs of 8 voxels along z
        (1, 4000, 1000, 7999),
    ],
)
def test_far_corner_of_a_huge_grid(backend, shape):
    coords = scenes.far_corner(200, shape)
    check(backend, coords, shape, (3, 3, 3), (1, 1, 1))
    check(backend, coords, shape, (2, 3, 4), (3, 2, 1), transposed=True)


@pytest.mark.parametrize("shape", [(1024, 2**16, 2**16, 2**16), (1024, 2**17, 2**17, 2**17), (1024, 5, 5, 2**48)])
def test_samples_that_lie_far_apart_do_not_fall_together(backend, shape):
    """Voxels of one sample and those of the next differ in the highest bits of their numbers, or in few."""
    sites = np.stack(np.meshgrid(np.arange(1024), *[np.arange(5)] * 3, indexing="ij"), axis=-1)
    coords = backend.array(sites.reshape(-1, 4).astype(np.int32))

    def seconds(shape):
        begun = time.perf_counter()
        nmap = flexgemm.neighbor_map(coords, shape)
        assert nmap.num_pairs == 1024 * 13**3
        return time.perf_counter() - begun

    assert seconds(shape) < 2 + 10 * seconds((1024, 5, 5, 5))


def test_keys_that_differ_by_a_multiple_of_2_to_the_32_do_not_collide(backend):
    shape = (4, 2**20, 2**20, 2**20)
    coords = np.array([[b, x, 0, z] for b in range(4) for x in (0, 2**12, 2**13) for z in (0, 1)], np.int32)
    nmap = check(backend, coords, shape)
    assert (nmap >= 0).sum() == 2 * len(coords)


def test_dilation_larger_than_the_grid_leaves_the_centre(backend):
    coords, shape = scenes.scene(100)
    nmap = check(backend, coords, shape, (3, 3, 3), (2**31 - 1, 2**30, 1000))
    assert (nmap >= 0).sum() == 100


@pytest.mark.parametrize("axis", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
def test_steps_beyond_32_bits_do_not_come_back_around(backend, axis, transposed):
    """Three steps of 2^31 - 1 are 2^31 - 3 modulo 2^32, and as a key they lead into another sample: both are there."""
    far = 2**31 - 1
    shape, kernel_size, dilation = [4, 2, 2, 2], [1, 1, 1], [1, 1, 1]
    shape[axis], kernel_size[axis - 1], dilation[axis - 1] = 2**31, 7, far
    coords = np.zeros((4, 6, 4), np.int32)
    coords[:, :, 0] = np.arange(4)[:, None]
    coords[:, :, axis] = 0, 1, 2, far - 2, far - 1, far
    nmap = check(backend, coords.reshape(-1, 4), tuple(shape), tuple(kernel_size), tuple(dilation), transposed)
    assert (nmap >= 0).sum() == 24 + 2 * 4  # besides every voxel itself: 0 and 2^31 - 1, both ways


@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (3, 5, 7, 3)])
def test_offsets_do_not_wrap_around_the_edges_of_the_grid(backend, grid_around, shape):
    """The key of (x, y, D - 1) + 1 is the key of (x, y + 1, 0): a full grid shows a missing bounds check."""
    coords = np.stack(np.unravel_index(np.arange(np.prod(shape)), shape), axis=1).astype(np.int32)
    shape = grid_around(coords, shape)
    check(backend, coords, shape, (5, 5, 5), (2, 1, 3))
    check(backend, coords, shape, (5, 5, 5))


def test_of_duplicates_the_lowest_row_wins(backend, grid_around):
    coords, shape = scenes.scene(300, density=0.6)
    coords = np.concatenate([coords, coords[::-1], coords[:50]])
    shape = grid_around(coords, shape)
    nmap = check(backend, coords, shape)
    assert nmap.max() < 300
    for _ in range(5):
        np.testing.assert_array_equal(guarded.neighbor_map(backend, coords, shape, (3, 3, 3)), nmap)


def test_check_reports_duplicates(backend, grid_around):
    coords, shape = scenes.scene(300)
    shape = grid_around(coords, shape)
    array = backend.array(np.concatenate([coords, coords[7:8]]))
    flexgemm.neighbor_map(array, shape)
    with pytest.raises(ValueError, match="coords: rows? (7 and 300 are the same|300 is .* the same as row 7)"):
        flexgemm.neighbor_map(array, shape, check=True)
    flexgemm.neighbor_map(backend.array(coords), shape, check=True)


def beyond(inside, shape):
    """Every way to leave the grid from a voxel, one row each."""
    rows = []
    for axis in range(4):
        for wrong in (-1, shape[axis], -(2**31), 2**31 - 1):
            rows.append(np.array(inside, np.int64))
            rows[-1][axis] = wrong
    return np.array(rows, np.int32)


def test_rows_out_of_range_have_no_neighbours_on_the_gpu(cuda, grid_around):
    coords, shape = scenes.scene(300, density=0.6)
    shape = grid_around(coords, shape)
    coords = np.insert(coords, range(0, 256, 16), beyond((0, 1, 1, 1), shape), axis=0)
    nmap = check(cuda, coords, shape)
    outside = ~reference.in_range(coords, shape)
    assert outside.sum() == 16
    assert (nmap[:, outside] == -1).all()
    assert not np.isin(nmap, np.nonzero(outside)[0]).any()


def test_rows_out_of_range_raise_where_they_can_be_seen(backend, grid_around):
    coords, shape = scenes.scene(300)
    shape = grid_around(coords, shape)
    for wrong in beyond((0, 1, 1, 1), shape):
        bad = coords.copy()
        bad[211] = wrong
        with pytest.raises(ValueError, match="coords"):
            flexgemm.neighbor_map(backend.array(bad), shape, check=True)
        if backend.name == "cpu":
            with pytest.raises(ValueError, match="coords"):
                flexgemm.neighbor_map(backend.array(bad), shape)


def test_check_with_no_rows(backend):
    nmap = flexgemm.neighbor_map(backend.array(np.zeros((0, 4), np.int32)), (1, 8, 8, 8), check=True)
    assert backend.numpy(nmap.map).shape == (27, 0)
    assert nmap.num_pairs == 0


@pytest.mark.parametrize(
    "argument, wrong",
    [
        ("kernel_size", 0),
        ("kernel_size", 8),
        ("kernel_size", (3, 3)),
        ("kernel_size", (3, 3, 9)),
        ("dilation", 0),
        ("dilation", (1, -1, 1)),
        ("shape", (1, 8, 8)),
        ("shape", (1, 8, 8, 0)),
        ("shape", (2**31, 2**31, 2**31, 1)),
        ("coords", np.zeros((5, 3), np.int32)),
        ("coords", np.zeros(4, np.int32)),
    ],
)
def test_impossible_arguments_are_named(backend, argument, wrong):
    arguments = {"coords": np.zeros((1, 4), np.int32), "shape": (1, 8, 8, 8), argument: wrong}
    arguments["coords"] = backend.array(arguments["coords"])
    with pytest.raises(ValueError, match=argument):
        flexgemm.neighbor_map(**arguments)


@pytest.mark.parametrize("size", [8, 100_000, 2**70])
@pytest.mark.parametrize("axes", [1, 3])
@pytest.mark.parametrize("transposed", [None, False, True], ids=["submanifold", "strided", "transposed"])
def test_kernels_that_are_too_large_are_refused_before_memory_is_asked_for(backend, axes, size, transposed):
    coords, kernel_size = backend.array(np.zeros((1, 4), np.int32)), (3,) * (3 - axes) + (size,) * axes
    with pytest.raises(ValueError, match=f"^kernel_size: expected 1 to 7, got {size}$"):
        if transposed is None:
            flexgemm.neighbor_map(coords, (1, 8, 8, 8), kernel_size)
        else:
            padding = () if transposed else (kernel_size,)
            flexgemm.sparse_conv_map(coords, (1, 8, 8, 8), kernel_size, 1, *padding, transposed=transposed)


def test_coordinates_of_another_dtype_raise(backend):
    with pytest.raises(TypeError, match="coords"):
        flexgemm.neighbor_map(backend.array(np.zeros((1, 4), np.float32)), (1, 8, 8, 8))


@pytest.mark.parametrize("kernel_size", [3, (3, 5, 1), (2, 3, 3), (3, 2, 5), (5, 3, 2), 4])
@pytest.mark.parametrize("dilation", [1, (1, 3, 2)])
def test_the_object(backend, kernel_size, dilation):
    coords, shape = scenes.scene(500)
    array = backend.array(coords)
    nmap = flexgemm.neighbor_map(array, shape, kernel_size, dilation)
    sizes = (kernel_size,) * 3 if isinstance(kernel_size, int) else kernel_size
    steps = (dilation,) * 3 if isinstance(dilation, int) else dilation
    forward = reference.neighbor_map(coords, shape, sizes, steps)
    backward = reference.neighbor_map(coords, shape, sizes, steps, transposed=True)

    assert nmap.coords is array
    assert tuple(nmap.shape) == shape
    assert tuple(nmap.kernel_size) == sizes
    assert tuple(nmap.dilation) == steps
    assert nmap.kernel_volume == len(forward)
    assert nmap.mirrored == all(k % 2 for k in sizes)
    assert nmap.num_pairs == (forward >= 0).sum()
    np.testing.assert_array_equal(backend.numpy(nmap.map), forward)
    np.testing.assert_array_equal(backend.numpy(nmap.transposed_map), backward)
    assert nmap.transposed_map is nmap.transposed_map  # built once
    if nmap.mirrored:
        np.testing.assert_array_equal(backward, forward[::-1])


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("build", [flexgemm.neighbor_map, flexgemm.sparse_conv_map])
def test_maps_of_numpy_coordinates_move(cuda, build, inverse):
    coords, shape = scenes.scene(300)
    nmap = build(coords, shape, (3, 2, 3))
    nmap = nmap.inverse if inverse else nmap
    moved = nmap.to("cuda")
    assert (nmap.device, moved.device) == (None, "cuda")
    assert nmap.to("cpu") is nmap and moved.to("cuda") is moved
    for other in (moved, moved.to("cpu")):
        assert repr(other) == repr(nmap)
        for name in ("map", "transposed_map", "out_coords"):
            np.testing.assert_array_equal(getattr(other, name), getattr(nmap, name))


def test_maps_of_device_arrays_do_not_move(cuda):
    coords, shape = scenes.scene(300)
    nmap = flexgemm.neighbor_map(cuda.array(coords), shape)
    with pytest.raises(TypeError, match="^device: maps of .* coordinates are not moved"):
        nmap.to("cpu")


@pytest.mark.parametrize(
    ("rows", "shape", "table"),
    [
        (0, (1, 64, 64, 64), "direct"),  # a megabyte
        (0, (1, 64, 64, 65), "hash"),
        (3840, (1, 32, 32, 32), "direct"),
        (15_192, (1, 64, 64, 64), "direct"),
        (64_160, (1, 128, 128, 128), "hash"),
        (4_113_056, (1, 1024, 1024, 1024), "hash"),
        (1024 * 32**3 // 5, (1024, 32, 32, 32), "direct"),
        (1024 * 32**3 // 14, (1024, 32, 32, 32), "hash"),
        (2**31 - 1, (1, 2**11, 2**11, 2**12), "direct"),
        (2**31 - 1, (1, 2**12, 2**11, 2**12), "hash"),  # 2^32 cells
        (2**31 - 1, (1, 2**20, 2**20, 2**20), "hash"),
        (1, (2**62, 1, 1, 1), "hash"),
    ],
)
def test_voxels_have_a_place_each_where_that_is_no_larger(rows, shape, table):
    assert _C.plan_voxel_table(rows=rows, shape=shape) == table


def test_the_smaller_table_is_chosen_above_a_megabyte():
    for rows, b, w, h, d in itertools.product(
        [0, 1, 3000, 65_931, 4_000_000], [1, 7, 512], [1, 31, 128], [64, 129], [1, 300, 4097]
    ):
        direct = 32 * b * -(-w // 2) * -(-h // 2) * -(-d // 2)
        hashed = 36 * ((rows * 3 // 2 + 64) // 4 * 4)
        expected = "direct" if direct <= max(hashed, 2**20) else "hash"
        assert _C.plan_voxel_table(rows=rows, shape=(b, w, h, d)) == expected


@pytest.mark.parametrize("wrong", [{"rows": -1}, {"rows": 2**31}, {"shape": (1, 8, 8)}, {"shape": (1, 8, 8, 0)}])
def test_impossible_tables_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        _C.plan_voxel_table(**{"rows": 100, "shape": (1, 8, 8, 8), **wrong})


@pytest.mark.large
def test_millions_of_voxels(cuda, grid_around):
    coords, shape = scenes.scene(4_000_000, batch=4)
    shape = grid_around(coords, shape)
    nmap = cuda.numpy(flexgemm.neighbor_map(cuda.array(coords), shape, check=True).map)
    rows = np.random.default_rng(0).choice(len(coords), 4096, replace=False).tolist()
    np.testing.assert_array_equal(nmap[:, rows], reference.neighbor_map(coords, shape, rows=rows))


@pytest.mark.parametrize("kernel_size", [2, 3])
def test_a_copied_inverse_leads_both_ways(backend, kernel_size):
    """On a GPU the copy builds its maps anew."""
    coords, shape = scenes.scene(300)
    nmap = flexgemm.neighbor_map(coords, shape, kernel_size, device="cuda" if backend.name == "cuda" else None)
    again = copy.deepcopy(nmap.inverse)
    np.testing.assert_array_equal(again.map, nmap.inverse.map)
    np.testing.assert_array_equal(again.transposed_map, nmap.map)
    np.testing.assert_array_equal(again.inverse.map, nmap.map)


def test_an_order_of_many_more_sites_than_voxels(backend):
    coords, shape, to_shape = np.zeros((1, 4), np.int32), (1, 16, 16, 16), (1, 32, 32, 32)
    sites = np.array([[0, x, y, z] for x in range(16) for y in range(16) for z in range(16)], np.int32)
    how = (2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1)
    call = guarded.Call(backend)
    nmap, order = call.run(
        "neighbor_map", call.give(coords), call.take((8, len(sites)), "int32"), queries=call.give(sites),
        order=call.take((1, len(sites)), "int32"), groups=(1,), shape=shape, query_shape=to_shape,
        kernel_size=how[0], stride=how[1], padding=how[2], dilation=how[3], transposed=True,
    )  # fmt: skip
    np.testing.assert_array_equal(nmap, reference.sparse_map(coords, shape, sites, to_shape, *how, transposed=True))
    assert sorted(order[0].tolist()) == list(range(len(sites)))
