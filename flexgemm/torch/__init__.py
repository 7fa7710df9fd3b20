"""flexgemm for torch: operations that autograd records."""

from flexgemm.torch.ops import (
    global_pool,
    grid_sample_3d,
    sparse_conv3d,
    sparse_inverse_conv3d,
    sparse_pool3d,
    sparse_upsample3d,
    submanifold_conv3d,
)

__all__ = [
    "global_pool",
    "grid_sample_3d",
    "sparse_conv3d",
    "sparse_inverse_conv3d",
    "sparse_pool3d",
    "sparse_upsample3d",
    "submanifold_conv3d",
]
