"""Plans: host code only, so the heuristics are tested where there is no GPU."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from calls import run_python
from products import ADDED, ASKEW, BLOCKS, DENSE, EQUAL, FEW_OR_MANY, MASKED, NARROW, PACKED, ROWS, TALL, tile_of

from flexgemm import _C

DTYPES = ["float32", "float16", "bfloat16"]
FP8 = ["float8_e4m3fn", "float8_e5m2"]
KEYS = {
    "family",
    "block_m",
    "block_n",
    "block_k",
    "num_stages",
    "groups",
    "split_k",
    "segment_tiles",
    "few_rows",
    "some_rows",
    "weights",
    "adds_in_shared",
    "workspace_bytes",
}
SMS = 132
HOPPER = 90


def plan_conv_hopper(**how):
    return _C.plan_conv(**how, compute_capability=HOPPER)


def plan_wgrad_hopper(**how):
    return _C.plan_conv_wgrad(**how, compute_capability=HOPPER)


CONV_PLANS = [_C.plan_conv, plan_conv_hopper, _C.plan_conv_wgrad, plan_wgrad_hopper]
WGRAD_PLANS = CONV_PLANS[2:]
SIZES = [0, 1, 63, 64, 65, 129, 3000, 65_931, 4_000_000, 2**32]
CHANNELS = [1, 7, 16, 33, 64, 97, 256, 1024]
VOLUMES = [1, 8, 27, 343]

conv_plans = pytest.mark.parametrize("plan", CONV_PLANS, ids=["forward", "hopper", "wgrad", "hopper wgrad"])


def check(plan):
    assert set(plan) == KEYS
    assert plan["family"] in ("portable", "sm90")
    assert all(type(value) is int for name, value in plan.items() if name != "family")
    blocks = [plan[f"block_{axis}"] for axis in "mnk"]
    assert all(8 <= block <= 512 and block % 8 == 0 for block in blocks)
    assert 1 <= plan["num_stages"] <= 10
    assert plan["split_k"] >= 1
    assert plan["split_k"] % max(plan["groups"], 1) == 0
    assert plan["workspace_bytes"] >= 0
    return plan


@conv_plans
@pytest.mark.parametrize("dtype", DTYPES)
def test_convolution_plans_are_sane(plan, dtype):
    for rows, ci, co, v, sms in itertools.product(SIZES, CHANNELS, CHANNELS, VOLUMES, (1, 16, SMS)):
        chosen = check(plan(rows=rows, ci=ci, co=co, v=v, dtype=dtype, num_sms=sms))
        assert chosen["split_k"] <= max(1, rows if plan in WGRAD_PLANS else v * ci)


@pytest.mark.parametrize("dtype", [*DTYPES, *FP8])
def test_product_plans_are_sane(dtype):
    shapes = itertools.product(SIZES, [1, 33, 64, 4096], [0, 1, 16, 576, 7168], [1, 4, 128])
    for m, n, k, groups in shapes:
        chosen = check(_C.plan_gemm(m=m, n=n, k=k, groups=groups, dtype=dtype, num_sms=SMS))
        assert chosen["split_k"] <= max(1, k)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", *FP8])
def test_hopper_product_plans_are_sane(dtype):
    for m, n, groups, sms in itertools.product(SIZES, [1, 33, 192, 2112, 4096, 2**20], [1, 4, 128, 10**6], (1, 2, SMS)):
        tiles = DENSE | ROWS if groups == 1 else 0
        how = {"m": m, "n": n, "k": 7168, "groups": groups, "dtype": dtype, "num_sms": sms, "tiles": tiles}
        chosen = check(_C.plan_gemm_sm90(**how))
        assert chosen["block_k"] == (128 if dtype in FP8 else 64)
        assert chosen["block_m"] // 128 <= sms  # a pair of blocks needs two multiprocessors at once
        few, some = chosen["few_rows"], chosen["some_rows"]
        rows, fits = -(-m // groups), sms > 1 and m > 0
        assert not few or chosen["block_m"] not in (8, 24) or rows <= chosen["block_m"]
        if groups == 1:  # by the kernel for few rows always, or where it is faster; that for groups of some where it is
            assert (rows <= 64) <= (few > 0) <= (rows <= (512 if fits else 128))
            assert some <= (fits and 128 < rows <= 512)
        else:
            assert (few > 0) == (not fits and rows <= 32)
            assert (rows <= 64 and fits) <= some <= fits
        assert few <= min(2, sms)
        rows = chosen["block_m"] if few else 128
        if some:  # the stages of the kernel that has so many rows and no fewer
            rows = next(most for most in (96, 160, 192, 256) if chosen["block_m"] <= most)
        stage = 128 * (rows + chosen["block_n"] // (2 if some else 1))  # block_n 256 is of a pair there
        sums = 4 * chosen["block_m"] * (chosen["block_n"] + 4) if few else (11 if some else 32) * 1024
        if chosen["block_n"] in (176, 192, 272):  # which leave room for a fifth stage, or do not fit otherwise
            sums = 16 * 1024
        assert stage * chosen["num_stages"] + sums <= 227 * 1024
        assert 1 <= chosen["split_k"] <= (8 if few else 2 if groups == 1 and chosen["block_m"] == 256 else 1)
        # A cluster of few rows has one tile, and all run at once wherever clusters do not fit well.
        if few and chosen["split_k"] > 1:
            surely = sms if chosen["split_k"] == 2 or sms < 16 else sms * 7 / 8
            count = -(-n // chosen["block_n"] // few) * -(-m // chosen["block_m"])
            assert chosen["split_k"] * few * count <= surely + 1


def hopper_tile(m, n, groups, k=7168, tiles=0, dtype=FP8[0]):
    chosen = _C.plan_gemm_sm90(m=m, n=n, k=k, groups=groups, dtype=dtype, num_sms=SMS, tiles=tiles)
    return chosen["block_m"], chosen["block_n"]


@pytest.mark.parametrize(
    "m, n, groups, tile",
    [
        (1, 4096, 1, (8, 64)),  # few rows: their own kernel
        (9, 4096, 1, (16, 64)),
        (17, 4096, 1, (24, 64)),
        (25, 4096, 1, (32, 64)),
        (33, 4096, 1, (64, 64)),
        (64, 4096, 1, (64, 64)),
        (65, 4096, 1, (128, 64)),
        (128, 4096, 1, (128, 64)),
        (128, 24576, 1, (128, 64)),  # three waves, nearly whole
        (129, 4096, 1, (128, 64)),  # a few hundred: by the kernels for few rows or for groups of some
        (129, 8192, 1, (96, 256)),
        (256, 2112, 1, (128, 64)),
        (300, 2112, 1, (128, 64)),
        (512, 4096, 1, (128, 128)),  # few tiles: narrow ones, for more multiprocessors
        (128 * 4, 1536, 128, (96, 256)),  # groups of few and of some rows: their own kernel
        (128 * 32, 1536, 128, (96, 256)),
        (4096, 4096, 1, (256, 256)),  # large: pairs of blocks share B
        (4096, 2112, 1, (256, 176)),  # 12 x 176: wider tiles would leave a wave nearly empty
        (4096, 24576, 1, (256, 256)),
        (2048, 3072, 1, (256, 192)),  # nothing but whole waves and columns
        (33_694, 4096, 8, (256, 256)),
        (11_200, 3072, 16, (256, 256)),  # what pairs leave over of two groups is a pair, too
        (8069, 1536, 128, (96, 256)),
        (16 * 126, 7168, 16, (176, 256)),  # one tile a group, though some have a third more rows
        (8 * 224, 2048, 8, (160, 256)),  # two tiles a group
        (8320, 4096, 32, (256, 256)),  # many of them: large tiles end under the next one's products
    ],
)
def test_hopper_tiles_follow_the_shape(m, n, groups, tile):
    assert hopper_tile(m, n, groups) == tile


def test_ends_of_tiles_count_where_the_depth_is_short():
    assert hopper_tile(4096, 7168, 1, k=7168) == (256, 256)
    assert hopper_tile(4096, 7168, 1, k=512) == (128, 256)  # blocks of a pair wait for each other there


@pytest.mark.parametrize("dtype", [FP8[0], "bfloat16"])
def test_groups_of_any_sizes_take_pairs_where_the_depth_is_long(dtype):
    """No block of a pair is left without rows, and weights that tiles of several rows share are read half as often; but
    ends of pairs take longer."""
    for tiles in (0, MASKED, EQUAL):
        assert hopper_tile(16 * 2048, 2048, 16, k=2048, tiles=tiles, dtype=dtype) == (256, 256)
        assert hopper_tile(16 * 2048, 2048, 16, k=512, tiles=tiles, dtype=dtype)[0] == 128
    assert hopper_tile(64 * 300, 7168, 64, k=4096, dtype=dtype) == (256, 256)
    assert hopper_tile(8 * 4096, 4096, 8, dtype=dtype) == (256, 256)
    assert hopper_tile(4 * 8192, 7168, 4, k=2048, tiles=MASKED, dtype=dtype) == (256, 256)


def test_rows_that_are_only_expected_may_be_a_few_more():
    assert hopper_tile(1024, 7168, 1) == (256, 256)
    assert hopper_tile(1024, 7168, 1, tiles=MASKED) == (128, 256)  # a fifth pair of row tiles would be a third wave
    assert hopper_tile(1024, 4096, 1, tiles=MASKED) == (256, 256)


def test_waves_of_few_groups_are_what_their_sizes_make_likely():
    """Each has up to a third more or less than expected, on its own: what would fit the mean need not be the best."""
    # Six to twelve tiles along rows, mostly eight or nine.
    assert hopper_tile(2 * 512, 4096, 2, tiles=MASKED) == (128, 128)
    assert hopper_tile(4 * 256, 4096, 4, tiles=MASKED) == (176, 256)  # at most two tiles to a group
    # Two tiles to nearly all groups: two waves, or little more.
    assert hopper_tile(8 * 200, 3072, 8, k=4096, tiles=MASKED) == (128, 192)


def test_groups_of_some_rows_are_cut_to_fill_the_multiprocessors():
    def most(m, n, groups, tiles=0, sms=SMS, dtype=FP8[0]):
        chosen = _C.plan_gemm_sm90(m=m, n=n, k=7168, groups=groups, dtype=dtype, num_sms=sms, tiles=tiles)
        assert chosen["some_rows"] in (0, 1)
        return chosen["block_m"] if chosen["some_rows"] else None

    assert most(64 * 64, 4096, 64) == most(64, 4096, 64) == 96
    assert most(4 * 130, 4096, 4) == 176  # one tile a group, though some have a third more rows
    assert most(4 * 130, 4096, 4, EQUAL) == 144
    assert most(4 * 220, 4096, 4, MASKED) == 144  # two tiles of each, with up to a third more rows, are two waves
    assert most(32 * 200, 4096, 32, dtype="bfloat16") == 256  # whose sums leave registers for more rows
    assert most(8 * 4096, 4096, 8) is None  # large groups waste little of tiles of 128 rows
    assert most(8 * 4096, 4096, 8, MASKED) is None
    assert most(130, 8192, 1) == most(130, 8192, 1, MASKED) == 96  # a few hundred rows are such a group, too
    assert most(130, 8192, 1, FEW_OR_MANY) is None
    assert most(600, 4096, 1) is None
    assert most(8 * 64, 4096, 8, sms=1) is None  # blocks work in pairs
    for tiles in (PACKED, NARROW, TALL):
        assert most(64 * 64, 4096, 64, tiles) is None
    assert most(64 * 64, 4096, 64, BLOCKS) == 96
    assert most(4 * 110, 4096, 4, BLOCKS) == 144
    # Sums of more rows leave no registers for their scales.
    assert all((most(8 * rows, 4096, 8, BLOCKS) or 0) <= 160 for rows in range(64, 400, 8))


def test_weights_that_several_tiles_read_count_as_read_again():
    def tile(rows, groups):
        return hopper_tile(groups * rows, 4096, groups, dtype="bfloat16")

    # 128 rows to a tile need fewer waves, if sizes differ, but two or three of them read each group's weights.
    assert tile(200, 64) == tile(500, 32) == (256, 256)
    assert tile(130, 64) == (176, 256)


def test_weights_that_are_read_once_give_way_first_or_come_by_lines():
    stay, give_way, by_lines = range(3)

    def weights(m, n, k, groups, tiles=0, dtype=FP8[0]):
        chosen = _C.plan_gemm_sm90(m=m, n=n, k=k, groups=groups, dtype=dtype, num_sms=SMS, tiles=tiles)
        return chosen["weights"]

    assert weights(64, 7168, 2048, 1, DENSE) == weights(128, 24576, 1536, 1, DENSE) == give_way
    assert weights(300, 2112, 7168, 1, DENSE) == stay  # several rows of tiles read them
    assert weights(4096, 4096, 7168, 1, DENSE) == stay
    assert weights(16 * 32, 2048, 2048, 16) == weights(2 * 130, 4096, 7168, 2) == give_way
    assert weights(32 * 32, 4096, 7168, 32) == weights(128 * 16, 768, 2048, 128, MASKED) == by_lines
    assert weights(32 * 256, 4096, 7168, 32, dtype="bfloat16") == stay


@pytest.mark.parametrize("rows, most", [(4, 16), (8, 16), (12, 32), (32, 64)])  # not 8 or 24: groups differ
def test_groups_of_few_rows_promoted_seldom_may_have_twice_the_average(rows, most):
    chosen = _C.plan_gemm_sm90(m=128 * rows, n=1536, k=7168, groups=128, dtype=FP8[0], num_sms=SMS, tiles=NARROW)
    assert (chosen["block_m"], chosen["block_n"], chosen["few_rows"]) == (most, 128, 2 if most == 64 else 1)


def test_few_rows_split_the_depth_while_tiles_are_few():
    def split(m, n, k, groups=1, sms=SMS):
        how = {"m": m, "n": n, "k": k, "groups": groups, "dtype": FP8[0], "num_sms": sms}
        return _C.plan_gemm_sm90(**how)["split_k"]

    for rows in (1, 64, 128):
        assert split(rows, 2112, 7168) == 3  # 33 tiles of 64 rows of weights: clusters of 4 do not all run at once
    assert split(1, 512, 16384) == 8
    assert split(1, 512, 512) == 1  # four steps are not worth a second block
    assert split(1, 512, 1024) == 2
    assert split(16, 24576, 1536) == 1
    assert split(1, 2112, 7168, sms=17) == 1
    assert split(1, 4096, 7168) == 2  # 64 tiles: clusters of three do not reach all of the multiprocessors
    assert split(1, 38 * 64, 7168) == 3


@pytest.mark.parametrize("m, most", [(1, 8), (16, 16), (20, 24), (32, 32), (64, 64)])
def test_few_rows_take_128_rows_of_weights_where_that_saves_waves(m, most):
    def tile(n, k):
        chosen = _C.plan_gemm_sm90(m=m, n=n, k=k, groups=1, dtype=FP8[0], num_sms=SMS)
        return chosen["block_m"], chosen["block_n"], chosen["split_k"]

    assert tile(32768, 512) == (most, 128, 1)  # two waves instead of four, of four steps each
    assert tile(24576, 1536) == (most, 64, 1)  # three waves of half as much as two
    assert tile(7168, 2048) == (most, 64, 1)  # 112 blocks without sums to exchange


def dense_plan(m, n, k, tiles=DENSE, dtype=FP8[0]):
    return _C.plan_gemm_sm90(m=m, n=n, k=k, groups=1, dtype=dtype, num_sms=SMS, tiles=tiles)


def dense_tile(m, n, k, tiles=DENSE, dtype=FP8[0]):
    return hopper_tile(m, n, 1, k, tiles, dtype)


def test_some_100_rows_take_64_rows_of_weights_unless_ends_would_count():
    def chosen(m, n, k, dtype=FP8[0]):
        plan = dense_plan(m, n, k, dtype=dtype)
        return plan["block_m"], plan["block_n"], plan["few_rows"], plan["split_k"]

    for k in (576, 2048, 4096, 16384):
        assert chosen(128, 7168, k) == (128, 64, 1, 1)  # 112 blocks without sums to exchange
    assert chosen(64, 7168, 16384) == (64, 64, 1, 1)
    assert chosen(128, 4096, 7168) == (128, 64, 1, 2)
    for dtype, depth in ((FP8[0], 1), ("bfloat16", 2)):
        assert chosen(96, 5120, 5120 // depth, dtype) == (128, 64, 1, 1)
        # Two and three waves, beside one of large tiles: weights come from memory, and take their time either way.
        assert chosen(128, 14336, 4096 // depth, dtype) == (128, 64, 1, 1)
        assert chosen(128, 24576, 1536 // depth, dtype) == (128, 64, 1, 1)
        assert chosen(128, 32768, 512 // depth, dtype)[2] == 0  # four waves of four steps
        assert chosen(128, 20480, 8192 // depth, dtype) == (128, 176, 0, 1)  # 117 blocks, all at once


def test_pairs_share_the_depth_of_tiles_that_full_waves_leave_over():
    def tile(*product, **how):
        plan = dense_plan(*product, **how)
        return plan["block_m"], plan["block_n"], plan["split_k"]

    for dtype in (FP8[0], "bfloat16"):
        assert tile(2048, 2112, 7168, dtype=dtype) == (256, 176, 2)  # 96 pairs: one wave, and 30 of 66
        assert tile(1024, 1024, 8192, dtype=dtype) == (256, 128, 2)  # 32 of 66
    assert tile(2048, 7168, 8192) == (256, 256, 2)  # three waves, and 26
    assert tile(1024, 1024, 8192, DENSE | BLOCKS) == (256, 128, 2)
    assert tile(1024, 1024, 8192, 0)[2] == 1  # groups
    assert tile(1024, 1024, 8192 + 128)[2] == 1  # halves of an odd number of steps would differ
    assert tile(1024, 1024, 512)[2] == 1  # two steps are not worth the exchange
    assert tile(4096, 4096, 7168)[2] == 1  # three waves, and 58 of 66
    # By pairs of 256 columns two waves and 28; of 512 rows the 32 that are shared alone, where one wave is sooner.
    assert tile(2048, 5120, 5120) == (256, 256, 2)
    assert tile(512, 4096, 7168) == (128, 128, 1)


def test_pairs_meet_once():
    """Which a single wave is too short for: single blocks begin sooner, and their steps take longer."""
    assert dense_tile(1024, 4096, 4096) == dense_tile(512, 7168, 2048) == (128, 256)
    assert dense_tile(896, 8192, 8192) == dense_tile(4096, 24576, 1536) == (256, 256)


def test_rows_that_are_only_scaled_have_three_more_widths():
    def tile(m, n, k, tiles=DENSE | ROWS, dtype=FP8[0]):
        return dense_tile(m, n, k, tiles, dtype)

    assert tile(4096, 2112, 7168) == tile(8192, 2112, 7168) == (256, 272)  # 128 pairs and 256: two waves and four
    assert tile(4096, 2112, 1024)[1] < 272  # their ends are longer
    for dtype, depth in ((FP8[0], 1), ("bfloat16", 2)):
        for m, n, k in ((512, 7168, 2048), (1024, 7168, 7168), (2048, 3584, 4096)):  # 128 blocks: one wave, or two
            assert tile(m, n, k // depth, dtype=dtype) == (128, 224)
            assert tile(m, n, k // depth, DENSE, dtype)[1] != 224
        for m, n, k in ((256, 5120, 5120), (384, 4096, 4096), (512, 2880, 2880)):  # one wave, of most blocks
            assert tile(m, n, k // depth, dtype=dtype) == (128, 96)
    assert tile(4096, 4096, 7168) == tile(4096, 7168, 2048) == (256, 256)  # as many waves
    assert tile(4096, 2112, 7168, DENSE) == (256, 176)
    assert tile(4096, 2112, 7168, DENSE | ADDED | ROWS)[1] < 224
    assert tile(2048, 7168, 4096, DENSE | ADDED | ROWS) == (128, 224)


def test_rows_that_begin_within_sectors_are_read_by_pairs():
    """Such rows come more slowly from L2, and a pair reads half of B for each of its blocks."""
    for shape, alone in (((2112, 7168, 5040), (128, 192)), ((4096, 4096, 7184), (128, 256))):
        assert dense_tile(*shape, DENSE | ADDED | ROWS) == alone
        assert dense_tile(*shape, DENSE | ADDED | ROWS | ASKEW) == (256, 256)
    assert dense_plan(64, 4096, 7184, DENSE | ASKEW) == dense_plan(64, 4096, 7184)  # of which memory is the limit


def test_groups_along_k_are_taken_for_what_one_has_of_k():
    """What a tile adds to the output counts beside the steps of its group, not of all."""
    tiles = TALL | EQUAL | ADDED | ASKEW
    assert hopper_tile(8 * 2048, 2048, 8, k=4096, tiles=tiles) == (256, 256)
    assert hopper_tile(64 * 2048, 2048, 64, k=256, tiles=tiles) == (256, 128)  # two steps: of short ends


def test_a_plan_that_is_asked_for_again_is_the_same():
    def plans():
        return [
            _C.plan_gemm_sm90(m=m, n=2112, k=k, groups=1, dtype=dtype, num_sms=sms, tiles=tiles)
            for m in range(1, 400, 7) for k in (512, 7168) for dtype in (*FP8, "bfloat16")
            for sms in (2, SMS) for tiles in (0, DENSE)
        ]  # fmt: skip

    asked = plans()  # more questions than are remembered
    assert plans() == asked
    assert len({tuple(plan.items()) for plan in asked}) > 10


def test_ends_of_sums_that_are_added_count_more():
    # Few steps are little beside an end, and narrow tiles have less to add at each.
    for dtype, k in ((FP8[0], 1024), ("bfloat16", 512)):
        assert dense_tile(4096, 4096, k, DENSE | ADDED, dtype)[1] < dense_tile(4096, 4096, k, DENSE, dtype)[1]
    for m, k in ((4096, 16_384), (512, 2048)):  # many steps; and rows that the kernels for few rows take as well
        assert dense_tile(m, 7168, k, DENSE | ADDED) == dense_tile(m, 7168, k, DENSE)


@pytest.mark.parametrize("dtype", ["bfloat16", *FP8])
def test_shared_tiles_and_their_blocks_are_one_wave(dtype):
    shares = 0
    for m, n, k, sms in itertools.product([65, 300, 1024, 2049, 33_694], [64, 2112, 7168], [16, 2048, 2896, 7168, 8192],
                                          (2, 5, 8, SMS)):  # fmt: skip
        plan = _C.plan_gemm_sm90(m=m, n=n, k=k, groups=1, dtype=dtype, num_sms=sms, tiles=DENSE)
        if plan["split_k"] == 1 or plan["few_rows"]:
            continue
        tiles, steps = -(-m // 256) * -(-n // plan["block_n"]), -(-k // plan["block_k"])
        assert (plan["block_m"], plan["split_k"]) == (256, 2)
        assert 0 < tiles % (sms // 2) <= sms // 4
        assert steps % 2 == 0
        shares += 1
    assert shares > 5


def test_pairs_that_share_the_depth_do_not_add_in_shared_memory():
    """There is no kernel that does both; the one that adds would do the tiles that are shared twice."""
    for m, n, k in itertools.product([129, 300, 512, 513, 4096], [128, 2112, 7168], [2048, 4096, 16_384]):
        for tiles in (ADDED | DENSE | FEW_OR_MANY, ADDED | DENSE | ROWS, ADDED | DENSE):
            plan = dense_plan(m, n, k, tiles)
            assert plan["few_rows"] or plan["some_rows"] or plan["split_k"] == 1 or not plan["adds_in_shared"]


def test_very_many_rows_are_planned_at_once():
    """In a time that does not grow with them."""
    for tiles, groups in ((0, 2), (MASKED, 1), (PACKED, 4)):
        for dtype in ("bfloat16", FP8[0]):
            check(_C.plan_gemm_sm90(m=2**45, n=4096, k=4096, groups=groups, dtype=dtype, num_sms=SMS, tiles=tiles))


@pytest.mark.parametrize("tiles", range(256))
def test_hopper_tiles_are_what_the_product_asks_for(tiles):
    for m, n, groups, sms in itertools.product([64, 300, 4096, 33_694], [64, 2112, 4096], [1, 8, 128], (1, 2, SMS)):
        chosen = check(_C.plan_gemm_sm90(m=m, n=n, k=7168, groups=groups, dtype=FP8[0], num_sms=sms, tiles=tiles))
        if tiles & TALL:
            assert chosen["block_m"] >= 128
        if tiles & FEW_OR_MANY:
            assert not chosen["some_rows"]
            assert not (chosen["few_rows"] and -(-m // groups) > 128)
        if tiles & NARROW:
            assert chosen["block_m"] <= 128
            assert chosen["block_n"] == 128 or (chosen["few_rows"] and chosen["block_n"] == 64)
        if tiles & BLOCKS:
            assert chosen["block_n"] % (64 if chosen["few_rows"] else 128) == 0
            assert not (chosen["some_rows"] and chosen["block_m"] > 160)
            assert not (chosen["few_rows"] == 2 and chosen["block_m"] > 64)
            if not chosen["few_rows"] and not chosen["some_rows"]:
                assert (chosen["block_m"], chosen["block_n"]) in {(128, 128), (256, 128), (256, 256)}
            # Stages with their scales beside sums that are stored; the kernels' static_asserts count to the byte.
            rows = chosen["block_m"] if chosen["few_rows"] else 128
            if chosen["some_rows"]:
                rows = 96 if chosen["block_m"] <= 96 else 160
            stage = 128 * (rows + chosen["block_n"] // (2 if chosen["some_rows"] else 1)) + 4 * rows + 16
            sums = 4 * chosen["block_m"] * (chosen["block_n"] + 4)
            kept = sums if chosen["few_rows"] else (11 if chosen["some_rows"] else 32) * 1024
            assert stage * chosen["num_stages"] + kept <= 227 * 1024


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


# ---- row orders ----

ALGORITHMS = [
    "auto",
    "implicit_gemm",
    "implicit_gemm_splitk",
    "masked_implicit_gemm",
    "masked_implicit_gemm_splitk",
]


def ordered_plan(rows, ci, co=None, kernel_size=(3, 3, 3), dtype="float16", num_sms=SMS, **how):
    """With the row orders that a map of this many rows has."""
    sets = _C.plan_order_sets(rows=rows, kernel_size=kernel_size)
    volume = kernel_size[0] * kernel_size[1] * kernel_size[2]
    sizes = {"rows": rows, "ci": ci, "co": co or ci, "v": volume, "dtype": dtype, "num_sms": num_sms}
    return check(plan_conv_hopper(**sizes, groups=sets, **how))


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


# ---- what was chosen ----

CALLS = """
import numpy as np
import flexgemm
x = np.ones((5, 6), np.float32)
coords = np.array([[0, 0, y, 0] for y in range(5)], np.int32)
nmap = flexgemm.neighbor_map(coords, (1, 1, 5, 1), (1, 3, 1))
weight = np.ones((4, 1, 3, 1, 6), np.float32)
for _ in range(3):
    flexgemm.submanifold_conv3d(x, weight, neighbor_map=nmap)
    flexgemm.submanifold_conv3d_backward(np.ones((5, 4), np.float32), x, weight, neighbor_map=nmap)
    flexgemm.gemm_nt(x, x)
flexgemm.gemm_nt(x[:3], x)
"""


def printed(**environment):
    done = run_python(["-c", CALLS], **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_choices_are_printed_once_for_each_shape_on_request():
    lines = printed(FLEXGEMM_PRINT_CONFIGS="1")
    shapes = [line.removeprefix("flexgemm: ").split(": family=cpu tile=")[0] for line in lines]
    assert shapes == [
        "conv_forward float32 rows=5 ci=6 co=4 v=3",
        "conv_dgrad float32 rows=5 ci=4 co=6 v=3",
        "conv_wgrad float32 rows=5 ci=6 co=4 v=3",
        "gemm float32 m=5 n=5 k=6 groups=1",
        "gemm float32 m=3 n=5 k=6 groups=1",
    ]
    for line in lines:
        assert re.search(r" tile=\d+x\d+x\d+ stages=0 groups=0 split=\d+ workspace=\d+$", line)


MAPS = """
import numpy as np
import flexgemm
coords = np.array([[0, 0, y, 0] for y in range(5)], np.int32)
for shape in ((1, 1, 5, 1), (1, 1, 5, 1), (1, 256, 256, 256)):
    flexgemm.neighbor_map(coords, shape, device="cuda")
"""


def printed_on_gpu(calls):
    package = Path(_C.__file__).parents[1]  # the emulator's, where that is what is tested
    done = run_python(["-c", calls], FLEXGEMM_PRINT_CONFIGS="1", PYTHONPATH=str(package))
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("flexgemm: ")]


def printed_on_hopper(calls):
    """Of products alone."""
    lines = [line for line in printed_on_gpu(calls) if line.startswith("flexgemm: gemm ")]
    if not all("family=sm90" in line for line in lines):
        pytest.skip("other kernels have one plan, which knows no rows")
    return lines


def test_tables_of_voxels_are_printed_too(cuda):
    assert printed_on_gpu(MAPS) == [
        "flexgemm: neighbor_map rows=5 shape=(1, 1, 5, 1): table=direct bytes=96",
        "flexgemm: neighbor_map rows=5 shape=(1, 256, 256, 256): table=hash bytes=2448",
    ]


GRADIENTS = """
import ml_dtypes
import numpy as np
import flexgemm
def ones(*shape):
    return np.ones(shape, ml_dtypes.float8_e4m3fn)
flexgemm.set_num_sms(1)
for k in (272, 288):
    flexgemm.wgrad_gemm_nt(ones(300, k), ones(240, k), device="cuda")
flexgemm.set_num_sms(2)
offsets = np.array([272, 528], np.int32)
flexgemm.k_grouped_wgrad_gemm_nt(ones(160, 528), ones(240, 528), offsets, device="cuda")
"""


SELDOM_PROMOTED = """
import numpy as np
import flexgemm
flexgemm.set_num_sms(2)
ones = np.ones((300, 512), np.float16)
for groups in (1, 2):
    b = np.ones((groups, 300, 512), np.float16)
    flexgemm.m_grouped_gemm_nt(ones, b, np.array([150, 300][-groups:], np.int32), device="cuda", promote_every=256)
"""


def test_promotion_is_asked_of_fp8_alone(cuda):
    lines = printed_on_hopper(SELDOM_PROMOTED)
    for groups, line in zip((1, 2), lines, strict=True):
        wide, narrow = (tile_of(2, 300, 300, 512, groups, tiles, "float16") for tiles in (0, NARROW))
        assert re.search(r"family=sm90 tile=(\S+)", line)[1] == "{}x{}x64".format(*wide)
        assert wide != narrow


def test_gradients_ask_by_how_their_rows_lie_and_how_deep_a_group_is(cuda):
    """Rows of 272 bytes begin within sectors, those of 288 do not; two groups of 528 are 264 deep each."""

    def tile(*question):
        return "{}x{}x128".format(*tile_of(*question))

    lines = printed_on_hopper(GRADIENTS)
    dense, grouped = DENSE | ROWS, TALL | EQUAL
    wanted = [
        ("m=300 n=240 k=272 groups=1", tile(1, 300, 240, 272, 1, dense | ASKEW)),
        ("m=300 n=240 k=288 groups=1", tile(1, 300, 240, 288, 1, dense)),
        ("m=320 n=240 k=264 groups=2", tile(2, 320, 240, 264, 2, grouped | ASKEW)),
    ]
    assert [re.search(r"(m=.*): family=sm90 tile=(\S+)", line).groups() for line in lines] == wanted
    assert wanted[0][1] != tile(1, 300, 240, 272, 1, dense)
    assert wanted[2][1] not in (tile(2, 320, 240, 264, 2, grouped), tile(2, 320, 240, 528, 2, grouped | ASKEW))


@pytest.mark.parametrize("value", ["", "0"])
def test_nothing_is_printed_unasked(value):
    assert printed(FLEXGEMM_PRINT_CONFIGS=value) == []
