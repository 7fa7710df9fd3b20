"""What operations ask of arrays that belong together: counts and maxima of pooling, orders, maps, weights."""

from __future__ import annotations

import numpy as np
import pytest
from calls import call, zeros

import flexgemm
from flexgemm import _C

INT32 = {"dtype": np.int32}
FAULTS = [
    ("group_reduce", {"starts": zeros(3, **INT32)}, "starts: expected more entries than out has rows"),
    ("group_reduce", {"order": zeros(9, **INT32), "weights": zeros(9)}, "order: expected .* as many for each row"),
    ("group_reduce", {"argmax": zeros(3, 6, **INT32), "mode": "sum"}, "argmax: expected None with a mode other"),
    ("pool", {"count": zeros(5, **INT32)}, "count: .* to match out"),
    ("pool", {"mode": "sum"}, "argmax: expected None unless mode is 'max'"),
    ("pool_backward", {"argmax": None}, "argmax: expected what pool told, got None"),
    ("pool_backward", {"argmax": None, "count": None, "mode": "mean"}, "count: expected what pool told, got None"),
    ("conv_wgrad", {"map": zeros(0, 5, **INT32), "grad_weight": None}, r"map: expected \(V, N\) with V of 1 to 343"),
    ("depthwise_forward", {"weight": zeros(0, 1, 3, 1, 1), "bias": None, "out": zeros(4, 0)}, "out: .* multiple of"),
]


@pytest.mark.parametrize("operation, changes, message", FAULTS)
def test_faults_are_named(backend, operation, changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(backend, operation, **changes)


def test_channels_of_no_rows_are_as_many_as_they_like():
    """Counted in bytes they are more than an int64 holds."""
    co = 2**58
    arrays = np.empty((0, co), np.float16), np.empty((0, 0), np.float16), zeros(1, 0, **INT32)
    assert _C.conv_wgrad_workspace(*arrays, np.empty((co, 1, 0), np.float16), None) >= 0


def test_rows_without_columns_are_not_counted():
    assert flexgemm.quantize(np.empty((2**45, 0), np.float32))[1] == 1


class Faulty:
    """An int whose value cannot be had."""

    def __index__(self):
        raise ValueError("bad")


def test_numbers_that_cannot_be_read_are_named():
    x, coords = zeros(1, 8), np.zeros((1, 4), np.int32)
    nmap = flexgemm.neighbor_map(coords, (1, 4, 4, 4))
    for value in (np.array(None), np.array(1j)):
        with pytest.raises(TypeError, match="^alpha: expected a float, got ndarray$"):
            flexgemm.gemm_nt(x, x, alpha=value)
    with pytest.raises(ValueError, match="^kernel_size: bad$"):
        flexgemm.neighbor_map(coords, (1, 4, 4, 4), Faulty())
    with pytest.raises(ValueError, match="^dilation: bad$"):
        flexgemm.neighbor_map(coords, (1, 4, 4, 4), 3, (1, Faulty(), 1))
    with pytest.raises(ValueError, match="^capacity: bad$"):
        flexgemm.HashTable(Faulty(), like=coords)
    with pytest.raises(ValueError, match="^groups: bad$"):
        weight = zeros(8, 3, 3, 3, 8)
        flexgemm.submanifold_conv3d_backward(x, x, weight, neighbor_map=nmap, groups=Faulty())
