"""Modules for sparse voxel networks and mixtures of experts."""

from flexgemm.torch.nn.conv import SparseConv3d, SparseConvTranspose3d, SparseInverseConv3d, SubMConv3d
from flexgemm.torch.nn.convert import from_minkowski, from_spconv, from_torchsparse
from flexgemm.torch.nn.experts import Float8GroupedLinear, GroupedLinear
from flexgemm.torch.nn.normalization import GroupNorm, InstanceNorm
from flexgemm.torch.nn.pointwise import (
    GELU,
    BatchNorm,
    Dropout,
    Features,
    LayerNorm,
    LeakyReLU,
    Linear,
    ReLU,
    SiLU,
    SyncBatchNorm,
)
from flexgemm.torch.nn.pooling import GlobalPool, SparsePool3d, SparseUpsample3d
from flexgemm.torch.nn.tensor import Sites, SparseTensor, cat

__all__ = [
    "GELU",
    "BatchNorm",
    "Dropout",
    "Features",
    "Float8GroupedLinear",
    "GlobalPool",
    "GroupNorm",
    "GroupedLinear",
    "InstanceNorm",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "ReLU",
    "SiLU",
    "Sites",
    "SparseConv3d",
    "SparseConvTranspose3d",
    "SparseInverseConv3d",
    "SparsePool3d",
    "SparseTensor",
    "SparseUpsample3d",
    "SubMConv3d",
    "SyncBatchNorm",
    "cat",
    "from_minkowski",
    "from_spconv",
    "from_torchsparse",
]
