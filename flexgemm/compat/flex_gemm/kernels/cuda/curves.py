"""Codes of voxels along a curve, x, y and z having `bit_length` bits each and the batch those above."""

from __future__ import annotations

import torch

import flexgemm


def z_order_encode(coords: torch.Tensor, bit_length: int, codes: torch.Tensor) -> None:
    """Writes the codes of coords (N, 4) into codes (N), int32 or int64."""
    _encode(coords, bit_length, codes, "z_order")


def z_order_decode(codes: torch.Tensor, bit_length: int) -> torch.Tensor:
    """The voxels (N, 4) int32 of codes (N)."""
    return _decode(codes, bit_length, "z_order")


def hilbert_encode(coords: torch.Tensor, bit_length: int, codes: torch.Tensor) -> None:
    """Writes the codes of coords (N, 4) into codes (N), int32 or int64."""
    _encode(coords, bit_length, codes, "hilbert")


def hilbert_decode(codes: torch.Tensor, bit_length: int) -> torch.Tensor:
    """The voxels (N, 4) int32 of codes (N)."""
    return _decode(codes, bit_length, "hilbert")


def _encode(coords: torch.Tensor, bit_length: int, codes: torch.Tensor, mode: str) -> None:
    if codes.dtype not in (torch.int32, torch.int64) or codes.shape != coords.shape[:1]:
        got = f"{codes.dtype} {tuple(codes.shape)}"
        raise ValueError(f"codes: expected int32 or int64 ({len(coords)},) to match coords, got {got}")
    codes.copy_(flexgemm.encode_seq(coords.int(), _grid(bit_length, codes), mode))


def _decode(codes: torch.Tensor, bit_length: int, mode: str) -> torch.Tensor:
    grid = _grid(bit_length, codes)
    few = (grid[0] - 1).bit_length() + 3 * bit_length <= 32
    return flexgemm.decode_seq(codes.to(torch.int32 if few else torch.int64), grid, mode)


def _grid(bit_length: int, codes: torch.Tensor) -> tuple[int, int, int, int]:
    """A cube, and as many samples as codes of this dtype tell apart."""
    batch_bits = 8 * codes.element_size() - 3 * bit_length
    if batch_bits < 0:
        raise ValueError(
            f"bit_length: expected up to {8 * codes.element_size() // 3} for {codes.dtype}, got {bit_length}"
        )
    size = 2**bit_length
    return min(2**batch_bits, 2**31 - 1), size, size, size
