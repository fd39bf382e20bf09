"""Models this small are faster with one thread, above all beside other processes; `threads` brings its own number."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    if "threads" not in request.fixturenames:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
