"""First calls: map + forward (cold_fwd), map + forward + backward (cold_train), each in a process that has not used
flexgemm before. Only the CUDA context exists when the clock starts; whatever is loaded or planned lazily is counted.

The processes are forked from a server that has imported torch and flexgemm and touched no device, so that a fresh one
costs a CUDA context instead of the imports, which are not measured anyway.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks import conv
from benchmarks.ceilings import Ceilings
from benchmarks.check import Wrong
from benchmarks.results import describe
from benchmarks.run import Run
from benchmarks.scenes import Scene

OPS = ("cold_fwd", "cold_train")
TIMEOUT_S = 120


def _measure(op: str, case: conv.Case, scene: Scene, send: Connection) -> None:
    """Sends milliseconds, or a sentence saying what went wrong."""
    try:
        problem = conv.Problem(case, scene)
        torch.cuda.synchronize()
        start = time.perf_counter()
        neighbor_map = problem.map_train() if op == "cold_train" else problem.map_infer()
        out = problem.fwd(neighbor_map)
        grads = problem.bwd(neighbor_map) if op == "cold_train" else None
        torch.cuda.synchronize()
        ms = (time.perf_counter() - start) * 1e3
        reference = problem.reference()
        problem.judge("fwd", out, reference)
        if grads is not None:
            problem.judge("bwd", grads, reference)
        send.send(ms)
    except Wrong as error:
        send.send(f"WRONG RESULT: {error}")
    except Exception as error:  # the parent goes on with the next case
        send.send(f"{type(error).__name__}: {error}")


def first_call_ms(op: str, case: conv.Case, scene: Scene) -> float | str:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(op, case, scene, send))
    process.start()
    send.close()
    try:
        return receive.recv() if receive.poll(TIMEOUT_S) else f"no answer within {TIMEOUT_S} s"
    except EOFError:
        process.join(10)
        return f"the process ended with exit code {process.exitcode}"
    finally:
        process.join(10)
        process.kill()
        process.join()
        receive.close()


def run(run: Run, ceilings: Ceilings, clouds: dict[str, Path]) -> None:
    todo = [case for case in conv.peers_cases(clouds) if case.precision != "ieee"]
    made = conv.Scenes(clouds)
    for number, case in enumerate(todo, 1):
        for row in run.pending([case.row(op) for op in OPS]):
            op, scene = row["op"], made[case.scene]
            ms = first_call_ms(op, case, scene)
            if isinstance(ms, str):
                run.fail(f"{describe(row)}: {ms}")
                continue
            parts = ("map", "fwd", "bwd") if op == "cold_train" else ("map", "fwd")
            floor = sum(conv.floor_ms(part, case, scene, ceilings) for part in parts)
            run.record(conv.measured(op, case, scene, ms, floor), f"[{number}/{len(todo)}] ")
