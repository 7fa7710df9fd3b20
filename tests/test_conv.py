"""Submanifold convolution against float64: forward, input gradient, weight gradient, bias gradient."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import guarded
import numpy as np
import pytest
import reference
import scenes
import verdicts
from memory import Host
from verdicts import assert_conv_rows, assert_rows, assert_same_bits

import flexgemm

MODES = ["float32", "tf32", "float16", "bfloat16"]


@dataclass(frozen=True)
class Case:
    n: int = 300
    ci: int = 33
    co: int = 65
    kernel_size: tuple[int, int, int] = (3, 3, 3)
    dilation: tuple[int, int, int] = (1, 1, 1)
    batch: int = 1

    def __str__(self):
        kernel, dilation = ("x".join(map(str, t)) for t in (self.kernel_size, self.dilation))
        return f"n{self.n}-{self.ci}to{self.co}-k{kernel}-d{dilation}-b{self.batch}"


CHANNELS = [
    (1, 1), (1, 16), (7, 13), (13, 7), (16, 16), (16, 1), (32, 32), (33, 65), (64, 64),
    (65, 97), (97, 33), (97, 1), (128, 64), (64, 128), (128, 128), (200, 136),
]  # fmt: skip
KERNELS = [
    (1, 1, 1), (2, 2, 2), (4, 4, 4), (5, 5, 5), (6, 6, 6), (7, 7, 7),
    (3, 1, 1), (1, 1, 7), (1, 3, 5), (2, 3, 4), (7, 2, 1),
]  # fmt: skip
MANY_TILES = Case(n=200, ci=2000, co=40)  # of the weight gradient, more than a GPU has multiprocessors
CASES = [
    *(Case(ci=ci, co=co) for ci, co in CHANNELS),
    *(Case(ci=16, co=33, kernel_size=k, dilation=d) for k, d in zip(KERNELS, [(1, 1, 1), (2, 1, 3)] * 6, strict=False)),
    *(Case(n=n, ci=64, co=64) for n in (0, 1, 63, 64, 65, 127, 129)),
    Case(n=0, ci=7, co=13, kernel_size=(2, 2, 2)),
    Case(n=1, ci=7, co=13, kernel_size=(2, 2, 2)),
    Case(n=5000, ci=32, co=48),
    Case(n=1500, ci=16, co=32, batch=512),
    Case(n=65, ci=600, co=40),  # a reduction of many steps
    Case(n=65, ci=40, co=600),
    Case(n=700, ci=264, co=200),  # several tiles of the widest kind, the last step of channels ragged
    Case(n=20_000, ci=8, co=256),
    Case(n=1500, ci=64, co=128),  # several offsets in a tile of the weight gradient, its rows split
    Case(n=1500, ci=136, co=200),  # tiles of the weight gradient that begin inside an offset
    Case(n=700, ci=40, co=24, kernel_size=(5, 5, 5)),
    MANY_TILES,
]
SMALL = [Case(ci=7, co=13), Case(ci=33, co=65), Case(ci=64, co=64), Case(ci=16, co=40, kernel_size=(2, 3, 2))]

every_mode = pytest.mark.parametrize("mode", MODES)


@dataclass
class Problem:
    """One case in one mode: inputs, maps, tolerance."""

    case: Case
    mode: str

    def __post_init__(self):
        case = self.case
        self.dtype = "float32" if self.mode == "tf32" else self.mode
        self.precision = "tf32" if self.mode == "tf32" else "ieee"
        self.tolerance = verdicts.ROW_TOLERANCE[self.mode]
        self.coords, self.shape, self.map, self.transposed_map = maps(case)
        self.mirrored = all(k % 2 for k in case.kernel_size)
        rng = np.random.default_rng([case.n, case.ci, case.co])
        one_sign = min(case.ci, case.co) < 32
        draw = [(case.n, case.ci), (case.co, *case.kernel_size, case.ci), (case.co,), (case.n, case.co)]
        self.feats, self.weight, self.bias, self.grad_out = (
            scenes.values(rng, shape, self.dtype, one_sign=one_sign) for shape in draw
        )

    def check_forward(self, out, bias=True):
        expected = reference.conv_forward(self.feats, self.weight, self.bias if bias else None, self.map)
        assert_conv_rows(out, expected, self.mode)

    def check_dgrad(self, grad_feats):
        expected = reference.conv_dgrad(self.grad_out, self.weight, self.map, len(self.feats))
        assert_conv_rows(grad_feats, expected, self.mode, "grad_feats")

    def check_wgrad(self, grad_weight, grad_bias):
        """Each output channel and each offset is a row of its own; an offset without pairs must be exactly zero."""
        expected, expected_bias = reference.conv_wgrad(self.grad_out, self.feats, self.map)
        grad_weight = grad_weight.reshape(expected.shape)
        assert_conv_rows(grad_weight, expected, self.mode, "grad_weight by output channel")
        assert_conv_rows(grad_weight.swapaxes(0, 1), expected.swapaxes(0, 1), self.mode, "grad_weight by offset")
        assert_conv_rows(grad_bias[None], expected_bias[None], self.mode, "grad_bias")


@cache
def maps(case):
    coords, shape = scenes.scene(case.n, batch=case.batch, seed=case.n)
    forward = reference.neighbor_map(coords, shape, case.kernel_size, case.dilation)
    return coords, shape, forward, reference.neighbor_map(coords, shape, case.kernel_size, case.dilation, True)


def cases(selection):
    return pytest.mark.parametrize("case", selection, ids=str)


# ---- every shape, fenced buffers ----


@every_mode
@cases(CASES)
def test_forward(backend, case, mode):
    p = Problem(case, mode)
    p.check_forward(guarded.conv_forward(backend, p.feats, p.weight, p.bias, p.map, precision=p.precision))


@every_mode
@cases(CASES)
def test_dgrad(backend, case, mode):
    p = Problem(case, mode)
    p.check_dgrad(guarded.conv_dgrad(backend, p.grad_out, p.weight, p.transposed_map, precision=p.precision))


@every_mode
@cases([c for c in CASES if all(k % 2 for k in c.kernel_size)])
def test_dgrad_through_the_mirrored_map(backend, case, mode):
    p = Problem(case, mode)
    p.check_dgrad(guarded.conv_dgrad(backend, p.grad_out, p.weight, p.map, mirrored=True, precision=p.precision))


@every_mode
@cases(CASES)
def test_wgrad(backend, case, mode):
    p = Problem(case, mode)
    p.check_wgrad(*guarded.conv_wgrad(backend, p.grad_out, p.feats, p.map, precision=p.precision))


@every_mode
@cases(SMALL)
def test_forward_without_bias(backend, case, mode):
    p = Problem(case, mode)
    out = guarded.conv_forward(backend, p.feats, p.weight, None, p.map, precision=p.precision)
    p.check_forward(out, bias=False)


@every_mode
@cases([Case(ci=33, co=65), Case(n=1500, ci=64, co=128)])
def test_each_gradient_alone_equals_both(backend, case, mode):
    p = Problem(case, mode)
    weight, bias = guarded.conv_wgrad(backend, p.grad_out, p.feats, p.map, precision=p.precision)
    for name, both in (("weight", weight), ("bias", bias)):
        alone = guarded.conv_wgrad(backend, p.grad_out, p.feats, p.map, outputs=(name,), precision=p.precision)
        assert_same_bits(alone, both, name)
    assert guarded.conv_wgrad(backend, p.grad_out, p.feats, p.map, outputs=(), precision=p.precision) == []


# ---- orders of the rows: a matter of speed alone ----


@every_mode
@cases([*SMALL, Case(n=700, ci=72, co=264), Case(n=1, ci=8, co=8), Case(n=0, ci=8, co=8)])
def test_any_order_gives_the_same_rows(backend, case, mode):
    p = Problem(case, mode)
    order = np.random.default_rng(1).permutation(case.n).astype(np.int32)[None]
    how = {"precision": p.precision, "order": order, "algorithm": "masked_implicit_gemm"}
    p.check_forward(guarded.conv_forward(backend, p.feats, p.weight, p.bias, p.map, **how))
    p.check_dgrad(guarded.conv_dgrad(backend, p.grad_out, p.weight, p.transposed_map, **how))
    if p.mirrored:
        p.check_dgrad(guarded.conv_dgrad(backend, p.grad_out, p.weight, p.map, mirrored=True, **how))


def test_an_order_with_rows_out_of_range_writes_nothing_outside(cuda):
    p = Problem(Case(ci=64, co=64), "float16")
    order = np.arange(300, dtype=np.int32)
    order[::7] = np.resize([-1, -(2**31), 300, 2**31 - 1], order[::7].shape)
    how = {"order": order[None], "algorithm": "masked_implicit_gemm"}
    out = guarded.conv_forward(cuda, p.feats, p.weight, p.bias, p.map, **how)
    kept = order[(order >= 0) & (order < 300)]
    expected = reference.conv_forward(p.feats, p.weight, p.bias, p.map)
    assert_rows(out[kept], expected[kept], p.tolerance)


# ---- layouts ----


@every_mode
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("pad", [1, 5, 8, 64])
@pytest.mark.parametrize("case", [Case(n=129, ci=33, co=65), Case(n=129, ci=64, co=64)], ids=str)
def test_strided_rows_and_any_alignment(backend, case, mode, pad, offset):
    p = Problem(case, mode)
    how = {"pad": pad, "offset": offset, "precision": p.precision}
    p.check_forward(guarded.conv_forward(backend, p.feats, p.weight, p.bias, p.map, **how))
    p.check_dgrad(guarded.conv_dgrad(backend, p.grad_out, p.weight, p.map, mirrored=True, **how))
    p.check_wgrad(*guarded.conv_wgrad(backend, p.grad_out, p.feats, p.map, **how))


def check_one_array_apart(call, mode, apart, **how):
    """The forward pass where one array lies as the call has it, and the others are contiguous and aligned."""
    p = Problem(Case(ci=64, co=72), mode)
    given = (call.give(getattr(p, name), strided=name == apart) for name in ("feats", "weight", "bias", "map"))
    out = call.take((300, 72), p.dtype, strided=apart == "out")
    p.check_forward(call.run("conv_forward", *given, out, precision=p.precision, **how))


@every_mode
@pytest.mark.parametrize("shifted", ["feats", "weight", "bias", "map", "out"])
def test_any_one_array_off_alignment(backend, mode, shifted):
    """A fast path that looks at one pointer and trusts the others would fault or read its neighbour."""
    check_one_array_apart(guarded.Call(backend, offset=1), mode, shifted)


@every_mode
@pytest.mark.parametrize("pitched", ["feats", "out"])
def test_one_array_of_rows_that_begin_anywhere(backend, mode, pitched):
    """Its first row is aligned and the others are not; without slices, whose sums others store."""
    check_one_array_apart(guarded.Call(backend, pad=1), mode, pitched, algorithm="implicit_gemm")


@every_mode
@pytest.mark.parametrize("shifted", ["grad_out", "feats", "grad_weight", "grad_bias"])
def test_any_one_array_of_a_weight_gradient_off_alignment(backend, mode, shifted):
    p = Problem(Case(ci=64, co=64), mode)
    call = guarded.Call(backend, offset=1)
    gradients = call.run(
        "conv_wgrad",
        call.give(p.grad_out, strided=shifted == "grad_out"),
        call.give(p.feats, strided=shifted == "feats"),
        call.give(p.map),
        call.take((64, 27, 64), p.dtype, strided=shifted == "grad_weight"),
        call.take((64,), p.dtype, strided=shifted == "grad_bias"),
        precision=p.precision,
    )
    p.check_wgrad(*gradients)


# ---- maps that no coordinates give: rows that nobody reads, more or fewer outputs than inputs ----


@every_mode
@pytest.mark.parametrize("ci, co", [(33, 40), (64, 72)])
@pytest.mark.parametrize("m, n", [(200, 77), (77, 200), (0, 50), (50, 1), (129, 0)])
def test_rectangular_maps(backend, mode, m, n, ci, co):
    """Each row of feats is wanted at most once per offset, and about a third of them never: those hold NaN."""
    p = Problem(Case(n=max(m, n), ci=ci, co=co), mode)
    rng = np.random.default_rng(5)
    wanted = rng.permutation(n)[: n * 2 // 3 + (n == 1)]
    forward, backward = np.full((27, m), -1, np.int32), np.full((27, n), -1, np.int32)
    for v in range(27):
        k = int(rng.integers(0, min(m, len(wanted)) + 1)) if n else 0
        outputs, inputs = rng.permutation(m)[:k], rng.permutation(wanted)[:k]
        forward[v, outputs], backward[v, inputs] = inputs, outputs
    feats, grad_out = p.feats[:n].copy(), p.grad_out[:m].copy()
    feats[np.setdiff1d(np.arange(n), forward)] = np.nan
    grad_out_seen = grad_out.copy()
    grad_out_seen[np.setdiff1d(np.arange(m), backward)] = np.nan

    out = guarded.conv_forward(backend, feats, p.weight, p.bias, forward, precision=p.precision)
    assert_rows(out, reference.conv_forward(feats, p.weight, p.bias, forward), p.tolerance)

    grad_feats = guarded.conv_dgrad(backend, grad_out_seen, p.weight, backward, precision=p.precision)
    assert_rows(grad_feats, reference.conv_dgrad(grad_out_seen, p.weight, forward, n), p.tolerance, "grad_feats")

    grad_weight, grad_bias = guarded.conv_wgrad(backend, grad_out, feats, forward, precision=p.precision)
    expected, expected_bias = reference.conv_wgrad(grad_out, feats, forward)
    assert_rows(grad_weight.swapaxes(0, 1), expected.swapaxes(0, 1), p.tolerance, "grad_weight by offset")
    assert_rows(grad_bias[None], expected_bias[None], p.tolerance, "grad_bias")


@every_mode
@cases([Case(ci=64, co=33), Case(ci=64, co=40)])
@pytest.mark.parametrize("algorithm", ["auto", "implicit_gemm"])  # with partial sums and without
def test_offsets_without_pairs_give_zero(backend, case, mode, algorithm):
    p = Problem(case, mode)
    empty, how = np.full((27, 300), -1, np.int32), {"algorithm": algorithm, "precision": p.precision}
    out = guarded.conv_forward(backend, np.full_like(p.feats, np.nan), p.weight, p.bias, empty, **how)
    assert_same_bits(out, np.broadcast_to(p.bias, out.shape))
    grad_feats = guarded.conv_dgrad(backend, np.full_like(p.grad_out, np.nan), p.weight, empty, **how)
    grad_weight, _ = guarded.conv_wgrad(
        backend, p.grad_out, np.full_like(p.feats, np.nan), empty, precision=p.precision
    )
    assert not grad_feats.any()
    assert not grad_weight.any()


@every_mode
@cases([Case(ci=16, co=40), Case(ci=64, co=64), Case(n=1500, ci=64, co=128), Case(n=1500, ci=136, co=200), MANY_TILES])
def test_a_gradient_that_is_not_finite_stays_at_the_offsets_of_its_row(backend, case, mode):
    """Rows are multiplied in tiles that several offsets may share, with zeros for missing neighbours."""
    p = Problem(case, mode)
    p.grad_out[[5, 40, -1], [3, 7, 11]] = [np.inf, -np.inf, np.nan]
    grad_weight, _ = guarded.conv_wgrad(backend, p.grad_out, p.feats, p.map, precision=p.precision)
    expected, _ = reference.conv_wgrad(p.grad_out, p.feats, p.map)
    grad_weight, finite = reference.f64(grad_weight).reshape(expected.shape), np.isfinite(expected)
    assert finite[[3, 7, 11]].any() and not finite[[3, 7, 11]].all()
    np.testing.assert_array_equal(grad_weight[~finite], expected[~finite])
    assert_rows(np.where(finite, grad_weight, 0), np.where(finite, expected, 0), p.tolerance)


HOSTILE = [-2, -(2**31), 300, 301, 2**31 - 1]


@every_mode
@cases([Case(ci=33, co=64), Case(ci=64, co=64), Case(ci=264, co=200)])
def test_map_entries_out_of_range_are_no_neighbours_on_the_gpu(cuda, case, mode):
    p = Problem(case, mode)
    hostile = p.map.copy()
    hostile[::2, ::7] = np.resize(HOSTILE, hostile[::2, ::7].shape)  # beside good entries of the same rows
    tamed = np.where((hostile < 0) | (hostile >= 300), -1, hostile)
    out = guarded.conv_forward(cuda, p.feats, p.weight, p.bias, hostile, precision=p.precision)
    assert_rows(out, reference.conv_forward(p.feats, p.weight, p.bias, tamed), p.tolerance)
    grad_feats = guarded.conv_dgrad(cuda, p.grad_out, p.weight, hostile, precision=p.precision)
    assert_rows(
        grad_feats, reference.conv_forward(p.grad_out, p.weight.transpose(4, 1, 2, 3, 0), None, tamed), p.tolerance
    )
    grad_weight, _ = guarded.conv_wgrad(cuda, p.grad_out, p.feats, hostile, precision=p.precision)
    assert_rows(grad_weight, reference.conv_wgrad(p.grad_out, p.feats, tamed)[0], p.tolerance)


@pytest.mark.parametrize("entry", HOSTILE)
def test_map_entries_out_of_range_raise_on_the_cpu(entry):
    p = Problem(Case(ci=7, co=13), "float32")
    hostile = p.map.copy()
    hostile[20, 299] = entry
    cpu = Host()
    for call in (
        lambda: guarded.conv_forward(cpu, p.feats, p.weight, None, hostile),
        lambda: guarded.conv_dgrad(cpu, p.grad_out, p.weight, hostile),
        lambda: guarded.conv_wgrad(cpu, p.grad_out, p.feats, hostile),
    ):
        with pytest.raises(ValueError, match="map"):
            call()


# ---- the public functions ----


ALGORITHMS = [
    "auto",
    "explicit_gemm",
    "implicit_gemm",
    "implicit_gemm_splitk",
    "masked_implicit_gemm",
    "masked_implicit_gemm_splitk",
]


@every_mode
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@cases([Case(n=0), Case(n=65, ci=24, co=40), Case(n=900, ci=72, co=40), Case(n=900, kernel_size=(2, 3, 2))])
def test_algorithms_agree(backend, case, mode, algorithm):
    """900 voxels have row orders."""
    p = Problem(case, mode)
    feats, weight, bias, grad_out, coords = map(backend.array, (p.feats, p.weight, p.bias, p.grad_out, p.coords))
    nmap = flexgemm.neighbor_map(coords, p.shape, case.kernel_size)
    how = {"neighbor_map": nmap, "precision": p.precision, "algorithm": algorithm}
    p.check_forward(backend.numpy(flexgemm.submanifold_conv3d(feats, weight, bias, **how)))
    gradients = flexgemm.submanifold_conv3d_backward(grad_out, feats, weight, **how)
    grad_feats, grad_weight, grad_bias = map(backend.numpy, gradients)
    p.check_dgrad(grad_feats)
    p.check_wgrad(grad_weight, grad_bias)


@pytest.mark.parametrize("algorithm", ["gemm", "", "AUTO"])
def test_unknown_algorithms_are_refused_by_name(backend, algorithm):
    p = Problem(SMALL[0], "float32")
    feats, weight, grad_out, coords = map(backend.array, (p.feats, p.weight, p.grad_out, p.coords))
    nmap = flexgemm.neighbor_map(coords, p.shape)
    message = f"algorithm: expected 'auto', .*'masked_implicit_gemm_splitk', got '{algorithm}'"
    with pytest.raises(ValueError, match=message):
        flexgemm.submanifold_conv3d(feats, weight, neighbor_map=nmap, algorithm=algorithm)
    with pytest.raises(ValueError, match=message):
        flexgemm.submanifold_conv3d_backward(grad_out, feats, weight, neighbor_map=nmap, algorithm=algorithm)
    how = {"neighbor_map": nmap, "algorithm": algorithm, "needs_grad": (False, False, True)}
    with pytest.raises(ValueError, match=message):
        flexgemm.submanifold_conv3d_backward(grad_out, feats, weight, **how)


@every_mode
@cases(SMALL)
def test_public_forward_and_backward(backend, case, mode):
    p = Problem(case, mode)
    feats, weight, bias, grad_out, coords = map(backend.array, (p.feats, p.weight, p.bias, p.grad_out, p.coords))
    nmap = flexgemm.neighbor_map(coords, p.shape, case.kernel_size, case.dilation)
    how = {"neighbor_map": nmap, "precision": p.precision}
    p.check_forward(backend.numpy(flexgemm.submanifold_conv3d(feats, weight, bias, **how)))
    p.check_forward(backend.numpy(flexgemm.submanifold_conv3d(feats, weight, **how)), bias=False)

    gradients = flexgemm.submanifold_conv3d_backward(grad_out, feats, weight, **how)
    grad_feats, grad_weight, grad_bias = map(backend.numpy, gradients)
    assert grad_weight.shape == p.weight.shape
    p.check_dgrad(grad_feats)
    p.check_wgrad(grad_weight, grad_bias)

    for needs in [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]:
        some = flexgemm.submanifold_conv3d_backward(grad_out, feats, weight, needs_grad=needs, **how)
        for got, all_, needed in zip(some, (grad_feats, grad_weight, grad_bias), needs, strict=True):
            assert (got is not None) == needed
            if needed:
                assert_same_bits(backend.numpy(got), all_)


@pytest.mark.parametrize("frozen", [False, True])
@cases([Case(n=900, ci=64, co=64), Case(n=5000, ci=24, co=40), Case(n=5000, ci=128, co=128)])
def test_gradients_side_by_side(backend, case, frozen):
    """Asked for together, the operations behind the gradients may run at the same time: call after call without a
    wait, each the other's predecessor, they give what they give alone."""
    p = Problem(case, "float16")
    feats, weight, grad_out, coords = map(backend.array, (p.feats, p.weight, p.grad_out, p.coords))
    nmap = flexgemm.neighbor_map(coords, p.shape)
    if frozen:
        nmap = nmap.freeze()
    backward = partial(flexgemm.submanifold_conv3d_backward, grad_out, feats, weight, neighbor_map=nmap)

    alone = backward(needs_grad=(True, False, False))[:1] + backward(needs_grad=(False, True, True))[1:]
    together = [backward(needs_grad=(True, True, True)) for _ in range(20)]
    expected = [backend.numpy(gradient) for gradient in alone]
    for gradients in together:
        for got, numbers in zip(gradients, expected, strict=True):
            assert_same_bits(backend.numpy(got), numbers)


@every_mode
def test_out_is_used_and_returned(backend, mode):
    p = Problem(SMALL[1], mode)
    nmap = flexgemm.neighbor_map(backend.array(p.coords), p.shape)
    out = backend.array(np.full((300, 65), np.nan, p.feats.dtype))
    arrays = map(backend.array, (p.feats, p.weight, p.bias))
    assert flexgemm.submanifold_conv3d(*arrays, neighbor_map=nmap, out=out, precision=p.precision) is out
    p.check_forward(backend.numpy(out))


def test_out_of_range_rows_get_the_bias_on_the_gpu(cuda):
    p = Problem(Case(ci=16, co=32), "float16")
    coords = p.coords.copy()
    coords[5], coords[77] = (0, -1, 0, 0), (9, 0, 0, 0)
    nmap = flexgemm.neighbor_map(cuda.array(coords), p.shape)
    arrays = map(cuda.array, (p.feats, p.weight, p.bias))
    out = cuda.numpy(flexgemm.submanifold_conv3d(*arrays, neighbor_map=nmap))
    assert_same_bits(out[[5, 77]], np.stack([p.bias, p.bias]))
    expected = reference.conv_forward(p.feats, p.weight, p.bias, reference.neighbor_map(coords, p.shape))
    assert_rows(out, expected, p.tolerance)


@every_mode
@cases([Case(n=5000, ci=32, co=48), Case(ci=33, co=65), Case(ci=64, co=64, kernel_size=(2, 2, 2))])
def test_the_same_input_gives_the_same_bits(backend, case, mode):
    p = Problem(case, mode)

    def passes():
        yield guarded.conv_forward(backend, p.feats, p.weight, p.bias, p.map, precision=p.precision)
        yield guarded.conv_dgrad(backend, p.grad_out, p.weight, p.transposed_map, precision=p.precision)
        yield from guarded.conv_wgrad(backend, p.grad_out, p.feats, p.map, precision=p.precision)

    first = list(passes())
    for _ in range(3):
        for again, before in zip(passes(), first, strict=True):
            assert_same_bits(again, before)
