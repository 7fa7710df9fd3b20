"""Modules of torch.nn that work on each voxel's features alone, on a SparseTensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.nn import functional

from flexgemm.torch.autograd import no_gradient, recorded, records
from flexgemm.torch.nn.tensor import SparseTensor, expect_sparse


class Features(torch.nn.Module):
    """Any module of (N, C) features on a SparseTensor: Features(torch.nn.Softplus())."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: SparseTensor) -> SparseTensor:
        expect_sparse(x, "x")
        return x.replace(self.module(x.feats))


class _OfFeatures:
    """In front of a module of torch.nn: its parameters and their names stay what they are."""

    def forward(self, x: Any) -> Any:
        if isinstance(x, SparseTensor):
            return x.replace(super().forward(x.feats))  # type: ignore[misc]
        return super().forward(x)  # type: ignore[misc]


class BatchNorm(_OfFeatures, torch.nn.BatchNorm1d):
    """torch.nn.BatchNorm1d over all voxels of the batch."""


class _NormalisedByAll(torch.autograd.Function):
    """x normalised by the mean and variance of the rows of all processes, and these two with the number of rows. The
    kernels are those of BatchNorm, between them one small sum over the processes on the way there and one on the way
    back. Those of statistics and gradients take no x without rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, group: Any) -> Any:
        # The means, variances and number of rows of each process, in a place of its own, so that a sum gathers them.
        parts = weight.new_zeros(distributed.get_world_size(group), 3, len(weight))
        if x.numel():
            own, running = parts[distributed.get_rank(group)], torch.zeros_like(weight)  # its dtype is that of sums
            own[0], own[1] = torch.batch_norm_update_stats(x, running, running, 0.0)
            own[2] = x[:, 0].numel()
        distributed.all_reduce(parts, group=group)
        means, variances, counts = parts.unbind(1)
        count = counts.sum(0)
        shares = counts / count.clamp_min(1)
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean).square())).sum(0)
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.eps, ctx.group = eps, group
        ctx.mark_non_differentiable(mean, variance, count)
        y = functional.batch_norm(x, mean, variance, weight, bias, eps=eps)
        return y, mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        tensors = grad, *ctx.saved_tensors
        function: Any = _record_gradients if records(*tensors) else _gradients
        return *function(*tensors, ctx.eps, ctx.group), None, None


def _gradients(grad: Any, x: Any, weight: Any, mean: Any, variance: Any, count: Any, eps: float, group: Any) -> Any:
    """In x, weight and bias."""
    inverse = (variance + eps).rsqrt()
    of_parameters = weight.new_zeros(2, len(weight))
    if x.numel():
        saved, wanted = (mean, inverse, True, eps), (False, True, True)
        _, *sums = torch.ops.aten.native_batch_norm_backward(grad, x, weight, None, None, *saved, wanted)
        of_parameters = torch.stack(sums)
    of_all = of_parameters.clone()
    distributed.all_reduce(of_all, group=group)

    # grad_x = scale * (grad - what the mean of its rows and of its rows times the normalised ones take away)
    scale = weight * inverse
    factor, offset = -scale / count * of_all
    grad_x = functional.batch_norm(x, mean, variance, factor, offset, eps=eps)
    grad_x.addcmul_(grad, scale.view(-1, *[1] * (x.ndim - 2)))
    return grad_x, *of_parameters


_record_gradients = recorded("SyncBatchNormGradients", _gradients, None, no_gradient)


class SyncBatchNorm(BatchNorm):
    """BatchNorm over all voxels of the batch, of all processes: torch.nn.SyncBatchNorm, but on the CPU too, where torch
    has none, and without a wait for the GPU. A process may have no voxels. Differentiable once.

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
        dtype = torch.promote_types(feats.dtype, torch.float32)
        weight = feats.new_ones(self.num_features, dtype=dtype) if self.weight is None else self.weight.to(dtype)
        bias = torch.zeros_like(weight) if self.bias is None else self.bias.to(dtype)
        y, mean, variance, count = _NormalisedByAll.apply(feats, weight, bias, self.eps, self.process_group)

        if self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None:
            self.num_batches_tracked.add_(1)
            share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
            share = (count > 0).to(self.running_mean.dtype) * share  # of no rows nothing is learnt
            self.running_mean.lerp_(mean.to(share.dtype), share)
            self.running_var.lerp_((variance * count / (count - 1).clamp_min(1)).to(share.dtype), share)
        return y


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
