"""Any device of the host, whichever is current, and threads with streams of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from calls import LEGAL, OPERATIONS, call
from memory import Cuda
from reference import f64
from verdicts import assert_rows

import flexgemm
from flexgemm import _C

OWN_STREAM = 2  # CUDA's number for the default stream of the calling thread


class OnDevice(Cuda):
    def __init__(self, index):
        self.index = index

    def array(self, array):
        return _C.DeviceArray.from_numpy(np.ascontiguousarray(array), device=self.index)


def arguments(operation):
    """The legal call's with random numbers in its float32 arrays."""
    rng = np.random.default_rng(0)
    given = {name: value for name, value in LEGAL[operation]().items() if isinstance(value, np.ndarray)}
    random = {
        name: rng.standard_normal(value.shape, np.float32) for name, value in given.items() if value.dtype == "f4"
    }
    return given | random


def results(operation, index, **how):
    """Every array of the call after it, computed on one device."""
    backend = OnDevice(index)
    placed = {name: backend.array(value) for name, value in arguments(operation).items()}
    assert all(array.device == index for array in placed.values())
    call(backend, operation, placed, **how)
    return {name: array.numpy(stream=how.get("stream")).astype(float) for name, array in placed.items()}


def expect_as_on_the_first(operation, index, **how):
    expected, got = results(operation, 0), results(operation, index, **how)
    for name, array in got.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-5, err_msg=f"{operation}: {name}")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_second_device_while_the_first_is_current(cuda, operation):
    if _C.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    expect_as_on_the_first(operation, 1)


def test_threads_on_streams_and_devices_of_their_own(cuda):
    def work(thread):
        for operation in OPERATIONS:
            expect_as_on_the_first(operation, thread % _C.device_count(), stream=OWN_STREAM)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_memory_is_set_on_one_device_while_kernels_run_on_another(cuda):
    def work(thread):
        for _ in range(200):
            expect_as_on_the_first("sample_forward", thread % _C.device_count(), stream=OWN_STREAM)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


@pytest.mark.parametrize("rows", [16, 256])
def test_a_new_thread_begins_with_a_product(cuda, rows):
    """The driver, which is asked to describe operands to the copy engine, knows no device in a new thread."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, np.float32).astype(np.float16) for shape in ((rows, 64), (128, 64)))
    arrays = cuda.array(a), cuda.array(b), cuda.empty((rows, 128), "float32")
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(_C.gemm, *arrays).result()
    assert_rows(arrays[2].numpy(), f64(a) @ f64(b).T, 1e-5)


def test_a_network_on_the_second_device(cuda):
    """The kernels of larger sizes, which ask each device for more shared memory."""
    if _C.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    rng = np.random.default_rng(0)
    coords = np.pad(np.argwhere(rng.random((12, 12, 12)) < 0.4), ((0, 0), (1, 0))).astype(np.int32)
    feats = rng.standard_normal((len(coords), 64), np.float32).astype(np.float16)
    weight = rng.standard_normal((64, 3, 3, 3, 64), np.float32).astype(np.float16)

    def computed(device):
        nmap = flexgemm.neighbor_map(coords, (1, 12, 12, 12), device=device)
        out = flexgemm.submanifold_conv3d(feats, weight, neighbor_map=nmap)
        gradients = flexgemm.submanifold_conv3d_backward(out, feats, weight, neighbor_map=nmap)
        down = flexgemm.sparse_conv_map(coords, (1, 12, 12, 12), 2, 2, device=device)
        pooled = flexgemm.sparse_pool3d(out, neighbor_map=down)
        q, scale = flexgemm.quantize(out, granularity="row", device=device)
        product = flexgemm.gemm_nt(q, q, scale_a=scale, scale_b=scale, out_dtype="float32", device=device)
        return out, *gradients, down.out_coords, pooled, scale, product

    for first, second in zip(computed("cuda"), computed("cuda:1"), strict=True):
        np.testing.assert_array_equal(first, second)
