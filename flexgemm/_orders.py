"""Row orders of neighbour maps: the phases of rows, which sets of orders an array has, and a map's entries in the order
of its rows."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from flexgemm import _C
from flexgemm._arrays import Array, Library
from flexgemm._segments import hopper_of

if TYPE_CHECKING:
    from flexgemm._voxels import Triple
    from flexgemm.voxel import NeighborMap


def phases_of(kernel_size: Triple, stride: Triple, dilation: Triple, transposed: bool) -> tuple[Triple, Triple]:
    """The phases, along each axis, of the outputs of a map, and of those of its gradient's map. Those of the finer grid
    have some; 1 where an output may have neighbours at all offsets."""
    phases = _C.plan_phases(kernel_size=kernel_size, stride=stride, dilation=dilation)
    return (phases, (1, 1, 1)) if transposed else ((1, 1, 1), phases)


def with_entries(
    nmap: NeighborMap, native: Array, order: Array | None, plain: Array | None, library: Library
) -> tuple[Array | None, Array | None]:
    """The row orders of `native`, the map or its gradient's, with its entries behind them where kernels read these
    faster, and the orders alone (`plain`) where that is another array: it stays, since a captured graph or work on
    another stream may read it."""
    rows = int(native.shape[1])
    if order is None or order.shape[0] != 1 or nmap.kernel_volume <= sum(_sets(nmap.kernel_size)):
        return order, plain
    # By orders of shorter segments layers become slower (docs/performance/convolution.md).
    one_segment = rows <= _C.plan_row_orders(rows=rows, kernel_size=nmap.kernel_size, groups=(1,))["segment"]
    if not one_segment or not hopper_of(native) or _C.is_capturing(native, stream=library.stream):
        return order, plain
    ordered = library.lasting((1 + nmap.kernel_volume, rows), "int32", native)
    library.run(_C.ordered_map, native, order, ordered)
    return ordered, order


def groups_of(order: Array | None, kernel_size: Triple) -> tuple[int, ...]:
    """The groups of offsets of each of the sets that row orders (orders, N) are; they say it by their number."""
    return () if order is None else _groups_of(int(order.shape[0]), kernel_size)


@lru_cache
def _groups_of(orders: int, kernel_size: Triple) -> tuple[int, ...]:
    """Coarsest sets come first; behind them may lie the rows of the ordered map, more than there can be orders."""
    if orders > sum(_sets(kernel_size)):
        orders -= kernel_size[0] * kernel_size[1] * kernel_size[2]
    sets: list[int] = []
    for groups in _sets(kernel_size):
        if sum(sets) < orders:
            sets.append(groups)
    return tuple(sets)


def _sets(kernel_size: Triple) -> tuple[int, ...]:
    """The sets there may be, each once: the whole kernel, planes of constant kx, columns of constant (kx, ky)."""
    return tuple(dict.fromkeys((1, kernel_size[0], kernel_size[0] * kernel_size[1])))
