"""Locks in processes that fork while another thread, or the forking one, holds them."""

import pytest
from calls import run_python

PRELUDE = """
import os, signal, threading
from flexgemm._lock import ProcessLock

def failed(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
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
os._exit(failed(child))
"""

HELD_BY_THE_FORKING_ONE = """
lock = ProcessLock()
with lock.held():
    child = os.fork()
if child == 0:
    signal.alarm(20)
    with lock.held(), lock.held():
        os._exit(0)
os._exit(failed(child))
"""

WHILE_A_TABLE_IS_CLEARED = """
import numpy as np
import flexgemm

keys, begun = np.arange(10), threading.Event()

def clear():
    while True:
        flexgemm.HashTable(4_000_000, like=keys)
        begun.set()

threading.Thread(target=clear, daemon=True).start()
begun.wait()
for _ in range(4):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(not np.array_equal(flexgemm.HashTable.build(keys).lookup(keys), keys))
    if failed(child):
        os._exit(1)
os._exit(0)
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


def test_a_forked_process_makes_tables_while_another_thread_did():
    assert_runs(WHILE_A_TABLE_IS_CLEARED)


def test_a_process_may_fork_while_it_holds_one():
    assert_runs(HELD_BY_THE_FORKING_ONE)


def test_threads_exclude_each_other():
    assert_runs(EXCLUDES)


def assert_runs(code: str) -> None:
    done = run_python(["-W", "ignore::DeprecationWarning", "-c", PRELUDE + code], OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
