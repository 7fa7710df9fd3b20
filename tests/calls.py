"""A legal call of every operation of the extension, for tests that change one thing about it; and processes of their
own for tests that need one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from flexgemm import _C

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


# A legal call of each operation: 5 rows, 6 -> 4 channels, kernel (1, 3, 1); product 5 x 8 by 7 x 8, 2 groups.
LEGAL = {
    "neighbor_map": lambda: {
        "coords": np.array([[0, 0, y, 0] for y in range(5)], np.int32),
        "map": zeros(3, 5, dtype=np.int32),
        "shape": (1, 1, 5, 1),
        "kernel_size": (1, 3, 1),
        "dilation": (1, 1, 1),
    },
    "sparse_map": lambda: {
        "coords": np.array([[0, 0, y, 0] for y in range(5)], np.int32),
        "map": zeros(3, 2, dtype=np.int32),
        "queries": np.array([[0, 0, y, 0] for y in range(2)], np.int32),
        "shape": (1, 1, 5, 1),
        "query_shape": (1, 1, 2, 1),
        "kernel_size": (1, 3, 1),
        "stride": (1, 2, 1),
        "padding": (0, 0, 0),
        "dilation": (1, 1, 1),
    },
    "conv_sites": lambda: {
        "coords": np.array([[0, 0, y, 0] for y in range(5)], np.int32),
        "code": zeros(10, dtype=np.int64),
        "count": zeros(1, dtype=np.int64),
        "shape": (1, 1, 5, 1),
        "out_shape": (1, 1, 2, 1),
        "code_shape": (1, 1, 2, 1),
        "mode": "bxyz",
        "kernel_size": (1, 3, 1),
        "stride": (1, 2, 1),
        "padding": (0, 0, 0),
        "dilation": (1, 1, 1),
    },
    "row_order": lambda: {
        "map": zeros(3, 5, dtype=np.int32),
        "order": zeros(1, 5, dtype=np.int32),
        "kernel_size": (1, 3, 1),
    },
    "ordered_map": lambda: {
        "map": zeros(3, 5, dtype=np.int32),
        "order": zeros(1, 5, dtype=np.int32),
        "out": zeros(4, 5, dtype=np.int32),
    },
    "segment_map": lambda: {
        "map": zeros(3, 5, dtype=np.int32),
        "order": np.arange(5, dtype=np.int32),
        "segments": zeros(1, 1256, dtype=np.int32),
        "kernel_size": (1, 3, 1),
        "tiles": 2,
        "in_rows": 5,
    },
    "encode_seq": lambda: {
        "coords": np.array([[0, 0, y, 0] for y in range(5)], np.int32),
        "code": zeros(5, dtype=np.int32),
        "shape": (1, 1, 5, 1),
    },
    "decode_seq": lambda: {
        "code": np.array([0, 2, 16, 18, 128], np.int32),
        "coords": zeros(5, 4, dtype=np.int32),
        "shape": (1, 1, 5, 1),
    },
    "sort_keys": lambda: {
        "keys": np.array([3, 1, 4, 1, 5], np.int32),
        "order": zeros(5, dtype=np.int32),
        "sorted": zeros(5, dtype=np.int32),
        "bits": 3,
    },
    "hash_insert": lambda: {
        "keys": np.arange(5),
        "values": np.arange(5, dtype=np.int32),
        "table_keys": np.full(12, -1),
        "table_values": np.full(12, -1, np.int32),
        "state": zeros(2, dtype=np.int64),
    },
    "hash_lookup": lambda: {
        "keys": np.arange(5),
        "table_keys": np.full(12, -1),
        "table_values": np.full(12, -1, np.int32),
        "state": zeros(2, dtype=np.int64),
        "out": zeros(5, dtype=np.int32),
    },
    "sample_map": lambda: {
        "grid": zeros(1, 5, 3),
        "coords": zeros(1, 4, dtype=np.int32),
        "indices": zeros(5, 8, dtype=np.int32),
        "weights": zeros(5, 8),
        "shape": (1, 2, 3, 4),
    },
    "sample_forward": lambda: {
        "grid": zeros(1, 5, 3),
        "coords": zeros(1, 4, dtype=np.int32),
        "feats": zeros(1, 6),
        "out": zeros(5, 6),
        "shape": (1, 2, 3, 4),
    },
    "sample_grad": lambda: {
        "grad_out": zeros(5, 6),
        "feats": zeros(3, 6),
        "grid": zeros(1, 5, 3),
        "indices": zeros(5, 8, dtype=np.int32),
        "grad_grid": zeros(1, 5, 3),
    },
    "gather_sum": lambda: {
        "feats": zeros(3, 6),
        "indices": zeros(5, 8, dtype=np.int32),
        "weights": zeros(5, 8),
        "out": zeros(5, 6),
    },
    "group_rows": lambda: {
        "indices": zeros(5, 8, dtype=np.int32),
        "order": zeros(40, dtype=np.int32),
        "starts": zeros(4, dtype=np.int32),
    },
    "group_reduce": lambda: {
        "src": zeros(5, 6),
        "order": np.arange(10, dtype=np.int32),
        "starts": np.array([0, 3, 3, 10], np.int32),
        "weights": zeros(10),
        "out": zeros(3, 6),
        "argmax": None,
    },
    "voxel_codes": lambda: {
        "points": zeros(5, 3),
        "code": zeros(5, dtype=np.int32),
        "places": zeros(5, 4),
        "voxel_size": (0.5, 0.5, 1.0),
        "origin": (0, 0, 0),
        "shape": (1, 2, 3, 4),
    },
    "unique_ranks": lambda: {
        "sorted": np.array([0, 0, 3, 3, -1]),
        "ranks": zeros(5, dtype=np.int32),
        "count": zeros(1, dtype=np.int32),
    },
    "unique_groups": lambda: {
        "sorted": np.array([0, 0, 3, 3, -1]),
        "order": np.array([1, 2, 0, 4, 3], np.int32),
        "ranks": np.array([1, 1, 2, 2, 2], np.int32),
        "keys": zeros(2, dtype=np.int64),
        "starts": zeros(3, dtype=np.int32),
        "first": zeros(2, dtype=np.int32),
        "counts": zeros(2, dtype=np.int32),
        "inverse": zeros(5, dtype=np.int32),
    },
    "conv_forward": lambda: {
        "feats": zeros(5, 6),
        "weight": zeros(4, 1, 3, 1, 6),
        "bias": zeros(4),
        "map": zeros(3, 5, dtype=np.int32),
        "out": zeros(5, 4),
    },
    "conv_dgrad": lambda: {
        "grad_out": zeros(5, 4),
        "weight": zeros(4, 1, 3, 1, 6),
        "map": zeros(3, 5, dtype=np.int32),
        "grad_feats": zeros(5, 6),
    },
    "conv_wgrad": lambda: {
        "grad_out": zeros(5, 4),
        "feats": zeros(5, 6),
        "map": zeros(3, 5, dtype=np.int32),
        "grad_weight": zeros(4, 1, 3, 1, 6),
        "grad_bias": zeros(4),
    },
    "depthwise_forward": lambda: {
        "feats": zeros(5, 6),
        "weight": zeros(12, 1, 3, 1, 1),
        "bias": zeros(12),
        "map": zeros(3, 4, dtype=np.int32),
        "out": zeros(4, 12),
    },
    "depthwise_dgrad": lambda: {
        "grad_out": zeros(4, 12),
        "weight": zeros(12, 1, 3, 1, 1),
        "map": zeros(3, 5, dtype=np.int32),
        "grad_feats": zeros(5, 6),
    },
    "depthwise_wgrad": lambda: {
        "grad_out": zeros(4, 12),
        "feats": zeros(5, 6),
        "map": zeros(3, 4, dtype=np.int32),
        "grad_weight": zeros(12, 1, 3, 1, 1),
    },
    "pool": lambda: {
        "feats": zeros(5, 6),
        "map": zeros(3, 4, dtype=np.int32),
        "out": zeros(4, 6),
        "argmax": zeros(4, 6, dtype=np.int32),
        "count": zeros(4, dtype=np.int32),
        "mode": "max",
    },
    "pool_backward": lambda: {
        "grad_out": zeros(4, 6),
        "map": zeros(3, 5, dtype=np.int32),
        "grad_feats": zeros(5, 6),
        "argmax": zeros(4, 6, dtype=np.int32),
        "count": zeros(4, dtype=np.int32),
        "mode": "max",
    },
    "batch_indices": lambda: {
        "coords": zeros(5, 4, dtype=np.int32),
        "batch": zeros(5, 1, dtype=np.int32),
        "samples": 2,
    },
    "gemm": lambda: {"a": zeros(5, 8), "b": zeros(7, 8), "out": zeros(5, 7)},
    "grouped": lambda: {
        "a": zeros(5, 8),
        "b": zeros(2, 7, 8),
        "out": zeros(5, 7),
        "offsets": np.array([2, 5], np.int32),
    },
    "contiguous": lambda: {
        "a": zeros(5, 8),
        "b": zeros(2, 7, 8),
        "out": zeros(5, 7),
        "m_indices": np.array([1, 1, 1, -1, -1], np.int32),
        "layout": "m_grouped_contiguous",
    },
    "masked": lambda: {
        "a": zeros(2, 5, 8),
        "b": zeros(2, 7, 8),
        "out": zeros(2, 5, 7),
        "masked_m": np.array([3, 5], np.int32),
        "layout": "m_grouped_masked",
    },
    "n_grouped": lambda: {
        "a": zeros(2, 5, 8),
        "b": zeros(7, 8),
        "out": zeros(5, 7),
        "offsets": np.array([3, 7], np.int32),
        "layout": "n_grouped",
    },
    "k_grouped": lambda: {
        "a": zeros(5, 8),
        "b": zeros(7, 8),
        "out": zeros(2, 5, 7),
        "offsets": np.array([3, 8], np.int32),
        "layout": "k_grouped",
        "accumulate": True,
    },
    "quantize": lambda: {"x": zeros(5, 8), "q": zeros(5, 8, dtype=E4M3), "scale": zeros(5)},
}
OPERATIONS = sorted(LEGAL)
# Of which something is asked: arrays of several numbers.
ARRAYS = [
    (operation, name)
    for operation in OPERATIONS
    for name, value in LEGAL[operation]().items()
    if isinstance(value, np.ndarray) and value.size > 1
]


PRODUCTS = ("gemm", "grouped", "contiguous", "masked", "n_grouped", "k_grouped")


def functions(operation):
    name = "gemm" if operation in PRODUCTS else {"sparse_map": "neighbor_map"}.get(operation, operation)
    return getattr(_C, name), getattr(_C, name + "_workspace")


def place(backend, arguments):
    """The arguments with their NumPy arrays put on the backend."""
    return {n: backend.array(v) if isinstance(v, np.ndarray) else v for n, v in arguments.items()}


def call(backend, operation, placed=None, **changes):
    """The legal call with some arguments changed; `placed` are arrays that are on the backend already."""
    run, workspace_bytes = functions(operation)
    arguments = place(backend, LEGAL[operation]() | changes) | (placed or {})
    nbytes = workspace_bytes(**arguments)
    assert run(**arguments, workspace=backend.array(zeros(nbytes, dtype=np.uint8)) if nbytes else None) == 0


def call_on_host(operation, **changes):
    """The same with the arrays passed as they are."""
    run, workspace_bytes = functions(operation)
    arguments = LEGAL[operation]() | changes
    run(**arguments, workspace=zeros(workspace_bytes(**arguments), dtype=np.uint8))


class Stream:
    def __init__(self, value):
        self.value = value

    def __cuda_stream__(self):
        return self.value


def second_module():
    """Another module object of the extension, with state of its own."""
    spec = importlib.util.spec_from_file_location("flexgemm._C", _C.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_python(arguments, **environment):
    """Another process of this interpreter, in the folder of the tests and with the package of this tree."""
    here = Path(__file__).parent
    path = os.pathsep.join(filter(None, (str(here.parent), os.environ.get("PYTHONPATH"))))  # a build in place will do
    environment = os.environ | {"PYTHONPATH": path} | environment
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=300, check=False)
