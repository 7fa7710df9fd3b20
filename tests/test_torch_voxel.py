"""The operations on voxels that autograd records."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import scenes

torch = pytest.importorskip("torch")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from torch_problem import keep_busy  # noqa: E402

import flexgemm  # noqa: E402
import flexgemm.torch as ft  # noqa: E402


def sampling(device, channels=5):
    """Points a quarter away from where cells meet, in a scene with gaps."""
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(120, batch=2, density=0.6)
    cells = np.stack([rng.integers(-1, s, (2, 40)) for s in shape[1:]], axis=2)
    grid = cells + 0.5 + rng.choice([0.25, 0.375, 0.5, 0.75], cells.shape)
    feats = torch.tensor(rng.standard_normal((120, channels)), dtype=torch.float32, device=device, requires_grad=True)
    grid = torch.tensor(grid, dtype=torch.float32, device=device, requires_grad=True)
    return feats, torch.tensor(coords, device=device), shape, grid


def dense(feats, coords, shape, grid):
    """Trilinear samples by torch's own operations in float64: weighted sums over a dense grid with a mask."""
    volume = feats.new_zeros(*[s + 2 for s in (shape[0] - 2, *shape[1:])], feats.shape[1] + 1)
    c = coords.long()
    ones = feats.new_ones(len(feats), 1)
    volume = volume.index_put((c[:, 0], c[:, 1] + 1, c[:, 2] + 1, c[:, 3] + 1), torch.cat([feats, ones], dim=1))
    place = grid - 0.5
    base = place.detach().floor()
    fraction, base, sums = place - base, base.long() + 1, 0
    for corner in range(8):
        bit = torch.tensor([corner >> 2, corner >> 1 & 1, corner & 1])
        weight = torch.where(bit.bool(), fraction, 1 - fraction).prod(dim=2)
        at = base + bit
        batch = torch.arange(len(grid))[:, None].expand(grid.shape[:2])
        sums = sums + weight[..., None] * volume[batch, at[..., 0], at[..., 1], at[..., 2]]
    return sums[..., :-1] / sums[..., -1:].clamp_min(1e-30)


def test_gradients_are_those_of_torch_s_own_operations(device):
    feats, coords, shape, grid = sampling(device)
    grad_out = torch.randn(2, 40, 5, generator=torch.Generator().manual_seed(0)).to(device)
    out = flexgemm.grid_sample_3d(feats, coords, shape, grid)
    out.backward(grad_out)
    f, g = (x.detach().double().cpu().requires_grad_() for x in (feats, grid))
    expected = dense(f, coords.cpu(), shape, g)
    expected.backward(grad_out.double().cpu())
    for got, want in ((out, expected), (feats.grad, f.grad), (grid.grad, g.grad)):
        torch.testing.assert_close(got.detach().double().cpu(), want.detach(), rtol=1e-5, atol=1e-5)


def test_only_what_is_asked_for_has_a_gradient(device):
    feats, coords, shape, grid = sampling(device)
    flexgemm.grid_sample_3d(feats, coords, shape, grid.detach()).sum().backward()
    assert feats.grad is not None and grid.grad is None
    feats, coords, shape, grid = sampling(device)
    flexgemm.grid_sample_3d(feats.detach(), coords, shape, grid).sum().backward()
    assert feats.grad is None and grid.grad is not None
    with torch.no_grad():
        assert not flexgemm.grid_sample_3d(feats, coords, shape, grid).requires_grad


def test_a_map_is_shared_by_layers(device):
    feats, coords, shape, grid = sampling(device)
    sample_map = flexgemm.sample_map(coords, shape, grid.detach())
    for mode_feats in (feats, feats.detach().half().requires_grad_()):
        out = ft.grid_sample_3d(mode_feats, sample_map=sample_map)
        out.sum().backward()
        assert mode_feats.grad.dtype == mode_feats.dtype
        assert mode_feats.grad.abs().sum() > 0


@pytest.mark.parametrize("library", [flexgemm, ft], ids=["neutral", "torch"])
def test_points_changed_before_backward_are_noticed(device, library):
    """Where the gradient reads them: that of the features alone does not, nor does that of "nearest"."""
    feats, coords, shape, leaf = sampling(device)
    for grid, mode in ((leaf * 1, "trilinear"), (leaf.detach(), "trilinear"), (leaf * 1, "nearest")):
        out = library.grid_sample_3d(feats, coords, shape, grid, mode)
        with torch.no_grad():
            grid.add_(1)
        if grid.requires_grad and mode == "trilinear":
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        else:
            out.sum().backward()


@pytest.mark.parametrize("library", [flexgemm, ft], ids=["neutral", "torch"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_map_stands_instead_of_voxels_and_points(device, library, needs_grad):
    feats, coords, shape, grid = (x.detach() if torch.is_tensor(x) else x for x in sampling(device))
    feats.requires_grad_(needs_grad)
    sample_map = flexgemm.sample_map(coords, shape, grid)
    for given in ({"coords": coords}, {"shape": shape}, {"grid": grid}):
        with pytest.raises(ValueError, match="^sample_map: expected it instead of coords, shape and grid, got both"):
            library.grid_sample_3d(feats, **given, sample_map=sample_map)
        with pytest.raises(ValueError, match="^coords, shape, grid: expected all of them, or sample_map"):
            library.grid_sample_3d(feats, **given)
    with pytest.raises(TypeError, match="^sample_map: expected a SampleMap, got int"):
        library.grid_sample_3d(feats, sample_map=3)
    with pytest.raises(ValueError, match="^mode: expected 'trilinear' or 'nearest', got 'cubic'"):
        library.grid_sample_3d(feats, sample_map=sample_map, mode="cubic")
    with pytest.raises(ValueError, match="^mode: expected None or 'trilinear', that of sample_map, got 'nearest'"):
        library.grid_sample_3d(feats, sample_map=sample_map, mode="nearest")
    same = library.grid_sample_3d(feats, sample_map=sample_map, mode="trilinear")
    assert torch.equal(same, library.grid_sample_3d(feats, coords, shape, grid))


def test_the_nearest_voxel_passes_its_gradient_on(device):
    feats, coords, shape, grid = sampling(device)
    out = flexgemm.grid_sample_3d(feats, coords, shape, grid, "nearest")
    out.sum().backward()
    sample_map = flexgemm.sample_map(coords, shape, grid.detach(), "nearest")
    rows = sample_map.indices.ravel().long().cpu()
    expected = torch.zeros(120).index_add(0, rows[rows >= 0], torch.ones(int((rows >= 0).sum())))
    torch.testing.assert_close(feats.grad.cpu(), expected[:, None].expand(120, 5))
    assert grid.grad is None or not grid.grad.any()


# ---- points and voxels ----


def cloud(device, channels=5):
    rng = np.random.default_rng(0)
    points = torch.tensor(rng.uniform(-0.5, 4.5, (300, 3)), dtype=torch.float32, device=device)
    feats = torch.tensor(rng.standard_normal((300, channels)), dtype=torch.float32, device=device, requires_grad=True)
    return points, feats


@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "first"])
def test_gradients_of_voxelization(device, reduce):
    points, feats = cloud(device)
    voxels = flexgemm.voxelize(points, feats, voxel_size=1.0, shape=(1, 4, 4, 4), reduce=reduce)
    grad_out = torch.randn(voxels.feats.shape, generator=torch.Generator().manual_seed(0)).to(device)
    voxels.feats.backward(grad_out)
    f = feats.detach().cpu().double().requires_grad_()
    inverse = voxels.inverse.cpu()
    rows = [f[inverse == m] for m in range(voxels.num_voxels)]
    way = {"mean": lambda r: r.mean(0), "sum": lambda r: r.sum(0), "max": lambda r: r.amax(0), "first": lambda r: r[0]}
    expected = torch.stack([way[reduce](r) for r in rows])
    expected.backward(grad_out.double().cpu())
    torch.testing.assert_close(voxels.feats.detach().double().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(feats.grad.double().cpu(), f.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_gradients_of_devoxelization(device, mode):
    points, _ = cloud(device)
    voxels = flexgemm.voxelize(points, voxel_size=1.0, shape=(1, 4, 4, 4))
    feats = torch.randn(voxels.num_voxels, 6, device=device, requires_grad=True)
    out = flexgemm.devoxelize(feats, voxels, mode)
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(device)
    out.backward(grad_out)
    with torch.no_grad():  # linear in feats: <out, g> = <feats, grad>
        assert torch.allclose((out * grad_out).sum(), (feats * feats.grad).sum(), rtol=1e-4)
        inside = voxels.inverse >= 0
        assert inside.any() and not inside.all()
        if mode == "nearest":
            torch.testing.assert_close(out[inside], feats[voxels.inverse[inside].long()])
            assert not out[~inside].any()


@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "first"])
def test_no_point_lies_in_a_voxel(device, reduce):
    points, feats = cloud(device)
    voxels = flexgemm.voxelize(points - 100, feats, voxel_size=1.0, shape=(1, 4, 4, 4), reduce=reduce)
    assert voxels.feats.shape == (0, 5)
    voxels.feats.sum().backward()
    assert not feats.grad.any()


# ---- what is kept ----


def copies_of(x):
    return copy.deepcopy(x), pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("mode", ["trilinear", "nearest"])
def test_sample_maps_are_copied_and_saved(device, mode):
    feats, coords, shape, grid = sampling(device)
    sample_map = flexgemm.sample_map(coords, shape, grid.detach(), mode)
    expected = torch.autograd.grad(ft.grid_sample_3d(feats, sample_map=sample_map).square().sum(), feats)
    for other in copies_of(sample_map):
        assert torch.equal(other.indices, sample_map.indices)
        assert (other.weights is None) == (mode == "nearest")
        got = torch.autograd.grad(ft.grid_sample_3d(feats, sample_map=other).square().sum(), feats)
        torch.testing.assert_close(got, expected)


def test_voxels_are_copied_and_saved(device):
    points, feats = cloud(device)
    voxels = flexgemm.voxelize(points, feats.detach(), voxel_size=1.0, shape=(1, 4, 4, 4))
    out = flexgemm.devoxelize(voxels.feats, voxels, "trilinear")
    for other in copies_of(voxels):
        assert torch.equal(other.feats, voxels.feats) and torch.equal(other.inverse, voxels.inverse)
        assert torch.equal(flexgemm.devoxelize(other.feats, other, "trilinear"), out)


def test_voxels_found_in_inference_mode_are_trained_on(device):
    points, feats = cloud(device)

    def gradients(voxels):
        rows = ft.reduce_points(feats, voxels, "max")
        outs = [ft.devoxelize(rows, voxels, mode) for mode in ("nearest", "trilinear")]
        with FlopCounterMode(display=False):  # where voxels are tensors of operators
            outs += [ft.devoxelize(rows, voxels, mode) for mode in ("nearest", "trilinear")]
            outs += [ft.reduce_points(feats, voxels, "mean")]
        sampled = ft.grid_sample_3d(rows, sample_map=sample_map_of(voxels))
        return torch.autograd.grad(sum(out.square().sum() for out in (*outs, sampled)), feats)

    def find():
        voxels = flexgemm.voxelize(points, voxel_size=1.0, shape=(1, 4, 4, 4))
        return voxels, flexgemm.unique_coords(voxels.coords, voxels.shape)

    def sample_map_of(voxels):
        return flexgemm.sample_map(voxels.coords, voxels.shape, voxels.places)

    with torch.inference_mode():
        voxels, unique = find()
        weights = sample_map_of(voxels).weights
    assert not any(tensor.is_inference() for tensor in (*voxels.groups, voxels.coords, *unique, weights))
    torch.testing.assert_close(gradients(voxels), gradients(find()[0]))


# ---- torch.func ----


def _first_use(device, of):
    """A call that needs what is built on first use, over a map or voxels that nobody has used: always the same."""
    torch.manual_seed(0)
    feats, coords, shape, grid = (x.detach() if isinstance(x, torch.Tensor) else x for x in sampling(device))
    if of == "SampleMap":
        sample_map, grad_out = flexgemm.sample_map(coords, shape, grid), torch.ones(2, 40, 5, device=device)
        return lambda: flexgemm.grid_sample_3d_backward(grad_out, feats, sample_map=sample_map)[0]
    voxels = flexgemm.voxelize(torch.rand(500, 3, device=device) * 8, voxel_size=1.0, shape=(1, 8, 8, 8))
    values = torch.ones(voxels.num_voxels, 5, device=device)
    return lambda: flexgemm.devoxelize(values, voxels, "trilinear")


@pytest.mark.parametrize("of", ["SampleMap", "Voxels"])
def test_other_streams_wait_for_what_is_built_on_first_use(cuda_device, of):
    expected = _first_use(cuda_device, of)()
    call, side = _first_use(cuda_device, of), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        keep_busy()
        call()
    assert torch.equal(call(), expected)


@pytest.mark.parametrize("of", ["SampleMap", "Voxels"])
def test_a_graph_keeps_what_it_builds_on_first_use(cuda_device, of):
    """It is not there before the graph is replayed."""
    expected = _first_use(cuda_device, of)()
    call, graph = _first_use(cuda_device, of), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    assert torch.equal(call(), expected)
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.parametrize("mode", ["trilinear", "nearest"])
def test_sampling_under_torch_func(device, mode):
    feats, coords, shape, grid = sampling(device)

    def loss(feats, grid):
        return ft.grid_sample_3d(feats, coords, shape, grid, mode).square().sum()

    expected = torch.autograd.grad(loss(feats, grid), (feats, grid), allow_unused=True)
    expected = [torch.zeros_like(grid) if g is None else g for g in expected]
    feats, grid = feats.detach(), grid.detach()
    gradient = torch.func.grad(loss, argnums=(0, 1))
    torch.testing.assert_close(list(gradient(feats, grid)), expected)
    # The gradient behind vjp is asked for when its transform is over.
    value, pull_back = torch.func.vjp(loss, feats, grid)
    torch.testing.assert_close(list(pull_back(torch.ones_like(value))), expected)
    of_feats, of_grid = torch.func.vmap(gradient, in_dims=(0, None))(torch.stack([2 * feats, feats]), grid)
    torch.testing.assert_close([of_feats[1], of_grid[1]], expected)
    _, of_grid = torch.func.vmap(gradient, in_dims=(None, 1))(feats, torch.stack([grid, grid + 0.125], dim=1))
    torch.testing.assert_close(of_grid[0], expected[1])


@pytest.mark.parametrize("made", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("mode", ["trilinear", "nearest"])
def test_devoxelization_under_torch_func(device, mode, made):
    voxels = flexgemm.voxelize(cloud(device)[0], voxel_size=1.0, shape=(1, 4, 4, 4))
    feats = torch.randn(voxels.num_voxels, 6, device=device)
    if made:
        ft.devoxelize(feats, voxels, mode)

    def loss(feats):
        return ft.devoxelize(feats, voxels, mode).square().sum()

    got = torch.func.grad(loss)(feats)
    neutral = torch.func.grad(lambda feats: flexgemm.devoxelize(feats, voxels, mode).square().sum())(feats)
    assert torch.equal(neutral, got)
    each = torch.func.vmap(torch.func.grad(loss))(torch.stack([feats, 2 * feats]))
    leaf = feats.requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(each, torch.stack([expected, 2 * expected]))


def test_a_sample_map_under_torch_func(device):
    feats, coords, shape, grid = sampling(device)
    sample_map = flexgemm.sample_map(coords, shape, grid.detach())

    def loss(feats):
        return ft.grid_sample_3d(feats, sample_map=sample_map).square().sum()

    (expected,) = torch.autograd.grad(loss(feats), feats)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(feats.detach()[None]), expected[None])


def test_the_gradient_of_a_sampling_has_none(device):
    feats, coords, shape, grid = sampling(device)
    out = ft.grid_sample_3d(feats, coords, shape, grid).square().sum()
    (gradient,) = torch.autograd.grad(out, feats, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        gradient.sum().backward()


# ---- torch in, torch out ----


def test_what_comes_out_is_torch_s_and_where_the_input_is(device):
    coords, shape = scenes.scene(200, batch=2)
    coords = torch.tensor(coords, device=device)
    code = flexgemm.encode_seq(coords, shape, "hilbert")
    table = flexgemm.HashTable.build(coords, shape=shape)
    results = [
        code,
        flexgemm.decode_seq(code, shape, "hilbert"),
        flexgemm.sort_coords(coords, shape),
        table.lookup(coords),
        *flexgemm.unique_coords(coords, shape),
    ]
    for result in results:
        assert isinstance(result, torch.Tensor) and result.device == coords.device
    assert torch.equal(results[1], coords)
    assert torch.equal(results[3], torch.arange(200, device=device, dtype=torch.int32))
    assert torch.equal(results[4][results[5].long()], coords)
    assert not table.overflowed


def test_strided_and_permuted_tensors_are_taken(device):
    coords, shape = scenes.scene(200, batch=2)
    coords = torch.tensor(coords, device=device)
    wide = torch.zeros(200, 8, dtype=torch.int32, device=device)
    wide[:, ::2] = coords
    assert torch.equal(flexgemm.encode_seq(wide[:, ::2], shape), flexgemm.encode_seq(coords, shape))
    feats = torch.randn(16, 200, device=device).t()
    grid = torch.rand(2, 3, 30, device=device).transpose(1, 2) * 4
    out = flexgemm.grid_sample_3d(feats, coords, shape, grid)
    assert torch.equal(out, flexgemm.grid_sample_3d(feats.contiguous(), coords, shape, grid.contiguous()))


# ---- faults ----


def test_the_defaults_are_those_of_the_neutral_functions(device):
    feats, coords, shape, grid = (x.detach() if isinstance(x, torch.Tensor) else x for x in sampling(device))
    points, given = cloud(device)
    how = {"voxel_size": 1.0, "shape": (1, 4, 4, 4)}
    cells = flexgemm.voxelize(points, given.detach(), **how)
    results = []
    for library in (flexgemm, ft):
        code = library.encode_seq(coords, shape)
        results.append(
            [
                library.grid_sample_3d(feats, coords, shape, grid),
                library.voxelize(points, given.detach(), **how).feats,
                library.reduce_points(given.detach(), cells),
                library.devoxelize(cells.feats, cells),
                code,
                library.decode_seq(code, shape),
                library.sort_coords(coords, shape),
            ]
        )
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_what_is_no_tensor_or_no_voxels_is_named(device, needs_grad):
    feats, coords, shape, grid = (x.detach() if torch.is_tensor(x) else x for x in sampling(device))
    feats.requires_grad_(needs_grad)
    for function in (ft.reduce_points, ft.devoxelize):
        with pytest.raises(TypeError, match="^voxels: expected Voxels, got NoneType"):
            function(feats, None)
    for function, argument, given in (
        (ft.grid_sample_3d, "grid", (coords, shape, grid.tolist())),
        (ft.grid_sample_3d, "coords", (coords.tolist(), shape, grid)),
        (ft.global_pool, "coords", (coords.tolist(), 2)),
        (ft.broadcast_samples, "coords", (coords.tolist(),)),
    ):
        with pytest.raises(TypeError, match=f"^{argument}: expected .* got list"):
            function(feats, *given)
