"""The row order of a neighbour map against a sort in plain Python, and convolutions that follow one."""

from __future__ import annotations

import guarded
import numpy as np
import pytest
import reference
import scenes
from reference import assert_rows

import flexgemm
from flexgemm import _C

KERNELS = [(1, 1, 1), (3, 3, 3), (2, 2, 2), (5, 5, 5), (7, 7, 7), (1, 1, 7), (2, 3, 4), (3, 1, 1)]
ROWS = [0, 1, 2, 63, 64, 65, 1023, 1025, 5000, 40_000, 300_000]  # one CTA or many, two passes or three, two segments


def random_map(n, kernel_size, *, seed=0, kinds=None):
    """Entries of -2 to 1, and so masks of every kind; or columns drawn from a few kinds."""
    rng = np.random.default_rng(seed)
    nmap = rng.integers(-2, 2, (int(np.prod(kernel_size)), kinds or n)).astype(np.int32)
    return nmap[:, rng.integers(0, kinds, n)] if kinds else nmap


def check(backend, nmap, kernel_size):
    order = guarded.row_order(backend, nmap, kernel_size)
    np.testing.assert_array_equal(order, expected(nmap, kernel_size))
    return order


def expected(nmap, kernel_size):
    plan = _C.plan_row_order(rows=nmap.shape[1], kernel_size=kernel_size)
    return reference.row_order(nmap, plan["offsets"], plan["segment"])


@pytest.mark.parametrize("kernel_size", KERNELS)
def test_kernel_sizes(backend, kernel_size):
    check(backend, random_map(1000, kernel_size), kernel_size)


@pytest.mark.parametrize("n", ROWS)
def test_row_counts(backend, n):
    check(backend, random_map(n, (3, 3, 3)), (3, 3, 3))


@pytest.mark.parametrize("n", [300, 70_000])
def test_rows_with_the_same_neighbours_keep_their_order(backend, n):
    nmap = random_map(n, (3, 3, 3), kinds=5)
    order = check(backend, nmap, (3, 3, 3))
    masks = (nmap[:, order] >= 0).T
    same = (masks[1:] == masks[:-1]).all(axis=1)
    assert (~same).sum() == 4  # five kinds side by side
    assert (order[1:] > order[:-1])[same].all()


@pytest.mark.parametrize("n", [100, 50_000])
def test_a_volume_of_1_leaves_the_rows_where_they_are(backend, n):
    np.testing.assert_array_equal(check(backend, random_map(n, (1, 1, 1)), (1, 1, 1)), np.arange(n))


def test_bitwise_repeat(backend):
    nmap = random_map(20_000, (3, 3, 3))
    first = guarded.row_order(backend, nmap, (3, 3, 3))
    for _ in range(5):
        np.testing.assert_array_equal(guarded.row_order(backend, nmap, (3, 3, 3)), first)


def useful_share(nmap, order, tile=128):
    """Share of multiply-adds that are useful when tiles of rows work through the union of their neighbours."""
    present = (nmap >= 0)[:, order]
    padded = np.pad(present, [(0, 0), (0, -present.shape[1] % tile)])
    return present.sum() / (padded.reshape(len(nmap), -1, tile).any(axis=2).sum() * tile)


def test_an_order_saves_products_forward_and_backward(backend):
    coords, shape = scenes.shell(64, seed=None)
    nmap = guarded.neighbor_map(backend, coords[np.lexsort(coords.T[::-1])], shape, (3, 3, 3))
    order = check(backend, nmap, (3, 3, 3))
    assert useful_share(nmap, np.arange(len(order))) < 0.5
    assert useful_share(nmap, order) > 0.6
    assert useful_share(nmap[::-1], order) == useful_share(nmap, order)


@pytest.mark.parametrize("kernel_size", KERNELS)
def test_plans(kernel_size):
    volume = int(np.prod(kernel_size))
    centre = np.ravel_multi_index([k // 2 for k in kernel_size], kernel_size)
    for rows in (0, 1, 100, 4096, 1 << 20, 1 << 27, (1 << 31) - 1):
        plan = _C.plan_row_order(rows=rows, kernel_size=kernel_size)
        offsets = plan["offsets"]
        assert len(set(offsets)) == len(offsets) == min(volume - 1, 16 if rows < 32768 else 24)
        assert set(offsets) <= set(range(volume)) - {centre}
        # A key and the number of its segment fit 32 bits.
        assert (max(rows, 1) - 1) // plan["segment"] < 2 ** (32 - 24)
        assert _C.row_order_pays(rows=rows, kernel_size=kernel_size) == (rows >= 4096 and volume > 1)


def test_the_corners_of_a_kernel_are_sorted_by_first():
    offsets = _C.plan_row_order(rows=100, kernel_size=(5, 5, 5))["offsets"]
    inner = [(x * 5 + y) * 5 + z for x in (1, 3) for y in (1, 3) for z in (1, 3)]
    assert offsets[:8] == inner


@pytest.mark.parametrize("wrong", [{"rows": -1}, {"kernel_size": (3, 3)}, {"kernel_size": (3, 3, 8)}])
def test_impossible_plans_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        _C.plan_row_order(**{"rows": 10, "kernel_size": (3, 3, 3)} | wrong)


# ---- convolutions ----


@pytest.mark.parametrize("mode", ["float32", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("n, ci, co", [(1, 7, 33), (127, 64, 64), (129, 33, 97), (700, 136, 72), (20_000, 16, 136)])
def test_an_order_changes_where_rows_are_computed_and_not_what(backend, mode, n, ci, co):
    dtype, precision = ("float32", "tf32") if mode == "tf32" else (mode, "ieee")
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(n)
    nmap = reference.neighbor_map(coords, shape)
    feats, weight, bias, grad_out = (scenes.values(rng, s, dtype) for s in ((n, ci), (co, 3, 3, 3, ci), (co,), (n, co)))
    order = rng.permutation(n).astype(np.int32)
    how = {"precision": precision, "pad": 3, "offset": 1}

    def forward(order):
        return guarded.conv_forward(backend, feats, weight, bias, nmap, order=order, **how)

    def dgrad(order):
        return guarded.conv_dgrad(backend, grad_out, weight, nmap, mirrored=True, order=order, **how)

    for compute in (forward, dgrad):
        plain, ordered = compute(None), compute(order)
        assert_rows(ordered, plain.astype(np.float64), 2 * reference.ROW_TOLERANCE[mode])
        assert ordered.tobytes() == compute(order).tobytes()
    if n <= 700:
        assert_rows(forward(order), reference.conv_forward(feats, weight, bias, nmap), reference.ROW_TOLERANCE[mode])


def test_slots_of_an_order_that_are_no_rows_are_left_out(cuda):
    """Device memory is not trusted: such a slot reads and writes nothing, which the fences prove."""
    n = 300
    rng = np.random.default_rng(0)
    nmap = rng.integers(-1, n, (27, n)).astype(np.int32)
    feats, weight = scenes.values(rng, (n, 64), "float16"), scenes.values(rng, (64, 27, 64), "float16")
    order = np.arange(n, dtype=np.int32)
    order[[0, 100, 200, 299]] = -1, n, 2**31 - 1, -(2**31)
    left = np.isin(np.arange(n), [0, 100, 200, 299], invert=True)
    with_order = guarded.conv_forward(cuda, feats, weight, None, nmap, order=order)
    assert_rows(with_order[left], reference.conv_forward(feats, weight, None, nmap)[left], 2e-3)


@pytest.mark.parametrize("kernel_size", [3, 2])
def test_the_object_has_an_order_where_it_pays(backend, kernel_size):
    coords, shape = scenes.scene(4000)
    nmap = flexgemm.neighbor_map(backend.array(coords), shape, kernel_size)
    if backend.name == "cpu":
        assert nmap.order is None
    else:
        order = expected(backend.numpy(nmap.map), nmap.kernel_size)
        np.testing.assert_array_equal(backend.numpy(nmap.order), order)
    for n, size in ((500, kernel_size), (4000, 1)):
        few = flexgemm.neighbor_map(backend.array(coords[:n]), shape, size)
        assert few.order is None


@pytest.mark.parametrize("kernel_size", [3, 2])
def test_convolutions_of_an_ordered_object(backend, kernel_size):
    rng = np.random.default_rng(0)
    coords, shape = scenes.scene(3000)
    feats, grad_out = scenes.values(rng, (3000, 24), "float32"), scenes.values(rng, (3000, 40), "float32")
    weight = scenes.values(rng, (40, *(kernel_size,) * 3, 24), "float32")
    nmap = flexgemm.neighbor_map(backend.array(coords), shape, kernel_size)
    plain = reference.neighbor_map(coords, shape, (kernel_size,) * 3)
    x, w, g = map(backend.array, (feats, weight, grad_out))
    out = flexgemm.submanifold_conv3d(x, w, neighbor_map=nmap)
    gradients = flexgemm.submanifold_conv3d_backward(g, x, w, neighbor_map=nmap, needs_grad=(True, False, False))
    assert_rows(backend.numpy(out), reference.conv_forward(feats, weight, None, plain), 1e-5)
    assert_rows(backend.numpy(gradients[0]), reference.conv_dgrad(grad_out, weight, plain, 3000), 1e-5)
