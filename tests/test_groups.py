"""Grouped and depthwise convolution: what a dense convolution gives whose weight is zero between groups."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
import verdicts
from memory import Host
from verdicts import assert_rounded_once, assert_rows, assert_same_bits

import flexgemm

MODES = ["float32", "tf32", "float16", "bfloat16"]
DEPTHWISE = [(2, 2), (7, 7), (64, 64), (100, 100), (520, 520), (5, 15), (16, 32)]  # Ci, Co = Ci * multiplier
GROUPED = [(16, 24, 4), (33, 66, 3), (64, 64, 2), (6, 2, 2), (24, 12, 6)]
every_mode = pytest.mark.parametrize("mode", MODES)


def spread(weight, groups):
    """(Co, V, Ci / groups) -> (Co, V, Ci), zero outside a channel's own group."""
    co, volume, own = weight.shape
    dense = np.zeros((co, volume, own * groups))
    for o in range(co):
        first = o // (co // groups) * own
        dense[o, :, first : first + own] = reference.f64(weight[o])
    return dense


def gather_groups(dense, groups):
    """The part of a dense gradient that belongs to the weight: the inverse of spread."""
    co, own = len(dense), dense.shape[2] // groups
    firsts = [o // (co // groups) * own for o in range(co)]
    return np.stack([dense[o, :, first : first + own] for o, first in enumerate(firsts)])


def run(operation, backend, *arrays, groups, ci, **how):
    """A pass in fenced buffers: that of depthwise convolution where every channel is a group."""
    if groups < ci:
        return getattr(guarded, f"conv_{operation}")(backend, *arrays, channel_groups=groups, **how)
    how.pop("precision", None)
    if operation == "dgrad":
        arrays += (ci,)
    return getattr(guarded, f"depthwise_{operation}")(backend, *arrays, **how)


class Problem:
    def __init__(self, ci, co, groups, mode="float32", kernel_size=(3, 3, 3), stride=1, n=250):
        self.mode, self.groups, self.kernel_size, self.stride = mode, groups, kernel_size, stride
        self.dtype = "float32" if mode == "tf32" else mode
        self.how = {"precision": "tf32" if mode == "tf32" else "ieee", "groups": groups}
        self.tolerance = verdicts.ROW_TOLERANCE[mode]
        self.coords, self.shape = scenes.scene(n)
        if stride == 1:
            self.map, m = reference.neighbor_map(self.coords, self.shape, kernel_size), n
        else:
            how = kernel_size, (stride,) * 3, (0,) * 3, (1,) * 3
            to_shape = reference.out_shape(self.shape, *how)
            sites = reference.conv_sites(self.coords, self.shape, to_shape, *how)
            self.map, m = reference.sparse_map(self.coords, self.shape, sites, to_shape, *how), len(sites)
        rng = np.random.default_rng(0)
        draw = [(n, ci), (co, *kernel_size, ci // groups), (co,), (m, co)]
        self.feats, self.weight, self.bias, self.grad_out = (
            scenes.values(rng, s, self.dtype, one_sign=True) for s in draw
        )
        self.dense = spread(reference.by_offset(self.weight), groups)

    def neighbor_map(self, backend):
        coords = backend.array(self.coords)
        if self.stride == 1:
            return flexgemm.neighbor_map(coords, self.shape, self.kernel_size)
        return flexgemm.sparse_conv_map(coords, self.shape, self.kernel_size, self.stride)

    def judge(self, got, expected, what):
        assert_rows(got, expected, self.tolerance, what)
        if self.mode in verdicts.HALF_ULP:
            assert_rounded_once(got, expected, what)

    def check(self, out, grad_feats, grad_weight, grad_bias):
        self.judge(out, reference.conv_forward(self.feats, self.dense, self.bias, self.map), "out")
        expected = reference.conv_dgrad(self.grad_out, self.dense, self.map, len(self.feats))
        self.judge(grad_feats, expected, "grad_feats")
        dense, expected_bias = reference.conv_wgrad(self.grad_out, self.feats, self.map)
        expected = gather_groups(dense, self.groups)
        assert grad_weight.shape == self.weight.shape
        got = grad_weight.reshape(expected.shape)
        self.judge(got, expected, "grad_weight by channel")
        self.judge(got.swapaxes(0, 1), expected.swapaxes(0, 1), "grad_weight by offset")
        self.judge(grad_bias[None], expected_bias[None], "grad_bias")

    def passes(self, backend):
        feats, weight, bias, grad_out = map(backend.array, (self.feats, self.weight, self.bias, self.grad_out))
        how = {"neighbor_map": self.neighbor_map(backend), **self.how}
        yield backend.numpy(flexgemm.sparse_conv3d(feats, weight, bias, **how))
        yield from map(backend.numpy, flexgemm.sparse_conv3d_backward(grad_out, feats, weight, **how))


CASES = [(*channels, channels[0]) for channels in DEPTHWISE] + GROUPED


@every_mode
@pytest.mark.parametrize("ci, co, groups", CASES)
def test_forward_and_backward(backend, ci, co, groups, mode):
    p = Problem(ci, co, groups, mode)
    p.check(*p.passes(backend))


@pytest.mark.parametrize("ci, co, groups", [(16, 16, 16), (5, 15, 5), (16, 24, 4)])
@pytest.mark.parametrize(
    "kernel_size, stride", [((2, 3, 2), 1), ((1, 1, 1), 1), ((5, 5, 5), 1), ((7, 7, 7), 1), ((2, 2, 2), 2)]
)
def test_kernels(backend, kernel_size, stride, ci, co, groups):
    p = Problem(ci, co, groups, "float16", kernel_size, stride)
    p.check(*p.passes(backend))


@pytest.mark.parametrize("ci, co, groups", [(16, 16, 16), (8, 8, 2)])
@pytest.mark.parametrize("n", [0, 1, 63, 3000])
def test_sizes(backend, n, ci, co, groups):
    p = Problem(ci, co, groups, n=n)
    p.check(*p.passes(backend))


@every_mode
@pytest.mark.parametrize("ci, co, groups", [(16, 16, 16), (5, 15, 5), (16, 24, 4), (33, 66, 3), (256, 128, 2)])
def test_residual_and_activation(backend, ci, co, groups, mode):
    p = Problem(ci, co, groups, mode)
    p.weight = p.weight * p.weight.dtype.type(0.01)  # sums of about unit size
    p.dense = spread(reference.by_offset(p.weight), groups)
    for activation, pad, in_place in ((None, 0, False), ("relu", 1, False), ("silu", 8, False), ("gelu", 0, True)):
        how = {"residual": p.grad_out, "activation": activation, "in_place": in_place, "pad": pad}
        out = run(
            "forward", backend, p.feats, p.weight, p.bias, p.map, groups=groups, ci=ci, **how,
            precision=p.how["precision"],
        )  # fmt: skip
        p.judge(out, reference.conv_epilogue(p.feats, p.dense, p.bias, p.map, p.grad_out, activation), activation)


@every_mode
@pytest.mark.parametrize("ci, co, groups", [(16, 24, 4), (33, 66, 3), (256, 128, 2)])
@pytest.mark.parametrize("pad, offset", [(0, 0), (3, 1), (8, 0)])
def test_groups_in_fenced_buffers(backend, ci, co, groups, mode, pad, offset):
    p = Problem(ci, co, groups, mode, (2, 3, 2))
    transposed = reference.neighbor_map(p.coords, p.shape, p.kernel_size, transposed=True)
    how = {"groups": groups, "ci": ci, "precision": p.how["precision"], "pad": pad, "offset": offset}
    grad_weight, grad_bias = run("wgrad", backend, p.grad_out, p.feats, p.map, **how)
    p.check(
        run("forward", backend, p.feats, p.weight, p.bias, p.map, **how),
        run("dgrad", backend, p.grad_out, p.weight, transposed, **how),
        grad_weight.reshape(p.weight.shape),
        grad_bias,
    )


@pytest.mark.parametrize("algorithm", ["implicit_gemm_splitk", "masked_implicit_gemm_splitk", "explicit_gemm"])
@pytest.mark.parametrize("ci, co, groups", [(16, 24, 4), (600, 40, 2), (256, 128, 2)])
def test_every_algorithm_takes_groups(backend, algorithm, ci, co, groups):
    p = Problem(ci, co, groups, "float16", n=65)
    orders = np.stack([np.random.default_rng(i).permutation(65) for i in range(3)]).astype(np.int32)
    how = {"groups": groups, "ci": ci, "algorithm": algorithm, "order": orders}
    p.judge(
        run("forward", backend, p.feats, p.weight, p.bias, p.map, **how),
        reference.conv_forward(p.feats, p.dense, p.bias, p.map), algorithm,
    )  # fmt: skip
    p.judge(
        run("dgrad", backend, p.grad_out, p.weight, p.map, mirrored=True, **how),
        reference.conv_dgrad(p.grad_out, p.dense, p.map, 65), algorithm,
    )  # fmt: skip


def test_infinities_stay_in_their_group(backend):
    p = Problem(6, 4, 2)
    p.feats[3, 0] = np.inf
    out = next(p.passes(backend))
    assert not np.isfinite(out[:, :2]).all() and np.isfinite(out[:, 2:]).all()


@pytest.mark.parametrize("ci, co", [(16, 16), (5, 15), (16, 80)])
def test_depthwise_in_fenced_buffers(backend, ci, co):
    for layout in ({}, {"pad": 3, "offset": 1}, {"pad": 8}):
        p = Problem(ci, co, ci, "float16", (2, 3, 2))
        transposed = reference.neighbor_map(p.coords, p.shape, p.kernel_size, transposed=True)
        p.check(
            guarded.depthwise_forward(backend, p.feats, p.weight, p.bias, p.map, **layout),
            guarded.depthwise_dgrad(backend, p.grad_out, p.weight, transposed, ci, **layout),
            guarded.depthwise_wgrad(backend, p.grad_out, p.feats, p.map, **layout).reshape(p.weight.shape),
            reference.f64(p.grad_out).sum(axis=0).astype(p.feats.dtype),
        )


@every_mode
@pytest.mark.parametrize("pad, offset", [(0, 1), (1, 0)])
def test_a_depthwise_residual_off_alignment_beside_aligned_arrays(backend, mode, pad, offset):
    """All of it, or all rows but the first."""
    p = Problem(16, 16, 16, mode)
    call = guarded.Call(backend, pad=pad, offset=offset)
    given = list(map(call.give, (p.feats, p.weight, p.bias, p.map)))
    residual = call.give(p.grad_out, strided=True)
    out = call.run("depthwise_forward", *given, call.take(p.grad_out.shape, p.dtype), residual=residual)
    p.judge(out, reference.conv_epilogue(p.feats, p.dense, p.bias, p.map, p.grad_out, None), "out")


@every_mode
@pytest.mark.parametrize("pad, offset", [(0, 1), (1, 0)])
@pytest.mark.parametrize("apart", ["feats", "out"])
def test_any_one_array_of_a_depthwise_convolution_off_alignment(backend, mode, apart, pad, offset):
    p = Problem(16, 16, 16, mode)
    call = guarded.Call(backend, pad=pad, offset=offset)
    given = call.give(p.feats, strided=apart == "feats"), *map(call.give, (p.weight, p.bias, p.map))
    out = call.run("depthwise_forward", *given, call.take(p.grad_out.shape, p.dtype, strided=apart == "out"))
    p.judge(out, reference.conv_forward(p.feats, p.dense, p.bias, p.map), "out")


def test_each_gradient_alone(backend):
    for groups in (16, 4):
        p = Problem(16, 16, groups)
        arrays = [backend.array(a) for a in (p.grad_out, p.feats, p.weight)]
        how = {"neighbor_map": p.neighbor_map(backend), "groups": groups}
        together = flexgemm.sparse_conv3d_backward(*arrays, **how)
        for i in range(3):
            needs = tuple(j == i for j in range(3))
            alone = flexgemm.sparse_conv3d_backward(*arrays, needs_grad=needs, **how)
            assert [a is not None for a in alone] == list(needs)
            assert_same_bits(backend.numpy(alone[i]), backend.numpy(together[i]))


def test_gradients_lose_nothing_over_many_rows(backend):
    """A sum of equal terms in one float32 would be rounded the same way again and again."""
    n, term = 300_000, np.float32(0.55)
    grad_out, feats = np.full((n, 2), term), np.ones((n, 2), np.float32)
    nmap = np.arange(n, dtype=np.int32)[None]
    grad_bias = guarded.conv_wgrad(backend, grad_out, feats, nmap, outputs=("bias",), channel_groups=2)
    grad_weight = guarded.depthwise_wgrad(backend, grad_out, feats, nmap)
    np.testing.assert_allclose(grad_bias, n * reference.f64(term), rtol=2e-5)
    np.testing.assert_allclose(grad_weight, n * reference.f64(term), rtol=2e-5)


@pytest.mark.parametrize("ci, co, groups", [(16, 16, 16), (5, 15, 5), (16, 24, 4)])
def test_the_same_input_gives_the_same_bits(backend, ci, co, groups):
    p = Problem(ci, co, groups, "float16", n=3000)
    for again, before in zip(p.passes(backend), p.passes(backend), strict=True):
        assert_same_bits(again, before)


def test_inverse_and_submanifold_take_groups(backend):
    p = Problem(16, 16, 16, kernel_size=(2, 2, 2), stride=2)
    nmap = p.neighbor_map(backend)
    x, w = backend.array(p.grad_out), backend.array(p.weight)
    out = backend.numpy(flexgemm.sparse_inverse_conv3d(x, w, neighbor_map=nmap, groups=16))
    back = np.ascontiguousarray(backend.numpy(nmap.transposed_map))
    assert_rows(out, reference.conv_forward(p.grad_out, p.dense, None, back), 1e-5)
    q = Problem(16, 16, 16)
    arrays = [backend.array(a) for a in (q.feats, q.weight, q.bias)]
    out = flexgemm.submanifold_conv3d(*arrays, neighbor_map=q.neighbor_map(backend), groups=16)
    assert_rows(backend.numpy(out), reference.conv_forward(q.feats, q.dense, q.bias, q.map), 1e-5)


def test_torch_records_groups():
    torch = pytest.importorskip("torch")
    for groups in (16, 4):
        p = Problem(16, 16, groups)
        leaves = [torch.from_numpy(a).requires_grad_() for a in (p.feats, p.weight, p.bias)]
        nmap = flexgemm.neighbor_map(torch.from_numpy(p.coords), p.shape)
        out = flexgemm.sparse_conv3d(*leaves, neighbor_map=nmap, groups=groups)
        out.backward(torch.from_numpy(p.grad_out))
        p.check(out.detach().numpy(), *(leaf.grad.numpy() for leaf in leaves))


def test_any_kind_of_int_is_a_number_of_groups(backend):
    for groups in (4, 16):
        plain, other = Problem(16, 16, groups), Problem(16, 16, groups)
        other.how = other.how | {"groups": np.int64(groups)}
        for one, same in zip(plain.passes(backend), other.passes(backend), strict=True):
            np.testing.assert_array_equal(one, same)


def test_torch_records_any_kind_of_int():
    torch = pytest.importorskip("torch")
    ft = pytest.importorskip("flexgemm.torch")
    p = Problem(16, 16, 4)
    leaves = [torch.from_numpy(a).requires_grad_() for a in (p.feats, p.weight, p.bias)]
    nmap = flexgemm.neighbor_map(torch.from_numpy(p.coords), p.shape)
    for library in (flexgemm, ft):
        out = library.sparse_conv3d(*leaves, neighbor_map=nmap, groups=np.int64(4))
        gradients = torch.autograd.grad(out, leaves, torch.from_numpy(p.grad_out))
        p.check(out.detach().numpy(), *(gradient.numpy() for gradient in gradients))


@pytest.mark.parametrize("groups", [0, -1, 3, 32, 1.0, None])
def test_groups_that_do_not_divide_the_channels(backend, groups):
    p = Problem(16, 16, 16)
    how = {"neighbor_map": p.neighbor_map(backend), "groups": groups}
    error, message = (ValueError, "groups") if isinstance(groups, int) else (TypeError, "^groups: expected an int, got")
    feats, weight, grad_out = map(backend.array, (p.feats, p.weight, p.grad_out))
    with pytest.raises(error, match=message):
        flexgemm.sparse_conv3d(feats, weight, **how)
    with pytest.raises(error, match=message):
        flexgemm.sparse_conv3d_backward(grad_out, feats, weight, **how)


def test_no_channels_are_no_groups(backend):
    p = Problem(16, 16, 16)
    feats, weight = (backend.array(np.zeros(s, np.float32)) for s in ((len(p.feats), 0), (0, 3, 3, 3, 0)))
    nmap = p.neighbor_map(backend)
    assert backend.numpy(flexgemm.sparse_conv3d(feats, weight, neighbor_map=nmap)).shape == (len(p.feats), 0)
    with pytest.raises(ValueError, match="feats: expected channels in 2147483647 groups, got 0 channels"):
        flexgemm.sparse_conv3d(feats, weight, neighbor_map=nmap, groups=2**31 - 1)
    feats, weight = (backend.array(np.zeros(s, np.float32)) for s in ((len(p.feats), 4), (0, 3, 3, 3, 1)))
    with pytest.raises(ValueError, match="^weight: expected channels in 4 groups, got 0 channels"):
        flexgemm.sparse_conv3d(feats, weight, neighbor_map=nmap, groups=4)


def test_shapes_are_named(backend):
    p = Problem(16, 16, 16)
    feats, weight, nmap = backend.array(p.feats), backend.array(p.weight), p.neighbor_map(backend)
    with pytest.raises(ValueError, match=r"^weight: expected \(Co, 3, 3, 3, 2\)"):
        flexgemm.sparse_conv3d(feats, weight, neighbor_map=nmap, groups=8)
    with pytest.raises(ValueError, match="^precision: "):
        flexgemm.sparse_conv3d(feats, weight, neighbor_map=nmap, groups=16, precision="fp8")


def test_hostile_maps(backend):
    p = Problem(16, 16, 16, "float16")
    hostile = p.map.copy()
    calls = (
        lambda on: guarded.depthwise_forward(on, p.feats, p.weight, None, hostile),
        lambda on: guarded.depthwise_dgrad(on, p.grad_out, p.weight, hostile, 16),
        lambda on: guarded.depthwise_wgrad(on, p.grad_out, p.feats, hostile),
    )
    if backend.name == "cpu":
        for hostile[20, 249] in (-2, 250, 2**31 - 1):
            for call in calls:
                with pytest.raises(ValueError, match=rf"map: entry \(20, 249\) is {hostile[20, 249]}"):
                    call(Host())
        return
    hostile[:, ::7] = np.resize([-2, 250, 2**31 - 1], hostile[:, ::7].shape)
    tamed = np.where((hostile < 0) | (hostile >= 250), -1, hostile)
    expected = (
        reference.conv_forward(p.feats, p.dense, None, tamed),
        gather_groups(reference.conv_wgrad(p.grad_out, p.feats, tamed)[0], 16),
    )
    assert_rows(calls[0](backend), expected[0], 2e-3)
    calls[1](backend)  # the fences prove that nothing else is touched
    assert_rows(calls[2](backend).reshape(expected[1].shape), expected[1], 2e-3)


@pytest.mark.parametrize("ci, co, groups", [(16, 24, 4), (33, 66, 3)])
def test_hostile_maps_of_groups(backend, ci, co, groups):
    p = Problem(ci, co, groups, "float16")
    hostile = p.map.copy()
    hostile[:, ::7] = np.resize([-2, 250, 2**31 - 1], hostile[:, ::7].shape)
    calls = (
        lambda on: run("forward", on, p.feats, p.weight, None, hostile, groups=groups, ci=ci),
        lambda on: run("dgrad", on, p.grad_out, p.weight, hostile, groups=groups, ci=ci),
        lambda on: run("wgrad", on, p.grad_out, p.feats, hostile, groups=groups, ci=ci)[0],
    )
    if backend.name == "cpu":
        for call in calls:
            with pytest.raises(ValueError, match="map"):
                call(Host())
        return
    tamed = np.where((hostile < 0) | (hostile >= 250), -1, hostile)
    p.judge(calls[0](backend), reference.conv_forward(p.feats, p.dense, None, tamed), "out")
    calls[1](backend)  # the fences prove that nothing else is touched
    expected = gather_groups(reference.conv_wgrad(p.grad_out, p.feats, tamed)[0], groups)
    p.judge(calls[2](backend), expected, "grad_weight")


def test_an_algorithm_that_there_is_not_is_refused_of_depthwise_convolution_too(backend):
    p = Problem(16, 16, 16)
    coords, feats, weight = (backend.array(x) for x in (p.coords, p.feats, p.weight))
    nmap = flexgemm.neighbor_map(coords, p.shape)
    how = {"neighbor_map": nmap, "groups": 16, "algorithm": "foo"}
    with pytest.raises(ValueError, match="^algorithm: expected 'auto', .*, got 'foo'$"):
        flexgemm.submanifold_conv3d(feats, weight, **how)
    with pytest.raises(ValueError, match="^algorithm: expected 'auto', .*, got 'foo'$"):
        flexgemm.submanifold_conv3d_backward(feats, feats, weight, **how)
