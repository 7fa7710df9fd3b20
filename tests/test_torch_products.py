"""Gradients of products, grouped ones among them, against torch's own in float64."""

from __future__ import annotations

import contextlib

import pytest
import reference
import verdicts

import flexgemm

torch = pytest.importorskip("torch", reason="torch not installed")
from scenes import voxels  # noqa: E402
from test_torch_compile import counted  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import flexgemm.torch as ft  # noqa: E402
import flexgemm.torch.nn as fnn  # noqa: E402
from flexgemm.torch import products  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [[3, 3, 9, 11], [1, 4, 4, 9, 11]], ids=["ends", "bounds"])
def test_gradients_of_grouped_products(device, dtype, ends):
    torch.manual_seed(0)
    a, b, bias = (torch.randn(s, device=device).to(dtype).requires_grad_() for s in ((13, 16), (4, 8, 16), (4, 8)))
    out = ft.m_grouped_gemm_nt(a, b, torch.tensor(ends, device=device), bias=bias, precision="ieee")
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    exact = [t.detach().double().requires_grad_() for t in (a, b, bias)]
    bounds = reference.group_bounds(ends, 4)
    for group, (start, end) in enumerate(bounds):
        rows = slice(start, end)
        (exact[0][rows] @ exact[1][group].t() + exact[2][group]).backward(grad_out[rows].double())
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    for leaf, e in zip((a, b, bias), exact, strict=True):
        verdicts.assert_rows(leaf.grad.double().cpu().flatten(0, -2), e.grad.cpu().flatten(0, -2).numpy(), tolerance)
    assert not a.grad[bounds[-1][1] :].any(), "rows of no group"


def grouped_layouts(device, dtype):
    """Both padded layouts of three groups of 5, 0 and 130 rows: the function, inputs, and the rows of each group. The
    groups of the first are not in the order of their numbers, and what is of no group is NaN."""
    torch.manual_seed(0)
    blocks, counts = {2: 0, 0: 256}, [5, 0, 130]
    m_indices = torch.full((400,), -1, dtype=torch.int32, device=device)
    for group, first in blocks.items():
        m_indices[first : first + counts[group]] = group
    rows = torch.full((400, 16), torch.nan, device=device, dtype=dtype)
    rows[m_indices >= 0] = torch.randn(135, 16, device=device).to(dtype)
    flat = [torch.nonzero(m_indices == group).flatten() for group in range(3)]
    yield ft.m_grouped_gemm_nt_contiguous, rows, m_indices, flat
    masked = torch.full((3, 140, 16), torch.nan, device=device, dtype=dtype)
    for group, count in enumerate(counts):
        masked[group, :count] = torch.randn(count, 16, device=device).to(dtype)
    numbers = torch.tensor(counts, dtype=torch.int32, device=device)
    flat = [140 * group + torch.arange(count, device=device) for group, count in enumerate(counts)]
    yield ft.m_grouped_gemm_nt_masked, masked, numbers, flat


@pytest.mark.parametrize("layout", [0, 1], ids=["contiguous", "masked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row_major", [False, True])
@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_gradients_of_padded_groups(device, way, row_major, dtype, layout):
    function, a, grouping, flat = list(grouped_layouts(device, dtype))[layout]
    a.requires_grad_()
    b, bias = (torch.randn(s, device=device).to(dtype).requires_grad_() for s in ((3, 8, 16), (3, 8)))

    def call(a, b, bias, grouping):
        weight = b.transpose(1, 2) if row_major else b
        return function(a, weight, grouping, bias=bias, b_row_major=row_major, precision="ieee")

    out = (call if way == "plain" else counted(call)[0])(a, b, bias, grouping)
    grad_out = torch.full_like(out, torch.nan)
    every = torch.cat(flat)
    grad_out.flatten(0, -2)[every] = torch.randn(len(every), 8, device=device).to(dtype)
    out.backward(grad_out)
    exact = [t.detach().double().requires_grad_() for t in (a, b, bias)]
    for group, rows in enumerate(flat):
        product = exact[0].flatten(0, -2)[rows] @ exact[1][group].t() + exact[2][group]
        product.backward(grad_out.flatten(0, -2)[rows].double())
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    for leaf, e in zip((a, b, bias), exact, strict=True):
        verdicts.assert_rows(leaf.grad.double().cpu().flatten(0, -2), e.grad.cpu().flatten(0, -2).numpy(), tolerance)


def test_the_neutral_product_is_recorded(device):
    a, b = (torch.randn(n, 6, device=device).requires_grad_() for n in (4, 5))
    flexgemm.gemm_nt(a, b).sum().backward()
    torch.testing.assert_close(a.grad, b.detach().sum(0).expand(4, 6))
    torch.testing.assert_close(b.grad, a.detach().sum(0).expand(5, 6))


@pytest.mark.parametrize("library", [flexgemm, ft], ids=["neutral", "torch"])
def test_a_weight_gradient_is_recorded_where_it_is_a_new_array(device, library):
    a, b = (torch.randn(n, 6, device=device).requires_grad_() for n in (4, 5))
    library.wgrad_gemm_nt(a, b).sum().backward()
    torch.testing.assert_close(a.grad, b.detach().sum(0).expand(4, 6))
    torch.testing.assert_close(b.grad, a.detach().sum(0).expand(5, 6))
    with pytest.raises(ValueError, match="not differentiable"):
        library.wgrad_gemm_nt(a, b, out=torch.zeros(4, 5, device=device))


@pytest.mark.parametrize("library", [flexgemm, ft], ids=["neutral", "torch"])
def test_weight_gradients_are_float32_unless_another_is_asked_for(device, library):
    a, b = (torch.ones(n, 16, dtype=torch.float16, device=device) for n in (4, 5))
    ends, out = torch.tensor([8, 16], dtype=torch.int32, device=device), torch.ones(4, 5, device=device)
    for dtype, wanted in (None, torch.float32), (torch.float16, torch.float16):
        assert library.wgrad_gemm_nt(a, b, out_dtype=dtype).dtype is wanted
        assert library.k_grouped_wgrad_gemm_nt(a, b, ends, out_dtype=dtype).dtype is wanted
    for wrong in ("no", 1, None):
        for given in (None, out):
            with pytest.raises(TypeError, match="^accumulate: expected a bool, got"):
                library.wgrad_gemm_nt(a, b, out=given, accumulate=wrong)
    assert (out == 1).all()


def test_what_is_made_for_a_call_belongs_to_its_stream(cuda_device, monkeypatch):
    seen, side = [], torch.cuda.Stream()

    def noting(function):
        def noted(*args):
            seen.append(torch.cuda.current_stream())
            return function(*args)

        return noted

    class Lengths:
        shape, cumsum = (2,), noting(lambda self, axis: torch.tensor([4, 8], device="cuda"))

    x, weights = torch.randn(8, 16, device="cuda"), torch.randn(2, 4, 16, device="cuda")
    for library in (flexgemm, ft):
        library.segment_gemm(x, weights, seg_lens=Lengths(), stream=side.cuda_stream)
    monkeypatch.setattr(products, "autocast", noting(products.autocast))
    with torch.autocast("cuda", torch.bfloat16):
        ft.gemm_nt(x, x, stream=side.cuda_stream)
    side.synchronize()
    assert [stream.cuda_stream for stream in seen] == [side.cuda_stream] * 3


@pytest.mark.parametrize("way", ["neutral", "torch", "convolution", "pooling"])
def test_forward_mode_is_refused(device, way):
    """Instead of a derivative of none."""
    x, y = torch.randn(9, 16, device=device), torch.randn(8, 16, device=device)
    coords, shape = voxels(9, device)
    nmap = ft.neighbor_map(coords, shape)
    function = {
        "neutral": lambda x: flexgemm.gemm_nt(x, y),
        "torch": lambda x: ft.gemm_nt(x, y),
        "convolution": lambda x: flexgemm.submanifold_conv3d(x, y.new_ones(4, 3, 3, 3, 16), neighbor_map=nmap),
        "pooling": lambda x: ft.sparse_pool3d(x, neighbor_map=nmap, mode="sum"),
    }[way]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.randn_like(x))
        assert torch.equal(function(x), function(dual.detach()))
        with torch.no_grad(), pytest.raises(NotImplementedError, match="jvp"):
            function(dual)
        with pytest.raises(NotImplementedError, match="jvp"):
            function(dual)
    function(x)


@pytest.mark.parametrize("layout", ["dense", "grouped"])
def test_gradients_of_float16_factors_beside_a_float32_output_are_in_its_range(device, layout):
    """Losses are scaled: what comes back may be beyond float16 where the gradients of the factors are not."""
    torch.manual_seed(0)
    x, w = (1e-3 * torch.randn(shape, device=device) for shape in ((64, 96), (2, 40, 96)))
    x, w = x.half().requires_grad_(), w.half().requires_grad_()
    ends = torch.tensor([24, 64], device=device)
    if layout == "dense":
        out, plain = ft.gemm_nt(x, w[0], out_dtype="float32"), x.float() @ w[0].float().t()
    else:
        out = ft.m_grouped_gemm_nt(x, w, ends, out_dtype="float32")
        plain = torch.cat([x[rows].float() @ w[g].float().t() for g, rows in enumerate((slice(24), slice(24, 64)))])
    grad_out = 2.0**17 * torch.rand_like(plain)
    gradients, expected = (torch.autograd.grad(y, (x, w), grad_out) for y in (out, plain))
    for got, wanted in zip(gradients, expected, strict=True):
        assert got.dtype is torch.float16
        rows = (x.flatten(0, -2).double().cpu().numpy() for x in (got, wanted))
        verdicts.assert_rows(*rows, verdicts.ROW_TOLERANCE["float16"])


def test_gradients_that_are_negated_when_they_are_read(device):
    """As those of the imaginary part of a conjugate are."""
    torch.manual_seed(0)
    a, w, v = (torch.randn(shape, device=device) for shape in ((4, 6), (5, 6), (5, 3)))
    gradients = []
    for linear in (lambda a, w: ft.gemm_nt(a, w, precision="ieee"), torch.nn.functional.linear):
        leaf = w.clone().requires_grad_()
        z = torch.complex(linear(a, leaf), linear(2 * a, leaf))
        gradients.append(torch.autograd.grad((z.conj() @ v.to(z.dtype)).abs().sum(), leaf))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["dense", "grouped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_a_bias_is_summed_in_float32(device, layout, dtype):
    """A bias of float32 has it to the last digits, whatever the product is computed in."""
    a, b = torch.randn(4096, 16, device=device).to(dtype), torch.randn(8, 16, device=device).to(dtype)
    bias, grad_out = torch.zeros(8, device=device, requires_grad=True), torch.rand(4096, 8, device=device).to(dtype)
    if layout == "dense":
        out = ft.gemm_nt(a, b, bias=bias, precision="tf32")
    else:
        ends = torch.tensor([4096], dtype=torch.int32, device=device)
        out = ft.m_grouped_gemm_nt(a, b[None], ends, bias=bias[None], precision="tf32")
    out.backward(grad_out)
    torch.testing.assert_close(bias.grad.double(), grad_out.double().sum(0), rtol=1e-5, atol=0)


def test_autograd_sees_what_an_output_overwrites(device):
    a, x = torch.randn(4, 6, device=device), torch.randn(4, 4, device=device, requires_grad=True)
    saved = x * 1
    y = saved.square().sum()
    with torch.no_grad():
        ft.gemm_nt(a, a, out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        out = torch.empty(4, 4, device=device)
        assert ft.gemm_nt(a, a, out=out) is out


def test_a_recorded_product_heeds_every_option(device):
    a, b = torch.randn(4, 6, device=device).requires_grad_(), torch.randn(5, 6, device=device)
    for function in (flexgemm.gemm_nt, ft.gemm_nt):
        assert function(a, b, dtype_out="float16").dtype is torch.float16
        with pytest.raises(ValueError, match="out: expected an array to add to"):
            function(a, b, accumulate=True)
        with pytest.raises(ValueError, match="with dtype_a is not differentiable"):
            function(a, b, dtype_a="float16")
    x, experts = torch.ones(128, 6, device=device, requires_grad=True), torch.ones(2, 5, 6, device=device)
    zeros = torch.zeros(128, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="not differentiable"):
        flexgemm.m_grouped_gemm_nt_contiguous(x, experts, zeros, offsets=zeros[:2])
    plain = {"alpha": 1.0, "promote_every": 256, "accumulate": False}  # what a product has anyway
    gradient = torch.func.grad(lambda x: ft.gemm_nt(x, b, **plain).sum())(a.detach())
    torch.testing.assert_close(gradient, b.sum(0).expand(4, 6))


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("library", [flexgemm, ft], ids=["neutral", "torch"])
def test_groups_are_checked_when_asked(device, library, needs_grad):
    """Before anything is computed of them."""
    a = torch.ones(9, 16, device=device, requires_grad=needs_grad)
    b, ends = torch.ones(2, 8, 16, device=device), torch.tensor([5, 10], device=device)
    message = r"^offsets: expected non-decreasing numbers in 0\.\.9, got 10 after 5$"
    with pytest.raises(ValueError, match=message):
        library.m_grouped_gemm_nt(a, b, ends, check=True)
    if device.type == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with pytest.raises(ValueError, match=message):
            library.m_grouped_gemm_nt(a, b, ends, check=True, stream=side.cuda_stream)
        assert (library.m_grouped_gemm_nt(a, b, ends, check=False) == 16).all()
    assert (library.m_grouped_gemm_nt(a, b, ends - 1, check=True) == 16).all()


def test_no_gradient_passes_a_scale_that_is_given_to_a_cast(device):
    """Nor asks for one where the call is an operator."""
    x, scale = torch.randn(4, 16, device=device), torch.nn.Parameter(torch.tensor(0.1, device=device))
    for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        with mode:
            q, used = ft.quantize(x, scale=scale)
            assert not q.requires_grad and used is scale
            ft.gemm_nt(q, q, scale_a=scale.detach())


def test_a_trace_and_torch_func_cannot_check_groups(device):
    a, b, ends = torch.ones(9, 16, device=device), torch.ones(2, 8, 16, device=device), torch.tensor([5, 9])
    with pytest.raises(ValueError, match="^check: expected False where torch traces the call, got True$"):
        ft.m_grouped_gemm_nt(a.to("meta"), b.to("meta"), ends.to("meta"), check=True)
    with pytest.raises(ValueError, match="^check: expected False inside torch.func, got True$"):
        torch.func.grad(lambda a: ft.m_grouped_gemm_nt(a, b, ends.to(device), check=True).sum())(a)


def test_segments_name_their_arguments(device):
    x, weights, ends = torch.randn(1, 8, 16), torch.randn(2, 4, 16), torch.tensor([4, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="^x: expected"):
        ft.segment_gemm(*(t.to(device) for t in (x, weights, ends)))
    with pytest.raises(TypeError, match="^x: expected"):
        ft.segment_gemm([1], weights, ends)


@pytest.mark.parametrize("library", [flexgemm, ft], ids=["neutral", "torch"])
def test_segments_name_every_argument_of_a_message(device, library):
    x, weights, ends = torch.randn(8, 16), torch.randn(2, 4, 16), torch.tensor([4, 8])
    x, weights, ends = (t.to(device) for t in (x, weights, ends))
    for changed, error, message in (
        ({"weights": weights[..., :8]}, ValueError, r"weights: expected \(G, N, 16\) to match x, grouped by offsets"),
        ({"weights": weights.half()}, TypeError, "weights: expected dtype float32 to match x, got float16"),
        ({"bias": torch.zeros(4, device=device)}, ValueError, r"bias: expected \(2, 4\) to match weights, got \(4,\)"),
        ({"offsets": ends[:1]}, ValueError, r"offsets: expected \(2,\) or \(3,\) to match the groups of weights"),
        ({"offsets": None, "seg_lens": ends / 2}, TypeError, r"seg_lens.cumsum\(0\): expected dtype int32 or int64"),
        (
            {"offsets": None, "seg_lens": torch.ones(3)},
            ValueError,
            "seg_lens: expected a length for each of 2 segments",
        ),
        ({"offsets": None, "seg_lens": [4, 4]}, TypeError, "seg_lens: expected an array with cumsum, got list"),
        ({"out": x[:, :4]}, ValueError, "out: expected memory of its own, got memory that overlaps x"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            library.segment_gemm(**({"x": x, "weights": weights, "offsets": ends} | changed))


@pytest.mark.parametrize("library", [flexgemm, ft], ids=["neutral", "torch"])
def test_groups_along_the_depth_are_counted(device, library):
    a, b, ends = (t.to(device) for t in (torch.randn(4, 8), torch.randn(6, 8), torch.tensor([4, 8])))
    out = torch.zeros(2, 4, 6, device=device)
    for groups in (None, 2, torch.tensor(2)):
        assert library.k_grouped_wgrad_gemm_nt(a, b, ends, num_groups=groups).shape == (2, 4, 6)
        assert library.k_grouped_wgrad_gemm_nt(a, b, ends, num_groups=groups, out=out) is out
    assert library.k_grouped_wgrad_gemm_nt(a, b, ends, num_groups=1).shape == (1, 4, 6)
    assert library.k_grouped_wgrad_gemm_nt(a, b, ends[:1], num_groups=0).shape == (0, 4, 6)
    for changed, error, message in (
        ({"offsets": None}, TypeError, "offsets: expected a one-dimensional array, got NoneType"),
        ({"offsets": [4, 8]}, TypeError, "offsets: expected a one-dimensional array, got list"),
        ({"offsets": ends[0]}, TypeError, r"offsets: expected a one-dimensional array, got torch.Tensor of shape \(\)"),
        ({"out": out[0, 0, 0]}, TypeError, r"out: expected a three-dimensional array, got torch.Tensor of shape \(\)"),
        ({"out": [1]}, TypeError, "out: expected a three-dimensional array, got list"),
        ({"num_groups": 7, "out": out}, ValueError, "num_groups: expected 2, as many as out has, got 7"),
        ({"num_groups": -1}, ValueError, "num_groups: expected 0 to 2147483647, got -1"),
        ({"num_groups": 2**31}, ValueError, "num_groups: expected 0 to 2147483647, got 2147483648"),
        ({"num_groups": 2.0}, TypeError, "num_groups: expected an int, got float"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            library.k_grouped_wgrad_gemm_nt(**({"a": a, "b": b, "offsets": ends} | changed))


def test_what_has_no_gradient_says_so(device):
    x = torch.randn(8, 16, device=device).requires_grad_()
    q, scale = ft.quantize(x)
    assert not q.requires_grad
    for function in (ft.gemm_nt, flexgemm.gemm_nt):
        with pytest.raises(ValueError, match="not differentiable"):
            function(x, x, scale_a=scale)
        with pytest.raises(ValueError, match="out"):
            function(x, x, out=torch.empty(8, 8, device=device))
    ends = torch.tensor([4, 8], device=device)
    with pytest.raises(ValueError, match="not differentiable"):
        ft.n_grouped_gemm_nt(torch.stack([x, x]), x, ends)


def test_gradients_of_columns(device):
    """Rows that lie column after column are copied on the way in; their gradient need not lie that way."""
    torch.manual_seed(0)
    ends = torch.tensor([3, 7], dtype=torch.int32, device=device)
    for fp8 in (False, True):
        layer = fnn.GroupedLinear(2, 16, 24, fp8=fp8, device=device)
        columns = torch.randn(16, 7, device=device).t().requires_grad_()
        rows = columns.detach().contiguous().requires_grad_()
        for x in (columns, rows):
            layer(x, ends).square().sum().backward()
        assert torch.equal(columns.grad, rows.grad)


@pytest.mark.parametrize("how", [{"alpha": 0.5}, {"activation": "relu"}], ids=["alpha", "activation"])
def test_products_that_are_more_than_products_have_no_gradient(device, how):
    x, y = torch.randn(9, 16, device=device, requires_grad=True), torch.randn(8, 16, device=device)
    for gemm_nt in (flexgemm.gemm_nt, ft.gemm_nt):
        with pytest.raises(ValueError, match="not differentiable"):
            gemm_nt(x, y, **how)


def test_a_backward_pass_under_autocast_keeps_the_dtype_of_its_product(device):
    torch.manual_seed(0)
    a, b = (torch.randn(s, device=device, requires_grad=True) for s in ((9, 64), (16, 64)))
    out, grad = ft.gemm_nt(a, b, precision="ieee"), torch.randn(9, 16, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        out.backward(grad)
    torch.testing.assert_close(a.grad, grad @ b.detach(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(b.grad, grad.t() @ a.detach(), rtol=1e-5, atol=1e-4)


def test_only_gradients_that_are_needed_are_computed(device, monkeypatch):
    asked, uncast = [], products._uncast

    def counted_uncast(*args, **how):
        asked.append(1)
        return uncast(*args, **how)

    monkeypatch.setattr(products, "_uncast", counted_uncast)
    a, b = torch.randn(9, 16, device=device), torch.randn(8, 16, device=device, requires_grad=True)
    ft.gemm_nt(a, b).sum().backward()
    assert len(asked) == 1 and a.grad is None


def test_what_stands_in_the_way_of_a_gradient_is_named(device, fresh_compiler):
    a, b = torch.randn(5, 16, device=device, requires_grad=True), torch.randn(7, 16, device=device)
    for how, what in (({"activation": "relu"}, "with activation"), ({"alpha": 2.0}, "with alpha")):
        with pytest.raises(ValueError, match=f"^a: requires grad, but a product {what} is not differentiable$"):
            ft.gemm_nt(a, b, **how)
        with pytest.raises(ValueError, match=f"^a, b, bias: are inside torch.func, but a product {what} is not"):
            torch.func.vmap(lambda x, how=how: ft.gemm_nt(x, b, **how))(torch.ones(4, 5, 16, device=device))
    scale = torch.ones(1, device=device, requires_grad=True)
    for operands, how, names in (
        ((a, b + a[:1]), {"alpha": 2.0}, "a, b: require"),
        ((a, b), {"scale_b": scale}, "a, scale_b: require"),
        ((a.detach(), b), {"scale_b": scale}, "scale_b: requires"),
        ((a.detach().to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)), {"scale_a": scale}, "scale_a: requires"),
    ):
        for call in (ft.gemm_nt, torch.compile(ft.gemm_nt, backend="aot_eager")):
            with pytest.raises(ValueError, match=f"^{names} grad, but a product .* is not differentiable$"):
                call(*operands, **how)
    ends = torch.tensor([3, 5, 16], device=device)
    with pytest.raises(ValueError, match="but a product of layout k_grouped is not differentiable"):
        ft.k_grouped_wgrad_gemm_nt(a, b, ends)
    with pytest.raises(TypeError, match="^a: expected dtype float32, .*, got float64$"):
        ft.gemm_nt(a.double(), b)


def test_traced_products_refuse_what_others_refuse(device, fresh_compiler):
    a, b = torch.randn(5, 16, device=device), torch.randn(7, 16, device=device)
    torch.testing.assert_close(torch.compile(ft.gemm_nt, backend="aot_eager")(a, b, device=None), ft.gemm_nt(a, b))
    for options, message in (
        ({"accumulate": True}, "out: expected an array to add to with accumulate=True, got None"),
        ({"device": "cuda"}, "device: only NumPy arrays are moved; torch arrays are computed where they are"),
    ):
        for call in (ft.gemm_nt, torch.compile(ft.gemm_nt, backend="aot_eager")):
            with pytest.raises(ValueError, match=f"^{message}"):
                call(a, b, **options)
