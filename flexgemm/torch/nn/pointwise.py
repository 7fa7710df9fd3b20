"""Modules of torch.nn that work on each voxel's features alone, on a SparseTensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from flexgemm.torch.nn.tensor import SparseTensor


class Features(torch.nn.Module):
    """Any module of (N, C) features on a SparseTensor: Features(torch.nn.Softplus())."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: SparseTensor) -> SparseTensor:
        return x.replace(self.module(x.feats))


class _OfFeatures:
    """In front of a module of torch.nn: its parameters and their names stay what they are."""

    def forward(self, x: Any) -> Any:
        if isinstance(x, SparseTensor):
            return x.replace(super().forward(x.feats))  # type: ignore[misc]
        return super().forward(x)  # type: ignore[misc]


class BatchNorm(_OfFeatures, torch.nn.BatchNorm1d):
    """torch.nn.BatchNorm1d over all voxels of the batch."""


class _Total(torch.autograd.Function):
    """The sum over processes of what each has; the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        value = value.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Total.apply(grad, ctx.group), None


class SyncBatchNorm(BatchNorm):
    """BatchNorm over all voxels of the batch, of all processes: torch.nn.SyncBatchNorm, but on the CPU too, where torch
    has none, and without a wait for the GPU. A process may have no voxels.

    process_group: the processes, by default all. The other arguments are those of BatchNorm.
    """

    def __init__(self, *args: Any, process_group: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.process_group = process_group

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
        """The module, in which every BatchNorm and torch.nn.BatchNorm1d has become a SyncBatchNorm."""
        for layer in module.modules():
            if isinstance(layer, torch.nn.BatchNorm1d):
                layer.__class__, layer.process_group = cls, process_group
        return module

    def forward(self, x: Any) -> Any:
        alone = not (distributed.is_available() and distributed.is_initialized())
        if alone or not self.training or distributed.get_world_size(self.process_group) == 1:
            return super().forward(x)
        return x.replace(self._of_all(x.feats)) if isinstance(x, SparseTensor) else self._of_all(x)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _of_all(self, feats: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(feats)
        rows = feats.to(torch.promote_types(feats.dtype, torch.float32)).movedim(1, -1)  # (N, C), or (N, L, C)
        along = tuple(range(rows.ndim - 1))
        number = rows.new_full((1,), rows[..., 0].numel())
        sums = _Total.apply(torch.cat([rows.sum(along), number]), self.process_group)
        mean, count = sums[:-1] / sums[-1], sums[-1].detach()
        variance = _Total.apply((rows - mean).square().sum(along), self.process_group) / count

        if self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None:
            self.num_batches_tracked.add_(1)
            with torch.no_grad():
                share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
                dtype = self.running_mean.dtype
                self.running_mean.lerp_(mean.to(dtype), share)
                self.running_var.lerp_((variance * count / (count - 1)).to(dtype), share)

        y = (rows - mean) * (variance + self.eps).rsqrt()
        y = y if self.weight is None else y * self.weight
        y = y if self.bias is None else y + self.bias
        return y.movedim(-1, 1).to(feats.dtype)


class LayerNorm(_OfFeatures, torch.nn.LayerNorm):
    """torch.nn.LayerNorm over each voxel's channels."""


class Linear(_OfFeatures, torch.nn.Linear):
    """torch.nn.Linear of each voxel's channels."""


class Dropout(_OfFeatures, torch.nn.Dropout):
    """torch.nn.Dropout."""


class ReLU(_OfFeatures, torch.nn.ReLU):
    """torch.nn.ReLU."""


class LeakyReLU(_OfFeatures, torch.nn.LeakyReLU):
    """torch.nn.LeakyReLU."""


class SiLU(_OfFeatures, torch.nn.SiLU):
    """torch.nn.SiLU."""


class GELU(_OfFeatures, torch.nn.GELU):
    """torch.nn.GELU."""
