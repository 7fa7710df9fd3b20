"""Benchmarks of flexgemm: `python -m benchmarks` runs what this machine can. docs/performance.md explains them."""
