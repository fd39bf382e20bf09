"""Two machines of a job, one of which is done first: it ends with the other, and as the other does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.programs import CLEAN, free_port

# torch's own wait for the others is cut short: what holds the machines is ours.
LAUNCH = """
import sys
from cputrain.launch import node
node._quiet_agent()
from cputrain.launch import agent
agent.GOODBYE_SECONDS = 3
from cputrain.cli import main
sys.argv = ["cputrain", "launch", *sys.argv[1:]]
main()
"""
# Rank 1 is done at once. Rank 0 has something to do until a file allows it to end, and ends as its argument says.
SCRIPT = """
import os, sys, time
first = not os.path.exists("started")
if os.environ["RANK"] == "1":
    open("done", "a").write("x")
    sys.exit()
while not os.path.exists("done"):
    time.sleep(0.05)
open("started", "w").close()
print("SAVING", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
if sys.argv[1] == "fails" or (sys.argv[1] == "fails once" and first):
    sys.exit(3)
open("saved", "w").close()
"""


class Machines:
    """Two launches with the variables of a TrainJob, or of a PyTorchJob whose machines number themselves."""

    def __init__(self, folder: Path, kind: str, ending: str, restarts: int = 0) -> None:
        self.folder = folder
        (folder / "launch.py").write_text(LAUNCH)
        (folder / "script.py").write_text(SCRIPT)
        port = free_port()
        told = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MAX_RESTARTS": str(restarts)}
        if kind == "static":
            told |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
        else:
            told |= {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}", "PET_RDZV_ID": "x"}
        words = [sys.executable, "launch.py", "script.py", ending]
        self.processes = [
            subprocess.Popen(
                words,
                cwd=folder,
                env={**CLEAN, "HOME": str(folder), **told, **({"PET_NODE_RANK": str(n)} if kind == "static" else {})},
                stdout=(folder / f"out-{n}").open("w"),
                stderr=subprocess.STDOUT,
            )
            for n in range(2)
        ]
        try:
            self.wait_for(lambda: "SAVING" in self.output())
        except BaseException:
            self.__exit__()
            raise

    def output(self) -> str:
        return "\n".join((self.folder / f"out-{n}").read_text() for n in range(2))

    def wait_for(self, condition) -> None:
        limit = time.monotonic() + 200  # of a busy machine
        while not condition():
            assert None in [process.poll() for process in self.processes], self.output()
            assert time.monotonic() < limit, self.output()
            time.sleep(0.05)

    def go(self) -> None:
        (self.folder / "go").touch()

    def codes(self) -> list[int]:
        return [process.wait(100) for process in self.processes]

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


KINDS = pytest.mark.parametrize("kind", ["static", "c10d"])


@KINDS
def test_no_machine_ends_before_rank_0_has_saved(kind: str, tmp_path: Path) -> None:
    with Machines(tmp_path, kind, "well") as machines:
        time.sleep(5)  # the rank of the other machine ended before this began
        assert [process.poll() for process in machines.processes] == [None, None], machines.output()
        machines.go()
        assert machines.codes() == [0, 0], machines.output()
    assert (tmp_path / "saved").exists()


@KINDS
def test_if_rank_0_fails_at_last_no_machine_ends_well(kind: str, tmp_path: Path) -> None:
    with Machines(tmp_path, kind, "fails") as machines:
        time.sleep(1.5)
        machines.go()
        assert machines.codes() == [3, 3], machines.output()
        here = socket.gethostname()
        assert f"cputrain: rank 0 on {here} failed with exit code 3." in machines.output()
        assert f"rank 0 on {here} failed with exit code 3, and with it the ranks of {here}." in machines.output()


@KINDS
def test_if_rank_0_starts_anew_the_ranks_that_had_ended_do_too(kind: str, tmp_path: Path) -> None:
    with Machines(tmp_path, kind, "fails once", restarts=1) as machines:
        time.sleep(1.5)
        machines.go()
        assert machines.codes() == [0, 0], machines.output()
    assert (tmp_path / "done").read_text() == "xx" and (tmp_path / "saved").exists()


def test_a_machine_that_is_killed_ends_the_other(tmp_path: Path) -> None:
    with Machines(tmp_path, "static", "well") as machines:
        time.sleep(1)
        machines.processes[0].kill()
        assert machines.processes[1].wait(100) == 143  # no failure of its own: an operator may start it anew
        assert f"{socket.gethostname()} lost the machine at 127.0.0.1:" in machines.output()
        assert "Traceback" not in machines.output()


def test_a_machine_that_is_asked_to_end_ends_the_other(tmp_path: Path) -> None:
    with Machines(tmp_path, "static", "well") as machines:
        time.sleep(1)
        os.kill(machines.processes[0].pid, signal.SIGTERM)
        assert machines.codes() == [128 + signal.SIGTERM] * 2, machines.output()
        assert f"{socket.gethostname()} was ended by SIGTERM, and with it the ranks of" in machines.output()
