"""torch.ops.flex_gemm.*: the operators of a fork of FlexGEMM, on flexgemm."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import verdicts

torch = pytest.importorskip("torch", reason="torch not installed")
from compat_scenes import Scene, empty_table, numpy, signed  # noqa: E402

from flexgemm.compat.flex_gemm import operators  # noqa: E402, F401  registers them
from flexgemm.compat.flex_gemm.kernels import cuda as kernels  # noqa: E402
from flexgemm.compat.flex_gemm.ops.spconv import sparse_submanifold_conv3d  # noqa: E402

ops = torch.ops.flex_gemm
WRITES = {  # what each is said to write; nothing else is
    "hashmap_insert_cuda": ["hashmap_keys", "hashmap_values"],
    "hashmap_insert_3d_cuda": ["hashmap_keys", "hashmap_values"],
    "hashmap_insert_3d_idx_as_val_cuda": ["hashmap_keys", "hashmap_values"],
    "hashmap_lookup_cuda": [],
    "hashmap_lookup_3d_cuda": [],
    "z_order_encode": ["codes"],
    "z_order_decode": [],
    "hilbert_encode": ["codes"],
    "hilbert_decode": [],
    "hashmap_build_grid_sample_3d_nearest_neighbor_map": ["hashmap_keys", "hashmap_vals"],
    "hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight": ["hashmap_keys", "hashmap_vals"],
    "indice_weighed_sum_fwd": [],
    "indice_weighed_sum_bwd_input": [],
    "hashmap_build_submanifold_conv_neighbour_map_cuda": ["hashmap_keys", "hashmap_vals"],
    "neighbor_map_post_process_for_masked_implicit_gemm_1": [],
    "neighbor_map_post_process_for_masked_implicit_gemm_2": [],
    "sparse_conv_masked_fwd": [],
    "sparse_conv_masked_bwd": [],
    "sparse_conv_masked_splitk_fwd": [],
    "sparse_conv_masked_splitk_bwd": [],
}


def cached(s):
    """The map of a scene and what is derived from it, as the fork's frozen cache has them."""
    _, cache = sparse_submanifold_conv3d(s.feats.detach(), s.coords, s.shape, s.weight.detach())
    return cache.freeze()


def arguments(s, bias=True):
    """Of a forward pass, weight (Co, V, Ci), and what its gradient takes besides."""
    frozen = cached(s)
    weight = s.weight.detach().flatten(1, 3)
    forward = s.feats.detach(), weight, s.bias.detach() if bias else None, frozen.neighbor_map, frozen.sorted_idx
    blocks = frozen.valid_kernels, frozen.valid_kernel_segs, frozen.block_sizes
    return (*forward, *blocks), (frozen.valid_signal_i, frozen.valid_signal_o, frozen.valid_signal_seg)


def test_names_and_what_they_write():
    for name, writes in WRITES.items():
        schema = getattr(ops, name).default._schema
        assert [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write] == writes


def cases(device):
    """Every operator with arguments that it takes."""
    s = Scene(device)
    w, h, d = s.grid[1:]
    table = empty_table(device)
    kernels.hashmap_insert_3d_idx_as_val(*table, s.coords, w, h, d)
    rows = torch.arange(200, dtype=torch.int32, device=device).view(torch.uint32)
    codes = torch.empty(200, dtype=torch.int32, device=device)
    points = torch.rand(2, 30, 3, device=device) * torch.tensor([w, h, d], device=device)
    indices, weights = kernels.hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight(
        *table, s.coords, points, w, h, d
    )
    indices, weights = indices.flatten(0, 1), weights.flatten(0, 1)
    nmap = kernels.hashmap_build_submanifold_conv_neighbour_map(*table, s.coords, w, h, d, 3, 3, 3, 1, 1, 1)
    gray_code, sorted_idx = kernels.neighbor_map_post_process_for_masked_implicit_gemm_1_no_bwd(nmap)
    forward, pairs = arguments(s)
    grad_out = torch.randn(200, 7, device=device)
    return {
        "hashmap_insert_cuda": (*empty_table(device), rows, rows),
        "hashmap_insert_3d_cuda": (*empty_table(device), s.coords, rows, w, h, d),
        "hashmap_insert_3d_idx_as_val_cuda": (*empty_table(device), s.coords, w, h, d),
        "hashmap_lookup_cuda": (*table, rows),
        "hashmap_lookup_3d_cuda": (*table, s.coords, w, h, d),
        "z_order_encode": (s.coords, 5, codes),
        "z_order_decode": (codes.fill_(77), 5),
        "hilbert_encode": (s.coords, 5, codes.clone()),
        "hilbert_decode": (codes, 5),
        "hashmap_build_grid_sample_3d_nearest_neighbor_map": (*table, s.coords, points, w, h, d),
        "hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight": (*table, s.coords, points, w, h, d),
        "indice_weighed_sum_fwd": (s.feats.detach(), indices, weights),
        "indice_weighed_sum_bwd_input": (torch.randn(60, 5, device=device), indices, weights, 200),
        "hashmap_build_submanifold_conv_neighbour_map_cuda": (*table, s.coords, w, h, d, 3, 3, 3, 1, 1, 1),
        "neighbor_map_post_process_for_masked_implicit_gemm_1": (nmap,),
        "neighbor_map_post_process_for_masked_implicit_gemm_2": (gray_code, sorted_idx, 64),
        "sparse_conv_masked_fwd": forward,
        "sparse_conv_masked_bwd": (grad_out, *forward, *pairs),
        "sparse_conv_masked_splitk_fwd": (*forward, 2),
        "sparse_conv_masked_splitk_bwd": (grad_out, *forward, *pairs, 2),
    }


@pytest.mark.parametrize("name", WRITES)
def test_torch_can_trace_it(device, name):
    """Its schema and its results without memory are those of its real ones."""
    torch.library.opcheck(getattr(ops, name), cases(device)[name], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", [name for name in WRITES if hasattr(kernels, name)])
def test_it_computes_what_the_function_of_its_name_does(device, name):
    given = cases(device)[name]
    ours, theirs = ([x.clone() if isinstance(x, torch.Tensor) else x for x in given] for _ in range(2))
    expected, got = getattr(kernels, name)(*ours), getattr(ops, name)(*theirs)
    if name.startswith("hashmap_insert"):  # which slot is not said
        lookup = kernels.hashmap_lookup_3d if "3d" in name else kernels.hashmap_lookup
        expected, got = (lookup(*x[:3], *x[-3:] if "3d" in name else ()) for x in (ours, theirs))
        ours = theirs = []
    for one, other in zip((*ours, *tuple_of(expected)), (*theirs, *tuple_of(got)), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def tuple_of(result):
    return result if isinstance(result, tuple) else (result,)


def test_weighted_sums_and_their_gradient(device):
    given = cases(device)
    feats, indices, weights = given["indice_weighed_sum_fwd"]
    rows = signed(indices).T
    expected = reference.gather_sum(numpy(feats), rows, numpy(weights))
    verdicts.assert_rows(numpy(ops.indice_weighed_sum_fwd(feats, indices, weights)), expected, 1e-5)
    grad_out = given["indice_weighed_sum_bwd_input"][0]
    expected = np.zeros((200, 5))
    for q, corner in zip(*np.nonzero(rows >= 0), strict=True):
        expected[rows[q, corner]] += numpy(weights)[q, corner] * numpy(grad_out)[q]
    got = ops.indice_weighed_sum_bwd_input(grad_out, indices, weights, 200)
    np.testing.assert_allclose(numpy(got), expected, rtol=0, atol=1e-5)


def test_weighted_sums_take_weights_of_16_bits_and_strided_rows(device):
    given = cases(device)
    feats, indices, weights = given["indice_weighed_sum_fwd"]
    grad_out, half = given["indice_weighed_sum_bwd_input"][0], weights.half()
    strided = [torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0] for x in (feats, grad_out)]
    assert not any(x.is_contiguous() for x in strided)
    exact = half.float()
    assert torch.equal(
        ops.indice_weighed_sum_fwd(strided[0], indices, half), ops.indice_weighed_sum_fwd(feats, indices, exact)
    )
    assert torch.equal(
        ops.indice_weighed_sum_bwd_input(strided[1], indices, half, 200),
        ops.indice_weighed_sum_bwd_input(grad_out, indices, exact, 200),
    )


@pytest.mark.parametrize("splitk", [None, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kernel_size", [(3, 3, 3), (2, 2, 2), (7, 1, 1)])
def test_convolution(device, kernel_size, bias, splitk):
    """Its gradients are all three, whatever requires one; the even kernel's map is not its own mirror image."""
    s = Scene(device, kernel_size=kernel_size)
    forward, pairs = arguments(s, bias)
    split = () if splitk is None else (splitk,)
    kind = "sparse_conv_masked" if splitk is None else "sparse_conv_masked_splitk"
    out = getattr(ops, f"{kind}_fwd")(*forward, *split)
    verdicts.assert_rows(numpy(out), s.expected(bias), s.tolerance)
    grad_out = torch.randn_like(out)
    gradients = getattr(ops, f"{kind}_bwd")(grad_out, *forward, *pairs, *split)
    assert gradients[1].shape == forward[1].shape
    for leaf, gradient in zip((s.feats, s.weight, s.bias), gradients, strict=True):
        leaf.grad = gradient.view(leaf.shape)
    s.check_gradients(grad_out)


def test_convolution_without_voxels(device):
    """Of a map of no outputs, and of one whose inputs are others."""
    none = torch.empty(0, 27, dtype=torch.int32, device=device).view(torch.uint32)
    order = torch.empty(0, dtype=torch.int64, device=device)
    weight, feats = torch.ones(7, 27, 5, device=device), torch.ones(3, 5, device=device)
    rest = None, none, order, [], [], []
    assert ops.sparse_conv_masked_fwd(feats, weight, *rest).shape == (0, 7)
    gradients = ops.sparse_conv_masked_bwd(feats.new_ones(0, 7), feats, weight, *rest, none, none, none)
    assert [tuple(x.shape) for x in gradients] == [(3, 5), (7, 27, 5), (7,)]
    assert not any(x.any() for x in gradients)


def test_a_bias_of_another_dtype_is_cast(device):
    forward, _ = arguments(Scene(device))
    feats, weight, bias, *rest = forward
    halves = feats.half(), weight.half()
    out = ops.sparse_conv_masked_fwd(*halves, bias, *rest)
    assert torch.equal(out, ops.sparse_conv_masked_fwd(*halves, bias.half(), *rest))


def test_codes_and_orders_are_named_when_they_are_wrong(device):
    s = Scene(device)
    for codes in (torch.empty(200, device=device), torch.empty(100, dtype=torch.int32, device=device)):
        with pytest.raises(ValueError, match=r"^codes: expected int32 or int64 \(200,\) to match coords, got "):
            kernels.z_order_encode(s.coords, 5, codes)
    sizes = *s.grid, 2, 2, 2, 2, 2, 2, 0, 0, 0, 1, 1, 1
    with pytest.raises(ValueError, match="^serialize_mode: expected 0, 1 or 2, got -1$"):
        kernels.hashmap_build_sparse_conv_out_coords(s.coords, 1.1, -1, *sizes)


def test_a_function_of_a_program_compiles_whole(device):
    """An autograd function over the operators, forward and backward, as the fork's programs have it."""
    s = Scene(device)
    forward, pairs = arguments(s)
    rest = forward[3:]

    class Convolution(torch.autograd.Function):
        @staticmethod
        def forward(ctx, feats, weight, bias):
            ctx.save_for_backward(feats, weight, bias)
            return ops.sparse_conv_masked_splitk_fwd(feats, weight, bias, *rest, 1)

        @staticmethod
        def backward(ctx, grad_out):
            return ops.sparse_conv_masked_splitk_bwd(grad_out, *ctx.saved_tensors, *rest, *pairs, 1)

    torch.compiler.reset()
    compiled = torch.compile(
        lambda x, weight, bias: Convolution.apply(x, weight.flatten(1, 3), bias) * 2,
        fullgraph=True,
        backend="aot_eager",
    )
    out = compiled(s.feats, s.weight, s.bias)
    verdicts.assert_rows(numpy(out) / 2, s.expected(), s.tolerance)
    out.sum().backward()
    s.check_gradients(torch.full_like(out, 2))


def test_wrong_arguments(device):
    forward, _ = arguments(Scene(device))
    feats, weight, *rest = forward
    with pytest.raises(ValueError, match="weight: expected"):
        ops.sparse_conv_masked_fwd(feats, weight[:, :26], *rest)
    with pytest.raises(ValueError, match=r"weight: expected \(Co, V, Ci\)"):
        ops.sparse_conv_masked_fwd(feats, weight.unflatten(1, (3, 3, 3)), *rest)
    with pytest.raises(ValueError, match="V the volume of a kernel .* got V 11"):
        ops.sparse_conv_masked_fwd(feats, weight[:, :11], *rest)
    with pytest.raises(ValueError, match="feats: expected"):
        ops.sparse_conv_masked_fwd(feats[:, :, None], weight, *rest)
    with pytest.raises(TypeError, match="indices"):
        ops.indice_weighed_sum_fwd(feats, torch.zeros(4, 8, device=device), torch.zeros(4, 8, device=device))
