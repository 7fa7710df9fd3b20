"""Plans of convolutions: host code only, so the heuristics are tested where there is no GPU."""

from __future__ import annotations

import itertools

import pytest
from plans import DTYPES, FP8, HOPPER, SMS, check, ordered_plan, plan_conv_hopper, splits_hold

from flexgemm import _C


def plan_wgrad_hopper(**how):
    return _C.plan_conv_wgrad(**how, compute_capability=HOPPER)


CONV_PLANS = [_C.plan_conv, plan_conv_hopper, _C.plan_conv_wgrad, plan_wgrad_hopper]
WGRAD_PLANS = CONV_PLANS[2:]
SIZES = [0, 1, 63, 64, 65, 129, 3000, 65_931, 4_000_000, 2**32]
CHANNELS = [1, 7, 16, 33, 64, 97, 256, 1024]
VOLUMES = [1, 8, 27, 343]
conv_plans = pytest.mark.parametrize("plan", CONV_PLANS, ids=["forward", "hopper", "wgrad", "hopper wgrad"])


@conv_plans
@pytest.mark.parametrize("dtype", DTYPES)
def test_convolution_plans_are_sane(plan, dtype):
    for rows, ci, co, v, sms in itertools.product(SIZES, CHANNELS, CHANNELS, VOLUMES, (1, 16, SMS)):
        chosen = check(plan(rows=rows, ci=ci, co=co, v=v, dtype=dtype, num_sms=sms))
        assert chosen["split_k"] <= max(1, rows if plan in WGRAD_PLANS else v * ci)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_workspace_holds_the_partial_sums(dtype):
    for rows, ci, co, v in itertools.product([1, 300, 3000, 65_931], CHANNELS, CHANNELS, VOLUMES):
        how = {"rows": rows, "ci": ci, "co": co, "v": v, "dtype": dtype, "num_sms": SMS}
        splits_hold(_C.plan_conv(**how), rows * co)
        splits_hold(plan_conv_hopper(**how), rows * co)
        for plan_wgrad in WGRAD_PLANS:
            splits_hold(plan_wgrad(**how), co * v * ci)
    for m, n, k in itertools.product([1, 64, 300, 4096], [33, 64, 2112], [16, 576, 7168]):
        splits_hold(_C.plan_gemm(m=m, n=n, k=k, groups=1, dtype=dtype, num_sms=SMS), m * n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_tiles_are_split_and_many_are_not(dtype):
    """A scene that fills the card needs no partial sums; one that leaves it idle does."""

    def conv(rows, ci, co, v=27):
        return _C.plan_conv(rows=rows, ci=ci, co=co, v=v, dtype=dtype, num_sms=SMS)["split_k"]

    assert conv(848, 1024, 64) > 1
    assert conv(4_000_000, 64, 64) == 1
    assert conv(848, 1024, 64) >= conv(15_192, 1024, 64) >= conv(252_392, 1024, 64)

    def wgrad(rows, channels):
        how = {"rows": rows, "ci": channels, "co": channels, "v": 27, "dtype": dtype, "num_sms": SMS}
        return _C.plan_conv_wgrad(**how)["split_k"]

    assert wgrad(4_000_000, 32) > 1  # 27 tiles of output, 4 million rows of reduction
    assert wgrad(4_000_000, 32) >= wgrad(4_000_000, 1024)


@pytest.mark.parametrize("plan", [_C.plan_conv, _C.plan_conv_wgrad], ids=["forward", "wgrad"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_hopper_takes_channels_in_eights(plan, dtype):
    def family(capability=HOPPER, dtype=dtype, ci=64, co=64, **precision):
        how = {"rows": 65_931, "ci": ci, "co": co, "v": 27, "dtype": dtype, "num_sms": SMS}
        return plan(**how, compute_capability=capability, **precision)["family"]

    assert family() == family(ci=72, co=1024) == "sm90"
    assert family(ci=68) == family(co=68) == family(ci=1, co=1) == "portable"
    if plan is _C.plan_conv:
        assert family(dtype="float32", precision="tf32") == family(dtype="float32", precision="ieee") == "sm90"
    else:
        assert family(dtype="float32") == "sm90"  # in TF32: for true float32 the caller asks for a capability of 80
    assert family(80) == family(89) == family(100) == "portable"


def test_hopper_takes_channels_of_float8_in_sixteens():
    def plan(ci=64, co=64, capability=HOPPER, dtype=FP8[0]):
        how = {"rows": 65_931, "ci": ci, "co": co, "v": 27, "dtype": dtype, "num_sms": SMS}
        return check(_C.plan_conv(**how, compute_capability=capability))

    for dtype in FP8:
        assert plan(dtype=dtype)["family"] == plan(ci=80, co=1000, dtype=dtype)["family"] == "sm90"
        assert plan(ci=72, dtype=dtype)["family"] == plan(co=68, dtype=dtype)["family"] == "portable"
        assert plan(dtype=dtype, capability=89)["family"] == "portable"
    assert plan(ci=72)["block_k"] == plan()["block_k"] == 128


def test_float8_takes_the_tiles_of_float16_and_no_more_groups():
    """It halves the work that an order saves, and not the partial sums."""
    for rows, channels in itertools.product((848, 3840, 15_192, 64_160, 252_392), (128, 256, 512, 1024)):
        float8, float16 = (ordered_plan(rows, channels, dtype=dtype) for dtype in (FP8[0], "float16"))
        assert float8["block_n"] == float16["block_n"]
        assert float8["groups"] <= float16["groups"]
    assert ordered_plan(15_192, 1024, dtype=FP8[0])["groups"] == 3


def test_true_float32_takes_the_tiles_of_tf32_and_half_the_channels_a_step():
    """A step is 16 channels, both parts of each."""
    for rows, channels in itertools.product((848, 15_192, 252_392), (8, 64, 128, 256, 1024)):
        ieee, tf32 = (ordered_plan(rows, channels, dtype="float32", precision=name) for name in ("ieee", "tf32"))
        assert all(ieee[key] == tf32[key] for key in ("family", "block_m", "block_n", "num_stages"))
        assert (ieee["block_k"], tf32["block_k"]) == (16, 32)


def test_hopper_tiles_are_as_wide_as_the_channels_fill():
    def tile(co, rows=1_000_000, dtype="float16"):
        how = {"rows": rows, "ci": 256, "co": co, "v": 27, "dtype": dtype, "num_sms": SMS, "precision": "tf32"}
        plan = plan_conv_hopper(**how)
        return plan["block_m"], plan["block_n"]

    assert tile(1024) == tile(256) == tile(200) == (192, 256)
    assert tile(256, dtype="float32") == tile(256, rows=1000) == (128, 256)
    assert tile(256, rows=150) == (192, 256)  # all rows in one tile
    assert tile(128) == tile(384) == tile(72) == tile(320) == (128, 128)
    assert tile(64) == tile(40) == tile(8, dtype="float32") == (128, 64)
    assert tile(32) == tile(8) == (128, 32)


def test_transposed_weights_of_16_bits_have_no_tile_of_32_columns():
    def width(co, dtype, gradient):
        how = {"rows": 1_000_000, "ci": 256, "co": co, "v": 27, "dtype": dtype, "num_sms": SMS, "precision": "tf32"}
        return plan_conv_hopper(**how, gradient=gradient)["block_n"]

    for dtype in ("float16", "bfloat16"):
        assert [width(co, dtype, False) for co in (8, 32, 64)] == [32, 32, 64]
        assert [width(co, dtype, True) for co in (8, 32, 64, 96, 256)] == [64, 64, 64, 128, 256]
    assert width(8, "float32", True) == width(8, "float32", False) == 64


def test_warps_gather_their_own_rows_of_few_channels():
    def width(ci, co, rows=65_931, v=27, dtype="float16", **how):
        sizes = {"rows": rows, "ci": ci, "co": co, "v": v, "dtype": dtype, "num_sms": SMS, "precision": "tf32"}
        plan = plan_conv_hopper(**sizes, **how)
        assert plan["block_m"] != 64 or plan["groups"] == 0 and plan["split_k"] == 1
        return plan["block_n"] if plan["block_m"] == 64 else None

    assert width(8, 8) == width(16, 16) == width(32, 32) == width(32, 32, dtype="bfloat16") == 32
    assert width(32, 40) == width(16, 64) == width(64, 64) == 64
    assert width(64, 72) is width(72, 64) is None  # more columns, or two steps an offset
    assert width(8, 8, v=49) == width(32, 32, v=125) == 32
    assert width(32, 32, dtype="float32") is None
    assert width(64, 64, rows=848) is None  # split by offsets instead
    assert width(32, 32, rows=15_192) == width(24, 24) == 32
    assert width(64, 64, rows=4_113_056, groups=[1]) is None  # an order saves more
    assert width(32, 32, rows=4_113_056, groups=[1]) == 32
    assert width(32, 32, algorithm="implicit_gemm") == 32
    assert width(32, 32, algorithm="masked_implicit_gemm", groups=[1]) is None


def test_hopper_splits_offsets_while_tiles_are_few():
    def split(rows, co=1024):
        how = {"rows": rows, "ci": 1024, "co": co, "v": 27, "dtype": "float16", "num_sms": SMS}
        return plan_conv_hopper(**how)["split_k"]

    assert split(150) > split(848) > 1
    assert split(15_192) == split(252_392) == 1


def test_hopper_weight_gradient_tiles_follow_the_channels():
    def tile(ci, co):
        plan = plan_wgrad_hopper(rows=252_392, ci=ci, co=co, v=27, dtype="float16", num_sms=SMS)
        return plan["block_m"], plan["block_n"]

    assert tile(256, 256) == tile(1024, 1024) == tile(64, 200) == (256, 192)
    assert tile(128, 128) == tile(256, 72) == tile(1024, 320) == (128, 256)
    assert tile(64, 64) == tile(64, 8) == tile(32, 64) == (64, 384)
    assert tile(16, 16) == (64, 224)  # fourteen offsets are as many as this tile may touch
    assert tile(8, 256) == (256, 48)


@pytest.mark.parametrize("channels", [(8, 8), (24, 64), (40, 64), (56, 128), (72, 200), (264, 1024)], ids=str)
def test_a_hopper_weight_gradient_tile_touches_no_more_offsets_than_it_may(channels):
    ci, co = channels
    for dtype in ("float16", "float32"):
        plan = plan_wgrad_hopper(rows=3000, ci=ci, co=co, v=343, dtype=dtype, num_sms=SMS)
        most = {("float32", 128): 8, ("float16", 128): 8, ("float16", 256): 6}.get((dtype, plan["block_m"]), 14)
        for first in range(0, 343 * ci, plan["block_n"]):
            last = min(first + plan["block_n"], 343 * ci) - 1
            assert last // ci - first // ci + 1 <= most


@pytest.mark.parametrize(
    "groups, channels, family", [(4, 16, "portable"), (4, 64, "sm90"), (1, 16, "sm90"), (2, 63, "portable")]
)
def test_narrow_groups_of_channels_are_one_launch_of_the_portable_kernel(groups, channels, family):
    sizes = {"rows": 3000, "ci": channels, "co": channels, "v": 27, "dtype": "float16", "num_sms": SMS}
    chosen = check(_C.plan_conv(**sizes, compute_capability=90, channel_groups=groups))
    assert chosen["family"] == family
    if family == "sm90":  # a launch for each group
        assert chosen == _C.plan_conv(**sizes, compute_capability=90)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_groups_of_few_channels_need_no_tensor_cores(dtype):
    sizes = {"rows": 3000, "co": 16, "v": 27, "dtype": dtype, "num_sms": SMS, "compute_capability": 90}
    assert _C.plan_conv(**sizes, ci=8, channel_groups=8)["block_k"] == 1
    assert _C.plan_conv(**sizes, ci=8, channel_groups=8)["workspace_bytes"] == 27 * 8 * 16 * 8 * 4
    for how in (
        {"ci": 16, "channel_groups": 4},
        {"ci": 8},
        {"ci": 8, "channel_groups": 8, "algorithm": "implicit_gemm"},
    ):
        assert _C.plan_conv(**sizes, **how)["block_k"] > 1


def test_groups_of_channels_share_the_multiprocessors():
    sizes = {"rows": 700, "ci": 256, "co": 32, "v": 27, "dtype": "float16"}
    alone = _C.plan_conv(**sizes, num_sms=SMS // 6)
    together = _C.plan_conv(**sizes, num_sms=SMS, channel_groups=6)
    assert alone["split_k"] == together["split_k"] > 1
    assert together["workspace_bytes"] == 6 * alone["workspace_bytes"]
    assert _C.plan_conv(**sizes, num_sms=SMS, channel_groups=1000)["split_k"] == 1


def test_hopper_splits_rows_while_tiles_are_few():
    def split(rows, channels):
        return plan_wgrad_hopper(rows=rows, ci=channels, co=channels, v=27, dtype="float16", num_sms=SMS)["split_k"]

    assert split(192, 1024) == split(15_192, 1024) == 1  # 576 tiles
    assert 5 * split(65_931, 64) <= SMS < 5 * split(4_000_000, 64)  # one wave where rows are few
    assert split(300, 16) == 1
    assert split(4_000_000, 1024) >= 4_000_000 // 65_536  # so long may a chain of float32 sums be


def test_more_multiprocessors_never_mean_fewer_splits():
    for rows in (64, 848, 3840, 65_931):
        splits = [
            _C.plan_conv(rows=rows, ci=256, co=64, v=27, dtype="float16", num_sms=sms)["split_k"]
            for sms in (1, 8, 32, 132)
        ]
        assert splits == sorted(splits)


@conv_plans
def test_the_same_question_has_the_same_answer(plan):
    how = {"rows": 65_931, "ci": 64, "co": 64, "v": 27, "dtype": "float16", "num_sms": SMS}
    assert plan(**how) == plan(**how)


@conv_plans
def test_a_kernel_has_a_voxel(plan):
    with pytest.raises(ValueError, match="v: expected at least 1, got 0"):
        plan(rows=100, ci=64, co=64, v=0, dtype="float16", num_sms=SMS)


@pytest.mark.parametrize("groups", [(2,), (3, 100)])
def test_groups_of_offsets_are_even(groups):
    with pytest.raises(ValueError, match=f"groups: expected divisors of v, which is 27, got {groups[-1]}"):
        _C.plan_conv(rows=100, ci=64, co=64, v=27, dtype="float16", num_sms=SMS, groups=groups)


@pytest.mark.parametrize("wrong", [{"dtype": "float13"}, {"dtype": 7}, {"rows": -1}, {"co": -64}, {"num_sms": 0}])
@conv_plans
def test_impossible_questions_are_refused(plan, wrong):
    how = {"rows": 100, "ci": 64, "co": 64, "v": 27, "dtype": "float16", "num_sms": SMS, **wrong}
    with pytest.raises((TypeError, ValueError)):
        plan(**how)


@conv_plans
def test_sizes_beyond_any_machine_are_refused(plan):
    with pytest.raises(ValueError, match="ci: expected 0 to 1125899906842624"):
        plan(rows=1, ci=2**62, co=64, v=125, dtype="float16", num_sms=2)
    plan(rows=1, ci=2**50, co=64, v=125, dtype="float16", num_sms=2)


@conv_plans
def test_segments_that_no_kernel_has_are_refused(plan):
    how = {"rows": 100, "ci": 64, "co": 64, "v": 27, "dtype": "float16", "num_sms": SMS}
    for tiles in (1, 3):
        with pytest.raises(ValueError, match=f"^segment_tiles: expected 2 or 4, got {tiles}$"):
            plan(**how, segment_tiles=tiles)
    with pytest.raises(ValueError, match="^tiles: expected 2 or 4, got 3$"):
        _C.segment_words(tiles=3, v=27)
