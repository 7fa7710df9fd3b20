"""Pooling and upsampling: over a neighbour map, and over all voxels of a sample.

The gradient of a pooling is a pooling over the transposed map, row by row and without atomics: every result is the same
bit for bit from run to run.
"""

from __future__ import annotations

from operator import index

from flexgemm import _C
from flexgemm._arguments import renamed
from flexgemm._arrays import Array, Library, Stream, library_of
from flexgemm._voxels import rows_of_four
from flexgemm.conv import bind, expect_map, expect_rows
from flexgemm.voxel import NeighborMap

ByProducts = tuple[Array | None, Array | None]  # the row of each maximum; how many rows each mean is of, or bounds


def sparse_pool3d(feats: Array, *, neighbor_map: NeighborMap, mode: str = "max", stream: Stream = None) -> Array:
    """Pooling of the voxels that each output reads: over sparse_conv_map(coords, shape, kernel_size, stride, ...).

    feats: (N, C), one row for each of neighbor_map.coords; float32, float16 or bfloat16; rows may be strided.
    mode: "max", "mean" or "sum" of the voxels that are there; those missing count for nothing. NaN is above every
        number, and the gradient of a maximum goes to the first voxel that has it, in the order of offsets.
    stream: a CUDA stream instead of the array library's current one.

    Returns (M, C), one row for each of neighbor_map.out_coords, 0 where an output reads no voxel. Sums are float32 and
    in the order of offsets. torch tensors that require grad are recorded by autograd (flexgemm.torch).

    Raises TypeError for arrays of a wrong kind or dtype and ValueError for wrong shapes, devices or modes, by name.
    """
    library = bind(feats, neighbor_map, stream)
    if library.needs_grad(feats, None, None):
        from flexgemm.torch import pooling

        return pooling.sparse_pool3d(feats, neighbor_map=neighbor_map, mode=mode, stream=stream)
    out, _ = forward(library, feats, neighbor_map, mode, with_gradient=False)
    return library.result(out)


def sparse_pool3d_backward(
    grad_out: Array, feats: Array, *, neighbor_map: NeighborMap, mode: str = "max", stream: Stream = None
) -> Array:
    """The gradient (N, C) of `sparse_pool3d` in feats. Pools once more, to learn which voxels the maxima are."""
    library = bind(feats, neighbor_map, stream)
    out, by_products = forward(library, feats, neighbor_map, mode, with_gradient=True)
    return library.result(backward(library, grad_out, out, neighbor_map, mode, by_products))


def sparse_upsample3d(feats: Array, *, neighbor_map: NeighborMap, stream: Stream = None) -> Array:
    """Nearest-neighbour upsampling: every voxel takes the features of the output that it lies in.

    feats: (M, C), one row for each of neighbor_map.out_coords.
    neighbor_map: a map whose stride is its kernel size, with dilation 1.

    Returns (N, C), one row for each of neighbor_map.coords, 0 where a voxel lies in no output. The rest as of
    sparse_pool3d; the gradient is its "sum".
    """
    expect_cells(neighbor_map)
    return sparse_pool3d(feats, neighbor_map=neighbor_map.inverse, mode="sum", stream=stream)


def expect_cells(neighbor_map: NeighborMap) -> None:
    """Raises unless outputs are cells of voxels that lie side by side."""
    expect_map(neighbor_map)
    side_by_side = neighbor_map.kernel_size == neighbor_map.stride and neighbor_map.dilation == (1, 1, 1)
    if not side_by_side or neighbor_map.submanifold or neighbor_map.transposed:
        raise ValueError(f"neighbor_map: expected a stride equal to the kernel size, got {neighbor_map!r}")


def global_pool(
    feats: Array,
    coords: Array,
    batch_size: int,
    mode: str = "max",
    *,
    device: str | None = None,
    stream: Stream = None,
) -> Array:
    """Pooling of all voxels of each sample.

    feats: (N, C) float32, float16 or bfloat16; rows may be strided.
    coords: (N, 4) int32, rows [batch, x, y, z], of which only the batch is read; in any order.
    batch_size: B, the number of samples, below 2**31 - 1.
    mode: "max", "mean" or "sum". NaN is above every number, and the gradient of a maximum goes to the first row that
        has it.
    device: "cuda" or "cuda:1" computes NumPy arrays on a GPU.
    stream: a CUDA stream instead of the array library's current one.

    Returns (B, C), 0 for a sample without voxels. On a GPU rows of no sample are left out; on the CPU they raise.
    Deterministic. torch tensors that require grad are recorded by autograd (flexgemm.torch).
    """
    library = library_of(feats, "feats", device, stream)
    if library.needs_grad(feats, None, None):
        from flexgemm.torch import pooling

        return pooling.global_pool(feats, coords, batch_size, mode, stream=stream)
    out, _, _ = global_forward(library, feats, coords, batch_size, mode, with_gradient=False)
    return library.result(out)


def global_pool_backward(
    grad_out: Array,
    feats: Array,
    coords: Array,
    mode: str = "max",
    *,
    device: str | None = None,
    stream: Stream = None,
) -> Array:
    """The gradient (N, C) of `global_pool` in feats. grad_out: (B, C). Pools once more, to learn which rows the maxima
    are."""
    library = library_of(feats, "feats", device, stream)
    samples = _samples_of(library, grad_out, "grad_out")
    out, batch, by_products = global_forward(library, feats, coords, samples, mode, with_gradient=True)
    return library.result(gradient(library, grad_out, out, batch, mode, by_products))


def broadcast_samples(values: Array, coords: Array, *, device: str | None = None, stream: Stream = None) -> Array:
    """A row for each voxel, that of its sample: the way back from `global_pool`.

    values: (B, C) float32, float16 or bfloat16; rows may be strided.
    coords: (N, 4) int32, rows [batch, x, y, z], of which only the batch is read; in any order.
    device, stream: as of `global_pool`.

    Returns (N, C). On a GPU a row of no sample is 0; on the CPU it raises. torch tensors that require grad are recorded
    by autograd (flexgemm.torch); the gradient is the sum over each sample.
    """
    library = library_of(values, "values", device, stream)
    if library.needs_grad(values):
        from flexgemm.torch import pooling

        return pooling.broadcast_samples(values, coords, stream=stream)
    return library.result(rows_of_samples(library, values, coords))


# ---- arrays as the extension takes them ----


def forward(
    library: Library, feats: Array, neighbor_map: NeighborMap, mode: str, *, with_gradient: bool
) -> tuple[Array, ByProducts]:
    """The pooled rows and what their gradient needs."""
    feats = library.rows(feats, "feats")
    expect_rows(feats, neighbor_map, "C")
    shape = neighbor_map.num_out_voxels, feats.shape[1]
    argmax = library.empty(shape, "int32", feats) if with_gradient and mode == "max" else None
    count = library.empty(shape[:1], "int32", feats) if with_gradient and mode == "mean" else None
    out = library.empty(shape, None, feats)
    library.run(_C.pool, feats, neighbor_map.native, out, argmax, count, mode=mode)
    return out, (argmax, count)


def backward(
    library: Library, grad_out: Array, out: Array, neighbor_map: NeighborMap, mode: str, by_products: ByProducts
) -> Array:
    """The gradient in the features that were pooled to `out`. A mirrored map read in its own order names the same rows
    as the transposed one."""
    transposed, _ = neighbor_map.native_gradient(library.stream)
    return gradient(library, grad_out, out, transposed, mode, by_products)


@renamed({"src": "feats"})
def global_forward(
    library: Library, feats: Array, coords: Array, batch_size: int, mode: str, *, with_gradient: bool
) -> tuple[Array, Array, ByProducts]:
    """The pooled samples, the sample of each row as a map (1, N), and what their gradient needs."""
    feats = library.rows(feats, "feats")
    coords = rows_of_four(library, coords, "coords")
    try:
        samples = index(batch_size)
    except TypeError:
        samples = 0
    if not 1 <= samples < 2**31 - 1:
        raise ValueError(f"batch_size: expected a positive int below 2**31 - 1, got {batch_size!r}")
    if len(feats.shape) != 2 or feats.shape[0] != coords.shape[0]:
        raise ValueError(f"feats: expected ({coords.shape[0]}, C) to match coords, got {tuple(feats.shape)}")
    rows = coords.shape[0]
    batch = library.empty((rows, 1), "int32", feats)
    order, starts = (library.empty((size,), "int32", feats) for size in (rows, samples + 1))
    library.run(_C.batch_indices, coords, batch, samples=samples)
    library.run(_C.group_rows, batch, order, starts)
    shape = samples, feats.shape[1]
    argmax = library.empty(shape, "int32", feats) if with_gradient and mode == "max" else None
    out = library.empty(shape, None, feats)
    library.run(_C.group_reduce, feats, order, starts, None, out, argmax, mode=mode)
    return out, batch.reshape((1, rows)), (argmax, starts if with_gradient and mode == "mean" else None)


@renamed({"feats": "values"})
def rows_of_samples(library: Library, values: Array, coords: Array) -> Array:
    samples = _samples_of(library, values, "values")
    values = library.rows(values, "values")
    coords = rows_of_four(library, coords, "coords")
    batch = library.empty((coords.shape[0], 1), "int32", values)
    out = library.empty((coords.shape[0], values.shape[1]), None, values)
    library.run(_C.batch_indices, coords, batch, samples=samples)
    library.run(_C.gather_sum, values, batch, None, out)
    return out


def _samples_of(library: Library, x: Array, name: str) -> int:
    """How many samples x has a row for."""
    library.accept(x, name)
    if len(x.shape) != 2 or x.shape[0] < 1:
        raise ValueError(f"{name}: expected (B, C) of at least one sample, got {tuple(x.shape)}")
    return int(x.shape[0])


@renamed({"grad_feats": "feats"})
def gradient(library: Library, grad_out: Array, out: Array, map: Array, mode: str, by_products: ByProducts) -> Array:
    grad_out = library.rows(grad_out, "grad_out")
    if tuple(grad_out.shape) != tuple(out.shape):
        raise ValueError(f"grad_out: expected {tuple(out.shape)}, got {tuple(grad_out.shape)}")
    library.expect_dtype_of(out, grad_out, "grad_out", "feats")
    grad_feats = library.empty((map.shape[1], out.shape[1]), None, out)
    library.run(_C.pool_backward, grad_out, map, grad_feats, *by_products, mode=mode)
    return grad_feats
