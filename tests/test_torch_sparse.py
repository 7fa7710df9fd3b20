"""torch: sparse convolution and pooling beside torch's own dense ones, and their gradients by autograd."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import scenes
from verdicts import assert_rows

import flexgemm

torch = pytest.importorskip("torch", reason="torch not installed")
import torch.nn.functional as F  # noqa: E402, N812
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import flexgemm.torch  # noqa: E402

KERNELS = [
    ((2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1)),
    ((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)),
    ((3, 2, 4), (1, 2, 3), (2, 0, 1), (2, 1, 1)),
    ((1, 5, 3), (2, 1, 2), (0, 2, 0), (1, 1, 2)),
]
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: "-".join("x".join(map(str, t)) for t in k))


class Dense:
    """Every voxel of a small grid, in random order, and the same numbers as torch's dense tensors in float64."""

    def __init__(self, device, shape=(2, 7, 8, 9), channels=12):
        rng = np.random.default_rng(0)
        coords = rng.permutation(np.argwhere(np.ones(shape))).astype(np.int32)
        self.shape, self.at = shape, tuple(torch.from_numpy(coords).long().to(device).unbind(1))
        self.coords = torch.from_numpy(coords).to(device)
        self.feats = torch.from_numpy(scenes.values(rng, (len(coords), channels), "float32")).to(device)

    def grid(self, feats):
        """(N, C) -> (B, C, W, H, D), differentiable."""
        empty = feats.new_zeros((*self.shape, feats.shape[1]), dtype=torch.float64)
        return empty.index_put(self.at, feats.double()).movedim(-1, 1)


def rows(grid, coords):
    """(B, C, W, H, D) at the voxels of a map."""
    return grid.movedim(1, -1)[tuple(coords.long().unbind(1))]


def compare(got, expected, what="out"):
    assert_rows(got.detach().cpu().numpy(), expected.detach().cpu().numpy(), 1e-5, what)


def leaf(device, *shape, seed=0):
    values = scenes.values(np.random.default_rng(seed), shape, "float32")
    return torch.from_numpy(values).to(device).requires_grad_()


def compare_with_dense(scene, sparse, dense, *leaves):
    """Outputs and gradients of sparse(*leaves), rows, and dense(*leaves), a grid."""
    out, coords = sparse(*leaves)
    expected = rows(dense(*leaves), coords)
    compare(out, expected)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    got = torch.autograd.grad(out, leaves, grad_out)
    for one, other in zip(got, torch.autograd.grad(expected, leaves, grad_out.double()), strict=True):
        compare(one.reshape(len(one), -1), other.reshape(len(other), -1), "gradient")


# ---- convolution ----


@every_kernel
def test_convolution_is_conv3d_on_a_full_grid(device, kernel):
    size, stride, padding, dilation = kernel
    scene = Dense(device)
    nmap = flexgemm.sparse_conv_map(scene.coords, scene.shape, size, stride, padding, dilation)

    def sparse(feats, weight, bias):
        return flexgemm.torch.sparse_conv3d(feats, weight, bias, neighbor_map=nmap, precision="ieee"), nmap.out_coords

    def dense(feats, weight, bias):
        weight = weight.double().permute(0, 4, 1, 2, 3)
        return F.conv3d(scene.grid(feats), weight, bias.double(), stride, padding, dilation)

    assert nmap.num_out_voxels == np.prod(nmap.out_shape)
    leaves = scene.feats.clone().requires_grad_(), leaf(device, 10, *size, 12), leaf(device, 10)
    compare_with_dense(scene, sparse, dense, *leaves)


@every_kernel
@pytest.mark.parametrize("more", [0, 1])
def test_transposed_convolution_is_conv_transpose3d(device, kernel, more):
    size, stride, padding, dilation = kernel
    more = tuple(min(more, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
    scene = Dense(device, (2, 4, 5, 3))
    nmap = flexgemm.sparse_conv_map(
        scene.coords, scene.shape, size, stride, padding, dilation, transposed=True, output_padding=more
    )

    def sparse(feats, weight, bias):
        return flexgemm.torch.sparse_conv3d(feats, weight, bias, neighbor_map=nmap, precision="ieee"), nmap.out_coords

    def dense(feats, weight, bias):
        weight = weight.double().permute(4, 0, 1, 2, 3)
        return F.conv_transpose3d(scene.grid(feats), weight, bias.double(), stride, padding, more, 1, dilation)

    leaves = scene.feats.clone().requires_grad_(), leaf(device, 10, *size, 12), leaf(device, 10)
    assert tuple(nmap.out_shape[1:]) == dense(*leaves).shape[2:]
    compare_with_dense(scene, sparse, dense, *leaves)


@every_kernel
def test_inverse_convolution_is_conv_transpose3d_at_the_known_voxels(device, kernel):
    size, stride, padding, dilation = kernel
    scene = Dense(device)
    nmap = flexgemm.sparse_conv_map(scene.coords, scene.shape, size, stride, padding, dilation)
    coarse = leaf(device, nmap.num_out_voxels, 12)
    # What the strides of the forward convolution left over at the far end.
    axes = zip(scene.shape[1:], nmap.out_shape[1:], size, stride, padding, dilation, strict=True)
    left = [w - ((o - 1) * s - 2 * p + d * (k - 1) + 1) for w, o, k, s, p, d in axes]

    def sparse(feats, weight):
        out = flexgemm.torch.sparse_inverse_conv3d(feats, weight, neighbor_map=nmap, precision="ieee")
        return out, scene.coords

    def dense(feats, weight):
        grid = feats.new_zeros((*nmap.out_shape, 12), dtype=torch.float64)
        grid = grid.index_put(tuple(nmap.out_coords.long().unbind(1)), feats.double()).movedim(-1, 1)
        weight = weight.double().permute(4, 0, 1, 2, 3)
        return F.conv_transpose3d(grid, weight, None, stride, padding, left, 1, dilation)

    compare_with_dense(scene, sparse, dense, coarse, leaf(device, 10, *size, 12))


def test_a_network_goes_down_and_up_again(device):
    """Strided, then inverse, then a sum with what was there: gradients against those of the dictionary."""
    coords, shape = scenes.scene(200, batch=2)
    nmap = flexgemm.sparse_conv_map(torch.from_numpy(coords).to(device), shape, 2, 2)
    feats, down, up = leaf(device, 200, 12), leaf(device, 20, 2, 2, 2, 12), leaf(device, 12, 2, 2, 2, 20)
    coarse = flexgemm.sparse_conv3d(feats, down, neighbor_map=nmap)
    fine = flexgemm.sparse_inverse_conv3d(coarse, up, neighbor_map=nmap)
    grad = torch.randn(fine.shape, generator=torch.Generator().manual_seed(0)).to(device)
    (fine + feats).backward(grad)

    to, back = (np.ascontiguousarray(m.cpu().numpy()) for m in (nmap.map, nmap.transposed_map))
    x, w, u, g = (t.detach().cpu().numpy() for t in (feats, down, up, grad))
    middle = reference.conv_forward(x, w, None, to)
    assert_rows(fine.detach().cpu().numpy(), reference.conv_forward(middle, u, None, back), 1e-5)
    grad_middle = reference.conv_dgrad(g, u, back, len(middle))
    assert_rows(up.grad.cpu().numpy(), reference.conv_wgrad(g, middle, back)[0].reshape(u.shape), 1e-5, "up.grad")
    assert_rows(down.grad.cpu().numpy(), reference.conv_wgrad(grad_middle, x, to)[0].reshape(w.shape), 1e-5)
    assert_rows(feats.grad.cpu().numpy(), reference.conv_dgrad(grad_middle, w, to, 200) + g, 1e-5, "feats.grad")


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double precision")
@pytest.mark.parametrize("transposed", [False, True])
def test_gradcheck(device, transposed):
    coords, shape = scenes.scene(12)
    nmap = flexgemm.sparse_conv_map(torch.from_numpy(coords).to(device), shape, 3, 2, 1, transposed=transposed)
    inputs = leaf(device, 12, 3), leaf(device, 2, 3, 3, 3, 3), leaf(device, 2)

    def function(*leaves):
        return flexgemm.torch.sparse_conv3d(*leaves, neighbor_map=nmap, precision="ieee")

    assert torch.autograd.gradcheck(function, inputs, eps=0.25, atol=1e-3, rtol=1e-3, nondet_tol=0.0)


# ---- pooling ----


@pytest.mark.parametrize("mode", ["max", "mean"])
@pytest.mark.parametrize("size, stride, padding", [(2, 2, 0), (3, 2, 1), (3, 1, 1)])
def test_pooling_is_torch_s_on_a_full_grid(device, mode, size, stride, padding):
    scene = Dense(device)
    nmap = flexgemm.sparse_conv_map(scene.coords, scene.shape, size, stride, padding)

    def sparse(feats):
        return flexgemm.torch.sparse_pool3d(feats, neighbor_map=nmap, mode=mode), nmap.out_coords

    def dense(feats):
        if mode == "max":
            return F.max_pool3d(scene.grid(feats), size, stride, padding)
        return F.avg_pool3d(scene.grid(feats), size, stride, padding, count_include_pad=False)

    compare_with_dense(scene, sparse, dense, scene.feats.clone().requires_grad_())


def test_upsampling_is_torch_s_on_a_full_grid(device):
    scene = Dense(device, (2, 6, 8, 4))
    nmap = flexgemm.sparse_conv_map(scene.coords, scene.shape, 2, 2)
    coarse = leaf(device, nmap.num_out_voxels, 12)

    def sparse(feats):
        return flexgemm.torch.sparse_upsample3d(feats, neighbor_map=nmap), scene.coords

    def dense(feats):
        grid = feats.new_zeros((*nmap.out_shape, 12), dtype=torch.float64)
        grid = grid.index_put(tuple(nmap.out_coords.long().unbind(1)), feats.double()).movedim(-1, 1)
        return F.interpolate(grid, scale_factor=2, mode="nearest")

    compare_with_dense(scene, sparse, dense, coarse)


@pytest.mark.parametrize("mode", ["max", "mean", "sum"])
def test_global_pooling_is_a_reduction_of_the_grid(device, mode):
    scene = Dense(device, (3, 4, 5, 6))
    feats = scene.feats.clone().requires_grad_()
    out = flexgemm.torch.global_pool(feats, scene.coords, 3, mode)
    reduce = {"max": torch.amax, "mean": torch.mean, "sum": torch.sum}[mode]
    expected = reduce(scene.grid(feats), (2, 3, 4))
    compare(out, expected)
    grad_out = leaf(device, 3, 12).detach()
    (got,), (other,) = (torch.autograd.grad(o, feats, grad_out.to(o.dtype)) for o in (out, expected))
    compare(got, other, "gradient")


@pytest.mark.parametrize("library", [flexgemm, flexgemm.torch], ids=["neutral", "torch"])
def test_rows_of_samples_are_recorded(device, library):
    scene = Dense(device, (3, 4, 5, 6))
    values = leaf(device, 3, 12)
    out = library.broadcast_samples(values, scene.coords)
    expected = values.double()[scene.coords[:, 0].long()]
    assert torch.equal(out, expected.float())
    grad_out = leaf(device, *out.shape).detach()
    (got,), (other,) = (torch.autograd.grad(o, values, grad_out.to(o.dtype)) for o in (out, expected))
    compare(got, other, "gradient")


def test_the_defaults_are_those_of_the_neutral_functions(device):
    coords, shape = scenes.scene(100)
    coords, feats = torch.from_numpy(coords).to(device), leaf(device, 100, 8).detach()
    nmap = flexgemm.sparse_conv_map(coords, shape, 2, 2)
    for function, arguments in (
        ("sparse_pool3d", {"neighbor_map": nmap}),
        ("global_pool", {"coords": coords, "batch_size": 1}),
    ):
        out, expected = (getattr(library, function)(feats, **arguments) for library in (flexgemm.torch, flexgemm))
        assert torch.equal(out, expected)


def test_neutral_functions_record_too(device):
    coords, shape = scenes.scene(100)
    coords = torch.from_numpy(coords).to(device)
    nmap = flexgemm.sparse_conv_map(coords, shape, 2, 2)
    feats = leaf(device, 100, 8)
    for out in (flexgemm.sparse_pool3d(feats, neighbor_map=nmap), flexgemm.global_pool(feats, coords, 1)):
        assert out.grad_fn is not None
    coarse = leaf(device, nmap.num_out_voxels, 8)
    assert flexgemm.sparse_upsample3d(coarse, neighbor_map=nmap).grad_fn is not None
    with torch.no_grad():
        assert not flexgemm.sparse_pool3d(feats, neighbor_map=nmap).requires_grad


@pytest.mark.parametrize("library", [flexgemm, flexgemm.torch], ids=["neutral", "torch"])
def test_maps_of_other_layers_are_refused(device, library):
    coords, shape = scenes.scene(100)
    nmap = flexgemm.sparse_conv_map(torch.from_numpy(coords).to(device), shape, 3, 1, 1)
    feats, coarse = torch.ones(100, 8, device=device), torch.ones(nmap.num_out_voxels, 8, device=device)
    weight = torch.ones(8, 3, 3, 3, 8, device=device)
    with pytest.raises(ValueError, match="^neighbor_map: expected a submanifold one"):
        library.submanifold_conv3d_backward(coarse, feats, weight, neighbor_map=nmap)
    with pytest.raises(ValueError, match="^neighbor_map: expected a stride equal to the kernel size"):
        library.sparse_upsample3d(coarse, neighbor_map=nmap)


def test_only_torch_tensors(device):
    coords, shape = scenes.scene(10)
    nmap = flexgemm.sparse_conv_map(coords, shape, 2, 2)
    feats = np.zeros((10, 8), np.float32)
    for call in (
        lambda: flexgemm.torch.sparse_pool3d(feats, neighbor_map=nmap),
        lambda: flexgemm.torch.global_pool(feats, coords, 1),
        lambda: flexgemm.torch.sparse_conv3d(feats, feats, neighbor_map=nmap),
    ):
        with pytest.raises(TypeError, match="^feats: expected a torch.Tensor"):
            call()
    for call in (
        lambda: flexgemm.torch.global_pool(torch.from_numpy(feats), coords, 1),
        lambda: flexgemm.torch.broadcast_samples(torch.from_numpy(feats), coords),
    ):
        with (
            FlopCounterMode(display=False),
            pytest.raises(TypeError, match="^coords: expected a torch.Tensor, got num"),
        ):
            call()
    with FlopCounterMode(display=False), pytest.raises(TypeError, match="^neighbor_map: expected a NeighborMap, got"):
        flexgemm.torch.sparse_pool3d(torch.from_numpy(feats), neighbor_map=coords)
