"""The same array library comes out that went in."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
import reference
import scenes
import verdicts
from calls import run_python
from products import E4M3, E5M2
from reference import dtype_of, f64
from verdicts import assert_gemm_rows, assert_rows, assert_same_bits

import flexgemm


class Library:
    """How an array library takes NumPy arrays in and gives them back."""

    has_fp8 = writable = True

    def __init__(self, name, device="cpu"):
        self.module = importlib.import_module(name)
        self.device = device

    def compute(self):
        """Keyword for functions that start from NumPy arrays."""
        return {}

    def require(self, dtype):
        """Skips what the installed version of the library cannot hand over itself."""


class NumPy(Library):
    def put(self, array):
        return array.copy()

    def get(self, array):
        return array

    def owns(self, array):
        return type(array) is np.ndarray

    def compute(self):
        return {"device": self.device} if self.device != "cpu" else {}


class Torch(Library):
    def put(self, array):
        torch = self.module
        if array.dtype.name.startswith(("bfloat", "float8")):  # ml_dtypes, by their bytes
            raw = torch.from_numpy(array.view(f"u{array.dtype.itemsize}").copy())
            return raw.view(getattr(torch, array.dtype.name)).to(self.device)
        return torch.from_numpy(array.copy()).to(self.device)

    def get(self, array):
        name = str(array.dtype).removeprefix("torch.")
        if name.startswith(("bfloat", "float8")):
            raw = {1: self.module.uint8, 2: self.module.int16}[array.itemsize]
            return array.view(raw).cpu().numpy().view(dtype_of(name))
        return array.cpu().numpy()

    def owns(self, array):
        return isinstance(array, self.module.Tensor) and array.device.type == self.device


class CuPy(Library):
    has_fp8 = False  # quantize gives uint8

    def require(self, dtype):
        if dtype == "bfloat16":
            try:
                self.put(np.ones(1, dtype_of(dtype))).__dlpack__()
            except Exception as error:
                pytest.skip(f"this CuPy does not export bfloat16: {error}")

    def put(self, array):
        return self.module.asarray(array)

    def get(self, array):
        return array.get()

    def owns(self, array):
        return isinstance(array, self.module.ndarray)


class Jax(Library):
    writable = False

    def put(self, array):
        jax = self.module
        return jax.device_put(array, jax.devices(self.device)[0])

    def get(self, array):
        return np.asarray(array)

    def owns(self, array):
        return isinstance(array, self.module.Array) and array.devices() == {self.module.devices(self.device)[0]}


class Own(Library):
    """DeviceArray."""

    def put(self, array):
        return flexgemm.DeviceArray.from_numpy(array)

    def get(self, array):
        return array.numpy()

    def owns(self, array):
        return isinstance(array, flexgemm.DeviceArray)


LIBRARIES = {
    "numpy": lambda: NumPy("numpy"),
    "numpy-cuda": lambda: NumPy("numpy", "cuda"),
    "torch": lambda: Torch("torch"),
    "torch-cuda": lambda: Torch("torch", "cuda"),
    "cupy-cuda": lambda: CuPy("cupy", "cuda"),
    "jax": lambda: Jax("jax"),
    "jax-cuda": lambda: Jax("jax", "cuda"),
    "own-cuda": lambda: Own("flexgemm", "cuda"),
}


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request):
    name, _, device = request.param.partition("-")
    if name not in ("numpy", "own"):
        pytest.importorskip(name, reason=f"{name} not installed")
    if device and flexgemm.device_count() == 0:
        pytest.skip("no CUDA device")
    if request.param == "torch-cuda" and not sys.modules["torch"].cuda.is_available():
        pytest.skip("torch without CUDA")
    if request.param == "jax-cuda" and not any(d.platform == "gpu" for d in sys.modules["jax"].devices()):
        pytest.skip("jax without CUDA")
    return LIBRARIES[request.param]()


class Problem:
    def __init__(self, dtype, kernel_size=(3, 3, 3)):
        rng = np.random.default_rng(0)
        self.coords, self.shape = scenes.scene(300)
        self.kernel_size = kernel_size
        self.map = reference.neighbor_map(self.coords, self.shape, kernel_size)
        self.feats, self.weight, self.bias, self.grad_out = (
            scenes.values(rng, s, dtype) for s in [(300, 33), (40, *kernel_size, 33), (40,), (300, 40)]
        )


@pytest.mark.parametrize("kernel_size", [(3, 3, 3), (2, 3, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_convolution(library, dtype, kernel_size):
    library.require(dtype)
    p = Problem(dtype, kernel_size)
    tolerance = verdicts.ROW_TOLERANCE[dtype]
    nmap = flexgemm.neighbor_map(library.put(p.coords), p.shape, kernel_size, check=True, **library.compute())
    assert library.owns(nmap.map)
    assert library.owns(nmap.transposed_map)
    np.testing.assert_array_equal(library.get(nmap.map), p.map)
    assert nmap.num_pairs == (p.map >= 0).sum()

    feats, weight, bias, grad_out = map(library.put, (p.feats, p.weight, p.bias, p.grad_out))
    out = flexgemm.submanifold_conv3d(feats, weight, bias, neighbor_map=nmap)
    gradients = flexgemm.submanifold_conv3d_backward(grad_out, feats, weight, neighbor_map=nmap)
    assert all(library.owns(array) for array in (out, *gradients))
    got, grad_feats, grad_weight, grad_bias = map(library.get, (out, *gradients))
    assert got.dtype == grad_feats.dtype == grad_weight.dtype == grad_bias.dtype == dtype_of(dtype)
    assert_rows(got, reference.conv_forward(p.feats, p.weight, p.bias, p.map), tolerance)
    assert_rows(grad_feats, reference.conv_dgrad(p.grad_out, p.weight, p.map, 300), tolerance)
    expected, expected_bias = reference.conv_wgrad(p.grad_out, p.feats, p.map)
    assert_rows(grad_weight, expected.reshape(p.weight.shape), tolerance)
    assert_rows(grad_bias[None], expected_bias[None], tolerance)

    if library.writable:
        mine = library.put(np.full((300, 40), np.nan, dtype_of(dtype)))
        assert flexgemm.submanifold_conv3d(feats, weight, bias, neighbor_map=nmap, out=mine) is mine
        assert_same_bits(library.get(mine), got)
    for original, array in ((p.feats, feats), (p.weight, weight), (p.grad_out, grad_out)):
        assert_same_bits(library.get(array), original)


@pytest.mark.parametrize("transposed", [False, True], ids=["strided", "transposed"])
def test_strided_convolution(library, transposed):
    p, rng = Problem("float32"), np.random.default_rng(0)
    how = {"transposed": transposed, **library.compute()}
    nmap = flexgemm.sparse_conv_map(library.put(p.coords), p.shape, 2, 2, check=True, **how)
    assert all(map(library.owns, (nmap.out_coords, nmap.map, nmap.inverse.map)))
    weight = scenes.values(rng, (8, 2, 2, 2, 33), "float32")
    grad_out = scenes.values(rng, (nmap.num_out_voxels, 8), "float32")
    given = map(library.put, (grad_out, p.feats, weight))
    grad_feats, *_ = flexgemm.sparse_conv3d_backward(*given, neighbor_map=nmap)
    out = flexgemm.sparse_conv3d(library.put(p.feats), library.put(weight), neighbor_map=nmap)
    pooled = flexgemm.sparse_pool3d(library.put(p.feats), neighbor_map=nmap, mode="sum")
    same = flexgemm.sparse_conv_map(p.coords, p.shape, 2, 2, transposed=transposed)
    np.testing.assert_array_equal(library.get(nmap.map), same.map)
    np.testing.assert_array_equal(library.get(nmap.out_coords), same.out_coords)
    np.testing.assert_array_equal(library.get(nmap.inverse.map), same.transposed_map)
    tolerance = verdicts.ROW_TOLERANCE["float32"]
    assert_rows(library.get(out), reference.conv_forward(p.feats, weight, None, same.map), tolerance)
    assert_rows(library.get(grad_feats), reference.conv_dgrad(grad_out, weight, same.map, 300), tolerance)
    sums = np.where(same.map[..., None] < 0, 0, p.feats.astype(np.float64)[same.map]).sum(0)
    np.testing.assert_allclose(library.get(pooled), sums, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_quantised_product(library, granularity):
    rng = np.random.default_rng(1)
    x, y = scenes.values(rng, (65, 144), "float32"), scenes.values(rng, (97, 144), "float16")
    given, how = [], {}
    for name, array in (("a", x), ("b", y)):
        q, scale = flexgemm.quantize(library.put(array), granularity=granularity, **library.compute())
        assert library.owns(q)
        assert library.owns(scale)
        expected, expected_scale = reference.quantize(array, E4M3, granularity)
        assert_same_bits(library.get(q).view(expected.dtype), expected)
        assert_same_bits(library.get(scale), expected_scale)
        given.append(q)
        how |= {f"scale_{name}": scale} | ({} if library.has_fp8 else {f"dtype_{name}": E4M3})
    out = flexgemm.gemm_nt(*given, out_dtype="float32", **how, **library.compute())
    assert library.owns(out)
    quantised = [reference.quantize(array, E4M3, granularity) for array in (x, y)]
    ref = reference.gemm(*(q for q, _ in quantised), *(scale for _, scale in quantised))
    assert_gemm_rows(library.get(out), ref, "float32")


@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (E5M2, E4M3)], ids="-".join)
def test_float8_is_known_by_name_where_it_comes_as_bytes(library, dtypes):
    rng = np.random.default_rng(3)
    a, b = (scenes.values(rng, (rows, 144), dtype) for rows, dtype in zip((65, 97), dtypes, strict=True))
    x, y = (library.put(array.view(np.uint8)) for array in (a, b))
    named = {"dtype_a": dtypes[0], "dtype_b": dtypes[1], **library.compute()}
    of_float8 = {"device": library.device}
    out = flexgemm.gemm_nt(x, y, out_dtype="float32", **named)
    assert_same_bits(library.get(out), flexgemm.gemm_nt(a, b, out_dtype="float32", **of_float8))
    with pytest.raises(TypeError, match="^a: expected dtype .*, got uint8"):
        flexgemm.gemm_nt(x, y, out_dtype="float32", **named | {"dtype_a": None})

    if library.writable:
        scale, mine = np.asarray(0.25, np.float32), library.put(np.zeros((65, 97), np.uint8))
        for dtype, how in ((E4M3, {}), (E5M2, {"dtype_out": E5M2})):
            expected = flexgemm.gemm_nt(a, b, scale_out=scale, out_dtype=dtype, **of_float8)
            assert flexgemm.gemm_nt(x, y, scale_out=library.put(scale), out=mine, **how, **named) is mine
            assert_same_bits(library.get(mine).view(dtype_of(dtype)), expected)
        with pytest.raises(TypeError, match="^out: expected .*, got uint8"):
            flexgemm.gemm_nt(x, y, out=mine, **named)


def test_voxels_are_keys_of_a_hash_table(library):
    coords, shape = scenes.scene(300)
    table = flexgemm.HashTable.build(library.put(coords), shape=shape, **library.compute())
    table.insert(library.put(coords[:5]))
    rows = table.lookup(library.put(coords[::-1].copy()))
    assert library.owns(rows)
    np.testing.assert_array_equal(library.get(rows), np.arange(300)[::-1])


def test_codes_of_more_than_32_bits(library):
    """JAX makes int32 of int64 unless it is told to leave them alone."""
    coords, shape = scenes.scene(300)[0], (1, 4096, 4096, 4096)
    if isinstance(library, Jax):
        with pytest.raises(TypeError, match="expected JAX to take a result of int64, got int32: set jax_enable_x64"):
            flexgemm.encode_seq(library.put(coords), shape)
        return
    code = flexgemm.encode_seq(library.put(coords), shape, **library.compute())
    np.testing.assert_array_equal(library.get(code), flexgemm.encode_seq(coords, shape))
    assert library.get(code).dtype == np.int64


@pytest.mark.parametrize("offset_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_grouped_product(library, dtype, offset_dtype):
    library.require(dtype)
    if isinstance(library, Jax) and offset_dtype == "int64":
        offset_dtype = "int32"  # JAX has no int64 unless told to
    rng = np.random.default_rng(2)
    a, b = scenes.values(rng, (90, 48), dtype), scenes.values(rng, (4, 70, 48), dtype)
    ends = np.array([7, 7, 60, 90], offset_dtype)
    out = flexgemm.m_grouped_gemm_nt(*map(library.put, (a, b, ends)), **library.compute())
    assert library.owns(out)
    assert_rows(library.get(out), reference.grouped_gemm(a, b, ends)[0], verdicts.ROW_TOLERANCE[dtype])


def test_results_outlive_everything(library):
    """An output owns its memory: the map, the inputs and later calls cannot take it away."""
    p = Problem("float32")

    def run():
        nmap = flexgemm.neighbor_map(library.put(p.coords), p.shape, **library.compute())
        return flexgemm.submanifold_conv3d(*map(library.put, (p.feats, p.weight, p.bias)), neighbor_map=nmap)

    kept = run()
    for _ in range(20):
        run()
    assert_rows(library.get(kept), reference.conv_forward(p.feats, p.weight, p.bias, p.map), 1e-5)


# ---- NumPy, with and without a device ----


def test_numpy_views_are_inputs_and_outputs():
    p = Problem("float32")
    nmap = flexgemm.neighbor_map(np.asfortranarray(p.coords), p.shape)
    expected = reference.conv_forward(p.feats, p.weight, p.bias, p.map)
    wide = np.full((300, 100), np.nan, np.float32)
    wide[:, 50:83] = p.feats
    for feats in (wide[:, 50:83], np.asfortranarray(p.feats), p.feats[::-1].copy()[::-1]):
        weight = np.asfortranarray(p.weight)
        assert_rows(flexgemm.submanifold_conv3d(feats, weight, p.bias, neighbor_map=nmap), expected, 1e-5)
    out = np.full((300, 50), 7, np.float32)
    flexgemm.submanifold_conv3d(p.feats, p.weight, p.bias, neighbor_map=nmap, out=out[:, 5:45])
    assert_rows(out[:, 5:45], expected, 1e-5)
    assert (out[:, :5] == 7).all()
    assert (out[:, 45:] == 7).all()


def test_read_only_numpy_is_an_input_and_no_output():
    p = Problem("float32")
    for array in (p.coords, p.feats, p.weight, p.bias, p.grad_out):
        array.flags.writeable = False
    nmap = flexgemm.neighbor_map(p.coords, p.shape)
    out = flexgemm.submanifold_conv3d(p.feats, p.weight, p.bias, neighbor_map=nmap)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out"):
        flexgemm.submanifold_conv3d(p.feats, p.weight, p.bias, neighbor_map=nmap, out=out)


def test_numpy_subclasses_and_lists():
    p = Problem("float32")
    nmap = flexgemm.neighbor_map(p.coords, p.shape)
    with pytest.raises(TypeError, match="feats"):
        flexgemm.submanifold_conv3d(p.feats.tolist(), p.weight, neighbor_map=nmap)
    with pytest.raises(TypeError, match="coords"):
        flexgemm.neighbor_map(p.coords.tolist(), p.shape)


def test_an_array_that_cannot_be_computed_with_is_named(backend):
    with pytest.raises(TypeError, match="^x: expected .*, got float64"):
        flexgemm.quantize(np.ones((4, 16)), device=backend.device)
    with pytest.raises(ValueError, match="^dtype: expected float8_e4m3fn or float8_e5m2, got None"):
        flexgemm.quantize(np.ones((4, 16), np.float32), None, device=backend.device)


def test_masks_of_numpy_are_refused(backend):
    a, b, out = (np.ones(s, np.float32) for s in ((3, 16), (5, 16), (3, 5)))
    masked = np.ma.masked_greater
    for name, arrays in ("a", (masked(a, 0), b, out)), ("b", (a, masked(b, 0), out)), ("out", (a, b, masked(out, 0))):
        with pytest.raises(TypeError, match=f"^{name}: expected an array without a mask"):
            flexgemm.gemm_nt(*arrays[:2], out=arrays[2], device=backend.device)


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
def test_the_output_of_a_product_may_have_any_float_dtype(backend, out_dtype):
    """Without out_dtype it is that of out, on a GPU as well."""
    a, b = (np.ones((m, 32), dtype_of(E4M3)) for m in (3, 5))
    out = np.zeros((3, 5), dtype_of(out_dtype))
    assert flexgemm.gemm_nt(a, b, out=out, device=backend.device) is out
    assert (f64(out) == 32).all()
    with pytest.raises(TypeError, match="out"):
        flexgemm.gemm_nt(a, b, out=np.zeros((3, 5), np.int32), device=backend.device)
    with pytest.raises(TypeError, match="out: expected a NumPy array"):
        flexgemm.gemm_nt(a, b, out=[[0.0] * 5] * 3, device=backend.device)


def test_a_device_that_is_not_there_is_refused():
    p = Problem("float32")
    with pytest.raises((RuntimeError, ValueError), match="device"):
        flexgemm.neighbor_map(p.coords, p.shape, device="cuda:99")
    with pytest.raises(ValueError, match="device"):
        flexgemm.neighbor_map(p.coords, p.shape, device="tpu")


def test_a_byte_swapped_array_is_refused():
    swapped = np.ones((4, 8), ">f4")
    with pytest.raises(TypeError, match="x"):
        flexgemm.quantize(swapped)


COORDS, GRID = np.array([[0, 1, 2, 3], [0, 1, 2, 4]], np.int32), (1, 8, 8, 8)
KERNEL = "kernel_size=(2, 2, 2), dilation=(1, 1, 1)"
STEPS = "stride=(2, 2, 2), padding=(0, 0, 0)"


@pytest.mark.parametrize(
    "thing, text",
    [
        (lambda: flexgemm.neighbor_map(COORDS, GRID, 2), f"NeighborMap(2 voxels in (1, 8, 8, 8), {KERNEL})"),
        (
            lambda: flexgemm.sparse_conv_map(COORDS, GRID, 2, 2),
            f"NeighborMap(2 voxels in (1, 8, 8, 8) to 2 in (1, 4, 4, 4), {KERNEL}, {STEPS})",
        ),
        (
            lambda: flexgemm.sparse_conv_map(COORDS, GRID, 2, 2, transposed=True),
            f"NeighborMap(transposed, 2 voxels in (1, 8, 8, 8) to 16 in (1, 16, 16, 16), {KERNEL}, {STEPS})",
        ),
        (lambda: flexgemm.HashTable(9, like=COORDS), "HashTable(integers, capacity=9)"),
        (lambda: flexgemm.HashTable(9, like=COORDS, shape=GRID), "HashTable(voxels in (1, 8, 8, 8), capacity=9)"),
        (
            lambda: flexgemm.sample_map(COORDS, GRID, np.zeros((1, 6, 3), np.float32), mode="nearest"),
            "SampleMap((1, 6) points, 2 voxels in (1, 8, 8, 8), nearest)",
        ),
        (
            lambda: flexgemm.voxelize(np.zeros((5, 3), np.float32), voxel_size=1.0, shape=GRID),
            "Voxels(5 points in 1 voxels of (1, 8, 8, 8))",
        ),
    ],
)
def test_objects_say_what_they_are(thing, text):
    assert repr(thing()) == text


# ---- several libraries in one call ----


def test_two_libraries_in_one_call_are_refused_by_name():
    torch = pytest.importorskip("torch", reason="torch not installed")
    p = Problem("float32")
    nmap = flexgemm.neighbor_map(p.coords, p.shape)
    with pytest.raises(TypeError, match="weight"):
        flexgemm.submanifold_conv3d(p.feats, torch.from_numpy(p.weight), neighbor_map=nmap)


def test_host_and_device_arrays_in_one_call_are_both_named(cuda):
    p = Problem("float32")
    out, nmap = np.zeros((300, 40), np.float32), np.zeros((27, 300), np.int32)
    with pytest.raises((TypeError, ValueError), match=r"(?s)feats.*weight|weight.*feats"):
        flexgemm._C.conv_forward(p.feats, cuda.array(p.weight), None, nmap, out)


def test_cupy_runs_on_its_current_stream(cuda):
    cupy = pytest.importorskip("cupy", reason="cupy not installed")
    p = Problem("float16")
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        nmap = flexgemm.neighbor_map(cupy.asarray(p.coords), p.shape)
        arrays = [cupy.asarray(array) for array in (p.feats, p.weight, p.bias)]
        out = flexgemm.submanifold_conv3d(*arrays, neighbor_map=nmap)
        got = out.get()
    assert_rows(got, reference.conv_forward(p.feats, p.weight, p.bias, p.map), 2e-3)


def test_a_device_array_is_exchanged_without_a_copy(cuda, cuda_device):
    import torch

    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    array = cuda.array(host)
    tensor = torch.from_dlpack(array)
    tensor.mul_(2)
    torch.cuda.synchronize()
    np.testing.assert_array_equal(array.numpy(), host * 2)
    del array
    np.testing.assert_array_equal(f64(tensor.cpu().numpy()), host * 2)


ON_TWO_DEVICES = """
import jax, numpy as np, flexgemm
first, second = jax.devices()
mesh = jax.sharding.Mesh(np.array([first, second]), "x")
sharded = jax.device_put(np.ones((4, 8), np.float32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
whole, elsewhere = (jax.device_put(np.ones((4, 8), np.float32), device) for device in (first, second))
for a, b in (sharded, whole), (whole, sharded), (whole, elsewhere):
    try:
        flexgemm.gemm_nt(a, b)
    except ValueError as error:
        print(error)
"""


def test_jax_arrays_of_several_devices_are_refused_by_name():
    pytest.importorskip("jax")
    more = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = run_python(["-c", ON_TWO_DEVICES], **more)
    assert done.stdout.splitlines() == [
        "a: expected an array on one device, got one on 2",
        "b: expected an array on one device, got one on 2",
        "b: expected an array on cpu:0, got one on cpu:1",
    ], done.stderr
