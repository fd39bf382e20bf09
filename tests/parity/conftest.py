"""Models this small are faster with one thread, above all beside other processes; `threads` brings its own number."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    if "threads" not in request.fixturenames:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def lazy_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies here are small, but their logits are to be as lazy as large ones."""
    monkeypatch.setattr("cputrain.blocks.head.FEWEST_BYTES", 0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """CPUTRAIN_TEST_SAMPLE=100 leaves so many of these tests, chosen by CPUTRAIN_TEST_SEED: for other releases."""
    if not (size := int(os.environ.get("CPUTRAIN_TEST_SAMPLE", "0"))):
        return
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    chosen = set(random.Random(int(os.environ.get("CPUTRAIN_TEST_SEED", "0"))).sample(here, min(size, len(here))))
    left_out = [item for item in here if item not in chosen]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
