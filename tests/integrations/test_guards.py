"""What is said, or refused, before it costs a training: too little memory, a disk nearly full, a slow rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cputrain import hardware, log
from cputrain.checkpoints.writing import Output, Writing
from cputrain.integrations import memory_need, slow_ranks
from cputrain.integrations.notices import Refused
from cputrain.integrations.slow_ranks import Pace

MODEL = torch.nn.Linear(1000, 1000, bias=False)  # 4 MB of weights


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch):
    def set_to(megabytes: float | None) -> None:
        value = None if megabytes is None else int(megabytes * 1e6)
        machine = SimpleNamespace(memory_limit=hardware.Fact(value, "/sys/fs/cgroup/memory.max"))
        monkeypatch.setattr(hardware, "this_machine", lambda: machine)

    log.say_once.cache_clear()
    return set_to


def test_only_what_cannot_fit_is_refused(limit, caplog, monkeypatch) -> None:
    optimizer = torch.optim.AdamW(MODEL.parameters())
    assert memory_need.needed(MODEL, optimizer) == 16_000_000
    assert memory_need.needed(MODEL, torch.optim.SGD(MODEL.parameters())) == 8_000_000
    for megabytes in (None, 21):
        limit(megabytes)
        memory_need.check(MODEL, optimizer)
    assert not caplog.messages
    limit(17)
    memory_need.check(MODEL, optimizer)
    assert "memory is tight: weights, gradients and optimizer state take 0.0 GiB" in caplog.text
    limit(15)
    with pytest.raises(Refused, match=r"can't fit into memory: .* /sys/fs/cgroup/memory.max allows"):
        memory_need.check(MODEL, optimizer)
    limit(31)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(Refused, match="of 2 ranks take"):
        memory_need.check(MODEL, optimizer)


def test_a_disk_that_is_nearly_full_is_named_once_while_there_is_room(tmp_path: Path, monkeypatch, caplog) -> None:
    output = Output.take(tmp_path, "run")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2_500_000_000))
    for step, room in enumerate((100, 1_000_000_000, 1_000_000_000)):
        with Writing(output, f"checkpoint-{step}", step, room=room) as writing:
            writing.write(lambda writing=writing: (writing.folder / "file").write_text("x"))  # type: ignore[misc]
        assert writing.saved
    assert [line for line in caplog.messages if "nearly full" in line] == [
        f"the disk of {tmp_path} is nearly full: 2.5 GB are free, and a checkpoint takes 1.0 GB"
    ]


def test_a_rank_is_slow_only_if_the_others_wait_for_it() -> None:
    paces = [Pace("a", 0.10), Pace("a", 0.11), Pace("b", 0.25), Pace("b", 0.10)]
    assert slow_ranks.slowest(paces) == 2
    assert slow_ranks.sentence(paces, 2).startswith("rank 2 on b takes 2.5 times as long as the others")
    assert slow_ranks.slowest([Pace("a", 0.10), Pace("b", 0.14)]) is None
    assert slow_ranks.slowest([Pace("a", 0.001), Pace("b", 0.005)]) is None  # of little use to know
    assert slow_ranks.slowest([Pace("a", 0.0), Pace("b", 0.5)]) is None  # not measured there
