"""flexgemm for torch: operations that autograd records."""

from flexgemm.torch.ops import grid_sample_3d, submanifold_conv3d

__all__ = ["grid_sample_3d", "submanifold_conv3d"]
