"""The extension. Arrays are anything that speaks DLPack, NumPy arrays, or DeviceArray; outputs are given, not returned.

Every operation checks dtype, rank, shape, device, stride and overlap of its arguments and raises TypeError or
ValueError naming the argument, what came and what was needed. The device of the arrays picks the backend; what a
backend lacks raises NotImplementedError. An exporter's own exception passes through, with a note that names the
argument.

`stream` is an int (a cudaStream_t; 0 and 1 are the legacy default stream, 2 is the per-thread one) or an object with
`__cuda_stream__`, and must stay alive while work is queued on it; by default it is the current stream of the tensors'
device in the first of the arrays' libraries that tells it (torch, CuPy), else the legacy default stream.

An operation returns 0 when it ran. In need of a workspace it takes the array `workspace`; else memory from the arrays'
own library where that offers its allocator (torch, on its current stream); else what the function `workspace(nbytes,
first array)` returns; without any of them it runs nothing and returns the bytes that `workspace` must have. That is a
contiguous uint8 array at any address (the bytes leave room to align it to 256). `<operation>_workspace` takes the same
arguments and only tells the bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

from numpy.typing import NDArray

Array = Any
Stream = Any
Workspace = Array | Callable[[int, Array], Array] | None

@final
class DeviceArray:
    """A contiguous array of up to 5 dimensions in CUDA memory owned by flexgemm. Exports DLPack.

    Allocation and release are stream-ordered. The array follows the streams that it is used on: a new one waits for
    the last one, and the memory is released on the last one. `shape` and `nbytes` are those of NumPy, `dtype` is a name
    and `device` the index of the GPU.
    """

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: str, *, device: int = 0, stream: Stream = None) -> DeviceArray:
        """An uninitialised array."""
    @classmethod
    def from_numpy(cls, array: NDArray[Any], *, device: int = 0, stream: Stream = None) -> DeviceArray:
        """Copies the array, C-contiguous or not; on return the source may change."""
    def numpy(self, *, stream: Stream = None) -> NDArray[Any]:
        """Copies to the host on the stream (by default the last one that used the array) and synchronises it."""
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def reshape(self, shape: Sequence[int]) -> DeviceArray:
        """A view of the same memory."""
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

ALGORITHMS: tuple[str, ...]  # of convolution, "auto" first
PRECISIONS: tuple[str, ...]  # of float32 products
POOL_MODES: tuple[str, ...]
MAX_KERNEL: int  # voxels of a convolution kernel along one axis

def build_info() -> dict[str, Any]:
    """version, source_sha256, cuda (toolkit version or None), cuda_archs (list), compiler, abi."""

def device_count() -> int:
    """CUDA devices; 0 without a driver or in a CPU-only build."""

def device_info(device: str = "cpu", index: int = 0) -> dict[str, Any]:
    """name, compute_capability, num_sms, memory_bytes, l2_bytes, driver_version, runtime_version."""

def is_capturing(array: Array, *, stream: Stream = None) -> bool:
    """Whether work on the array would go into a CUDA graph that is being captured, or be refused because of one."""

def mark(array: Array, *, stream: Stream = None) -> object:
    """A mark behind the work that is queued on the stream that work on the array goes to."""

def passed(mark: object, /) -> bool:
    """Whether the work before the mark is done. Does not wait, and may be asked during a capture."""

def wait_for(mark: object, array: Array, *, stream: Stream = None) -> bool:
    """Puts further work on the array behind the mark. False, and nothing is done, while that work is captured."""

def neighbor_map(
    coords: Array,
    map: Array,
    *,
    shape: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    queries: Array | None = None,
    query_shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
    transposed: bool = False,
    check: bool = False,
    order: Array | None = None,
    groups: Sequence[int] | None = None,
    phases: Sequence[int] = (1, 1, 1),
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """coords (N, 4) int32 [batch, x, y, z]; shape (B, W, H, D); map (V, M) int32 out: the row of coords at
    queries[m] * stride + k * dilation - padding; transposed: at (queries[m] + padding - k * dilation) / stride.
    queries (M, 4) int32 come with query_shape, stride and padding; without them they are coords, with stride 1 and
    padding kernel_size // 2 * dilation. order (sum(groups), M) int32 out: what row_order() makes of the map."""

def conv_sites(
    coords: Array,
    code: Array,
    count: Array,
    *,
    shape: Sequence[int],
    out_shape: Sequence[int],
    code_shape: Sequence[int],
    mode: str,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool = False,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """coords (N, 4) int32 -> code (N * plan_conv_sites(),) int64, of which the first count (1,) int64 are the sorted
    codes in code_shape, at least out_shape, of the sites that a convolution of these voxels reaches."""

def row_order(
    map: Array,
    order: Array,
    *,
    kernel_size: Sequence[int],
    groups: Sequence[int] | None = None,
    phases: Sequence[int] = (1, 1, 1),
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """map (V, N) int32 -> order (sum(groups), N) int32. groups: of 1, Kw and Kw * Kh, into how many groups of V / g
    offsets, one after another, each set of orders cuts the kernel, by default (1,); in a group's order, columns with
    neighbours at the same of its offsets lie side by side, those without any first. Each "segment" of plan_row_orders()
    is sorted, stably, by the Gray-code rank of what the codes of a column's offsets in the order's "keys" make by OR.
    phases: of the map, 1 to 7 along each axis, where a column has neighbours at every phases[axis]-th offset alone, and
    there is one order."""

def ordered_map(
    map: Array,
    order: Array,
    out: Array,
    *,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """map (V, N) int32, order (G, N) int32 with G of 1 or more -> out (G + V, N) int32: order, then the map's columns
    in the first order, out[G + v, s] = map[v, order[0, s]]; -1 where that is none of them."""

def segment_map(
    map: Array,
    order: Array,
    segments: Array,
    *,
    kernel_size: Sequence[int],
    tiles: int,
    in_rows: int,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """map (V, M) int32 with V up to 32, order (M) int32, columns near each other in space side by side -> segments
    int32, for each 64 * tiles columns of order a record as of kernels/segment.h, the columns sorted, stably, by the
    Gray-code rank of their neighbours. tiles: 2 or 4. in_rows: the rows of the map's input. Entries of the map that
    are none of them are no neighbours; entries of order that are no columns are rows -1 at the end of their segment."""

def encode_seq(
    coords: Array,
    code: Array,
    *,
    shape: Sequence[int],
    mode: str = "z_order",
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """coords (N, 4) int32, shape (B, W, H, D) -> code (N) int64, or int32 where sequence_bits() is up to 32; mode is
    "bxyz", "z_order" or "hilbert". Rows outside shape get the code -1, on the CPU they raise."""

def decode_seq(
    code: Array,
    coords: Array,
    *,
    shape: Sequence[int],
    mode: str = "z_order",
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """The way back. Codes of no voxel give (-1, -1, -1, -1), on the CPU they raise."""

def sequence_bits(*, shape: Sequence[int], mode: str = "z_order") -> int:
    """Bits of a code; ValueError where they are more than 64, for "bxyz" more than 63."""

def sort_keys(
    keys: Array,
    order: Array,
    sorted: Array | None,
    *,
    bits: int,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """order (N) int32 = the permutation that sorts the low `bits` bits of keys (N) int32 | int64 as unsigned numbers,
    stably; sorted = keys[order]."""

def hash_insert(
    keys: Array,
    values: Array | None,
    table_keys: Array,
    table_values: Array | None,
    state: Array,
    *,
    shape: Sequence[int] | None = None,
    clear: bool = False,
    replace: bool = False,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """keys (N) of the dtype of table_keys, or voxels (N, 4) int32 of shape (B, W, H, D); values (N) of the dtype of
    table_values, None: the numbers of the rows; table_keys, table_values (S) int32 | int64, the last slot being that of
    the key -1; or table_values None and table_keys (S, 2), slots of a key and its value, either of which may be int32
    in slots of int64 as long as every call says so; state (2) int64. clear empties the table first; with replace keys
    that are there get the new values. A table that is full raises on the CPU; on a GPU state[0] is 1."""

def hash_lookup(
    keys: Array,
    table_keys: Array,
    table_values: Array | None,
    state: Array,
    out: Array,
    *,
    shape: Sequence[int] | None = None,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """out (N) of the dtype of table_values: the value of each key, -1 where there is none."""

def sample_map(
    grid: Array,
    coords: Array,
    indices: Array,
    weights: Array | None,
    *,
    shape: Sequence[int],
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """grid (B, L, 3) or (Q, 4) [batch, x, y, z] float32 and voxels (N, 4) int32 of shape (B, W, H, D) -> indices (Q, 8)
    int32, -1 = no voxel, and weights (Q, 8) float32; without weights the nearest voxel, indices (Q, 1)."""

def sample_forward(
    grid: Array,
    coords: Array,
    feats: Array,
    out: Array,
    *,
    shape: Sequence[int],
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """grid, coords and shape as of sample_map, feats (N, C) -> out (Q, C) = the sums of feats by that map's weights."""

def sample_grad(
    grad_out: Array,
    feats: Array,
    grid: Array,
    indices: Array,
    grad_grid: Array,
    *,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """grad_out (Q, C), feats (N, C), grid (B, L, 3) or (Q, 4), indices (Q, 8) -> grad_grid like grid."""

def gather_sum(
    feats: Array,
    indices: Array,
    weights: Array | None,
    out: Array,
    *,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """feats (N, C), indices (Q, K) int32, weights (Q, K) float32 -> out (Q, C) = sum_k weights feats[indices]; an index
    of -1 is left out."""

def group_rows(
    indices: Array,
    order: Array,
    starts: Array,
    *,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """indices (Q, K) int32 -> order (Q * K) int32, starts (M + 1) int32: order[starts[m]:starts[m + 1]] are the
    positions of the entries m, ascending."""

def group_reduce(
    src: Array,
    order: Array,
    starts: Array,
    weights: Array | None,
    out: Array,
    argmax: Array | None,
    *,
    mode: str = "sum",
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """out[m] = sum, mean or max of weights[i] * src[i // K] over i = order[starts[m]:starts[m + 1]], where order has K
    entries for each row of src (R, C); argmax (M, C) int32: the row of src that a maximum is of."""

def voxel_codes(
    points: Array,
    code: Array,
    places: Array | None,
    *,
    voxel_size: Sequence[float],
    origin: Sequence[float],
    shape: Sequence[int],
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """points (N, 3) or (N, 4) [batch, x, y, z] float32 -> code (N): the "bxyz" number of the voxel
    floor(point / voxel_size - origin), -1 outside shape; int64, or int32 up to 31 bits; places (N, 4) float32."""

def unique_ranks(
    sorted: Array,
    ranks: Array,
    count: Array,
    *,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """sorted (N) int32 | int64, ascending as unsigned numbers -> ranks (N) int32, the distinct keys up to each place;
    count (1) int32, all of them. -1 is not counted."""

def unique_groups(
    sorted: Array,
    order: Array,
    ranks: Array,
    keys: Array,
    starts: Array,
    first: Array,
    counts: Array,
    inverse: Array,
    *,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """keys (M): the distinct keys; starts (M + 1), first (M), counts (M), inverse (N) int32: their rows in order, the
    lowest row, how many, and the number of each row's key."""

def conv_forward(
    feats: Array,
    weight: Array,
    bias: Array | None,
    map: Array,
    out: Array,
    *,
    order: Array | None = None,
    segments: Array | None = None,
    residual: Array | None = None,
    scale_feats: Array | None = None,
    scale_weight: Array | None = None,
    scale_out: Array | None = None,
    order_groups: Sequence[int] | None = None,
    phases: Sequence[int] = (1, 1, 1),
    activation: str | None = None,
    algorithm: str = "auto",
    precision: str = "ieee",
    dtype_feats: str | None = None,
    dtype_weight: str | None = None,
    dtype_out: str | None = None,
    groups: int = 1,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """feats (N, Ci), weight (Co, Kw, Kh, Kd, Ci) or (Co, V, Ci), bias (Co), map (V, M) int32, out (M, Co).
    order (sum(order_groups), M) int32, permutations: sets of orders in which a GPU may work through the rows, for speed
    alone; a set of g has one for each g-th of the offsets. By default `order_groups` is one set of them all. Where the
    first set is 1, order may be what ordered_map() makes of it and the map, (sum(order_groups) + V, M). phases: of
    the map, by which plans know how much an order saves.
    segments: the records of segment_map(), for speed alone, too.
    residual (M, Co), added before the activation ("relu", "silu" or "gelu"); it may be out itself.
    float8 feats and weight have float32 scales, () or (N) and () or (Co), and an out of any floating-point dtype:
    float8 divided by scale_out (), while bias and residual are wider. dtype_feats, dtype_weight and dtype_out say what
    uint8 arrays hold.
    groups of channels, each convolved by itself: weight has Ci / groups."""

def conv_dgrad(
    grad_out: Array,
    weight: Array,
    map: Array,
    grad_feats: Array,
    *,
    order: Array | None = None,
    segments: Array | None = None,
    order_groups: Sequence[int] | None = None,
    phases: Sequence[int] = (1, 1, 1),
    algorithm: str = "auto",
    mirrored: bool = False,
    precision: str = "ieee",
    groups: int = 1,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """grad_out (M, Co), map (V, N), grad_feats (N, Ci); order (sum(order_groups), N), the orders of `map`, its phases
    and its segments, as in the forward pass."""

def conv_wgrad(
    grad_out: Array,
    feats: Array,
    map: Array,
    grad_weight: Array | None,
    grad_bias: Array | None,
    *,
    segments: Array | None = None,
    algorithm: str = "auto",
    precision: str = "ieee",
    groups: int = 1,
    concurrent: bool = False,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """grad_out (M, Co), feats (N, Ci), map (V, M), grad_weight as weight, grad_bias (Co); segments (S, W), the
    records of `map`, which a masked algorithm takes wherever it can. concurrent: it may run beside the operation in
    front of it on the stream, which then neither writes what this one reads nor uses what it writes, workspaces
    included."""

def depthwise_forward(
    feats: Array,
    weight: Array,
    bias: Array | None,
    map: Array,
    out: Array,
    *,
    residual: Array | None = None,
    activation: str | None = None,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """feats (N, C), weight (Co, Kw, Kh, Kd, 1), Co a multiple of C, bias (Co), map (V, M), out (M, Co);
    residual (M, Co) and activation as of conv_forward."""

def depthwise_dgrad(
    grad_out: Array,
    weight: Array,
    map: Array,
    grad_feats: Array,
    *,
    mirrored: bool = False,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """grad_out (M, Co), map (V, N), grad_feats (N, C)."""

def depthwise_wgrad(
    grad_out: Array,
    feats: Array,
    map: Array,
    grad_weight: Array,
    *,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """grad_out (M, Co), feats (N, C), map (V, M), grad_weight as weight."""

def pool(
    feats: Array,
    map: Array,
    out: Array,
    argmax: Array | None,
    count: Array | None,
    *,
    mode: str,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """feats (N, C), map (V, M), out (M, C); mode "max", "mean" or "sum"; argmax (M, C) int32, of max, the row that each
    maximum is from; count (M) int32, the rows there are."""

def pool_backward(
    grad_out: Array,
    map: Array,
    grad_feats: Array,
    argmax: Array | None,
    count: Array | None,
    *,
    mode: str,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """grad_out (M, C), map (V, N) the transposed one, grad_feats (N, C); argmax of max and count of mean as pool gave
    them. Of whole samples: map is batch_indices as (1, N), argmax that of group_reduce and count the starts of
    group_rows, (M + 1)."""

def batch_indices(
    coords: Array,
    batch: Array,
    *,
    samples: int,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """coords (N, 4) int32 -> batch (N, 1) int32, the sample of each row, -1 where it is none of 0 .. samples - 1."""

def gemm(
    a: Array,
    b: Array,
    out: Array,
    *,
    scale_a: Array | None = None,
    scale_b: Array | None = None,
    bias: Array | None = None,
    scale_out: Array | None = None,
    offsets: Array | None = None,
    m_indices: Array | None = None,
    masked_m: Array | None = None,
    weight_indices: Array | None = None,
    layout: str | None = None,
    b_row_major: bool = False,
    expected_m: int = 0,
    alpha: float = 1.0,
    activation: str | None = None,
    accumulate: bool = False,
    promote_every: int | None = 128,
    dtype_a: str | None = None,
    dtype_b: str | None = None,
    dtype_out: str | None = None,
    precision: str = "ieee",
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """out = act(alpha scale_a scale_b A.B^T + bias). `layout`, "dense" by default and "m_grouped" with offsets:

    dense                  a (M, K)     b (N, K)     out (M, N)
    batched                a (G, M, K)  b (G, N, K)  out (G, M, N)
    m_grouped              a (M, K)     b (G, N, K)  out (M, N)     offsets of rows, (G,) or (G + 1,)
    m_grouped_contiguous   the same                                 m_indices (M,)
    m_grouped_masked       a (G, M, K)  b (G, N, K)  out (G, M, N)  masked_m (G,), expected_m a hint
    n_grouped              a (G, M, K)  b (N, K)     out (M, N)     offsets of columns
    k_grouped              a (M, K)     b (N, K)     out (G, M, N)  offsets along K

    b_row_major: b is (..., K, N). weight_indices (G,): group g of m_grouped multiplies b[weight_indices[g]].
    scale_a: () or (1,), (M,) or (M, K / 128) with scale_b (N / 128, K / 128); scale_b likewise with N; a leading G as
    their operands, or (G,). bias (N,), or (G, N) where b has G. activation "swiglu": columns are gate and up in
    turns, out has N / 2. scale_out (): out is float8. dtype_a, dtype_b, dtype_out: the dtype behind uint8 arrays."""

def gemm_direct(a: Array, b: Array, *, out: Array | None = None, **options: Any) -> Any:
    """The same, of torch tensors that can be used as they are: returns out, by default a new tensor, of dtype out_dtype
    or float8_e4m3fn with scale_out, else that of a, bfloat16 for float8. NotImplemented, and nothing done, of other
    libraries' arrays, those that would be copied or are recorded by autograd, and with dtype_a, dtype_b, dtype_out,
    device and stream. `options`: further keywords in a dict, which costs less than **."""

def set_num_sms(num_sms: int | None, /) -> None: ...
def get_num_sms() -> int | None: ...
def quantize(
    x: Array,
    q: Array,
    scale: Array,
    *,
    scale_given: bool = False,
    dtype: str | None = None,
    saturate: bool = True,
    swiglu: bool = False,
    block_rows: int = 0,
    workspace: Workspace = None,
    stream: Stream = None,
) -> int:
    """x (M, K) -> q (M, K) float8; scale float32: () or (1,) per tensor, (M,) per row; with block_rows 1 or 128 one per
    block of that many rows and 128 columns, (..., M / block_rows, K / 128) rounded up, of x (M, K) or (G, M, K).
    swiglu: x has 2 K columns, gate and up in turns. saturate=False: a scale that is computed is infinite where x holds
    an infinity. dtype names a uint8 q."""

def neighbor_map_workspace(*args: Any, **kwargs: Any) -> int: ...
def depthwise_forward_workspace(*args: Any, **kwargs: Any) -> int: ...
def depthwise_dgrad_workspace(*args: Any, **kwargs: Any) -> int: ...
def depthwise_wgrad_workspace(*args: Any, **kwargs: Any) -> int: ...
def pool_workspace(*args: Any, **kwargs: Any) -> int: ...
def pool_backward_workspace(*args: Any, **kwargs: Any) -> int: ...
def batch_indices_workspace(*args: Any, **kwargs: Any) -> int: ...
def conv_sites_workspace(*args: Any, **kwargs: Any) -> int: ...
def row_order_workspace(*args: Any, **kwargs: Any) -> int: ...
def ordered_map_workspace(*args: Any, **kwargs: Any) -> int: ...
def segment_map_workspace(*args: Any, **kwargs: Any) -> int: ...
def encode_seq_workspace(*args: Any, **kwargs: Any) -> int: ...
def decode_seq_workspace(*args: Any, **kwargs: Any) -> int: ...
def sort_keys_workspace(*args: Any, **kwargs: Any) -> int: ...
def hash_insert_workspace(*args: Any, **kwargs: Any) -> int: ...
def hash_lookup_workspace(*args: Any, **kwargs: Any) -> int: ...
def sample_map_workspace(*args: Any, **kwargs: Any) -> int: ...
def sample_forward_workspace(*args: Any, **kwargs: Any) -> int: ...
def sample_grad_workspace(*args: Any, **kwargs: Any) -> int: ...
def gather_sum_workspace(*args: Any, **kwargs: Any) -> int: ...
def group_rows_workspace(*args: Any, **kwargs: Any) -> int: ...
def group_reduce_workspace(*args: Any, **kwargs: Any) -> int: ...
def voxel_codes_workspace(*args: Any, **kwargs: Any) -> int: ...
def unique_ranks_workspace(*args: Any, **kwargs: Any) -> int: ...
def unique_groups_workspace(*args: Any, **kwargs: Any) -> int: ...
def conv_forward_direct(feats: Array, weight: Array, bias: Array | None, map: Array, **options: Any) -> Any:
    """To conv_forward what gemm_direct is to gemm. kernel_size, rows: the neighbour map's, of weight and feats."""

def conv_forward_workspace(*args: Any, **kwargs: Any) -> int: ...
def conv_dgrad_workspace(*args: Any, **kwargs: Any) -> int: ...
def conv_wgrad_workspace(*args: Any, **kwargs: Any) -> int: ...
def gemm_workspace(*args: Any, **kwargs: Any) -> int: ...
def quantize_workspace(*args: Any, **kwargs: Any) -> int: ...
def plan_order_sets(*, rows: int, kernel_size: Sequence[int], phases: Sequence[int] = (1, 1, 1)) -> tuple[int, ...]: ...
def plan_row_orders(
    *, rows: int, kernel_size: Sequence[int], groups: Sequence[int], phases: Sequence[int] = (1, 1, 1)
) -> dict[str, Any]: ...
def plan_segment_tiles(*, rows: int, num_sms: int) -> int: ...
def segment_words(*, tiles: int, v: int) -> int: ...
def plan_voxel_table(*, rows: int, shape: Sequence[int]) -> str: ...
def plan_conv_sites(
    *, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int], transposed: bool = False
) -> int: ...
def plan_phases(
    *, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, int, int]: ...
def plan_conv(
    *,
    rows: int,
    ci: int,
    co: int,
    v: int,
    dtype: str,
    num_sms: int,
    compute_capability: int = 80,
    precision: str = "ieee",
    algorithm: str = "auto",
    groups: Sequence[int] | None = None,
    phases: Sequence[int] = (1, 1, 1),
    channel_groups: int = 1,
    segment_tiles: int = 0,
    gradient: bool = False,
) -> dict[str, Any]: ...
def plan_conv_wgrad(
    *,
    rows: int,
    ci: int,
    co: int,
    v: int,
    dtype: str,
    num_sms: int,
    compute_capability: int = 80,
    algorithm: str = "auto",
    segment_tiles: int = 0,
) -> dict[str, Any]: ...
def plan_gemm(*, m: int, n: int, k: int, groups: int, dtype: str, num_sms: int) -> dict[str, Any]: ...
def plan_gemm_sm90(
    *, m: int, n: int, k: int, groups: int, dtype: str, num_sms: int, tiles: int = 0
) -> dict[str, Any]: ...
