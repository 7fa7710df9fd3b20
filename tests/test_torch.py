"""torch: autograd against float64, on torch's own devices and streams."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
import reference
from scenes import voxels
from verdicts import ROW_TOLERANCE, assert_gemm_rows, assert_rows

import flexgemm

torch = pytest.importorskip("torch", reason="torch not installed")
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from torch_problem import Problem, keep_busy, numpy  # noqa: E402

import flexgemm.torch  # noqa: E402
from flexgemm.torch.ops import inverse_of  # noqa: E402

MODES = ["float32", "tf32", "float16", "bfloat16"]
every_mode = pytest.mark.parametrize("mode", MODES)
kernels = pytest.mark.parametrize("kernel_size", [(3, 3, 3), (2, 3, 2), (1, 1, 1), (5, 1, 3)])


# ---- autograd ----


@every_mode
@kernels
def test_autograd_against_float64(device, mode, kernel_size):
    p = Problem(device, mode, kernel_size=kernel_size)
    out = p()
    assert (out.dtype, out.device.type) == (p.dtype, device.type)
    assert out.requires_grad
    out.backward(p.grad_out)
    for leaf in (p.feats, p.weight, p.bias):
        assert (leaf.grad.dtype, leaf.grad.shape, leaf.grad.device) == (leaf.dtype, leaf.shape, leaf.device)
    p.check(out)


@kernels
@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double precision")
def test_gradcheck(device, kernel_size):
    """The function is linear in each input, so that a large step costs no accuracy in float32."""
    p = Problem(device, n=12, ci=3, co=2, kernel_size=kernel_size)
    inputs = [leaf.detach().clone().requires_grad_() for leaf in (p.feats, p.weight, p.bias)]

    def function(*leaves):
        return flexgemm.torch.submanifold_conv3d(*leaves, neighbor_map=p.nmap, precision="ieee")

    assert torch.autograd.gradcheck(function, inputs, eps=0.25, atol=1e-3, rtol=1e-3, nondet_tol=0.0)


@pytest.mark.parametrize("needs", [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)])
def test_only_what_requires_grad_gets_one(device, needs):
    p = Problem(device)
    leaves = p.feats, p.weight, p.bias
    for leaf, needed in zip(leaves, needs, strict=True):
        leaf.requires_grad_(needed)
    out = p()
    assert out.requires_grad == any(needs)
    if any(needs):
        out.backward(p.grad_out)
    for leaf, needed in zip(leaves, needs, strict=True):
        assert (leaf.grad is not None) == needed


def test_without_bias(device):
    p = Problem(device)
    out = flexgemm.torch.submanifold_conv3d(p.feats, p.weight, neighbor_map=p.nmap)
    out.backward(p.grad_out)
    assert p.bias.grad is None
    expected = reference.conv_forward(numpy(p.feats), numpy(p.weight), None, p.map)
    assert_rows(numpy(out), expected, p.tolerance)


def test_no_grad_records_nothing(device):
    p = Problem(device)
    with torch.no_grad():
        out = p()
    assert not out.requires_grad
    assert out.grad_fn is None
    with torch.inference_mode():
        assert not p().requires_grad


def test_the_neutral_function_records_too(device):
    p = Problem(device)
    out = flexgemm.submanifold_conv3d(p.feats, p.weight, p.bias, neighbor_map=p.nmap)
    out.backward(p.grad_out)
    p.check(out)
    with torch.no_grad():
        silent = flexgemm.submanifold_conv3d(p.feats, p.weight, p.bias, neighbor_map=p.nmap)
    assert not silent.requires_grad
    assert torch.equal(silent, out)


def test_the_neutral_backward_equals_autograd(device):
    p = Problem(device)
    p().backward(p.grad_out)
    with torch.no_grad():
        gradients = flexgemm.submanifold_conv3d_backward(p.grad_out, p.feats, p.weight, neighbor_map=p.nmap)
    for got, leaf in zip(gradients, (p.feats, p.weight, p.bias), strict=True):
        assert torch.equal(got.reshape(leaf.shape), leaf.grad)


def test_arguments_of_gradients_are_named(device):
    p = Problem(device)
    feats, weight, how = p.feats.detach(), p.weight.detach(), {"neighbor_map": p.nmap}
    with pytest.raises(TypeError, match="^grad_out: expected dtype float32 to match weight, got float16$"):
        flexgemm.torch.submanifold_conv3d_backward(p.grad_out.half(), feats, weight, **how)
    with pytest.raises(TypeError, match="^feats: expected dtype float32 to match grad_out, got float64"):
        flexgemm.torch.submanifold_conv3d_backward(p.grad_out, feats.double(), weight, **how)
    for function in (flexgemm.torch.submanifold_conv3d_backward, flexgemm.torch.sparse_conv3d_backward):
        with pytest.raises(ValueError, match=r"^needs_grad: expected 3 bools, got \(True,\)"):
            function(p.grad_out, feats, weight, **how, needs_grad=(True,))


def test_a_chain_of_layers_on_one_map(device):
    """Two convolutions and a ReLU, against torch's own matmuls over gathered rows in float64."""
    p = Problem(device, ci=16, co=16)
    first, second = p.weight, torch.randn_like(p.weight).requires_grad_()
    relu = torch.nn.functional.relu

    def layer(x, w):
        return flexgemm.torch.submanifold_conv3d(x, w, neighbor_map=p.nmap, precision="ieee")

    def gathered(x, w):
        w = w.reshape(16, 27, 16)
        rows = torch.from_numpy(p.map).to(device, torch.int64)
        present = (rows >= 0)[..., None]
        return sum((x[rows[v].clamp(min=0)] * present[v]) @ w[:, v].T for v in range(27))

    leaves = p.feats, first, second
    layer(relu(layer(p.feats, first) - 100), second).sum().backward()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    gathered(relu(gathered(exact[0], exact[1]) - 100), exact[2]).sum().backward()
    for leaf, e in zip(leaves, exact, strict=True):
        error = (leaf.grad.double() - e.grad).norm() / e.grad.norm()
        assert error < 1e-4


def test_gradients_accumulate(device):
    p = Problem(device)
    p().backward(p.grad_out)
    once = p.weight.grad.clone()
    p().backward(p.grad_out)
    assert torch.equal(p.weight.grad, 2 * once)


def test_backward_twice_through_a_retained_graph_repeats(device):
    p = Problem(device)
    out = p()
    leaves = p.feats, p.weight, p.bias
    first = torch.autograd.grad(out, leaves, p.grad_out, retain_graph=True)
    second = torch.autograd.grad(out, leaves, p.grad_out)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_input_changed_before_backward_is_noticed(device):
    p = Problem(device)
    feats = p.feats * 1
    out = p(feats=feats)
    feats.data_ptr()
    feats.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(p.grad_out)


def test_no_voxels(device):
    nmap = flexgemm.neighbor_map(torch.zeros((0, 4), dtype=torch.int32, device=device), (1, 8, 8, 8))
    feats = torch.zeros((0, 5), device=device, requires_grad=True)
    weight = torch.randn((7, 3, 3, 3, 5), device=device, requires_grad=True)
    bias = torch.randn(7, device=device, requires_grad=True)
    out = flexgemm.torch.submanifold_conv3d(feats, weight, bias, neighbor_map=nmap)
    assert out.shape == (0, 7)
    out.sum().backward()
    assert feats.grad.shape == (0, 5)
    assert not weight.grad.any()
    assert not bias.grad.any()


# ---- layouts ----


@every_mode
def test_an_expanded_gradient(device, mode):
    """out.sum() hands back a gradient of ones with strides of zero."""
    p = Problem(device, mode)
    out = p()
    out.float().sum().backward()
    p.check(out, torch.ones_like(out))


def nan(x):
    return torch.full_like(x, torch.nan)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().contiguous().t(),  # column-major
        lambda x: torch.cat([x, nan(x)], dim=1)[:, : x.shape[1]],  # rows of a wider array
        lambda x: torch.stack([x, nan(x)], dim=1)[:, 0],
        lambda x: torch.stack([x, nan(x)], dim=2)[..., 0],  # every other element
        lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),  # off alignment
        lambda x: x.flip(0).flip(0),
    ],
    ids=["column_major", "wider", "interleaved_rows", "interleaved", "offset", "flipped"],
)
@pytest.mark.parametrize("mode", ["float32", "float16"])
def test_views(device, mode, view):
    p = Problem(device, mode)
    out = p(feats=view(p.feats), weight=view(p.weight.flatten(1)).reshape_as(p.weight))
    out.backward(view(p.grad_out))
    p.check(out)


def test_a_permuted_weight(device):
    """A weight kept as (Kw, Kh, Kd, Ci, Co) is a view that has to be copied."""
    p = Problem(device)
    stored = p.weight.detach().permute(1, 2, 3, 4, 0).contiguous().requires_grad_()
    out = p(weight=stored.permute(4, 0, 1, 2, 3))
    out.backward(p.grad_out)
    p.weight.grad = stored.grad.permute(4, 0, 1, 2, 3)
    p.check(out)


def test_what_is_not_a_plain_tensor_is_refused(device):
    p = Problem(device)
    with pytest.raises(TypeError, match="feats"):
        p(feats=p.feats.detach().to_sparse())
    with pytest.raises(TypeError, match="feats"):
        p(feats=torch.complex(p.feats, p.feats).detach())
    with pytest.raises(TypeError, match="feats"):
        p(feats=torch.complex(p.feats.detach(), p.feats.detach()).conj().imag)  # carries a negative bit
    with pytest.raises((TypeError, ValueError), match="weight"):
        p(weight=p.weight.half())


def test_tensors_of_two_devices_are_both_named(cuda_device):
    p = Problem(cuda_device)
    with pytest.raises((TypeError, ValueError), match=r"(?s)feats.*weight|weight.*feats"):
        p(weight=p.weight.cpu())


# ---- torch's settings, streams and devices ----


def test_the_default_precision_is_torch_s(device):
    p = Problem(device, ci=64, co=64, n=1000)
    expected = reference.conv_forward(numpy(p.feats), numpy(p.weight), numpy(p.bias), p.map)
    before = torch.get_float32_matmul_precision()
    try:
        outputs = {}
        for setting in ("highest", "high"):
            torch.set_float32_matmul_precision(setting)
            with torch.no_grad():
                outputs[setting] = p(precision=None)
    finally:
        torch.set_float32_matmul_precision(before)
    assert_rows(numpy(outputs["highest"]), expected, 1e-5)
    assert_rows(numpy(outputs["high"]), expected, 1e-3)
    if device.type == "cuda":
        assert not torch.equal(outputs["highest"], outputs["high"])


@pytest.mark.parametrize("explicit", [False, True], ids=["current", "stream="])
def test_runs_on_the_stream_it_should(cuda_device, explicit):
    """The inputs become right on a side stream, late; a call on any other stream would see NaN."""
    p = Problem(cuda_device, "float16")
    late = torch.full_like(p.feats, torch.nan).detach()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        keep_busy()
        late.copy_(p.feats.detach())
    how = {"stream": side.cuda_stream} if explicit else {}
    with contextlib.nullcontext() if explicit else torch.cuda.stream(side), torch.no_grad():
        out = p(feats=late, **how)
        nmap = flexgemm.neighbor_map(p.nmap.coords, p.shape, **how)
        q, scale = flexgemm.quantize(late, **how)
        product = flexgemm.gemm_nt(q, q, scale_a=scale, scale_b=scale, **how)
    side.synchronize()
    expected = reference.conv_forward(numpy(p.feats), numpy(p.weight), numpy(p.bias), p.map)
    assert_rows(numpy(out), expected, p.tolerance)
    np.testing.assert_array_equal(nmap.map.cpu().numpy(), p.map)
    dequantised = numpy(q.to(torch.float32)) * numpy(scale)
    assert_gemm_rows(numpy(product), dequantised @ dequantised.T, "bfloat16")


def test_backward_runs_on_the_stream_of_forward(cuda_device):
    p = Problem(cuda_device, "float16")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        keep_busy()
        out = p()
        out.backward(p.grad_out)
    side.synchronize()
    p.check(out)


def _strided(device, kernel=(3, 3, 3), stride=(2, 2, 2), n=300):
    """A map whose gradient needs another map, which is not built yet, and the gradient in features of a convolution
    over it, on the current stream; and what it is."""
    coords, shape = voxels(n, device)
    nmap = flexgemm.sparse_conv_map(coords, shape, kernel, stride, tuple(k // 2 for k in kernel))
    weight, feats = torch.randn(8, *kernel, 16, device=device), torch.randn(len(coords), 16, device=device)
    grad_out = torch.randn(nmap.num_out_voxels, 8, device=device)

    def gradient(nmap=nmap):
        how = {"neighbor_map": nmap, "needs_grad": (True, False, False)}
        return flexgemm.sparse_conv3d_backward(grad_out, feats, weight, **how)[0]

    expected = reference.conv_dgrad(numpy(grad_out), numpy(weight), nmap.map.cpu().numpy(), len(coords))
    return nmap, gradient, expected


# Where freezing builds a map of the gradient anew, with its entries in the order of its rows, on Hopper.
ORDERED = {"kernel": (1, 1, 3), "stride": (1, 1, 2), "n": 2000}


def _while_a_map_of_a_gradient_is_built(device, first, of):
    """As _strided, but the map of the gradient is still in the building on another stream, by the call `first`."""
    warm, gradient, _ = _strided(device, **of)  # kernels are loaded when they first run, which waits for all there is
    gradient(warm.freeze())
    nmap, gradient, expected = _strided(device, **of)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        keep_busy()
        {"gradient": gradient, "freeze": nmap.freeze}.get(first, lambda: getattr(nmap, first))()
    return nmap, gradient, expected


@pytest.mark.parametrize("of", [{}, ORDERED], ids=["plain", "ordered"])
@pytest.mark.parametrize("first", ["gradient", "inverse", "transposed_map", "freeze"])
def test_other_streams_wait_for_the_map_of_a_gradient(cuda_device, first, of):
    """Autograd runs a backward pass on the stream of its forward pass, and two may share a map."""
    _, gradient, expected = _while_a_map_of_a_gradient_is_built(cuda_device, first, of)
    assert_rows(numpy(gradient()), expected, ROW_TOLERANCE["float32"])


def _moved_as_a_pytree(nmap):
    return pytree.tree_map_only(torch.Tensor, torch.clone, nmap)


def _turned_twice_by_operators(nmap):
    with FlopCounterMode(display=False):
        return inverse_of(nmap).inverse


@pytest.mark.parametrize("first", ["inverse", "freeze"])
@pytest.mark.parametrize("copied", [copy.deepcopy, _moved_as_a_pytree, _turned_twice_by_operators])
@pytest.mark.parametrize("of", [{}, ORDERED], ids=["plain", "ordered"])
def test_copies_wait_for_the_map_of_a_gradient(cuda_device, copied, of, first):
    nmap, gradient, expected = _while_a_map_of_a_gradient_is_built(cuda_device, first, of)
    assert_rows(numpy(gradient(copied(nmap))), expected, ROW_TOLERANCE["float32"])


@pytest.mark.parametrize("of", [{}, ORDERED], ids=["plain", "ordered"])
@pytest.mark.parametrize("freezes", [False, True])
def test_a_graph_keeps_what_it_builds_to_itself(cuda_device, freezes, of):
    """Nothing of it is there before the graph is replayed, nor when it is gone."""
    nmap, gradient, expected = _strided(cuda_device, **of)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if freezes:
            nmap.freeze()
        captured, inverse, turned = gradient(), nmap.inverse, nmap.transposed_map
    assert_rows(numpy(gradient()), expected, ROW_TOLERANCE["float32"])
    assert nmap.inverse is not inverse and nmap.transposed_map is not turned
    graph.replay()
    assert_rows(numpy(captured), expected, ROW_TOLERANCE["float32"])
    assert torch.equal(turned, nmap.transposed_map) and torch.equal(inverse.map, turned)


def test_calls_are_captured_in_a_cuda_graph(cuda_device):
    """No hidden synchronisation or allocation: a captured call replays on new data."""
    p = Problem(cuda_device, "float16")
    feats, out = p.feats.detach().clone(), torch.empty_like(p.grad_out)
    weight, bias = p.weight.detach(), p.bias.detach()
    flexgemm.submanifold_conv3d(feats, weight, bias, neighbor_map=p.nmap, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flexgemm.submanifold_conv3d(feats, weight, bias, neighbor_map=p.nmap, out=out)
    feats.mul_(2)
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    expected = reference.conv_forward(numpy(feats), numpy(weight), numpy(bias), p.map)
    assert_rows(numpy(out), expected, p.tolerance)


def test_the_second_device(cuda_device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    p = Problem(torch.device("cuda:1"), "float16")
    assert torch.cuda.current_device() == 0
    out = p()
    assert out.device.index == 1
    out.backward(p.grad_out)
    p.check(out)
    assert torch.cuda.current_device() == 0
    with pytest.raises((TypeError, ValueError), match=r"(?s)feats.*weight|weight.*feats"):
        p(weight=p.weight.detach().to("cuda:0"))
