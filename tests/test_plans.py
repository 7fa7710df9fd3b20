"""Plans: host code only, so the heuristics are tested where there is no GPU."""

from __future__ import annotations

import itertools

import pytest

from flexgemm import _C

DTYPES = ["float32", "float16", "bfloat16"]
FP8 = ["float8_e4m3fn", "float8_e5m2"]
KEYS = {"family", "block_m", "block_n", "block_k", "num_stages", "split_k", "workspace_bytes"}
SMS = 132
HOPPER = 90


def plan_conv_hopper(**how):
    return _C.plan_conv(**how, compute_capability=HOPPER)


CONV_PLANS = [_C.plan_conv, plan_conv_hopper, _C.plan_conv_wgrad]
SIZES = [0, 1, 63, 64, 65, 129, 3000, 65_931, 4_000_000, 2**32]
CHANNELS = [1, 7, 16, 33, 64, 97, 256, 1024]
VOLUMES = [1, 8, 27, 343]

conv_plans = pytest.mark.parametrize("plan", CONV_PLANS, ids=["forward", "hopper", "wgrad"])


def check(plan):
    assert set(plan) == KEYS
    assert plan["family"] in ("portable", "sm90")
    assert all(type(value) is int for name, value in plan.items() if name != "family")
    blocks = [plan[f"block_{axis}"] for axis in "mnk"]
    assert all(8 <= block <= 512 and block % 8 == 0 for block in blocks)
    assert 1 <= plan["num_stages"] <= 10
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", *FP8])
def test_hopper_product_plans_are_sane(dtype):
    for m, n, groups, sms in itertools.product(SIZES, [1, 33, 192, 4096, 2**20], [1, 4, 128, 10**6], (1, 2, SMS)):
        chosen = check(_C.plan_gemm_sm90(m=m, n=n, k=7168, groups=groups, dtype=dtype, num_sms=sms))
        assert chosen["block_k"] == (128 if dtype in FP8 else 64)
        assert chosen["block_m"] // 128 <= sms  # a pair of blocks needs two multiprocessors at once
        few = chosen["block_m"] < 128
        stage = 128 * (chosen["block_m"] + 128 if few else 128 + chosen["block_n"])
        epilogue = 4 * chosen["block_m"] * 132 if few else 16 * 1024
        assert stage * chosen["num_stages"] + epilogue <= 225 * 1024
        assert few or chosen["split_k"] == 1
        assert chosen["split_k"] in (1, 2, 4, 8)
        if chosen["split_k"] > 1:  # a cluster has one tile, and all run at once
            assert chosen["split_k"] * -(-n // 128) <= sms


@pytest.mark.parametrize(
    "m, n, groups, tile",
    [
        (1, 4096, 1, (16, 128)),  # few rows: their own kernel
        (33, 4096, 1, (64, 128)),
        (64, 4096, 1, (64, 128)),
        (65, 4096, 1, (128, 128)),  # few tiles: narrow ones, for more multiprocessors
        (128 * 8, 1536, 128, (16, 128)),  # groups of twice the average are still one tile
        (128 * 32, 1536, 128, (64, 128)),
        (4096, 4096, 1, (256, 256)),  # large: pairs of blocks share B
        (4096, 2112, 1, (128, 192)),  # 11 x 192: wider tiles would leave a wave nearly empty
        (33_694, 4096, 8, (256, 256)),
        (8320, 4096, 32, (128, 256)),  # groups of about two tiles: a pair would often lack its second
        (8069, 1536, 128, (128, 256)),
    ],
)
def test_hopper_tiles_follow_the_shape(m, n, groups, tile):
    chosen = _C.plan_gemm_sm90(m=m, n=n, k=7168, groups=groups, dtype="float8_e4m3fn", num_sms=SMS)
    assert (chosen["block_m"], chosen["block_n"]) == tile


def test_few_rows_split_the_depth_while_tiles_are_few():
    def split(m, n, k, groups=1, sms=SMS):
        how = {"m": m, "n": n, "k": k, "groups": groups, "dtype": FP8[0], "num_sms": sms}
        return _C.plan_gemm_sm90(**how)["split_k"]

    assert split(1, 2112, 7168) == 4  # 17 tiles
    assert split(1, 512, 16384) == 8
    assert split(1, 512, 512) == 1  # four steps are not worth a second block
    assert split(16, 24576, 1536) == split(128, 4096, 7168, groups=32) == 1
    assert split(1, 2112, 7168, sms=17) == 1


UNPAIRED, NARROW, TALL = 1, 2, 4


@pytest.mark.parametrize("tiles", range(8))
def test_hopper_tiles_are_what_the_product_asks_for(tiles):
    for m, n, groups, sms in itertools.product([64, 300, 4096, 33_694], [64, 2112, 4096], [1, 8, 128], (1, 2, SMS)):
        chosen = check(_C.plan_gemm_sm90(m=m, n=n, k=7168, groups=groups, dtype=FP8[0], num_sms=sms, tiles=tiles))
        if tiles & UNPAIRED:
            assert chosen["block_m"] <= 128
        if tiles & TALL:
            assert chosen["block_m"] >= 128
        if tiles & NARROW:
            assert chosen["block_m"] <= 128
            assert chosen["block_n"] == 128


def splits_hold(plan, elements):
    """Partial sums are float32, one set per slice, and nothing else grows with the output."""
    if plan["split_k"] > 1:
        assert plan["workspace_bytes"] >= plan["split_k"] * elements * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_workspace_holds_the_partial_sums(dtype):
    for rows, ci, co, v in itertools.product([1, 300, 3000, 65_931], CHANNELS, CHANNELS, VOLUMES):
        how = {"rows": rows, "ci": ci, "co": co, "v": v, "dtype": dtype, "num_sms": SMS}
        splits_hold(_C.plan_conv(**how), rows * co)
        splits_hold(plan_conv_hopper(**how), rows * co)
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_hopper_takes_16_byte_rows_of_16_bit_elements(dtype):
    def family(capability=HOPPER, dtype=dtype, ci=64, co=64):
        how = {"rows": 65_931, "ci": ci, "co": co, "v": 27, "dtype": dtype, "num_sms": SMS}
        return _C.plan_conv(**how, compute_capability=capability)["family"]

    assert family() == family(ci=72, co=1024) == "sm90"
    assert family(ci=68) == family(co=68) == family(ci=1, co=1) == "portable"
    assert family(dtype="float32") == "portable"
    assert family(80) == family(89) == family(100) == "portable"


def test_hopper_tiles_are_as_wide_as_the_channels_fill():
    def tile(co, rows=1_000_000):
        how = {"rows": rows, "ci": 256, "co": co, "v": 27, "dtype": "float16", "num_sms": SMS}
        plan = plan_conv_hopper(**how)
        return plan["block_m"], plan["block_n"]

    assert tile(1024) == tile(256) == tile(200) == (128, 256)
    assert tile(128) == tile(384) == tile(72) == tile(320) == (128, 128)
    assert tile(64) == tile(8) == (128, 64)


def test_hopper_splits_offsets_while_tiles_are_few():
    def split(rows, co=1024):
        how = {"rows": rows, "ci": 1024, "co": co, "v": 27, "dtype": "float16", "num_sms": SMS}
        return plan_conv_hopper(**how)["split_k"]

    assert split(150) > split(848) > 1
    assert split(15_192) == split(252_392) == 1


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
