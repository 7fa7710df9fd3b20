"""FP8 convolution of torch tensors: the numbers of the plain call under torch.compile and autocast, frozen modules."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
from scenes import voxels

import flexgemm

torch = pytest.importorskip("torch", reason="torch not installed")
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import flexgemm.torch as ft  # noqa: E402
import flexgemm.torch.nn as fnn  # noqa: E402


class Problem:
    """Random tensors, and their casts as a user makes them."""

    def __init__(self, n, device, ci=32, co=24, dtype=torch.float16):
        self.coords, self.shape = voxels(n, device)
        self.nmap = ft.neighbor_map(self.coords, self.shape)
        torch.manual_seed(0)
        self.feats = torch.randn(n, ci, device=device, dtype=dtype)
        self.weight = torch.randn(co, 3, 3, 3, ci, device=device, dtype=dtype) / 16
        self.bias, self.residual = (torch.randn(s, device=device, dtype=dtype) for s in ((co,), (n, co)))
        self.q, scale_feats = ft.quantize(self.feats, granularity="row")
        w, scale_weight = ft.quantize(self.weight.flatten(1), granularity="row")
        self.w = w.view(self.weight.shape)
        self.scales = {"scale_feats": scale_feats, "scale_weight": scale_weight}
        self.how = {**self.scales, "neighbor_map": self.nmap, "out_dtype": dtype}


def near(out, expected):
    assert (out.double() - expected.double()).norm() < 6e-2 * expected.double().norm()


def test_the_neutral_function_and_this_one_agree(device):
    p = Problem(200, device)
    out = ft.submanifold_conv3d(p.q, p.w, p.bias, residual=p.residual, activation="relu", **p.how)
    assert out.dtype is torch.float16
    how = {**p.how, "residual": p.residual, "activation": "relu", "out_dtype": "float16"}
    assert torch.equal(out, flexgemm.submanifold_conv3d(p.q, p.w, p.bias, **how))
    near(out, torch.relu(ft.submanifold_conv3d(p.feats, p.weight, p.bias, neighbor_map=p.nmap) + p.residual))
    assert ft.sparse_conv3d(p.q, p.w, neighbor_map=p.nmap, **p.scales).dtype is torch.bfloat16


def test_it_compiles_whole_and_for_any_number_of_voxels(device):
    torch.compiler.reset()

    def layer(feats, w, scale_weight, bias, nmap):
        q, scale_feats = ft.quantize(feats, granularity="row")
        how = {"scale_feats": scale_feats, "scale_weight": scale_weight, "activation": "silu"}
        return ft.submanifold_conv3d(q, w, bias, neighbor_map=nmap, out_dtype=torch.float16, **how) * 2

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for n in (20, 33, 70):
        p = Problem(n, device)
        inputs = p.feats, p.w, p.scales["scale_weight"], p.bias, p.nmap
        assert torch.equal(compiled(*inputs), layer(*inputs))
    assert counter.frame_count == 2


def test_the_operator(device):
    p = Problem(40, device)
    maps = p.nmap.native, p.nmap.native_order, p.nmap.kernel_size, [1] * 6
    scales = tuple(p.scales.values())
    arguments = p.q, p.w, p.bias, None, *scales, None, *maps, None, "auto", 1, "float16", None, None, None
    assert torch.equal(
        torch.ops.flexgemm.sparse_conv3d_float8(*arguments), ft.submanifold_conv3d(p.q, p.w, p.bias, **p.how)
    )
    torch.library.opcheck(torch.ops.flexgemm.sparse_conv3d_float8, arguments, test_utils="test_faketensor")


def test_layers_that_hand_on_fp8(device):
    torch.compiler.reset()
    p = Problem(80, device, ci=32, co=32)
    scale = torch.tensor(0.05, device=device)

    def network(q):
        hidden = ft.submanifold_conv3d(
            q, p.w, p.bias, **{**p.how, "out_dtype": None}, scale_out=scale, activation="relu"
        )
        how = {**p.how, "scale_feats": scale}
        return hidden, ft.submanifold_conv3d(hidden, p.w, p.bias, **how)

    hidden, out = network(p.q)
    assert (hidden.dtype, out.dtype) == (torch.float8_e4m3fn, torch.float16)
    wide = ft.submanifold_conv3d(p.q, p.w, p.bias, **p.how, activation="relu")
    expected, _ = ft.quantize(wide, scale=scale)
    near(hidden.float(), expected.float())
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")(p.q)
    assert torch.equal(compiled[0].view(torch.uint8), hidden.view(torch.uint8))
    assert torch.equal(compiled[1], out)


def test_autocast_leaves_it_alone(device):
    p = Problem(60, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = ft.submanifold_conv3d(p.q, p.w, p.bias, **p.how)
    assert torch.equal(out, ft.submanifold_conv3d(p.q, p.w, p.bias, **p.how))


@pytest.mark.parametrize("function", [ft.submanifold_conv3d, flexgemm.submanifold_conv3d], ids=["torch", "neutral"])
@pytest.mark.parametrize("name", ["scale_feats", "scale_weight", "scale_out"])
def test_a_gradient_of_a_scale_is_refused(device, function, name):
    """Rather than left out, whether the call is traced or not."""
    p = Problem(30, device)
    scale = torch.tensor(1.0, device=device, requires_grad=True)
    for mode in (nullcontext(), TorchDispatchMode()):
        with mode, pytest.raises(ValueError, match="require grad, but a convolution of float8_e4m3fn has no gradient"):
            function(p.q, p.w, **(p.how | {"out_dtype": None, name: scale}))


def test_a_gradient_beside_fp8_in_uint8_is_refused(device):
    p = Problem(30, device)
    p.bias.requires_grad_()
    how = p.how | {"dtype_feats": "float8_e4m3fn", "dtype_weight": "float8_e4m3fn"}
    with pytest.raises(ValueError, match="require grad, but a convolution of uint8 has no gradient"):
        flexgemm.submanifold_conv3d(p.q.view(torch.uint8), p.w.view(torch.uint8), p.bias, **how)


@pytest.mark.parametrize("function", [ft.submanifold_conv3d, flexgemm.submanifold_conv3d], ids=["torch", "neutral"])
def test_a_gradient_is_refused(device, function):
    p = Problem(30, device)
    p.bias.requires_grad_()
    with pytest.raises(ValueError, match="require grad, but a convolution of float8_e4m3fn has no gradient"):
        function(p.q, p.w, p.bias, **p.how)
    with torch.no_grad():
        assert function(p.q, p.w, p.bias, **p.how).dtype is torch.float16
    feats = p.feats.requires_grad_()
    with pytest.raises(ValueError, match="scale_feats: expected None, since feats are float16, not FP8"):
        function(feats, p.weight, neighbor_map=p.nmap, **p.scales)


@pytest.mark.parametrize("module", [ft, flexgemm], ids=["torch", "neutral"])
def test_there_is_no_backward_pass(device, module):
    p = Problem(30, device)
    grad_out = torch.zeros(30, len(p.w), device=device)
    for function in (module.submanifold_conv3d_backward, module.sparse_conv3d_backward):
        with pytest.raises(ValueError, match="^feats: expected .* not FP8, got float8_e4m3fn$"):
            function(grad_out, p.q, p.w, neighbor_map=p.nmap)


def test_what_is_no_keyword_is_named(device):
    p = Problem(30, device)
    with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
        ft.submanifold_conv3d(p.q, p.w, p.bias, **p.how, out=p.feats)
    for function in (ft.submanifold_conv3d, flexgemm.submanifold_conv3d):
        with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
            function(p.feats.requires_grad_(), p.weight, neighbor_map=p.nmap, scale=1)


def test_gradients_of_others_are_taken_beside_it(device):
    p = Problem(30, device)

    def loss(factor):
        return (ft.submanifold_conv3d(p.q, p.w, p.bias, **p.how) * factor).sum()

    gradient = torch.func.grad(loss)(torch.tensor(2.0, device=device))
    near(gradient, ft.submanifold_conv3d(p.q, p.w, p.bias, **p.how).sum())
    with pytest.raises(ValueError, match="has no gradient"):
        torch.func.grad(lambda bias: ft.submanifold_conv3d(p.q, p.w, bias, **p.how).sum())(p.bias)


# ---- modules ----


LAYERS = [
    lambda: fnn.SubMConv3d(32, 24),
    lambda: fnn.SubMConv3d(32, 24, (3, 1, 5), dilation=2, groups=2, bias=False),
    lambda: fnn.SparseConv3d(32, 24, 2, 2),
    lambda: fnn.SparseConvTranspose3d(32, 24, 2, 2),
]


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_layer_is_near_the_layer(device, make, dtype):
    torch.manual_seed(0)
    layer = make().to(device, dtype)
    coords, shape = voxels(150, device)
    x = fnn.SparseTensor(torch.randn(150, 32, device=device, dtype=dtype), coords, shape)
    frozen = layer.frozen()
    assert type(frozen) is type(layer)
    assert frozen.weight.dtype is torch.float8_e4m3fn
    assert not list(frozen.parameters())
    out, expected = frozen(x), layer(x)
    assert out.feats.dtype is dtype
    assert torch.equal(out.coords, expected.coords)
    near(out.feats, expected.feats)
    assert "fp8=True" in repr(frozen)
    assert "fp8" not in repr(layer)

    again = make().to(device, dtype).frozen()
    again.load_state_dict(frozen.state_dict())
    assert torch.equal(again(x).feats, out.feats)
    assert torch.equal(copy.deepcopy(frozen)(x).feats, out.feats)
    twice = frozen.frozen()
    assert twice is not frozen
    assert torch.equal(twice(x).feats, out.feats)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        twice.weight_scale.zero_()
    assert torch.equal(frozen(x).feats, out.feats), "a copy"


def test_a_frozen_layer_keeps_its_weight_when_a_network_changes_dtype_or_device(device):
    layer = fnn.SubMConv3d(32, 24).frozen().to(device)
    coords, shape = voxels(100, device)
    x = fnn.SparseTensor(torch.randn(100, 32, device=device), coords, shape)
    out = layer(x).feats
    halves = torch.nn.Sequential(layer).half()[0]
    assert halves.weight.dtype is torch.float8_e4m3fn
    assert (halves.weight_scale.dtype, halves.bias.dtype) == (torch.float32, torch.float16)
    assert halves(x.to(torch.float16)).feats.dtype is torch.float16
    torch.testing.assert_close(halves(x).feats, out, rtol=0, atol=2e-4)  # the bias lost some


def test_an_infinity_is_seen_behind_a_frozen_layer(device):
    """Where the voxel is in reach; the others are as they were."""
    layer = fnn.SubMConv3d(32, 24).to(device).frozen()
    coords, shape = voxels(100, device)
    feats = torch.randn(100, 32, device=device)
    nmap = ft.neighbor_map(coords, shape)
    expected = layer.convolve(feats, nmap)
    feats[7, 3] = torch.inf
    out = layer.convolve(feats, nmap)
    reached = ((coords - coords[7]).abs() <= torch.tensor([0, 1, 1, 1], device=device)).all(1)
    assert reached.sum() < 100
    assert not out[reached].isfinite().any()
    assert torch.equal(out[~reached], expected[~reached])


def test_autocast_casts_the_features_of_a_frozen_layer(device):
    layer = fnn.SubMConv3d(32, 24).to(device).frozen()
    coords, shape = voxels(100, device)
    x = fnn.SparseTensor(torch.randn(100, 32, device=device), coords, shape)
    with torch.autocast(device.type, torch.bfloat16):
        out = layer(x)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out.feats, layer(x.to(torch.bfloat16)).feats)


def test_a_frozen_inverse_layer(device):
    coords, shape = voxels(150, device)
    x = fnn.SparseTensor(torch.randn(150, 32, device=device), coords, shape)
    down, up = fnn.SparseConv3d(32, 48, 2, 2).to(device), fnn.SparseInverseConv3d(48, 32, 2).to(device)
    near(up.frozen()(down.frozen()(x)).feats, up(down(x)).feats)


def test_a_frozen_layer_compiles(device):
    torch.compiler.reset()
    layer = fnn.SubMConv3d(32, 24).to(device).frozen()
    coords, shape = voxels(80, device)
    x = fnn.SparseTensor(torch.randn(80, 32, device=device), coords, shape)
    compiled = torch.compile(lambda x: layer(x).feats * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x).feats * 2)
