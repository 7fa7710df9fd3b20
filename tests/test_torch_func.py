"""torch.func, and gradients of gradients."""

from __future__ import annotations

import pytest
from scenes import leaves, voxels

import flexgemm

torch = pytest.importorskip("torch", reason="torch not installed")

from torch.utils import _pytree as pytree  # noqa: E402

import flexgemm.torch as ft  # noqa: E402
import flexgemm.torch.nn as fnn  # noqa: E402


def test_the_gradient_of_a_gradient_is_refused(device):
    coords, shape = voxels(20, device)
    feats, weight, _ = leaves(20, device)
    nmap = ft.neighbor_map(coords, shape)
    out = ft.submanifold_conv3d(feats, weight, neighbor_map=nmap).square().sum()
    (gradient,) = torch.autograd.grad(out, feats, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        gradient.sum().backward()


def test_dense_products_are_differentiable_twice(device):
    torch.manual_seed(0)
    a, b = (torch.randn(n, 6, device=device).requires_grad_() for n in (4, 5))
    results = []
    for product in (lambda: ft.gemm_nt(a, b, precision="ieee"), lambda: a @ b.t()):
        (gradient,) = torch.autograd.grad(product().pow(3).sum(), a, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), (a, b)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-3)


def test_coordinates_inside_two_transforms(device):
    coords, shape = voxels(20, device)
    feats, weight, _ = (t.detach() for t in leaves(20, device))

    def inner(feats, coords):
        return ft.submanifold_conv3d(feats, weight, neighbor_map=ft.neighbor_map(coords, shape)).square().sum()

    def outer(factor, coords):
        return factor * torch.func.grad(inner)(feats, coords).detach().sum()

    found = torch.func.grad(outer)(torch.ones((), device=device), coords)
    assert torch.equal(found, torch.func.grad(inner)(feats, coords).sum())


def test_torch_func(device):
    coords, shape = voxels(20, device)
    feats, weight, bias = (t.detach() for t in leaves(20, device))
    nmap = ft.neighbor_map(coords, shape)

    def loss(feats, weight, bias):
        return ft.submanifold_conv3d(feats, weight, bias, neighbor_map=nmap).square().sum()

    inputs = [t.clone().requires_grad_() for t in (feats, weight, bias)]
    expected = torch.autograd.grad(loss(*inputs), inputs)
    gradient = torch.func.grad(loss, argnums=(0, 1, 2))
    torch.testing.assert_close(gradient(feats, weight, bias), expected)
    batch = torch.stack([feats, 2 * feats, -feats])
    torch.testing.assert_close(torch.func.vmap(lambda x: loss(x, weight, bias))(batch)[0], loss(feats, weight, bias))
    each = torch.func.vmap(gradient, in_dims=(0, None, None))(batch, weight, bias)
    torch.testing.assert_close(tuple(x[0] for x in each), expected)
    # The gradient behind vjp is asked for when its transform is over.
    value, pull_back = torch.func.vjp(loss, feats, weight, bias)
    torch.testing.assert_close(pull_back(torch.ones_like(value)), expected)


def test_options_of_products_are_checked_within_torch_func(device):
    a = torch.ones(3, 4, device=device)
    with pytest.raises(TypeError, match="^accumulate: expected a bool, got int$"):
        torch.func.grad(lambda a: ft.gemm_nt(a, a, accumulate=0).sum())(a)
    with pytest.raises(ValueError, match="^device: only NumPy arrays are moved"):
        torch.func.grad(lambda a: ft.gemm_nt(a, a, device="cpu").sum())(a)
    for name in ("out_dtype", "dtype_out"):
        out = torch.func.vmap(lambda w, name=name: ft.gemm_nt(a, w, **{name: "float16"}))(torch.ones(2, 5, 4).to(a))
        assert out.dtype is torch.float16 and (out == 4).all()


def test_torch_func_of_products(device):
    torch.manual_seed(0)
    a, b = torch.randn(9, 16, device=device), torch.randn(2, 8, 16, device=device)
    ends = torch.tensor([2, 9], device=device)

    def loss(a, b):
        return ft.m_grouped_gemm_nt(a, b, ends).square().sum() + ft.gemm_nt(a, b[0]).square().sum()

    inputs = [t.clone().requires_grad_() for t in (a, b)]
    expected = torch.autograd.grad(loss(*inputs), inputs)
    torch.testing.assert_close(torch.func.grad(loss, argnums=(0, 1))(a, b), expected)
    value, pull_back = torch.func.vjp(loss, a, b)
    torch.testing.assert_close(pull_back(torch.ones_like(value)), expected)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(torch.stack([a, a]), b)
    torch.testing.assert_close(each[1], expected[0])
    with pytest.raises(ValueError, match="^torch.vmap of Product: expected a batch of at least one element"):
        torch.func.vmap(ft.gemm_nt, in_dims=(0, None))(torch.empty(0, 9, 16, device=device), b[0])
    q = torch.func.vmap(lambda x: ft.quantize(x)[0].float())(torch.stack([a, a]))
    torch.testing.assert_close(q[0], ft.quantize(a)[0].float())


@pytest.mark.parametrize("mode", ["max", "mean", "sum"])
def test_torch_func_of_pooling_builds_the_map_of_the_gradient(device, mode):
    """Beneath the transform: what is made inside of it does not outlive it."""
    coords, shape = voxels(20, device)
    feats = leaves(20, device)[0]

    def loss(feats, nmap):
        return ft.sparse_pool3d(feats, neighbor_map=nmap, mode=mode).square().sum()

    def fresh_map():
        return flexgemm.sparse_conv_map(coords, shape, kernel_size=3, stride=2, padding=1)

    (expected,) = torch.autograd.grad(loss(feats, fresh_map()), feats)
    nmap = fresh_map()
    for _ in range(2):
        torch.testing.assert_close(torch.func.grad(loss)(feats.detach(), nmap), expected)
    (recorded,) = torch.autograd.grad(loss(feats, nmap), feats)
    torch.testing.assert_close(recorded, expected)
    nmap = fresh_map()
    batch = torch.stack([feats.detach(), 2 * feats.detach()])
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(batch, nmap)
    torch.testing.assert_close(each, torch.stack([expected, 2 * expected]))


def test_forward_mode_over_vmap_is_refused(device):
    coords, shape = voxels(20, device)
    feats, weight, _ = (t.detach() for t in leaves(20, device, kernel_size=(2, 2, 2)))
    own = ft.neighbor_map(coords, shape, 2)
    strided = flexgemm.sparse_conv_map(coords, shape, 2, 2).freeze()
    for nmap in (own, strided):
        for transform in (torch.func.jacfwd, torch.func.hessian):
            with pytest.raises(NotImplementedError, match="jvp"):
                transform(lambda x, nmap=nmap: ft.sparse_conv3d(x, weight, neighbor_map=nmap).sum())(feats)
        assert pytree.tree_leaves(pytree.tree_map(lambda leaf: None, nmap)) == [None] * 7


def test_batched_gradients_of_autograd_are_refused(device):
    """torch.func.vmap does what they do."""
    coords, shape = voxels(20, device)
    feats, weight, _ = leaves(20, device, kernel_size=(2, 2, 2))
    nmap = ft.neighbor_map(coords, shape, 2)
    for operation in (
        lambda x: ft.submanifold_conv3d(x, weight, neighbor_map=nmap),
        lambda x: ft.sparse_pool3d(x, neighbor_map=nmap),
        lambda x: ft.gemm_nt(x, x),
    ):
        out = operation(feats)
        with pytest.raises(NotImplementedError, match="gradients come one at a time, without is_grads_batched=True"):
            torch.autograd.grad(out, feats, torch.ones(2, *out.shape, device=device), is_grads_batched=True)
        with pytest.raises(NotImplementedError, match="torch.func.vmap takes several"):
            torch.autograd.functional.jacobian(operation, feats, vectorize=True)


def test_maps_are_built_within_torch_func(device):
    coords, shape = voxels(40, device)
    feats, *_ = leaves(40, device)
    torch.manual_seed(0)
    stem, down = fnn.SubMConv3d(feats.shape[1], 8, 3).to(device), fnn.SparseConv3d(8, 8, 2, 2).to(device)
    up, pool = fnn.SparseInverseConv3d(8, 4, 2).to(device), fnn.SparsePool3d(2).to(device)
    for network in (lambda x: up(down(stem(x))), lambda x: pool(stem(x))):
        inside, outside = (fnn.SparseTensor(feats.detach(), coords, shape) for _ in range(2))
        gradient = torch.func.grad(lambda x, on, of=network: of(on.replace(x)).feats.square().sum())
        (expected,) = torch.autograd.grad(network(outside.replace(feats)).feats.square().sum(), feats)
        torch.testing.assert_close(gradient(feats.detach(), inside), expected)
        # What was built there serves autograd, too.
        (again,) = torch.autograd.grad(network(inside.replace(feats)).feats.square().sum(), feats)
        torch.testing.assert_close(again, expected)


def test_coordinates_may_be_made_within_torch_func(device):
    coords, shape = voxels(40, device)
    feats = leaves(40, device)[0].detach()
    torch.manual_seed(0)
    conv, down = fnn.SubMConv3d(feats.shape[1], 8, 3).to(device), fnn.SparseConv3d(8, 8, 2, 2).to(device)

    def loss(feats):
        x = fnn.SparseTensor(feats, coords + 0, shape)
        samples = fnn.SparseTensor.collate([x.prune(feats[:, 0] > 0), *x.split()])
        nmap = ft.neighbor_map(samples.coords + 0, samples.shape)
        out = ft.submanifold_conv3d(samples.feats, conv.weight, conv.bias, neighbor_map=nmap)
        torch.testing.assert_close(conv(samples).feats, out)
        return down(samples.replace(out)).feats.square().sum()

    leaf = feats.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(feats), expected)

    def rows(x):
        code = ft.encode_seq(coords + 0, shape)
        where = ft.decode_seq(code + 0, shape)
        unique, inverse, counts = ft.unique_coords(where.repeat(2, 1), shape)
        return x[inverse.long()][ft.sort_coords(where + 0, shape).flatten().long()].sum() * counts[0]

    assert torch.equal(torch.func.grad(rows)(feats), torch.full_like(feats, 2))


def test_coordinates_of_each_element_of_vmap_are_refused(device):
    """Each would have maps of its own."""
    coords, shape = voxels(40, device)
    each, points = torch.stack([coords, coords]), torch.rand(2, 40, 3, device=device)
    feats = torch.ones(40, 3, device=device)
    for call in (
        lambda x: ft.neighbor_map(x, shape),
        lambda x: fnn.SparseTensor(feats, x, shape),
        lambda x: ft.unique_coords(x, shape),
        lambda x: ft.sort_coords(x, shape),
    ):
        with pytest.raises(ValueError, match=r"^coords: expected the same for all elements of torch\.func\.vmap"):
            torch.func.vmap(call)(each)
    with pytest.raises(ValueError, match=r"^points: expected the same for all elements of torch\.func\.vmap"):
        torch.func.vmap(lambda x: ft.voxelize(x, voxel_size=1.0, shape=shape).coords)(points)


def test_voxels_are_found_within_torch_func(device):
    torch.manual_seed(0)
    points, feats = torch.rand(200, 3, device=device) * 6, torch.randn(200, 5, device=device)

    def means(feats):
        return ft.voxelize(points + 0, feats, voxel_size=1.0, shape=(1, 6, 6, 6)).feats

    leaf = feats.clone().requires_grad_()
    (expected,) = torch.autograd.grad(means(leaf).square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: means(x).square().sum())(feats), expected)
    each = torch.func.vmap(means)(torch.stack([feats, 2 * feats]))
    torch.testing.assert_close(each, torch.stack([means(feats), means(2 * feats)]))


def test_coordinates_are_sorted_within_torch_func(device):
    coords, shape = voxels(40, device)
    feats = torch.randn(40, 3, device=device)

    def first():
        return ft.sort_coords(coords, shape).flatten()[0].long()

    gradient = torch.func.grad(lambda x: x[first()].sum())(feats)
    assert torch.equal(gradient, torch.zeros_like(feats).index_fill(0, first(), 1.0))
