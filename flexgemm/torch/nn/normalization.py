"""Normalisation over all voxels of each sample."""

from __future__ import annotations

from typing import Any

import torch

from flexgemm.torch import pooling
from flexgemm.torch.nn.tensor import SparseTensor, expect_sparse


class GroupNorm(torch.nn.GroupNorm):
    """torch.nn.GroupNorm: the mean and variance of a group are those of all voxels of a sample and the channels of the
    group. Computed in float32, returned in the dtype of the features."""

    def forward(self, x: SparseTensor) -> SparseTensor:  # type: ignore[override]
        expect_sparse(x, "x")
        if x.feats.shape[1] != self.num_channels:
            raise ValueError(f"x: expected {self.num_channels} channels, got {x.feats.shape[1]}")
        if not x.feats.is_floating_point():
            raise TypeError(f"x: expected features of floats, got {x.dtype}")
        feats = x.feats.float()
        centred = feats - self._of_groups(feats, x)
        scale = torch.rsqrt(self._of_groups(centred.square(), x) + self.eps)
        feats = centred * scale
        if self.weight is not None:
            feats = feats * self.weight
        if self.bias is not None:
            feats = feats + self.bias
        return x.replace(feats.to(x.dtype))

    def _of_groups(self, feats: torch.Tensor, x: SparseTensor) -> torch.Tensor:
        """The mean of each sample and group, (N, C)."""
        mean = pooling.global_pool(feats, x.coords, x.batch_size, "mean")
        if self.num_groups < self.num_channels:
            groups = mean.unflatten(1, (self.num_groups, -1))
            mean = groups.mean(2, keepdim=True).expand_as(groups).flatten(1)
        return pooling.broadcast_samples(mean, x.coords)


class InstanceNorm(GroupNorm):
    """torch.nn.InstanceNorm3d without running statistics: the mean and variance of each sample and channel."""

    def __init__(self, num_features: int, eps: float = 1e-5, *, affine: bool = False, **options: Any) -> None:
        super().__init__(num_features, num_features, eps, affine, **options)
