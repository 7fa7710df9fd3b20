"""Segments of neighbour maps: which maps have them, which layers go by them, and how they are built."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flexgemm import _C
from flexgemm._arrays import Array, Library
from flexgemm._voxels import Shape
from flexgemm.serialize import native_codes, native_order

if TYPE_CHECKING:
    from flexgemm.voxel import NeighborMap

_CPU = 1  # DLPack's number
_HOPPER = 90
_MAX_VOLUME = 32


def tiles_of(nmap: NeighborMap) -> tuple[int, dict[str, Any]]:
    """How many tiles of 64 rows the segments of a map have, 0 for a map without, and what is known about its GPU."""
    fits = nmap.mirrored and nmap.dilation == (1, 1, 1) and 1 < nmap.kernel_volume <= _MAX_VOLUME
    gpu = hopper_of(nmap.native) if fits and _has_codes(nmap.shape) else {}
    return _C.plan_segment_tiles(rows=nmap.num_voxels, num_sms=gpu["num_sms"]) if gpu else 0, gpu


def pay_for(nmap: NeighborMap, tiles: int, gpu: dict[str, Any], ci: int, co: int) -> bool:
    """Whether a layer of 16-bit features, ci channels to co, would go by segments of so many tiles."""
    asked: dict[str, Any] = {"rows": nmap.num_voxels, "ci": ci, "co": co, "v": nmap.kernel_volume}
    asked |= {"dtype": "float16", "groups": nmap.order_groups, "segment_tiles": tiles}
    asked |= {name: gpu[name] for name in ("num_sms", "compute_capability")}
    return bool(_C.plan_conv(**asked)["segment_tiles"])


def pay_after(rows: int) -> int:
    """After how many calls that they would have made faster segments have paid for themselves, about: on an H200 a call
    saves .15 to .3 ns a row, and building them takes 85 us and .3 ns a row."""
    return 2 + 600_000 // rows


def build(nmap: NeighborMap, tiles: int, library: Library) -> Array:
    """The records (kernels/segment.h) of rows along the Z curve."""
    count, words = -(-nmap.num_voxels // (64 * tiles)), _C.segment_words(tiles=tiles, v=nmap.kernel_volume)
    codes = native_codes(library, nmap.coords, nmap.shape, "z_order")
    order = native_order(library, codes, nmap.shape, "z_order")
    segments = library.lasting((count, words), "int32", order)
    how = {"kernel_size": nmap.kernel_size, "tiles": tiles, "in_rows": nmap.num_voxels}
    library.run(_C.segment_map, nmap.native, order, segments, **how)
    return segments


def hopper_of(array: Array) -> dict[str, Any]:
    """What is known about the Hopper GPU that an array is on; {} where it is on none."""
    device_type, index = array.__dlpack_device__()
    gpu = {} if device_type == _CPU else _gpu_info(index)
    return gpu if gpu.get("compute_capability") == _HOPPER else {}


@lru_cache
def _gpu_info(index: int) -> dict[str, Any]:
    return _C.device_info("cuda", index)


def _has_codes(shape: Shape) -> bool:
    """Whether the places of a grid along a curve have numbers of 64 bits."""
    try:
        return _C.sequence_bits(shape=shape, mode="z_order") <= 64
    except ValueError:
        return False
