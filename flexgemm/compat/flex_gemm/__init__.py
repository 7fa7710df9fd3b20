"""FlexGEMM's public names over flexgemm: `flexgemm.compat.install("flex_gemm")`."""

from flexgemm.compat.flex_gemm import kernels, ops, utils

__all__ = ["kernels", "ops", "utils"]
