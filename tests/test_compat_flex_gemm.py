"""Programs written against FlexGEMM, on flexgemm: its calls, results, caches and settings."""

from __future__ import annotations

import calls
import numpy as np
import pytest
import reference
import verdicts

torch = pytest.importorskip("torch", reason="torch not installed")
from compat_scenes import Scene, numpy, signed  # noqa: E402

from flexgemm import compat  # noqa: E402
from flexgemm.compat.flex_gemm import ops  # noqa: E402
from flexgemm.compat.flex_gemm.kernels import cuda as kernels  # noqa: E402
from flexgemm.compat.flex_gemm.kernels.triton.spconv import config  # noqa: E402
from flexgemm.compat.flex_gemm.ops import spconv  # noqa: E402
from flexgemm.compat.flex_gemm.ops.spconv import (  # noqa: E402
    SparseConv3dFunction,
    SubMConv3dFunction,
    SubMConv3dNeighborCache,
    sparse_conv3d,
    sparse_submanifold_conv3d,
)

# ---- submanifold convolution ----


@pytest.mark.parametrize("kernel_size", [(3, 3, 3), (2, 2, 2), (5, 5, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_backward(device, kernel_size, bias):
    """Even kernels, volumes above 32 and bias=None, which FlexGEMM gets wrong, too."""
    s = Scene(device, kernel_size=kernel_size)
    out, cache = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias if bias else None)
    verdicts.assert_rows(numpy(out), s.expected(bias), s.tolerance)
    out.backward(torch.ones_like(out))
    s.check_gradients(torch.ones_like(out), bias)
    np.testing.assert_array_equal(signed(cache["neighbor_map"]), s.map)
    assert (cache.neighbor_map.dtype, tuple(cache.neighbor_map.shape)) == (torch.uint32, s.map.shape[::-1])


def test_a_cache_is_reused_by_position_and_serves_training(device):
    s = Scene(device)
    with torch.no_grad():
        first, cache = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, None, (1, 1, 1))
    out, again = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, cache, (1, 1, 1))
    assert again is cache
    assert torch.equal(out, first)
    assert torch.equal(sparse_submanifold_conv3d(s.feats, None, None, s.weight, s.bias, cache)[0], first)
    out.backward(torch.ones_like(out))
    s.check_gradients(torch.ones_like(out))


@pytest.mark.parametrize("kernel_size", [(3, 3, 3), (2, 2, 2), (1, 3, 5)])
def test_a_cache_of_a_map_that_a_program_made(device, kernel_size):
    s = Scene(device, kernel_size=kernel_size)
    own = torch.from_numpy(np.ascontiguousarray(s.map.T)).to(device).view(torch.uint32)
    centre = own.view(torch.int32).clone()
    centre[:, 1:] = -1
    made = SubMConv3dNeighborCache(neighbor_map=centre.view(torch.uint32), splitk=2)
    _, found = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias)
    codes = found.gray_code.clone()
    found.compute_kernel_idx(64)
    found["neighbor_map"] = centre.view(torch.uint32)
    assert not hasattr(found, "valid_kernel_64") and not hasattr(found, "nmap")
    assert made["splitk"] == 2 and not torch.equal(found.gray_code, codes)
    s.map[1:] = -1
    for cache in (made, found):
        s.check(cache)
    made.neighbor_map = own
    s.map = signed(own)
    out, _ = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, made)
    verdicts.assert_rows(numpy(out), s.expected(), s.tolerance)
    assert len(made.gray_code) == len(own)
    turned = s.weight.reshape(7, *kernel_size[::-1], 5)  # of as many offsets, numbered alike
    assert torch.equal(sparse_submanifold_conv3d(s.feats, s.coords, s.shape, turned, s.bias, made)[0], out)
    with torch.inference_mode():
        uncounted = SubMConv3dNeighborCache(neighbor_map=own.clone())
        sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, uncounted)
        uncounted.neighbor_map.view(torch.int32)[:, :1] = -1
    own.view(torch.int32)[:, :1] = -1
    s.map[0] = -1
    for cache in (made, uncounted):
        with torch.inference_mode(cache is uncounted):
            out, _ = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, cache)
        verdicts.assert_rows(numpy(out), s.expected(), s.tolerance)
    if s.map.shape[0] <= 32:
        assert torch.equal(made.gray_code, SubMConv3dNeighborCache(neighbor_map=own).gray_code)
    with pytest.raises(ValueError, match="^weight: expected"):
        sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight[:, :, :1, :1], s.bias, made)
    if device.type == "cpu":
        wrong = own.view(torch.int32).clone()
        wrong[7, 2] = 2 * len(wrong)
        with pytest.raises(ValueError, match=r"^map: entry \(2, 7\) is 400, expected -1 or a row below 200$"):
            beyond = SubMConv3dNeighborCache(neighbor_map=wrong)
            sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, beyond)
    with pytest.raises(TypeError, match="^freeze: expected a cache of coordinates"):
        made.freeze()
    for wrong in (s.map.T.tolist(), own.view(torch.int32).long(), own[0]):
        with pytest.raises(TypeError, match=r"^neighbor_map: expected a tensor \(M, V\) of uint32, got"):
            made.neighbor_map = wrong
    assert made.neighbor_map is own


def test_a_bias_of_another_dtype(device):
    s = Scene(device)
    out, _ = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias.double())
    verdicts.assert_rows(numpy(out), s.expected(), s.tolerance)
    out.backward(torch.ones_like(out))
    s.check_gradients(torch.ones_like(out))


def test_blocks_of_offsets_as_items(device):
    s = Scene(device)
    _, cache = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias)
    cache.compute_kernel_idx(64)
    kernel = cache["valid_kernel_64"]
    assert cache.valid_kernel_callback(64) is kernel
    assert cache.valid_kernel_seg_callback(64) is cache["valid_kernel_seg_64"]
    assert cache.valid_kernel_callback(32) is cache["valid_kernel_32"], "kept, as if it had been there"
    assert cache.valid_kernel_seg_callback(128) is cache["valid_kernel_seg_128"]


def test_the_steps_of_the_function(device):
    s = Scene(device)
    for compute in (SubMConv3dFunction._compute_neighbor_cache, SubMConv3dFunction._compute_neighbor_cache_torch):
        for needs_grad in ((), (True,), (False,)):
            cache = compute(s.coords, s.shape, (3, 3, 3), (1, 1, 1), *needs_grad)
            np.testing.assert_array_equal(signed(cache.neighbor_map), s.map)
    out = SubMConv3dFunction._sparse_submanifold_conv_forward(s.feats, cache, s.weight, s.bias)
    assert not out.requires_grad
    verdicts.assert_rows(numpy(out), s.expected(), s.tolerance)
    grad_out = torch.randn_like(out)
    gradients = SubMConv3dFunction._sparse_submanifold_conv_backward(grad_out, s.feats, cache, s.weight, s.bias)
    for leaf, gradient in zip((s.feats, s.weight, s.bias), gradients, strict=True):
        leaf.grad = gradient.reshape(leaf.shape)
    s.check_gradients(grad_out)
    fixed = SubMConv3dFunction._sparse_submanifold_conv_backward(grad_out, s.feats.detach(), cache, s.weight, s.bias)
    assert fixed[0] is None and torch.equal(fixed[1], gradients[1])
    s.bias.requires_grad_(False)
    assert SubMConv3dFunction._sparse_submanifold_conv_backward(grad_out, s.feats, cache, s.weight, s.bias)[2] is None
    assert SubMConv3dFunction._sparse_submanifold_conv_backward(grad_out, s.feats, cache, s.weight)[2] is None


def test_a_frozen_cache_compiles_whole(device):
    s = Scene(device)
    _, cache = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias)
    frozen = cache.freeze(splitk=2)
    assert (frozen.splitk, frozen.algorithm) == (2, "masked_implicit_gemm_splitk")
    assert cache.freeze(1, "implicit_gemm").algorithm == "implicit_gemm"
    frozen.splitk = 4
    assert frozen.splitk == 4 and frozen.block_sizes == [32, 64, 128, 256]
    for name in ("neighbor_map", "sorted_idx", "valid_signal_i", "valid_signal_o", "valid_signal_seg"):
        assert torch.equal(getattr(frozen, name), cache[name])
    for block, kernels_at, segments in zip(
        frozen.block_sizes, frozen.valid_kernels, frozen.valid_kernel_segs, strict=True
    ):
        assert torch.equal(kernels_at, cache.valid_kernel_callback(block))
        assert torch.equal(segments, cache.valid_kernel_seg_callback(block))
    assert not hasattr(frozen, "gray_code")
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: sparse_submanifold_conv3d(x, weight=s.weight, bias=s.bias, config=frozen) * 2,
        fullgraph=True,
        backend="aot_eager",
    )
    out = compiled(s.feats)
    verdicts.assert_rows(numpy(out) / 2, s.expected(), s.tolerance)
    out.sum().backward()
    s.check_gradients(torch.full_like(out, 2))


def test_functions_have_the_names_of_earlier_versions_too():
    names = [name for name in kernels.__all__ if name.endswith("_cuda")]
    assert len(names) == 6
    assert all(getattr(kernels, name) is getattr(kernels, name.removesuffix("_cuda")) for name in names)


def test_no_voxels(device):
    s = Scene(device)
    feats, coords = s.feats[:0], s.coords[:0]
    out, cache = sparse_submanifold_conv3d(feats, coords, s.shape, s.weight, s.bias)
    assert out.shape == (0, 7)
    out.sum().backward()
    assert not s.weight.grad.any()
    assert cache.valid_kernel_seg_callback(32).tolist() == [0]


# ---- what a cache derives ----


def test_derived_tensors(device):
    s = Scene(device)
    _, cache = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight)
    has = s.map >= 0  # (V, N)
    codes = (has * (1 << np.arange(27))[:, None]).sum(0)
    np.testing.assert_array_equal(cache["gray_code"].cpu(), codes)
    order = cache["sorted_idx"].cpu().numpy()
    assert sorted(order) == list(range(200))
    places = [sum(1 << b for b in range(27) if bin(code >> b).count("1") % 2) for code in codes[order]]
    assert places == sorted(places)
    pairs = [(v, n) for v in range(27) for n in range(200) if has[v, n]]
    assert cache["valid_signal_o"].view(torch.int32).tolist() == [n for _, n in pairs]
    assert cache["valid_signal_i"].view(torch.int32).tolist() == [s.map[v, n] for v, n in pairs]
    assert cache["valid_signal_seg"].view(torch.int32).tolist() == [0, *np.cumsum(has.sum(1))]
    kernel, segments = cache.valid_kernel_callback(64), cache.valid_kernel_seg_callback(64).tolist()
    assert (kernel.dtype, cache.valid_signal_i.dtype, cache.gray_code.dtype) == (torch.int32, torch.uint32, torch.int32)
    for block in range(4):
        rows = order[64 * block : 64 * (block + 1)]
        assert kernel[segments[block] : segments[block + 1]].tolist() == np.flatnonzero(has[:, rows].any(1)).tolist()
    cache["note"] = 5
    assert cache.note == 5


def test_codes_of_32_offsets_fill_their_dtype(device):
    """And are sorted as the int32 numbers that they and their places are."""
    s = Scene(device, kernel_size=(4, 4, 2))
    _, cache = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight)
    has = (s.map >= 0).astype(np.int64)  # (V, N)
    codes = (has << np.arange(32)[:, None]).sum(0)
    np.testing.assert_array_equal(cache["gray_code"].cpu(), codes.astype(np.int32))
    assert (codes >= 2**31).any() and (codes < 2**31).any()
    places = ((has[::-1].cumsum(0)[::-1] % 2) << np.arange(32)[:, None]).sum(0).astype(np.int32)
    np.testing.assert_array_equal(cache["sorted_idx"].cpu(), np.argsort(places, kind="stable"))


def test_codes_of_too_many_offsets_are_refused(device):
    s = Scene(device, kernel_size=(5, 5, 5))
    _, cache = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight)
    with pytest.raises(ValueError, match="neighbor_map"):
        cache["gray_code"]


@pytest.mark.parametrize("kernel_size", [(3, 3, 3), (5, 3, 1)])
@pytest.mark.parametrize("dilation", [(1, 1, 1), (1, 2, 3)])
def test_the_map_of_the_kernels(device, kernel_size, dilation):
    s = Scene(device)
    memory = torch.empty(0, device=device)
    nmap = kernels.hashmap_build_submanifold_conv_neighbour_map(
        memory, memory, s.coords, *s.grid[1:], *kernel_size, *dilation
    )
    np.testing.assert_array_equal(signed(nmap), reference.neighbor_map(s.coords_np, s.grid, kernel_size, dilation))


def test_the_map_of_the_kernels_needs_a_grid(device):
    memory = torch.empty(0, device=device)
    with pytest.raises(ValueError, match="^shape: expected four positive ints"):
        kernels.hashmap_build_submanifold_conv_neighbour_map(
            memory, memory, Scene(device).coords, 4, 0, 4, 3, 3, 3, 1, 1, 1
        )


# ---- strided convolution ----


@pytest.mark.parametrize("how", [((2, 2, 2), (0, 0, 0), (1, 1, 1)), ((1, 1, 1), (2, 2, 2), (2, 2, 2))])
def test_strided(device, how):
    s = Scene(device, kernel_size=(2, 2, 2) if how[0] == (2, 2, 2) else (3, 3, 3))
    kernel = tuple(s.weight.shape[1:4])
    out, out_coords, cache = sparse_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, None, None, *how)
    dense = torch.zeros(*s.grid, 5, dtype=torch.float64)
    dense[tuple(s.coords.cpu().long().t())] = s.feats.detach().double().cpu()
    conv = torch.nn.functional.conv3d(
        dense.permute(0, 4, 1, 2, 3), s.weight.detach().double().cpu().permute(0, 4, 1, 2, 3),
        s.bias.detach().double().cpu(), *how,
    )  # fmt: skip
    expected = conv.permute(0, 2, 3, 4, 1)[tuple(out_coords.cpu().long().t())]
    verdicts.assert_rows(numpy(out), expected.numpy(), s.tolerance)
    assert torch.equal(out_coords, SparseConv3dFunction._get_output_coords(s.coords, s.shape, kernel, *how))
    again, same, _ = sparse_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, cache, out_coords, *how)
    assert torch.equal(again, out)
    assert torch.equal(same, out_coords)
    some = out_coords.flip(0)[::3].contiguous()
    chosen, given, _ = sparse_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, None, some, *how)
    assert torch.equal(given, some)
    torch.testing.assert_close(chosen, out.flip(0)[::3])
    steps = SparseConv3dFunction._compute_neighbor_cache(s.coords, out_coords, s.shape, kernel, *how, True)
    assert torch.equal(steps["neighbor_map"], cache["neighbor_map"])
    assert tuple(steps["neighbor_map_bwd"].shape) == (200, s.weight[0, ..., 0].numel())
    assert torch.equal(SparseConv3dFunction._sparse_conv_forward(s.feats, steps, s.weight, s.bias), out)
    sizes = *s.grid, *kernel, *how[0], *how[1], *how[2]
    assert torch.equal(kernels.hashmap_build_sparse_conv_out_coords(s.coords, 1.1, 0, *sizes), out_coords)
    assert torch.equal(kernels.expand_unique_build_sparse_conv_out_coords(s.coords, 0, *sizes), out_coords)
    maps = kernels.hashmap_build_sparse_conv_neighbour_map(s.coords, out_coords, 2.0, True, *sizes)
    assert all(torch.equal(a, steps[name]) for a, name in zip(maps, ("neighbor_map", "neighbor_map_bwd"), strict=True))
    of_some, backward = kernels.hashmap_build_sparse_conv_neighbour_map(s.coords, some, 2.0, False, *sizes)
    assert backward is None and torch.equal(of_some.view(torch.int32), maps[0].view(torch.int32).flip(0)[::3])
    assert torch.equal(cache["out_coords"], out_coords)
    out.backward(torch.ones_like(out))
    gradients = SparseConv3dFunction._sparse_conv_backward(torch.ones_like(out), s.feats, steps, s.weight, s.bias)
    for leaf, gradient in zip((s.feats, s.weight, s.bias), gradients, strict=True):
        assert torch.equal(leaf.grad, gradient)


@pytest.mark.parametrize("given", [False, True], ids=["own outputs", "given outputs"])
def test_coordinates_may_change_after_a_strided_layer(device, given):
    """As programs divide the outputs of a level by its stride, in place: the maps of gradients are built later."""
    s = Scene(device, kernel_size=(2, 2, 2))
    how = (2, 2, 2), (0, 0, 0), (1, 1, 1)
    sites = SparseConv3dFunction._get_output_coords(s.coords, s.shape, (2, 2, 2), *how) if given else None
    expected = sparse_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, None, sites, *how)[0]
    gradients = torch.autograd.grad(expected.sum(), (s.feats, s.weight))
    coords = s.coords.clone()
    out, out_coords, cache = sparse_conv3d(s.feats, coords, s.shape, s.weight, s.bias, None, sites, *how)
    assert cache["out_coords"] is out_coords
    assert not given or out_coords is sites
    coords.zero_()
    out_coords[:, 1:] //= 2
    again = sparse_conv3d(s.feats, coords, s.shape, s.weight, s.bias, cache, None, *how)[0]
    for result in (out, again):
        for gradient, wanted in zip(torch.autograd.grad(result.sum(), (s.feats, s.weight)), gradients, strict=True):
            assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("kernel_size", [(3, 3, 3), (2, 3, 4)])
def test_coordinates_may_change_after_a_submanifold_layer(device, kernel_size):
    s = Scene(device, kernel_size=kernel_size)
    coords = s.coords.clone()
    results = [sparse_submanifold_conv3d(s.feats, c, s.shape, s.weight, s.bias)[0] for c in (s.coords, coords)]
    coords.zero_()
    expected, gradient = (torch.autograd.grad(result.sum(), s.feats)[0] for result in results)
    assert torch.equal(gradient, expected)


def test_a_layer_without_a_cache_compiles_whole(device):
    torch.compiler.reset()
    s = Scene(device)

    def layer(feats):
        return sparse_submanifold_conv3d(feats, s.coords, s.shape, s.weight, s.bias)[0] * 2

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(s.feats), layer(s.feats))


def test_the_backward_half_of_a_strided_cache(device):
    """Its codes and blocks are those of the map from inputs to outputs; an item that is missing is None."""
    s = Scene(device, kernel_size=(2, 2, 2))
    _, _, cache = sparse_conv3d(s.feats, s.coords, s.shape, s.weight, None, None, None, (2, 2, 2))
    has = cache["neighbor_map_bwd"].view(torch.int32).cpu().numpy() >= 0  # (N, V)
    np.testing.assert_array_equal(cache["gray_code_bwd"].cpu(), (has * (1 << np.arange(8))).sum(1))
    rows = cache["sorted_idx_bwd"].cpu().numpy()
    kernel, segments = cache.valid_kernel_bwd_callback(64), cache.valid_kernel_bwd_seg_callback(64).tolist()
    for block in range(4):
        some = has[rows[64 * block : 64 * (block + 1)]].any(0)
        assert kernel[segments[block] : segments[block + 1]].tolist() == np.flatnonzero(some).tolist()
    assert kernel is cache["valid_kernel_bwd_64"]
    cache.compute_kernel_idx_bwd(32)
    assert cache.valid_kernel_bwd_callback(32) is cache["valid_kernel_bwd_32"]
    assert cache.valid_kernel_bwd_seg_callback(32) is cache["valid_kernel_bwd_seg_32"]
    assert cache["valid_kernel_32"] is None
    with pytest.raises(TypeError, match="^neighbor_map: expected no other map"):
        cache["neighbor_map"] = cache["neighbor_map_bwd"]
    with pytest.raises(ValueError, match="^dilation: expected a positive int"):
        sparse_conv3d(s.feats, s.coords, s.shape, s.weight, dilation=0)
    out, _, _ = sparse_conv3d(s.feats, s.coords, s.shape, s.weight, stride=2, padding=0)
    assert torch.equal(out, sparse_conv3d(s.feats, s.coords, s.shape, s.weight, None, None, None, (2, 2, 2))[0])


@pytest.mark.parametrize("grid", [(1, 1, 1), (4, 1, 4)], ids=str)
@pytest.mark.parametrize("given", [False, True])
def test_a_kernel_larger_than_the_grid_has_no_outputs(device, given, grid):
    """Along any axis. Where torch raises."""
    coords = torch.zeros(1, 4, dtype=torch.int32, device=device)
    feats = torch.ones(1, 2, device=device, requires_grad=True)
    weight = torch.ones(3, 2, 2, 2, 2, device=device, requires_grad=True)
    shape, how = torch.Size([1, 2, *grid]), ((2, 2, 2), (0, 0, 0), (1, 1, 1))
    out_coords = SparseConv3dFunction._get_output_coords(coords, shape, (2, 2, 2), *how)
    assert (tuple(out_coords.shape), out_coords.dtype) == ((0, 4), torch.int32)
    out, at, cache = sparse_conv3d(feats, coords, shape, weight, None, None, out_coords if given else None, *how)
    assert (tuple(out.shape), tuple(at.shape)) == ((0, 3), (0, 4))
    assert (tuple(cache["neighbor_map"].shape), tuple(cache["neighbor_map_bwd"].shape)) == ((0, 8), (1, 8))
    assert (cache["neighbor_map_bwd"].view(torch.int32) == -1).all()
    out.sum().backward()
    assert not feats.grad.any()
    assert not weight.grad.any()
    with pytest.raises(ValueError, match="^kernel_size: .* fits nowhere in"):
        sparse_conv3d(feats, coords, shape, weight, None, None, coords, *how)
    wide = torch.ones(3, 3, 3, 3, 2, device=device)
    out, at, _ = sparse_conv3d(feats, coords, torch.Size([1, 2, 1, 1, 1]), wide, padding=1)
    assert out.tolist() == [[2, 2, 2]] and at.tolist() == [[0, 0, 0, 0]], "padding is on both sides"


def test_coordinates_of_outputs_are_memory_of_their_own(device):
    """Where they are those of the inputs too."""
    coords = torch.zeros(1, 4, dtype=torch.int32, device=device)
    how = (1, 1, 1), (0, 0, 0), (1, 1, 1)
    out_coords = SparseConv3dFunction._get_output_coords(coords, torch.Size([1, 2, 4, 4, 4]), (1, 1, 1), *how)
    coords += 1
    assert out_coords.tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("mode", ["Z_ORDER", "HILBERT"])
def test_outputs_follow_a_curve(device, monkeypatch, mode):
    """In the bits of the input's grid, and the convolution is the same."""
    s = Scene(device, kernel_size=(2, 2, 2))
    how = (2, 2, 2), (0, 0, 0), (1, 1, 1)
    plain, at, _ = sparse_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, None, None, *how)
    monkeypatch.setattr(spconv, "SERIALIZATION_MODE", getattr(spconv.SerializationMode, mode))
    out, out_coords, _ = sparse_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, None, None, *how)
    sizes, number = (*s.grid, *(2, 2, 2), *how[0], *how[1], *how[2]), getattr(spconv.SerializationMode, mode)
    assert torch.equal(kernels.hashmap_build_sparse_conv_out_coords(s.coords, 1.1, number, *sizes), out_coords)
    codes = ops.serialize.encode_seq(out_coords, s.shape, mode.lower()).tolist()
    assert codes == sorted(codes)
    row = {tuple(c): i for i, c in enumerate(at.tolist())}
    assert torch.equal(out, plain[[row[tuple(c)] for c in out_coords.tolist()]])
    monkeypatch.setattr(spconv, "SERIALIZATION_MODE", 7)
    with pytest.raises(ValueError, match="^SERIALIZATION_MODE: expected 0, 1 or 2, got 7$"):
        sparse_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, None, None, *how)


# ---- settings ----


def test_globals_are_read_at_each_call(device, monkeypatch):
    s = Scene(device)
    out, cache = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight)
    _, _, strided = sparse_conv3d(s.feats, s.coords, s.shape, s.weight)
    monkeypatch.setattr(spconv, "ALGORITHM", "magic")
    steps = SubMConv3dFunction
    for call in (
        lambda: sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight),
        lambda: sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight, neighbor_cache=cache),
        lambda: sparse_conv3d(s.feats, s.coords, s.shape, s.weight, neighbor_cache=strided),
        lambda: steps._compute_neighbor_cache(s.coords, s.shape, (3, 3, 3), (1, 1, 1)),
        lambda: steps._sparse_submanifold_conv_forward(s.feats, cache, s.weight),
        lambda: steps._sparse_submanifold_conv_backward(out, s.feats, cache, s.weight),
    ):
        with pytest.raises(ValueError, match="^ALGORITHM: expected 'explicit_gemm', "):
            call()
    spconv.set_algorithm(spconv.Algorithm.IMPLICIT_GEMM)
    spconv.set_hashmap_ratio(1.5)
    assert (spconv.ALGORITHM, spconv.HASHMAP_RATIO) == ("implicit_gemm", 1.5)
    spconv.set_hashmap_ratio(2.0)
    out, _ = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight)
    monkeypatch.setattr(config, "USE_ON_THE_FLY_WEIGHT_TRANSPOSE", False)
    monkeypatch.setattr(config, "allow_tf32", False)
    exact, _ = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight)
    verdicts.assert_rows(numpy(exact), s.expected(bias=False), 1e-5)
    if device.type == "cuda":
        assert not torch.equal(out, exact)


def test_the_dtype_is_that_of_the_arguments_under_autocast(device):
    s = Scene(device)
    with torch.autocast(device.type, torch.bfloat16):
        assert sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight)[0].dtype is torch.float32


def test_wrong_arguments(device):
    s = Scene(device)
    with pytest.raises(ValueError, match="shape"):
        sparse_submanifold_conv3d(s.feats, s.coords, s.grid, s.weight)
    with pytest.raises(TypeError, match="weight"):
        sparse_submanifold_conv3d(s.feats, s.coords, s.shape)
    with pytest.raises(TypeError, match="coords"):
        sparse_submanifold_conv3d(s.feats, weight=s.weight)
    for function in (sparse_submanifold_conv3d, sparse_conv3d):
        with pytest.raises(TypeError, match="^weight: expected a torch.Tensor, got list$"):
            function(s.feats, s.coords, s.shape, [1.0])
        with pytest.raises(TypeError, match="^neighbor_cache: expected None or a S.*NeighborCache, got dict$"):
            function(s.feats, s.coords, s.shape, s.weight, neighbor_cache={})
    for one, other in ((sparse_submanifold_conv3d, sparse_conv3d), (sparse_conv3d, sparse_submanifold_conv3d)):
        *_, cache = one(s.feats, s.coords, s.shape, s.weight)
        with pytest.raises(
            TypeError, match="^neighbor_cache: expected None or a .*NeighborCache, got .*NeighborCache$"
        ):
            other(s.feats, s.coords, s.shape, s.weight, neighbor_cache=cache)


def test_a_dilation_of_each_axis(device):
    s = Scene(device)
    s.map = reference.neighbor_map(s.coords_np, s.grid, (3, 3, 3), (1, 2, 3))
    out, cache = sparse_submanifold_conv3d(s.feats, s.coords, s.shape, s.weight, s.bias, dilation=(1, 2, 3))
    verdicts.assert_rows(numpy(out), s.expected(), s.tolerance)
    out.backward(torch.ones_like(out))
    s.check_gradients(torch.ones_like(out))
    np.testing.assert_array_equal(signed(cache.neighbor_map), s.map)


def test_a_number_stands_for_three(device):
    s = Scene(device)
    for function in (sparse_submanifold_conv3d, sparse_conv3d):
        of_one, of_three = (function(s.feats, s.coords, s.shape, s.weight, dilation=d)[0] for d in (2, (2, 2, 2)))
        assert torch.equal(of_one, of_three)


# ---- install ----

PROGRAM = """
import sys, flexgemm.compat
flexgemm.compat.install("flex_gemm")
import torch
import flex_gemm
from flex_gemm.ops.spconv import Algorithm, sparse_submanifold_conv3d
from flex_gemm.ops.spconv.submanifold_conv3d import SubMConv3dFunction
import flex_gemm.kernels.triton.spconv.config as config
flex_gemm.ops.spconv.set_algorithm(Algorithm.MASKED_IMPLICIT_GEMM)
flex_gemm.ops.spconv.HASHMAP_RATIO = 3.0
flex_gemm.utils.load_autotune_cache()
flex_gemm.utils.save_autotune_cache()
assert isinstance(flex_gemm.utils.get_autotune_cache(), dict)
coords = torch.tensor([[0, 1, 1, 1]], dtype=torch.int32)
weight = torch.ones(1, 3, 3, 3, 1)
shape = torch.Size([1, 1, 4, 4, 4])
out, cache = flex_gemm.ops.spconv.sparse_submanifold_conv3d(torch.ones(1, 1), coords, shape, weight)
assert out.item() == 1 and flex_gemm.ops.spconv.ALGORITHM == "masked_implicit_gemm" and config.allow_tf32
assert flex_gemm.ops.spconv is sys.modules["flexgemm.compat.flex_gemm.ops.spconv"]
assert torch.ops.flex_gemm.sparse_conv_masked_fwd  # the operators are registered
assert flexgemm.compat.install("flex_gemm") is flex_gemm
sys.modules["flex_gemm_tools"] = sys  # of somebody else
flexgemm.compat.uninstall("flex_gemm")
assert sys.modules["flex_gemm_tools"] is sys
assert not any(name.split(".")[0] == "flex_gemm" for name in sys.modules)
"""


def test_a_program_runs_unchanged():
    result = calls.run_python(["-c", PROGRAM])
    assert result.returncode == 0, result.stderr


def test_install_does_not_shadow_a_package_that_is_in_use(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "flex_gemm", np)
    with pytest.raises(RuntimeError, match="already imported"):
        compat.install("flex_gemm")
    compat.uninstall("flex_gemm")
    assert __import__("sys").modules["flex_gemm"] is np, "nor does uninstall take it away"
    with pytest.raises(ValueError, match="name"):
        compat.install("torch")
