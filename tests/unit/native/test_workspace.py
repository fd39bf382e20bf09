"""Buffers for what is passing: the same memory again, for one name and one thread."""

from __future__ import annotations

import threading

from cputrain.native import workspace


def test_the_same_memory_again():
    workspace.clear()
    first = workspace.floats("a", 3, 4)
    assert first.shape == (3, 4)
    assert workspace.floats("a", 6).data_ptr() == first.data_ptr()
    assert workspace.floats("b", 6).data_ptr() != first.data_ptr()
    assert workspace.floats("a", 0, 5).shape == (0, 5)
    larger = workspace.floats("a", 100)
    assert workspace.floats("a", 3, 4).data_ptr() == larger.data_ptr()
    workspace.clear()
    assert not workspace._buffers.__dict__


def test_each_thread_has_its_own():
    mine, theirs = workspace.floats("a", 10), []
    thread = threading.Thread(target=lambda: theirs.append(workspace.floats("a", 10)))
    thread.start()
    thread.join()
    assert theirs[0].data_ptr() != mine.data_ptr()
