"""What tests of programs written against FlexGEMM share."""

from __future__ import annotations

import pytest
import reference
import scenes
import verdicts

torch = pytest.importorskip("torch", reason="torch not installed")
from flexgemm.compat.flex_gemm.ops.spconv import sparse_submanifold_conv3d  # noqa: E402

# On a GPU float32 products are of operands rounded to TF32, as FlexGEMM's: each within 2^-10 of itself. The sums of a
# row with few channels may cancel to half their size.
TF32 = 2e-3


class Scene:
    def __init__(self, device, n=200, ci=5, co=7, kernel_size=(3, 3, 3), batch=2):
        self.coords_np, grid = scenes.scene(n, batch=batch)
        self.grid = grid
        self.coords = torch.from_numpy(self.coords_np).to(device)
        self.shape = torch.Size([batch, ci, *grid[1:]])
        torch.manual_seed(0)
        sizes = (n, ci), (co, *kernel_size, ci), (co,)
        self.feats, self.weight, self.bias = (torch.randn(s, device=device).requires_grad_() for s in sizes)
        on_gpu = torch.device(device).type == "cuda"
        self.tolerance = TF32 if on_gpu else verdicts.ROW_TOLERANCE["float32"]
        self.map = reference.neighbor_map(self.coords_np, grid, kernel_size)

    def expected(self, bias=True):
        feats, weight = numpy(self.feats), numpy(self.weight)
        return reference.conv_forward(feats, weight, numpy(self.bias) if bias else None, self.map)

    def check(self, cache):
        """A submanifold convolution by a cache of the scene's map, forward and backward."""
        self.feats.grad = self.weight.grad = self.bias.grad = None
        out, again = sparse_submanifold_conv3d(self.feats, self.coords, self.shape, self.weight, self.bias, cache)
        assert again is cache
        verdicts.assert_rows(numpy(out), self.expected(), self.tolerance)
        out.backward(torch.ones_like(out))
        self.check_gradients(torch.ones_like(out))

    def check_gradients(self, grad_out, bias=True):
        grad_weight, grad_bias = reference.conv_wgrad(numpy(grad_out), numpy(self.feats), self.map)
        grad_feats = reference.conv_dgrad(numpy(grad_out), numpy(self.weight), self.map, len(self.feats))
        verdicts.assert_rows(numpy(self.feats.grad), grad_feats, TF32)
        verdicts.assert_rows(numpy(self.weight.grad).reshape(grad_weight.shape), grad_weight, TF32)
        if bias:
            verdicts.assert_rows(numpy(self.bias.grad)[None], grad_bias[None], TF32)


def numpy(x):
    return x.detach().cpu().double().numpy()


def signed(x):
    """(N, V) uint32 as flexgemm's map (V, N) int32."""
    return x.view(torch.int32).t().cpu().numpy()


def empty_table(device, slots=400, key_dtype=torch.uint32, value_dtype=torch.uint32):
    keys = torch.full((slots,), torch.iinfo(key_dtype).max, dtype=key_dtype, device=device)
    return [keys, torch.empty(slots, dtype=value_dtype, device=device)]
