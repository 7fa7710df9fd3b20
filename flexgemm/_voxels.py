"""What every function on voxels asks of coordinates and of the grid that they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any

from flexgemm import _C
from flexgemm._arguments import as_int, renamed
from flexgemm._arrays import Array, Library

if TYPE_CHECKING:
    from flexgemm.voxel import NeighborMap

Shape = tuple[int, int, int, int]
Triple = tuple[int, int, int]

MOST_CELLS = 2**63  # that a grid stays below


def grid_shape(shape: Sequence[int]) -> Shape:
    """(B, W, H, D) as four positive ints."""
    try:
        b, w, h, d = map(index, shape)
    except (TypeError, ValueError):
        raise ValueError(f"shape: expected four positive ints (B, W, H, D), got {shape!r}") from None
    if min(b, w, h, d) < 1:
        raise ValueError(f"shape: expected four positive ints (B, W, H, D), got {shape!r}")
    return b, w, h, d


def is_sequence(value: Any) -> bool:
    """Whether it is several numbers; an array without an axis is one."""
    return hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0


def three_ints(value: Any, name: str, *, least: int = 1) -> Any:
    """Three ints from `least`, given as such or as one that stands for all."""
    if type(value) is int and value >= least:
        return value, value, value
    try:
        numbers = tuple(as_int(n, name) for n in value) if is_sequence(value) else (as_int(value, name),) * 3
    except TypeError:
        numbers = ()
    if len(numbers) != 3 or min(numbers) < least:
        meaning = "a positive int" if least else "an int from 0"
        raise ValueError(f"{name}: expected {meaning} or three of them (w, h, d), got {value!r}")
    return numbers


def kernel_axes(kernel_size: Any) -> Any:
    """A kernel along each axis, given as three ints or as one."""
    kernel = three_ints(kernel_size, "kernel_size")
    if max(kernel) > _C.MAX_KERNEL:
        raise ValueError(f"kernel_size: expected 1 to {_C.MAX_KERNEL}, got {max(kernel)}")
    return kernel


def conv_grids(
    shape: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any
) -> tuple[Shape, Triple, Triple, Triple, Triple, Shape]:
    """The grid, kernel, stride, padding and dilation of a sparse convolution in full, and the grid of its outputs."""
    grid = grid_shape(shape)
    kernel, steps = kernel_axes(kernel_size), three_ints(stride, "stride")
    dilations, pads = three_ints(dilation, "dilation"), three_ints(padding, "padding", least=0)
    more = three_ints(output_padding, "output_padding", least=0)
    if any(m >= max(s, d) if transposed else m for m, s, d in zip(more, steps, dilations, strict=True)):
        need = "less than stride or dilation" if transposed else "0 without transposed=True"
        raise ValueError(f"output_padding: expected {need}, got {output_padding!r}")
    if transposed:
        axes = [(w - 1) * s + m for w, s, m in zip(grid[1:], steps, more, strict=True)]
    else:
        axes = [w - 1 for w in grid[1:]]
    for i in range(3):
        reach = dilations[i] * (kernel[i] - 1)
        axes[i] += reach - 2 * pads[i] if transposed else 2 * pads[i] - reach
    if min(axes) < 0:
        raise ValueError(f"kernel_size: {kernel} with dilation {dilations} and padding {pads} fits nowhere in {grid}")
    x, y, z = axes if transposed else [a // s for a, s in zip(axes, steps, strict=True)]
    outputs = grid[0], x + 1, y + 1, z + 1
    if prod(outputs) >= MOST_CELLS > prod(grid):
        raise ValueError(f"shape: expected B*W*H*D below 2^63 of the outputs' grid, too, got {outputs} from {grid}")
    return grid, kernel, steps, pads, dilations, outputs


def rows_of_four(library: Library, coords: Any, name: str) -> Array:
    """coords for the extension: (N, 4), contiguous."""
    coords = library.contiguous(coords, name)
    if len(coords.shape) != 2 or coords.shape[1] != 4:
        raise ValueError(f"{name}: expected (N, 4) [batch, x, y, z], got {tuple(coords.shape)}")
    return coords


def reached_sites(nmap: NeighborMap, library: Library, coords: Array, mode: str) -> Array:
    """The outputs of a map that a voxel reaches, sorted by their code, but for those beyond the numbers of int32. How
    many there are is known only when they have been found: this waits for a GPU."""
    kernel: dict[str, Any] = {"kernel_size": nmap.kernel_size, "stride": nmap.stride, "dilation": nmap.dilation}
    kernel["transposed"] = nmap.transposed
    # The curves have the bits of the larger grid, and so the order of the input's wherever that is the larger.
    code_shape = nmap.out_shape if mode == "bxyz" else tuple(map(max, nmap.shape, nmap.out_shape))
    with renamed({"mode": "order"} | ({"shape": "order"} if mode != "bxyz" else {})):
        bits = _C.sequence_bits(shape=code_shape, mode=mode)
    if bits > 63:
        raise ValueError(f"order: {mode!r} needs codes of at most 63 bits, those of {code_shape} are longer")
    code = library.empty((coords.shape[0] * _C.plan_conv_sites(**kernel),), "int64", coords)
    count = library.empty((1,), "int64", coords)
    grids = {"shape": nmap.shape, "out_shape": nmap.out_shape, "code_shape": code_shape}
    library.run(_C.conv_sites, coords, code, count, mode=mode, padding=nmap.padding, **grids, **kernel)
    sites = library.lasting((int(library.host(count)[0]), 4), "int32", coords)
    library.run(_C.decode_seq, code, sites, shape=code_shape, mode=mode)
    return sites
