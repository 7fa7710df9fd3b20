"""FLEXGEMM_PRINT_CONFIGS: what was chosen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from calls import run_python
from products import ASKEW, DENSE, EQUAL, NARROW, ROWS, TALL, tile_of

from flexgemm import _C

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


CONVOLUTIONS = """
import numpy as np
import flexgemm
coords = np.array([[0, 0, y, 0] for y in range(5)], np.int32)
nmap = flexgemm.neighbor_map(coords, (1, 1, 5, 1), (1, 3, 1), device="cuda")
for c_in, c_out in ((128, 24), (24, 128)):
    x, grad_out = np.ones((5, c_in), np.float16), np.ones((5, c_out), np.float16)
    weight = np.ones((c_out, 1, 3, 1, c_in), np.float16)
    how = {"neighbor_map": nmap, "needs_grad": (True, False, False)}
    flexgemm.submanifold_conv3d(x, weight, neighbor_map=nmap)
    flexgemm.submanifold_conv3d_backward(grad_out, x, weight, **how)
"""


def test_input_gradients_print_the_tile_that_runs(cuda):
    """Of 24 columns the forward pass has one of 32, the gradient, whose weight is transposed, of 64."""
    lines = [line for line in printed_on_gpu(CONVOLUTIONS) if "family=sm90" in line]
    if not lines:
        pytest.skip("only Hopper's forward pass has tiles of its own")
    tiles = {line.split()[1]: re.search(r" tile=(\S+)", line)[1] for line in lines if "co=24" in line}
    assert tiles == {"conv_forward": "128x32x64", "conv_dgrad": "128x64x64"}


PHASES = """
import numpy as np
import flexgemm
shape = (1, 14, 14, 14)
coords = np.argwhere(np.ones(shape)).astype(np.int32)
nmap = flexgemm.sparse_conv_map(coords, shape, 3, 2, 1, device="cuda")
x, grad_out = np.ones((2744, 32), np.float16), np.ones((343, 32), np.float16)
weight = np.ones((32, 3, 3, 3, 32), np.float16)
flexgemm.sparse_conv3d_backward(grad_out, x, weight, neighbor_map=nmap, needs_grad=(True, False, False))
flexgemm.sparse_inverse_conv3d(grad_out, weight, neighbor_map=nmap)
"""


def test_convolutions_back_to_the_finer_grid_are_planned_by_their_phases(cuda):
    """Of rows in order a tile has an eighth of the offsets, not half: without knowing, rows are taken as they come."""
    how = {"rows": 2744, "ci": 32, "co": 32, "v": 27, "dtype": "float16"}
    how["num_sms"] = _C.device_info("cuda", 0)["num_sms"]
    lines = [line for line in printed_on_gpu(PHASES) if ": conv_" in line and " rows=2744 " in line]
    assert [line.split()[1] for line in lines] == ["conv_dgrad", "conv_forward"]
    for line, gradient in zip(lines, (True, False), strict=True):
        how |= {"gradient": gradient, "compute_capability": 90 if "family=sm90" in line else 80}
        plan = _C.plan_conv(**how, groups=(1,), phases=(2, 2, 2))
        unaware = _C.plan_conv(**how, groups=(1,))
        assert f" groups={plan['groups']} split={plan['split_k']} " in line
        if "family=sm90" in line:
            assert (plan["groups"], unaware["groups"]) == (1, 0)


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
