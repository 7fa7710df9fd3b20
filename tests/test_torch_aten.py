"""flexgemm in place of torch._scaled_mm, torch._scaled_grouped_mm and torch._grouped_mm."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from reference import group_bounds
from verdicts import assert_gemm_rows

torch = pytest.importorskip("torch", reason="torch not installed")
if not hasattr(torch.library, "get_kernel"):
    pytest.skip("torch cannot hand out its own kernels", allow_module_level=True)
from flexgemm.torch import aten  # noqa: E402

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ENDS = [5, 5, 21, 32]
G = len(ENDS)


@pytest.fixture(autouse=True)
def always_off_again():
    yield
    for kind in ("cpu", "cuda"):
        aten.disable(kind)


@pytest.fixture
def ours(monkeypatch):
    """Counts the products that flexgemm computed."""
    seen = []
    product = aten.gemm.product
    monkeypatch.setattr(aten.gemm, "product", lambda **how: seen.append(how["layout"]) or product(**how))
    return seen


def draw(*shape, device, dtype):
    return torch.randn(shape, device=device).to(dtype)


def f64(x):
    return x.float().double().cpu().numpy()


def by_group(case, a, b, ends=ENDS):
    """The products by their definition: [(where in the output, factor of a, factor of b)] in float64."""
    bounds = group_bounds(ends, len(ends))
    if case == "2d3d":
        return [(np.s_[i:j], a[i:j], b[g]) for g, (i, j) in enumerate(bounds)]
    if case == "3d2d":
        return [(np.s_[:, i:j], a[g], b[:, i:j]) for g, (i, j) in enumerate(bounds)]
    if case == "2d2d":
        return [(np.s_[g], a[:, i:j], b[i:j]) for g, (i, j) in enumerate(bounds)]
    return [(np.s_[g], a[g], b[g]) for g in range(len(a))]


def operands(case, device, dtype, k=32):
    """a (M, K) row-major, b (K, N) column-major, with a leading G where they are 3-D."""
    rows, columns = (32, 24) if case == "2d3d" else (24, 32)
    leading = {"2d3d": ((), (G,)), "3d2d": ((G,), ()), "2d2d": ((), ()), "3d3d": ((G,), (G,))}[case]
    a = draw(*leading[0], rows, k, device=device, dtype=dtype)
    b = draw(*leading[1], columns, k, device=device, dtype=dtype).mT
    return a, b, None if case == "3d3d" else torch.tensor(ENDS, dtype=torch.int32, device=device)


def check(case, out, a, b, scale_a=None, scale_b=None):
    a, b = f64(a), f64(b)
    if case == "2d2d":
        scale_a, scale_b = (None if s is None else f64(s).reshape(G, -1) for s in (scale_a, scale_b))
    else:
        a = a if scale_a is None else a * f64(scale_a)[..., None]
        b = b if scale_b is None else b * f64(scale_b)[..., None, :]
    for g, (where, rows, columns) in enumerate(by_group(case, a, b)):
        expected = rows @ columns
        if case == "2d2d" and scale_a is not None:
            expected *= scale_a[g][:, None] * scale_b[g]
        assert_gemm_rows(f64(out)[where], expected, str(out.dtype).removeprefix("torch."))


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E5M2)])
@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_scaled_mm(device, ours, dtypes, scales, out_dtype):
    """e5m2 by e5m2, which torch refuses, too."""
    a, b = draw(20, 48, device=device, dtype=dtypes[0]), draw(16, 48, device=device, dtype=dtypes[1]).t()
    shapes = ((), ()) if scales == "tensor" else ((20, 1), (1, 16))
    scale_a, scale_b = (torch.rand(shape, device=device) + 0.5 for shape in shapes)
    bias = torch.randn(16, device=device).to(out_dtype)
    with aten.use(device.type):
        out = torch._scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype)
    assert (ours, out.dtype) == (["dense"], out_dtype)
    expected = f64(scale_a) * (f64(a) @ f64(b)) * f64(scale_b) + f64(bias)
    assert_gemm_rows(f64(out), expected, str(out_dtype).removeprefix("torch."))


@pytest.mark.parametrize("case", ["2d3d", "3d2d", "2d2d", "3d3d"])
@pytest.mark.parametrize("fast", [False, True])
def test_scaled_grouped_mm(device, ours, case, fast):
    a, b, offs = operands(case, device, E4M3)
    of_a, of_b = a.shape[:-1], (*b.shape[:-2], b.shape[-1])
    if case == "2d2d":
        of_a, of_b = (G * a.shape[0],), (G * b.shape[1],)
    scale_a, scale_b = (torch.rand(shape, device=device) + 0.5 for shape in (of_a, of_b))
    with aten.use(device.type):
        out = torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs, use_fast_accum=fast)
    assert len(ours) == 1
    assert out.dtype is torch.bfloat16
    check(case, out, a, b, scale_a, scale_b)


@pytest.mark.parametrize("case", ["2d3d", "3d2d", "2d2d", "3d3d"])
def test_grouped_mm(device, ours, case):
    a, b, offs = operands(case, device, torch.bfloat16)
    with aten.use(device.type):
        out = torch._grouped_mm(a, b, offs=offs)
    assert len(ours) == 1
    check(case, out, a, b)


@pytest.mark.parametrize("case", ["2d3d", "3d2d", "2d2d", "3d3d"])
@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16])
def test_rows_of_a_grouped_output_begin_where_torch_has_them(device, ours, case, dtype):
    """At multiples of 16 bytes, as torch.compile expects and another grouped product of torch's requires."""
    a, b, offs = operands(case, device, dtype)
    if case != "3d2d":
        b = b[..., :20].mT.contiguous().mT
    with aten.use(device.type):
        if dtype is E4M3:
            groups = G if case == "2d2d" else 1
            scale_a = torch.ones(*a.shape[:-2], groups * a.shape[-2], device=device)
            scale_b = torch.ones(*b.shape[:-2], groups * b.shape[-1], device=device)
            out = torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=offs)
        else:
            out = torch._grouped_mm(a, b, offs=offs)
    assert len(ours) == 1
    assert out.stride()[-2:] == (-(-out.shape[-1] // 8) * 8, 1)
    check(case, out, a, b)


@pytest.mark.parametrize("out_dtype, stride", [(torch.bfloat16, 24), (torch.float32, 20)])
def test_16_bytes_are_fewer_elements_of_a_wider_output(out_dtype, stride):
    a, b, offs = operands("2d3d", "cpu", torch.bfloat16)
    out = aten.grouped_mm(a, b[..., :18], offs, out_dtype=out_dtype)["out"]
    assert (out.dtype, tuple(out.shape), out.stride()) == (out_dtype, (32, 18), (stride, 1))


def test_scales_that_torch_refuses_are_left_to_it(device, ours):
    """Of another shape than it documents, or not contiguous."""
    a, b, offs = operands("2d3d", device, E4M3)
    rows, columns = torch.ones(32, device=device), torch.ones(G, 24, device=device)
    with aten.use(device.type):
        for wrong in (
            (rows[:, None], columns),
            (rows, columns.flatten()),
            (torch.ones(64, device=device)[::2], columns),
        ):
            with pytest.raises((RuntimeError, ValueError)):
                torch._scaled_grouped_mm(a, b, *wrong, offs=offs)
    assert ours == []


def test_scaled_mm_into_an_output(device, ours):
    """As inductor calls it. An output of another shape is torch's to resize, as one of another dtype is to refuse; one
    whose rows are not contiguous is torch's too, which on some CPUs computes it wrongly."""
    a, b = draw(16, 48, device=device, dtype=E4M3), draw(32, 48, device=device, dtype=E4M3).t()
    one = torch.ones((), device=device)
    shapes = (16, 32), (0,), (32, 16)
    out, other, turned = (torch.full(s, torch.nan, device=device, dtype=torch.bfloat16) for s in shapes)
    turned = turned.t()  # whose rows are not contiguous
    with aten.use(device.type):
        assert torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, out=out) is out
        assert ours == ["dense"]
        torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, out=other)
        torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, out=turned)
        with pytest.raises((RuntimeError, ValueError)):
            torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, out=out.float())
        assert ours == ["dense"]
        traced = torch.compile(lambda a, b: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16), fullgraph=True)
        compiled = traced(a, b)
        assert len(ours) == 2
    for result in (out, other, compiled):
        assert_gemm_rows(f64(result), f64(a) @ f64(b), "bfloat16")


@pytest.mark.skipif(not hasattr(torch.nn.functional, "scaled_mm"), reason="torch without scaled_mm")
@pytest.mark.parametrize("recipe", ["TensorWise", "RowWise"])
def test_scaled_mm_of_torch_functional(device, ours, recipe):
    functional = torch.nn.functional
    a, b = draw(20, 48, device=device, dtype=E4M3), draw(16, 48, device=device, dtype=E4M3).t()
    one, rows = ((), ()), ((20, 1), (1, 16))
    kind = getattr(functional.ScalingType, recipe)
    scale_a, scale_b = (torch.rand(s, device=device) + 0.5 for s in (one if recipe == "TensorWise" else rows))
    wrong = [torch.ones(s, device=device) for s in (rows if recipe == "TensorWise" else one)]
    bias = torch.randn(16, device=device).bfloat16()
    with aten.use(device.type):
        out = functional.scaled_mm(a, b, scale_a, kind, scale_b, kind, bias=bias)
        assert (ours, out.dtype) == (["dense"], torch.bfloat16)
        with pytest.raises((RuntimeError, ValueError, IndexError)):  # scales of the other recipe: torch's own error
            functional.scaled_mm(a, b, wrong[0], kind, wrong[1], kind)
    assert ours == ["dense"]
    expected = f64(scale_a) * (f64(a) @ f64(b)) * f64(scale_b) + f64(bias)
    assert_gemm_rows(f64(out), expected, "bfloat16")


@pytest.mark.skipif(not hasattr(torch.nn.functional, "scaled_grouped_mm"), reason="torch without scaled_grouped_mm")
@pytest.mark.parametrize("case", ["2d3d", "3d2d", "2d2d", "3d3d"])
def test_scaled_grouped_mm_of_torch_functional(device, ours, case):
    a, b, offs = operands(case, device, E4M3)
    groups, row = G if case == "2d2d" else 1, torch.nn.functional.ScalingType.RowWise
    scale_a = torch.rand(*a.shape[:-2], groups * a.shape[-2], device=device) + 0.5
    scale_b = torch.rand(*b.shape[:-2], groups * b.shape[-1], device=device) + 0.5
    with aten.use(device.type):
        out = torch.nn.functional.scaled_grouped_mm(a, b, scale_a, row, scale_b, row, offs=offs)
    assert len(ours) == 1
    check(case, out, a, b, scale_a, scale_b)


@pytest.mark.parametrize("case, columns", [("2d3d", "b"), ("2d2d", "b"), ("2d2d", "ab"), ("3d3d", "b"), ("3d3d", "ab")])
def test_operands_of_16_bits_in_columns_are_read_as_they_are(device, ours, case, columns):
    a, b, offs = operands(case, device, torch.bfloat16)
    if "a" in columns:
        a = a.mT.contiguous().mT
    with aten.use(device.type):
        out = torch._grouped_mm(a, b.contiguous(), offs=offs)
    assert len(ours) == 1
    check(case, out, a, b)


def test_autograd_stays_torch_s(device, ours):
    """Of the gradients' operands the weight is row-major, and both are rows of tokens."""
    a, b, offs = operands("2d3d", device, torch.bfloat16)
    a.requires_grad_()
    b.requires_grad_()
    with aten.use(device.type):
        torch._grouped_mm(a, b, offs=offs).float().sum().backward()
    assert sorted(ours) == ["k_grouped", "m_grouped", "m_grouped"]
    bounds = group_bounds(ENDS, G)
    grad_a = torch.cat([b[g].float().sum(1).expand(j - i, -1) for g, (i, j) in enumerate(bounds)])
    grad_b = torch.stack([a[i:j].float().sum(0)[:, None].expand(b.shape[1:]) for i, j in bounds])
    torch.testing.assert_close(a.grad.float(), grad_a, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(b.grad.float(), grad_b, rtol=2e-2, atol=2e-2)


def test_the_rest_falls_through(device, ours):
    """To torch's own kernel, with its own result."""
    a, b = (draw(n, 32, device=device, dtype=torch.bfloat16) for n in (16, 16))
    one = torch.ones((), device=device)
    q = a.to(E4M3)
    offs = torch.tensor([8, 32], dtype=torch.int32, device=device)
    calls = [
        lambda: torch._grouped_mm(a.t().contiguous().t(), b.t(), offs=offs),  # would need a copy
        lambda: torch._scaled_mm(q, q.t(), one, one, out_dtype=E4M3, scale_result=one),
    ]
    own = [call() for call in calls]
    with aten.use(device.type):
        for call, expected in zip(calls, own, strict=True):
            torch.testing.assert_close(call().float(), expected.float())
    assert ours == []


ONE, OFFS = torch.ones(()), torch.tensor(ENDS, dtype=torch.int32)


def taken(chooser):
    """Arguments that it takes."""
    a, b, offs = operands("2d3d", "cpu", torch.bfloat16 if chooser == "grouped_mm" else E4M3)
    if chooser == "grouped_mm":
        return {"a": a, "b": b, "offs": offs}
    dense = "grouped" not in chooser
    how = {"scale_a": ONE, "scale_b": ONE, "out_dtype": torch.bfloat16}
    if not dense:
        how |= {"scale_a": torch.ones(32), "scale_b": torch.ones(G, 24), "offs": offs}
    if chooser.endswith("v2"):
        recipe = [0 if dense else 1]
        how |= {name: [how[name]] for name in ("scale_a", "scale_b")}
        how |= {"recipe_a": recipe, "recipe_b": recipe, "swizzle_a": [0], "swizzle_b": [0]}
    return {"a": a, "b": b[0] if dense else b} | how


@pytest.mark.parametrize(
    "chooser, changes",
    [
        # Layouts
        ("grouped_mm", {"a": torch.ones(32).bfloat16()}),
        ("grouped_mm", {"a": torch.ones(32, 32).bfloat16().t()}),
        ("grouped_mm", {"a": torch.ones(800).bfloat16().as_strided((32, 32), (24, 1))}),  # rows that overlap
        ("grouped_mm", {"offs": None}),
        ("grouped_mm", {"offs": OFFS[None]}),
        ("grouped_mm", {"offs": OFFS.long()}),
        ("grouped_mm", {"offs": OFFS[:-1]}),
        ("grouped_mm", {"a": torch.ones(32, 40).bfloat16()}),
        ("grouped_mm", {"a": torch.ones(G, 24, 32).bfloat16()}),
        ("grouped_mm", {"a": torch.ones(G - 1, 24, 32).bfloat16(), "offs": None}),
        ("grouped_mm", {"a": torch.ones(G, 24, 32).bfloat16(), "b": torch.ones(32, 32).bfloat16()}),
        ("grouped_mm", {"b": torch.ones(G, 32, 48).bfloat16()[..., ::2]}),
        # Dtypes and what else 16-bit products have
        ("grouped_mm", {"a": torch.ones(32, 32)}),
        ("grouped_mm", {"a": torch.ones(32, 32).half()}),
        ("grouped_mm", {"bias": torch.ones(24).bfloat16()}),
        ("grouped_mm", {"out_dtype": E4M3}),
        # Scaled products
        ("scaled_mm", {"a": torch.ones(2, 32, 32).to(E4M3)}),
        ("scaled_mm", {"a": torch.ones(32, 32).bfloat16()}),
        ("scaled_mm", {"out_dtype": E4M3}),
        ("scaled_mm", {"scale_result": ONE}),
        ("scaled_mm", {"scale_a": ONE.double()}),
        ("scaled_mm", {"scale_a": torch.ones(64, 1)[::2], "scale_b": torch.ones(1, 24)}),
        ("scaled_mm", {"scale_a": torch.ones(32, 1)}),
        ("scaled_mm", {"bias": torch.ones(1, 24)}),
        ("scaled_mm", {"bias": torch.ones(24).half()}),
        ("scaled_mm", {"bias": torch.ones(48)[::2]}),
        ("scaled_grouped_mm", {"offs": None}),
        ("scaled_grouped_mm", {"b": torch.ones(G, 32, 24).to(E4M3)}),
        ("scaled_grouped_mm", {"bias": torch.ones(24)}),
        ("scaled_grouped_mm", {"scale_result": ONE}),
        ("scaled_grouped_mm", {"scale_b": torch.ones(24)}),
        # As torch.nn.functional has them
        ("scaled_mm_v2", {"contraction_dim": [1]}),
        ("scaled_mm_v2", {"swizzle_a": [1]}),
        ("scaled_mm_v2", {"swizzle_b": [1]}),
        ("scaled_mm_v2", {"recipe_b": [1]}),
        ("scaled_mm_v2", {"recipe_a": [1], "recipe_b": [1]}),
        ("scaled_mm_v2", {"recipe_a": [2], "recipe_b": [2]}),
        ("scaled_mm_v2", {"scale_a": [torch.ones(32, 1)]}),
        ("scaled_grouped_mm_v2", {"contraction_dim": [1]}),
        ("scaled_grouped_mm_v2", {"swizzle_a": [1]}),
        ("scaled_grouped_mm_v2", {"swizzle_b": [1]}),
        ("scaled_grouped_mm_v2", {"recipe_a": [0]}),
        ("scaled_grouped_mm_v2", {"recipe_a": [0], "recipe_b": [0]}),
    ],
)
def test_what_flexgemm_leaves_to_torch(chooser, changes):
    choose, arguments = getattr(aten, chooser), taken(chooser)
    assert choose(**arguments) is not None
    assert choose(**arguments | changes) is None


def test_what_neither_computes_says_so(ours):
    a, b, offs = operands("2d3d", "cpu", E4M3)
    with aten.use("cpu"), pytest.raises(NotImplementedError, match="_scaled_grouped_mm"):
        torch._scaled_grouped_mm(a, b, torch.ones(3), torch.ones(3), offs=offs)


def test_enable_and_disable(device, ours):
    a, b, offs = operands("2d3d", device, torch.bfloat16)
    kind = device.type

    def count():
        before = len(ours)
        torch._grouped_mm(a, b, offs=offs)
        return len(ours) - before

    assert count() == 0
    aten.enable(kind)
    aten.enable(kind)
    assert count() == 1
    with aten.use(kind):
        assert count() == 1
    assert count() == 1, "use() leaves it as it was"
    aten.disable(kind)
    aten.disable(kind)
    assert count() == 0
    with pytest.raises(ValueError, match="device_type"):
        aten.enable("tpu")


def test_bodies_of_use_beside_each_other(ours):
    """In any order, in any thread: it is enabled until the last of them ends, or for good by `enable`."""
    first, second = aten.use("cpu"), aten.use("cpu")
    first.__enter__()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(second.__enter__).result()
    first.__exit__(None, None, None)
    a, b, offs = operands("2d3d", "cpu", torch.bfloat16)
    torch._grouped_mm(a, b, offs=offs)
    assert len(ours) == 1
    second.__exit__(None, None, None)
    torch._grouped_mm(a, b, offs=offs)
    assert len(ours) == 1
    with aten.use("cpu"):
        aten.enable("cpu")
    torch._grouped_mm(a, b, offs=offs)
    assert len(ours) == 2


def test_a_build_without_cuda_is_not_enabled_for_it(monkeypatch):
    monkeypatch.setattr(aten._C, "build_info", lambda: {"cuda": None})
    with pytest.raises(NotImplementedError, match="needs flexgemm with CUDA"):
        aten.enable("cuda")


def test_two_matrices_without_offsets_are_torchs_to_refuse():
    x = torch.ones(4, 16, dtype=torch.bfloat16)
    with aten.use("cpu"), pytest.raises((RuntimeError, ValueError), match="offset"):
        torch._grouped_mm(x, x.mT)


def test_no_groups_along_the_depth():
    a, b = draw(24, 32, device="cpu", dtype=E4M3), draw(16, 32, device="cpu", dtype=E4M3).mT
    none = torch.empty(0)
    chosen = aten.scaled_grouped_mm(a, b, none, none, torch.empty(0, dtype=torch.int32))
    assert aten.gemm.product(**chosen).shape == (0, 24, 16)
