"""Each test starts with a process that has said nothing and knows of no accelerator."""

from __future__ import annotations

import os

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from cputrain import log


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch):
    for name in ("CPUTRAIN_DTYPE", "CPUTRAIN_PADDING", "CPUTRAIN_IPEX", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)  # TrainingArguments writes into it, too: ACCELERATE_DYNAMO_BACKEND, before 5.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for models this small more are slower
    log.say_once.cache_clear()
    log.mention_once.cache_clear()
    yield
    os.environ.clear()
    os.environ.update(before)
    torch.set_num_threads(threads)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
