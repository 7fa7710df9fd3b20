"""Strided, transposed and inverse sparse convolution against a dictionary of coordinates and dense float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import guarded
import numpy as np
import pytest
import reference
import scenes
from hypothesis import given
from hypothesis import strategies as st
from verdicts import assert_conv_rows, assert_rows, assert_same_bits

import flexgemm
from flexgemm import _C

MODES = ["float32", "tf32", "float16", "bfloat16"]
every_mode = pytest.mark.parametrize("mode", MODES)


@dataclass(frozen=True)
class Kernel:
    kernel_size: tuple[int, int, int]
    stride: tuple[int, int, int] = (1, 1, 1)
    padding: tuple[int, int, int] = (0, 0, 0)
    dilation: tuple[int, int, int] = (1, 1, 1)
    transposed: bool = False
    output_padding: tuple[int, int, int] = (0, 0, 0)

    def __str__(self):
        parts = [f"{letter}{'x'.join(map(str, getattr(self, name)))}" for letter, name in
                 (("k", "kernel_size"), ("s", "stride"), ("p", "padding"), ("d", "dilation"))]  # fmt: skip
        return "-".join(parts) + "-transposed" * self.transposed + f"-o{self.output_padding[0]}" * self.transposed

    @property
    def how(self):
        return {"kernel_size": self.kernel_size, "stride": self.stride, "padding": self.padding,
                "dilation": self.dilation, "transposed": self.transposed}  # fmt: skip

    @property
    def public(self):
        return self.how | ({"output_padding": self.output_padding} if self.transposed else {})

    def out_shape(self, shape):
        more = {"output_padding": self.output_padding}
        return reference.out_shape(shape, **self.how, **more)


FORWARD = [
    Kernel((2, 2, 2), (2, 2, 2)),
    Kernel((3, 3, 3), (2, 2, 2), (1, 1, 1)),
    Kernel((3, 3, 3), (1, 1, 1)),
    Kernel((1, 1, 1), (2, 2, 2)),
    Kernel((3, 3, 3), (3, 3, 3)),
    Kernel((2, 2, 2), (3, 3, 3)),  # voxels between the kernels reach nothing
    Kernel((5, 4, 3), (2, 3, 1), (2, 0, 4)),
    Kernel((3, 3, 3), (2, 2, 2), (2, 2, 2), (2, 2, 2)),
    Kernel((3, 2, 3), (4, 2, 6), (3, 1, 0), (2, 3, 4)),
    Kernel((7, 1, 2), (2, 1, 1), (3, 0, 1)),
    Kernel((7, 7, 7), (4, 4, 4), (3, 3, 3)),
]
TRANSPOSED = [
    Kernel((2, 2, 2), (2, 2, 2), transposed=True),
    Kernel((3, 3, 3), (2, 2, 2), (1, 1, 1), transposed=True, output_padding=(1, 1, 1)),
    Kernel((4, 3, 5), (2, 1, 3), (1, 2, 0), (1, 2, 1), transposed=True, output_padding=(1, 0, 2)),
    Kernel((2, 2, 2), (3, 3, 3), transposed=True),
]
KERNELS = FORWARD + TRANSPOSED
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=str)


def scene(n, seed=1, batch=2):
    """Room enough for every kernel above."""
    coords, shape = scenes.scene(n, batch=batch, density=0.2, seed=seed)
    return coords, (shape[0], *(max(s, 14) for s in shape[1:]))


# ---- output sites and maps ----


def check_sites(backend, coords, shape, kernel):
    to_shape = kernel.out_shape(shape)
    sites = guarded.conv_sites(backend, coords, shape, to_shape, **kernel.how)
    expected = reference.conv_sites(coords, shape, to_shape, **kernel.how)
    np.testing.assert_array_equal(sites, expected)
    return sites, to_shape


def check_maps(backend, coords, shape, sites, to_shape, kernel):
    how = kernel.how
    forward = guarded.sparse_map(backend, coords, shape, sites, to_shape, **how)
    np.testing.assert_array_equal(forward, reference.sparse_map(coords, shape, sites, to_shape, **how))
    how["transposed"] = not kernel.transposed
    backward = guarded.sparse_map(backend, sites, to_shape, coords, shape, **how)
    np.testing.assert_array_equal(backward, reference.sparse_map(sites, to_shape, coords, shape, **how))
    return forward, backward


def pairs(nmap):
    """{(v, column, entry)}"""
    v, column = np.nonzero(nmap >= 0)
    return set(zip(v.tolist(), column.tolist(), nmap[v, column].tolist(), strict=True))


@every_kernel
@pytest.mark.parametrize("n", [0, 1, 63, 65, 700])
def test_sites_and_maps(backend, grid_around, kernel, n):
    coords, shape = scene(n)
    shape = grid_around(coords, shape)
    sites, to_shape = check_sites(backend, coords, shape, kernel)
    forward, backward = check_maps(backend, coords, shape, sites, to_shape, kernel)
    assert pairs(forward) == {(v, m, i) for v, i, m in pairs(backward)}
    assert (forward >= 0).any(axis=0).all()  # every site is reached by somebody


@every_kernel
def test_outputs_given_by_the_user(backend, kernel):
    """In any order, some reached by nobody."""
    coords, shape = scene(500)
    to_shape = kernel.out_shape(shape)
    flat = np.random.default_rng(3).permutation(int(np.prod(to_shape)))[:333]
    sites = np.stack(np.unravel_index(flat, to_shape), axis=1).astype(np.int32)
    check_maps(backend, coords, shape, sites, to_shape, kernel)


@pytest.mark.parametrize(
    "shape", [(2, 2**20, 2**20, 2**20), (1, 2**31, 2**15, 2**14), (8, 1024, 2**31, 512), (1, 4000, 1000, 7999)]
)
@pytest.mark.parametrize("kernel", [KERNELS[1], KERNELS[2], KERNELS[8]], ids=str)
def test_far_corner_of_a_huge_grid(backend, shape, kernel):
    coords = scenes.far_corner(200, shape)
    sites, to_shape = check_sites(backend, coords, shape, kernel)
    check_maps(backend, coords, shape, sites, to_shape, kernel)


def test_upsampling_past_2_to_the_31_leaves_out_what_int32_cannot_number(backend):
    kernel = Kernel((2, 1, 1), (2, 1, 1), transposed=True)
    shape = (1, 2**31, 2, 2)
    coords = np.array([[0, x, 0, 1] for x in (0, 2**30 - 1, 2**30, 2**31 - 1)], np.int32)
    sites, to_shape = check_sites(backend, coords, shape, kernel)
    assert sites[:, 1].tolist() == [0, 1, 2**31 - 2, 2**31 - 1]
    check_maps(backend, coords, shape, sites, to_shape, kernel)


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_steps_beyond_32_bits_do_not_come_back_around(backend, axis):
    far = 2**31 - 1
    shape = [1, 2, 2, 2]
    shape[axis] = 2**31
    coords = np.zeros((6, 4), np.int32)
    coords[:, axis] = 0, 1, 2, far - 2, far - 1, far
    steps_beyond = [(1, far, far), (1, far, 2**30), (2, far, far), (2**30, 2**30, 1), (far, far, far), (2, 1, far)]
    for stride, dilation, padding in steps_beyond:
        size, steps, pads, dilations = [1, 1, 1], [1, 1, 1], [0, 0, 0], [1, 1, 1]
        size[axis - 1], steps[axis - 1], pads[axis - 1], dilations[axis - 1] = 3, stride, padding, dilation
        kernel = Kernel(*map(tuple, (size, steps, pads, dilations)))
        if min(kernel.out_shape(tuple(shape))) < 1:
            continue
        sites, to_shape = check_sites(backend, coords, tuple(shape), kernel)
        check_maps(backend, coords, tuple(shape), sites, to_shape, kernel)
        room = tuple(map(max, shape, to_shape))  # for codes of sites that are none
        more = guarded.conv_sites(backend, coords, tuple(shape), to_shape, **kernel.how, code_shape=room)
        np.testing.assert_array_equal(more, sites)


def test_sites_whose_voxels_lie_past_32_bits_read_none(backend):
    """A map to any sites: what 2^30 * 4 leaves of 32 bits is a voxel."""
    coords = np.array([[0, 0, 0, 0], [0, 4, 0, 0]], np.int32)
    sites = np.array([[0, 2**30, 0, 0], [0, 2**30 + 1, 0, 0], [0, 1, 0, 0]], np.int32)
    how = {"kernel_size": (1, 1, 1), "stride": (4, 1, 1), "padding": (0, 0, 0), "dilation": (1, 1, 1)}
    nmap = guarded.sparse_map(backend, coords, (1, 8, 1, 1), sites, (1, 2**31, 1, 1), **how)
    np.testing.assert_array_equal(nmap, [[-1, -1, 1]])


def test_of_duplicates_the_lowest_row_wins(backend, grid_around):
    coords, shape = scene(300)
    shape = grid_around(coords, shape)
    twice = np.concatenate([coords, coords[::-1]])
    kernel = FORWARD[1]
    sites, to_shape = check_sites(backend, twice, shape, kernel)
    forward, _ = check_maps(backend, twice, shape, sites, to_shape, kernel)
    assert forward.max() < 300


def test_rows_out_of_range_reach_nothing_on_the_gpu(cuda, grid_around):
    coords, shape = scene(300)
    shape = grid_around(coords, shape)
    kernel = FORWARD[1]
    bad = np.array([[0, -1, 0, 0], [2, 0, 0, 0], [0, 0, 0, 2**31 - 1], [-(2**31), 3, 3, 3]], np.int32)
    coords = np.insert(coords, range(0, 40, 10), bad, axis=0)
    sites, to_shape = check_sites(cuda, coords, shape, kernel)
    check_maps(cuda, coords, shape, np.concatenate([sites, bad]), to_shape, kernel)


small = st.tuples(*[st.integers(1, 3)] * 3)


@st.composite
def kernels(draw, transposed=None):
    pads = st.tuples(*[st.integers(0, 4)] * 3)
    flag = draw(st.booleans()) if transposed is None else transposed
    return Kernel(draw(st.tuples(*[st.integers(1, 4)] * 3)), draw(small), draw(pads), draw(small), flag)


@st.composite
def voxels(draw):
    shape = draw(st.tuples(st.integers(1, 3), *[st.integers(1, 6)] * 3))
    n = draw(st.integers(0, int(np.prod(shape))))
    flat = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).permutation(int(np.prod(shape)))[:n]
    return np.stack(np.unravel_index(flat, shape), axis=1).astype(np.int32), shape


@given(voxels(), kernels())
def test_any_kernel_and_scene(backend, scene, kernel):
    coords, shape = scene
    if min(kernel.out_shape(shape)) < 1:
        return
    sites, to_shape = check_sites(backend, coords, shape, kernel)
    forward, backward = check_maps(backend, coords, shape, sites, to_shape, kernel)
    assert pairs(forward) == {(v, m, i) for v, i, m in pairs(backward)}


@given(voxels(), st.tuples(*[st.sampled_from([1, 3, 5])] * 3), small)
def test_stride_1_at_its_own_voxels_is_submanifold(backend, scene, size, dilation):
    coords, shape = scene
    padding = tuple(k // 2 * d for k, d in zip(size, dilation, strict=True))
    strided = guarded.sparse_map(backend, coords, shape, coords, shape, size, (1, 1, 1), padding, dilation)
    np.testing.assert_array_equal(strided, guarded.neighbor_map(backend, coords, shape, size, dilation))


@pytest.mark.parametrize("mode", ["z_order", "hilbert"])
@every_kernel
def test_outputs_along_a_curve(backend, kernel, mode):
    coords, shape = scene(300)
    to_shape = kernel.out_shape(shape)
    sites = reference.conv_sites(coords, shape, to_shape, **kernel.how)
    larger = tuple(map(max, shape, to_shape))
    codes = [reference.code_of(site, larger, mode) for site in sites]
    expected = sites[np.argsort(codes)]
    nmap = flexgemm.sparse_conv_map(backend.array(coords), shape, order=mode, **kernel.public)
    np.testing.assert_array_equal(backend.numpy(nmap.out_coords), expected)
    guarded_sites = guarded.conv_sites(backend, coords, shape, to_shape, **kernel.how, mode=mode, code_shape=larger)
    np.testing.assert_array_equal(guarded_sites, expected)


# ---- convolution ----


@dataclass
class Problem:
    """One convolution in one mode, with what the oracle says of its map."""

    kernel: Kernel
    mode: str = "float32"
    n: int = 300
    ci: int = 33
    co: int = 40

    def __post_init__(self):
        self.dtype = "float32" if self.mode == "tf32" else self.mode
        self.how = {"precision": "tf32" if self.mode == "tf32" else "ieee"}
        self.coords, self.shape, self.sites, self.to_shape, self.map = oracle(self.kernel, self.n)
        rng = np.random.default_rng(0)
        one_sign = min(self.ci, self.co) < 32
        size = self.kernel.kernel_size
        draw = [(self.n, self.ci), (self.co, *size, self.ci), (self.co,), (len(self.sites), self.co)]
        self.feats, self.weight, self.bias, self.grad_out = (
            scenes.values(rng, shape, self.dtype, one_sign=one_sign) for shape in draw
        )

    def neighbor_map(self, backend, **how):
        return flexgemm.sparse_conv_map(backend.array(self.coords), self.shape, **self.kernel.public, **how)


@cache
def oracle(kernel, n):
    coords, shape = scene(n)
    to_shape = kernel.out_shape(shape)
    sites = reference.conv_sites(coords, shape, to_shape, **kernel.how)
    return coords, shape, sites, to_shape, reference.sparse_map(coords, shape, sites, to_shape, **kernel.how)


@every_kernel
@every_mode
def test_forward_and_backward(backend, kernel, mode):
    p = Problem(kernel, mode)
    nmap = p.neighbor_map(backend)
    np.testing.assert_array_equal(backend.numpy(nmap.out_coords), p.sites)
    assert (nmap.out_shape, nmap.num_out_voxels) == (p.to_shape, len(p.sites))
    feats, weight, bias, grad_out = map(backend.array, (p.feats, p.weight, p.bias, p.grad_out))
    how = {"neighbor_map": nmap, **p.how}

    out = backend.numpy(flexgemm.sparse_conv3d(feats, weight, bias, **how))
    assert_conv_rows(out, reference.conv_forward(p.feats, p.weight, p.bias, p.map), p.mode)
    gradients = flexgemm.sparse_conv3d_backward(grad_out, feats, weight, **how)
    grad_feats, grad_weight, grad_bias = map(backend.numpy, gradients)
    assert_conv_rows(grad_feats, reference.conv_dgrad(p.grad_out, p.weight, p.map, p.n), p.mode, "grad_feats")
    expected, expected_bias = reference.conv_wgrad(p.grad_out, p.feats, p.map)
    assert grad_weight.shape == p.weight.shape
    grad_weight = grad_weight.reshape(expected.shape)
    assert_conv_rows(grad_weight.swapaxes(0, 1), expected.swapaxes(0, 1), p.mode, "grad_weight by offset")
    assert_conv_rows(grad_bias[None], expected_bias[None], p.mode, "grad_bias")


@every_kernel
@every_mode
def test_inverse(backend, kernel, mode):
    """From the outputs back to the inputs, over the same pairs."""
    p = Problem(kernel, mode)
    nmap = p.neighbor_map(backend)
    back = reference.sparse_map(p.sites, p.to_shape, p.coords, p.shape,
                                **p.kernel.how | {"transposed": not kernel.transposed})  # fmt: skip
    weight = p.weight.transpose(4, 1, 2, 3, 0).copy()
    coarse, fine = p.grad_out, p.feats  # as features there and gradient here
    out = flexgemm.sparse_inverse_conv3d(*map(backend.array, (coarse, weight)), neighbor_map=nmap, **p.how)
    assert_conv_rows(backend.numpy(out), reference.conv_forward(coarse, weight, None, back), p.mode)

    inverse = nmap.inverse
    arrays = map(backend.array, (fine, coarse, weight))
    grad_coarse, grad_weight, _ = flexgemm.sparse_conv3d_backward(*arrays, neighbor_map=inverse, **p.how)
    expected = reference.conv_dgrad(fine, weight, back, len(p.sites))
    assert_conv_rows(backend.numpy(grad_coarse), expected, p.mode, "grad_feats")
    expected, _ = reference.conv_wgrad(fine, coarse, back)
    got = backend.numpy(grad_weight).reshape(expected.shape)
    assert_conv_rows(got.swapaxes(0, 1), expected.swapaxes(0, 1), p.mode, "grad_weight")

    assert inverse is nmap.inverse
    np.testing.assert_array_equal(backend.numpy(inverse.map), backend.numpy(nmap.transposed_map))
    np.testing.assert_array_equal(backend.numpy(inverse.transposed_map), backend.numpy(nmap.map))
    np.testing.assert_array_equal(backend.numpy(inverse.coords), p.sites)
    np.testing.assert_array_equal(backend.numpy(inverse.out_coords), p.coords)


@pytest.mark.parametrize("kernel_size", [2, 3])
def test_inverse_of_a_submanifold_map(backend, kernel_size):
    coords, shape = scene(200)
    nmap = flexgemm.neighbor_map(backend.array(coords), shape, kernel_size)
    rng = np.random.default_rng(0)
    feats, weight = (
        scenes.values(rng, (200, 33), "float32"),
        scenes.values(rng, (40, *[kernel_size] * 3, 33), "float32"),
    )
    out = flexgemm.sparse_inverse_conv3d(*map(backend.array, (feats, weight)), neighbor_map=nmap)
    back = reference.neighbor_map(coords, shape, (kernel_size,) * 3, transposed=True)
    assert_rows(backend.numpy(out), reference.conv_forward(feats, weight, None, back), 1e-5)
    np.testing.assert_array_equal(backend.numpy(nmap.inverse.transposed_map), backend.numpy(nmap.map))


@pytest.mark.parametrize("kernel", [FORWARD[1], TRANSPOSED[1]], ids=str)
def test_given_outputs(backend, kernel):
    p = Problem(kernel)
    some = np.random.default_rng(0).permutation(p.sites)[: len(p.sites) // 2]
    unreached = np.array([[1, 0, 0, 0]], np.int32) if [1, 0, 0, 0] not in p.sites.tolist() else p.sites[:0]
    sites = np.concatenate([some, unreached])
    array = backend.array(sites)
    nmap = p.neighbor_map(backend, out_coords=array, check=True)
    assert nmap.out_coords is array
    expected = reference.sparse_map(p.coords, p.shape, sites, p.to_shape, **kernel.how)
    np.testing.assert_array_equal(backend.numpy(nmap.map), expected)
    out = flexgemm.sparse_conv3d(*map(backend.array, (p.feats, p.weight, p.bias)), neighbor_map=nmap)
    assert_conv_rows(backend.numpy(out), reference.conv_forward(p.feats, p.weight, p.bias, expected), p.mode)


def test_a_submanifold_map_serves_too(backend):
    p = Problem(FORWARD[2])
    nmap = flexgemm.neighbor_map(backend.array(p.coords), p.shape)
    arrays = [backend.array(a) for a in (p.feats, p.weight)]
    one, other = (f(*arrays, neighbor_map=nmap) for f in (flexgemm.submanifold_conv3d, flexgemm.sparse_conv3d))
    assert_same_bits(backend.numpy(one), backend.numpy(other))


@pytest.mark.parametrize("kernel", [FORWARD[0], FORWARD[1], TRANSPOSED[0]], ids=str)
def test_maps_large_enough_for_an_order_of_rows(backend, kernel):
    p = Problem(kernel, "float16", n=4000, ci=16, co=24)
    nmap = p.neighbor_map(backend)
    assert (nmap.inverse.order is not None) == (backend.name == "cuda")
    feats, weight, grad_out = map(backend.array, (p.feats, p.weight, p.grad_out))
    out = flexgemm.sparse_conv3d(feats, weight, neighbor_map=nmap)
    assert_conv_rows(backend.numpy(out), reference.conv_forward(p.feats, p.weight, None, p.map), p.mode)
    grad_feats = flexgemm.sparse_conv3d_backward(grad_out, feats, weight, neighbor_map=nmap)[0]
    expected = reference.conv_dgrad(p.grad_out, p.weight, p.map, p.n)
    assert_conv_rows(backend.numpy(grad_feats), expected, p.mode, "grad_feats")


@every_kernel
def test_the_same_input_gives_the_same_bits(backend, kernel):
    p = Problem(kernel, "float16")
    arrays = [backend.array(a) for a in (p.grad_out, p.feats, p.weight)]

    def passes():
        nmap = p.neighbor_map(backend)
        yield nmap.out_coords
        yield flexgemm.sparse_conv3d(*arrays[1:], neighbor_map=nmap)
        yield from flexgemm.sparse_conv3d_backward(*arrays, neighbor_map=nmap)

    for first, second in zip(passes(), passes(), strict=True):
        assert_same_bits(backend.numpy(second), backend.numpy(first))


def test_no_voxels(backend):
    p = Problem(FORWARD[1], n=0)
    nmap = p.neighbor_map(backend, check=True)
    arrays = [backend.array(a) for a in (p.grad_out, p.feats, p.weight)]
    assert flexgemm.sparse_conv3d(*arrays[1:], neighbor_map=nmap).shape == (0, 40)
    grad_feats, grad_weight, grad_bias = flexgemm.sparse_conv3d_backward(*arrays, neighbor_map=nmap)
    assert grad_feats.shape == (0, 33)
    assert not backend.numpy(grad_weight).any()
    assert not backend.numpy(grad_bias).any()


def test_no_outputs_from_some_voxels(backend):
    """Kernel 1, stride 2: voxels at odd places reach nothing, and nothing flows back to them."""
    coords = np.array([[0, 1, 1, 1], [0, 3, 1, 5]], np.int32)
    nmap = flexgemm.sparse_conv_map(backend.array(coords), (1, 8, 8, 8), 1, 2)
    assert nmap.num_out_voxels == 0
    feats, weight = np.ones((2, 8), np.float32), np.ones((4, 1, 1, 1, 8), np.float32)
    grad_out = np.ones((0, 4), np.float32)
    gradients = flexgemm.sparse_conv3d_backward(*map(backend.array, (grad_out, feats, weight)), neighbor_map=nmap)
    assert not any(backend.numpy(gradient).any() for gradient in gradients)


@pytest.mark.parametrize("n, ci, needed", [(5, 8, True), (5, 8, False), (0, 8, True), (5, 0, True)])
def test_the_weight_gradient_runs_beside_an_input_gradient_that_does_something(backend, monkeypatch, n, ci, needed):
    """Else what is in front of it on the stream may be the kernel that computes grad_out."""
    rng = np.random.default_rng(0)
    coords, sites = np.argwhere(np.ones((1, 4, 4, 4))).astype(np.int32)[:n], np.zeros((1, 4), np.int32)
    nmap = flexgemm.sparse_conv_map(backend.array(coords), (1, 4, 4, 4), 3, 2, 1, out_coords=backend.array(sites))
    draw = (1, 16), (n, ci), (16, 3, 3, 3, ci)
    grad_out, feats, weight = (scenes.values(rng, shape, "float16") for shape in draw)
    original, beside = _C.conv_wgrad, []

    def conv_wgrad(*arrays, concurrent, **how):
        beside.append(concurrent)
        original(*arrays, concurrent=concurrent, **how)

    monkeypatch.setattr(_C, "conv_wgrad", conv_wgrad)
    arrays = map(backend.array, (grad_out, feats, weight))
    gradients = flexgemm.sparse_conv3d_backward(*arrays, neighbor_map=nmap, needs_grad=(needed, True, True))
    assert beside == [needed and n * ci > 0]
    assert_same_bits(backend.numpy(gradients[2]), grad_out[0])


def test_numpy_arrays_on_a_gpu(cuda):
    """NumPy in, NumPy out, computed on the GPU from the coordinates on."""
    p = Problem(FORWARD[1])
    nmap = flexgemm.sparse_conv_map(p.coords, p.shape, **p.kernel.public, device="cuda")
    np.testing.assert_array_equal(nmap.out_coords, p.sites)
    np.testing.assert_array_equal(nmap.map, p.map)
    out = flexgemm.sparse_conv3d(p.feats, p.weight, p.bias, neighbor_map=nmap)
    assert_conv_rows(out, reference.conv_forward(p.feats, p.weight, p.bias, p.map), p.mode)
    back = flexgemm.sparse_inverse_conv3d(out, p.weight.transpose(4, 1, 2, 3, 0), neighbor_map=nmap)
    assert isinstance(back, np.ndarray)
    assert back.shape == p.feats.shape
    grad_feats, grad_weight, _ = flexgemm.sparse_conv3d_backward(p.grad_out, p.feats, p.weight, neighbor_map=nmap)
    assert_conv_rows(grad_feats, reference.conv_dgrad(p.grad_out, p.weight, p.map, p.n), p.mode, "grad_feats")
    assert grad_weight.shape == p.weight.shape
    depthwise = flexgemm.sparse_conv3d(p.feats, p.weight[:33, ..., :1], neighbor_map=nmap, groups=33)
    assert isinstance(depthwise, np.ndarray)


def test_check_reports_duplicates(backend):
    coords, shape = scene(100)
    sites = reference.conv_sites(coords, shape, Kernel((2, 2, 2), (2, 2, 2)).out_shape(shape), **FORWARD[0].how)
    twice = np.concatenate([coords, coords[7:8]]), np.concatenate([sites, sites[3:4]])
    for inputs, outputs, name in ((twice[0], None, "coords"), (coords, twice[1], "out_coords")):
        arrays = backend.array(inputs), None if outputs is None else backend.array(outputs)
        flexgemm.sparse_conv_map(arrays[0], shape, 2, 2, out_coords=arrays[1])
        with pytest.raises(ValueError, match=f"^{name}: .*same"):
            flexgemm.sparse_conv_map(arrays[0], shape, 2, 2, out_coords=arrays[1], check=True)


@pytest.mark.parametrize(
    "kernel",
    [
        Kernel((3, 1, 1), (2, 1, 1), transposed=True),
        Kernel((3, 1, 1), (3, 1, 1), transposed=True),
    ],
    ids=str,
)
def test_upsampling_does_not_come_back_around(backend, kernel):
    """-2 / 2 is 2^31 - 1 modulo 2^32, and so is 3 * (2^31 - 1) a site that is there."""
    shape = (1, 2**31, 2, 2)
    coords = np.array([[0, x, 0, 1] for x in (0, 1, (2**31 - 5) // 3, 2**30, 2**31 - 1)], np.int32)
    sites, to_shape = check_sites(backend, coords, shape, kernel)
    check_maps(backend, coords, shape, sites, to_shape, kernel)
