"""torch: autograd against float64, on torch's own devices and streams."""

from __future__ import annotations

import contextlib
import weakref

import numpy as np
import pytest
import reference
import scenes
from reference import assert_gemm_rows, assert_rows, f64

import flexgemm
from flexgemm import _C

torch = pytest.importorskip("torch", reason="torch not installed")
import flexgemm.torch  # noqa: E402

MODES = ["float32", "tf32", "float16", "bfloat16"]
every_mode = pytest.mark.parametrize("mode", MODES)
kernels = pytest.mark.parametrize("kernel_size", [(3, 3, 3), (2, 3, 2), (1, 1, 1), (5, 1, 3)])


def numpy(tensor):
    return tensor.detach().cpu().to(torch.float64).numpy()


class Problem:
    """Inputs as torch tensors that require grad, the map, and the same numbers in NumPy."""

    def __init__(self, device, mode="float32", n=300, ci=33, co=40, kernel_size=(3, 3, 3)):
        self.mode, self.precision = mode, "tf32" if mode == "tf32" else "ieee"
        self.dtype = torch.float32 if mode == "tf32" else getattr(torch, mode)
        self.tolerance = reference.ROW_TOLERANCE[mode]
        self.coords, self.shape = scenes.scene(n)
        self.map = reference.neighbor_map(self.coords, self.shape, kernel_size)
        self.nmap = flexgemm.neighbor_map(torch.from_numpy(self.coords).to(device), self.shape, kernel_size)
        rng = np.random.default_rng(0)
        draw = [(n, ci), (co, *kernel_size, ci), (co,), (n, co)]
        self.feats, self.weight, self.bias, self.grad_out = (
            torch.from_numpy(scenes.values(rng, s, "float32", one_sign=min(ci, co) < 32)).to(device, self.dtype)
            for s in draw
        )
        for leaf in (self.feats, self.weight, self.bias):
            leaf.requires_grad_()

    def __call__(self, feats=None, weight=None, bias=None, **how):
        return flexgemm.torch.submanifold_conv3d(
            self.feats if feats is None else feats,
            self.weight if weight is None else weight,
            self.bias if bias is None else bias,
            neighbor_map=self.nmap,
            **{"precision": self.precision, **how},
        )

    def check(self, out, grad_out=None):
        """The output, and the gradients that its backward pass left in the leaves."""
        feats, weight, bias = map(numpy, (self.feats, self.weight, self.bias))
        assert_rows(numpy(out), reference.conv_forward(feats, weight, bias, self.map), self.tolerance)
        grad_out = numpy(self.grad_out if grad_out is None else grad_out)
        grad_weight, grad_bias = reference.conv_wgrad(grad_out, feats, self.map)
        grad_feats = reference.conv_dgrad(grad_out, weight, self.map, len(feats))
        assert_rows(numpy(self.feats.grad), grad_feats, self.tolerance, "feats.grad")
        got = numpy(self.weight.grad).reshape(grad_weight.shape)
        assert_rows(got, grad_weight, self.tolerance, "weight.grad")
        assert_rows(got.swapaxes(0, 1), grad_weight.swapaxes(0, 1), self.tolerance, "weight.grad by offset")
        assert_rows(numpy(self.bias.grad)[None], grad_bias[None], self.tolerance, "bias.grad")


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


def test_tensors_of_two_devices_are_both_named():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, or torch without CUDA")
    p = Problem(torch.device("cuda"))
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


@pytest.fixture
def cuda_device():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, or torch without CUDA")
    return torch.device("cuda")


def _busy():
    """Work of several milliseconds on the current stream: what does not wait for it reads unfinished data."""
    torch.cuda._sleep(20_000_000)


@pytest.mark.parametrize("explicit", [False, True], ids=["current", "stream="])
def test_runs_on_the_stream_it_should(cuda_device, explicit):
    """The inputs become right on a side stream, late; a call on any other stream would see NaN."""
    p = Problem(cuda_device, "float16")
    late = torch.full_like(p.feats, torch.nan).detach()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        _busy()
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
        _busy()
        out = p()
        out.backward(p.grad_out)
    side.synchronize()
    p.check(out)


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


def test_the_second_device():
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


# ---- maps, FP8 and products ----


@kernels
def test_map_tensors(device, kernel_size):
    p = Problem(device, kernel_size=kernel_size)
    for tensor, transposed in ((p.nmap.map, False), (p.nmap.transposed_map, True)):
        assert isinstance(tensor, torch.Tensor)
        assert (tensor.dtype, tensor.device.type) == (torch.int32, device.type)
        expected = reference.neighbor_map(p.coords, p.shape, kernel_size, transposed=transposed)
        np.testing.assert_array_equal(tensor.cpu().numpy(), expected)
    assert p.nmap.num_pairs == (p.map >= 0).sum()


FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype_b", FP8)
@pytest.mark.parametrize("dtype_a", FP8)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
def test_fp8_tensors(device, source, dtype_a, dtype_b):
    torch.manual_seed(0)
    x, y = (torch.randn(rows, 256, device=device).to(source) for rows in (65, 128))
    (a, scale_a), (b, scale_b) = (
        flexgemm.quantize(x, dtype_a, granularity="row"),
        flexgemm.quantize(y, str(dtype_b).removeprefix("torch."), granularity="tensor"),
    )
    assert (a.dtype, b.dtype, scale_a.dtype, scale_b.dtype) == (dtype_a, dtype_b, torch.float32, torch.float32)
    assert (a.device.type, scale_a.shape, scale_b.shape) == (device.type, (65,), ())
    expected = (numpy(a.float()) * numpy(scale_a)[:, None]) @ (numpy(b.float()) * numpy(scale_b)).T
    for out_dtype in (torch.float32, torch.float16, torch.bfloat16):
        out = flexgemm.gemm_nt(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)
        assert (out.dtype, out.device.type) == (out_dtype, device.type)
        assert_gemm_rows(numpy(out), expected, str(out_dtype).removeprefix("torch."))
    assert flexgemm.gemm_nt(a, b).dtype == torch.bfloat16  # the default of FP8
    told = {"dtype_a": str(dtype_a).removeprefix("torch."), "dtype_b": str(dtype_b).removeprefix("torch.")}
    raw = flexgemm.gemm_nt(a.view(torch.uint8), b.view(torch.uint8), out_dtype="float32", **told)
    assert torch.equal(raw, flexgemm.gemm_nt(a, b, out_dtype="float32"))


def test_grouped_tensors(device):
    torch.manual_seed(0)
    sizes = torch.tensor([0, 7, 64, 0, 30])
    a = torch.randn(110, 48, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(5, 70, 48, device=device).to(torch.float8_e5m2)
    out = torch.full((110, 70), 7.0, device=device)
    for dtype in (torch.int32, torch.int64):
        ends = sizes.cumsum(0).to(device, dtype)
        assert flexgemm.m_grouped_gemm_nt(a, b, ends, out=out) is out
        expected, written = reference.grouped_gemm(numpy(a.float()), numpy(b.float()), ends.tolist())
        assert_gemm_rows(numpy(out)[written], expected[written], "float32")
        assert (numpy(out)[~written] == 7).all()


@pytest.mark.parametrize("needs_grad", [False, True])
def test_an_unknown_option_of_a_product_is_refused(device, needs_grad):
    a, b = (torch.randn(m, 16, device=device, requires_grad=needs_grad) for m in (3, 5))
    with pytest.raises(TypeError, match="unexpected keyword argument 'bais'"):
        flexgemm.gemm_nt(a, b, bais=None)


@pytest.mark.parametrize("option", ["groups", "workspace"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_what_is_an_option_of_the_extension_alone_is_refused(device, option, needs_grad):
    given = {option: 3 if option == "groups" else torch.zeros(100, dtype=torch.uint8, device=device)}
    a, b = (torch.randn(m, 16, device=device, requires_grad=needs_grad) for m in (3, 5))
    for library in (flexgemm, flexgemm.torch):
        with pytest.raises(TypeError, match=f"keyword argument '{option}'"):
            library.gemm_nt(a, b, **given)
    if device.type == "cpu":
        with pytest.raises(TypeError, match=f"keyword argument '{option}'"):
            flexgemm.gemm_nt(*(x.detach().numpy() for x in (a, b)), **given)
    if option == "workspace":
        p = Problem(device)
        with torch.set_grad_enabled(needs_grad), pytest.raises(TypeError, match="keyword argument 'workspace'"):
            flexgemm.submanifold_conv3d(p.feats, p.weight, neighbor_map=p.nmap, **given)


def test_products_of_views(device):
    torch.manual_seed(0)
    a, b = torch.randn(48, 65, device=device).t(), torch.randn(97, 96, device=device)[:, ::2]
    wide = torch.full((65, 200), 7.0, device=device)
    out = flexgemm.gemm_nt(a, b, out=wide[:, 3:100])
    assert_rows(numpy(out), numpy(a) @ numpy(b).T, 1e-5)
    assert (numpy(wide)[:, :3] == 7).all()
    assert (numpy(wide)[:, 100:] == 7).all()
    assert f64(numpy(wide)[:, 3:100] == numpy(out)).all()


def test_the_input_gradient_keeps_its_memory_while_the_weight_gradient_runs(device, monkeypatch):
    """On Hopper they run side by side. torch's allocator would give the one what the other has just handed back."""
    p = Problem(device, "float16", ci=64, co=64)
    dgrad, wgrad, kept = _C.conv_dgrad, _C.conv_wgrad, []

    def conv_dgrad(*operands, workspace, **how):
        if _C.conv_dgrad_workspace(*operands, **how):
            assert isinstance(workspace, torch.Tensor)
            kept.append(weakref.ref(workspace))
        dgrad(*operands, workspace=workspace, **how)

    def conv_wgrad(*operands, **how):
        assert all(workspace() is not None for workspace in kept)
        wgrad(*operands, **how)

    monkeypatch.setattr(_C, "conv_dgrad", conv_dgrad)
    monkeypatch.setattr(_C, "conv_wgrad", conv_wgrad)
    gradients = flexgemm.submanifold_conv3d_backward(
        p.grad_out, p.feats.detach(), p.weight.detach(), neighbor_map=p.nmap
    )
    assert kept or device.type == "cuda"
    expected = reference.conv_dgrad(numpy(p.grad_out), numpy(p.weight), p.map, len(p.map[0]))
    assert_rows(numpy(gradients[0]), expected, p.tolerance)


@pytest.mark.parametrize("option", ["alpha", "promote_every"])
def test_numbers_are_read_before_arrays_are_opened(device, option):
    """A number of the caller's own class may free what an array would be read from."""
    a, b = torch.ones(4000, 256, device=device), torch.ones(40, 256, device=device)

    class Number:
        def __float__(self):
            a.set_(torch.empty(0, 0, device=device))
            return 1.0

        def __index__(self):
            return int(float(self)) * 128

    with pytest.raises(ValueError, match=r"b: expected \(N, 0\) to match a"):
        flexgemm.gemm_nt(a, b, **{option: Number()})


def test_numbers_may_be_arrays_of_one(device):
    a, b = torch.ones(3, 16, device=device), torch.ones(5, 16, device=device)
    for alpha in (torch.tensor(2.0), np.float32(2), np.int64(2), np.ones(()) * 2):
        assert torch.equal(flexgemm.gemm_nt(a, b, alpha=alpha), flexgemm.gemm_nt(a, b, alpha=2))


def test_outputs_that_autograd_has_seen_are_refused(device):
    a, b = torch.ones(3, 16, device=device), torch.ones(5, 16, device=device)
    out = torch.zeros(3, 5, device=device, requires_grad=True)
    for given in (out, out.exp()):
        with pytest.raises(ValueError, match="out: expected a tensor that does not require grad"):
            flexgemm.gemm_nt(a, b, out=given)
        with torch.no_grad():
            assert flexgemm.gemm_nt(a, b, out=given) is given
    p = Problem(device)
    with torch.no_grad():
        out = torch.empty_like(p.grad_out)
    with pytest.raises(ValueError, match="out: expected a tensor that does not require grad"):
        flexgemm.submanifold_conv3d(p.feats.detach(), p.weight.detach(), neighbor_map=p.nmap, out=out.requires_grad_())


def test_scales_have_no_gradient(device):
    a, b = (torch.ones(n, 16, device=device).to(torch.float8_e4m3fn) for n in (3, 5))
    scale = torch.ones((), device=device, requires_grad=True)
    coords, shape = scenes.scene(50)
    nmap = flexgemm.neighbor_map(torch.from_numpy(coords).to(device), shape)
    feats, weight = torch.ones(50, 16, device=device), torch.ones(8, 3, 3, 3, 16, device=device)
    feats, weight = feats.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    for library in (flexgemm, flexgemm.torch):
        for name in ("scale_a", "scale_b"):
            with pytest.raises(ValueError, match="differentiable"):
                library.gemm_nt(a, b, **{name: scale})
        for name in ("scale_feats", "scale_weight"):
            with pytest.raises(ValueError, match="float8|differentiable"):
                library.submanifold_conv3d(feats, weight, neighbor_map=nmap, **{name: scale})
