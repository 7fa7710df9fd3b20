"""flex_gemm.ops.spconv: sparse convolution.

Programs assign the module's globals from outside. SERIALIZATION_MODE is the order of the outputs of a strided layer.
flexgemm plans by itself, and its results do not depend on the algorithm or on how outputs are found: ALGORITHM is kept
and checked at each call, HASHMAP_RATIO, OUT_COORD_HASHMAP_RATIO and OUT_COORD_ALGO are kept.
"""

from __future__ import annotations


class Algorithm:
    EXPLICIT_GEMM = "explicit_gemm"
    IMPLICIT_GEMM = "implicit_gemm"
    IMPLICIT_GEMM_SPLITK = "implicit_gemm_splitk"
    MASKED_IMPLICIT_GEMM = "masked_implicit_gemm"
    MASKED_IMPLICIT_GEMM_SPLITK = "masked_implicit_gemm_splitk"


class SerializationMode:
    """How output coordinates are sorted."""

    BXYZ = 0
    Z_ORDER = 1
    HILBERT = 2


class SparseConv3dOutCoordAlgorithm:
    HASHMAP = 0
    EXPAND_UNIQUE = 1


ALGORITHM = Algorithm.MASKED_IMPLICIT_GEMM_SPLITK
HASHMAP_RATIO = 2.0
OUT_COORD_HASHMAP_RATIO = 1.1
OUT_COORD_ALGO = SparseConv3dOutCoordAlgorithm.HASHMAP
SERIALIZATION_MODE = SerializationMode.BXYZ


def set_algorithm(algorithm: str) -> None:
    global ALGORITHM
    ALGORITHM = algorithm


def set_hashmap_ratio(ratio: float) -> None:
    global HASHMAP_RATIO
    HASHMAP_RATIO = ratio


# These read the globals above through the module.
from flexgemm.compat.flex_gemm.ops.spconv.sparse_conv3d import SparseConv3dFunction, sparse_conv3d  # noqa: E402
from flexgemm.compat.flex_gemm.ops.spconv.submanifold_conv3d import (  # noqa: E402
    SpConvConfig,
    SubMConv3dFunction,
    SubMConv3dNeighborCache,
    sparse_submanifold_conv3d,
)

__all__ = [
    "ALGORITHM",
    "HASHMAP_RATIO",
    "OUT_COORD_ALGO",
    "OUT_COORD_HASHMAP_RATIO",
    "SERIALIZATION_MODE",
    "Algorithm",
    "SerializationMode",
    "SpConvConfig",
    "SparseConv3dFunction",
    "SparseConv3dOutCoordAlgorithm",
    "SubMConv3dFunction",
    "SubMConv3dNeighborCache",
    "set_algorithm",
    "set_hashmap_ratio",
    "sparse_conv3d",
    "sparse_submanifold_conv3d",
]
