"""flexgemm for torch: operations that autograd records."""

from flexgemm.torch.ops import submanifold_conv3d

__all__ = ["submanifold_conv3d"]
