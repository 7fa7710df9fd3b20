"""One small case of every kernel path, for compute-sanitizer: NumPy and the extension only, no pytest, no torch.

    compute-sanitizer --tool memcheck python tests/sanitize_cases.py [--list] [--device cpu] [--part I N] [NAME ...]

NAME keeps the cases whose name contains it, --part every N-th of these from the I-th on. Allocations are exact and
outputs start uninitialised, so that the tools see what the canaries and the poison of the test suite would hide. Every
result is compared with the oracle. Exit status 1 on a wrong result or when no case matches.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a build in place needs no installation

import numpy as np
from kernel_cases import (
    CHANNELS,
    MODES,
    N,
    batch_case,
    conv_case,
    conv_segment_case,
    depthwise_case,
    epilogue_case,
    fp8_conv_case,
    gemm_case,
    grouped_case,
    hash_case,
    layout_case,
    lying_case,
    map_case,
    order_case,
    outputs_case,
    pool_case,
    quantize_case,
    reduce_case,
    sample_case,
    segment_case,
    sequence_case,
    sort_case,
    sparse_map_case,
    sums_case,
    voxelize_case,
)
from memory import Cuda, Host
from products import (
    E4M3,
    E5M2,
    ENDS,
    check_grouped_output,
    elements,
    own_dtype,
)

from flexgemm import _C


def all_cases():
    cases = {}
    for kernel_size, dilation in (((3, 3, 3), (1, 1, 1)), ((2, 3, 4), (2, 1, 3)), ((7, 7, 7), (1, 1, 1))):
        for transposed in (False, True):
            name = f"map/{'x'.join(map(str, kernel_size))}/{'transposed' if transposed else 'forward'}"
            cases[name] = partial(
                map_case, kernel_size=kernel_size, dilation=dilation, transposed=transposed, check=False
            )
    plain = {"kernel_size": (3, 3, 3), "dilation": (1, 1, 1), "transposed": False}
    cases["map/3x3x3/check"] = partial(map_case, check=True, **plain)
    for check in (False, True):  # more cells than 32 bits can number
        name = "map/3x3x3/huge" + "/check" * check
        cases[name] = partial(map_case, check=check, shape=(2, 2**20, 2**20, 2**20), **plain)

    for transposed in (False, True):
        name = "transposed" if transposed else "forward"
        for stride in ((1, 1, 1), (2, 3, 1)):
            cases[f"sparse_map/{'x'.join(map(str, stride))}/{name}"] = partial(
                sparse_map_case, stride=stride, transposed=transposed, mode="bxyz"
            )
        for mode in ("z_order", "hilbert"):
            cases[f"sparse_map/{mode}/{name}"] = partial(
                sparse_map_case, stride=(2, 3, 1), transposed=transposed, mode=mode
            )
    cases["sparse_map/huge"] = partial(
        sparse_map_case, stride=(2, 3, 1), transposed=False, mode="bxyz", shape=(2, 2**20, 2**20, 2**20)
    )

    for mode in ("max", "mean", "sum"):
        for dtype in ("float32", "float16", "bfloat16"):
            for channels, offset in ((64, 0), (8, 0), (33, 1)):
                cases[f"pool/{mode}/{dtype}/{channels}"] = partial(
                    pool_case, mode=mode, dtype=dtype, channels=channels, offset=offset
                )
    cases["batch_indices"] = partial(batch_case, n=N)

    for direction in ("forward", "dgrad", "wgrad"):
        for dtype in ("float32", "float16", "bfloat16"):
            for channels, multiplier, offset in ((64, 1, 0), (33, 1, 1), (7, 3, 0)):
                cases[f"depthwise/{direction}/{dtype}/{channels}x{multiplier}"] = partial(
                    depthwise_case,
                    direction=direction,
                    dtype=dtype,
                    channels=channels,
                    multiplier=multiplier,
                    offset=offset,
                )

    for kernel_size, n, groups in (
        ((3, 3, 3), 150, (1, 3, 9)),
        ((1, 1, 1), 150, (1,)),
        ((2, 7, 7), 150, (2, 14)),
        ((3, 3, 3), 4_000, (1, 3)),
        ((3, 3, 3), 4_200, (3,)),
        ((3, 3, 3), 40_000, (1,)),
    ):
        name = f"order/{'x'.join(map(str, kernel_size))}/{n}"
        cases[name] = partial(order_case, kernel_size=kernel_size, n=n, groups=groups)
    for kernel_size, n in (((3, 3, 3), 4_200), ((7, 7, 7), 150)):
        name = f"order/{'x'.join(map(str, kernel_size))}/{n}/phases"
        cases[name] = partial(order_case, kernel_size=kernel_size, n=n, groups=(1,), phases=(2, 2, 2))

    for kernel_size, tiles in (((3, 3, 3), 4), ((2, 2, 2), 2), ((2, 4, 4), 2)):
        name = f"segments/{'x'.join(map(str, kernel_size))}/{tiles}"
        cases[name] = partial(segment_case, kernel_size=kernel_size, tiles=tiles)

    # every tile in all passes, tiles of a segment, what is several tiles and what does not fit
    for dtype, ci, co, tiles in (
        ("float16", 16, 32, 2),
        ("bfloat16", 16, 40, 2),
        ("bfloat16", 32, 64, 2),
        ("float16", 32, 24, 4),
        ("float16", 64, 64, 4),
        ("bfloat16", 64, 16, 2),
        ("bfloat16", 72, 136, 4),
    ):
        for overflows in (False, True):
            name = f"conv/segments/{dtype}/{ci}-{co}" + "/overflow" * overflows
            case = partial(conv_segment_case, dtype=dtype, ci=ci, co=co, tiles=tiles, overflows=overflows)
            cases[name] = case

    for mode in ("bxyz", "z_order", "hilbert"):
        for name, shape in (("32", (2, 30, 40, 50)), ("64", (2, 2**20, 3, 2**20))):
            for offset in (0, 1):
                cases[f"sequence/{mode}/{name}/{offset}"] = partial(
                    sequence_case, mode=mode, shape=shape, offset=offset
                )
    for dtype, bits, n in ((np.int32, 9, 150), (np.int64, 40, 150), (np.int32, 20, 40_000), (np.int64, 20, 40_000)):
        for with_sorted in (False, True):
            name = f"sort/{np.dtype(dtype)}/{n}" + "/sorted" * with_sorted
            cases[name] = partial(sort_case, dtype=dtype, bits=bits, n=n, with_sorted=with_sorted)

    for value_dtype in ("int32", "int64"):
        for key_dtype in ("int32", "int64"):
            cases[f"hash/{key_dtype}/{value_dtype}"] = partial(
                hash_case, key_dtype=key_dtype, value_dtype=value_dtype, voxels=False
            )
        cases[f"hash/voxels/{value_dtype}"] = partial(
            hash_case, key_dtype="int64", value_dtype=value_dtype, voxels=True
        )

    for dtype in ("float32", "float16", "bfloat16"):
        for channels, offset in ((64, 0), (37, 1)):
            layout = f"{dtype}/{channels}"
            for mode in ("trilinear", "nearest"):
                cases[f"sample/{mode}/{layout}"] = partial(
                    sample_case, mode=mode, dtype=dtype, channels=channels, offset=offset
                )
            for reduction in ("sum", "mean", "max"):
                cases[f"reduce/{reduction}/{layout}"] = partial(
                    reduce_case, reduction=reduction, dtype=dtype, channels=channels, offset=offset
                )

    for dtype in ("int32", "int64"):
        for columns in (3, 4):
            cases[f"voxelize/{dtype}/{columns}"] = partial(voxelize_case, dtype=dtype, columns=columns)

    for direction in ("forward", "dgrad", "wgrad"):
        for mode in MODES:
            conv = partial(conv_case, direction=direction, mode=mode, offset=0)
            for channels in CHANNELS:
                if channels in ("narrow", "square", "deep", "long"):  # they are below
                    continue
                if channels == "broad" and direction == "wgrad":
                    continue
                if channels == "tall" and (direction != "wgrad" or mode == "float32"):
                    continue
                for offset in (0, 1):
                    layout = "strided" if offset else "plain"
                    cases[f"conv/{direction}/{mode}/{channels}/{layout}"] = partial(
                        conv, channels=channels, kernel_size=(3, 1, 3), offset=offset
                    )
            cases[f"conv/{direction}/{mode}/even"] = partial(conv, channels="aligned", kernel_size=(2, 2, 2))

            for groups in (0, 3) if direction != "wgrad" and mode in ("float16", "bfloat16") else ():
                cases[f"conv/{direction}/{mode}/many-rows/{groups}-orders"] = partial(
                    conv, channels="square", kernel_size=(3, 1, 3), groups=groups, rows=3100
                )

            if direction == "forward" and mode in ("float16", "bfloat16"):
                cases[f"conv/forward/{mode}/narrow"] = partial(conv, channels="narrow", kernel_size=(3, 3, 3), rows=300)

            if direction == "forward" and mode in ("float16", "tf32"):
                cases[f"conv/forward/{mode}/many-tiles"] = partial(
                    conv, channels="long", kernel_size=(3, 1, 3), rows=3100
                )

            if direction == "wgrad":
                cases[f"conv/wgrad/{mode}/many-tiles"] = partial(conv, channels="deep", kernel_size=(3, 3, 3))
                cases[f"conv/wgrad/{mode}/split"] = partial(conv, channels="aligned", kernel_size=(3, 1, 3), rows=1100)

            for ci, co, groups in ((16, 24, 4), (33, 66, 3), (128, 128, 2)):
                how = {"ci": ci, "co": co, "groups": groups}
                cases[f"conv/{direction}/{mode}/{groups}-channel-groups"] = partial(
                    grouped_case, direction=direction, mode=mode, **how
                )

            for channels, groups in (("odd", 1), ("wide", 1), ("odd", 3), ("wide", 9)) if direction != "wgrad" else ():
                cases[f"conv/{direction}/{mode}/{channels}/{groups}-orders"] = partial(
                    conv, channels=channels, kernel_size=(3, 1, 3), groups=groups
                )
            for kernel_size in ((3, 1, 3), (2, 2, 2)) if direction != "wgrad" else ():
                cases[f"conv/{direction}/{mode}/{'x'.join(map(str, kernel_size))}/ordered-map"] = partial(
                    conv, channels="wide", kernel_size=kernel_size, groups=1, ordered=True
                )

    for direction in ("forward", "dgrad"):
        for mode in MODES:
            for channels in ("aligned", "odd"):
                cases[f"conv/{direction}/{mode}/{channels}/explicit"] = partial(
                    conv_case,
                    direction=direction,
                    mode=mode,
                    channels=channels,
                    kernel_size=(3, 1, 3),
                    offset=int(channels == "odd"),
                    algorithm="explicit_gemm",
                )

    for mode in MODES:
        for channels in ("aligned", "odd"):
            for name, how in (
                ("gelu", {"activation": "gelu", "in_place": False, "offset": 0}),
                ("silu/strided", {"activation": "silu", "in_place": False, "offset": 1}),
                ("relu/in_place", {"activation": "relu", "in_place": True, "offset": 0}),
            ):
                cases[f"epilogue/{mode}/{channels}/{name}"] = partial(
                    epilogue_case, mode=mode, channels=channels, **how
                )
        # so many tiles that the offsets are not shared out
        cases[f"epilogue/{mode}/whole"] = partial(
            epilogue_case, mode=mode, channels="aligned", activation="gelu", in_place=True, offset=0, n=13_000
        )

    for dtypes in ((a, b) for a in (E4M3, E5M2) for b in (E4M3, E5M2)):
        # the three widths of Hopper's tiles, and what takes the portable kernel
        for channels in ((64, 64), (144, 72), (208, 136), (33, 37)):
            for of_rows, out_dtype, groups in ((True, "float32", 0), (False, "bfloat16", 0), (True, "float16", 9)):
                name = f"conv/fp8/{'-'.join(dtypes)}/{channels[0]}-{channels[1]}/{out_dtype}"
                common = {"dtypes": dtypes, "out_dtype": out_dtype, "channels": channels, "of_rows": of_rows}
                cases[name] = partial(fp8_conv_case, offset=int(out_dtype == "bfloat16"), groups=groups, **common)
            for groups in (0, 9):
                name = f"conv/fp8/{'-'.join(dtypes)}/{channels[0]}-{channels[1]}/fp8/{groups}-orders"
                common = {"dtypes": dtypes, "out_dtype": dtypes[0], "channels": channels, "of_rows": True}
                cases[name] = partial(fp8_conv_case, offset=0, groups=groups, scale_out=0.5, **common)

    mixes = [(a, b, "ieee") for a in (E4M3, E5M2) for b in (E4M3, E5M2)]
    mixes += [(dtype, dtype, precision) for dtype, precision in MODES.values()]
    for a, b, precision in mixes:
        own = own_dtype((a, b))
        for layout, sizes in (("dense", ()), ("grouped", (0, 1, 64, 30))):
            for place, shape, offset in (("aligned", (72, 192), 0), ("odd", (65, 97), 0), ("strided", (72, 192), 1)):
                name = f"gemm/{layout}/{a}-{b}-{precision}/{place}"
                common = {"dtypes": (a, b), "precision": precision, "shape": shape, "sizes": sizes, "offset": offset}
                cases[name] = partial(gemm_case, out_dtype=own, extras=place == "odd", **common)
                if place == "aligned":
                    cases[f"{name}/float32"] = partial(gemm_case, out_dtype="float32", extras=True, **common)

    # Enough tiles for the larger shapes of the Hopper kernel, and for blocks that walk over more than one.
    for dtype in (E4M3, "bfloat16"):
        common = {"dtypes": (dtype, dtype), "out_dtype": "bfloat16", "precision": "ieee", "offset": 0, "extras": False}
        for name, sms, rows, n, k in (("128x128", None, 1100, 1000, 208), ("128x176", 3, 300, 340, 528),
                                      ("128x192", 2, 570, 380, 528), ("128x256", 2, 570, 500, 528),
                                      ("256x176", 6, 570, 520, 5136), ("256x192", 4, 600, 380, 2576),
                                      ("256x256", 4, 600, 510, 5136)):  # fmt: skip
            how = common | {"rows": rows, "shape": (n, k), "num_sms": sms}
            cases[f"gemm/large/{dtype}/{name}"] = partial(gemm_case, sizes=(), **how)
        sizes = (900, 129, 1900)
        cases[f"gemm/large/{dtype}/grouped"] = partial(gemm_case, shape=(2112, 208), sizes=sizes, **common)
        # Pairs of blocks, of which two have the rests of two groups, and one that of the last alone.
        rests = {"shape": (400, elements(2064, dtype)), "sizes": (300, 128, 0, 400, 257), "num_sms": 2}
        cases[f"gemm/large/{dtype}/rests"] = partial(gemm_case, **common | rests)
        cases[f"gemm/large/{dtype}/rests/scales"] = partial(
            gemm_case, **common | rests | {"extras": True, "out_dtype": "float32"}
        )
        # The kernel for groups of some rows: its tiles, of 96, 160, 192 and, of 16-bit products, 256 rows at most, as 8
        # multiprocessors take them.
        for name, sizes, shape in (("96", (0, 90, 1, 64, 97, 40), (264, 1040)),
                                   ("160", (150, 19, 159, 146, 83), (776, 1040)),
                                   ("192", (207, 153, 192, 194, 191), (776, 1040)),
                                   ("256", (200, 223, 1, 230, 241), (1544, 4112))):  # fmt: skip
            how = common | {"shape": shape, "sizes": sizes, "num_sms": 8}
            cases[f"gemm/some/{dtype}/{name}"] = partial(gemm_case, **how)
            cases[f"gemm/some/{dtype}/{name}/scales"] = partial(
                gemm_case, **how | {"extras": True, "out_dtype": "float32"}
            )

    # Scales of blocks, in pairs of blocks whose last columns are of two blocks or of one, and in groups of some rows.
    common = {"dtypes": (E4M3, E4M3), "out_dtype": "float32", "precision": "ieee", "extras": "blocks", "offset": 0}
    for name, rows, n, num_sms in (("128x128", 300, 400, 1), ("pairs", 500, 400, 2), ("pairs/128", 512, 640, 2)):
        how = {"rows": rows, "shape": (n, 4112), "sizes": (), "num_sms": num_sms}
        cases[f"gemm/large/{E4M3}/blocks/{name}"] = partial(gemm_case, **common | how)
    for name, sizes, shape, num_sms in (("few", (16, 0, 9, 1), (200, 2064), 1),
                                        ("96", (0, 90, 1, 64, 97, 40), (264, 2064), 8),
                                        ("160", (90, 160, 97, 128, 130), (400, 1040), 2)):  # fmt: skip
        how = {"sizes": sizes, "shape": shape, "num_sms": num_sms}
        cases[f"gemm/some/{E4M3}/blocks/{name}"] = partial(gemm_case, **common | how)

    # Every tile of the Hopper kernel for few rows; the deep ones in clusters.
    for rows in (5, 12, 20, 30, 60, 120):
        for dtype, extras in ((E4M3, True), (E4M3, "blocks"), ("bfloat16", True)):
            common = {"dtypes": (dtype, dtype), "out_dtype": "float32", "precision": "ieee", "sizes": (), "offset": 0}
            cases[f"gemm/few/{dtype}/{rows}" + "/blocks" * (extras == "blocks")] = partial(
                gemm_case, rows=rows, shape=(200, 4112), extras=extras, **common
            )

        common = {"dtypes": (E4M3, E4M3), "out_dtype": "bfloat16", "precision": "ieee", "sizes": (), "offset": 0}
        cases[f"gemm/few/16-bit/{rows}"] = partial(gemm_case, rows=rows, shape=(200, 4112), extras=True, **common)
        if rows <= 64:  # 128 rows of weights to a tile
            for name, shape, num_sms in (("wide", (1032, 272), 2), ("wide/deep", (120, 6160), 7)):
                how = common | {"rows": rows, "shape": shape, "num_sms": num_sms, "extras": True}
                cases[f"gemm/few/{name}/{rows}"] = partial(gemm_case, **how)

    # Tiles of that kernel that fit usual outputs, by 64 rows of weights and by 128; several to a block; shared.
    common = {"precision": "ieee", "sizes": (), "offset": 0}
    for dtype, rows, shape, num_sms in (
        (E4M3, 75, (56, 288), 1), (E4M3, 379, (56, 288), 2), (E4M3, 281, (120, 1056), 3), (E4M3, 521, (56, 288), 2),
        (E4M3, 130, (440, 288), 2), (E4M3, 315, (120, 288), 2), (E4M3, 283, (56, 8224), 4),
        ("bfloat16", 203, (72, 144), 2), ("bfloat16", 187, (200, 272), 2),
        ("bfloat16", 130, (312, 528), 2), ("bfloat16", 155, (56, 6160), 2), ("float16", 347, (72, 272), 2),
    ):  # fmt: skip
        dtypes = (dtype, dtype)
        how = common | {"dtypes": dtypes, "out_dtype": own_dtype(dtypes)}
        how |= {"rows": rows, "shape": shape, "num_sms": num_sms}
        for name, extras in (("", False), ("/scales", True)):
            cases[f"gemm/few/{dtype}/{rows}x{shape[0]}x{shape[1]}{name}"] = partial(gemm_case, extras=extras, **how)
    how = common | {"dtypes": (E4M3, E4M3), "out_dtype": "bfloat16", "num_sms": 1, "extras": "blocks"}
    cases[f"gemm/few/{E4M3}/107x56/blocks"] = partial(gemm_case, rows=107, shape=(56, 288), **how)

    # Tiles whose depth the blocks of a pair share, behind full waves or not.
    for dtype, extras, columns, sms, rows, n, k in (
        (E4M3, True, 128, 16, 400, 200, 6144), (E4M3, True, 176, 8, 700, 264, 4096),
        (E4M3, True, 256, 4, 513, 200, 3056), (E4M3, "blocks", 128, 10, 776, 264, 4096),
        (E4M3, "blocks", 256, 4, 513, 200, 3056),
        ("bfloat16", True, 128, 16, 300, 200, 3072), ("bfloat16", True, 192, 8, 700, 376, 1024),
        ("bfloat16", True, 256, 4, 1030, 200, 1528),
    ):  # fmt: skip
        name = f"gemm/shared/{dtype}/{columns}"
        cases[name + "/blocks" * (extras == "blocks")] = partial(
            gemm_case, dtypes=(dtype, dtype), out_dtype="bfloat16", precision="ieee", sizes=(), offset=0, rows=rows,
            shape=(n, k), extras=extras, num_sms=sms,
        )  # fmt: skip
        if extras is True:
            cases[f"{name}/added"] = partial(sums_case, dtype=dtype, shape=(rows, n, k), num_sms=sms)

    for rows, num_sms in ((500, 8), (600, 4)):
        cases[f"gemm/large/bfloat16/narrow/{rows}"] = partial(
            gemm_case,
            dtypes=("bfloat16", "bfloat16"),
            out_dtype="bfloat16",
            precision="ieee",
            sizes=(),
            offset=0,
            rows=rows,
            shape=(200, 4112),
            extras=True,
            num_sms=num_sms,
        )

    # More of them, in two rows of tiles; by pairs that share K; and cut evenly by the kernel for groups of some rows.
    for dtype, extras in ((E4M3, True), (E4M3, "blocks"), ("bfloat16", True)):
        common = {"dtypes": (dtype, dtype), "precision": "ieee", "sizes": (), "offset": 0, "extras": extras}
        for name, rows, shape, num_sms in (("tiles", 200, (200, 528), None), ("shared", 200, (200, 2064), None),
                                           ("pairs", 100, (248, 4112), 4), ("pairs/tiles", 200, (248, 4112), 8),
                                           ("even", 300, (520, 1040), 4)):  # fmt: skip
            for out_dtype in ("float32", "bfloat16"):
                how = common | {"rows": rows, "shape": shape, "num_sms": num_sms, "out_dtype": out_dtype}
                cases[f"gemm/dense/{dtype}/{name}/{out_dtype}" + "/blocks" * (extras == "blocks")] = partial(
                    gemm_case, **how
                )

    for layout in ("batched", "m_grouped_contiguous", "m_grouped_masked", "n_grouped", "k_grouped", "segments"):
        for dtype in (E4M3, "bfloat16", "float32"):
            for epilogue in (False, True):
                name = f"gemm/{layout}/{dtype}{'/epilogue' * epilogue}"
                common = {"layout": layout, "dtype": dtype, "out_dtype": "float32", "epilogue": epilogue}
                cases[name] = partial(layout_case, shape=(150, 72, 272), **common)
                if not epilogue and dtype != "float32":  # few multiprocessors take large tiles and more than one each
                    cases[f"{name}/large"] = partial(layout_case, shape=(450, 520, 272), num_sms=2, **common)
                if not epilogue:
                    cases[f"{name}/columns"] = partial(layout_case, shape=(150, 72, 272), columns="ab", **common)

    # What is read as it lies, a row-major B and A in columns beside it, by every kernel and tile that does so: such
    # shapes are faster that way on a device of 2, 8 or 132 multiprocessors.
    common = {"dtypes": ("bfloat16", "bfloat16"), "precision": "ieee", "offset": 0}
    sums = {"dtype": "bfloat16", "out_dtype": "float32", "epilogue": False}
    for tile, num_sms, (m, n, k) in (("128x128", 1, (264, 112, 144)), ("128x192", 1, (264, 176, 144)),
                                     ("128x256", 1, (784, 240, 272)), ("256x128/shared", 4, (2064, 112, 2048)),
                                     ("256x256", 2, (2064, 240, 2048)), ("256x256/shared", 4, (2064, 240, 2048)),
                                     ("few/8x128", 1, (1, 208, 144)), ("few/24x64/shared", 8, (20, 208, 1040)),
                                     ("few/64x128", 1, (64, 208, 272)), ("few/128x64", 2, (116, 144, 272)),
                                     ("few/80x64/shared", 2, (75, 56, 392)), ("few/208x64", 2, (203, 72, 136)),
                                     ("few/192x128", 2, (187, 200, 264)),
                                     ("some/160", 2, (300, 208, 1552))):  # fmt: skip
        how = common | {"num_sms": num_sms, "columns": "b", "sizes": (), "rows": m, "shape": (n, k)}
        name = f"gemm/row_major/{tile}"
        cases[name] = partial(lying_case, case=gemm_case, out_dtype="bfloat16", extras=False, **how)
        cases[f"{name}/scales"] = partial(lying_case, case=gemm_case, out_dtype="float32", extras=True, **how)
        if not tile.startswith(("few", "some")):
            how = sums | {"layout": "dense", "shape": (m, n, k), "num_sms": num_sms, "columns": "ab"}
            cases[f"{name}/ab"] = partial(lying_case, case=layout_case, **how)
    for columns in ("b", "ab"):
        for num_sms, shape in ((1, (264, 112, 144)), (1, (264, 176, 144)), (2, (784, 128, 1040))):
            cases[f"gemm/row_major/added/{columns}/{shape[1]}x{shape[2]}"] = partial(
                lying_case, case=sums_case, dtype="bfloat16", shape=shape, num_sms=num_sms, columns=columns
            )
    for name, sizes, shape, num_sms in (("128", (130, 0, 97, 261), (80, 144), 1),
                                        ("192", (130, 0, 97, 261), (144, 144), 1),
                                        ("pairs/128", (520, 0, 777, 261), (80, 2056), 2),
                                        ("pairs/256", (520, 0, 777, 261), (400, 1032), 2),
                                        ("few", (1, 0, 7, 30), (208, 272), 1),
                                        ("some/96", (1, 0, 7, 64), (336, 272), 2),
                                        ("some/160", (130, 101), (208, 1040), 2),
                                        ("some/192", (146, 0, 265), (208, 272), 6),
                                        ("some/256", (200, 129), (208, 1040), 4)):  # fmt: skip
        how = common | {"sizes": sizes, "shape": shape, "num_sms": num_sms, "columns": "b", "extras": False}
        cases[f"gemm/row_major/groups/{name}"] = partial(lying_case, case=gemm_case, out_dtype="bfloat16", **how)
    for layout, columns, num_sms, shape in (
        ("m_grouped_contiguous", "b", 1, (640, 144, 144)), ("m_grouped_contiguous", "b", 2, (640, 208, 2048)),
        ("m_grouped_masked", "b", 1, (264, 208, 1040)), ("m_grouped_masked", "b", 2, (520, 400, 2048)),
        ("batched", "ab", 1, (264, 80, 144)), ("batched", "ab", 8, (520, 80, 2056)),
        ("k_grouped", "ab", 1, (264, 208, 528)), ("k_grouped", "ab", 2, (200, 400, 1060)),
    ):  # fmt: skip
        how = sums | {"layout": layout, "shape": shape, "num_sms": num_sms, "columns": columns}
        cases[f"gemm/row_major/{layout}/{num_sms}"] = partial(lying_case, case=layout_case, **how)

    for dtype in (E4M3, "bfloat16"):
        for out_dtype, activation in (("bfloat16", None), ("float16", "gelu"), ("bfloat16", "swiglu"), (E4M3, "silu"),
                                      (E5M2, "swiglu")):  # fmt: skip
            for place, shape in (("few", (570, 416, 272)), ("deep", (500, 224, 2064))):
                cases[f"gemm/outputs/{dtype}/{out_dtype}-{activation}/{place}"] = partial(
                    outputs_case, dtype=dtype, out_dtype=out_dtype, activation=activation, shape=shape, num_sms=2
                )

    for name, (dtype, out_dtype, scales, bias, activation) in ENDS.items():
        how = {"dtype": dtype, "out_dtype": out_dtype, "activation": activation, "scales": scales, "bias": bias}
        few, deep, most = (elements(k_bytes, dtype) for k_bytes in (400, 2064, 4112))
        cases[f"gemm/ends/{name}"] = partial(outputs_case, shape=(260, 480, few), num_sms=1, **how)
        cases[f"gemm/ends/{name}/pairs"] = partial(outputs_case, shape=(400, 480, most), num_sms=2, **how)
        cases[f"gemm/ends/{name}/groups"] = partial(
            check_grouped_output, layout="m_grouped", sizes=[48, 127, 176, 0, 130], n=480, k=deep, sms=1,
            fence=False, **how,
        )  # fmt: skip

    for dtype in (E4M3, "bfloat16"):
        cases[f"gemm/staggered/{dtype}"] = partial(sums_case, dtype=dtype, shape=(1100, 1050, 528), num_sms=8)
        few, deep = (elements(k_bytes, dtype) for k_bytes in (544, 2064))
        cases[f"gemm/added/{dtype}"] = partial(sums_case, dtype=dtype, shape=(700, 392, few), num_sms=1)
        cases[f"gemm/added/{dtype}/pairs"] = partial(sums_case, dtype=dtype, shape=(700, 640, deep), num_sms=2)

    for source in ("float32", "float16", "bfloat16"):
        for dtype in (E4M3, E5M2):
            for granularity in ("tensor", "row", "1x128", "128x128"):
                for given in (False, True):
                    name = f"quantize/{source}/{dtype}/{granularity}/{'given' if given else 'computed'}"
                    cases[name] = partial(
                        quantize_case,
                        source=source,
                        dtype=dtype,
                        granularity=granularity,
                        given=given,
                        offset=int(given),
                    )
        for granularity in ("tensor", "row", "128x128"):
            for given in (False, True):
                name = f"quantize/{source}/columns/{granularity}/{'given' if given else 'computed'}"
                how = {"dtype": E4M3, "granularity": granularity, "given": given, "offset": int(given)}
                cases[name] = partial(quantize_case, source=source, columns=True, **how)
    return cases


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="keep the cases whose name contains one of these")
    parser.add_argument("--part", nargs=2, type=int, default=(0, 1), metavar=("I", "N"), help="every N-th, from I on")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args()
    named = [
        (name, case)
        for name, case in all_cases().items()
        if not options.names or any(part in name for part in options.names)
    ]
    cases = dict(named[options.part[0] :: options.part[1]])
    if options.list:
        print("\n".join(cases))
        return 0
    if not cases:
        print(f"no case matches {' '.join(options.names)}", file=sys.stderr)
        return 1
    if options.device == "cuda" and _C.device_count() == 0:
        print("no CUDA device", file=sys.stderr)
        return 1
    backend, failed = {"cpu": Host, "cuda": Cuda}[options.device](), []
    for name, case in cases.items():
        print(name, end=" ", flush=True)  # the last one is where the tool was, if it never came back
        start = time.monotonic()
        try:
            case(backend)
        except Exception:
            failed.append(name)
            print(f"FAILED\n{traceback.format_exc()}", flush=True)
        print(f"{time.monotonic() - start:.1f} s", flush=True)
    print(f"{len(cases) - len(failed)} of {len(cases)} cases right on {options.device}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
