"""The functions behind a neighbour cache.

Maps are (N, V) uint32, 0xffffffff where there is no neighbour.
"""

from __future__ import annotations

import torch

from flexgemm._arguments import as_int
from flexgemm._voxels import Triple
from flexgemm.torch.maps import from_operators
from flexgemm.voxel import NeighborMap, neighbor_map, sparse_conv_map


def unsigned(nmap: torch.Tensor) -> torch.Tensor:
    """flexgemm's map (V, N) int32 as (N, V) uint32, a copy."""
    return nmap.t().clone(memory_format=torch.contiguous_format).view(torch.uint32)


def of_any_sample(W: int, H: int, D: int) -> tuple[int, int, int, int]:
    """The grid of voxels whose batch index may be any."""
    return min(2**31 - 1, (2**63 - 1) // max(W * H * D, 1)), W, H, D


def native(
    given: torch.Tensor, kernel: Triple, rows: int, order: torch.Tensor | None = None, *, with_gradient: bool = True
) -> NeighborMap:
    """A map (M, V) uint32 of `rows` inputs as flexgemm takes it, with what the gradient in them is computed by."""
    outputs, volume = given.shape
    by_offset = given.view(torch.int32).t().contiguous()
    gradient = None
    if with_gradient:
        there = (by_offset >= 0) & (by_offset < rows)
        gradient = by_offset.new_full((volume, rows + 1), -1)  # a column more, for pairs that are not there
        numbers = torch.arange(outputs, dtype=torch.int32, device=gradient.device).expand(volume, -1)
        gradient.scatter_(1, by_offset.where(there, rows).long(), numbers)
        gradient = gradient[:, :rows].contiguous()
    return from_operators(by_offset, order, gradient, None, kernel, (1,) * 6, rows)


def hashmap_build_submanifold_conv_neighbour_map(
    hashmap_keys: torch.Tensor,
    hashmap_vals: torch.Tensor,
    coords: torch.Tensor,
    W: int,
    H: int,
    D: int,
    Kw: int,
    Kh: int,
    Kd: int,
    Dw: int,
    Dh: int,
    Dd: int,
) -> torch.Tensor:
    """(N, V) uint32. The table's memory is not used."""
    return unsigned(neighbor_map(coords, of_any_sample(W, H, D), (Kw, Kh, Kd), (Dw, Dh, Dd)).map)


def order_of(mode: int, name: str) -> str:
    """The order of outputs that FlexGEMM has a number for."""
    orders = "bxyz", "z_order", "hilbert"
    number = as_int(mode, name)
    if number not in range(len(orders)):
        raise ValueError(f"{name}: expected 0, 1 or 2, got {number}")
    return orders[number]


def hashmap_build_sparse_conv_out_coords(
    in_coords: torch.Tensor, hashmap_ratio: float, serialize_mode: int, *sizes: int
) -> torch.Tensor:
    """(M, 4) int32, the outputs that any voxel reaches. serialize_mode: 0 bxyz, 1 Z order, 2 Hilbert. sizes: B, W, H,
    D, and kernel size, stride, padding and dilation, three ints each."""
    grid, how = sizes[:4], (sizes[i : i + 3] for i in range(4, 16, 3))
    order = order_of(serialize_mode, "serialize_mode")
    out_coords: torch.Tensor = sparse_conv_map(in_coords, grid, *how, order=order).out_coords
    return out_coords


def expand_unique_build_sparse_conv_out_coords(
    in_coords: torch.Tensor, serialize_mode: int, *sizes: int
) -> torch.Tensor:
    """The same."""
    return hashmap_build_sparse_conv_out_coords(in_coords, 0.0, serialize_mode, *sizes)


def hashmap_build_sparse_conv_neighbour_map(
    in_coords: torch.Tensor, out_coords: torch.Tensor, hashmap_ratio: float, include_bwd: bool, *sizes: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(M, V) uint32, the inputs that each output reads; with include_bwd (N, V), the outputs that read each input."""
    grid, how = sizes[:4], (sizes[i : i + 3] for i in range(4, 16, 3))
    nmap = sparse_conv_map(in_coords, grid, *how, out_coords=out_coords)
    return unsigned(nmap.map), unsigned(nmap.transposed_map) if include_bwd else None


def neighbor_map_post_process_for_masked_implicit_gemm_1_no_bwd(
    neighbor_map: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """gray_code (N) int32: bit v is set where there is a neighbour at v; sorted_idx (N) int64: the rows, sorted by the
    place of that code in the Gray sequence. V up to 32."""
    rows, volume = neighbor_map.shape
    if volume > 32:
        raise ValueError(f"neighbor_map: expected V up to 32, the bits of a code, got {volume}")
    present = neighbor_map.view(torch.int32) != -1
    bits = torch.arange(volume, device=present.device)
    gray_code = (present << bits).sum(1)
    # Each bit of the place is the parity of the bits of the code from there up.
    parity = present.flip(1).cumsum(1).flip(1) & 1
    sorted_idx = torch.argsort(
        (parity << bits).sum(1).to(torch.int32), stable=True
    )  # int32, as the codes of V = 32 are
    return gray_code.to(torch.int32), sorted_idx


def neighbor_map_post_process_for_masked_implicit_gemm_1(
    neighbor_map: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """gray_code and sorted_idx, and the pairs of neighbours by offset, uint32: valid_signal_i, their inputs,
    valid_signal_o, their outputs, and valid_signal_seg (V + 1), where the pairs of each offset begin."""
    gray_code, sorted_idx = neighbor_map_post_process_for_masked_implicit_gemm_1_no_bwd(neighbor_map)
    by_offset = neighbor_map.view(torch.int32).t()
    present = by_offset != -1
    outputs = present.nonzero()[:, 1].to(torch.int32)
    segments = torch.nn.functional.pad(present.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    pairs = by_offset[present], outputs, segments
    inputs, outputs, segments = (x.contiguous().view(torch.uint32) for x in pairs)
    return gray_code, sorted_idx, inputs, outputs, segments


def neighbor_map_post_process_for_masked_implicit_gemm_2(
    gray_code: torch.Tensor, sorted_idx: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The offsets that each block of sorted rows has neighbours at, one after the other, and where those of each block
    begin; both int32."""
    blocks = -(-len(gray_code) // block_size)
    codes = gray_code[sorted_idx]
    codes = torch.nn.functional.pad(codes, (0, blocks * block_size - len(codes))).view(blocks, block_size)
    bits = torch.arange(32, device=codes.device)
    present = (codes[..., None] >> bits & 1).any(1) if blocks else codes.new_zeros((0, 32), dtype=torch.bool)
    segments = torch.nn.functional.pad(present.sum(1).cumsum(0), (1, 0))
    return present.nonzero()[:, 1].to(torch.int32), segments.to(torch.int32)
