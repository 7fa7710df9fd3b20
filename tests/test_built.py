"""What is built once for work on all streams: who waits, where threads build and ask at the same time.

Streams and marks are stand-ins here, so that every order of steps can be played; on a GPU tests/test_torch.py and
tests/test_torch_voxel.py see the data.
"""

from __future__ import annotations

import copy
import pickle

import pytest

from flexgemm import _built
from flexgemm._built import Built


class Device:
    """What the extension says about marks: each is its number, and has been reached when it is in `reached`."""

    def __init__(self):
        self.marks, self.reached, self.waited = 0, set(), []
        self.capturing = False
        self.meanwhile = lambda: None  # what another thread does while this one is in the extension

    def mark(self, array, *, stream):
        self.marks += 1
        mark = self.marks
        self.meanwhile()
        return mark

    def passed(self, mark):
        return mark in self.reached

    def wait_for(self, mark, array, *, stream):
        if not self.capturing:
            self.waited.append(mark)
        return not self.capturing

    def is_capturing(self, array, *, stream):
        return self.capturing


@pytest.fixture
def device(monkeypatch):
    stub = Device()
    monkeypatch.setattr(_built, "_C", stub)
    return stub


def get(built):
    return built.get("array", "stream")


def of(built, value):
    return built.of("array", "stream", lambda: value)


def test_nothing_is_there_before_it_is_built(device):
    built = Built()
    assert (built.value, built.done, built.ready, get(built)) == (None, False, None, None)
    assert of(built, "first") == "first" and of(built, "second") == "first"


def test_work_waits_until_the_building_is_over(device):
    built = Built()
    of(built, "value")
    assert get(built) == "value" and device.waited == [1]
    assert (built.value, built.done, built.ready) == ("value", False, None)
    device.reached.add(1)
    assert get(built) == "value" and device.waited == [1]
    assert (built.value, built.done, built.ready) == ("value", True, "value")


@pytest.mark.parametrize("value", ["value", None])
def test_what_is_done_is_never_waited_for(device, value):
    built = Built(value, done=True)
    assert (built.value, built.done, built.ready, get(built)) == (value, True, value, value)
    assert device.marks == 0 and not device.waited


def test_what_a_graph_builds_is_its_own(device):
    built, device.capturing = Built(), True
    assert of(built, "of the graph") == "of the graph"
    assert built.value is None and device.marks == 0
    built.keep("of the graph", "array", "stream")
    assert built.value is None and device.marks == 0


def test_a_graph_builds_anew_what_it_would_have_to_wait_for(device):
    built = Built()
    of(built, "value")
    device.capturing = True
    assert get(built) is None and of(built, "of the graph") == "of the graph"
    assert built.value == "value" and not device.waited
    device.reached.add(1)
    assert of(built, "another") == "value"


@pytest.mark.parametrize("step", ["build", "mark"])
def test_of_two_that_build_at_once_the_first_is_kept(device, step):
    """Another thread is done with its building while this one builds, or asks for the mark of its own: this one has
    what it has built, and everybody later the other's, with the other's mark."""
    built = Built()

    def another():
        device.meanwhile = lambda: None
        built.keep("theirs", "array", "stream")

    def build():
        device.meanwhile = another
        if step == "build":
            device.meanwhile()
        return "ours"

    theirs = {"build": 1, "mark": 2}[step]
    assert built.of("array", "stream", build) == "ours"
    assert get(built) == "theirs" and device.waited == [theirs]
    device.reached.add(3 - theirs)
    assert get(built) == "theirs" and built.ready is None
    device.reached.add(theirs)
    assert get(built) == built.ready == "theirs"


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, lambda built: pickle.loads(pickle.dumps(built))])
def test_copies_have_what_is_done(device, copies):
    built = Built()
    of(built, "value")
    assert (copies(built).value, copies(Built(done=True)).done) == (None, True)
    device.reached.add(1)
    assert (copies(built).ready, copies(built).done) == ("value", True)
