"""What the emulator notices (faults.cu), and every kernel path under several orders of execution.

Run by `make simt`, on the module that tests/simt/build.py builds; skipped on any other.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
import sanitize_cases

from flexgemm import _C

pytestmark = pytest.mark.skipif(_C.build_info()["cuda"] != "emulated", reason="runs on the emulator")

CASES = sanitize_cases.all_cases()
SEEDS = range(8)
WRONG_NUMBERS = None
FAULTS = {
    "block_barrier": WRONG_NUMBERS,
    "barrier_of_a_branch": r"deadlock(.|\n)*warp 0, all lanes: barrier 1 of 128 threads at .*faults.cu:\d+",
    "mbarrier_count": r"deadlock(.|\n)*mbarrier 0x\w+, phase of parity 0, which misses 1 arrivals and 0 bytes",
    "mbarrier_parity": "deadlock",
    "copy_wait": WRONG_NUMBERS,
    "tma_bytes": "deadlock(.|\n)* which misses 0 arrivals and 128 bytes",
    "tma_start": "begins at element 8 of a row, which is no multiple of 16 bytes",
    "tma_swizzle": WRONG_NUMBERS,
    "wgmma_wait": WRONG_NUMBERS,
    "wgmma_fence": "no wgmma.fence since its accumulators changed",
    "proxy_fence": "no fence.proxy.async since cp.async wrote",
    "proxy_fence_of_stores": "no fence.proxy.async since a store changed",
    "stage_reuse": "is written while it is read",
    "store_fence": "no fence.proxy.async since a store changed",
    "store_wait": "the thread ends with a TMA store under way",
    "shared_bounds": "access out of bounds of shared memory",
    "global_bounds": "access out of bounds of memory.* bytes after the begin of an allocation of 256",
    "alignment": r"misaligned access of memory at 0x\w+ .*at tests/simt/faults.cu:\d+",
    "uninitialised": WRONG_NUMBERS,
    "early_launch": "the thread ends without griddepcontrol.wait",
    "cluster_exit": "shared memory of block . of the cluster, which has ended",
    "block_copy_fence": "no fence.proxy.async since a store changed shared memory",
}


@pytest.fixture(scope="module")
def faults():
    library = ctypes.CDLL(str(Path(_C.__file__).parents[1] / "libfaults.so"))
    library.fault_name.restype = ctypes.c_char_p
    return library


def run_fault(library, name, faulty):
    """The outputs of a kernel of faults.cu, and the error or ""."""
    index = next(i for i in range(len(FAULTS)) if library.fault_name(i) == name.encode())
    out, message = np.zeros(64, np.float32), ctypes.create_string_buffer(512)
    library.fault_run(index, int(faulty), ctypes.c_void_p(out.ctypes.data), message)
    return out, message.value.decode()


@pytest.mark.parametrize("name", FAULTS)
def test_a_right_kernel_passes(faults, monkeypatch, name):
    for seed in SEEDS:
        monkeypatch.setenv("FLEXGEMM_SIMT_SEED", str(seed))
        out, message = run_fault(faults, name, faulty=False)
        assert message == ""
        np.testing.assert_array_equal(out, np.arange(64))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(faults, monkeypatch, name):
    """By some order of execution, with the message that says what is wrong."""
    messages, wrong = [], False
    for seed in SEEDS:
        monkeypatch.setenv("FLEXGEMM_SIMT_SEED", str(seed))
        out, message = run_fault(faults, name, faulty=True)
        messages.append(message)
        wrong |= not np.array_equal(out, np.arange(64))
    if FAULTS[name] is WRONG_NUMBERS:
        assert wrong and not any(messages)
    else:
        assert any(re.search(FAULTS[name], message) for message in messages), messages


@pytest.mark.parametrize("name", CASES)
def test_every_kernel_path(cuda, name):
    CASES[name](cuda)


# ---- graphs ----


def test_what_synchronises_is_refused_during_a_capture(graphs):
    coords = graphs.array(np.zeros((5, 4), np.int32))
    nmap = graphs.empty((27, 5), "int32")
    how = {"shape": (1, 1, 1, 1), "kernel_size": (3, 3, 3), "dilation": (1, 1, 1), "check": True}
    workspace = graphs.empty((_C.neighbor_map_workspace(coords, nmap, **how),), "uint8")
    with pytest.raises(RuntimeError, match="cudaStreamSynchronize.*not permitted when stream is capturing"):
        graphs.capture(lambda: _C.neighbor_map(coords, nmap, **how, workspace=workspace, stream=graphs.stream))


def test_work_on_another_stream_is_noticed_during_a_capture(graphs):
    arrays = [graphs.array(np.zeros((16, 16), np.float32)) for _ in range(3)]
    x, y, out = (graphs.window(array, (16, 16), (16, 1), 0) for array in arrays)  # which do not order the streams
    with pytest.raises(RuntimeError, match="legacy stream"):
        graphs.capture(lambda: _C.gemm(x, y, out, stream=0))


def test_a_lost_capture_leaves_no_graph(graphs):
    def synchronise_and_go_on():
        with pytest.raises(RuntimeError, match="not permitted"):
            graphs.empty((16, 16), "float32")

    with pytest.raises(RuntimeError, match="CUDA error 901"):  # cudaErrorStreamCaptureInvalidated
        graphs.capture(synchronise_and_go_on)
