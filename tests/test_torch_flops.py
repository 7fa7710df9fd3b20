"""torch's FLOP counter: products and convolutions count as torch's own dense ones of the same shape."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch not installed")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import flexgemm  # noqa: E402
import flexgemm.torch as ft  # noqa: E402
import flexgemm.torch.flops  # noqa: E402, F401
import flexgemm.torch.nn as fnn  # noqa: E402

M, N, K, G = 12, 16, 32, 3


def counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_a_product_and_its_gradients():
    a, b = torch.randn(M, K, requires_grad=True), torch.randn(N, K, requires_grad=True)
    assert counted(lambda: ft.gemm_nt(a, b)) == 2 * M * N * K
    assert counted(lambda: ft.gemm_nt(a, b.detach().t().contiguous(), b_row_major=True)) == 2 * M * N * K
    assert counted(lambda: ft.gemm_nt(a, b).sum().backward()) == 3 * 2 * M * N * K
    out = torch.empty(M, N)
    row_major = b.detach().t().contiguous()
    assert counted(lambda: ft.gemm_nt(a.detach(), b.detach(), out=out)) == 2 * M * N * K
    assert counted(lambda: ft.gemm_nt(a.detach(), row_major, out=out, b_row_major=True)) == 2 * M * N * K


def test_products_of_groups():
    a, b = torch.randn(G, M, K), torch.randn(G, N, K)
    ends = torch.tensor([4, 4, M], dtype=torch.int32)
    assert counted(lambda: ft.batched_gemm_nt(a, b)) == 2 * G * M * N * K
    assert counted(lambda: ft.m_grouped_gemm_nt(a[0], b, ends)) == 2 * M * N * K
    assert counted(lambda: ft.m_grouped_gemm_nt_masked(a, b, ends)) == 2 * G * M * N * K
    assert counted(lambda: ft.k_grouped_wgrad_gemm_nt(torch.randn(M, K), torch.randn(N, K), ends)) == 2 * M * N * K
    x, weight = a[0].clone().requires_grad_(), b.clone().requires_grad_()
    assert counted(lambda: ft.m_grouped_gemm_nt(x, weight, ends).sum().backward()) == 3 * 2 * M * N * K
    assert counted(lambda: ft.m_grouped_gemm_nt(x.detach(), weight, ends).sum().backward()) == 2 * 2 * M * N * K


@pytest.mark.parametrize("fp8", [False, True])
def test_layers_of_experts(fp8):
    layer, ends = fnn.GroupedLinear(G, K, N, fp8=fp8), torch.tensor([4, 4, M])
    x = torch.randn(M, K, requires_grad=True)
    assert counted(lambda: layer(x, ends).sum().backward()) == 3 * 2 * M * N * K
    assert counted(lambda: layer.frozen()(x, ends).sum().backward()) == 2 * 2 * M * N * K


def test_a_convolution_and_its_gradients():
    coords = torch.tensor([[0, 0, y, 0] for y in range(5)], dtype=torch.int32)
    nmap = ft.neighbor_map(coords, (1, 1, 5, 1), 3)
    feats, weight = torch.randn(5, 8, requires_grad=True), torch.randn(6, 3, 3, 3, 8, requires_grad=True)
    dense = 2 * 5 * 27 * 8 * 6
    assert counted(lambda: ft.submanifold_conv3d(feats, weight, neighbor_map=nmap)) == dense
    assert counted(lambda: ft.submanifold_conv3d(feats, weight, neighbor_map=nmap).sum().backward()) == 3 * dense
    fixed = feats.detach()
    assert counted(lambda: ft.submanifold_conv3d(fixed, weight, neighbor_map=nmap).sum().backward()) == 2 * dense
    strided = flexgemm.sparse_conv_map(coords, (1, 1, 5, 1), (1, 2, 1), (1, 2, 1))
    kernel = torch.randn(6, 1, 2, 1, 8, requires_grad=True)
    dense_strided = 2 * 2 * 2 * 8 * 6  # of two outputs
    assert counted(lambda: ft.sparse_conv3d(feats, kernel, neighbor_map=strided)) == dense_strided
    assert counted(lambda: ft.sparse_conv3d(feats, kernel, neighbor_map=strided).sum().backward()) == 3 * dense_strided
    narrow = (x.detach().to(torch.float8_e4m3fn) for x in (torch.ones(5, 16), torch.ones(6, 3, 3, 3, 16)))
    assert counted(lambda: ft.submanifold_conv3d(*narrow, neighbor_map=nmap)) == 2 * dense
