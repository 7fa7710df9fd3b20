"""Every operation captured once in a CUDA graph and replayed on other content of the same buffers.

Skipped where neither torch with CUDA nor the emulator (tests/simt) can capture.
"""

from __future__ import annotations

import numpy as np
import pytest
import reference
import sanitize_cases
import scenes
from exporters import Forwarding
from verdicts import assert_rows

import flexgemm
from flexgemm import _C

# One of each kernel path, judged by its oracle. check=True is left out: it reads what the kernels found and so
# synchronises, which a capture does not allow.
CASES = {name: case for name, case in sanitize_cases.all_cases().items() if not name.endswith("check")}
LARGE = ("gemm/large/", "/whole")  # many tiles: nothing that a graph would see


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.large] * any(part in name for part in LARGE)) for name in CASES],
)
def test_a_captured_call_replays_on_other_content(graphs, name):
    """Captured and replayed on zeros, then on what the case needs."""
    CASES[name](graphs)


# ---- groups of other sizes ----

ROWS, COLUMNS, DEPTH, GROUPS = 512, 97, 144, 4  # the grouped axis has ROWS whichever it is
SIZES = [(0, 7, 130, 64), (70, 65, 66, 120), (0, 0, 0, 0), (129, 0, 0, 1), (1, 2, 383, 0)]
KEPT = 7  # what the output holds where nothing is to be written


def contiguous(sizes):
    """The group of each row: groups begin at multiples of 128."""
    group = np.full(ROWS, -1, np.int32)
    begins = np.cumsum([0, *(-(-size // 128) * 128 for size in sizes)])
    for g, size in enumerate(sizes):
        group[begins[g] : begins[g] + size] = g
    return group


def ends(sizes):
    return np.cumsum(sizes).astype(np.int32)


def owned(sizes):
    """The slice of each group."""
    return [slice(end - size, end) for size, end in zip(sizes, np.cumsum(sizes), strict=True)]


# name: keyword of what tells the groups apart, and how it does; shapes of a, b and out; out[where] = a[i] . b[j]^T
LAYOUTS = {
    "m_grouped": (
        ("offsets", ends),
        ((ROWS, DEPTH), (GROUPS, COLUMNS, DEPTH), (ROWS, COLUMNS)),
        lambda sizes: [((own,), (own,), (g,)) for g, own in enumerate(owned(sizes))],
    ),
    "m_grouped_contiguous": (
        ("m_indices", contiguous),
        ((ROWS, DEPTH), (GROUPS, COLUMNS, DEPTH), (ROWS, COLUMNS)),
        lambda sizes: [(own := (contiguous(sizes) == g,), own, (g,)) for g in range(GROUPS)],
    ),
    "m_grouped_masked": (
        ("masked_m", lambda sizes: np.array(sizes, np.int32)),
        ((GROUPS, ROWS, DEPTH), (GROUPS, COLUMNS, DEPTH), (GROUPS, ROWS, COLUMNS)),
        lambda sizes: [(own := (g, slice(size)), own, (g,)) for g, size in enumerate(sizes)],
    ),
    "n_grouped": (
        ("offsets", ends),
        ((GROUPS, COLUMNS, DEPTH), (ROWS, DEPTH), (COLUMNS, ROWS)),
        lambda sizes: [((slice(None), own), (g,), (own,)) for g, own in enumerate(owned(sizes))],
    ),
    "k_grouped": (
        ("offsets", ends),
        ((COLUMNS, ROWS), (DEPTH, ROWS), (GROUPS, COLUMNS, DEPTH)),
        lambda sizes: [((g,), (slice(None), own), (slice(None), own)) for g, own in enumerate(owned(sizes))],
    ),
}


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_sizes_change_between_replays(graphs, layout, dtype):
    (keyword, grouping_of), (a_shape, b_shape, shape), products = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    a, b = (scenes.values(rng, s, dtype, one_sign=True) for s in (a_shape, b_shape))
    given, out = [graphs.array(x) for x in (a, b)], graphs.empty(shape, "float32")
    grouping = graphs.array(grouping_of(SIZES[0]))
    replay = graphs.capture(
        lambda: _C.gemm(*given, out, layout=layout, **{keyword: grouping}, stream=graphs.stream)  # no workspace needed
    )
    for sizes in (*SIZES, SIZES[0]):
        graphs.write(grouping, grouping_of(sizes))
        graphs.write(out, np.full(shape, KEPT, np.float32))
        assert replay() == 0
        expected = np.full(shape, KEPT, np.float64)
        for where, i, j in products(sizes):
            expected[where] = reference.gemm(a[i], b[j])
        assert_rows(graphs.numpy(out), expected, 1e-3 if dtype != "float32" else 1e-5)


# ---- several calls in one graph ----


def test_borrowed_memory_is_captured_call_after_call(graphs):
    """A call lets go of what earlier ones borrowed, and must not ask how far the graph is."""
    rng = np.random.default_rng(0)
    a, b = (scenes.values(rng, shape, "float16") for shape in ((96, 64), (80, 64)))
    lent = [Forwarding(graphs.array(x)) for x in (a, b)]
    out = graphs.empty((96, 80), "float32")

    def twice():
        for accumulate in (False, True):
            _C.gemm(*lent, out, accumulate=accumulate, stream=graphs.stream)

    graphs.capture(twice)()
    assert_rows(graphs.numpy(out), 2 * reference.gemm(a, b), 1e-5)


def test_map_and_convolution_replay_on_another_scene(graphs):
    """Map, orders, convolution and its gradients as one graph of a fixed number of voxels."""
    n, ci, co, kernel, groups = 300, 40, 24, (3, 3, 3), (3,)
    _, shape = scenes.scene(n)
    rng = np.random.default_rng(0)
    weight = scenes.values(rng, (co, *kernel, ci), "float16")
    arrays = {
        "coords": graphs.empty((n, 4), "int32"),
        "map": graphs.empty((27, n), "int32"),
        "order": graphs.empty((sum(groups), n), "int32"),
        "feats": graphs.empty((n, ci), "float16"),
        "weight": graphs.array(weight),
        "out": graphs.empty((n, co), "float16"),
        "grad_out": graphs.empty((n, co), "float16"),
        "grad_feats": graphs.empty((n, ci), "float16"),
        "grad_weight": graphs.empty((co, *kernel, ci), "float16"),
    }
    order = {"order": arrays["order"], "order_groups": groups}
    calls = [
        ("neighbor_map", ("coords", "map"), {"shape": shape, "kernel_size": kernel, "dilation": (1, 1, 1)}),
        ("row_order", ("map", "order"), {"kernel_size": kernel, "groups": groups}),
        ("conv_forward", ("feats", "weight", None, "map", "out"), order),
        ("conv_dgrad", ("grad_out", "weight", "map", "grad_feats"), order | {"mirrored": True}),
        ("conv_wgrad", ("grad_out", "feats", "map", "grad_weight", None), {}),
    ]
    prepared = []
    for operation, names, how in calls:
        given = [arrays.get(name) for name in names]
        nbytes = getattr(_C, f"{operation}_workspace")(*given, **how)
        workspace = graphs.empty((nbytes,), "uint8") if nbytes else None
        prepared.append((getattr(_C, operation), given, how | {"workspace": workspace, "stream": graphs.stream}))
    graphs.write(arrays["coords"], np.zeros((n, 4), np.int32))
    replay = graphs.capture(lambda: [function(*given, **how) for function, given, how in prepared])
    for seed in (1, 2):
        coords, _ = scenes.scene(n, seed=seed)
        feats, grad_out = (scenes.values(rng, (n, channels), "float16") for channels in (ci, co))
        for name, content in (("coords", coords), ("feats", feats), ("grad_out", grad_out)):
            graphs.write(arrays[name], content)
        assert replay() == [0] * len(calls)
        nmap = reference.neighbor_map(coords, shape)
        np.testing.assert_array_equal(graphs.numpy(arrays["map"]), nmap)
        grad_weight = graphs.numpy(arrays["grad_weight"]).reshape(co, 27, ci)
        assert_rows(graphs.numpy(arrays["out"]), reference.conv_forward(feats, weight, None, nmap), 2e-3)
        assert_rows(graphs.numpy(arrays["grad_feats"]), reference.conv_dgrad(grad_out, weight, nmap, n), 2e-3)
        assert_rows(grad_weight, reference.conv_wgrad(grad_out, feats, nmap)[0], 2e-3)


def test_functions_that_allocate_are_captured_by_torch(cuda_device):
    """Outputs and workspaces come from the pool of the graph: casts, a grouped product and its weights' gradient."""
    import torch

    torch.manual_seed(0)
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    weights, scale_b = flexgemm.quantize(torch.randn(4 * 96, 256, device="cuda", dtype=torch.bfloat16))
    weights, offsets = weights.reshape(4, 96, 256), torch.zeros(4, device="cuda", dtype=torch.int32)

    def step():
        q, scale_a = flexgemm.quantize(x, granularity="row")
        out = flexgemm.m_grouped_gemm_nt(q, weights, offsets, scale_a=scale_a, scale_b=scale_b)
        return out, flexgemm.k_grouped_wgrad_gemm_nt(out.t(), x.t(), offsets)

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        captured = step()
    for sizes in SIZES:
        x.copy_(torch.randn_like(x))
        offsets.copy_(torch.from_numpy(ends(sizes)))
        graph.replay()
        rows = sum(sizes)  # those behind the last group are not written
        for ours, expected in zip(captured, step(), strict=True):
            own = slice(rows) if ours.dim() == 2 else slice(None)
            assert torch.equal(ours[own], expected[own])
