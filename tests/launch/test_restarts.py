"""Ranks start anew after a failure, later and later where it gets them no further, and not after the same one twice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cputrain import blame, hardware, settings
from cputrain.launch.restarts import OUT_OF_MEMORY, Own, Restarts, own_failure
from tests.launch.programs import launch

# Ends at its second step, every time.
SCRIPT = """
import os, sys, torch
how = sys.argv[1]
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
print("RUN", os.environ["CPUTRAIN_RUN_ID"])
for step in range(3):
    weight.sum().backward()
    optimizer.step()
    if step == 1 and how == "raises":
        raise KeyError("sample 7")
    if step == 1 and how == "asked to stop":
        sys.exit(143)
"""


@pytest.mark.parametrize(("how", "code", "starts"), [("raises", 1, 2), ("asked to stop", 143, 1)])
def test_only_what_may_help_is_started_anew(how: str, code: int, starts: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = launch("--max_restarts", "3", "script.py", how, folder=tmp_path, OMP_NUM_THREADS="1")
    assert ended.returncode == code, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if "RUN" in line]
    assert len(lines) == starts and len(set(lines)) == 1  # under one name
    assert ended.stderr.count("all ranks start anew") == starts - 1
    assert ended.stderr.count("nothing can resume this script") == starts
    if how == "raises":
        assert "twice in the same way (KeyError: 'sample 7') after step 2, so it isn't started anew" in ended.stderr


def test_pauses_grow_until_a_start_gets_further() -> None:
    restarts = Restarts()
    assert [restarts.pause(step) for step in (None, None, None, None)] == [0, 1, 2, 4]
    assert [restarts.pause(step) for step in (7, 7, 6, 8)] == [0, 1, 2, 0]
    assert [restarts.pause(8) for _ in range(9)][-2:] == [30, 30]


def test_what_is_not_a_failure_from_inside_may_come_twice() -> None:
    restarts, failure = Restarts(), Own("KeyError: 7", 12)
    assert restarts.why_not(failure) == ""
    assert restarts.why_not(None) == ""
    assert restarts.why_not(failure) == ""
    assert restarts.why_not(Own("KeyError: 7", 13)) == ""
    assert "after step 13" in restarts.why_not(Own("KeyError: 7", 13))
    assert Restarts().why_not(Own("KeyError: 7", None)) == ""


def test_whose_fault_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(blame.FOLDER, str(tmp_path))
    monkeypatch.setenv(settings.RANK, "1")
    blame.note_step(5)
    killed = {0: None, 1: -signal.SIGKILL}
    assert own_failure(str(tmp_path), killed, out_of_memory=False) is None
    assert own_failure(str(tmp_path), killed, out_of_memory=True) == Own(OUT_OF_MEMORY, 5)
    assert own_failure(str(tmp_path), {1: -signal.SIGSEGV}, False) == Own("SIGSEGV", 5)
    assert own_failure(str(tmp_path), {1: 3}, False) is None
    blame.note_exception(ValueError("no\nmore"))
    assert own_failure(str(tmp_path), {0: 1, 1: 1}, False) is None  # rank 0 failed first, by exit()
    assert own_failure(str(tmp_path), {1: 1}, False) == Own("ValueError: no", 5)
    blame.tell(blame.Blame(0, "PeerDied: rank 0"))
    assert own_failure(str(tmp_path), {1: 1}, False) is None


@pytest.mark.parametrize(("version", "file"), [(2, "memory.events"), (1, "memory.oom_control")])
def test_the_kernel_counts_what_it_ended_for_want_of_memory(version: int, file: str, tmp_path: Path) -> None:
    mount = {2: "/sys/fs/cgroup", 1: "/sys/fs/cgroup/memory"}[version]
    kind = {2: "cgroup2 cgroup2 rw", 1: "cgroup cgroup rw,memory"}[version]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(f"30 20 0:26 / {mount} rw - {kind}\n")
    (tmp_path / "proc/self/cgroup").write_text({2: "0::/job\n", 1: "4:memory:/job\n"}[version])
    (tmp_path / f"{mount}/job".lstrip("/")).mkdir(parents=True)
    assert hardware.oom_kills(tmp_path) == 0
    (tmp_path / f"{mount}/job/{file}".lstrip("/")).write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert hardware.oom_kills(tmp_path) == 2
