"""Machines, or ranks, that are started each by itself find one another before they begin, and name those missing.

Number 0 listens where torch's store will be a moment later; every other one reports there with its number and version,
and hears whether all are there, or what doesn't fit. Both show first that they know the run's token.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cputrain import __version__, authentication
from cputrain.launch import rendezvous

SECONDS = "CPUTRAIN_MEETING_SECONDS"
_DEFAULT_SECONDS = 600
_FIRST_WORD, _NEXT_WORD = 10.0, 60.0  # seconds of silence
_PAUSE = 0.5
_LONGEST_LINE, _LONGEST_ANSWER = 4096, 2**20  # bytes: an answer may name thousands of machines
_ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Kind:
    """What is called, and how a user says its number and the place."""

    name: str
    number: str
    port: str
    how: str


MACHINES = Kind(
    "machine",
    "--machine_rank",
    "--main_process_port",
    "is the launch started there, with its own --machine_rank and the same --main_process_ip and port",
)
RANKS = Kind("rank", "RANK", "MASTER_PORT", "is it started, with its own RANK and the same MASTER_ADDR and MASTER_PORT")


@dataclass(frozen=True)
class Card:
    """What a machine, or a rank, says of itself."""

    machine: int
    machines: int
    host: str
    version: str = __version__

    @staticmethod
    def from_line(line: bytes) -> Card | None:
        """None if the line holds no card."""
        found = _parsed(line)
        values = [found.get(name) for name in ("machine", "machines", "host", "version")]
        fits = [type(value) for value in values] == [int, int, str, str]
        return Card(*values) if fits else None  # type: ignore[arg-type]


def hold(endpoint: str, machine: int, machines: int, environ: Mapping[str, str], kind: Kind = MACHINES) -> None:
    """Returns when all are there; a ValueError says which did not come, or what doesn't fit."""
    patience = _Patience(endpoint, _seconds(environ), kind)
    card = Card(machine, machines, socket.gethostname())
    key = authentication.key_for(f"roll call of {kind.name}s", environ)
    if machine == 0:
        authentication.say_if_unprotected(environ)
        _gather(card, patience, key)
    else:
        _report(card, patience, key)


def check_version(launching: object) -> None:
    """Raises if the machine that launches this one has another version."""
    if launching != __version__:
        raise ValueError(
            f"{socket.gethostname()} has cputrain {__version__}, the machine that launches has {launching}: "
            "install the same version on both."
        )


def _seconds(environ: Mapping[str, str]) -> int:
    text = environ.get(SECONDS) or str(_DEFAULT_SECONDS)
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{SECONDS} must be a number of seconds, found {text!r}.")
    return int(text)


class _Patience:
    """How long to wait, and what is said meanwhile."""

    def __init__(self, endpoint: str, seconds: int, kind: Kind) -> None:
        self.endpoint, self._seconds, self.kind = endpoint, seconds, kind
        self._begin = time.monotonic()
        self._next = _FIRST_WORD

    def check(self, missing: str, why: str = "", grace: float = 0.0) -> None:
        passed = time.monotonic() - self._begin
        if passed > self._seconds + grace:
            raise ValueError(
                f"{missing} did not come to {self.endpoint} within {self._seconds} s ({SECONDS}){why}: "
                f"{self.kind.how}, and does the firewall let it through?"
            )
        if passed > self._next:
            self._next += _NEXT_WORD
            left = max(0, round(self._seconds - passed))
            print(f"cputrain: waiting for {missing} at {self.endpoint}{why}; {left} s are left", file=sys.stderr)


def _parsed(line: bytes) -> dict[str, Any]:
    """A line of JSON; nothing if it is none, whatever it is: not UTF-8, too deep, a list."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# --- Number 0 ----------------------------------------------------------------------------------------------------


@dataclass
class _Peer:
    """A connection that knows the token, what it has said, and until when it must have said who it is."""

    said: bytes = b""
    card: Card | None = None
    deadline: float = field(default_factory=lambda: time.monotonic() + authentication.SECONDS)


_Present = dict[socket.socket, _Peer]


def _gather(own: Card, patience: _Patience, key: bytes) -> None:
    with contextlib.ExitStack() as stack:
        listener = authentication.Listener(_listening(patience), key, own.machines)
        stack.callback(listener.close)
        present: _Present = {}
        stack.callback(_close, present)
        while missing := _missing(own, present, patience.kind):
            with _told(present):
                patience.check(missing)
            ready = authentication.readable([*listener.sockets, *present], _PAUSE)
            for peer in [peer for peer in ready if peer in present]:
                _hear(peer, own, present, patience.kind)
            present |= {peer: _Peer() for _, peer in listener.advance(ready)}
            _forget_silent(present)
        listener.close()  # before the others go on to torch's store at the same port
        for peer in present:
            _say(peer, {"go": True})


def _forget_silent(present: _Present) -> None:
    now = time.monotonic()
    for peer in [peer for peer, state in present.items() if state.card is None and state.deadline < now]:
        _forget(peer, present)


def _forget(peer: socket.socket, present: _Present) -> None:
    del present[peer]
    peer.close()


def _close(peers: Iterable[socket.socket]) -> None:
    for peer in peers:
        peer.close()


def _listening(patience: _Patience) -> socket.socket:
    host, port = rendezvous.split(patience.endpoint)
    try:
        return rendezvous.server_at(rendezvous.address_to_bind(host), port)
    except OSError as error:
        raise ValueError(
            f"the port of {patience.endpoint} is in use on {socket.gethostname()}: choose another {patience.kind.port}."
            if "in use" in str(error)
            else f"{socket.gethostname()} can't listen at port {port}: {error.strerror}."
        ) from None


def _missing(own: Card, present: _Present, kind: Kind) -> str:
    here = {peer.card.machine for peer in present.values() if peer.card}
    absent = [str(number) for number in range(1, own.machines) if number not in here]
    name = kind.name if len(absent) == 1 else f"{kind.name}s"
    return f"{name} {', '.join(absent)} of {own.machines} (counted from 0)" if absent else ""


def _hear(peer: socket.socket, own: Card, present: _Present, kind: Kind) -> None:
    """A peer that hangs up, or isn't ours, is forgotten. A card that doesn't fit ends the launch on all machines."""
    state = present[peer]
    try:
        heard = peer.recv(_LONGEST_LINE - len(state.said))
    except BlockingIOError:
        return
    except OSError:
        heard = b""
    state.said += heard
    if heard and state.card is None and b"\n" not in state.said and len(state.said) < _LONGEST_LINE:
        return  # the rest of the line is on its way
    card = Card.from_line(state.said) if heard and state.card is None else None
    if card is None:
        _forget(peer, present)
        return
    problem = _problem(own, card, [other.card for other in present.values() if other.card], kind)
    state.card = card
    with _told(present):
        if problem:
            raise ValueError(problem)


@contextlib.contextmanager
def _told(present: _Present) -> Iterator[None]:
    """What goes wrong is said on all machines."""
    try:
        yield
    except ValueError as error:
        for peer in present:
            _say(peer, {"problem": str(error)})
        raise


def _problem(own: Card, card: Card, others: list[Card], kind: Kind) -> str:
    if card.version != own.version:
        return (
            f"{card.host} has cputrain {card.version}, {own.host} has {own.version}: install the same version on both."
        )
    if card.machines != own.machines:
        return (
            f"{card.host} was started with {card.machines} {kind.name}s, {own.host} with {own.machines}: say the same."
        )
    twin = next((other for other in [own, *others] if other.machine == card.machine), None)
    if twin:
        return f"{twin.host} and {card.host} are both {kind.name} {card.machine}: give each its own {kind.number}."
    if not 0 < card.machine < own.machines:
        return f"{card.host} is {kind.name} {card.machine} of {own.machines}: they are counted from 0."
    return ""


def _say(peer: socket.socket, words: dict[str, object]) -> None:
    with contextlib.suppress(OSError):
        peer.sendall(json.dumps(words).encode() + b"\n")


# --- All others --------------------------------------------------------------------------------------------------


def _report(card: Card, patience: _Patience, key: bytes) -> None:
    first = f"{patience.kind.name} 0"
    while True:
        try:
            answer = _asked(card, patience, key)
        except OSError as error:
            patience.check(first, f" ({_reason(error)})")
            time.sleep(_PAUSE)
            continue
        if answer.get("problem"):
            raise ValueError(str(answer["problem"]))
        if answer.get("go"):
            return
        time.sleep(_PAUSE)
        patience.check(first, " (it hung up)")


def _asked(card: Card, patience: _Patience, key: bytes) -> dict[str, Any]:
    """Number 0's answer, which comes when all are there; nothing if it hung up."""
    with authentication.connect(rendezvous.split(patience.endpoint), key, card.machine, _ANSWER_SECONDS) as peer:
        peer.sendall(json.dumps(asdict(card)).encode() + b"\n")
        while not authentication.readable([peer], _PAUSE):
            patience.check(f"the other {patience.kind.name}s", grace=10)  # number 0 knows better which are missing
        peer.settimeout(_ANSWER_SECONDS)
        line = b""
        while not line.endswith(b"\n") and len(line) < _LONGEST_ANSWER and (more := peer.recv(_LONGEST_LINE)):
            line += more
    return _parsed(line)


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "its name can't be resolved"
    if isinstance(error, TimeoutError):
        return "no answer from there"
    if isinstance(error, authentication.Refused):
        return str(error)
    return os.strerror(error.errno) if error.errno else str(error)
