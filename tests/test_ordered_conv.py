"""Convolutions that follow row orders, and maps with their entries in the order of their rows."""

from __future__ import annotations

import copy

import guarded
import numpy as np
import pytest
import reference
import scenes
import verdicts
from memory import hopper, hopper_kernels
from plans import row_orders
from verdicts import assert_conv_rows, assert_rows, assert_same_bits

import flexgemm
from flexgemm import _C


@pytest.mark.parametrize("mode", ["float32", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("n, ci, co", [(1, 7, 33), (127, 64, 64), (129, 33, 97), (700, 136, 72), (20_000, 16, 136)])
@pytest.mark.parametrize("groups", [1, 3, 9])
def test_orders_change_where_rows_are_computed_and_not_what(backend, mode, n, ci, co, groups):
    dtype, precision = ("float32", "tf32") if mode == "tf32" else (mode, "ieee")
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(n)
    nmap = reference.neighbor_map(coords, shape)
    feats, weight, bias, grad_out = (scenes.values(rng, s, dtype) for s in ((n, ci), (co, 3, 3, 3, ci), (co,), (n, co)))
    order = np.stack([rng.permutation(n).astype(np.int32) for _ in range(groups)])
    how = {"precision": precision, "pad": 3, "offset": 1, "algorithm": "masked_implicit_gemm_splitk"}

    def forward(order):
        return guarded.conv_forward(backend, feats, weight, bias, nmap, order=order, **how)

    def dgrad(order):
        return guarded.conv_dgrad(backend, grad_out, weight, nmap, mirrored=True, order=order, **how)

    for compute in (forward, dgrad):
        plain, ordered = compute(None), compute(order)
        assert_rows(ordered, plain.astype(np.float64), 2 * verdicts.ROW_TOLERANCE[mode])
        assert ordered.tobytes() == compute(order).tobytes()
    if n <= 700:
        assert_conv_rows(forward(order), reference.conv_forward(feats, weight, bias, nmap), mode)
        assert_conv_rows(dgrad(order), reference.conv_dgrad(grad_out, weight, nmap, n), mode)


@pytest.mark.parametrize("mode", ["float32", "float16"])
@pytest.mark.parametrize("groups", [3, 9])
@pytest.mark.parametrize("channels", [(24, 40), (72, 264)])
def test_rows_without_neighbours_in_a_group(backend, mode, groups, channels):
    """Whole tiles of them are passed over, and their share of the sum is zero: what lies in the workspace is NaN."""
    n, (ci, co) = 600, channels
    rng = np.random.default_rng(0)
    nmap = rng.integers(0, n, (27, n)).astype(np.int32)
    for group in np.split(nmap, groups):
        group[:, rng.random(n) < 0.6] = -1
    nmap[:, :150] = -1  # and some that have none at all
    orders = row_orders(nmap, (3, 3, 3), (groups,))
    feats, weight, bias = (scenes.values(rng, s, mode) for s in ((n, ci), (co, 27, ci), (co,)))
    how = {"order": orders, "algorithm": "masked_implicit_gemm_splitk"}
    out = guarded.conv_forward(backend, feats, weight, bias, nmap, **how)
    assert_conv_rows(out, reference.conv_forward(feats, weight, bias, nmap), mode)
    if backend.name == "cuda":  # what is no row is no neighbour
        hostile = np.where(nmap < 0, n, nmap).astype(np.int32)
        assert_same_bits(guarded.conv_forward(backend, feats, weight, bias, hostile, **how), out)
    grad_feats = guarded.conv_dgrad(backend, feats, weight.swapaxes(0, 2).copy(), nmap, **how)
    assert_conv_rows(grad_feats, reference.conv_forward(feats, weight, None, nmap), mode)


def test_slots_of_an_order_that_are_no_rows_are_left_out(cuda):
    """Device memory is not trusted: such a slot reads and writes nothing, which the fences prove."""
    n = 300
    rng = np.random.default_rng(0)
    nmap = rng.integers(-1, n, (27, n)).astype(np.int32)
    feats, weight = scenes.values(rng, (n, 64), "float16"), scenes.values(rng, (64, 27, 64), "float16")
    order = np.tile(np.arange(n, dtype=np.int32), (3, 1))
    order[:, [0, 100, 200, 299]] = -1, n, 2**31 - 1, -(2**31)
    left = np.isin(np.arange(n), [0, 100, 200, 299], invert=True)
    for groups in (1, 3):
        how = {"order": order[:groups], "algorithm": "masked_implicit_gemm_splitk"}
        with_order = guarded.conv_forward(cuda, feats, weight, None, nmap, **how)
        assert_rows(with_order[left], reference.conv_forward(feats, weight, None, nmap)[left], 2e-3)


@pytest.mark.parametrize("mode", ["float32", "float16"])
def test_a_mirrored_pass_takes_the_order_of_the_map_rows_that_it_reads(cuda, mode):
    """Only the first third of the map has neighbours, and only its order has rows."""
    n, channels = 300, 40
    rng = np.random.default_rng(0)
    nmap = np.full((27, n), -1, np.int32)
    nmap[:9] = rng.integers(-1, n, (9, n))
    order = np.full((3, n), -1, np.int32)
    order[0] = rng.permutation(n)
    feats, weight = scenes.values(rng, (n, channels), mode), scenes.values(rng, (channels, 27, channels), mode)
    how = {"order": order, "algorithm": "masked_implicit_gemm_splitk"}
    out = guarded.conv_forward(cuda, feats, weight, None, nmap, **how)
    assert_conv_rows(out, reference.conv_forward(feats, weight, None, nmap), mode)
    grad_feats = guarded.conv_dgrad(cuda, feats, weight, nmap, mirrored=True, **how)
    adjoint = weight[:, ::-1].swapaxes(0, 2)
    assert_conv_rows(grad_feats, reference.conv_forward(feats, adjoint, None, nmap), mode)


@pytest.mark.parametrize("mode", ["float32", "tf32", "float16"])
@pytest.mark.parametrize("algorithm", ["auto", "masked_implicit_gemm", "masked_implicit_gemm_splitk"])
@pytest.mark.parametrize(
    "kernel_size, stride", [((3, 3, 3), (2, 2, 2)), ((2, 2, 2), (2, 2, 2)), ((3, 2, 5), (1, 2, 3))]
)
@pytest.mark.parametrize("ci, co", [(16, 24), (136, 264)])
def test_maps_with_phases(backend, mode, algorithm, kernel_size, stride, ci, co):
    """What a plan leaves out of the rows of a phase is not there, nor are partial sums of it: the workspace is NaN."""
    dtype, precision = ("float32", "tf32") if mode == "tf32" else (mode, "ieee")
    coords, shape = scenes.scene(800)
    nmap = reference.map_back(coords, shape, kernel_size, stride)
    n, rng, phases = int(nmap.max()) + 1, np.random.default_rng(0), tuple(map(min, stride, kernel_size))
    how = {"order": row_orders(nmap, kernel_size, phases=phases), "groups": (1,), "phases": phases}
    how |= {"algorithm": algorithm, "precision": precision}
    feats, weight, bias = (scenes.values(rng, s, dtype) for s in ((n, ci), (co, *kernel_size, ci), (co,)))
    out = guarded.conv_forward(backend, feats, weight, bias, nmap, **how)
    assert_conv_rows(out, reference.conv_forward(feats, weight, bias, nmap), mode)
    grad_feats = guarded.conv_dgrad(backend, feats, np.ascontiguousarray(weight.swapaxes(0, 4)), nmap, **how)
    assert_conv_rows(grad_feats, reference.conv_forward(feats, weight, None, nmap), mode)


MASKED = ["masked_implicit_gemm", "masked_implicit_gemm_splitk"]


class Ordered:
    """A layer over a small map, its maps as both passes read them, and orders of any kind."""

    def __init__(self, mode, kernel_size=(3, 3, 3), n=700, ci=136, co=72):
        self.dtype, self.precision = ("float32", "tf32") if mode == "tf32" else (mode, "ieee")
        self.rng, self.n = np.random.default_rng(0), n
        coords, shape = scenes.scene(n)
        self.mirrored = all(k % 2 for k in kernel_size)
        self.map = reference.neighbor_map(coords, shape, kernel_size)
        transposed = reference.neighbor_map(coords, shape, kernel_size, transposed=True)
        self.gradient_map = self.map if self.mirrored else transposed
        draw = (n, ci), (co, *kernel_size, ci), (co,), (n, co)
        self.feats, self.weight, self.bias, self.grad_out = (scenes.values(self.rng, s, self.dtype) for s in draw)
        self.tolerance = verdicts.ROW_TOLERANCE[mode]

    def order(self, groups):
        return np.stack([self.rng.permutation(self.n) for _ in range(sum(groups))]).astype(np.int32)

    def forward(self, backend, order, nmap=None, **how):
        given = self.feats, self.weight, self.bias, self.map if nmap is None else nmap
        return guarded.conv_forward(backend, *given, order=order, precision=self.precision, **how)

    def dgrad(self, backend, order, nmap=None, **how):
        given = self.grad_out, self.weight, self.gradient_map if nmap is None else nmap
        how |= {"mirrored": self.mirrored, "precision": self.precision}
        return guarded.conv_dgrad(backend, *given, order=order, **how)


@pytest.mark.parametrize("algorithm", ["auto", *MASKED])
@pytest.mark.parametrize("groups", [(1,), (1, 3)])
@pytest.mark.parametrize("kernel_size", [(3, 3, 3), (3, 1, 5), (3, 2, 3)])
@pytest.mark.parametrize("mode", ["float32", "tf32", "float16"])
def test_an_ordered_map_changes_no_bit(backend, mode, kernel_size, groups, algorithm):
    p = Ordered(mode, kernel_size)
    order, how = p.order(groups), {"groups": groups, "algorithm": algorithm}
    for compute, nmap in ((p.forward, p.map), (p.dgrad, p.gradient_map)):
        assert_same_bits(
            compute(backend, reference.ordered_map(nmap, order), **how),
            compute(backend, order, **how),
        )


def test_an_ordered_map_of_float8_changes_no_bit(backend):
    p = Ordered("float32", ci=64)
    order = p.order((1,))
    feats, weight = (a.astype("float8_e4m3fn") for a in (p.feats, p.weight))
    how = {"groups": (1,), "algorithm": MASKED[0], "out_dtype": "float32"}
    with_map, without = (
        guarded.conv_forward(backend, feats, weight, p.bias, p.map, order=rows, **how)
        for rows in (reference.ordered_map(p.map, order), order)
    )
    assert_same_bits(with_map, without)


@pytest.mark.parametrize("channel_groups", [1, 2])
@pytest.mark.parametrize("kernel_size", [(3, 3, 3), (3, 2, 3)])
@pytest.mark.parametrize("mode", ["float32", "tf32", "float16"])
def test_hopper_reads_the_ordered_map_alone(cuda, mode, kernel_size, channel_groups):
    """The map itself has no entries."""
    if not hopper_kernels(cuda):
        pytest.skip("other kernels do not read it")
    p = Ordered(mode, kernel_size, ci=128, co=128)
    p.weight = np.ascontiguousarray(p.weight[..., : 128 // channel_groups])
    order, none = p.order((1,)), np.full_like(p.map, -1)
    how = {"groups": (1,), "algorithm": MASKED[0], "channel_groups": channel_groups}
    for compute, nmap in ((p.forward, p.map), (p.dgrad, p.gradient_map)):
        ordered = reference.ordered_map(nmap, order)
        assert_same_bits(compute(cuda, ordered, none, **how), compute(cuda, order, **how))


def test_slots_that_are_no_rows_are_left_out_with_an_ordered_map_too(cuda):
    p = Ordered("float16", n=300)
    wrong = [0, 100, 200, 299]
    order = np.arange(300, dtype=np.int32)[None].copy()
    order[0, wrong] = -1, 300, 2**31 - 1, -(2**31)
    out = p.forward(cuda, reference.ordered_map(p.map, order), groups=(1,), algorithm=MASKED[0])
    left = np.isin(np.arange(300), wrong, invert=True)
    assert_rows(out[left], reference.conv_forward(p.feats, p.weight, p.bias, p.map)[left], p.tolerance)


@pytest.mark.parametrize("rows, groups", [(27, (1,)), (29, (1,)), (30, (3,)), (30, (3, 1)), (28, None)])
def test_another_number_of_rows_than_orders_and_offsets_is_refused(backend, rows, groups):
    p = Ordered("float16", n=100)
    order = np.zeros((rows, 100), np.int32)
    for compute in (p.forward, p.dgrad):
        with pytest.raises(ValueError, match=r"order: expected \(G, N\), .*, or, the first being 1, \(G \+ V, N\)"):
            compute(backend, order, groups=groups)


@pytest.mark.parametrize("algorithm", ["auto", "masked_implicit_gemm", "masked_implicit_gemm_splitk"])
@pytest.mark.parametrize("kernel_size", [3, 2])
def test_convolutions_of_an_ordered_object(backend, kernel_size, algorithm):
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(3000)
    feats, grad_out = scenes.values(rng, (3000, 24), "float32"), scenes.values(rng, (3000, 40), "float32")
    weight = scenes.values(rng, (40, *(kernel_size,) * 3, 24), "float32")
    nmap = flexgemm.neighbor_map(backend.array(coords), shape, kernel_size)
    plain = reference.neighbor_map(coords, shape, (kernel_size,) * 3)
    x, w, g = map(backend.array, (feats, weight, grad_out))
    how = {"neighbor_map": nmap, "algorithm": algorithm}
    out = flexgemm.submanifold_conv3d(x, w, **how)
    gradients = flexgemm.submanifold_conv3d_backward(g, x, w, needs_grad=(True, False, False), **how)
    assert_rows(backend.numpy(out), reference.conv_forward(feats, weight, None, plain), 1e-5)
    assert_rows(backend.numpy(gradients[0]), reference.conv_dgrad(grad_out, weight, plain, 3000), 1e-5)


@pytest.mark.parametrize(
    ("kernel_size", "n", "has"),
    [(2, 12_500, True), (2, 12_000, False), ((1, 1, 7), 600, True), ((3, 3, 1), 30_000, False)],
)
def test_freezing_keeps_the_entries_in_the_order_of_rows_on_hopper(backend, kernel_size, n, has):
    """Of maps whose rows have one order for all offsets, which an array of more rows can tell from other sets."""
    coords, shape = scenes.scene(n)
    nmap = flexgemm.neighbor_map(backend.array(coords), shape, kernel_size)
    groups, native_order = nmap.order_groups, nmap.native_order
    order = None if native_order is None else backend.numpy(nmap.order)
    inverse_before = nmap.inverse.native_order
    assert nmap.freeze() is nmap
    frozen = nmap.native_order, nmap.native_gradient()[1]
    assert nmap.order_groups == groups
    if order is None:
        assert frozen == (None, None)
        return
    np.testing.assert_array_equal(backend.numpy(nmap.order), order)
    if has and hopper(backend):
        np.testing.assert_array_equal(backend.numpy(frozen[0]), reference.ordered_map(backend.numpy(nmap.map), order))
        gradient, gradient_order = (backend.numpy(array) for array in nmap.native_gradient())
        np.testing.assert_array_equal(gradient_order, reference.ordered_map(gradient, gradient_order[:1]))
    else:
        assert frozen[0] is native_order
    assert nmap.inverse.native_order is inverse_before
    nmap.freeze()
    assert (nmap.native_order, nmap.native_gradient()[1]) == frozen


def test_freezing_keeps_the_entries_of_maps_with_phases_on_hopper(backend):
    """They have one order whatever their number of rows. Of 3x3x3 and so few rows, other maps have several."""
    coords, shape = scenes.scene(1500)
    nmap = flexgemm.sparse_conv_map(backend.array(coords), shape, 3, 2, 1).freeze()
    back = nmap.inverse
    if backend.name == "cpu":
        assert nmap.native_order is back.native_order is None
        return
    assert (nmap.order_groups, back.order_groups) == ((1, 3, 9), (1,))
    assert nmap.native_order.shape[0] == 13
    order = backend.numpy(back.order)
    expected = reference.ordered_map(backend.numpy(back.map), order) if hopper(backend) else order
    np.testing.assert_array_equal(backend.numpy(back.native_order), expected)


def test_no_entries_are_ordered_while_a_graph_is_captured(graphs):
    """They would be the graph's."""
    coords, shape = scenes.scene(600)
    nmap = flexgemm.neighbor_map(coords, shape, (1, 1, 7), device="cuda", stream=graphs.stream)
    given, code = graphs.array(coords), graphs.empty((600,), "int32")
    found = []

    def work():
        found.append((_C.is_capturing(given, stream=graphs.stream), copy.copy(nmap).freeze(graphs.stream)))
        _C.encode_seq(given, code, shape=shape, stream=graphs.stream)

    graphs.capture(work)
    capturing, frozen = found[-1]
    assert capturing
    assert frozen.native_order is nmap.native_order
    assert (nmap.freeze(graphs.stream).native_order is frozen.native_order) != hopper(graphs)


def test_the_inverse_of_a_frozen_map_has_its_orders(backend):
    coords, shape = scenes.scene(600)
    nmap, other = (flexgemm.neighbor_map(backend.array(coords), shape, (1, 1, 4)) for _ in range(2))
    orders = nmap.order, other.inverse.order
    nmap.freeze()
    for got, expected in zip((nmap.order, nmap.inverse.order), orders, strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            np.testing.assert_array_equal(backend.numpy(got), backend.numpy(expected))


def test_convolutions_of_a_frozen_map_are_bitwise_the_same(backend):
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(600)
    draw = (600, 136), (72, 1, 1, 4, 136), (600, 72)
    x, w, g = (backend.array(scenes.values(rng, s, "float16")) for s in draw)
    nmap = flexgemm.neighbor_map(backend.array(coords), shape, (1, 1, 4))
    how = {"neighbor_map": nmap, "algorithm": "masked_implicit_gemm"}

    def both():
        out = flexgemm.submanifold_conv3d(x, w, **how)
        gradients = flexgemm.submanifold_conv3d_backward(g, x, w, needs_grad=(True, False, False), **how)
        return backend.numpy(out), backend.numpy(gradients[0])

    before = both()
    nmap.freeze()
    for after, expected in zip(both(), before, strict=True):
        assert_same_bits(after, expected)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("groups", [7, 49])
def test_slices_of_a_large_kernel(backend, dtype, groups):
    """More than 32, as many as a word has bits."""
    n, ci, co = 300, 64, 64
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(n)
    nmap = reference.neighbor_map(coords, shape, (7, 7, 7))
    feats, weight = (scenes.values(rng, s, dtype, one_sign=True) for s in ((n, ci), (co, 7, 7, 7, ci)))
    order = np.stack([rng.permutation(n).astype(np.int32) for _ in range(groups)])
    out = guarded.conv_forward(backend, feats, weight, None, nmap, order=order,
                               algorithm="masked_implicit_gemm_splitk")  # fmt: skip
    assert_conv_rows(out, reference.conv_forward(feats, weight, None, nmap), dtype)
