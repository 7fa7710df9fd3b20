"""Which row orders and segments a map has, and what convolutions do with them: host code only."""

from __future__ import annotations

import itertools

import pytest
from plans import HOPPER, SMS, check, ordered_plan, plan_conv_hopper

from flexgemm import _C

# ---- row orders ----

ALGORITHMS = [
    "auto",
    "implicit_gemm",
    "implicit_gemm_splitk",
    "masked_implicit_gemm",
    "masked_implicit_gemm_splitk",
]


def groups(*args, **how):
    return ordered_plan(*args, **how)["groups"]


@pytest.mark.parametrize(
    "rows, channels, best",
    [  # H200, float16, forward: what was fastest, or within 4 % of it
        (3840, 1024, {9}),
        (15_192, 1024, {3, 9}),
        (64_160, 512, {1, 3}),
        (252_392, 256, {1}),
        (1_026_536, 128, {1}),
        (65_931, 16, {0}),
        (65_931, 32, {0}),
        (65_931, 64, {0}),
        (65_931, 128, {1}),
    ],
)
def test_the_fastest_number_of_groups_of_measured_scenes(rows, channels, best):
    assert groups(rows, channels) in best


def test_more_channels_pay_for_more_groups():
    """The work that an order saves grows with the square of the channels, partial sums only with the channels."""
    for rows in (848, 3840, 15_192, 64_160):
        chosen = [groups(rows, c) for c in (32, 64, 128, 256, 512, 1024)]
        assert chosen == sorted(chosen)
        assert chosen[0] == 0
    assert groups(848, 2048) == groups(3840, 1024) == 9
    assert groups(15_192, 512) == groups(30_000, 512) == 3
    assert groups(64_160, 96) == groups(64_160, 160) == groups(64_160, 320) == 1
    assert groups(15_192, 96) == groups(15_192, 160) == 0
    assert groups(4_000_000, 16) in (0, 1)


def with_phases(rows, channels, **how):
    """Of a map back to the voxels of a layer with stride 2."""
    return ordered_plan(rows, channels, phases=(2, 2, 2), **how)


@pytest.mark.parametrize(
    "rows, channels, best",
    [  # H200, float16, 3x3x3 and stride 2: numbers of splits that were fastest, or within a quarter of it
        (848, 512, {7, 9, 14, 27}),
        (848, 1024, {4, 5, 6, 7, 9, 13, 14, 27}),
        (3840, 64, {1, 2, 3, 4, 5, 6, 7, 8, 9}),
        (3840, 256, {3, 4, 5, 6, 7, 8, 9, 14, 27}),
        (3840, 512, {3, 4, 5, 6, 7, 8, 9}),
        (3840, 1024, {3, 4, 5, 6, 8, 9}),
        (8624, 1024, {1, 3, 6, 8, 9}),
        (15_192, 256, {1, 3, 6}),
        (15_192, 1024, {1, 3, 6, 9}),
        (64_160, 64, {1}),
        (252_392, 32, {1}),
    ],
)
@pytest.mark.parametrize("gradient", [False, True])
def test_the_fastest_number_of_splits_of_measured_maps_with_phases(rows, channels, best, gradient):
    plan = with_phases(rows, channels, gradient=gradient)
    assert plan["groups"] == 1
    assert plan["split_k"] in best


def test_splits_have_no_divisor_in_common_with_the_phases():
    """Offsets of a slice are so many apart: every second one may be all that a phase has."""
    splits = {with_phases(rows, c)["split_k"] for rows in range(600, 20_000, 450) for c in (64, 128, 256, 512, 1024)
              if with_phases(rows, c)["groups"] == 1}  # fmt: skip
    assert all(number % 2 for number in splits)
    assert len(splits) > 2


def test_phases_save_more_than_an_order_costs():
    """A tile has an eighth of the offsets: so it pays where other rows are taken as they come."""
    for rows, channels in ((2744, 32), (15_192, 128), (64_160, 64)):
        assert groups(rows, channels) == 0
        assert with_phases(rows, channels)["groups"] == 1
    with_no_order = {"rows": 2744, "ci": 32, "co": 32, "v": 27, "dtype": "float16", "num_sms": SMS}
    assert plan_conv_hopper(**with_no_order, phases=(2, 2, 2))["groups"] == 0


def test_phases_are_what_the_portable_kernels_plan_by_too():
    for rows, channels in ((3840, 512), (64_160, 128)):
        plan = with_phases(rows, channels, compute_capability=80)
        assert plan["family"] == "portable"
        assert plan["groups"] == 1


def test_few_rows_are_split_instead():
    for channels in (64, 96, 320, 1024):
        plan = ordered_plan(200, channels)
        assert plan["groups"] == 0
        assert plan["split_k"] > 1


def test_larger_kernels_have_more_to_skip():
    assert groups(15_192, 64) == 0
    assert groups(64_160, 128, kernel_size=(5, 5, 5)) >= 1
    assert groups(15_192, 1024, kernel_size=(5, 5, 5)) in (5, 25)
    assert groups(4_000_000, 64, kernel_size=(5, 5, 5)) == 1


def test_partial_sums_stay_below_a_gibibyte():
    for rows, channels in itertools.product((3840, 15_192, 64_160, 120_000), (256, 1024, 4096)):
        assert ordered_plan(rows, channels)["workspace_bytes"] <= 1 << 30


@pytest.mark.parametrize("capability", [80, HOPPER])
@pytest.mark.parametrize("dtype, precision", [("float16", "ieee"), ("float32", "tf32"), ("float32", "ieee")])
def test_algorithms_are_what_they_say(capability, dtype, precision):
    for rows, channels in itertools.product((1, 200, 848, 3840, 15_192, 64_160, 1_000_000), (16, 64, 320, 1024)):
        sets = _C.plan_order_sets(rows=rows, kernel_size=(3, 3, 3))
        sizes = {"rows": rows, "ci": channels, "co": channels, "v": 27, "dtype": dtype, "num_sms": SMS}
        plans = {
            name: check(
                _C.plan_conv(**sizes, compute_capability=capability, precision=precision, algorithm=name, groups=sets)
            )
            for name in ALGORITHMS
        }
        tiles = {(plan["family"], plan["block_n"]) for plan in plans.values()}
        assert len(tiles) == 1
        assert plans["implicit_gemm"]["groups"] == plans["implicit_gemm_splitk"]["groups"] == 0
        assert plans["implicit_gemm"]["split_k"] == plans["masked_implicit_gemm"]["split_k"] == 1
        assert plans["masked_implicit_gemm"]["groups"] == (1 if sets else 0)
        assert plans["masked_implicit_gemm_splitk"]["groups"] in (sets or (0,))


@pytest.mark.parametrize("dtype, size", [("float16", 2), ("float32", 4)])
def test_an_explicit_matrix_is_made_in_parts_of_256_mib(dtype, size):
    sizes = {"dtype": dtype, "num_sms": SMS, "algorithm": "explicit_gemm"}
    for rows, ci, co, v in ((1, 1, 1, 1), (15_192, 1024, 1024, 27), (4_113_056, 64, 64, 27), (1000, 2048, 8, 343)):
        plan = _C.plan_conv(rows=rows, ci=ci, co=co, v=v, **sizes)
        row_bytes = v * ci * size + 4 * co
        assert (plan["groups"], plan["split_k"]) == (0, 1)
        assert plan["workspace_bytes"] == plan["block_m"] * row_bytes
        assert 1 <= plan["block_m"] <= rows
        assert plan["block_m"] == rows or plan["block_m"] % 128 == 0
        assert plan["workspace_bytes"] <= 2**28 or plan["block_m"] <= 128
        assert plan["block_m"] == rows or plan["workspace_bytes"] + 128 * row_bytes > 2**28
    assert _C.plan_conv(rows=0, ci=8, co=8, v=27, **sizes)["block_m"] == 1


def test_a_plan_takes_only_orders_that_are_there():
    assert groups(3840, 1024) == 9
    sizes = {"rows": 3840, "ci": 1024, "co": 1024, "v": 27, "dtype": "float16", "num_sms": SMS}
    for algorithm in ALGORITHMS:
        assert plan_conv_hopper(**sizes, algorithm=algorithm)["groups"] == 0
    assert plan_conv_hopper(**sizes, algorithm="masked_implicit_gemm", groups=(9,))["groups"] == 0
    assert plan_conv_hopper(**sizes, algorithm="masked_implicit_gemm_splitk", groups=(3,))["groups"] == 3


# ---- segments of a map ----


def segment_cost(rows, tiles, sms):
    """What the busiest multiprocessor works through: shorter segments take longer for each tile."""
    segments = -(-rows // (64 * tiles))
    return -(-segments // sms) * {4: 53, 2: 41}[tiles]


def test_segments_leave_multiprocessors_least_idle():
    for rows, sms in itertools.product([4224, 5000, 16_896, 16_897, 65_931, 848_000, 4_000_000, 2**40], [1, 16, SMS]):
        tiles = _C.plan_segment_tiles(rows=rows, num_sms=sms)
        costs = {t: segment_cost(rows, t, sms) for t in (4, 2)}
        assert costs[tiles] == min(costs.values())
        assert all(cost > costs[tiles] for t, cost in costs.items() if t > tiles)  # the longest of equals


@pytest.mark.parametrize(("rows", "tiles"), [(0, 0), (4223, 0), (4224, 2), (16_896, 2), (33_792, 4), (4_000_000, 4)])
def test_segments_are_as_long_as_rows_allow(rows, tiles):
    assert _C.plan_segment_tiles(rows=rows, num_sms=SMS) == tiles


@pytest.mark.parametrize("wrong", [{"rows": -1}, {"num_sms": 0}, {"rows": 1.5}, {"num_sms": None}])
def test_impossible_segments_are_refused(wrong):
    with pytest.raises((TypeError, ValueError)):
        _C.plan_segment_tiles(**{"rows": 100, "num_sms": SMS, **wrong})


def test_phases_of_a_layer_are_planned_by_axis():
    how = {"kernel_size": (3, 5, 2), "stride": (2, 3, 8), "dilation": (1, 3, 2)}
    assert _C.plan_phases(**how) == (2, 1, 2)
    assert _C.plan_phases(**how | {"stride": (1, 1, 1)}) == (1, 1, 1)
    for name, wrong in (("kernel_size", (8, 1, 1)), ("stride", (0, 1, 1)), ("dilation", (1, 2**31, 1))):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            _C.plan_phases(**how | {name: wrong})
