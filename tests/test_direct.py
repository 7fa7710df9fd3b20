"""torch tensors go directly to the extension: what it makes of them, and what it leaves to Python."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import sys

import numpy as np
import pytest
import scenes
from calls import run_python
from reference import f64
from verdicts import assert_rows

import flexgemm
from flexgemm import _C

torch = pytest.importorskip("torch", reason="torch not installed")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no exchange API"
)

M, N, K = 5, 6, 8


def factors(device, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(M, K).to(device, dtype), torch.randn(N, K).to(device, dtype)


def numpy(tensor):
    return tensor.detach().cpu().double().numpy()


# ---- products ----


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (M, N)),
        ({"layout": "dense", "activation": "swiglu"}, (M, N // 2)),
        ({"layout": "batched"}, (2, M, N)),
        ({"layout": "m_grouped", "offsets": [2, M]}, (M, N)),
        ({"layout": "m_grouped_contiguous", "m_indices": [1] * M}, (M, N)),
        ({"layout": "m_grouped_masked", "masked_m": [M, 0], "expected_m": 3}, (2, M, N)),
        ({"layout": "n_grouped", "offsets": [2, N]}, (M, N)),
    ],
)
def test_outputs_have_the_shape_of_their_layout(device, options, shape):
    a, b = factors(device)
    three_a, three_b = options.get("layout") in ("batched", "m_grouped_masked", "n_grouped"), len(shape) == 3
    three_b = three_b or options.get("layout", "").startswith("m_grouped")
    a, b = (torch.stack([x, 2 * x]) if three else x for x, three in ((a, three_a), (b, three_b)))
    options = {
        k: torch.tensor(v, dtype=torch.int32, device=device) if type(v) is list else v for k, v in options.items()
    }
    out = _C.gemm_direct(a, b, **options)
    assert (type(out), tuple(out.shape), out.dtype, out.device) == (torch.Tensor, shape, a.dtype, a.device)
    out = _C.gemm_direct(a, b, options=options)
    assert tuple(out.shape) == shape


@pytest.mark.parametrize("turned", [(True, False), (False, True), (True, True)], ids=["a", "b", "both"])
def test_transposed_views_are_read_where_they_lie(device, turned):
    factors_of_rows = factors(device)
    views = [x.t().contiguous().t() if turn else x for x, turn in zip(factors_of_rows, turned, strict=True)]
    assert torch.equal(_C.gemm_direct(*views), _C.gemm_direct(*factors_of_rows))
    a, b = views
    assert torch.equal(_C.gemm_direct(a, b.t(), b_row_major=True), _C.gemm_direct(*factors_of_rows))


def test_the_result_is_that_of_numpy(device):
    a, b = factors(device)
    bias = torch.randn(N, device=device)
    out = _C.gemm_direct(a, b, bias=bias, alpha=0.5)
    assert_rows(numpy(out), 0.5 * numpy(a) @ numpy(b).T + numpy(bias), 1e-5)


@pytest.mark.parametrize("out_dtype", ["float16", torch.float16])
def test_output_dtypes(device, out_dtype):
    a, b = factors(device)
    fp8 = a.to(torch.float8_e4m3fn)
    assert _C.gemm_direct(fp8, fp8).dtype is torch.bfloat16
    assert _C.gemm_direct(a, b, out_dtype=out_dtype).dtype is torch.float16
    out = torch.empty(M, N, dtype=torch.float16, device=device)
    assert _C.gemm_direct(a, b, out=out, out_dtype=out_dtype) is out
    assert _C.gemm_direct(a, b, out=out) is out
    assert _C.gemm_direct(a, b, out=out, out_dtype="float32") is NotImplemented


def test_fp8_outputs(device):
    a, b = factors(device)
    wide, scale = numpy(_C.gemm_direct(a, b)), torch.tensor(0.25, device=device)
    for out_dtype, dtype, bound in ((None, torch.float8_e4m3fn, 2**-4), (torch.float8_e5m2, torch.float8_e5m2, 2**-3)):
        out = _C.gemm_direct(a, b, scale_out=scale, out_dtype=out_dtype)
        assert out.dtype is dtype
        np.testing.assert_allclose(numpy(out), wide / 0.25, rtol=bound, atol=2**-9)
        into = torch.zeros_like(out)
        assert _C.gemm_direct(a, b, scale_out=scale, out=into) is into
        assert torch.equal(into.view(torch.uint8), out.view(torch.uint8))
        assert _C.gemm_direct(a, b, out=out) is NotImplemented
    assert _C.gemm_direct(a, b, scale_out=scale, out=torch.empty(M, N, device=device)) is NotImplemented
    assert _C.gemm_direct(a, b, scale_out=scale, out_dtype="bfloat16") is NotImplemented


def test_outputs_are_memory_of_torch_itself(device):
    """Which record_stream and resizing know, unlike memory that the exchange API allocates."""
    assert _C.gemm_direct(*factors(device)).untyped_storage().resizable()


def test_parameters_go_directly_where_no_gradient_is_asked_for(device):
    a, b = factors(device)
    weight = torch.nn.Parameter(b)
    assert _C.gemm_direct(a, weight) is NotImplemented
    with torch.no_grad():
        assert _C.gemm_direct(a, weight).shape == (M, N)
    with torch.inference_mode():
        assert _C.gemm_direct(a, weight).shape == (M, N)


class Subclass(torch.Tensor):
    pass


LEFT_TO_PYTHON = {
    "NumPy": lambda a, b: (a.cpu().numpy(), b.cpu().numpy()),
    "of two libraries": lambda a, b: (a, b.cpu().numpy()),
    "no array": lambda a, b: (a, None),
    "neither rows nor columns": lambda a, b: (a.repeat_interleave(2, dim=1)[:, ::2], b),
    "gradient": lambda a, b: (a, b.clone().requires_grad_()),
    "subclass": lambda a, b: (a, b.as_subclass(Subclass)),
    "sparse": lambda a, b: (a.to_sparse(), b),
    "sparse rows": lambda a, b: (a, b.to_sparse_csr()),
    "negated": lambda a, b: (torch.complex(a, a).conj().imag, b),
    "negated column": lambda a, b: (torch.complex(a, a).conj().imag[:, :1], b[:, :1].contiguous()),
    "negated rows": lambda a, b: (torch.complex(a, a).conj().imag.as_strided(a.shape, (2 * a.shape[1], 1)), b),
    "negated view": lambda a, b: (a, torch._neg_view(b)),
    "meta": lambda a, b: (a.to("meta"), b.to("meta")),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("case", LEFT_TO_PYTHON)
def test_what_is_left_to_python(device, case):
    assert _C.gemm_direct(*LEFT_TO_PYTHON[case](*factors(device))) is NotImplemented


@pytest.mark.parametrize(
    "options",
    [
        {"stream": 0},
        {"device": "cpu"},
        {"dtype_a": "float8_e4m3fn"},
        {"dtype_out": "float8_e4m3fn"},
        {"scale_out": 1.0},
        {"accumulate": True},
        {"out_dtype": np.float16},
        {"out_dtype": "int32"},
        {"layout": "k_grouped", "groups": 1},
    ],
    ids=str,
)
def test_options_that_are_left_to_python(device, options):
    assert _C.gemm_direct(*factors(device), **options) is NotImplemented
    assert _C.gemm_direct(*factors(device), options=options) is NotImplemented


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kernel": 3}, TypeError, "unexpected keyword argument 'kernel'"),
        ({"a": 3}, TypeError, "unexpected keyword argument 'a'"),
        ({"options": {}}, TypeError, "unexpected keyword argument 'options'"),
        ({3: 4}, TypeError, "options: expected names, got int"),
        (3, TypeError, "options: expected a dict, got int"),
        ({"activation": "tanh"}, ValueError, "activation: expected 'relu', 'silu', 'gelu' or 'swiglu', got 'tanh'"),
        ({"alpha": "1"}, TypeError, "alpha: expected a float, got str"),
        ({"bias": torch.zeros(N + 1)}, ValueError, r"bias: expected \(6,\) to match b, got \(7,\)"),
        ({"out": torch.zeros(M, N + 1)}, ValueError, r"out: expected \(5, 6\) to match a and b, got \(5, 7\)"),
    ],
)
def test_errors_name_the_argument(options, error, message):
    with pytest.raises(error, match=message):
        _C.gemm_direct(*factors("cpu"), options=options)


def test_an_output_may_not_be_an_input(device):
    a, b = factors(device)
    with pytest.raises(ValueError, match="out: expected memory of its own, got memory that overlaps a"):
        _C.gemm_direct(a, b, out=a[:, :N])


# ---- convolutions ----


def convolution(device, dtype=torch.float32):
    coords, shape = scenes.scene(60)
    nmap = flexgemm.neighbor_map(torch.from_numpy(coords).to(device), shape)
    torch.manual_seed(0)
    feats, weight, bias = (torch.randn(s, device=device, dtype=dtype) for s in ((60, 4), (5, 3, 3, 3, 4), (5,)))
    told = {"order": nmap.order, "kernel_size": (3, 3, 3), "rows": 60}
    return feats, weight, bias, nmap, told


def test_a_convolution_is_that_of_numpy(device):
    feats, weight, bias, nmap, told = convolution(device)
    out = _C.conv_forward_direct(feats, weight, bias, nmap.map, **told)
    assert (type(out), out.dtype, out.device) == (torch.Tensor, feats.dtype, feats.device)
    on_host = [x.cpu().numpy() for x in (nmap.coords, feats, weight, bias)]
    expected = flexgemm.submanifold_conv3d(*on_host[1:], neighbor_map=flexgemm.neighbor_map(on_host[0], nmap.shape))
    assert_rows(numpy(out), f64(expected), 1e-5)
    again = torch.empty_like(out)
    assert _C.conv_forward_direct(feats, weight, None, nmap.map, out=again, **told) is again


def test_fp8_outputs_of_convolutions(device):
    feats, weight, _, nmap, told = convolution(device)
    narrow = [x.to(torch.float8_e4m3fn) for x in (feats, weight)]
    scale = torch.tensor(0.5, device=device)
    wide = _C.conv_forward_direct(*narrow, None, nmap.map, out_dtype=torch.float32, **told)
    out = _C.conv_forward_direct(*narrow, None, nmap.map, scale_out=scale, **told)
    assert out.dtype is torch.float8_e4m3fn
    np.testing.assert_allclose(numpy(out), 2 * numpy(wide), rtol=2**-4, atol=2**-9)
    assert _C.conv_forward_direct(*narrow, None, nmap.map, scale_out=scale, out=out, **told) is out
    assert _C.conv_forward_direct(*narrow, None, nmap.map, out=out, **told) is NotImplemented
    assert _C.conv_forward_direct(*narrow, None, nmap.map, scale_out=scale, out=wide, **told) is NotImplemented
    assert _C.conv_forward_direct(feats, weight, None, nmap.map, scale_out=scale, **told) is NotImplemented


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told | {"rows": 61},
        lambda told: told | {"kernel_size": (1, 3, 3)},
        lambda told: told | {"stream": 0},
        lambda told: told | {"dtype_feats": "float8_e4m3fn"},
        lambda told: told | {"out_dtype": "float16"},
    ],
)
def test_convolutions_that_are_left_to_python(device, change):
    feats, weight, bias, nmap, told = convolution(device)
    assert _C.conv_forward_direct(feats, weight, bias, nmap.map, **change(told)) is NotImplemented


# ---- references ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"out_dtype": "float16"},
        {"alpha": "1"},
        {"stream": 0},
        {"layout": "k_grouped"},
        {"kernel": 3},
        {"bias": 1},
        {"scale_out": torch.ones(())},
        {"out": torch.zeros(M, N)},
        {"out": torch.zeros(M, N + 1)},
        {"out": torch.zeros(M, N), "bias": 1},
        {"out": torch.zeros(M, N), "alpha": "1"},
    ],
    ids=lambda options: " ".join(f"{name} {getattr(x, 'shape', x)}" for name, x in options.items()),
)
def test_nothing_is_kept(options):
    a, b = factors("cpu")
    own = [a, b, *filter(torch.is_tensor, options.values())]

    def count():
        for _ in range(500):
            with contextlib.suppress(TypeError, ValueError):
                _C.gemm_direct(a, b, options=options)
        gc.collect()
        return [sys.getallocatedblocks(), sys.getrefcount(NotImplemented)], [sys.getrefcount(x) for x in own]

    count()
    shared, owned = zip(*[count() for _ in range(4)], strict=True)
    assert all(counts == owned[0] for counts in owned)
    for counts in zip(*shared, strict=True):  # other threads of the process count too, but not at every turn
        assert min(abs(after - before) for before, after in itertools.pairwise(counts)) < 25


# ---- arguments of no sense ----

OPTIONS = (
    "a", "b", "out", "scale_a", "scale_b", "bias", "scale_out", "offsets", "m_indices", "masked_m", "weight_indices",
    "layout", "b_row_major", "expected_m", "alpha", "activation", "accumulate", "promote_every", "dtype_a", "dtype_out",
    "precision", "out_dtype", "groups", "device", "workspace", "stream", "options", "kernel",
)  # fmt: skip
JUNK = (
    None,
    3,
    -1,
    2**70,
    1.5,
    "x",
    "swiglu",
    "m_grouped",
    "float16",
    torch.float16,
    b"",
    True,
    object(),
    [],
    (3, 3, 3),
)


def random_tensor(rng):
    shape = [rng.choice([0, 1, 2, 5, 6, 8]) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 5]))]
    dtype = rng.choice(
        [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.complex64]
    )
    x = torch.randint(-2, 3, shape).to(dtype)
    return x.transpose(0, -1) if x.ndim > 1 and rng.random() < 0.3 else x


def fuzz(seed, calls=5000):
    rng, outcomes = random.Random(seed), {"ran": 0, "left": 0, "raised": 0}
    for _ in range(calls):
        a, b = factors("cpu", rng.choice([torch.float32, torch.bfloat16, torch.float8_e4m3fn]))
        if rng.random() < 0.2:
            a, b = random_tensor(rng), random_tensor(rng)
        named = [(rng.choice(OPTIONS), rng.choice(JUNK)) for _ in range(rng.randrange(3))]
        named += [(rng.choice(OPTIONS), random_tensor(rng)) for _ in range(rng.randrange(2))]
        try:
            result = _C.gemm_direct(a, b, options=dict(named))
            outcomes["left" if result is NotImplemented else "ran"] += 1
        except (TypeError, ValueError, BufferError, OverflowError):
            outcomes["raised"] += 1
    assert min(outcomes.values()) > calls // 50, f"{outcomes}: the mix tests one side only"


def test_random_options_run_or_raise_or_are_left():
    done = run_python(["-c", "import test_direct; test_direct.fuzz(0)"])
    assert done.returncode == 0, done.stderr[-2000:]
