"""Programs written against FlexGEMM, on flexgemm: curves, tables of voxels, samples."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch not installed")
from compat_scenes import Scene, empty_table  # noqa: E402

from flexgemm.compat.flex_gemm import ops  # noqa: E402
from flexgemm.compat.flex_gemm.kernels import cuda as kernels  # noqa: E402


@pytest.mark.parametrize("mode", ["z_order", "hilbert"])
@pytest.mark.parametrize(
    "width, batch, dtype", [(1024, 4, torch.int32), (1025, 1, torch.int64), (4096, 1000, torch.int64)]
)
def test_curves(device, mode, width, batch, dtype):
    """The batch survives at 11 bits and more, which FlexGEMM loses."""
    rng = np.random.default_rng(0)
    xyz = rng.integers(0, width, (300, 3))
    coords = torch.from_numpy(np.concatenate([rng.integers(0, batch, (300, 1)), xyz], 1).astype(np.int32)).to(device)
    shape = torch.Size([batch, 8, width, width, width])
    codes = ops.serialize.encode_seq(coords, shape, mode)
    assert codes.dtype is dtype
    assert torch.equal(ops.serialize.decode_seq(codes, shape, mode=mode), coords)
    assert torch.equal(ops.serialize.encode_seq(coords.long(), shape, mode), codes)
    if mode == "z_order":  # by default
        assert torch.equal(ops.serialize.encode_seq(coords, shape), codes)
        assert torch.equal(ops.serialize.decode_seq(codes, shape), coords)
    bits = (width - 1).bit_length()
    raw = torch.empty(300, dtype=dtype, device=device)
    getattr(kernels, f"{mode}_encode")(coords.long(), bits, raw)
    assert torch.equal(raw, codes)
    assert torch.equal(getattr(kernels, f"{mode}_decode")(raw, bits), coords)
    with pytest.raises(ValueError, match="mode"):
        ops.serialize.encode_seq(coords, shape, "bxyz")
    with pytest.raises(ValueError, match="^bit_length: expected up to 10 for torch.int32, got 11$"):
        getattr(kernels, f"{mode}_encode")(coords, 11, raw.int())


@pytest.mark.parametrize("mode", ["z_order", "hilbert"])
def test_curves_compile_whole(device, mode):
    s = Scene(device)
    torch.compiler.reset()
    how = {"fullgraph": True, "backend": "aot_eager"}
    codes = torch.compile(lambda x: ops.serialize.encode_seq(x, s.shape, mode), **how)(s.coords)
    assert torch.equal(codes, ops.serialize.encode_seq(s.coords, s.shape, mode))
    assert torch.equal(torch.compile(lambda x: ops.serialize.decode_seq(x, s.shape, mode), **how)(codes), s.coords)


@pytest.mark.parametrize("dtype", [torch.uint32, torch.uint64])
def test_tables(device, dtype):
    signed = torch.int32 if dtype is torch.uint32 else torch.int64
    table = empty_table(device, 400, dtype, dtype)
    keys = torch.from_numpy(np.random.default_rng(0).permutation(1000)[:300]).to(device, signed)
    values = (keys * 3 + 1).view(dtype)
    kernels.hashmap_insert(*table, keys.view(dtype), values)
    asked = torch.cat([keys, keys.new_tensor([5000])]).view(dtype)
    found = kernels.hashmap_lookup(*table, asked)
    assert found.dtype is dtype
    assert torch.equal(found[:-1].view(signed), values.view(signed))
    assert found.view(signed)[-1] == -1
    # A key that is inserted again gets its new value, others keep theirs.
    kernels.hashmap_insert(*table, keys[:10].view(dtype), values[10:20])
    found = kernels.hashmap_lookup(*table, keys.view(dtype)).view(signed)
    assert torch.equal(found, torch.cat([values[10:20], values[10:]]).view(signed))


def test_keys_and_values_need_not_be_contiguous(device):
    table, numbers = empty_table(device, 100), torch.arange(40, dtype=torch.int32, device=device)
    keys, values = (numbers[first::2].view(torch.uint32) for first in (0, 1))
    kernels.hashmap_insert(*table, keys, values)
    assert kernels.hashmap_lookup(*table, keys).view(torch.int32).tolist() == list(range(1, 40, 2))
    table, coords = empty_table(device, 100), torch.zeros(40, 4, dtype=torch.int32, device=device)
    coords[:, 1] = numbers
    kernels.hashmap_insert_3d_idx_as_val(*table, coords[::2], 40, 1, 1)
    assert kernels.hashmap_lookup_3d(*table, coords[::4], 40, 1, 1).view(torch.int32).tolist() == list(range(0, 20, 2))


def test_a_table_is_the_two_tensors_and_nothing_else(device):
    """It can be copied, emptied and looked into; the same coordinates make the same keys as FlexGEMM's."""
    table = empty_table(device, 100)
    coords = torch.tensor([[0, 1, 2, 3], [1, 0, 0, 4]], dtype=torch.int32, device=device)
    kernels.hashmap_insert_3d_idx_as_val(*table, coords, 4, 5, 6)
    held = table[0].view(torch.int32)
    assert sorted(held[held != -1].tolist()) == [1 * 30 + 2 * 6 + 3, 4 * 5 * 6 + 4]
    copies = [x.clone() for x in table]
    held.fill_(-1)
    assert kernels.hashmap_lookup_3d(*table, coords, 4, 5, 6).view(torch.int32).tolist() == [-1, -1]
    assert kernels.hashmap_lookup_3d(*copies, coords, 4, 5, 6).view(torch.int32).tolist() == [0, 1]


def test_a_crowded_table(device):
    """One free slot, most keys far from their first one."""
    keys = torch.arange(499, dtype=torch.int32, device=device)
    table = empty_table(device, 500)
    kernels.hashmap_insert(*table, keys.view(torch.uint32), keys.view(torch.uint32))
    asked = torch.arange(-100, 700, dtype=torch.int32, device=device)
    found = kernels.hashmap_lookup(*table, asked.view(torch.uint32)).view(torch.int32)
    assert torch.equal(found, torch.where((asked >= 0) & (asked < 499), asked, -1))


def test_tables_without_anything_to_do(device):
    table = empty_table(device, 0)
    coords = torch.empty(0, 4, dtype=torch.int32, device=device)
    kernels.hashmap_insert_3d_idx_as_val(*table, coords, 4, 4, 4)
    assert kernels.hashmap_lookup_3d(*table, coords, 4, 4, 4).dtype is torch.uint32
    with pytest.raises(ValueError, match="hashmap_keys"):
        kernels.hashmap_insert_3d_idx_as_val(*table, torch.cat([coords, coords.new_zeros(1, 4)]), 4, 4, 4)
    with pytest.raises(ValueError, match="hashmap_keys"):
        kernels.hashmap_lookup_3d(*empty_table(device), coords.new_zeros(1, 4), 2048, 2048, 2048)
    with pytest.raises(ValueError, match="^shape: expected at least 1, got 0$"):
        kernels.hashmap_lookup_3d(*empty_table(device), coords.new_zeros(1, 4), 4, 0, 4)
    some, few = torch.full((4, 4), 2, dtype=torch.int32, device=device), empty_table(device, 9)
    with pytest.raises(ValueError, match="^hashmap_values: "):
        kernels.hashmap_insert_3d_idx_as_val(few[0], few[1][:8], some, 4, 4, 4)
    with pytest.raises(ValueError, match="^hashmap_values: "):
        kernels.hashmap_lookup_3d(few[0], few[1][:8], some, 4, 4, 4)
    with pytest.raises(TypeError, match="hashmap_values"):
        kernels.hashmap_lookup_3d(table[0].new_zeros(9), torch.zeros(9, device=device), coords.new_zeros(1, 4), 4, 4, 4)


@pytest.mark.parametrize(
    "grid, dtype",
    [
        ((1, 1625, 1625, 1625), torch.uint32),
        ((1, 1626, 1626, 1626), torch.uint64),
        ((3, 2**16, 7, 3120), torch.uint32),
        ((2, 2**16, 2**15, 1), torch.uint64),  # whose last voxel would have the key of an empty slot
    ],
)
def test_the_table_of_a_grid(device, grid, dtype):
    shape = torch.Size([grid[0], 7, *grid[1:]])
    keys, values = ops.utils.init_hashmap(shape, 10, device)
    assert (keys.dtype, values.dtype, tuple(values.shape)) == (dtype, torch.uint32, (10,))
    assert (keys.view(torch.int32) == -1).all()
    alone = ops.utils.init_hashmap(shape, 10, device, with_values=False)
    assert alone.dtype is dtype


@pytest.mark.parametrize("key_dtype", [torch.uint32, torch.uint64])
def test_tables_of_voxels(device, key_dtype):
    s = Scene(device)
    w, h, d = s.grid[1:]
    table = empty_table(device, 400, key_dtype)
    kernels.hashmap_insert_3d_idx_as_val(*table, s.coords, w, h, d)
    found = kernels.hashmap_lookup_3d(*table, s.coords.flip(0).contiguous(), w, h, d)
    assert found.view(torch.int32).tolist() == list(range(200))[::-1]
    other = empty_table(device, 400, key_dtype)
    values = torch.arange(200, dtype=torch.int32, device=device) * 7
    kernels.hashmap_insert_3d(*other, s.coords, values.view(torch.uint32), w, h, d)
    assert torch.equal(kernels.hashmap_lookup_3d(*other, s.coords, w, h, d).view(torch.int32), values)


def test_keys_of_32_bits_number_as_many_voxels(device):
    table, grid = empty_table(device, 8), (2**10, 2**10, 2**11)
    coords = torch.tensor([[1, 1023, 1023, 2046], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.int32, device=device)
    kernels.hashmap_insert_3d_idx_as_val(*table, coords[:2], *grid)
    assert kernels.hashmap_lookup_3d(*table, coords, *grid).view(torch.int32).tolist() == [0, 1, -1]


@pytest.mark.parametrize("mode", ["trilinear", "nearest"])
def test_grid_sample(device, mode):
    """At voxel centres, + 0.5, both modes give the voxel itself; between two voxels alone, their mean."""
    coords = torch.tensor([[0, 1, 1, 1], [0, 2, 1, 1], [1, 0, 0, 0]], dtype=torch.int32, device=device)
    feats = torch.tensor([[1.0], [3.0], [5.0]], device=device, requires_grad=True)
    points = torch.tensor([[[1.5, 1.5, 1.5], [2.0, 1.5, 1.5]], [[0.5, 0.5, 0.5], [3.5, 3.5, 3.5]]], device=device)
    shape = torch.Size([2, 1, 4, 4, 4])
    ops.grid_sample.set_hashmap_ratio(3.0)
    out = ops.grid_sample.grid_sample_3d(feats, coords, shape=shape, grid=points, mode=mode)
    if mode == "trilinear":  # by default
        assert torch.equal(ops.grid_sample.grid_sample_3d(feats, coords, shape, points), out)
    between = 2.0 if mode == "trilinear" else 3.0
    torch.testing.assert_close(out[..., 0], torch.tensor([[1.0, between], [5.0, 0.0]], device=device))
    table = empty_table(device, 8)
    if mode == "nearest":
        rows = kernels.hashmap_build_grid_sample_3d_nearest_neighbor_map(*table, coords, points, 4, 4, 4)
        assert rows.view(torch.int32).tolist() == [[0, 1], [2, -1]]
    else:
        build = kernels.hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight
        rows, weights = build(*table, coords, points, 4, 4, 4)
        assert rows.view(torch.int32)[0, 1].tolist() == [0, 1, -1, -1, -1, -1, -1, -1]  # x is the lowest bit
        assert weights.is_contiguous()
        picked = feats[rows.view(torch.int32).long().clamp_min(0), 0] * weights * (rows.view(torch.int32) >= 0)
        torch.testing.assert_close(picked.sum(-1), out[..., 0])
    out.sum().backward()
    assert feats.grad.sum().item() == pytest.approx(3)
    from flexgemm.compat.flex_gemm.ops.grid_sample import grid_sample, grid_sample_torch

    assert grid_sample.GridSample3dFunction is ops.grid_sample.GridSample3dFunction
    assert torch.equal(grid_sample_torch.grid_sample_3d_torch(feats, coords, shape, points, mode), out)
    assert torch.equal(grid_sample_torch.GridSample3dTorch.forward(feats, coords, shape, points, mode), out)
    assert torch.equal(ops.grid_sample.GridSample3dFunction.apply(feats, coords, shape, points, mode), out)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float64])
def test_nearest_takes_labels(device, dtype):
    coords = torch.tensor([[0, 1, 1, 1], [0, 2, 1, 1]], dtype=torch.int32, device=device)
    labels = torch.tensor([[0, 1], [1, 1]], device=device).to(dtype)
    points = torch.tensor([[[1.5, 1.5, 1.5], [0.5, 3.5, 0.5], [2.9, 1.0, 1.2]]], device=device)
    shape = torch.Size([1, 2, 4, 4, 4])
    out = ops.grid_sample.grid_sample_3d(labels, coords, shape, points, "nearest")
    assert out.dtype is dtype
    assert out.int().tolist() == [[[0, 1], [0, 0], [1, 1]]]
    none = ops.grid_sample.grid_sample_3d(labels[:0], coords[:0], shape, points, "nearest")
    assert tuple(none.shape) == (1, 3, 2) and not none.any()
    with pytest.raises(ValueError, match=r"^feats: expected \(2, C\) to match coords, got \(1, 2\)$"):
        ops.grid_sample.grid_sample_3d(labels[:1], coords, shape, points, "nearest")
    if dtype is torch.float64:
        ops.grid_sample.grid_sample_3d(labels.requires_grad_(), coords, shape, points, "nearest").sum().backward()
        assert labels.grad.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    "mode, dtype", [("trilinear", torch.float32), ("nearest", torch.float32), ("nearest", torch.int64)]
)
def test_points_say_how_many_samples_there_are(device, mode, dtype):
    """Those that have no points are left out, those that have no voxels are 0, whatever the shape says."""
    s = Scene(device, batch=3)
    feats = (10 * s.feats.detach()).to(dtype)
    points = torch.rand(4, 50, 3, device=device) * torch.tensor(s.grid[1:], device=device)
    four = torch.Size([4, *s.shape[1:]])
    expected = ops.grid_sample.grid_sample_3d(feats, s.coords, four, points, mode)
    for count in range(5):
        some = points[:count].clone().requires_grad_()
        out = ops.grid_sample.grid_sample_3d(feats, s.coords, s.shape, some, mode)
        torch.testing.assert_close(out, expected[:count])
        if mode == "trilinear":
            out.sum().backward()
            assert some.grad.any() == (count > 0)
    assert expected[:3].any() and not expected[3].any()


def test_voxels_may_be_of_samples_without_points(device):
    s = Scene(device, batch=3)
    points = torch.rand(3, 50, 3, device=device) * torch.tensor(s.grid[1:], device=device)
    at = [(*empty_table(device), s.coords, x, *s.grid[1:]) for x in (points, points[:1])]
    nearest, first = (kernels.hashmap_build_grid_sample_3d_nearest_neighbor_map(*x) for x in at)
    assert torch.equal(nearest[:1], first)
    trilinear, first = (kernels.hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight(*x) for x in at)
    assert all(torch.equal(x[:1], y) for x, y in zip(trilinear, first, strict=True))


def test_samples_of_64_bit_coordinates_and_stray_points(device):
    """As renderers ask for them: points of the background lie anywhere, or nowhere."""
    coords = torch.tensor([[0, 1, 1, 1], [0, 2, 2, 2]], device=device)
    feats = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device).half()
    points = [[1.5, 1.5, 1.5], [float("nan"), 0, 0], [1e9, -1e9, 2], [2, 2, 2]]
    grid = torch.tensor([points], device=device, dtype=torch.float64)
    out = ops.grid_sample.grid_sample_3d(feats, coords, torch.Size([1, 2, 4, 4, 4]), grid, mode="trilinear")
    assert out.dtype is torch.float16
    assert out[0].tolist() == [[1, 2], [0, 0], [0, 0], [2, 3]]
