"""torch.export: programs of flexgemm's operators, and gradients that they cannot have."""

from __future__ import annotations

import pytest
from scenes import leaves, voxels

torch = pytest.importorskip("torch", reason="torch not installed")

import flexgemm.torch as ft  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_export(device):
    class Network(torch.nn.Module):
        def forward(self, feats, weight, nmap):
            return ft.submanifold_conv3d(feats, weight, neighbor_map=nmap)

    coords, shape = voxels(20, device)
    feats, weight, _ = leaves(20, device)
    nmap = ft.neighbor_map(coords, shape)
    exported = torch.export.export(Network(), (feats, weight, nmap))
    expected = ft.submanifold_conv3d(feats, weight, neighbor_map=nmap)
    torch.testing.assert_close(exported.module()(feats, weight, nmap), expected)


SIZES = {
    "feats": (20, 5),
    "weight": (5, 3, 3, 3, 5),
    "even": (5, 2, 2, 2, 5),
    "x": (6, 16),
    "w": (8, 16),
    "ws": (2, 8, 16),
    "xs": (2, 6, 16),
}
ENDS = torch.tensor([2, 6])


def points_of(feats, reduce):
    return ft.voxelize(torch.arange(18).view(6, 3) / 9, feats, voxel_size=1.0, shape=(1, 2, 2, 2), reduce=reduce).feats


def exported_of(function, args, nmap):
    """The function of tensors and, where there is one, of a map, as an exported program, and as it is."""

    class Network(torch.nn.Module):
        def forward(self, *args):
            return function(*args) if nmap is None else function(*args, nmap)

    network = Network()
    return torch.export.export(network, tuple(args)).module(), network


def map_of(kernel_size):
    coords, shape = voxels(20)
    return None if kernel_size is None else ft.neighbor_map(coords, shape, kernel_size).freeze()


def conv_by(feats, weight, nmap):
    return ft.submanifold_conv3d(feats, weight, neighbor_map=nmap)


# What is traced, its arguments, which of them require a gradient when it is, and, for a map, the kernel's size.
UNFORESEEN = {
    "activation": (lambda x, w: ft.gemm_nt(x, w, activation="silu"), ("x", "w"), (), None),
    "alpha": (lambda x, w: ft.gemm_nt(x, w, alpha=2.0), ("x", "w"), (), None),
    "scale": (lambda x, w: ft.gemm_nt(x, w, scale_a=torch.tensor(2.0)), ("x", "w"), (), None),
    "weight_indices": (
        lambda x, ws: ft.segment_gemm(x, ws, ENDS, weight_indices=torch.tensor([1, 0])), ("x", "ws"), (), None
    ),
    "groups of columns": (lambda xs, x: ft.n_grouped_gemm_nt(xs, x, ENDS), ("xs", "x"), (), None),
    "groups of depth": (lambda w, x: ft.k_grouped_wgrad_gemm_nt(w, x, ENDS), ("w", "x"), (), None),
    "convolution with SiLU": (
        lambda x, w, nmap: ft.submanifold_conv3d(x, w, neighbor_map=nmap, activation="silu"),
        ("feats", "weight"), (), (3, 3, 3),
    ),
    "convolution with GELU": (
        lambda x, w, nmap: ft.submanifold_conv3d(x, w, neighbor_map=nmap, activation="gelu"),
        ("feats", "weight"), (), (3, 3, 3),
    ),
    "even kernel": (conv_by, ("feats", "even"), ("even",), (2, 2, 2)),
    "even kernel, nothing foreseen": (conv_by, ("feats", "even"), (), (2, 2, 2)),
    "sums": (lambda x, nmap: ft.sparse_pool3d(x, neighbor_map=nmap, mode="sum"), ("feats",), (), (2, 2, 2)),
    "maxima": (lambda x, nmap: ft.sparse_pool3d(x, neighbor_map=nmap, mode="max"), ("feats",), (), (3, 3, 3)),
    "means": (lambda x, nmap: ft.sparse_pool3d(x, neighbor_map=nmap, mode="mean"), ("feats",), (), (3, 3, 3)),
    "means of samples": (lambda x: ft.global_pool(x, voxels(6)[0], 1, "mean"), ("x",), (), None),
    "maxima of samples": (lambda x: ft.global_pool(x, voxels(6)[0], 1, "max"), ("x",), (), None),
    "maxima of points": (lambda x: points_of(x, "max"), ("x",), (), None),
}  # fmt: skip


@pytest.mark.parametrize("what", UNFORESEEN)
def test_a_gradient_that_was_not_foreseen_is_refused(what):
    """An exported program does not ask again whether a gradient is wanted."""
    function, names, foreseen, kernel_size = UNFORESEEN[what]
    args = [torch.randn(SIZES[name], requires_grad=name in foreseen) for name in names]
    exported, network = exported_of(function, args, map_of(kernel_size))
    torch.testing.assert_close(exported(*args), network(*args))
    args = [x.detach().requires_grad_() for x in args]
    with pytest.raises(RuntimeError, match="requires grad, but not when the call was traced"):
        exported(*args).sum().backward()


# What needs nothing for its gradients that a call without them has not.
NEVER_UNFORESEEN = {
    "product": (lambda x, w: ft.gemm_nt(x, w), ("x", "w"), None),
    "product in groups": (lambda x, ws: ft.m_grouped_gemm_nt(x, ws, ENDS), ("x", "ws"), None),
    "odd kernel": (conv_by, ("feats", "weight"), (3, 3, 3)),
    "sums": (lambda x, nmap: ft.sparse_pool3d(x, neighbor_map=nmap, mode="sum"), ("feats",), (3, 3, 3)),
    "sums of samples": (lambda x: ft.global_pool(x, voxels(6)[0], 1, "sum"), ("x",), None),
    "means of points": (lambda x: points_of(x, "mean"), ("x",), None),
}


@pytest.mark.parametrize("what", NEVER_UNFORESEEN)
def test_a_gradient_that_needs_no_foresight(what):
    function, names, kernel_size = NEVER_UNFORESEEN[what]
    args = [torch.randn(SIZES[name]) for name in names]
    exported, network = exported_of(function, args, map_of(kernel_size))
    args = [x.requires_grad_() for x in args]
    gradients = [torch.autograd.grad(f(*args).square().sum(), args) for f in (exported, network)]
    torch.testing.assert_close(*gradients)
