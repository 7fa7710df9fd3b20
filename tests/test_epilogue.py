"""What a convolution does to its finished sums: activation(sum + bias + residual), rounded once."""

from __future__ import annotations

import guarded
import ml_dtypes
import numpy as np
import pytest
import reference
import scenes
import verdicts
from calls import E4M3, call, zeros
from memory import Host
from verdicts import assert_rounded_once, assert_rows, assert_same_bits

import flexgemm

MODES = ["float32", "tf32", "float16", "bfloat16"]
ACTIVATIONS = [None, "relu", "silu", "gelu"]

every_mode = pytest.mark.parametrize("mode", MODES)
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


class Problem:
    """Sums of about unit size, so that every part of an activation's curve is met."""

    def __init__(self, mode, n=300, ci=33, co=65):
        self.dtype, self.precision = ("float32", "tf32") if mode == "tf32" else (mode, "ieee")
        self.tolerance = verdicts.ROW_TOLERANCE[mode]
        self.coords, self.shape = scenes.scene(n)
        self.map = reference.neighbor_map(self.coords, self.shape)
        rng = np.random.default_rng([n, ci, co])
        scale = {"weight": np.float32((8 * ci) ** -0.5)}
        draw = {"feats": (n, ci), "weight": (co, 3, 3, 3, ci), "bias": (co,), "residual": (n, co)}
        for name, shape in draw.items():
            x = scenes.values(rng, shape, "float32") * scale.get(name, 1)
            setattr(self, name, x.astype(reference.dtype_of(self.dtype)))

    def run(self, backend, bias=True, residual=True, **how):
        how = {"precision": self.precision, "residual": self.residual if residual else None, **how}
        return guarded.conv_forward(backend, self.feats, self.weight, self.bias if bias else None, self.map, **how)

    def check(self, out, activation, bias=True, residual=True):
        expected = reference.conv_epilogue(
            self.feats,
            self.weight,
            self.bias if bias else None,
            self.map,
            self.residual if residual else None,
            activation,
        )
        assert_rows(out, expected, self.tolerance)
        if self.dtype in verdicts.HALF_ULP:
            assert_rounded_once(out, expected)


SIZES = [
    (300, 33, 65),
    (300, 64, 64),
    (129, 16, 24),
    (700, 72, 264),  # tiles of the widest kind and a ragged one beside them
    (65, 600, 40),  # offsets in several shares, whose sums meet in the workspace
    (20_000, 8, 256),  # more tiles than a GPU takes at once
    (1, 8, 8),
    (0, 8, 8),
]


@every_mode
@every_activation
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bias_residual_activation(backend, mode, activation, size):
    p = Problem(mode, *size)
    p.check(p.run(backend, activation=activation), activation)


@every_mode
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("size", [(300, 33, 40), (300, 64, 64)], ids=str)
def test_each_part_alone(backend, mode, bias, residual, size):
    p = Problem(mode, *size)
    for activation in ACTIVATIONS:
        p.check(p.run(backend, bias, residual, activation=activation), activation, bias, residual)


@every_mode
def test_bias_of_other_columns_than_the_last_tile_had(backend, mode):
    """Five tiles side by side: with a number of multiprocessors that five does not divide, each meets several."""
    p = Problem(mode, 400, 16, 1280)
    p.check(p.run(backend), None)


@every_mode
@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize("pad", [1, 8])
@pytest.mark.parametrize("size", [(129, 33, 65), (129, 64, 64), (65, 600, 40)], ids=str)
def test_strided_residuals_of_any_alignment(backend, mode, pad, offset, size):
    p = Problem(mode, *size)
    p.check(p.run(backend, activation="silu", pad=pad, offset=offset), "silu")


@every_mode
@pytest.mark.parametrize("pad, offset", [(0, 1), (1, 0)])
@pytest.mark.parametrize("algorithm", ["implicit_gemm", "implicit_gemm_splitk"])
@pytest.mark.parametrize("size", [(129, 33, 66), (129, 64, 64), (129, 16, 24)], ids=str)
def test_a_residual_off_alignment_beside_aligned_arrays(backend, mode, size, algorithm, pad, offset):
    """All of it, or all rows but the first."""
    p = Problem(mode, *size)
    call = guarded.Call(backend, pad=pad, offset=offset)
    given = list(map(call.give, (p.feats, p.weight, p.bias, p.map)))
    how = {"residual": call.give(p.residual, strided=True), "algorithm": algorithm, "precision": p.precision}
    p.check(call.run("conv_forward", *given, call.take(p.residual.shape, p.dtype), **how), None)


@every_mode
@every_activation
@pytest.mark.parametrize("pad, offset", [(0, 0), (3, 1)])
@pytest.mark.parametrize("size", [(300, 33, 65), (300, 64, 64), (1, 8, 8)], ids=str)
def test_the_product_of_a_matrix_of_neighbours(backend, mode, activation, size, pad, offset):
    p = Problem(mode, *size)
    p.check(p.run(backend, activation=activation, algorithm="explicit_gemm", pad=pad, offset=offset), activation)


@every_mode
@pytest.mark.parametrize("size", [(300, 33, 65), (300, 64, 64), (65, 600, 40)], ids=str)
@pytest.mark.parametrize("pad", [0, 3])
def test_a_residual_that_is_the_output(backend, mode, size, pad):
    p = Problem(mode, *size)
    apart = p.run(backend, activation="gelu", pad=pad)
    assert_same_bits(p.run(backend, activation="gelu", pad=pad, in_place=True), apart)


@every_mode
def test_any_order_gives_the_same_rows(backend, mode):
    p = Problem(mode, 300, 64, 64)
    order = np.random.default_rng(1).permutation(300).astype(np.int32)[None]
    p.check(p.run(backend, activation="gelu", order=order), "gelu")


def activation_of(backend, x, activation):
    """The residual x (N, 1) added to sums of zero."""
    feats, weight, nmap = np.zeros_like(x), zeros(1, 1, 1, dtype=x.dtype), np.full((1, len(x)), -1, np.int32)
    return guarded.conv_forward(backend, feats, weight, None, nmap, residual=x, activation=activation)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
def test_the_whole_curve(backend, dtype, activation):
    """The residual alone goes through the activation: tails, zeros of both signs, and what is not finite."""
    x = np.concatenate([np.linspace(-12, 12, 4001), [0.0, -0.0, 1e-30, -1e-30, 80, -80, 3e4, -3e4]])
    x = x.astype(reference.dtype_of(dtype)).reshape(-1, 1)
    with np.errstate(over="ignore"):
        expected = reference.activate(reference.f64(x), activation)
    smallest = 2.0**-24 if dtype == "float16" else 1e-38
    limit = (2e-5 + verdicts.HALF_ULP.get(dtype, 0)) * np.abs(expected) + smallest
    assert (np.abs(reference.f64(activation_of(backend, x, activation)) - expected) <= limit).all()

    beyond = activation_of(backend, np.array([[np.inf], [np.nan], [-np.inf]], x.dtype), activation)
    assert beyond[0] == np.inf
    assert np.isnan(beyond[1])
    assert beyond[2] == 0 or (np.isnan(beyond[2]) and activation != "relu")  # -inf * 0, as in torch


@every_mode
def test_the_public_function(backend, mode):
    p = Problem(mode)
    nmap = flexgemm.neighbor_map(backend.array(p.coords), p.shape)
    feats, weight, bias, residual = map(backend.array, (p.feats, p.weight, p.bias, p.residual))
    for activation in ACTIVATIONS:
        how = {"neighbor_map": nmap, "residual": residual, "activation": activation, "precision": p.precision}
        p.check(backend.numpy(flexgemm.submanifold_conv3d(feats, weight, bias, **how)), activation)
    assert flexgemm.submanifold_conv3d(feats, weight, bias, **how, out=residual) is residual
    p.check(backend.numpy(residual), "gelu")


def test_a_residual_with_strided_columns_is_copied():
    p = Problem("float32")
    nmap = flexgemm.neighbor_map(p.coords, p.shape)
    residual = np.repeat(p.residual, 2, axis=1)[:, ::2]
    p.check(flexgemm.submanifold_conv3d(p.feats, p.weight, p.bias, neighbor_map=nmap, residual=residual), None)


# ---- what a caller can get wrong: the legal call has 5 rows and 4 output channels ----


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"residual": zeros(5, 6)}, ValueError, r"residual: expected \(5, 4\) to match map and weight, got \(5, 6\)"),
        ({"residual": zeros(4, 4)}, ValueError, r"residual: expected \(5, 4\) .* got \(4, 4\)"),
        ({"residual": zeros(20)}, ValueError, r"residual: expected \(5, 4\) .* got \(20,\)"),
        ({"residual": zeros(5, 4, dtype=np.float16)}, TypeError, "residual: expected dtype float32 to match feats"),
        ({"residual": "skip"}, TypeError, "residual"),
        ({"activation": "tanh"}, ValueError, "activation: expected 'relu', 'silu' or 'gelu', got 'tanh'"),
        ({"activation": 1}, TypeError, "activation: expected a str, got int"),
    ],
)
def test_wrong_arguments(backend, change, error, message):
    with pytest.raises(error, match=message):
        call(backend, "conv_forward", **change)


def test_a_residual_may_overlap_the_output_only_as_a_whole():
    cpu, base = Host(), zeros(6, 4)
    call(cpu, "conv_forward", {"residual": base[:5], "out": base[:5]})
    for residual in (base[1:], base.reshape(-1)[4:].reshape(5, 4), np.zeros((5, 8), np.float32)[:, :4]):
        out = residual.base.reshape(-1)[:20].reshape(5, 4) if residual.base.shape == (5, 8) else base[:5]
        with pytest.raises(ValueError, match="out: expected memory of its own, got memory that overlaps residual"):
            call(cpu, "conv_forward", {"residual": residual, "out": out})
    with pytest.raises(ValueError, match="overlaps feats"):
        square = {"feats": base[:5], "weight": zeros(4, 1, 3, 1, 4), "residual": base[:5], "out": base[:5]}
        call(cpu, "conv_forward", square)


def test_a_residual_of_wider_elements_is_not_the_output():
    """They lie at the same address, and it and the strides are all that an output in FP8 has in common with it."""
    memory = zeros(40, dtype=np.uint8)
    float8 = {"feats": zeros(5, 6, dtype=E4M3), "weight": zeros(4, 1, 3, 1, 6, dtype=E4M3)}
    bfloat16 = {"bias": zeros(4, dtype=ml_dtypes.bfloat16), "residual": memory.view(ml_dtypes.bfloat16).reshape(5, 4)}
    changes = float8 | bfloat16 | {"scale_out": np.array(1, np.float32), "out": memory[:20].view(E4M3).reshape(5, 4)}
    with pytest.raises(ValueError, match="out: expected memory of its own, got memory that overlaps residual"):
        call(Host(), "conv_forward", changes)


def test_a_residual_of_another_device(cuda):
    with pytest.raises(ValueError, match="residual"):
        call(cuda, "conv_forward", {"residual": zeros(5, 4)})
