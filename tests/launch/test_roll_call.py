"""Machines that were started each by itself: they find one another, or each says who is missing or doesn't fit."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cputrain import __version__
from cputrain.launch import roll_call
from tests.launch.programs import CLEAN


@pytest.fixture
def endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def held(endpoint: str, *machines: tuple[int, int], seconds: int = 20) -> list[str]:
    """What each (machine, of how many) is told."""
    told: dict[int, str] = {}

    def one(place: int, machine: int, count: int) -> None:
        try:
            roll_call.hold(endpoint, machine, count, {roll_call.SECONDS: str(seconds)})
            told[place] = "all there"
        except ValueError as error:
            told[place] = str(error)

    threads = [threading.Thread(target=one, args=(place, *machine)) for place, machine in enumerate(machines)]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    return [told[place] for place in range(len(machines))]


def test_all_come(endpoint: str) -> None:
    assert held(endpoint, (1, 3), (0, 3), (2, 3)) == ["all there"] * 3  # machine 1 must try again


def test_the_port_is_free_afterwards(endpoint: str) -> None:
    held(endpoint, (0, 2), (1, 2))
    socket.create_server(("", int(endpoint.rpartition(":")[2]))).close()


def test_a_machine_is_missing(endpoint: str, monkeypatch, capfd) -> None:
    monkeypatch.setattr(roll_call, "_FIRST_WORD", 0.5)
    first, second = held(endpoint, (0, 4), (2, 4), seconds=2)
    assert first.startswith(f"machines 1, 3 of 4 (counted from 0) did not come to {endpoint} within 2 s")
    assert second == first
    said = capfd.readouterr().err
    assert f"cputrain: waiting for machines 1, 3 of 4 (counted from 0) at {endpoint}" in said


def test_machine_0_is_missing(endpoint: str, monkeypatch, capfd) -> None:
    monkeypatch.setattr(roll_call, "_FIRST_WORD", 0.5)
    (told,) = held(endpoint, (1, 2), seconds=1)
    assert told.startswith(f"machine 0 did not come to {endpoint} within 1 s")
    assert f"waiting for machine 0 at {endpoint} (Connection refused)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("machines", "said"),
    [
        ([(0, 2), (1, 3)], "was started with 3 machines"),
        ([(0, 3), (1, 3), (1, 3)], "are both machine 1: give each its own --machine_rank."),
    ],
)
def test_machines_that_do_not_fit(machines: list[tuple[int, int]], said: str, endpoint: str) -> None:
    told = held(endpoint, *machines, seconds=5)
    assert all(said in one for one in told[:2]), told


def test_other_versions_do_not_fit(endpoint: str) -> None:
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.extend(held(endpoint, (0, 2))))
    thread.start()
    older = roll_call.Card(1, 2, "box2", version="0.0.1")
    patience = roll_call._Patience(endpoint, 20, roll_call.MACHINES)
    with pytest.raises(ValueError) as error:
        roll_call._report(older, patience)
    thread.join()
    here = f"{socket.gethostname()} has {__version__}"
    assert [str(error.value)] == told == [f"box2 has cputrain 0.0.1, {here}: install the same version on both."]


def test_strangers_are_ignored(endpoint: str) -> None:
    """A port scanner, a browser, or somebody who hangs up."""
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.extend(held(endpoint, (0, 2))))
    thread.start()
    host, port = endpoint.split(":")
    strangers = []
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", json.dumps({"machine": "x"}).encode(), b""):
        while True:
            try:
                strangers.append(socket.create_connection((host, int(port)), timeout=5))
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        strangers[-1].sendall(words)
    strangers[-1].close()
    roll_call.hold(endpoint, 1, 2, {})
    thread.join()
    assert told == ["all there"]


@pytest.mark.parametrize("text", ["soon", "0", "-5"])
def test_the_time_must_be_a_number(text: str, endpoint: str) -> None:
    with pytest.raises(ValueError, match="CPUTRAIN_MEETING_SECONDS must be a number of seconds"):
        roll_call.hold(endpoint, 0, 2, {roll_call.SECONDS: text})


# --- Ranks that were numbered by hand ----------------------------------------------------------------------------


def by_hand(rank: int, port: str, folder: Path, **environ: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text("import os\nprint('RAN', os.environ['RANK'])\n")
    told = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(
        [sys.executable, "-m", "cputrain", "run", "script.py"],
        cwd=folder,
        env={**CLEAN, **told, "MASTER_PORT": port, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ranks_by_hand_begin_together(endpoint: str, tmp_path: Path) -> None:
    port = endpoint.rpartition(":")[2]
    ranks = [by_hand(rank, port, tmp_path) for rank in range(2)]
    answers = [rank.communicate(timeout=60) for rank in ranks]
    assert [out for out, _ in answers] == ["RAN 0\n", "RAN 1\n"], answers


@pytest.mark.parametrize(("rank", "missing"), [(0, "rank 1 of 2 (counted from 0)"), (1, "rank 0")])
def test_a_rank_by_hand_that_is_missing(rank: int, missing: str, endpoint: str, tmp_path: Path) -> None:
    alone = by_hand(rank, endpoint.rpartition(":")[2], tmp_path, CPUTRAIN_MEETING_SECONDS="2")
    out, said = alone.communicate(timeout=60)
    assert alone.returncode == 2 and "RAN" not in out and "Traceback" not in said
    assert f"{missing} did not come to {endpoint} within 2 s" in said and "with its own RANK" in said


def test_what_the_script_starts_is_no_rank(endpoint: str, tmp_path: Path) -> None:
    """Nor are the ranks of torchrun, which its agent watches."""
    for name in ("CPUTRAIN_RANKS_HAVE_MET", "TORCHELASTIC_RUN_ID"):
        out, said = by_hand(0, endpoint.rpartition(":")[2], tmp_path, **{name: "1"}).communicate(timeout=60)
        assert out == "RAN 0\n", said
