"""Arguments of sparse convolution that are refused, by their names."""

from __future__ import annotations

import numpy as np
import pytest
import scenes
from calls import place
from test_sparse_conv import FORWARD, Problem

import flexgemm
from flexgemm import _C


@pytest.mark.parametrize(
    "argument, changes",
    [
        ("kernel_size", {"kernel_size": 8}),
        ("kernel_size", {"kernel_size": (3, 3)}),
        ("kernel_size", {"kernel_size": 7, "padding": 0, "shape": (1, 8, 8, 6)}),
        ("kernel_size", {"transposed": True, "padding": 20}),
        ("stride", {"stride": 0}),
        ("stride", {"stride": (2, 2)}),
        ("padding", {"padding": -1}),
        ("padding", {"padding": (2**31, 0, 0)}),
        ("dilation", {"dilation": 0}),
        ("output_padding", {"output_padding": 1}),
        ("output_padding", {"transposed": True, "output_padding": 2}),
        ("output_padding", {"transposed": True, "output_padding": -1}),
        ("shape", {"shape": (1, 8, 8)}),
        ("order", {"order": "zyx"}),
        ("order", {"order": "hilbert", "shape": (2, 2**21, 8, 8)}),
        ("order", {"order": "hilbert", "shape": (1, 2**22, 8, 8)}),
        ("order", {"order": "hilbert", "shape": (1, 3, 3, 3), "kernel_size": 1, "stride": 1, "padding": (2**21, 0, 0)}),
        ("shape", {"shape": (2**31, 2**31, 2**31, 8)}),
        ("coords", {"coords": np.zeros((5, 3), np.int32)}),
        ("out_coords", {"out_coords": np.zeros((5, 3), np.int32)}),
    ],
)
def test_impossible_arguments_are_named(backend, argument, changes):
    arguments = {"coords": np.zeros((1, 4), np.int32), "shape": (1, 8, 8, 8), "kernel_size": 3, "stride": 2} | changes
    with pytest.raises(ValueError, match=f"^{argument}: "):
        flexgemm.sparse_conv_map(**place(backend, arguments))


@pytest.mark.parametrize("out_coords", [None, np.zeros((1, 4), np.int32)], ids=["reached", "given"])
def test_a_grid_of_outputs_that_is_too_large_is_told_from_the_one_given(backend, out_coords):
    coords = np.zeros((1, 4), np.int32)
    given = place(backend, {"coords": coords, "out_coords": out_coords})
    message = r"^shape: expected .* of the outputs' grid, too, got \(1, 8388611, .* from \(1, 3, 3, 3\)"
    with pytest.raises(ValueError, match=message):
        flexgemm.sparse_conv_map(**given, shape=(1, 3, 3, 3), kernel_size=1, padding=2**22)


@pytest.mark.parametrize("transposed", ["no", 1, None])
def test_what_is_merely_true_is_no_bool(backend, transposed):
    coords = backend.array(np.zeros((1, 4), np.int32))
    with pytest.raises(TypeError, match="^transposed: expected a bool, got "):
        flexgemm.sparse_conv_map(coords, (1, 8, 8, 8), 2, 2, transposed=transposed)
    assert flexgemm.sparse_conv_map(coords, (1, 8, 8, 8), 2, 2, transposed=np.True_).transposed is True


@pytest.mark.parametrize("changes", [{"precision": "tf31"}, {"algorithm": "fastest"}], ids="-".join)
def test_how_to_compute_a_gradient_is_one_of_the_ways_there_are(backend, changes):
    nmap = flexgemm.neighbor_map(backend.array(np.zeros((1, 4), np.int32)), (1, 8, 8, 8))
    arrays = [backend.array(np.ones((1, channels), np.float32)) for channels in (4, 5)]
    weight = backend.array(np.ones((4, 3, 3, 3, 5), np.float32))
    ((argument, _),) = changes.items()
    for function in (flexgemm.submanifold_conv3d_backward, flexgemm.sparse_conv3d_backward):
        with pytest.raises(ValueError, match=f"^{argument}: expected "):
            function(*arrays, weight, neighbor_map=nmap, **changes)


@pytest.mark.parametrize("argument", ["coords", "out_coords"])
def test_coordinates_of_another_dtype_raise(backend, argument):
    arguments = {"coords": np.zeros((1, 4), np.int32), "out_coords": np.zeros((1, 4), np.int32)}
    arguments[argument] = arguments[argument].astype(np.float32)
    with pytest.raises(TypeError, match=f"^{argument}: "):
        flexgemm.sparse_conv_map(
            shape=(1, 8, 8, 8), kernel_size=3, **{k: backend.array(v) for k, v in arguments.items()}
        )


@pytest.mark.parametrize("wrong", [[0, -1, 0, 0], [0, 0, 4, 0], [1, 0, 0, 0], [0, 0, 0, 2**31 - 1]])
def test_rows_out_of_range_raise_where_they_can_be_seen(backend, wrong):
    good, bad = np.array([[0, 1, 1, 1]], np.int32), np.array([[0, 1, 2, 1], wrong], np.int32)
    for coords, sites, name in ((bad * [1, 2, 2, 1], None, "coords"), (good, bad, "out_coords")):
        coords = np.clip(coords, -(2**31), 2**31 - 1).astype(np.int32)
        sites = None if sites is None else backend.array(sites)
        for check in (True, False) if backend.name == "cpu" else (True,):
            with pytest.raises(ValueError, match=f"^{name}: "):
                flexgemm.sparse_conv_map(backend.array(coords), (1, 8, 8, 8), 2, 2, out_coords=sites, check=check)


LEGAL = {"shape": (1, 8, 8, 8), "kernel_size": (2, 2, 2), "dilation": (1, 1, 1)}


@pytest.mark.parametrize(
    "argument, changes",
    [
        ("queries", {"query_shape": (1, 8, 8, 8), "stride": (1, 1, 1), "padding": (0, 0, 0)}),
        ("queries", {"queries": np.zeros((2, 4), np.int32)}),
        ("query_shape", {"queries": np.zeros((2, 4), np.int32), "query_shape": (2, 8, 8, 8), "stride": (1, 1, 1),
                         "padding": (0, 0, 0)}),
    ],
)  # fmt: skip
def test_the_extension_s_own_arguments(backend, argument, changes):
    coords, out = backend.array(np.zeros((1, 4), np.int32)), backend.array(np.zeros((8, 2), np.int32))
    with pytest.raises(ValueError, match=f"^{argument}: "):
        _C.neighbor_map(coords, out, **LEGAL, **place(backend, changes))


def test_code_arrays_of_another_size_are_refused(backend):
    coords = backend.array(np.zeros((3, 4), np.int32))
    kernel = {"kernel_size": (3, 3, 3), "stride": (2, 2, 2), "dilation": (1, 1, 1)}
    assert _C.plan_conv_sites(**kernel) == 8
    assert _C.plan_conv_sites(**kernel, transposed=True) == 27
    code, count = backend.array(np.zeros(23, np.int64)), backend.array(np.zeros(1, np.int64))
    grids = {"shape": (1, 8, 8, 8), "out_shape": (1, 4, 4, 4), "code_shape": (1, 4, 4, 4)}
    with pytest.raises(ValueError, match="^code: "):
        _C.conv_sites(coords, code, count, mode="bxyz", padding=(1, 1, 1), **grids, **kernel)
    for wrong in ((1, 4, 4, 3), (1, 2**21, 2**21, 2**21), (2, 2**21, 4, 4)):
        with pytest.raises(ValueError, match="^code_shape: "):
            _C.conv_sites(
                coords, code, count, mode="hilbert", padding=(1, 1, 1), **grids | {"code_shape": wrong}, **kernel
            )
    with pytest.raises(ValueError, match="^coords: expected at most 23 rows"):
        _C.decode_seq(code, backend.array(np.zeros((24, 4), np.int32)), shape=(1, 4, 4, 4), mode="bxyz")


def test_arguments_of_gradients_are_named(backend):
    coords, shape = scenes.scene(40)
    nmap = flexgemm.neighbor_map(backend.array(coords), shape)
    feats, grad_out, weight = (np.zeros(s, np.float32) for s in ((40, 8), (40, 4), (4, 3, 3, 3, 8)))
    placed = {"grad_out": backend.array(grad_out), "weight": backend.array(weight), "neighbor_map": nmap}
    with pytest.raises(TypeError, match="^feats: expected dtype float32 to match grad_out, got float16"):
        flexgemm.submanifold_conv3d_backward(**placed, feats=backend.array(feats.astype(np.float16)))
    for wrong in ((True,), (True,) * 4, True, {True, False, None}, (True, False, 1)):
        with pytest.raises(ValueError, match="^needs_grad: expected 3 bools, got .*True"):
            flexgemm.sparse_conv3d_backward(**placed, feats=backend.array(feats), needs_grad=wrong)


def test_what_is_no_map_is_named():
    feats, weight = np.ones((2, 8), np.float32), np.ones((4, 1, 1, 1, 8), np.float32)
    with pytest.raises(TypeError, match="neighbor_map: expected a NeighborMap, got NoneType"):
        flexgemm.sparse_conv3d(feats, weight, neighbor_map=None)
    with pytest.raises(TypeError, match="neighbor_map: expected a NeighborMap"):
        flexgemm.sparse_conv3d_backward(feats, feats, weight, neighbor_map=None)


def test_a_stride_as_long_as_the_grid(backend):
    coords = np.array([[0, 2_000_000_000, 0, 0], [0, 1, 0, 0]], np.int32)
    step = 2**31 - 1
    nmap = flexgemm.sparse_conv_map(backend.array(coords), (1, step, 1, 1), (3, 1, 1), (step, 1, 1))
    np.testing.assert_array_equal(backend.numpy(nmap.out_coords), [[0, 0, 0, 0]])
    np.testing.assert_array_equal(backend.numpy(nmap.map), [[-1], [1], [-1]])


def test_an_order_that_there_is_not_is_refused_with_outputs_too(backend):
    coords = backend.array(np.zeros((1, 4), np.int32))
    with pytest.raises(ValueError, match="^order: expected 'bxyz', 'z_order' or 'hilbert', got 'foo'$"):
        flexgemm.sparse_conv_map(coords, (1, 8, 8, 8), 2, 2, out_coords=coords, order="foo")


def test_shapes_that_do_not_match_the_map_are_named(backend):
    p = Problem(FORWARD[1])
    nmap = p.neighbor_map(backend)
    feats, weight, grad_out = map(backend.array, (p.feats, p.weight, p.grad_out))
    with pytest.raises(ValueError, match=r"^feats: expected \(300, Ci\)"):
        flexgemm.sparse_conv3d(grad_out, weight, neighbor_map=nmap)
    with pytest.raises(ValueError, match=r"^weight: expected \(Co, 3, 3, 3, 33\)"):
        flexgemm.sparse_conv3d(feats, backend.array(p.weight[:, :2].copy()), neighbor_map=nmap)
    with pytest.raises(ValueError, match="^grad_out: expected"):
        flexgemm.sparse_conv3d_backward(feats, feats, weight, neighbor_map=nmap)
    with pytest.raises(ValueError, match="^neighbor_map: expected a submanifold one"):
        flexgemm.submanifold_conv3d(feats, weight, neighbor_map=nmap)
    with pytest.raises(TypeError, match="^neighbor_map: "):
        flexgemm.sparse_inverse_conv3d(feats, weight, neighbor_map=None)


@pytest.mark.parametrize("groups", [1, 4])
def test_precision_may_be_left_to_the_default(backend, groups):
    """By None, as products have it; of depthwise convolutions as well."""
    nmap = flexgemm.neighbor_map(backend.array(np.zeros((1, 4), np.int32)), (1, 8, 8, 8))
    x = backend.array(np.ones((1, 4), np.float32))
    weight = backend.array(np.ones((4, 3, 3, 3, 4 // groups), np.float32))
    out = flexgemm.submanifold_conv3d(x, weight, neighbor_map=nmap, groups=groups, precision=None)
    np.testing.assert_array_equal(backend.numpy(out), np.full((1, 4), 4 / groups))
    with pytest.raises(TypeError, match="^unexpected keyword argument 'workspace'"):
        flexgemm.submanifold_conv3d(x, weight, neighbor_map=nmap, groups=groups, workspace=x)
