"""`torch.ops.flex_gemm.*`, the operators that the custom_ops branch of meshy-dev's fork of FlexGEMM registers.

Their names, schemas and shapes for fake tensors are the fork's; what they compute are the functions of this package. As
there, none has a gradient of its own: a program's autograd function calls the one that ends in `_bwd`. Maps are (N, V)
uint32, 0xffffffff where there is no neighbour, weights (Co, V, Ci).

`flexgemm.compat.install("flex_gemm")` imports this module, which registers them. Of two registrations of a name in one
process, the fork's own and this one, torch takes the later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import torch

from flexgemm import _C, conv
from flexgemm._arrays import library_of
from flexgemm._voxels import Triple
from flexgemm.compat.flex_gemm.kernels import cuda
from flexgemm.compat.flex_gemm.kernels.cuda import maps
from flexgemm.compat.flex_gemm.ops.spconv import _convolve as convolve
from flexgemm.torch.operators.define import Gradients, operator
from flexgemm.voxel import NeighborMap


def _register(name: str, function: Callable[..., Any], fake: Callable[..., Any], writes: Sequence[str] = ()) -> None:
    operator(function, writes, f"flex_gemm::{name}").register_fake(fake)


def _nothing(*args: Any) -> None:
    """The fake of an operator that writes and returns nothing."""


# ---- hash tables ----

_TABLE = "hashmap_keys", "hashmap_values"


def _values(hashmap_keys: Any, hashmap_values: Any, keys: Any, *extents: Any) -> torch.Tensor:
    return hashmap_values.new_empty(keys.shape[0])


_register("hashmap_insert_cuda", cuda.hashmap_insert, _nothing, _TABLE)
_register("hashmap_insert_3d_cuda", cuda.hashmap_insert_3d, _nothing, _TABLE)
_register("hashmap_insert_3d_idx_as_val_cuda", cuda.hashmap_insert_3d_idx_as_val, _nothing, _TABLE)
_register("hashmap_lookup_cuda", cuda.hashmap_lookup, _values)
_register("hashmap_lookup_3d_cuda", cuda.hashmap_lookup_3d, _values)

# ---- curves ----


def _coords(codes: Any, bit_length: Any) -> torch.Tensor:
    return codes.new_empty((codes.shape[0], 4), dtype=torch.int32)


_register("z_order_encode", cuda.z_order_encode, _nothing, ("codes",))
_register("hilbert_encode", cuda.hilbert_encode, _nothing, ("codes",))
_register("z_order_decode", cuda.z_order_decode, _coords)
_register("hilbert_decode", cuda.hilbert_decode, _coords)

# ---- samples ----

_UNUSED_TABLE = "hashmap_keys", "hashmap_vals"  # which the fork's operators fill


def _nearest(hashmap_keys: Any, hashmap_vals: Any, coords: Any, grid: Any, *extents: Any) -> torch.Tensor:
    return grid.new_empty(grid.shape[:2], dtype=torch.uint32)


def _trilinear(
    hashmap_keys: Any, hashmap_vals: Any, coords: Any, grid: Any, *extents: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    size = *grid.shape[:2], 8
    return grid.new_empty(size, dtype=torch.uint32), grid.new_empty(size)


def indice_weighed_sum_fwd(input: torch.Tensor, indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(M, C): the sums of the rows of input (N, C) that indices (M, 8) name, times weight (M, 8)."""
    out = input.new_empty((indices.shape[0], input.shape[1]))
    rows, weights = _rows(indices), weight.float().contiguous()
    library_of(input, "input").run(_C.gather_sum, input.contiguous(), rows, weights, out)
    return out


def indice_weighed_sum_bwd_input(
    grad_output: torch.Tensor, indices: torch.Tensor, weight: torch.Tensor, N: int
) -> torch.Tensor:
    """(N, C): the gradient of `indice_weighed_sum_fwd` in input."""
    library, rows, weights = library_of(grad_output, "grad_output"), _rows(indices), weight.float().flatten()
    order, starts = rows.new_empty(rows.numel()), rows.new_empty(N + 1)
    library.run(_C.group_rows, rows, order, starts)
    out = grad_output.new_empty((N, grad_output.shape[-1]))
    library.run(_C.group_reduce, grad_output.contiguous(), order, starts, weights, out, None)
    return out


def _rows(indices: torch.Tensor) -> torch.Tensor:
    """As the extension takes them."""
    if indices.dtype not in (torch.uint32, torch.int32):
        raise TypeError(f"indices: expected uint32 or int32, got {indices.dtype}")
    return indices.contiguous().view(torch.int32)


_register(
    "hashmap_build_grid_sample_3d_nearest_neighbor_map",
    cuda.hashmap_build_grid_sample_3d_nearest_neighbor_map,
    _nearest,
    _UNUSED_TABLE,
)
_register(
    "hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight",
    cuda.hashmap_build_grid_sample_3d_trilinear_neighbor_map_weight,
    _trilinear,
    _UNUSED_TABLE,
)
_register(
    "indice_weighed_sum_fwd",
    indice_weighed_sum_fwd,
    lambda input, indices, weight: input.new_empty((indices.shape[0], input.shape[1])),
)
_register(
    "indice_weighed_sum_bwd_input",
    indice_weighed_sum_bwd_input,
    lambda grad_output, indices, weight, N: grad_output.new_empty((N, grad_output.shape[-1])),
)

# ---- neighbour maps ----


def _map(
    hashmap_keys: Any, hashmap_vals: Any, coords: Any, W: Any, H: Any, D: Any, Kw: Any, Kh: Any, Kd: Any, *dilation: Any
) -> torch.Tensor:
    return coords.new_empty((coords.shape[0], Kw * Kh * Kd), dtype=torch.uint32)


def _codes_and_pairs(neighbor_map: Any) -> tuple[torch.Tensor, ...]:
    (rows, volume), pairs = neighbor_map.shape, torch.library.get_ctx().new_dynamic_size()
    sizes = (rows, torch.int32), (rows, torch.int64), (pairs, torch.uint32), (pairs, torch.uint32)
    return tuple(neighbor_map.new_empty(n, dtype=dtype) for n, dtype in (*sizes, (volume + 1, torch.uint32)))


def _offsets_of_blocks(gray_code: Any, sorted_idx: Any, block_size: Any) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = (gray_code.shape[0] + block_size - 1) // block_size
    sizes = torch.library.get_ctx().new_dynamic_size(), blocks + 1
    offsets, segments = (gray_code.new_empty(n, dtype=torch.int32) for n in sizes)
    return offsets, segments


_register(
    "hashmap_build_submanifold_conv_neighbour_map_cuda",
    cuda.hashmap_build_submanifold_conv_neighbour_map,
    _map,
    _UNUSED_TABLE,
)
_register(
    "neighbor_map_post_process_for_masked_implicit_gemm_1",
    cuda.neighbor_map_post_process_for_masked_implicit_gemm_1,
    _codes_and_pairs,
)
_register(
    "neighbor_map_post_process_for_masked_implicit_gemm_2",
    cuda.neighbor_map_post_process_for_masked_implicit_gemm_2,
    _offsets_of_blocks,
)

# ---- convolution ----


def sparse_conv_masked_splitk_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    neighbor: torch.Tensor,
    sorted_idx: torch.Tensor,
    valid_kernels: Sequence[torch.Tensor],
    valid_kernel_segs: Sequence[torch.Tensor],
    block_sizes: Sequence[int],
    splitk: int,
) -> torch.Tensor:
    """(N, Co). flexgemm plans by itself: of what the fork's kernels need besides the map and the order of its rows,
    nothing is looked at."""
    nmap = _neighbor_map(input, neighbor, sorted_idx, with_gradient=False)
    bias, precision = convolve.bias_for(input, bias), convolve.precision()
    out: torch.Tensor = conv.sparse_conv3d(input, _with_axes(weight), bias, neighbor_map=nmap, precision=precision)
    return out


def sparse_conv_masked_splitk_bwd(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    neighbor: torch.Tensor,
    sorted_idx: torch.Tensor,
    valid_kernels: Sequence[torch.Tensor],
    valid_kernel_segs: Sequence[torch.Tensor],
    block_sizes: Sequence[int],
    valid_signal_i: torch.Tensor,
    valid_signal_o: torch.Tensor,
    valid_signal_seg: torch.Tensor,
    splitk: int,
) -> Gradients:
    """The gradients in input, weight and bias, all three: that in the bias without a bias too."""
    nmap = _neighbor_map(input, neighbor, sorted_idx, with_gradient=True)
    gradients: Any = conv.sparse_conv3d_backward(
        grad_output, input, _with_axes(weight), neighbor_map=nmap, precision=convolve.precision()
    )
    grad_input, grad_weight, grad_bias = gradients
    return grad_input, grad_weight.view(weight.shape), grad_bias


def sparse_conv_masked_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    neighbor: torch.Tensor,
    sorted_idx: torch.Tensor,
    valid_kernels: Sequence[torch.Tensor],
    valid_kernel_segs: Sequence[torch.Tensor],
    block_sizes: Sequence[int],
) -> torch.Tensor:
    blocks = valid_kernels, valid_kernel_segs, block_sizes
    return sparse_conv_masked_splitk_fwd(input, weight, bias, neighbor, sorted_idx, *blocks, 1)


def sparse_conv_masked_bwd(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    neighbor: torch.Tensor,
    sorted_idx: torch.Tensor,
    valid_kernels: Sequence[torch.Tensor],
    valid_kernel_segs: Sequence[torch.Tensor],
    block_sizes: Sequence[int],
    valid_signal_i: torch.Tensor,
    valid_signal_o: torch.Tensor,
    valid_signal_seg: torch.Tensor,
) -> Gradients:
    blocks = valid_kernels, valid_kernel_segs, block_sizes
    pairs = valid_signal_i, valid_signal_o, valid_signal_seg
    return sparse_conv_masked_splitk_bwd(grad_output, input, weight, bias, neighbor, sorted_idx, *blocks, *pairs, 1)


def _neighbor_map(
    input: torch.Tensor, neighbor: torch.Tensor, sorted_idx: torch.Tensor, *, with_gradient: bool
) -> NeighborMap:
    order = sorted_idx.to(torch.int32)[None] if input.is_cuda and len(neighbor) else None
    return maps.native(neighbor, _kernel(neighbor.shape[1]), input.shape[0], order, with_gradient=with_gradient)


def _with_axes(weight: torch.Tensor) -> torch.Tensor:
    if weight.ndim != 3:
        raise ValueError(f"weight: expected (Co, V, Ci), got {tuple(weight.shape)}")
    return weight.unflatten(1, _kernel(weight.shape[1]))


@cache
def _kernel(volume: int) -> Triple:
    """Axes of a kernel of this volume. Which ones makes no difference where the map is there already."""
    for w, h, d in product(range(1, _C.MAX_KERNEL + 1), repeat=3):
        if w * h * d == volume:
            return w, h, d
    need = f"V the volume of a kernel of up to {_C.MAX_KERNEL} along each axis"
    raise ValueError(f"weight: expected (Co, V, Ci), {need}, got V {volume}")


def _out(input: Any, weight: Any, bias: Any, neighbor: Any, *others: Any) -> torch.Tensor:
    return input.new_empty((neighbor.shape[0], weight.shape[0]))


def _gradients(grad_output: Any, input: Any, weight: Any, *others: Any) -> Gradients:
    return input.new_empty(input.shape), weight.new_empty(weight.shape), input.new_empty(weight.shape[0])


_register("sparse_conv_masked_fwd", sparse_conv_masked_fwd, _out)
_register("sparse_conv_masked_bwd", sparse_conv_masked_bwd, _gradients)
_register("sparse_conv_masked_splitk_fwd", sparse_conv_masked_splitk_fwd, _out)
_register("sparse_conv_masked_splitk_bwd", sparse_conv_masked_splitk_bwd, _gradients)
