"""flexgemm for torch: operations that autograd records."""

from flexgemm.torch.ops import sparse_conv3d, sparse_inverse_conv3d, submanifold_conv3d

__all__ = ["sparse_conv3d", "sparse_inverse_conv3d", "submanifold_conv3d"]
