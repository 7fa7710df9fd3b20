"""Modules of torch.nn that work on each voxel's features alone, on a SparseTensor."""

from __future__ import annotations

from typing import Any

import torch

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
        of_rows: Any = super()
        return x.replace(of_rows.forward(x.feats)) if isinstance(x, SparseTensor) else of_rows.forward(x)


class BatchNorm(_OfFeatures, torch.nn.BatchNorm1d):
    """torch.nn.BatchNorm1d over all voxels of the batch."""


class SyncBatchNorm(_OfFeatures, torch.nn.SyncBatchNorm):
    """torch.nn.SyncBatchNorm over all voxels of the batch, of all processes."""


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
