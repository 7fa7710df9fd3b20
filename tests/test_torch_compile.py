"""torch.compile and dispatch modes: the same numbers as the plain call, without breaks."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from scenes import leaves, voxels

import flexgemm

torch = pytest.importorskip("torch", reason="torch not installed")
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import flexgemm.torch as ft  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_compiler")

kernels = pytest.mark.parametrize("kernel_size", [(3, 3, 3), (2, 3, 2)], ids=["odd", "even"])


def counted(function, backend="aot_eager", **options):
    """The compiled function, and the counter of its compilations."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


class Seen(TorchDispatchMode):
    """What is called within, with which arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


def conv(feats, weight, bias, nmap):
    hidden = torch.relu(ft.submanifold_conv3d(feats, weight, bias, neighbor_map=nmap, precision="ieee"))
    return hidden + ft.submanifold_conv3d(feats, weight, neighbor_map=nmap, precision="ieee")


# ---- torch.compile ----


@kernels
def test_a_network_compiles_whole_and_for_any_number_of_voxels(device, kernel_size):
    compiled, counter = counted(conv)
    for n in (20, 33, 70, 45):
        coords, shape = voxels(n, device)
        nmap = ft.neighbor_map(coords, shape, kernel_size).freeze()
        inputs = leaves(n, device, kernel_size=kernel_size)
        expected = conv(*inputs, nmap)
        grad_out = torch.randn_like(expected)
        gradients = torch.autograd.grad(expected, inputs, grad_out)
        out = compiled(*inputs, nmap)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out, inputs, grad_out), gradients)
    assert counter.frame_count == 2, "one for the first number of voxels, one for any"


def test_a_dynamic_shape_compiles_once(device):
    compiled, counter = counted(conv, dynamic=True)
    for n in (20, 33, 70):
        coords, shape = voxels(n, device)
        inputs, nmap = leaves(n, device), ft.neighbor_map(coords, (1, 16, 16, 16))
        torch.testing.assert_close(compiled(*inputs, nmap), conv(*inputs, nmap))
    assert counter.frame_count == 1


@kernels
def test_the_map_is_built_inside(device, kernel_size):
    def network(coords, *inputs):
        return conv(*inputs, ft.neighbor_map(coords, (1, 16, 16, 16), kernel_size))

    compiled, counter = counted(network)
    for n in (20, 33, 70):
        coords, _ = voxels(n, device)
        inputs = leaves(n, device, kernel_size=kernel_size)
        expected, out = network(coords, *inputs), compiled(coords, *inputs)
        torch.testing.assert_close(out, expected)
        gradients = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected))
        torch.testing.assert_close(*gradients)
    assert counter.frame_count == 2


def test_an_even_map_that_is_not_frozen(device):
    """The transposed map is built in the graph, and kept."""
    coords, shape = voxels(20, device)
    inputs, nmap = leaves(20, device, kernel_size=(2, 2, 2)), ft.neighbor_map(coords, shape, 2)
    compiled, _ = counted(conv)
    compiled(*inputs, nmap).sum().backward()
    assert nmap._native_transposed.value is not None
    expected = reference.neighbor_map(coords.cpu().numpy(), shape, (2, 2, 2), transposed=True)
    np.testing.assert_array_equal(nmap.transposed_map.cpu().numpy(), expected)


def test_the_inductor(device):
    coords, shape = voxels(40, device)
    inputs, nmap = leaves(40, device), ft.neighbor_map(coords, shape)
    out, expected = torch.compile(conv, fullgraph=True)(*inputs, nmap), conv(*inputs, nmap)
    torch.testing.assert_close(out, expected)
    gradients = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected))
    torch.testing.assert_close(*gradients)


def test_products_compile(device):
    def experts(x, weight, bias, ends):
        q, scale = ft.quantize(x, granularity="row")
        dense = ft.gemm_nt(q, q, scale_a=scale, scale_b=scale, out_dtype=torch.float32)
        fixed, given = ft.quantize(x, "float8_e5m2", scale=scale.amax(), saturate=True)
        hidden = ft.m_grouped_gemm_nt(x, weight, ends, bias=bias)
        return dense, ft.gemm_nt(hidden, weight[0]), fixed.float(), given

    compiled, counter = counted(experts)
    for m in (20, 33, 70):
        torch.manual_seed(0)
        x, weight = torch.randn(m, 16, device=device), torch.randn(3, 16, 16, device=device)
        inputs = [t.requires_grad_() for t in (x, weight, torch.randn(3, 16, device=device))]
        ends = torch.tensor([7, 7, m], dtype=torch.int32, device=device)
        expected, out = experts(*inputs, ends), compiled(*inputs, ends)
        torch.testing.assert_close(out, expected)
        gradients = (torch.autograd.grad(result[1].square().sum(), inputs) for result in (out, expected))
        torch.testing.assert_close(*gradients)
    assert counter.frame_count == 2


def test_an_output_that_is_given(device):
    def write(out, a, b, ends):
        ft.m_grouped_gemm_nt(a, b, ends, out=out)
        return out + 1

    a, b = torch.randn(9, 16, device=device), torch.randn(2, 8, 16, device=device)
    ends = torch.tensor([2, 6], device=device)
    outs = [torch.full((9, 8), 7.0, device=device) for _ in range(2)]
    results = write(outs[0], a, b, ends), counted(write)[0](outs[1], a, b, ends)
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*outs)
    assert (outs[1][6:] == 7).all(), "rows of no group"


def test_weight_gradients_and_segments_compile(device):
    def network(a, b, ends, lengths, picked, total):
        ft.wgrad_gemm_nt(a, b, out=total)
        grouped = ft.k_grouped_wgrad_gemm_nt(a, b, ends)
        return total + grouped.sum(0), ft.segment_gemm(a.t(), grouped, seg_lens=lengths, weight_indices=picked)

    a, b = torch.randn(8, 20, device=device), torch.randn(8, 20, device=device)
    given = [torch.tensor(x, device=device) for x in ([12, 20], [15, 5], [1, 0])]
    totals = [torch.ones(8, 8, device=device) for _ in range(2)]
    out, expected = counted(network)[0](a, b, *given, totals[0]), network(a, b, *given, totals[1])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*totals)
    torch.testing.assert_close(totals[0], 1 + a @ b.t())


@pytest.mark.parametrize("mode", ["max", "mean", "sum"])
def test_pooling_compiles(device, mode):
    coords, _ = voxels(60, device)
    nmap = flexgemm.sparse_conv_map(coords, (1, 16, 16, 16), 2, 2).freeze()
    feats = leaves(60, device)[0]

    def network(x):
        cells = ft.sparse_pool3d(x, neighbor_map=nmap, mode=mode)
        pooled = ft.global_pool(ft.sparse_upsample3d(cells, neighbor_map=nmap) + x, coords, 1, mode)
        return x * ft.broadcast_samples(pooled, coords)

    out, expected = counted(network)[0](feats), network(feats)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), feats) for y in (out, expected)))


@pytest.mark.parametrize("mode", ["trilinear", "nearest"])
def test_sampling_compiles(device, mode):
    coords, shape = voxels(60, device)
    feats = leaves(60, device)[0]
    points = (torch.rand(1, 40, 3, device=device) * torch.tensor(shape[1:], device=device)).requires_grad_()

    def network(x, grid):
        return ft.grid_sample_3d(x * 2, coords, shape, grid, mode)

    inputs = (feats, points) if mode == "trilinear" else (feats,)
    out, expected = counted(network)[0](feats, points), network(feats, points)
    torch.testing.assert_close(out, expected)
    gradients = (torch.autograd.grad(y.square().sum(), inputs) for y in (out, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "first"])
def test_points_and_voxels_compile(device, reduce):
    torch.manual_seed(0)
    points, feats = torch.rand(60, 3, device=device) * 4.5, leaves(60, device)[0]
    voxels = flexgemm.voxelize(points, voxel_size=1.0, shape=(1, 4, 4, 4))

    def network(x, voxels):
        cells = ft.reduce_points(x * 2, voxels, reduce)
        return ft.devoxelize(cells, voxels) + ft.devoxelize(cells, voxels, "trilinear")

    out, expected = counted(network)[0](feats, voxels), network(feats, voxels)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), feats) for y in (out, expected)))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_voxels_are_found_inside(device):
    def network(points, x):
        voxels = ft.voxelize(points, x, voxel_size=1.0, shape=(1, 4, 4, 4), origin=(0.3, -0.6, 0.0))
        unique, inverse, counts = ft.unique_coords(voxels.coords, voxels.shape)
        return voxels.feats * counts[:, None], ft.devoxelize(voxels.feats, voxels), unique, inverse

    compiled, counter = counted(network)
    for n in (60, 33, 90):
        torch.manual_seed(n)
        points, feats = torch.rand(n, 3, device=device) * 4.5, leaves(n, device)[0]
        out, expected = compiled(points, feats), network(points, feats)
        torch.testing.assert_close(out, expected)
        gradients = (torch.autograd.grad(y[0].sum() + y[1].square().sum(), feats) for y in (out, expected))
        torch.testing.assert_close(*gradients)
    assert counter.frame_count == 2


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_of_voxels_may_change(device, dynamic):
    """From the second value on one is no number while torch traces, as scales that are drawn anew."""
    points = torch.rand(60, 3, device=device) * 4.5

    def network(points, size):
        return ft.voxelize(points, voxel_size=size, shape=(1, 9, 9, 9)).coords

    compiled = torch.compile(network, backend="eager", fullgraph=True, dynamic=dynamic)
    for size in (1.0, 1.25, 0.75, 2):
        assert torch.equal(compiled(points, size), network(points, size))


@pytest.mark.parametrize("mode", ["z_order", "hilbert", "bxyz"])
@pytest.mark.parametrize("side", [16, 4096], ids=["int32", "int64"])
def test_codes_compile(device, mode, side):
    def network(coords):
        order = ft.sort_coords(coords, shape, mode)
        return order, ft.decode_seq(ft.encode_seq(coords[order.long()], shape, mode), shape, mode)

    shape = (1, side, side, side)
    coords, _ = voxels(60, device)
    torch.testing.assert_close(counted(network)[0](coords), network(coords), rtol=0, atol=0)


def test_a_stream_cannot_be_traced():
    coords, shape = voxels(20)
    feats, weight, _ = leaves(20)
    nmap = ft.neighbor_map(coords, shape)
    compiled = torch.compile(lambda x: ft.submanifold_conv3d(x, weight, neighbor_map=nmap, stream=1), backend="eager")
    with pytest.raises(ValueError, match="stream"):
        compiled(feats)
    cells = ft.voxelize(torch.rand(9, 3), voxel_size=0.5, shape=(1, 2, 2, 2))
    for mode in ("nearest", "trilinear"):
        with (
            torch.utils.flop_counter.FlopCounterMode(display=False),
            pytest.raises(ValueError, match="^stream: cannot"),
        ):
            ft.devoxelize(torch.ones(len(cells.coords), 3), cells, mode, stream=1)


def test_a_traced_cast_names_what_is_wrong():
    x = torch.ones(4, 16)
    for name, wrong, error in (
        ("granularity", "column", ValueError),
        ("dtype", None, ValueError),
        ("scale", 0.1, TypeError),
        ("saturate", False, ValueError),
    ):
        with (
            torch.utils.flop_counter.FlopCounterMode(display=False),
            pytest.raises(error, match=f"^{name}: expected"),
        ):
            ft.quantize(x, **{"scale": torch.ones(()), name: wrong})


def test_a_traced_voxelization_names_a_wrong_reduction():
    """Without features too."""
    with (
        torch.utils.flop_counter.FlopCounterMode(display=False),
        pytest.raises(ValueError, match="^reduce: expected 'mean', 'sum', 'max' or 'first', got 'median'$"),
    ):
        ft.voxelize(torch.rand(9, 3), voxel_size=0.5, shape=(1, 2, 2, 2), reduce="median")


@pytest.mark.parametrize("way", ["convolution", "upsampling", "submanifold", "odd submanifold"])
def test_the_inverse_of_a_map_is_made_inside(device, way):
    coords, shape = voxels(40, device)
    size = 3 if way.startswith("odd") else 2

    def fresh_map():
        if way.endswith("submanifold"):
            return ft.neighbor_map(coords, shape, size)
        return flexgemm.sparse_conv_map(coords, shape, size, size)

    def network(feats, weight, nmap):
        if way == "upsampling":
            return ft.sparse_upsample3d(feats, neighbor_map=nmap)
        return ft.sparse_inverse_conv3d(feats, weight, neighbor_map=nmap)

    plain, nmap = fresh_map(), fresh_map()
    feats, weight, _ = leaves(plain.num_out_voxels, device, kernel_size=(size,) * 3)
    expected = network(feats, weight, plain)
    compiled, _ = counted(network)
    for _ in range(2):
        out = compiled(feats, weight, nmap)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(
            torch.autograd.grad(out.square().sum(), feats),
            torch.autograd.grad(network(feats, weight, plain).square().sum(), feats),
        )


def test_a_grid_of_points_is_checked_in_a_trace_too(device):
    def find(points):
        return ft.voxelize(points, voxel_size=1.0, shape=(9, 9, 9)).coords

    with pytest.raises(ValueError, match=r"shape: expected four positive ints \(B, W, H, D\), got \(9, 9, 9\)"):
        torch.compile(find, backend="aot_eager")(torch.rand(5, 3, device=device))


# ---- operators ----


def test_the_operators_are_what_they_say(device):
    """torch's own checks of schema, fake tensors, autograd and ahead-of-time dispatch."""
    ops = torch.ops.flexgemm
    coords, shape = voxels(20, device)
    feats, weight, bias = leaves(20, device, kernel_size=(2, 3, 3))
    nmap = ft.neighbor_map(coords, shape, (2, 3, 3)).freeze()
    maps = nmap.native, nmap.native_order, *nmap._native_transposed.value, None
    detached = feats.detach(), feats.detach(), weight.detach()
    x, experts = torch.randn(9, 16, device=device), torch.randn(2, 8, 16, device=device)
    ends, grad_out = torch.tensor([2, 9], device=device), torch.randn(9, 8, device=device)
    recorded = [t.clone().requires_grad_() for t in (x, experts, experts[0], experts[:, 0])]
    none, dense, grouped = [None] * 6, {"layout": "dense"}, {"layout": "m_grouped"}
    numbers, contiguous = torch.zeros(9, dtype=torch.int32, device=device), "m_grouped_contiguous"
    cells = flexgemm.voxelize(torch.rand(9, 3, device=device) * 4.5, voxel_size=1.0, shape=(1, 4, 4, 4))
    groups, of_cells = cells.groups, torch.randn(cells.num_voxels, 8, device=device)
    rising, numbered = torch.rand(9, 8, device=device).requires_grad_(), groups[2][:, None].repeat(1, 8)
    calls = [
        (ops.broadcast_samples, (torch.randn(3, 5, device=device).requires_grad_(), coords), {}),
        (ops.encode_seq, (coords, shape, "hilbert"), {}),
        (ops.decode_seq, (flexgemm.encode_seq(coords, shape), shape, "z_order"), {}),
        (ops.sort_coords, (coords, shape, "z_order"), {}),
        (ops.unique_coords, (coords, shape), {}),
        (ops.group_points, (torch.rand(9, 3, device=device), [0.5] * 3, [0.0] * 3, (1, 2, 2, 2)), {}),
        (ops.reduce_points, (rising, *groups, "max", True), {}),
        (ops.reduce_points, (rising, *groups, "mean", True), {}),
        (ops.reduced_points_gradient, (of_cells, numbered, *groups[2:], "max"), {}),
        (ops.reduced_points_gradient, (of_cells, None, *groups[2:], "first"), {}),
        (ops.devoxelize, (of_cells.clone().requires_grad_(), *groups), {}),
        (ops.neighbor_map, (coords, shape, (2, 3, 3), (1, 1, 1), False, False), {}),
        (ops.row_order, (nmap.map, (2, 3, 3), (1, 1, 1)), {}),
        (ops.row_order, (nmap.map, (2, 3, 3), (2, 1, 3)), {}),
        (ops.sparse_conv3d, (feats, weight, bias, None, *maps, (2, 3, 3), [1] * 6, None, "auto", "ieee", 1), {}),
        (
            ops.sparse_conv3d,
            (feats, weight, None, feats, *maps, (2, 3, 3), [1] * 6, "relu", "implicit_gemm", None, 1),
            {},
        ),
        (
            ops.sparse_conv3d_backward,
            (*detached, *maps, (2, 3, 3), [1] * 6, (True, False, True), "auto", "ieee", 1),
            {},
        ),
        (ops.quantize, (x, "float8_e4m3fn", "row", None, False), {}),
        (ops.quantize, (x, "float8_e5m2", "tensor", torch.ones((), device=device), True), {}),
        (ops.quantize, (torch.stack([x, x]), "float8_e4m3fn", "1x128", None, False, False), {}),
        (ops.quantize, (x.repeat(20, 20), "float8_e4m3fn", "128x128", None, True), {}),
        (ops.product, (recorded[0], recorded[2], *none, None, None), dense),
        (ops.product, (recorded[0], recorded[1], None, ends, *none), grouped),
        (ops.product, (x, experts[0], *none, None, None), dense | {"activation": "swiglu", "out_dtype": "float32"}),
        (ops.product, (x[None], experts[:1], *none, None, None), {"layout": "batched", "alpha": 2.0}),
        (ops.product, (x.t(), x.t(), None, ends, *none), {"layout": "k_grouped", "groups": 2, "out_dtype": "float32"}),
        (ops.m_grouped_gradients, (grad_out, x, experts, ends, "m_grouped", (True, True, True), "ieee"), {}),
        (ops.m_grouped_gradients, (grad_out, x, experts, numbers, contiguous, (True, True, True), "ieee"), {}),
        (ops.product, (recorded[0], recorded[1], None, None, numbers, *none[1:]), {"layout": contiguous}),
        (ops.product_into, (grad_out.clone(), x, experts, None, ends, *none), grouped | {"accumulate": True}),
    ]
    for mode in ("max", "mean", "sum"):
        down = flexgemm.sparse_conv_map(coords, shape, 2, 2).freeze()
        pair, rows = (down.native, down._native_transposed.value[0]), feats.detach().clone().requires_grad_()
        for with_gradient in (True, False):
            x = rows if with_gradient else rows.detach()
            calls += [(ops.sparse_pool3d, (x, *pair, mode, with_gradient), {})]
            calls += [(ops.global_pool, (x, coords, 2, mode, with_gradient), {})]
        _, noted = ops.sparse_pool3d(rows.detach(), *pair, mode, True)
        grad_of_pooled = torch.randn(down.num_out_voxels, 5, device=device)
        calls += [(ops.sparse_pool3d_backward, (grad_of_pooled, pair[1], noted, mode), {})]
    points, samples = torch.rand(1, 7, 3, device=device) * 4, torch.randn(1, 7, 5, device=device)
    for mode in ("trilinear", "nearest"):
        calls += [(ops.grid_sample_3d, (rows, coords, points.clone().requires_grad_(), shape, mode), {})]
        for needs in ((True, True), (True, False), (False, True)):
            given = samples, rows.detach(), coords, points, shape, mode, needs
            calls += [(ops.grid_sample_3d_backward, given, {})]
    for operator, arguments, keywords in calls:
        torch.library.opcheck(operator.default, arguments, keywords)


def test_fake_tensors_run_nothing(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    coords, shape = voxels(20, device)
    nmap = ft.neighbor_map(coords, shape)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        feats, weight, _ = leaves(20, device)
        out = ft.submanifold_conv3d(feats, weight, neighbor_map=nmap)
        out.sum().backward()
    assert (out.shape, out.device.type) == ((20, 5), device.type)
    assert weight.grad.shape == weight.shape


@pytest.mark.parametrize("fake", ["feats", "weight"])
def test_one_fake_tensor_beside_a_real_one_is_enough(device, fake):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    coords, shape = voxels(20, device)
    nmap = ft.neighbor_map(coords, shape)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    feats, weight, _ = leaves(20, device)
    if fake == "feats":
        feats = mode.from_tensor(feats)
    else:
        weight = mode.from_tensor(weight)
    assert isinstance(ft.submanifold_conv3d(feats, weight, neighbor_map=nmap), FakeTensor)
    assert isinstance(ft.gemm_nt(feats, weight[:, 0, 0, 0]), FakeTensor)


@pytest.mark.parametrize(
    ("argument", "size", "message"),
    [
        ("feats", (20, 3, 1), "expected (N, C) to match map"),
        ("weight", (5, 3, 3, 3, 4), "expected (Co, 3, 3, 3, 3) to match neighbor_map and feats"),
        ("weight", (5, 27, 3), "expected (Co, 3, 3, 3, 3) to match neighbor_map and feats"),
        ("bias", (6,), "expected (5,) to match weight"),
        ("residual", (19, 5), "expected (20, 5) to match map and weight"),
    ],
)
def test_convolutions_of_fake_tensors_that_do_not_match_are_refused(device, argument, size, message):
    sizes = {"feats": (20, 3), "weight": (5, 3, 3, 3, 3), "bias": (5,), "residual": (20, 5), "map": (27, 20)}
    tensors = [torch.empty(*sizes[name], device="meta") for name in sizes if name != argument]
    tensors.insert(list(sizes).index(argument), torch.empty(size, device="meta"))
    how = *[None] * 4, (3, 3, 3), [1] * 6, None, "auto", "ieee", 1
    with pytest.raises(ValueError) as caught:
        torch.ops.flexgemm.sparse_conv3d(*tensors[:4], tensors[4].int(), *how)
    assert str(caught.value) == f"{argument}: {message}, got {size}"


def test_dispatch_modes_see_the_operators(device):
    coords, shape = voxels(20, device)
    feats, weight, bias = leaves(20, device)
    nmap = ft.neighbor_map(coords, shape)
    with Seen() as seen:
        out = ft.submanifold_conv3d(feats, weight, bias, neighbor_map=nmap)
    assert "flexgemm.sparse_conv3d.default" in [str(function) for function, _ in seen.calls]
    assert torch.equal(out, ft.submanifold_conv3d(feats, weight, bias, neighbor_map=nmap))


def test_checkpointing(device):
    coords, shape = voxels(20, device)
    inputs, nmap = leaves(20, device), ft.neighbor_map(coords, shape)
    expected = torch.autograd.grad(conv(*inputs, nmap).square().sum(), inputs)
    for reentrant in (True, False):
        for leaf in inputs:
            leaf.grad = None
        torch.utils.checkpoint.checkpoint(conv, *inputs, nmap, use_reentrant=reentrant).square().sum().backward()
        torch.testing.assert_close(tuple(leaf.grad for leaf in inputs), expected)
