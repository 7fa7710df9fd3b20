"""Plans: host code only, so the heuristics are tested where there is no GPU."""

from __future__ import annotations

import itertools

import pytest

from flexgemm import _C

DTYPES = ["float32", "float16", "bfloat16"]
FP8 = ["float8_e4m3fn", "float8_e5m2"]
KEYS = {"block_m", "block_n", "block_k", "num_stages", "split_k", "workspace_bytes"}
SMS = 132
CONV_PLANS = [_C.plan_conv, _C.plan_conv_wgrad]
SIZES = [0, 1, 63, 64, 65, 129, 3000, 65_931, 4_000_000, 2**32]
CHANNELS = [1, 7, 16, 33, 64, 97, 256, 1024]
VOLUMES = [1, 8, 27, 343]

conv_plans = pytest.mark.parametrize("plan", CONV_PLANS, ids=["forward", "wgrad"])


def check(plan):
    assert set(plan) == KEYS
    assert all(type(value) is int for value in plan.values())
    blocks = [plan[f"block_{axis}"] for axis in "mnk"]
    assert all(8 <= block <= 512 and block % 8 == 0 for block in blocks)
    assert 1 <= plan["num_stages"] <= 8
    assert plan["split_k"] >= 1
    assert plan["workspace_bytes"] >= 0
    return plan


@conv_plans
@pytest.mark.parametrize("dtype", DTYPES)
def test_convolution_plans_are_sane(plan, dtype):
    for rows, ci, co, v, sms in itertools.product(SIZES, CHANNELS, CHANNELS, VOLUMES, (1, 16, SMS)):
        chosen = check(plan(rows=rows, ci=ci, co=co, v=v, dtype=dtype, num_sms=sms))
        assert chosen["split_k"] <= max(1, rows if plan is _C.plan_conv_wgrad else v * ci)


@pytest.mark.parametrize("dtype", [*DTYPES, *FP8])
def test_product_plans_are_sane(dtype):
    shapes = itertools.product(SIZES, [1, 33, 64, 4096], [0, 1, 16, 576, 7168], [1, 4, 128])
    for m, n, k, groups in shapes:
        chosen = check(_C.plan_gemm(m=m, n=n, k=k, groups=groups, dtype=dtype, num_sms=SMS))
        assert chosen["split_k"] <= max(1, k)


def splits_hold(plan, elements):
    """Partial sums are float32, one set per slice, and nothing else grows with the output."""
    if plan["split_k"] > 1:
        assert plan["workspace_bytes"] >= plan["split_k"] * elements * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_workspace_holds_the_partial_sums(dtype):
    for rows, ci, co, v in itertools.product([1, 300, 3000, 65_931], CHANNELS, CHANNELS, VOLUMES):
        how = {"rows": rows, "ci": ci, "co": co, "v": v, "dtype": dtype, "num_sms": SMS}
        splits_hold(_C.plan_conv(**how), rows * co)
        splits_hold(_C.plan_conv_wgrad(**how), co * v * ci)
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


@pytest.mark.parametrize("wrong", [{"dtype": "float13"}, {"dtype": 7}, {"rows": -1}, {"co": -64}, {"num_sms": 0}])
@conv_plans
def test_impossible_questions_are_refused(plan, wrong):
    how = {"rows": 100, "ci": 64, "co": 64, "v": 27, "dtype": "float16", "num_sms": SMS, **wrong}
    with pytest.raises((TypeError, ValueError)):
        plan(**how)
