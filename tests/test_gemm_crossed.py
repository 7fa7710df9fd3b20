"""Options of products in combinations that nobody thought of: each seed draws one, whatever kernel that asks for.

Tests of a single option hold the others still, and two that are right alone may not be together.
"""

from __future__ import annotations

from itertools import pairwise

import guarded
import numpy as np
import pytest
import reference
import scenes
from products import (
    E4M3,
    E5M2,
    KEPT,
    block_scales,
    cut_of,
    elements,
    epilogue_of,
    judge_output,
    offsets_of,
    scale_of,
    scale_out_of,
    width,
)
from reference import f64

SEEDS = 120
DTYPES = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2), ("bfloat16",) * 2, ("float16",) * 2]
SIZES = {
    "small": [0, 1, 1, 2, 3, 16, 17, 30],
    "sparse": [0, 0, 0, 0, 1, 63, 130],
    "edges": [0, 1, 15, 64, 65, 127, 128, 129, 192, 255, 256, 257],
    "large": [0, 100, 300, 384, 385, 512],
}
PADDING = [0, 0, 128, 384]  # rows of no group behind one


class Product:
    """What is drawn of any: operands a and b, `how` it is called, the dtype of the output."""

    def pick(self, *values):
        return values[self.rng.integers(len(values))]

    def given_b(self):
        return np.ascontiguousarray(self.b.swapaxes(-1, -2)) if self.how["b_row_major"] else self.b

    def initial(self, shape):
        """What the output holds before."""
        if self.how["accumulate"]:
            return (self.rng.standard_normal(shape) / 64).astype(np.float32)
        return np.full(shape, KEPT, reference.dtype_of(self.out_dtype))

    def made(self, out, initial, part):
        """What the product made of a part of the output."""
        return out[part] - initial[part] if self.how["accumulate"] else out[part]


class Draw(Product):
    """Of each group its rows and the weight that they meet."""

    def __init__(self, seed, on_gpu):
        self.rng, self.on_gpu = np.random.default_rng(seed), on_gpu
        self.layout = self.pick("dense", "batched", "m_grouped", "m_grouped_contiguous", "m_grouped_masked")
        self.dtypes = self.pick(*DTYPES)
        self.k = elements(16 * self.pick(1, 2, 5, 8, 9, 17, 33, 64), self.dtypes[0])
        self.activation = self.pick(None, None, "relu", "silu", "gelu", "swiglu")
        # Data of one sign, by which short rows are judged, activations would be judged too strictly by.
        short = () if self.activation else (8, 40, 64, 97, 513)
        self.n = self.pick(128, 170, 200, 256, 300, 400, *short)
        accumulate = self.pick(False, False, True)
        out_dtypes = ["float32", "float16", "bfloat16", "bfloat16", E4M3, E5M2]
        self.out_dtype = "float32" if accumulate else self.pick(*out_dtypes)
        self.sms = self.pick(1, 2, 3, 4, 5)
        self.how = {"layout": self.layout, "accumulate": accumulate}
        self.rows_of_group, self.weight_of_group = getattr(self, f"lay_out_{self.layout.removeprefix('m_')}")()
        one_sign = width(self.n, self.activation) < 64
        self.a, self.b = (
            scenes.values(self.rng, (*lead, self.k), dtype, one_sign=one_sign)
            for lead, dtype in zip((self.rows, (*self.weights, self.n)), self.dtypes, strict=True)
        )
        self.scale()
        self.pad = self.pick(0, 0, 16, 32)
        self.offset = self.pick(0, 0, 16)
        self.how["b_row_major"] = self.pick(False, False, True)
        self.how["columns"] = self.pick("", "", "a", "b", "ab")

    def sizes(self):
        groups = self.pick(1, 2, 4, 7, 12, 33)
        return [self.pick(*SIZES["small" if groups > 12 else self.pick(*SIZES)]) for _ in range(groups)]

    def lay_out_dense(self):
        self.rows, self.weights = (self.pick(1, 8, 17, 33, 65, 100, 129, 250, 300, 513, 700),), ()
        return [slice(None)], [()]

    def lay_out_batched(self):
        groups = self.pick(1, 2, 5)
        self.rows, self.weights = (groups, self.pick(1, 7, 33, 65, 129, 300)), (groups,)
        return list(range(groups)), list(range(groups))

    def lay_out_grouped(self):
        sizes, form = self.sizes(), self.pick("ends", "bounds")
        first = self.pick(0, 5, 130) if form == "bounds" else 0
        self.how["offsets"] = offsets_of(sizes, form, self.pick("int32", "int64"), first)
        ends = first + np.cumsum(sizes)
        self.rows, self.weights = (int(ends[-1]) + self.pick(0, 9, 140),), (len(sizes),)
        weights = list(range(len(sizes)))
        if self.pick(True, False):  # those that do not exist are an error on the CPU
            missing = [len(sizes), -1] if self.on_gpu else []
            weights = [self.pick(*weights, *missing * self.pick(1, 4)) for _ in sizes]
            self.how["weight_indices"] = np.array(weights, self.pick("int32", "int64"))
        return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)], weights

    def lay_out_grouped_contiguous(self):
        sizes = self.sizes()
        owners, rows, weights = [np.full(self.pick(*PADDING), -1)], [], []
        for group in self.rng.permutation(len(sizes)):
            begin = sum(map(len, owners))
            rows.append(slice(begin, begin + sizes[group]))
            weights.append(group)
            padding = -sizes[group] % 128 + self.pick(*PADDING)
            owners += [np.full(sizes[group], group), np.full(padding, -1)]
        self.how["m_indices"] = np.concatenate(owners).astype(np.int32)
        self.rows, self.weights = (len(self.how["m_indices"]),), (len(sizes),)
        return rows, weights

    def lay_out_grouped_masked(self):
        sizes = self.sizes()
        self.how |= {"masked_m": np.array(sizes, np.int32), "expected_m": self.pick(0, 1, 8, 20, 40, 100, 300, 2000)}
        self.rows, self.weights = (len(sizes), max(*sizes, 1) + self.pick(0, 9)), (len(sizes),)
        return [(g, slice(0, size)) for g, size in enumerate(sizes)], list(range(len(sizes)))

    def scale(self):
        float8 = self.dtypes[0].startswith("float8")
        blocks = float8 and self.out_dtype != "float16"  # whose range their scales would leave
        kind = self.pick("none", "tensor", "row", "row of a", *["block"] * blocks)
        bias = self.pick(None, None, "float32", None if self.out_dtype in (E4M3, E5M2) else self.out_dtype)
        self.how |= epilogue_of(self.rng, self.a, self.b, "none" if kind == "block" else kind, bias, self.activation)
        self.how["promote_every"] = self.pick(128, 256) if float8 and width(self.n, self.activation) >= 64 else 128
        if kind == "block":
            rows, lead_a, lead_b = self.a.shape[-2], self.a.shape[:-2], self.b.shape[:-2]
            self.how |= block_scales(self.rng, rows, self.n, self.k, lead_a, lead_b)

    def part(self, group):
        """The scales and the bias of a group."""
        rows, weight = self.rows_of_group[group], self.weight_of_group[group]
        part = {name: self.how[name] for name in ("alpha", "activation")}
        for name, lead, own in ("scale_a", self.rows[:-1], rows), ("scale_b", self.weights, weight):
            x = self.how[name]
            of_group = own if name == "scale_b" or x is None or x.ndim > len(lead) else group
            part[name] = x if x is None or x.ndim == 0 else x[of_group]
        bias = self.how.get("bias")
        return part | {"bias": None if bias is None else bias[weight]}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_options_in_any_combination(backend, seed):
    """Rows of no group, and of a weight that does not exist, are not written, nor taken for others."""
    case = Draw(seed, on_gpu=backend.name != "cpu")
    scale_out, columns = scale_out_of(case.out_dtype), width(case.n, case.activation)
    shape = *case.rows, columns
    initial = case.initial(shape)
    expected, left = {}, np.ones(case.rows, bool)
    for group, (rows, weight) in enumerate(zip(case.rows_of_group, case.weight_of_group, strict=True)):
        if case.layout == "dense" or (0 <= weight < len(case.b) and case.a[rows].size):
            left[rows] = False
            expected[group] = reference.gemm(case.a[rows], case.b[weight], **case.part(group))
    case.a[left] = np.nan
    with guarded.multiprocessors(case.sms):
        out = guarded.gemm(backend, case.a, case.given_b(), case.out_dtype, shape=shape, initial=initial,
                           scale_out=scale_out, pad=case.pad, offset=case.offset, **case.how)  # fmt: skip
    np.testing.assert_array_equal(f64(out[left]), f64(initial[left]))
    cut = cut_of(backend, case.dtypes, case.activation) * (2 if case.how["promote_every"] == 256 else 1)
    for group, ref in expected.items():
        own = case.made(out, initial, case.rows_of_group[group])
        judge_output(backend, own, ref, case.dtypes[0], case.out_dtype, scale_out, case.activation, cut)


class DrawAlongK(Product):
    """Of groups along K: each has a matrix of the output, factors of its own, and may be empty."""

    def __init__(self, seed):
        self.rng = np.random.default_rng([seed, 1])
        self.dtypes = self.pick(*DTYPES)
        sizes = [self.pick(0, 7, 16, 63, 128, 130, 400) for _ in range(self.pick(1, 2, 5, 12))]
        form = self.pick("ends", "bounds")
        begin = self.pick(0, 5, 64) if form == "bounds" else 0
        bounds = begin + np.cumsum([0, *sizes])
        self.spans = [slice(*span) for span in pairwise(bounds)]
        self.m, self.n, k = self.pick(1, 8, 65, 128, 200, 300), self.pick(64, 128, 170, 256, 400), int(bounds[-1])
        self.k = k + self.pick(0, 7, 64)
        self.a, self.b = (
            scenes.values(self.rng, (rows, self.k), dtype)
            for rows, dtype in zip((self.m, self.n), self.dtypes, strict=True)
        )
        accumulate = self.pick(False, True)
        self.out_dtype = "float32" if accumulate else self.pick("float32", "float16", "bfloat16")
        kind, lead = self.pick("none", "tensor", "row"), (len(sizes),)
        self.factors = {
            "scale_a": scale_of(self.rng, kind, self.m, lead),
            "scale_b": scale_of(self.rng, kind, self.n, lead),
        }
        self.how = {"layout": "k_grouped", "accumulate": accumulate, "alpha": self.pick(1.0, 0.3),
                    "offsets": offsets_of(sizes, form, self.pick("int32", "int64"), begin),
                    "b_row_major": self.pick(False, False, True),
                    "columns": self.pick("", "a", "b", "ab")}  # fmt: skip

    def part(self, group):
        factors = {name: None if x is None else x[group] for name, x in self.factors.items()}
        return factors | {"alpha": self.how["alpha"]}


@pytest.mark.parametrize("seed", range(60))
def test_groups_along_k_in_any_combination(backend, seed):
    """What lies outside every group is not read."""
    case = DrawAlongK(seed)
    shape = len(case.spans), case.m, case.n
    initial = case.initial(shape)
    expected = [reference.gemm(case.a[:, s], case.b[:, s], **case.part(g)) for g, s in enumerate(case.spans)]
    for x in (case.a, case.b):
        x[:, : case.spans[0].start] = np.nan
        x[:, case.spans[-1].stop :] = np.nan
    with guarded.multiprocessors(case.rng.integers(1, 6)):
        out = guarded.gemm(backend, case.a, case.given_b(), case.out_dtype, shape=shape, initial=initial,
                           pad=case.pick(0, 16), **case.how, **case.factors)  # fmt: skip
    cut = cut_of(backend, case.dtypes, None)
    for group, ref in enumerate(expected):
        own = case.made(out, initial, group)
        if ref.any():
            judge_output(backend, own, ref, case.dtypes[0], case.out_dtype, None, None, cut)
        else:
            assert not own.any()
