"""Programs written against DeepGEMMPerTensor and flashinfer.gemm, on flexgemm."""

from __future__ import annotations

import calls
import numpy as np
import pytest
from memory import hopper_kernels
from verdicts import ROW_CUTS, assert_gemm_rows, assert_rows, float8_cut

torch = pytest.importorskip("torch", reason="torch not installed")
from flexgemm.compat import deep_gemm_per_tensor as dg  # noqa: E402
from flexgemm.compat.flashinfer_gemm import SegmentGEMMWrapper, bmm_fp8  # noqa: E402

E4M3 = torch.float8_e4m3fn


def fp8(*shape, device, dtype=E4M3):
    return torch.randn(shape, device=device).to(dtype)


def f64(x):
    return x.float().double().cpu().numpy() if x.element_size() == 1 else x.detach().double().cpu().numpy()


# ---- deep_gemm_per_tensor ----


@pytest.mark.parametrize("m, n, k", [(0, 16, 128), (7, 24, 128), (64, 33, 200)])
def test_dense(device, m, n, k):
    lhs, rhs = fp8(m, k, device=device), fp8(n, k, device=device)
    out = torch.full((m, n), torch.nan, dtype=torch.bfloat16, device=device)
    assert dg.gemm_per_tensor_fp8_fp8_bf16_nt(lhs, rhs, out) is None
    assert_gemm_rows(f64(out), f64(lhs) @ f64(rhs).T, "bfloat16")


@pytest.mark.parametrize("k", [128, 200])
def test_contiguous(device, k):
    """Whatever K is a multiple of and whatever axes the indices have; rows of padding are left alone."""
    assert dg.get_m_alignment_for_contiguous_layout() == 128
    lhs, rhs = fp8(256, k, device=device), fp8(3, 33, k, device=device)
    groups = np.full(256, -1, np.int32)
    groups[:100], groups[128:140] = 2, 0
    out = torch.full((256, 33), 7.0, dtype=torch.bfloat16, device=device)
    indices = torch.from_numpy(groups).to(device)
    assert dg.m_grouped_gemm_per_tensor_fp8_fp8_bf16_nt_contiguous(lhs, rhs, out, indices[:, None]) is None
    valid = groups >= 0
    expected = np.stack([f64(lhs)[i] @ f64(rhs)[groups[i]].T for i in np.flatnonzero(valid)])
    assert_gemm_rows(f64(out)[valid], expected, "bfloat16")
    assert (f64(out)[~valid] == 7).all()


@pytest.mark.parametrize("m_max", [5, 130])
def test_masked(device, m_max):
    """Whatever m_max is and whatever axes the counts have; what is masked is left alone."""
    lhs, rhs = fp8(3, m_max, 128, device=device), fp8(3, 40, 128, device=device)
    counts = [m_max, 0, 3]
    out = torch.full((3, m_max, 40), 7.0, dtype=torch.bfloat16, device=device)
    masked = torch.tensor(counts, dtype=torch.int32, device=device)
    assert dg.m_grouped_gemm_per_tensor_fp8_fp8_bf16_nt_masked(lhs, rhs, out, masked[None], 4) is None
    for g, count in enumerate(counts):
        assert_gemm_rows(f64(out)[g, :count], (f64(lhs)[g] @ f64(rhs)[g].T)[:count], "bfloat16")
        assert (f64(out)[g, count:] == 7).all()


def test_weight_gradients_accumulate(device):
    lhs, rhs = fp8(24, 200, device=device), fp8(40, 200, device=device)
    before = torch.randn(24, 40, device=device)
    out = before.clone()
    assert dg.wgrad_gemm_per_tensor_fp8_fp8_fp32_nt(lhs, rhs, out) is None
    assert_rows(f64(out), f64(before) + f64(lhs) @ f64(rhs).T, 1e-5)


def test_weight_gradients_by_group(device):
    """Flat operands: the matrices (m, k_i) one after the other."""
    sizes, m, n = [128, 0, 72], 24, 40
    lhs, rhs = ([fp8(rows, k, device=device) for k in sizes] for rows in (m, n))
    flat = (torch.cat([x.view(torch.uint8).flatten() for x in chunks]).view(E4M3) for chunks in (lhs, rhs))
    before = torch.randn(3, m, n, device=device)
    out = before.clone()
    assert dg.k_grouped_wgrad_gemm_per_tensor_fp8_fp8_fp32_nt(*flat, out, sizes) is None
    tolerance = max(1e-5, ROW_CUTS * float8_cut(device.type))
    for g in range(3):
        assert_rows(f64(out)[g], f64(before)[g] + f64(lhs[g]) @ f64(rhs[g]).T, tolerance)


def test_weight_gradients_of_no_groups(device):
    none, out = fp8(0, device=device), torch.empty(0, 24, 40, device=device)
    assert dg.k_grouped_wgrad_gemm_per_tensor_fp8_fp8_fp32_nt(none, none, out, []) is None


def test_helpers():
    assert [dg.ceil_div(n, 128) for n in (0, 1, 128, 129)] == [0, 1, 1, 2]
    x = torch.randn(50)
    assert dg.calc_diff(x, x) == 0
    assert abs(dg.calc_diff(x, -x) - 2) < 1e-12
    near = torch.tensor([1 + 2**-12])
    assert dg.calc_diff(near, torch.ones(1)).item() == pytest.approx(2**-25, rel=1e-3), "in float64"
    before = dg.get_num_sms()
    dg.set_num_sms(8)
    assert dg.get_num_sms() == 8
    dg.set_num_sms(None)
    assert dg.get_num_sms() == before
    assert dg.utils.count_bytes([x, (x, x.half())]) == 500


def test_timers(cuda_device):
    """Milliseconds of a call, and seconds of the one kernel that has a name."""
    x, y = torch.ones(2, 1 << 20, device="cuda")

    def call():
        return torch.add(x, y), torch.sort(x)

    assert 0 < dg.bench(call) < 100
    assert 0 < dg.bench_kineto(call, "add") < 1e-3
    assert len(dg.bench_kineto(call, ("add", "Sort"), with_multiple_kernels=True)) == 2
    with pytest.raises(RuntimeError, match="kernel_names: expected one kernel with 'nothing' in its name, got 0"):
        dg.bench_kineto(call, "nothing")


@pytest.mark.parametrize("m", [16, 128, 1024])
def test_profiles_find_our_kernels_by_name(cuda, cuda_device, m):
    """What a program asks `bench_kineto` for, whichever kernel the number of rows takes."""
    if not hopper_kernels(cuda):
        pytest.skip("the names are those of Hopper's kernels")
    lhs, rhs = fp8(m, 4096, device="cuda"), fp8(2048, 4096, device="cuda")
    out = torch.zeros(m, 2048, device="cuda")
    low = out.to(torch.bfloat16)
    for name, call in (
        ("fp8_gemm", lambda: dg.gemm_per_tensor_fp8_fp8_bf16_nt(lhs, rhs, low)),
        ("fp8_wgrad_gemm", lambda: dg.wgrad_gemm_per_tensor_fp8_fp8_fp32_nt(lhs, rhs, out)),
    ):
        assert 0 < dg.bench_kineto(call, name) < 1e-3


def test_wrong_arguments_raise(device):
    a, b = fp8(8, 128, device=device), fp8(16, 128, device=device)
    out = torch.empty(8, 16, dtype=torch.bfloat16, device=device)
    with pytest.raises(TypeError, match="lhs"):
        dg.gemm_per_tensor_fp8_fp8_bf16_nt(a.float(), b, out)
    with pytest.raises(TypeError, match="out"):
        dg.gemm_per_tensor_fp8_fp8_bf16_nt(a, b, out.float())
    with pytest.raises(ValueError, match="^rhs: "):
        dg.gemm_per_tensor_fp8_fp8_bf16_nt(a, b[:, :64].contiguous(), out)
    with pytest.raises(ValueError, match="batch_sizes"):
        dg.k_grouped_wgrad_gemm_per_tensor_fp8_fp8_fp32_nt(a.flatten(), b.flatten(), out.float()[None], [64, 64])
    with pytest.raises(ValueError, match="lhs"):
        dg.k_grouped_wgrad_gemm_per_tensor_fp8_fp8_fp32_nt(a.flatten(), b.flatten(), out.float()[None], [64])
    with pytest.raises(ValueError, match=r"^out: expected \(8, m, n\) to match batch_sizes, got \(8, 16\)$"):
        dg.k_grouped_wgrad_gemm_per_tensor_fp8_fp8_fp32_nt(a.flatten(), b.flatten(), out.float(), [16] * 8)
    with pytest.raises(ValueError, match=r"^lhs: expected \(1024,\), 8 rows of all batch_sizes, got \(8, 128\)$"):
        dg.k_grouped_wgrad_gemm_per_tensor_fp8_fp8_fp32_nt(a, b.flatten(), out.float()[None], [128])
    with pytest.raises(TypeError, match="^rhs: expected float8_e4m3fn, got torch.float8_e5m2$"):
        narrow = b.float().to(torch.float8_e5m2)
        dg.k_grouped_wgrad_gemm_per_tensor_fp8_fp8_fp32_nt(a.flatten(), narrow.flatten(), out.float()[None], [128])


def test_every_product_names_its_factors(device):
    a, b = fp8(1, 128, 128, device=device), fp8(1, 16, 64, device=device)
    out, sums = (torch.zeros(1, 128, 16, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32))
    groups = torch.zeros(128, dtype=torch.int32, device=device)
    for call in (
        lambda: dg.gemm_per_tensor_fp8_fp8_bf16_nt(a[0], b[0], out[0]),
        lambda: dg.m_grouped_gemm_per_tensor_fp8_fp8_bf16_nt_contiguous(a[0], b, out[0], groups),
        lambda: dg.m_grouped_gemm_per_tensor_fp8_fp8_bf16_nt_masked(a, b, out, groups[:1], 1),
        lambda: dg.wgrad_gemm_per_tensor_fp8_fp8_fp32_nt(a[0], b[0], sums[0]),
    ):
        with pytest.raises(ValueError, match="^rhs: expected .* to match lhs"):
            call()


PROGRAM = """
import flexgemm.compat
flexgemm.compat.install("deep_gemm_per_tensor")
import deep_gemm_per_tensor
from deep_gemm_per_tensor import bench_kineto, calc_diff, ceil_div
from deep_gemm_per_tensor.jit_kernels.utils import get_m_alignment_for_contiguous_layout
import torch
assert deep_gemm_per_tensor.__path__ and get_m_alignment_for_contiguous_layout() == 128
a, out = torch.randn(8, 128).to(torch.float8_e4m3fn), torch.empty(8, 8, dtype=torch.bfloat16)
deep_gemm_per_tensor.gemm_per_tensor_fp8_fp8_bf16_nt(a, a, out)
assert calc_diff(out, a.float() @ a.float().t()) < 1e-4
"""


def test_a_program_runs_unchanged():
    result = calls.run_python(["-c", PROGRAM])
    assert result.returncode == 0, result.stderr


# ---- flashinfer.gemm ----


@pytest.mark.parametrize("column_major", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bmm_fp8(device, column_major, dtype):
    a, b = fp8(3, 7, 48, device=device), fp8(3, 33, 48, device=device, dtype=torch.float8_e5m2).transpose(1, 2)
    b = b if column_major else b.contiguous()
    scales = torch.tensor(0.5, device=device), torch.tensor([0.25], device=device)
    expected = 0.125 * f64(a) @ f64(b)
    out = bmm_fp8(a, b, *scales, dtype)
    assert (out.dtype, tuple(out.shape)) == (dtype, (3, 7, 33))
    for got, want in zip(f64(out), expected, strict=True):
        assert_gemm_rows(got, want, str(dtype).removeprefix("torch."))
    assert torch.equal(bmm_fp8(a, b, *(scale.view(1, 1) for scale in scales), dtype), out), "one element of any shape"
    given = torch.empty_like(out)
    assert bmm_fp8(a, b, *scales, dtype, given, backend="cublas") is given
    assert torch.equal(given, out)


@pytest.mark.parametrize("column_major", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, E4M3])
@pytest.mark.parametrize("way", ["seg_lens", "seg_indptr", "old", "old_indptr", "old_positional", "out", "cpu"])
def test_segments(device, column_major, dtype, way):
    torch.manual_seed(0)
    lens, chosen = [5, 0, 9], [2, 0, 1]
    x, weights = (torch.randn(s, device=device).to(dtype) for s in ((14, 16), (3, 8, 16)))
    stored = weights if column_major else weights.transpose(1, 2).contiguous()
    seg_lens, indices = (torch.tensor(v, dtype=torch.int64, device=device) for v in (lens, chosen))
    indptr = torch.tensor([0, 5, 5, 14], dtype=torch.int64, device=device)
    wrapper = SegmentGEMMWrapper(torch.empty(16, dtype=torch.int8, device=device))
    wrapper.reset_workspace_buffer(torch.empty(16), torch.empty(16))
    call = [x, stored, 3, column_major]
    out_dtype = torch.bfloat16 if dtype is E4M3 else dtype
    given = torch.empty(14, 8, dtype=out_dtype, device=device)
    out = {
        "seg_lens": lambda: wrapper.run(*call, seg_lens=seg_lens, weight_indices=indices),
        "seg_indptr": lambda: wrapper.forward(*call, seg_indptr=indptr, weight_indices=indices),
        "old": lambda: wrapper.run(*call, seg_lens, weight_indices=indices),
        "old_indptr": lambda: wrapper.run(*call, None, indptr, weight_indices=indices),
        "old_positional": lambda: wrapper.run(*call, seg_lens, None, indices),
        "out": lambda: wrapper.run(*call, given, seg_lens, None, indices),
        "cpu": lambda: wrapper.run(*call, seg_lens=seg_lens.cpu(), weight_indices=indices.cpu()),
    }[way]()
    assert (out.dtype, out is given) == (out_dtype, way == "out")
    segments = zip(np.split(f64(x), np.cumsum(lens)[:-1]), chosen, strict=True)
    expected = np.concatenate([rows @ f64(weights)[w].T for rows, w in segments])
    assert_gemm_rows(f64(out), expected, str(out_dtype).removeprefix("torch."))


def integers(*values):
    return torch.tensor(values, dtype=torch.int64)


def test_segments_by_fewer_than_all_weights(device):
    """Segment i has weight i, however many weights there are."""
    x, weights = torch.randn(14, 16, device=device), torch.randn(3, 8, 16, device=device)
    run = SegmentGEMMWrapper().run
    expected = torch.cat([x[:5] @ weights[0].T, x[5:] @ weights[1].T])
    for sizes in ({"seg_indptr": integers(0, 5, 14)}, {"seg_lens": integers(5, 9)}):
        torch.testing.assert_close(run(x, weights, 2, True, **sizes), expected)
        torch.testing.assert_close(run(x, weights.mT.contiguous(), 2, False, **sizes), expected)
    assert run(x[:0], weights, 0, True, seg_lens=integers()).shape == (0, 8)


def test_segments_of_buffers_for_more(device):
    """As programs keep them for CUDA graphs: bounds and indices of the largest batch, of which the first count."""
    x, weights = torch.randn(14, 16, device=device), torch.randn(3, 8, 16, device=device)
    bounds, chosen = integers(0, 5, 14, 14, 99, -1), integers(2, 0, 7, -1)
    expected = torch.cat([x[:5] @ weights[2].T, x[5:] @ weights[0].T])
    run = SegmentGEMMWrapper().run
    torch.testing.assert_close(run(x, weights, 2, True, seg_indptr=bounds, weight_indices=chosen), expected)


def test_rows_of_no_segment(device):
    x, weights = torch.randn(14, 16, device=device), torch.randn(2, 8, 16, device=device)
    run = SegmentGEMMWrapper().run
    for where, own in ({"seg_indptr": integers(3, 5, 9)}, slice(3, 9)), ({"seg_lens": integers(2, 4)}, slice(0, 6)):
        expected = torch.zeros(14, 8, device=device)
        expected[own] = torch.cat([x[own][:2] @ weights[0].T, x[own][2:] @ weights[1].T])
        torch.testing.assert_close(run(x, weights, 2, True, **where), expected)
        given = torch.full_like(expected, 7)
        assert run(x, weights, 2, True, given, **where) is given
        outside = torch.ones(14, dtype=torch.bool)
        outside[own] = False
        torch.testing.assert_close(given[own], expected[own])
        assert (given[outside] == 7).all()


def test_parameters_are_operands_like_others(device):
    """Their products are not recorded."""
    weight = torch.nn.Parameter(torch.randn(1, 8, 16, device=device))
    x, one = torch.randn(4, 16, device=device, requires_grad=True), integers(4)
    out = SegmentGEMMWrapper().run(x, weight, 1, True, seg_lens=one, weight_indices=integers(0))
    assert not out.requires_grad
    torch.testing.assert_close(out, (x @ weight[0].T).detach())
    a, b = fp8(1, 8, 48, device=device), fp8(1, 16, 48, device=device)
    scale = torch.nn.Parameter(torch.tensor(0.5, device=device))
    assert not bmm_fp8(a, b.mT, scale, scale, torch.bfloat16).requires_grad
    gradient = torch.nn.Parameter(torch.zeros(8, 16, device=device))
    dg.wgrad_gemm_per_tensor_fp8_fp8_fp32_nt(a[0], b[0], gradient)
    assert gradient.is_leaf and gradient.abs().sum() > 0
    out = torch.nn.Parameter(torch.zeros(8, 16, dtype=torch.bfloat16, device=device))
    dg.gemm_per_tensor_fp8_fp8_bf16_nt(a[0], b[0], out)
    assert out.is_leaf and out.abs().sum() > 0


def test_segments_name_their_arguments(device):
    x, weights = torch.randn(14, 16, device=device), torch.randn(3, 8, 16, device=device)
    run = SegmentGEMMWrapper(float_workspace_buffer=None).run
    bounds = integers(0, 5, 5, 14)
    for changed, error, message in (
        ({"seg_indptr": None}, ValueError, "seg_lens, seg_indptr: expected one of them"),
        ({"seg_indptr": bounds.tolist()}, TypeError, "seg_indptr: expected a torch.Tensor, got list"),
        ({"seg_indptr": None, "seg_lens": bounds[:2]}, ValueError, r"seg_lens: expected \(3,\), got \(2,\)"),
        ({"seg_indptr": None, "seg_lens": bounds}, ValueError, r"seg_lens: expected \(3,\), got \(4,\)"),
        ({"seg_indptr": bounds[:3]}, ValueError, r"seg_indptr: expected \(4,\), or more, got \(3,\)"),
        ({"seg_indptr": bounds[:, None]}, ValueError, r"seg_indptr: expected \(4,\), or more, got \(4, 1\)"),
        ({"seg_indptr": bounds.float()}, TypeError, "seg_indptr: expected dtype int32 or int64"),
        ({"weight_indices": bounds[:2]}, ValueError, r"weight_indices: expected \(3,\), or more, got \(2,\)"),
        ({"weights": weights[:2]}, ValueError, "weights: expected one for each of 3 segments, got 2"),
        ({"weights": weights[0]}, ValueError, r"weights: expected \(any, any, any\), got \(8, 16\)"),
        ({"x": x.tolist()}, TypeError, "x: expected a torch.Tensor, got list"),
        ({"batch_size": 3.0}, TypeError, "batch_size: expected an int, got float"),
        ({"batch_size": -1}, ValueError, "batch_size: expected at least 0, got -1"),
        ({"seg_indptr": None, "out": [5, 0, 9]}, TypeError, "out: expected a torch.Tensor, got list"),
        ({"seg_indptr": None, "seg_lens": [5, 0, 9]}, TypeError, "seg_lens: expected a torch.Tensor, got"),
    ):
        call = {"x": x, "weights": weights, "batch_size": 3, "weight_column_major": True, "seg_indptr": bounds}
        with pytest.raises(error, match=f"^{message}"):
            run(**(call | changed))


def test_bmm_fp8_names_its_arguments(device):
    a, b, one = fp8(3, 7, 48, device=device), fp8(3, 33, 48, device=device).mT, torch.tensor(1.0, device=device)
    for arguments, error, message in (
        ((a[0], b, one, one), ValueError, r"A: expected \(any, any, any\), got \(7, 48\)"),
        ((a, b, one.double(), one), TypeError, "A_scale: expected dtype float32"),
        ((a, b, one, torch.ones(4)), ValueError, r"B_scale: expected one element, got \(4,\)"),
        ((a, b, 1.0, one), TypeError, "A_scale: expected a torch.Tensor, got float"),
        ((a, b[0, 0], one, one), ValueError, r"B: expected \(3, 48, any\), got"),
        ((a, b.half(), one, one), TypeError, "B: expected dtype float8_e4m3fn or float8_e5m2, got float16"),
        ((a, [b], one, one), TypeError, "B: expected a torch.Tensor, got list"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            bmm_fp8(*arguments, torch.bfloat16)
    assert bmm_fp8(a, b, one, one, torch.bfloat16, batch_invariant=False).shape == (3, 7, 33)
    with pytest.raises(ValueError, match="^batch_invariant: expected False, got True"):
        bmm_fp8(a, b, one, one, torch.bfloat16, torch.empty(3, 7, 33).bfloat16(), batch_invariant=True)
    with pytest.raises(ValueError, match="^dtype: expected float32 or float16 or bfloat16, got float8_e4m3fn$"):
        bmm_fp8(a, b, one, one, E4M3)


def test_the_dtype_of_bmm_fp8_is_that_of_a_new_output(device):
    a, b, one = fp8(3, 7, 48, device=device), fp8(3, 33, 48, device=device).mT, torch.tensor(1.0, device=device)
    out = torch.zeros(3, 7, 33, dtype=torch.float16, device=device)
    bmm_fp8(a, b, one, one, torch.bfloat16, out)
    assert torch.equal(out, bmm_fp8(a, b, one, one, torch.float16))


def test_autograd_sees_what_is_written(device):
    a, b = fp8(3, 7, 48, device=device), fp8(3, 33, 48, device=device)
    one, x = torch.tensor(1.0, device=device), torch.randn(14, 48, device=device)
    calls = {
        (3, 7, 33): lambda out: bmm_fp8(a, b.mT, one, one, torch.bfloat16, out),
        (7, 33): lambda out: dg.gemm_per_tensor_fp8_fp8_bf16_nt(a[0], b[0], out),
        (14, 33): lambda out: SegmentGEMMWrapper().run(
            x.bfloat16(), b.to(torch.bfloat16), 3, True, out, integers(5, 0, 9)
        ),
    }
    for shape, call in calls.items():
        out = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        weight = torch.ones_like(out).requires_grad_()
        product = (weight * out).sum()
        call(out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_lengths_by_name_are_lengths(device):
    """Bounds among them are told by position alone, as in flashinfer's older order of arguments."""
    x, weights = torch.ones(10, 8, device=device), torch.ones(3, 4, 8, device=device)
    run, lengths = SegmentGEMMWrapper().run, torch.tensor([3, 3, 4])
    bounds = torch.tensor([0, 3, 6, 10])
    with pytest.raises(ValueError, match=r"^seg_lens: expected \(3,\), got \(4,\)$"):
        run(x, weights, 3, True, seg_lens=bounds)
    none = torch.empty(0, dtype=torch.int64)  # as flashinfer has it for weight_indices
    assert (run(x, weights, 3, True, seg_lens=none, seg_indptr=bounds, weight_indices=none) == 8).all()
    order = torch.arange(3)
    for given in (
        (lengths,), (None, lengths), (None, bounds), (None, None, bounds), (lengths, None, order), (None, bounds, order)
    ):  # fmt: skip
        assert (run(x, weights, 3, True, *given) == 8).all()
    assert (run(x, weights, 3, True, None, None, seg_lens=lengths) == 8).all(), "None by position is not given"
    with pytest.raises(TypeError, match="^seg_lens: given by position and by name$"):
        run(x, weights, 3, True, None, lengths, seg_lens=lengths)
    with pytest.raises(TypeError, match="^unexpected keyword argument 'lens'$"):
        run(x, weights, 3, True, lens=lengths)
    with pytest.raises(TypeError, match="^expected at most 8 positional arguments, got 9$"):
        run(x, weights, 3, True, None, None, None, None, None)


def test_segments_are_traced(device):
    run = SegmentGEMMWrapper().run
    x, weights = (torch.randn(s, device=device) for s in ((10, 8), (3, 4, 8)))
    lengths = torch.tensor([3, 3, 4], device=device)
    compiled = torch.compile(lambda x, w, s: run(x, w, 3, True, seg_lens=s), backend="aot_eager", fullgraph=True)
    expected = run(x, weights, 3, True, seg_lens=lengths)
    torch.testing.assert_close(compiled(x, weights, lengths), expected)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(run(x, weights, 3, True, seg_lens=lengths), expected)


def test_bmm_fp8_names_the_shape_that_it_was_given(device):
    a = torch.ones(2, 16, 64, device=device).to(torch.float8_e4m3fn)
    b = torch.ones(2, 32, 48, device=device).to(torch.float8_e4m3fn).transpose(1, 2)
    one = torch.ones((), device=device)
    with pytest.raises(ValueError, match=r"^B: expected \(2, 64, any\), got \(2, 48, 32\)$"):
        bmm_fp8(a, b, one, one, torch.bfloat16)


def test_pairs_of_matrix_and_scales_are_refused_by_name(device):
    a = torch.ones(16, 64, device=device).to(torch.float8_e4m3fn)
    out, sums = torch.empty(16, 16, dtype=torch.bfloat16, device=device), torch.zeros(2, 16, 16, device=device)
    with pytest.raises(TypeError, match="^lhs: expected a torch.Tensor, got tuple$"):
        dg.gemm_per_tensor_fp8_fp8_bf16_nt((a, 1.0), (a, 1.0), out)
    with pytest.raises(TypeError, match="^out: expected a torch.Tensor, got NoneType$"):
        dg.gemm_per_tensor_fp8_fp8_bf16_nt(a, a, None)
    for sizes, error in (([80, -16], ValueError), ([32.0, 32.0], TypeError), (None, TypeError), (64, TypeError)):
        with pytest.raises(error, match="^batch_sizes: expected "):
            dg.k_grouped_wgrad_gemm_per_tensor_fp8_fp8_fp32_nt(a.flatten(), a.flatten(), sums, sizes)
