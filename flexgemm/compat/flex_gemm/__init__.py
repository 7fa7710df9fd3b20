"""FlexGEMM's public names over flexgemm: `flexgemm.compat.install("flex_gemm")`."""

import os

from flexgemm.compat.flex_gemm import kernels, ops, utils

# Where FlexGEMM keeps what it tuned. flexgemm tunes nothing: the file is neither read nor written.
USE_AUTOTUNE_CACHE = AUTOSAVE_AUTOTUNE_CACHE = False
AUTOTUNE_CACHE_PATH = os.path.expanduser("~/.flex_gemm/autotune_cache.json")

__all__ = ["AUTOSAVE_AUTOTUNE_CACHE", "AUTOTUNE_CACHE_PATH", "USE_AUTOTUNE_CACHE", "kernels", "ops", "utils"]
