"""torch: maps, FP8 and products as tensors."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import reference
import scenes
from reference import f64
from verdicts import assert_gemm_rows, assert_rows

import flexgemm
from flexgemm import _C
from flexgemm._arrays import Library

torch = pytest.importorskip("torch", reason="torch not installed")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from torch_problem import Problem, numpy  # noqa: E402

import flexgemm.torch  # noqa: E402


@pytest.mark.parametrize("kernel_size", [(3, 3, 3), (2, 3, 2), (1, 1, 1), (5, 1, 3)])
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
    for library in (flexgemm, flexgemm.torch):
        for option in ("bais", "layout", "options"):
            with pytest.raises(TypeError, match=f"^unexpected keyword argument '{option}'$"):
                library.gemm_nt(a, b, **{option: None})


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


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize("nbytes", [0, 16, 64])
@pytest.mark.parametrize("rows", [5, 130, 700])
def test_rows_of_an_input_may_overlap(device, rows, nbytes, dtype):
    """As of windows that move along a signal: each begins so many bytes behind the one before."""
    torch.manual_seed(0)
    step = nbytes // dtype.itemsize
    a = torch.randn(rows * step + 144, device=device).to(dtype).as_strided((rows, 144), (step, 1))
    b = torch.randn(256, 144, device=device).to(dtype)
    out = flexgemm.gemm_nt(a, b, out_dtype="float32")
    assert_gemm_rows(numpy(out), numpy(a.float()) @ numpy(b.float()).T, "float32")


def test_the_weight_gradient_has_its_memory_before_the_input_gradient_begins(device, monkeypatch):
    """On Hopper they run side by side. torch's allocator would give the one what the other, or an operation of another
    thread that came between them, has just handed back."""
    p = Problem(device, "float16", ci=64, co=64)
    dgrad, wgrad, make, held, asked = _C.conv_dgrad, _C.conv_wgrad, Library.workspace, [], []

    def workspace(library, nbytes, like):
        held.append(make(library, nbytes, like))
        return held[-1]

    def conv_dgrad(*operands, **how):
        asked.append(len(held))
        dgrad(*operands, **how)

    def conv_wgrad(*operands, workspace, **how):
        nbytes = _C.conv_wgrad_workspace(*operands, **how)
        assert asked == [int(nbytes > 0)]
        if nbytes:
            assert workspace is held[0]
        wgrad(*operands, workspace=workspace, **how)

    monkeypatch.setattr(Library, "workspace", workspace)
    monkeypatch.setattr(_C, "conv_dgrad", conv_dgrad)
    monkeypatch.setattr(_C, "conv_wgrad", conv_wgrad)
    gradients = flexgemm.submanifold_conv3d_backward(
        p.grad_out, p.feats.detach(), p.weight.detach(), neighbor_map=p.nmap
    )
    assert held or device.type == "cuda"
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


def test_outputs_that_autograd_has_seen_are_refused_by_operators_too(device):
    """Which run beneath autograd."""
    a, b, leaf = (torch.randn(m, n, device=device) for m, n in ((4, 6), (5, 6), (4, 5)))
    out = leaf.requires_grad_() * 1
    kept = out.detach().clone()
    with FlopCounterMode(display=False), pytest.raises(ValueError, match="^out: expected a tensor that does not requi"):
        flexgemm.torch.gemm_nt(a, b, out=out)
    assert torch.equal(out, kept)
    with FlopCounterMode(display=False), torch.no_grad():
        flexgemm.torch.gemm_nt(a, b, out=out)
    torch.testing.assert_close(out.detach(), a @ b.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # torch is about to drop quantized tensors
def test_quantized_tensors_are_refused_by_name(device):
    a = torch.quantize_per_tensor(torch.ones(3, 4, device=device), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match="^a: expected a tensor of floats or ints, got a quantized one$"):
        flexgemm.gemm_nt(a, a)


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


# ---- where outputs lie, and what else is asked of a call ----


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32"])
@pytest.mark.parametrize("m, n, k", [(5, 8, 16), (40, 97, 144), (300, 512, 272)])
def test_matrices_of_the_output_may_lie_between_each_other(device, m, n, k, dtype):
    """As of (tokens, heads, channels), of which each head is a matrix."""
    torch.manual_seed(0)
    a, b = (torch.randn(3, rows, k, device=device).to(getattr(torch, dtype)) for rows in (m, n))

    def between(dtype):
        return torch.full((m, 3, n), 7.0, dtype=dtype, device=device).transpose(0, 1)

    expected = flexgemm.torch.batched_gemm_nt(a, b)
    out = between(expected.dtype)
    assert flexgemm.torch.batched_gemm_nt(a, b, out=out) is out
    torch.testing.assert_close(out, expected)

    rows = torch.tensor([m, 0, m // 2], dtype=torch.int32, device=device)
    out = between(expected.dtype)
    flexgemm.torch.m_grouped_gemm_nt_masked(a, b, rows, out=out)
    for got, own, count in zip(out, expected, rows.tolist(), strict=True):
        torch.testing.assert_close(got[:count], own[:count])
        assert (got[count:] == 7).all()

    ends = torch.tensor([k // 4, k // 2, k], dtype=torch.int32, device=device)
    out = between(torch.float32)
    flexgemm.torch.k_grouped_wgrad_gemm_nt(a[0], b[0], ends, out=out)
    torch.testing.assert_close(out, 7 + flexgemm.torch.k_grouped_wgrad_gemm_nt(a[0], b[0], ends))


def test_matrices_may_lie_beside_those_that_they_are_made_of(device):
    buffer = torch.randn(2, 5, 64, device=device)
    expected = flexgemm.torch.batched_gemm_nt(buffer[:, :, :32], torch.ones(2, 32, 32, device=device))
    out = buffer[:, :, 32:]
    flexgemm.torch.batched_gemm_nt(buffer[:, :, :32], torch.ones(2, 32, 32, device=device), out=out)
    torch.testing.assert_close(out, expected)
    for out in (buffer[:, :, 31:63], buffer[:, :, :32], buffer[1:, :, 32:].expand(2, 5, 32)):
        with pytest.raises(ValueError, match="^out: expected (memory of its own|rows that do not overlap)"):
            flexgemm.torch.batched_gemm_nt(buffer[:, :, :32], torch.ones(2, 32, 32, device=device), out=out)


def test_meta_tensors_have_shapes(device):
    a, b = torch.empty(3, 4, device="meta"), torch.empty(5, 4, device="meta")
    out = flexgemm.torch.gemm_nt(a, b)
    assert (out.shape, out.device.type) == ((3, 5), "meta")
    for name in ("out_dtype", "dtype_out"):
        assert flexgemm.torch.gemm_nt(a, b, **{name: "float16"}).dtype is torch.float16


def map_of(make):
    """Of two voxels."""
    return flexgemm.torch.neighbor_map(make(2, 4).int(), (2, 4, 4, 4))


MISMATCHED = {
    "K": lambda x: flexgemm.torch.gemm_nt(x(3, 4), x(5, 3)),
    "rank of a": lambda x: flexgemm.torch.gemm_nt(x(2, 3, 4), x(5, 4)),
    "groups": lambda x: flexgemm.torch.batched_gemm_nt(x(2, 3, 4), x(3, 5, 4)),
    "dtype": lambda x: flexgemm.torch.gemm_nt(x(3, 4), x(5, 4).half()),
    "swiglu": lambda x: flexgemm.torch.gemm_nt(x(3, 4), x(5, 4), activation="swiglu"),
    "bias": lambda x: flexgemm.torch.gemm_nt(x(3, 4), x(5, 4), bias=x(6)),
    "bias of groups": lambda x: flexgemm.torch.batched_gemm_nt(x(2, 3, 4), x(2, 5, 4), bias=x(5)),
    "out": lambda x: flexgemm.torch.gemm_nt(x(3, 4), x(5, 4), out=x(3, 6)),
    "m_indices": lambda x: flexgemm.torch.m_grouped_gemm_nt_contiguous(x(3, 4), x(2, 5, 4), x(4).int()),
    "out without axes": lambda x: flexgemm.torch.gemm_nt(x(3, 4), x(5, 4), out=x(())),
    "an FP8 output without a scale": lambda x: flexgemm.torch.gemm_nt(x(3, 4), x(5, 4), out_dtype="float8_e4m3fn"),
    "one row to quantize": lambda x: flexgemm.torch.quantize(x(4)),
    "gates alone": lambda x: flexgemm.torch.quantize(x(4, 7), swiglu=True),
    "a scale for each row": lambda x: flexgemm.torch.quantize(x(4, 6), granularity="row", scale=x(3)),
    "a scale for each block": lambda x: flexgemm.torch.quantize(x(4, 6), granularity="128x128", scale=x(())),
    "an unknown option": lambda x: flexgemm.torch.gemm_nt(x(3, 4), x(5, 4), bais=None),
    "a layout": lambda x: flexgemm.torch.gemm_nt(x(3, 4), x(5, 4), layout="dense"),
    "rows of a map": lambda x: flexgemm.torch.submanifold_conv3d(x(4, 3), x(2, 3, 3, 3, 3), neighbor_map=map_of(x)),
    "kernel of a map": lambda x: flexgemm.torch.submanifold_conv3d(x(2, 3), x(2, 1, 1, 1, 3), neighbor_map=map_of(x)),
    "rows to pool": lambda x: flexgemm.torch.sparse_pool3d(x(4, 3), neighbor_map=map_of(x)),
    "masked_m": lambda x: flexgemm.torch.m_grouped_gemm_nt_masked(x(2, 3, 4), x(2, 5, 4), x(3).int()),
}


@pytest.mark.parametrize("case", MISMATCHED)
def test_tensors_without_memory_are_refused_in_the_words_of_others(device, case):
    """Which torch.compile and torch.export would otherwise find out when the program runs."""
    said = []
    for where in (device, "meta"):
        with pytest.raises((TypeError, ValueError)) as caught:
            MISMATCHED[case](partial(torch.ones, device=where))
        said.append((caught.type, str(caught.value)))
    assert said[0] == said[1]


def test_a_tensor_without_data_beside_others_is_refused_by_name(device):
    """Weights that have yet to be loaded."""
    a, b = torch.ones(3, 4, device=device), torch.ones(5, 4, device="meta")
    calls = [lambda: flexgemm.torch.gemm_nt(a, b), lambda: flexgemm.gemm_nt(a, b), lambda: flexgemm.gemm_nt(b, b)]
    for call, name in zip(calls, "bba", strict=True):
        with pytest.raises(TypeError, match=f"^{name}: expected a tensor with data, got one on the device meta$"):
            call()


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_tensor_is_computed_where_it_is(device, needs_grad):
    a = torch.ones(3, 4, device=device, requires_grad=needs_grad)
    for elsewhere in ("cpu", "cuda"):
        with pytest.raises(ValueError, match="^device: only NumPy arrays are moved; torch arrays are computed where"):
            flexgemm.gemm_nt(a, a, device=elsewhere)


@pytest.mark.parametrize("value", [10**400, 1e39, -1e39])
def test_a_factor_that_float32_does_not_hold_is_refused_by_name(device, value):
    a = torch.ones(3, 4, device=device)
    with pytest.raises(ValueError, match="^alpha: "):
        flexgemm.torch.gemm_nt(a, a, alpha=value)
    assert flexgemm.torch.gemm_nt(a, a, alpha=float("inf")).isinf().all()
    with pytest.raises(ValueError, match="^alpha: "):
        flexgemm.torch.gemm_nt(a, a, alpha=torch.ones(2))


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"promote_every": 7}, ValueError, "promote_every: expected 128, 256, 512 or None, got 7"),
        ({"accumulate": True}, ValueError, "out: expected an array to add to with accumulate=True, got None"),
        ({"accumulate": None}, TypeError, "accumulate: expected a bool, got NoneType"),
        ({"accumulate": 0}, TypeError, "accumulate: expected a bool, got int"),
        ({"expected_m": 7}, ValueError, "expected_m: expected 0 but for masked groups, got 7"),
        ({"precision": ""}, ValueError, "precision: expected 'ieee' or 'tf32', got ''"),
        ({"alpha": None}, TypeError, "alpha: expected a float, got NoneType"),
        ({"expected_m": None}, TypeError, "expected_m: expected an int, got NoneType"),
        ({"b_row_major": None}, TypeError, "b_row_major: expected a bool, got NoneType"),
        ({"promote_every": 128.0}, TypeError, "promote_every: expected an int, got float"),
        ({"alpha": 1 + 0j}, TypeError, "alpha: expected a float, got complex"),
        (
            {"dtype_out": "float16", "out_dtype": "float32"},
            ValueError,
            "dtype_out: expected None or out_dtype, which is float32, got float16",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_options_are_checked_where_autograd_records_too(device, options, error, message, needs_grad):
    a = torch.ones(3, 4, device=device, requires_grad=needs_grad)
    with pytest.raises(error, match=f"^{message}$"):
        flexgemm.torch.gemm_nt(a, torch.ones(5, 4, device=device), **options)


def test_rows_are_expected_of_masked_groups_alone(device):
    a = torch.ones(3, 4, device=device)
    with pytest.raises(ValueError, match="^expected_m: expected 0 but for masked groups, got 5$"):
        flexgemm.torch.gemm_nt(a, a, expected_m=5)


def test_two_dtypes_of_an_output_are_the_same(device):
    a, one = torch.ones(16, 64, device=device).to(torch.float8_e4m3fn), torch.ones((), device=device)
    how = {"scale_out": one, "out_dtype": torch.float8_e4m3fn}
    out = flexgemm.gemm_nt(a, a, **how, dtype_out="float8_e4m3fn")
    assert torch.equal(out.float(), flexgemm.gemm_nt(a, a, **how).float())
    with pytest.raises(ValueError, match="^dtype_out: expected None or out_dtype, which is float8_e4m3fn, got"):
        flexgemm.gemm_nt(a, a, **how, dtype_out="float8_e5m2")
    with pytest.raises(ValueError, match="^dtype_out: expected float32 or float16 or bfloat16, got float8_e4m3fn$"):
        flexgemm.gemm_nt(a, a, dtype_out="float8_e4m3fn")
    assert flexgemm.wgrad_gemm_nt(a, a, scale_out=one, dtype_out="float8_e4m3fn").dtype is torch.float8_e4m3fn
    assert flexgemm.wgrad_gemm_nt(a, a, scale_out=one).dtype is torch.float8_e4m3fn
