"""No arguments crash the process: random calls of the extension, in a process of their own, either run or raise."""

from __future__ import annotations

import random

import ml_dtypes
import numpy as np
import pytest
from calls import LEGAL, OPERATIONS, functions, run_python

CALLS = 20_000
DTYPES = (
    np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
    np.int32, np.int64, np.uint8, np.float64, np.complex64,
)  # fmt: skip
JUNK = (
    None, 3, -1, 2**70, 1.5, float("nan"), "x", "tf32", "float8_e4m3fn", b"", True, object(), [], (0, 0, 0), (3, 3, 3),
    (1, 2**62, 5, 5), (5, 5, 5, 5),
)  # fmt: skip
KEYWORDS = (
    "stream", "workspace", "precision", "scale_a", "scale_b", "bias", "offsets", "dtype_a", "dtype_b", "shape",
    "kernel_size", "dilation", "transposed", "check", "mirrored", "scale_given", "dtype", "layout", "m_indices",
    "masked_m", "weight_indices", "b_row_major", "expected_m", "alpha", "activation", "accumulate",
    "promote_every", "dtype_out", "scale_out", "block_rows", "groups", "order_groups", "phases",
)  # fmt: skip
EXPECTED = (TypeError, ValueError, BufferError, NotImplementedError, OverflowError)


def random_array(rng):
    shape = [rng.choice([0, 1, 2, 3, 4, 5, 8, 27]) for _ in range(rng.choice([0, 1, 2, 2, 2, 3, 3, 5, 6]))]
    values = np.random.default_rng(rng.getrandbits(32)).integers(-3, 6, shape).astype(rng.choice(DTYPES))
    if values.ndim and rng.random() < 0.3:
        values = values[..., :: rng.choice([2, -1])]
    if values.ndim > 1 and rng.random() < 0.3:
        values = values.swapaxes(0, -1)
    if rng.random() < 0.1:
        values = np.broadcast_to(values, (3, *values.shape))
    if rng.random() < 0.1:
        values = values.copy()
        values.flags.writeable = False
    return values


def random_value(rng):
    return random_array(rng) if rng.random() < 0.7 else rng.choice(JUNK)


def random_call(rng):
    """A legal call with a few arguments replaced, or arguments of no sense at all."""
    operation = rng.choice(OPERATIONS)
    run, workspace_bytes = functions(operation)
    function = rng.choice([run, run, workspace_bytes])
    if rng.random() < 0.3:
        return function, [random_value(rng) for _ in range(rng.randrange(8))], {}
    arguments = LEGAL[operation]()
    for _ in range(rng.randrange(3)):
        arguments[rng.choice([*arguments, *KEYWORDS])] = random_value(rng)
    return function, [], arguments


def fuzz(seed):
    rng = random.Random(seed)
    ran = 0
    for _ in range(CALLS):
        function, positional, named = random_call(rng)
        try:
            nbytes = function(*positional, **named)
            if 0 < nbytes < 2**28 and "workspace" not in named:
                function(*positional, **named, workspace=np.empty(nbytes, np.uint8))
            ran += 1
        except EXPECTED:
            pass
    assert CALLS // 20 < ran < CALLS, f"{ran} of {CALLS} calls ran: the mix tests one side only"


@pytest.mark.parametrize("seed", range(3))
def test_random_arguments_run_or_raise(seed):
    done = run_python(["-c", f"import test_fuzz; test_fuzz.fuzz({seed})"])
    assert done.returncode == 0, done.stderr[-2000:]
