"""The CPU backend beyond the machine's defaults: every instruction set and any number of threads."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from calls import run_python

CASES = ["map", "odd", "quantize"]  # odd: products and convolutions whose sizes no vector divides


def instruction_sets():
    """Those that FLEXGEMM_CPU_ISA takes on this processor."""
    flags = Path("/proc/cpuinfo").read_text().split() if platform.system() == "Linux" else []
    needed = {"scalar": [], "avx2": ["avx2", "fma"], "avx512": ["avx512f", "avx512bw", "avx512dq", "avx512vl"]}
    return [name for name, wanted in needed.items() if all(flag in flags for flag in wanted)]


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("isa", instruction_sets())
def test_every_instruction_set_is_right(isa, cases):
    done = run_python(["sanitize_cases.py", "--device", "cpu", cases], FLEXGEMM_CPU_ISA=isa)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unknown_instruction_set_is_named():
    case = "conv/forward/float32/odd/plain"
    done = run_python(["sanitize_cases.py", "--device", "cpu", case], FLEXGEMM_CPU_ISA="mmx")
    assert done.returncode == 1
    assert "FLEXGEMM_CPU_ISA" in done.stdout
    assert "'mmx'" in done.stdout


DIGEST = """
import hashlib, numpy as np, guarded, reference, scenes
from memory import Host
cpu, rng, digest = Host(), np.random.default_rng(0), hashlib.sha256()
coords, shape = scenes.scene(5000)
nmap = guarded.neighbor_map(cpu, np.concatenate([coords, coords[::2]]), shape, (3, 3, 3))
results = [nmap]
for dtype in ("float32", "float16"):
    draw = (7500, 33), (40, 27, 33), (40,), (7500, 40)
    feats, weight, bias, grad_out = (scenes.values(rng, s, dtype) for s in draw)
    results.append(guarded.conv_forward(cpu, feats, weight, bias, nmap))
    results.append(guarded.conv_dgrad(cpu, grad_out, weight, nmap, mirrored=True))
    results.extend(guarded.conv_wgrad(cpu, grad_out, feats, nmap))
a, b = (scenes.values(rng, s, "float8_e4m3fn") for s in ((300, 600), (3, 300, 600)))
results.append(guarded.gemm(cpu, a, b, "float32", offsets=np.array([7, 200, 300])))
results.append(guarded.gemm(cpu, a, b[0], "bfloat16"))
results.extend(guarded.quantize(cpu, feats, "float8_e4m3fn", "tensor"))
for array in results:
    digest.update(np.ascontiguousarray(array).view(np.uint8))
print(digest.hexdigest())
"""


def test_threads_change_no_bit():
    digests = set()
    for threads in ("1", "2", "5"):
        done = run_python(["-c", DIGEST], OMP_NUM_THREADS=threads)
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1


FLUSHED = """
import hashlib, itertools, json, sys
import numpy as np, torch, flexgemm

SHAPE = 1, 16, 16, 16
coords = np.array([(0, *xyz) for xyz in itertools.product(range(16), repeat=3)], np.int32)
rng = np.random.default_rng(0)
def draw(*shape):
    return rng.uniform(1, 2, shape).astype(np.float32)
usual, small, weight, depthwise = draw(4096, 16), draw(4096, 16), draw(16, 3, 3, 3, 16), draw(16, 3, 3, 3, 1)
small *= np.float32(1e-40)  # denormal
gated = np.where(np.arange(16) % 2, small, usual)
gated[-1] *= 2  # the largest, which the last thread sees
points = np.resize(usual, (4096, 3))
near = points * np.float32(1e-39)  # denormal, too: on both sides of a boundary of voxels
large = torch.from_numpy(np.resize(small, 1 << 22))

def results():
    nmap = flexgemm.neighbor_map(coords, SHAPE, 3)
    pooled = flexgemm.sparse_conv_map(coords, SHAPE, 2, 2)
    samples = flexgemm.sample_map(coords, SHAPE, points[None])
    how = {"voxel_size": 1.2e-38, "origin": -0.9, "shape": (1, 2, 2, 2), "reduce": "sum"}
    voxels = flexgemm.voxelize(near, small, **how)
    return {
        "product": [flexgemm.gemm_nt(small, weight[:, 0, 0, 0])],
        "quantize": [*flexgemm.quantize(gated, swiglu=True), *flexgemm.quantize(small, granularity="row")],
        "convolution": [flexgemm.submanifold_conv3d(small, weight, neighbor_map=nmap)],
        "gradients": flexgemm.submanifold_conv3d_backward(small, usual, weight, neighbor_map=nmap),
        "depthwise": [flexgemm.submanifold_conv3d(small, depthwise, neighbor_map=nmap, groups=16)],
        "depthwise gradients":
            flexgemm.submanifold_conv3d_backward(small, usual, depthwise, neighbor_map=nmap, groups=16),
        "pool": [flexgemm.sparse_pool3d(small, neighbor_map=pooled, mode="mean")],
        "pool gradient": [flexgemm.sparse_pool3d_backward(small[:512], usual, neighbor_map=pooled, mode="mean")],
        "samples": [flexgemm.grid_sample_3d(small, sample_map=samples)],
        "samples without a map": [flexgemm.grid_sample_3d(small, coords, SHAPE, points[None])],
        "sample gradients": flexgemm.grid_sample_3d_backward(small[None], usual, sample_map=samples),
        "voxels": [voxels.coords, voxels.feats],
    }

if "before" in sys.argv:
    results()
if "flush" in sys.argv:
    torch.set_flush_denormal(True)
    kept = torch.count_nonzero(large * 1)
digests = {
    name: [hashlib.sha256(np.ascontiguousarray(x).view(np.uint8)).hexdigest() for x in arrays]
    for name, arrays in results().items()
}
if "flush" in sys.argv:
    assert torch.count_nonzero(large * 1) == kept < len(large)  # threads have the settings that they had
print(json.dumps(digests))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch flushes denormals on x86 alone")
@pytest.mark.parametrize("first", ["flexgemm", "torch"])
def test_denormals_are_kept_where_torch_flushes_them(first):
    """Whichever of the two starts the threads of OpenMP, which they share."""
    pytest.importorskip("torch", reason="torch not installed")
    usual, flushed = ["-c", FLUSHED], ["-c", FLUSHED, "flush", *(["before"] if first == "flexgemm" else [])]
    for threads in ("1", "4"):
        done = [run_python(arguments, OMP_NUM_THREADS=threads) for arguments in (usual, flushed)]
        assert [x.returncode for x in done] == [0, 0], done[1].stderr
        assert json.loads(done[1].stdout) == json.loads(done[0].stdout)


FORK = """
import os, signal, sys
import numpy as np
import flexgemm

a = np.ones((300, 300), np.float32)
expected = flexgemm.gemm_nt(a, a)
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends what waits for threads that it does not have
    os._exit(not np.array_equal(flexgemm.gemm_nt(a, a), expected))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_forked_processes_go_on():
    """As multiprocessing makes them; the threads of the parent are not among what they have of it."""
    done = run_python(["-c", FORK], OMP_NUM_THREADS="4")
    assert done.returncode == 0, done.stderr


WRITTEN_MEANWHILE = """
import os, sys, threading, time
import numpy as np
import flexgemm

kind, wrong = sys.argv[1], int(sys.argv[2])
rng = np.random.default_rng(0)
a, b = rng.standard_normal((2048, 64), np.float32), rng.standard_normal((16, 64, 64), np.float32)
if kind == "contiguous":
    product, groups = flexgemm.m_grouped_gemm_nt_contiguous, np.repeat(np.arange(16), 128).astype(np.int32)
else:
    product, groups = flexgemm.m_grouped_gemm_nt, np.arange(1, 17) * 128
one, other = groups.copy(), groups.copy()
if wrong:
    other[7] = wrong
elif kind == "contiguous":
    other[128:256] = one[:128]
else:
    other[1::2] = one[0::2]

def write():
    while True:
        groups[:] = other
        groups[:] = one

threading.Thread(target=write, daemon=True).start()
end = time.monotonic() + 2
while time.monotonic() < end:
    try:
        product(a, b, groups)
    except ValueError:
        pass
os._exit(0)
"""


@pytest.mark.parametrize("wrong", [0, -5, 10**7])
@pytest.mark.parametrize("kind", ["contiguous", "ragged"])
def test_groups_that_another_thread_writes_meanwhile_do_no_harm(kind, wrong):
    """Threads that saw different groups would wait for each other for ever; what was checked may be another by then."""
    done = run_python(["-c", WRITTEN_MEANWHILE, kind, str(wrong)], OMP_NUM_THREADS="4")
    assert done.returncode == 0, done.stderr


SPECIAL = """
import numpy as np
import flexgemm
one = np.ones((8, 1), np.float32)
a = np.array([[1e30], [-1e30], [np.inf], [np.nan], [65504], [65519], [65520], [2**-24], [2**-25]], np.float32)
with np.errstate(over="ignore"):
    expected = a.astype(np.float16)
out = flexgemm.gemm_nt(a, one, out_dtype="float16")
np.testing.assert_array_equal(out, np.broadcast_to(expected, (9, 8)))
back = flexgemm.gemm_nt(expected, one.astype(np.float16), out_dtype="float32")
np.testing.assert_array_equal(back, np.broadcast_to(expected.astype(np.float32), (9, 8)))
"""


@pytest.mark.parametrize("isa", instruction_sets())
def test_float16_overflows_to_infinity_and_keeps_nan(isa):
    done = run_python(["-c", SPECIAL], FLEXGEMM_CPU_ISA=isa)
    assert done.returncode == 0, done.stdout + done.stderr


BEHIND = """
import ctypes, mmap
import numpy as np
from flexgemm import _C
page, rows, ci = mmap.PAGESIZE, 8, 3
memory = mmap.mmap(-1, 2 * page)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
feats = np.frombuffer(memory, np.float32, rows * ci, page - 4 * rows * ci).reshape(rows, ci)
feats[:] = 1
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + page), page, 0) == 0
weight = np.zeros((5, 1, ci), np.float32)
arguments = np.ones((rows, 5), np.float32), feats, np.arange(rows, dtype=np.int32)[None], weight, None
_C.conv_wgrad(*arguments, workspace=np.empty(_C.conv_wgrad_workspace(*arguments), np.uint8))
assert (weight == rows).all()
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="memory is protected by a call of Linux")
def test_nothing_is_read_behind_the_last_row():
    done = run_python(["-c", BEHIND])
    assert done.returncode == 0, done.stdout + done.stderr
