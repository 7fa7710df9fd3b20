"""The row orders of a neighbour map against a sort in plain Python, and what plans say of them."""

from __future__ import annotations

import copy
import itertools

import guarded
import numpy as np
import pytest
import reference
import scenes
from plans import row_orders

import flexgemm
from flexgemm import _C
from flexgemm._orders import groups_of, phases_of

KERNELS = [(1, 1, 1), (3, 3, 3), (2, 2, 2), (5, 5, 5), (7, 7, 7), (1, 1, 7), (2, 3, 4), (3, 1, 1)]
# A block to an order, up to 4096 rows, or many; one segment or two.
ROWS = [0, 1, 2, 63, 64, 65, 1023, 1025, 4096, 4097, 5000, 40_000, 300_000]


def all_sets(kernel_size):
    """By planes of constant kx and by columns of constant (kx, ky)."""
    return tuple(sorted({1, kernel_size[0], kernel_size[0] * kernel_size[1]}))


def random_map(n, kernel_size, *, seed=0, kinds=None):
    """Entries of -2 to 1, and so masks of every kind; or columns drawn from a few kinds."""
    rng = np.random.default_rng(seed)
    nmap = rng.integers(-2, 2, (int(np.prod(kernel_size)), kinds or n)).astype(np.int32)
    return nmap[:, rng.integers(0, kinds, n)] if kinds else nmap


def check(backend, nmap, kernel_size, groups=(1,), phases=(1, 1, 1)):
    orders = guarded.row_order(backend, nmap, kernel_size, groups, phases)
    np.testing.assert_array_equal(orders, row_orders(nmap, kernel_size, groups, phases))
    return orders


@pytest.mark.parametrize("kernel_size", KERNELS)
def test_kernel_sizes(backend, kernel_size):
    nmap = random_map(1000, kernel_size)
    for groups in all_sets(kernel_size):
        check(backend, nmap, kernel_size, (groups,))
    check(backend, nmap, kernel_size, all_sets(kernel_size))
    for phases in ((2, 2, 2), (1, 7, 3)):
        check(backend, nmap, kernel_size, phases=phases)


@pytest.mark.parametrize("n", ROWS)
def test_row_counts(backend, n):
    nmap = random_map(n, (3, 3, 3))
    check(backend, nmap, (3, 3, 3))
    check(backend, nmap, (3, 3, 3), (1, 3))
    check(backend, nmap, (3, 3, 3), phases=(2, 2, 2))  # keys of 12 bits instead of 18


def test_short_segments(backend):
    check(backend, random_map(2_200_000, (1, 1, 3)), (1, 1, 3))


@pytest.mark.parametrize("n", [300, 70_000])
def test_rows_with_the_same_neighbours_keep_their_order(backend, n):
    nmap = random_map(n, (3, 3, 3), kinds=5)
    (order,) = check(backend, nmap, (3, 3, 3))
    masks = (nmap[:, order] >= 0).T
    same = (masks[1:] == masks[:-1]).all(axis=1)
    assert (~same).sum() == 4  # five kinds side by side
    assert (order[1:] > order[:-1])[same].all()


def test_rows_without_neighbours_in_a_group_come_first(backend):
    nmap = random_map(5000, (3, 3, 3))
    nmap[13] = -1  # by which nothing is sorted: a voxel is always its own neighbour
    for order, of_group in zip(check(backend, nmap, (3, 3, 3), (9,)), np.split(nmap, 9), strict=True):
        present = (of_group[:, order] >= 0).any(axis=0)
        assert 0 < (~present).sum() < 5000
        assert (present[1:] >= present[:-1]).all()


@pytest.mark.parametrize("n", [100, 50_000])
def test_a_volume_of_1_leaves_the_rows_where_they_are(backend, n):
    np.testing.assert_array_equal(check(backend, random_map(n, (1, 1, 1)), (1, 1, 1)), np.arange(n)[None])


def test_bitwise_repeat(backend):
    nmap = random_map(20_000, (3, 3, 3))
    first = guarded.row_order(backend, nmap, (3, 3, 3), (1, 3, 9))
    for _ in range(5):
        np.testing.assert_array_equal(guarded.row_order(backend, nmap, (3, 3, 3), (1, 3, 9)), first)


@pytest.mark.parametrize("kernel_size", KERNELS)
@pytest.mark.parametrize("orders", [1, 4])
def test_ordered_maps(backend, kernel_size, orders):
    """The orders as they are, then the entries as they lie in the first one."""
    nmap, rng = random_map(1000, kernel_size), np.random.default_rng(0)
    order = np.stack([rng.permutation(1000) for _ in range(orders)]).astype(np.int32)
    ordered = guarded.ordered_map(backend, nmap, order)
    np.testing.assert_array_equal(ordered[:orders], order)
    np.testing.assert_array_equal(ordered[orders:], nmap[:, order[0]])


@pytest.mark.parametrize("n", ROWS[:-1])
def test_ordered_maps_of_any_number_of_rows(backend, n):
    nmap = random_map(n, (3, 3, 3))
    order = np.random.default_rng(0).permutation(n).astype(np.int32)[None]
    np.testing.assert_array_equal(guarded.ordered_map(backend, nmap, order), np.concatenate([order, nmap[:, order[0]]]))


def test_what_is_no_row_has_no_entries_in_an_ordered_map(backend):
    """The values of the order stay what they are."""
    nmap = random_map(300, (3, 3, 3))
    order = np.tile(np.arange(300, dtype=np.int32), (2, 1))
    wrong = [0, 100, 200, 299]
    order[0, wrong] = -1, 300, 2**31 - 1, -(2**31)
    ordered = guarded.ordered_map(backend, nmap, order)
    np.testing.assert_array_equal(ordered[:2], order)
    nmap[:, wrong] = -1
    np.testing.assert_array_equal(ordered[2:], nmap)


def useful_share(nmap, orders, tile=128):
    """Share of multiply-adds that are useful when tiles of rows work through the union of their neighbours, group by
    group of the offsets."""
    worked = 0
    for order, of_group in zip(orders, np.split(nmap >= 0, len(orders)), strict=True):
        padded = np.pad(of_group[:, order], [(0, 0), (0, -nmap.shape[1] % tile)])
        worked += padded.reshape(len(of_group), -1, tile).any(axis=2).sum() * tile
    return (nmap >= 0).sum() / worked


def test_orders_save_products_forward_and_backward(backend):
    coords, shape = scenes.shell(64, seed=None)
    nmap = guarded.neighbor_map(backend, coords[np.lexsort(coords.T[::-1])], shape, (3, 3, 3))
    orders = check(backend, nmap, (3, 3, 3), (1, 3, 9))
    one, three, nine = orders[:1], orders[1:4], orders[4:]
    assert useful_share(nmap, np.arange(nmap.shape[1])[None]) < 0.5
    assert 0.6 < useful_share(nmap, one) < 0.86 < useful_share(nmap, three) < 0.97 < useful_share(nmap, nine)
    for order in (one, three, nine):  # the mirrored map has the same orders, the groups read backwards
        assert useful_share(nmap[::-1], order[::-1]) == useful_share(nmap, order)
    for order in (three, nine):
        assert useful_share(nmap[::-1], order) < useful_share(nmap, order) - 0.1


@pytest.mark.parametrize("given", [False, True], ids=["reached", "given"])
@pytest.mark.parametrize(
    "kernel_size, stride",
    [
        ((3, 3, 3), (2, 2, 2)),
        ((5, 4, 5), (2, 2, 2)),
        ((3, 3, 3), (3, 3, 3)),
        ((3, 3, 3), (2, 1, 1)),
        ((2, 2, 2), (3, 2, 1)),
    ],
)
def test_rows_of_a_phase_lie_side_by_side(backend, kernel_size, stride, given):
    """In the map back to the voxels of a layer with a stride, from all outputs that there are or from some. Rows
    without neighbours come first."""
    coords, shape = scenes.scene(2000)
    sites = scenes.scene(500, seed=1)[0] // (1, *stride) if given else None
    nmap = reference.map_back(coords, shape, kernel_size, stride, sites)
    phases = tuple(map(min, stride, kernel_size))
    (order,) = check(backend, nmap, kernel_size, phases=phases)
    has = (nmap >= 0).any(axis=0)[order]
    assert (has[1:] >= has[:-1]).all()
    phase = (coords[order[has], 1:] % stride) @ [16, 4, 1]
    changes = int((phase[1:] != phase[:-1]).sum())
    assert changes == len(set(phase.tolist())) - 1 == np.prod(phases) - 1


def test_an_order_by_phases_does_what_groups_do(backend):
    """In a map of 3x3x3 and stride 2, of whose phases some have faces alone, which are no bits of other keys."""
    nmap = reference.map_back(*scenes.scene(2000), (3, 3, 3), (2, 2, 2))
    by_phase = check(backend, nmap, (3, 3, 3), phases=(2, 2, 2))
    assert useful_share(nmap, by_phase) > 1.5 * useful_share(nmap, check(backend, nmap, (3, 3, 3)))
    for groups in (3, 9):
        assert useful_share(nmap, by_phase) > useful_share(nmap, check(backend, nmap, (3, 3, 3), (groups,)))


@pytest.mark.parametrize("phases", [(1, 1, 1), (2, 2, 2)])
def test_orders_come_with_the_map_of_a_layer_with_a_stride(backend, phases):
    coords, shape = scenes.scene(1000)
    sites = np.argwhere(np.ones((1, *(-(-w // 2) for w in shape[1:])))).astype(np.int32)
    to_shape = tuple(int(c) + 1 for c in sites.max(axis=0))
    how = sites, to_shape, coords, shape, (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)
    alone = guarded.sparse_map(backend, *how, transposed=True)
    (orders, nmap) = guarded.sparse_map(backend, *how, transposed=True, groups=(1,), phases=phases)
    np.testing.assert_array_equal(nmap, alone)
    np.testing.assert_array_equal(orders, row_orders(nmap, (3, 3, 3), phases=phases))


@pytest.mark.parametrize("kernel_size", KERNELS)
@pytest.mark.parametrize("n, dilation, transposed", [(0, 1, False), (1, 1, False), (700, 1, False), (700, 1, True),
                                                     (700, 2, False), (4096, 1, False), (5000, 1, False)])  # fmt: skip
def test_orders_come_with_the_map(backend, grid_around, kernel_size, n, dilation, transposed):
    """Where the map is built they have keys of their own, and by them the same rows."""
    coords, shape = scenes.scene(n)
    shape = grid_around(coords, shape)
    how = {"dilation": (dilation,) * 3, "transposed": transposed}
    alone = guarded.neighbor_map(backend, coords, shape, kernel_size, **how)
    orders, nmap = guarded.neighbor_map(backend, coords, shape, kernel_size, groups=all_sets(kernel_size), **how)
    np.testing.assert_array_equal(nmap, alone)
    np.testing.assert_array_equal(orders, row_orders(nmap, kernel_size, all_sets(kernel_size)))


@pytest.mark.parametrize("kernel_size", KERNELS)
def test_plans(kernel_size):
    volume = int(np.prod(kernel_size))
    centre = np.ravel_multi_index([k // 2 for k in kernel_size], kernel_size)
    for rows in (0, 1, 100, 4096, 1 << 20, 1 << 27, (1 << 31) - 1):
        how = {"rows": rows, "kernel_size": kernel_size}
        plan = _C.plan_row_orders(**how, groups=all_sets(kernel_size))
        keys = iter(plan["keys"])
        for groups in all_sets(kernel_size):
            for group in np.split(np.arange(volume), groups):
                codes = next(keys)
                assert set(codes) <= set(group.tolist()) - {int(centre)}
                assert len(codes) == min(len(group) - (centre in group), 18)  # two passes of a radix sort
                assert [*codes.values()] == [1 << bit for bit in reversed(range(len(codes)))]
        assert next(keys, None) is None
        sets = _C.plan_order_sets(**how)
        assert sets == all_sets(kernel_size)[: len(sets)]
        assert bool(sets) == (rows >= 512 and volume > 1)


@pytest.mark.parametrize("kernel_size", KERNELS)
@pytest.mark.parametrize("phases", [(2, 2, 2), (3, 1, 1), (1, 2, 3), (7, 7, 7)])
def test_plans_with_phases(kernel_size, phases):
    """The codes of a phase's offsets have its number in common, which no other phase has, and a bit each."""
    plan = _C.plan_row_orders(rows=1000, kernel_size=kernel_size, groups=(1,), phases=phases)
    (codes,) = plan["keys"]
    assert sorted(codes) == list(range(np.prod(kernel_size)))
    number_bits = int(np.prod(phases)).bit_length()
    longest = int(np.prod([-(-k // p) for k, p in zip(kernel_size, phases, strict=True)]))
    mask_bits = min(longest, 18 - number_bits)
    of_phase = {}
    for offset, code in codes.items():
        place = np.unravel_index(offset, kernel_size)
        phase = tuple(int(x) % p for x, p in zip(place, phases, strict=True))
        of_phase.setdefault(phase, []).append((code >> mask_bits, code % (1 << mask_bits)))
    numbers = [{number for number, _ in codes} for codes in of_phase.values()]
    assert all(len(number) == 1 for number in numbers)
    assert len(set.union(*numbers)) == len(of_phase)
    assert set.union(*numbers) <= set(range(1, 1 << number_bits))
    for codes in of_phase.values():
        masks = [mask for _, mask in codes]
        assert masks == [1 << mask_bits >> i + 1 for i in range(len(masks))]  # 0 of those that find no room


def test_maps_with_phases_have_one_order():
    for rows in (511, 512, 3840, 64_160, 1 << 20):
        for phases in ((2, 2, 2), (1, 1, 2)):
            sets = _C.plan_order_sets(rows=rows, kernel_size=(3, 3, 3), phases=phases)
            assert sets == ((1,) if rows >= 512 else ())
    assert _C.plan_order_sets(rows=1000, kernel_size=(1, 1, 1), phases=(1, 1, 1)) == ()


def test_larger_scenes_have_coarser_groups():
    def sets(rows, kernel_size=(3, 3, 3)):
        return _C.plan_order_sets(rows=rows, kernel_size=kernel_size)

    assert sets(3840) == sets(15_192) == (1, 3, 9)
    assert sets(64_160) == (1, 3)
    assert sets(252_392) == sets(4_113_056) == (1,)
    assert sets(15_192, (5, 5, 5)) == (1, 5, 25)
    assert sets(15_192, (7, 7, 7)) == (1, 7, 49)
    assert sets(4096, (1, 1, 7)) == (1,)
    assert sets(4096, (1, 3, 5)) == (1, 3)
    assert sets(4096, (2, 2, 2)) == (1, 2)
    assert sets(1000, (2, 2, 2)) == (1, 2, 4)


def test_the_corners_of_a_kernel_are_sorted_by_first():
    plan = _C.plan_row_orders(rows=100, kernel_size=(5, 5, 5), groups=(1, 5))
    inner = [(x * 5 + y) * 5 + z for x in (1, 3) for y in (1, 3) for z in (1, 3)]
    assert [*plan["keys"][0]][:8] == inner
    assert [*plan["keys"][2]][:4] == inner[:4]


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": -1},
        {"kernel_size": (3, 3)},
        {"kernel_size": (3, 3, 8)},
        {"groups": (2,)},
        {"groups": (0,)},
        {"groups": (1, 1)},
        {"phases": (2, 2)},
        {"phases": (2, 0, 2)},
        {"phases": (2, 2, 8)},
        {"phases": (2, 2, 2), "groups": (3,)},
    ],
)
def test_impossible_plans_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        _C.plan_row_orders(**{"rows": 10, "kernel_size": (3, 3, 3), "groups": (1,)} | wrong)


@pytest.mark.parametrize("kernel_size", [3, 2])
def test_the_object_has_orders_where_they_pay(backend, kernel_size):
    coords, shape = scenes.scene(4000)
    nmap = flexgemm.neighbor_map(backend.array(coords), shape, kernel_size)
    if backend.name == "cpu":
        assert nmap.order is None
        assert nmap.order_groups == ()
    else:
        assert nmap.order_groups == _C.plan_order_sets(rows=4000, kernel_size=nmap.kernel_size)
        orders = row_orders(backend.numpy(nmap.map), nmap.kernel_size, nmap.order_groups)
        np.testing.assert_array_equal(backend.numpy(nmap.order), orders)
    for n, size in ((500, kernel_size), (4000, 1)):
        few = flexgemm.neighbor_map(backend.array(coords[:n]), shape, size)
        assert few.order is None


def test_phases_are_kinds_of_rows():
    """Along an axis as many as there are different sets of offsets at which a row may have neighbours."""

    def kinds(k, step, distance):
        reached = {tuple(v for v in range(k) if (x - v * distance) % step == 0) for x in range(step)}
        return len(reached - {()})

    for k, step, distance in itertools.product(range(1, 8), range(1, 10), range(1, 10)):
        phases = kinds(k, step, distance)
        assert phases_of((k, 1, 3), (step, 1, 2), (distance, 1, 1), True) == ((phases, 1, 2), (1, 1, 1))
        assert phases_of((1, 3, k), (1, 2, step), (1, 1, distance), False) == ((1, 1, 1), (1, 2, phases))


def test_maps_have_phases(backend):
    coords, shape = scenes.scene(3000)
    none, phases = (1, 1, 1), (2, 2, 1)
    nmap = flexgemm.sparse_conv_map(backend.array(coords), shape, 3, phases)
    turned = flexgemm.sparse_conv_map(backend.array(coords), shape, 3, phases, transposed=True)
    assert nmap.phases == turned.inverse.phases == nmap.inverse.inverse.phases == (none, phases)
    assert turned.phases == nmap.inverse.phases == copy.copy(turned).phases == (phases, none)
    same = flexgemm.neighbor_map(backend.array(coords), shape, 2)
    assert same.phases == same.inverse.phases == (none, none)
    if backend.name == "cuda":
        for each in (nmap, nmap.inverse, turned, turned.inverse):
            how = {"kernel_size": each.kernel_size, "phases": each.phases[0]}
            assert each.order_groups == _C.plan_order_sets(rows=each.num_out_voxels, **how)
            if each.order is None:
                continue
            orders = row_orders(backend.numpy(each.map), each.kernel_size, each.order_groups, each.phases[0])
            np.testing.assert_array_equal(backend.numpy(each.order), orders)


@pytest.mark.parametrize("kernel_size", KERNELS)
def test_the_number_of_rows_says_what_they_are(kernel_size):
    """Where all the orders there can be are fewer than the offsets: elsewhere no map has its entries behind them."""
    sets, volume = all_sets(kernel_size), int(np.prod(kernel_size))
    for count in range(1, len(sets) + 1):
        assert groups_of(np.empty((sum(sets[:count]), 5)), kernel_size) == sets[:count]
    if volume > sum(sets):
        assert groups_of(np.empty((1 + volume, 5)), kernel_size) == (1,)
