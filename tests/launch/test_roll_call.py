"""Machines that were started each by itself: they find one another, or each says who is missing or doesn't fit."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from cputrain import __version__, authentication
from cputrain.launch import rendezvous, roll_call
from tests.launch.programs import CLEAN

KEY = authentication.key_for("roll call of machines", {})


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
        roll_call._report(older, patience, KEY)
    thread.join()
    here = f"{socket.gethostname()} has {__version__}"
    assert [str(error.value)] == told == [f"box2 has cputrain 0.0.1, {here}: install the same version on both."]


def test_another_token_is_named(endpoint: str, monkeypatch) -> None:
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.extend(held(endpoint, (0, 2), seconds=4)))
    thread.start()
    with pytest.raises(ValueError, match=r"machine 0 did not come .*\(it refuses us: is CPUTRAIN_TOKEN the same there"):
        roll_call.hold(endpoint, 1, 2, {roll_call.SECONDS: "2", authentication.TOKEN: "another"})
    thread.join()
    assert told[0].startswith("machine 1 of 2 (counted from 0) did not come")


# --- Strangers ---------------------------------------------------------------------------------------------------

NONSENSE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"[1]\n",
    b'{"machine": "x"}\n',
    b'{"machine": Infinity, "machines": 2, "host": "x", "version": "1"}\n',
    b'{"machine": 1e999, "machines": NaN, "host": [], "version": {}}\n',
    b'{"machine": true, "machines": 2, "host": "x", "version": "1"}\n',
    b"[" * 4000 + b"\n",
    b'{"a":' * 600 + b"\n",
    b"\xff\xfe\n",
    b"9" * 5000 + b"\n",
    b"\n",
    b"",
]


class Waiting:
    """Machine 0 of two, which waits for the other one."""

    def __init__(self, endpoint: str, seconds: int = 60) -> None:
        self.host, self.port = endpoint.split(":")
        self.told: list[str] = []
        self._thread = threading.Thread(target=lambda: self.told.extend(held(endpoint, (0, 2), seconds=seconds)))
        self._thread.start()

    def stranger(self, words: bytes, ending: str = "stay", knows_protocol: bool = False) -> socket.socket:
        address = (self.host, int(self.port))
        while True:
            try:
                found = authentication.connect(address, KEY, 1) if knows_protocol else socket.create_connection(address)
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        with contextlib.suppress(ConnectionError):
            found.sendall(words)
        if ending == "reset":
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if ending != "stay":
            found.close()
        return found

    def end(self) -> list[str]:
        roll_call.hold(f"{self.host}:{self.port}", 1, 2, {})
        self._thread.join()
        return self.told


def test_strangers_are_ignored(endpoint: str) -> None:
    """A port scanner, a browser, or a program that resets or says nothing."""
    waiting = Waiting(endpoint)
    strangers = [waiting.stranger(words, how) for words in NONSENSE for how in ("stay", "close", "reset")]
    assert waiting.end() == ["all there"]
    for one in strangers:
        one.close()


def test_nonsense_of_one_that_knows_the_token_is_ignored(endpoint: str) -> None:
    """Without a token, that is every program that speaks our protocol."""
    waiting = Waiting(endpoint)
    strangers = [waiting.stranger(words, how, True) for words in NONSENSE for how in ("stay", "close", "reset")]
    assert waiting.end() == ["all there"]
    for one in strangers:
        one.close()


def test_one_that_knows_the_token_and_says_nothing_is_forgotten(endpoint: str, monkeypatch) -> None:
    monkeypatch.setattr(authentication, "SECONDS", 0.3)
    waiting = Waiting(endpoint)
    with waiting.stranger(b"", knows_protocol=True) as silent:
        silent.settimeout(20)
        assert silent.recv(10) == b""
    assert waiting.end() == ["all there"]


JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=9),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.sampled_from(["machine", "host", "x"]), inner),
)


@settings(deadline=None)  # a busy machine may stop it for longer
@given(line=some.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_line_is_an_error(line: bytes) -> None:
    card = roll_call.Card.from_line(line)
    assert card is None or [type(value) for value in vars(card).values()] == [int, int, str, str]


@settings(deadline=None)  # a busy machine may stop it for longer
@given(machine=some.integers(), machines=some.integers(), host=some.text(), version=some.text())
def test_a_card_is_read_as_it_was_written(machine: int, machines: int, host: str, version: str) -> None:
    card = roll_call.Card(machine, machines, host, version)
    assert roll_call.Card.from_line(json.dumps(vars(card)).encode()) == card


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1")])
def test_a_local_roll_call_listens_on_loopback_only(host: str, address: str) -> None:
    patience = roll_call._Patience(f"{host}:0", 1, roll_call.MACHINES)
    with roll_call._listening(patience) as server:
        assert server.getsockname()[0] == address


def test_a_roll_call_of_machines_listens_at_the_address_that_they_use(monkeypatch) -> None:
    own = rendezvous.own_addresses()[0]
    assert rendezvous.address_to_bind(own) == own
    assert rendezvous.address_to_bind("192.0.2.7") == "", "translated on the way here"
    resolved = [(0, 0, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", lambda *_, **__: resolved)
    assert rendezvous.address_to_bind("box1") == "", "the others know box1 by another address"


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
