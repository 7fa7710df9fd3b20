"""The operations as operators of torch.library, for whoever looks into a program instead of running it: torch.compile,
torch.export, dispatch modes, subclasses of Tensor. `torch.ops.flexgemm` holds them.

Each has what it computes on a CPU or a GPU (the array-neutral function), the shape and dtype of its result for tensors
without memory, and its gradient, made of operators again. ops.py calls them. They take a NeighborMap as its tensors,
dtypes by name, and precision None for torch's setting at the time when they run.
"""

from flexgemm.torch.operators.codes import decode_seq, encode_seq, sort_coords
from flexgemm.torch.operators.convolution import (
    neighbor_map,
    row_order,
    sparse_conv3d,
    sparse_conv3d_backward,
    sparse_conv3d_float8,
)
from flexgemm.torch.operators.experts import (
    float8_experts,
    float8_experts_operator,
    frozen_experts,
    frozen_experts_operator,
)
from flexgemm.torch.operators.pooling import (
    broadcast_samples,
    by_products,
    global_pool,
    sparse_pool3d,
    sparse_pool3d_backward,
)
from flexgemm.torch.operators.products import (
    GROUPING,
    m_grouped_gradients,
    m_grouped_gradients_operator,
    of_gradients,
    product,
    product_into,
    quantize,
)
from flexgemm.torch.operators.sampling import (
    devoxelize,
    grid_sample_3d,
    grid_sample_3d_backward,
    group_points,
    reduce_points,
    reduced_points_gradient,
    reduced_points_gradient_operator,
    unique_coords,
)

__all__ = [
    "GROUPING",
    "broadcast_samples",
    "by_products",
    "decode_seq",
    "devoxelize",
    "encode_seq",
    "float8_experts",
    "float8_experts_operator",
    "frozen_experts",
    "frozen_experts_operator",
    "global_pool",
    "grid_sample_3d",
    "grid_sample_3d_backward",
    "group_points",
    "m_grouped_gradients",
    "m_grouped_gradients_operator",
    "neighbor_map",
    "of_gradients",
    "product",
    "product_into",
    "quantize",
    "reduce_points",
    "reduced_points_gradient",
    "reduced_points_gradient_operator",
    "row_order",
    "sort_coords",
    "sparse_conv3d",
    "sparse_conv3d_backward",
    "sparse_conv3d_float8",
    "sparse_pool3d",
    "sparse_pool3d_backward",
    "unique_coords",
]
