"""One `backend` fixture: every test that takes it runs on the CPU and, where there is one, on the GPU.

`backend.array(numpy)` puts an array on the backend, `backend.numpy(array)` brings it back, `backend.name` is "cpu" or
"cuda" and `backend.device` is what `device=` takes. FLEXGEMM_ARCH=sm80 in the environment runs the same suite on the
portable kernels of a newer card.
"""

from __future__ import annotations

import os

import pytest
from graphs import EmulatedGraphs, TorchGraphs
from hypothesis import settings
from memory import Cuda, Host

from flexgemm import _C

# JAX would take three quarters of the card's memory on its first use.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=100)
settings.load_profile("suite")


def pytest_configure(config):
    config.addinivalue_line("markers", "large: sizes that only a GPU works through in reasonable time")
    config.addinivalue_line("markers", "gpu: tests that run on a GPU; set by what they ask for (-m gpu)")


def pytest_collection_modifyitems(items):
    for item in items:
        if "cuda" in item.nodeid or {"cuda", "cuda_device", "graphs"} & set(item.fixturenames):
            item.add_marker("gpu")


def pytest_report_header():
    info = _C.build_info()
    devices = [_C.device_info("cuda", index)["name"] for index in range(_C.device_count())]
    family = os.environ.get("FLEXGEMM_ARCH", "as the card")
    return f"flexgemm: cuda {info['cuda']}, devices {devices or 'none'}, kernels {family}"


def _cuda():
    if _C.device_count() == 0:
        pytest.skip("no CUDA device")
    return Cuda()


def _torch_device(name):
    torch = pytest.importorskip("torch", reason="torch not installed")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device, or torch without CUDA")
    return torch.device(name)


@pytest.fixture(scope="session", params=["cpu", "cuda"])
def backend(request):
    return Host() if request.param == "cpu" else _cuda()


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def device(request):
    """A device of torch's, for what takes and gives its tensors."""
    return _torch_device(request.param)


@pytest.fixture
def fresh_compiler():
    """What torch compiled for earlier tests is forgotten."""
    pytest.importorskip("torch", reason="torch not installed").compiler.reset()


@pytest.fixture
def same_sources(monkeypatch):
    """The results of benchmarks are of these sources."""
    from benchmarks import results

    monkeypatch.setattr(results, "source_sha256", lambda: "a" * 64)


@pytest.fixture(scope="session")
def cuda():
    """For behaviour that only device memory has."""
    return _cuda()


@pytest.fixture(scope="session")
def cuda_device():
    """The same of torch's tensors."""
    return _torch_device("cuda")


@pytest.fixture(scope="session", params=["direct", "hash"])
def grid_around(request):
    """A scene's grid as it is, or so wide that a GPU hashes its cells instead of giving each a place."""

    def grid(coords, shape):
        chosen = shape if request.param == "direct" else (shape[0], shape[1] + 2**18, *shape[2:])
        assert _C.plan_voxel_table(rows=len(coords), shape=chosen) == request.param
        return chosen

    return grid


@pytest.fixture(scope="session")
def graphs():
    """A backend that captures calls in CUDA graphs: by torch on a card, else by the emulator."""
    _cuda()
    if _C.build_info()["cuda"] == "emulated":
        return EmulatedGraphs()
    torch = pytest.importorskip("torch", reason="torch captures the graphs of a card")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA device")
    return TorchGraphs(torch)
