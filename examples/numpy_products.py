"""flexgemm on NumPy arrays alone: a submanifold convolution with its gradients, and an FP8 product.

    python examples/numpy_products.py [cuda]

With "cuda" the same NumPy arrays are computed on the GPU and come back as NumPy arrays.
"""

import sys

import numpy as np

import flexgemm


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    rng = np.random.default_rng(0)

    # 5,000 different voxels of a 32 x 32 x 32 grid: rows [batch, x, y, z].
    sites = rng.choice(32**3, 5000, replace=False)
    coords = np.stack([np.zeros_like(sites), *np.unravel_index(sites, (32, 32, 32))], 1).astype(np.int32)
    neighbor_map = flexgemm.neighbor_map(coords, (1, 32, 32, 32), kernel_size=3, device=device)
    print(neighbor_map, f"with {neighbor_map.num_pairs} pairs")

    feats = rng.standard_normal((5000, 16), np.float32)
    weight = rng.standard_normal((32, 3, 3, 3, 16), np.float32)
    bias = rng.standard_normal(32, np.float32)
    out = flexgemm.submanifold_conv3d(feats, weight, bias, neighbor_map=neighbor_map)
    print("convolution:", feats.shape, "->", out.shape, out.dtype)
    gradients = flexgemm.submanifold_conv3d_backward(out, feats, weight, neighbor_map=neighbor_map)
    print("gradients of ||out||^2 / 2:", *(gradient.shape for gradient in gradients if gradient is not None))

    # x ~ q * scale with one scale per row; the product takes the FP8 arrays and the scales.
    a, b = rng.standard_normal((256, 1024), np.float32), rng.standard_normal((128, 1024), np.float32)
    qa, scale_a = flexgemm.quantize(a, "float8_e4m3fn", granularity="row", device=device)
    qb, scale_b = flexgemm.quantize(b, "float8_e4m3fn", granularity="row", device=device)
    product = flexgemm.gemm_nt(qa, qb, scale_a=scale_a, scale_b=scale_b, out_dtype="float32", device=device)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    print(
        f"FP8 product: relative error {np.linalg.norm(product - exact) / np.linalg.norm(exact):.1%} of the cast to FP8"
    )


if __name__ == "__main__":
    main()
