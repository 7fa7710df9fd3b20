"""CPU convolution beside NumPy's own matrix product: float32, the same threads, taken in turns in one run.

Each library has threads of its own, which look for work for a while after a call (OpenBLAS's for .1 s) and take
the processors from whoever comes next. So a call is repeated until those of the call before sleep, and then timed.

    python -m benchmarks.cpu            prints useful GFLOP/s and their ratio to NumPy's 2048^3 product
    python -m benchmarks.cpu --write    also writes benchmarks/results/cpu.json

OMP_NUM_THREADS sets the threads of both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import flexgemm
from benchmarks import results, scenes

RES, CHANNELS = 64, 64
SIDE = 2048
ROUNDS = 15
SETTLE_SECONDS = 0.3  # until the threads of another library sleep


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_seconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The median of each call, taken in turns so that all meet the same load."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            settled = time.perf_counter() + SETTLE_SECONDS
            while time.perf_counter() < settled:
                call()
            times[name].append(seconds(call))
    return {name: statistics.median(taken) for name, taken in times.items()}


def judge(scene: scenes.Scene, feats: Any, weight: Any, bias: Any, grad_out: Any, out: Any, grads: Any) -> None:
    """Some rows of the output against float64, and of the gradients that <grad_out, the product> is <grad_feats, feats>
    and <grad_weight, weight>. Raises ValueError."""
    rows = np.random.default_rng(1).choice(scene.n, 64, replace=False)
    expected = np.tile(bias.astype(np.float64), (len(rows), 1))
    for v, taps in enumerate(weight.reshape(CHANNELS, scene.volume, CHANNELS).transpose(1, 2, 0).astype(np.float64)):
        near = scene.neighbors(v, rows)
        expected += np.where(near[:, None] >= 0, feats[near], 0) @ taps
    pairs = {"out": (out[rows], expected), "grad_bias": (grads[2], grad_out.sum(0, dtype=np.float64))}
    product = np.vdot(grad_out.astype(np.float64), out - bias.astype(np.float64))
    for name, grad, factor in ("grad_feats", grads[0], feats), ("grad_weight", grads[1], weight):
        pairs[name] = np.vdot(grad.astype(np.float64), factor), product
    for name, (got, exact) in pairs.items():
        if not np.linalg.norm(got - exact) <= 1e-5 * np.linalg.norm(exact):
            raise ValueError(f"{name}: not what it should be, not timed")


def measure() -> list[results.Row]:
    rng = np.random.default_rng(0)
    scene = scenes.sphere(RES)
    feats, grad_out = (rng.standard_normal((scene.n, CHANNELS), dtype=np.float32) for _ in range(2))
    weight = rng.standard_normal((CHANNELS, 3, 3, 3, CHANNELS), dtype=np.float32)
    bias = rng.standard_normal(CHANNELS, dtype=np.float32)
    a, b = (rng.standard_normal((SIDE, SIDE), dtype=np.float32) for _ in range(2))
    nmap = flexgemm.neighbor_map(scene.coords, scene.shape)
    out = flexgemm.submanifold_conv3d(feats, weight, bias, neighbor_map=nmap)
    grads = flexgemm.submanifold_conv3d_backward(grad_out, feats, weight, neighbor_map=nmap)
    judge(scene, feats, weight, bias, grad_out, out, grads)
    medians = median_seconds(
        {
            "map": lambda: flexgemm.neighbor_map(scene.coords, scene.shape),
            "fwd": lambda: flexgemm.submanifold_conv3d(feats, weight, bias, neighbor_map=nmap),
            "bwd": lambda: flexgemm.submanifold_conv3d_backward(grad_out, feats, weight, neighbor_map=nmap),
            "numpy": lambda: a @ b,
        }
    )
    threads = {"threads": flexgemm.device_info("cpu")["num_sms"]}
    numpy_gflops = 2e-9 * SIDE**3 / medians["numpy"]
    figure = {"ms": results.significant(1e3 * medians["numpy"]), "gflops": round(numpy_gflops, 1)}
    product = {"suite": "cpu", "op": "matmul", "dtype": "float32", "m": SIDE, "n": SIDE, "k": SIDE, "peer": "numpy"}
    rows = [product | figure | threads]
    for op, flops in (("map", 0.0), ("fwd", 2.0), ("bwd", 4.0)):
        row: results.Row = {"suite": "cpu", "op": op, "scene": scene.name, "dtype": "float32", "channels": CHANNELS}
        row |= {"n": scene.n, "pairs": scene.pairs, "ms": results.significant(1e3 * medians[op])}
        if flops:
            gflops = flops * scene.pairs * CHANNELS**2 * 1e-9 / medians[op]
            row |= {"gflops": round(gflops, 1), "of_numpy": round(gflops / numpy_gflops, 3)}
        rows.append(row | threads)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description="CPU convolution beside NumPy's @.")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/cpu.json")
    options = parser.parse_args(argv)
    if options.write:
        results.refuse_foreign_build()
    rows = measure()
    for row in rows:
        speed = f", {row['gflops']:.1f} GFLOP/s" if "gflops" in row else ""
        ratio = f", {row['of_numpy']:.2f} of NumPy's float32 {SIDE}^3 @" if "of_numpy" in row else ""
        print(f"{results.describe(row)}: {row['ms']:.4g} ms on {row['threads']} threads{speed}{ratio}")
    if options.write:
        file = results.Results(results.DIRECTORY / "cpu.json", results.cpu_machine())
        for row in rows:
            file.add(row)
        print(file.path)


if __name__ == "__main__":
    main()
