"""`make bench`: what this machine can measure. The CPU always; convolution, products, voxels and overhead on a GPU."""

from __future__ import annotations

import argparse
import sys

import flexgemm
from benchmarks import cpu


def main() -> int:
    argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__).parse_args()
    cpu.main(["--write"])
    if flexgemm.device_count() == 0:
        print("no CUDA device: GPU benchmarks are left out")
        return 0
    from benchmarks import gpu_check

    statuses = [gpu_check.main(["--step", step]) for step in ("conv", "gemm", "voxel", "overhead")]
    return 1 if 1 in statuses else max(statuses)


if __name__ == "__main__":
    sys.exit(main())
