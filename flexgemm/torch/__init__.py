"""flexgemm for torch: operations that autograd records."""

from flexgemm.torch.ops import (
    devoxelize,
    global_pool,
    grid_sample_3d,
    reduce_points,
    sparse_conv3d,
    sparse_inverse_conv3d,
    sparse_pool3d,
    sparse_upsample3d,
    submanifold_conv3d,
)

__all__ = [
    "devoxelize",
    "global_pool",
    "grid_sample_3d",
    "reduce_points",
    "sparse_conv3d",
    "sparse_inverse_conv3d",
    "sparse_pool3d",
    "sparse_upsample3d",
    "submanifold_conv3d",
]
