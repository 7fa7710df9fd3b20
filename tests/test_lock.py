"""Locks in processes that fork while another thread, or the forking one, holds them."""

import pytest
from calls import run_python

PRELUDE = """
import os, signal, threading
from flexgemm._lock import ProcessLock

def leave(child):
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)
"""

HELD_BY_ANOTHER = """
import {module} as owner

lock, held = owner.{name}, threading.Event()

def hold():
    with lock.held():
        held.set()
        threading.Event().wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    with lock.held():
        os._exit(0)
leave(child)
"""

HELD_BY_THE_FORKING_ONE = """
lock = ProcessLock()
with lock.held():
    child = os.fork()
if child == 0:
    signal.alarm(20)
    with lock.held(), lock.held():
        os._exit(0)
leave(child)
"""

EXCLUDES = """
lock, inside, seen = ProcessLock(), 0, []

def work():
    global inside
    for _ in range(200):
        with lock.held():
            inside += 1
            seen.append(inside)
            threading.Event().wait(1e-5)
            inside -= 1

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os._exit(set(seen) != {1})
"""


@pytest.mark.parametrize(
    "module, name",
    [("flexgemm._lock", "ProcessLock()"), ("flexgemm.hash_table", "_clearing"), ("flexgemm.torch.aten", "_lock")],
)
def test_a_forked_process_waits_for_no_lock_of_another_thread(module, name):
    if "torch" in module:
        pytest.importorskip("torch")
    assert_runs(HELD_BY_ANOTHER.format(module=module, name=name))


def test_a_process_may_fork_while_it_holds_one():
    assert_runs(HELD_BY_THE_FORKING_ONE)


def test_threads_exclude_each_other():
    assert_runs(EXCLUDES)


def assert_runs(code: str) -> None:
    done = run_python(["-W", "ignore::DeprecationWarning", "-c", PRELUDE + code], OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
