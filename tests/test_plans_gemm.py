"""Plans of products: host code only, so the heuristics are tested where there is no GPU."""

from __future__ import annotations

import itertools

import pytest
from plans import DTYPES, FP8, SMS, check
from products import (
    ADDED,
    ASKEW,
    BLOCKS,
    COLUMNS,
    DENSE,
    EQUAL,
    FEW_OR_MANY,
    MASKED,
    NARROW,
    PACKED,
    ROW_MAJOR,
    ROWS,
    TALL,
    USUAL,
)

from flexgemm import _C

SIZES = [0, 1, 63, 64, 65, 129, 3000, 65_931, 4_000_000, 2**32]


@pytest.mark.parametrize("dtype", [*DTYPES, *FP8])
def test_product_plans_are_sane(dtype):
    shapes = itertools.product(SIZES, [1, 33, 64, 4096], [0, 1, 16, 576, 7168], [1, 4, 128])
    for m, n, k, groups in shapes:
        chosen = check(_C.plan_gemm(m=m, n=n, k=k, groups=groups, dtype=dtype, num_sms=SMS))
        assert chosen["split_k"] <= max(1, k)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", *FP8])
@pytest.mark.parametrize("usual", [0, USUAL])
def test_hopper_product_plans_are_sane(dtype, usual):
    for m, n, groups, sms in itertools.product(SIZES, [1, 33, 192, 2112, 4096, 2**20], [1, 4, 128, 10**6], (1, 2, SMS)):
        tiles = DENSE | ROWS | usual if groups == 1 else 0
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
        if few and (chosen["block_m"] > 128 or chosen["block_m"] > 64 and chosen["block_n"] == 128):
            assert usual
            sums = 2 * chosen["block_m"] * (chosen["block_n"] + 8)  # as they are stored
        if chosen["block_n"] in (176, 192, 272):  # which leave room for a fifth stage, or do not fit otherwise
            sums = 16 * 1024
        assert stage * chosen["num_stages"] + sums <= 227 * 1024
        assert 1 <= chosen["split_k"] <= (8 if few else 2 if groups == 1 and chosen["block_m"] == 256 else 1)
        # A cluster of few rows has one tile, and all run at once wherever clusters do not fit well.
        if few and chosen["split_k"] > 1:
            surely = sms if chosen["split_k"] == 2 or sms < 16 else sms * 7 / 8
            count = -(-n // chosen["block_n"] // few) * -(-m // chosen["block_m"])
            assert chosen["split_k"] * few * count <= surely + 1


@pytest.mark.parametrize("beside", [0, COLUMNS])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_row_major_operand_has_tiles_of_whole_boxes(dtype, beside):
    """Of 64 columns, each one block's; the kernels for few and for some rows read it, but no A in columns beside it."""
    kernels = set()
    for m, n, groups, sms in itertools.product(SIZES, [1, 33, 192, 2112, 4096, 2**20], [1, 4, 128, 10**6], (1, 2, SMS)):
        tiles = ROW_MAJOR | beside | (DENSE | ROWS if groups == 1 else 0)
        chosen = check(_C.plan_gemm_sm90(m=m, n=n, k=7168, groups=groups, dtype=dtype, num_sms=sms, tiles=tiles))
        kernels.add((chosen["few_rows"] > 0, chosen["some_rows"] > 0))
        if not chosen["few_rows"] and not chosen["some_rows"]:
            blocks = chosen["block_m"] // 128
            assert blocks <= sms
            assert chosen["block_n"] // blocks in (64, 128, 192, 256)
    assert kernels == ({(False, False)} if beside else {(False, False), (True, False), (False, True)})


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
        (520, 256, 1, (128, 64)),  # or up to 2,048, where few columns leave fewer large tiles than multiprocessors
        (1536, 256, 1, (128, 64)),
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
        (16 * 126, 7168, 16, (192, 256)),  # one tile a group, though some have a third more rows
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
    assert hopper_tile(2 * 512, 7168, 2, k=2048, tiles=MASKED) == (128, 256)
    assert hopper_tile(4 * 256, 7168, 4, k=2048, tiles=MASKED) == (128, 192)


@pytest.mark.parametrize("dtype, tallest", [(FP8[0], {96, 160, 192}), ("bfloat16", {96, 160, 192, 256})])
def test_of_few_groups_the_device_chooses_how_tall_tiles_are(dtype, tallest):
    """Since it alone knows their sizes: a kernel is chosen by the heights it has, and told what tiles cost besides."""

    def plan(groups, rows, tiles=0):
        return check(
            _C.plan_gemm_sm90(m=groups * rows, n=4096, k=7168, groups=groups, dtype=dtype, num_sms=SMS, tiles=tiles)
        )

    seen = set()
    for groups, rows, tiles in itertools.product([2, 4, 9, 32], range(40, 400, 24), [0, MASKED]):
        chosen = plan(groups, rows, tiles)
        if chosen["some_rows"]:
            assert chosen["least_rows"] == 96 and chosen["block_m"] in tallest
            assert 40 <= chosen["overhead_rows"] <= 80
            seen.add(chosen["block_m"])
        else:
            assert chosen["least_rows"] == chosen["overhead_rows"] == 0
    assert seen == tallest
    for others in (plan(33, 130), plan(4, 130, EQUAL)):
        assert (others["some_rows"], others["least_rows"], others["overhead_rows"]) == (1, 0, 0)


def test_groups_of_some_rows_are_cut_to_fill_the_multiprocessors():
    def most(m, n, groups, tiles=0, sms=SMS, dtype=FP8[0]):
        chosen = _C.plan_gemm_sm90(m=m, n=n, k=7168, groups=groups, dtype=dtype, num_sms=sms, tiles=tiles)
        assert chosen["some_rows"] in (0, 1)
        return chosen["block_m"] if chosen["some_rows"] else None

    assert most(64 * 64, 4096, 64) == most(64, 4096, 64) == 96
    assert most(4 * 130, 4096, 4) == 192  # one tile a group, though some have a third more rows
    assert most(4 * 130, 4096, 4, EQUAL) == 144
    assert most(4 * 220, 4096, 4, MASKED) == 160  # two tiles of each, with up to a third more rows, are two waves
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
    assert most(4 * 110, 4096, 4, BLOCKS) == 160
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


def test_usual_outputs_have_tiles_that_fit_their_rows():
    def tile(m, n, k, dtype=FP8[0], asked=DENSE | ROWS | USUAL):
        plan = dense_plan(m, n, k, asked, dtype)
        return plan["block_m"], plan["block_n"], plan["few_rows"], plan["split_k"]

    for dtype, depth in ((FP8[0], 1), ("bfloat16", 2)):
        assert tile(72, 7168, 4096 // depth, dtype) == (80, 64, 1, 1)  # one row of them
        assert tile(80, 4096, 14336 // depth, dtype) == (80, 64, 1, 2)  # 64 tiles, by clusters
        assert tile(516, 1536, 14336 // depth, dtype) == (112, 64, 1, 1)  # five rows of 24
        assert tile(675, 1024, 16384 // depth, dtype) == (96, 64, 1, 1)  # eight rows of 16
        assert tile(128, 7168, 4096 // depth, dtype) == (128, 64, 1, 1)
        assert tile(836, 5120, 5120, dtype) == (144, 128, 1, 1)  # two waves of 120
        assert tile(4096, 2112, 14336 // depth, dtype)[2] == 0  # three waves and more have large tiles
    assert tile(1141, 1024, 8192, "bfloat16") == (80, 128, 1, 1)
    assert tile(1010, 5120, 5120, "bfloat16") == (176, 128, 1, 1)
    assert tile(1010, 5120, 5120)[2] == 0  # FP8 has none so tall: its partial sums take registers, too
    assert tile(75, 4096, 7168, asked=DENSE | ROWS | USUAL | BLOCKS) == (80, 64, 1, 2)
    for other in (DENSE, DENSE | ROWS, DENSE | ADDED | ROWS, DENSE | ROWS | ROW_MAJOR | COLUMNS | USUAL):
        assert tile(140, 6144, 4096, "bfloat16", other)[2] == 0


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
