"""Machines, or ranks, that are started each by itself find one another before they begin, and say whom they wait for.

Number 0 listens where torch's store will be a moment later; every other one reports there with its number and version,
and hears whether all are there, or what doesn't fit.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from cputrain import __version__

SECONDS = "CPUTRAIN_MEETING_SECONDS"
_DEFAULT_SECONDS = 600
_FIRST_WORD, _NEXT_WORD = 10.0, 60.0  # seconds of silence
_PAUSE = 0.5
_LONGEST_LINE = 4096


@dataclass(frozen=True)
class Kind:
    """Who is called, and how a user says its number and the place."""

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
    def from_line(line: bytes) -> Card:
        """A ValueError, TypeError or KeyError if it is none."""
        found = json.loads(line)
        return Card(int(found["machine"]), int(found["machines"]), str(found["host"]), str(found["version"]))


def hold(endpoint: str, machine: int, machines: int, environ: Mapping[str, str], kind: Kind = MACHINES) -> None:
    """Returns when all are there; a ValueError says who did not come, or what doesn't fit."""
    patience = _Patience(endpoint, _seconds(environ), kind)
    card = Card(machine, machines, socket.gethostname())
    if machine == 0:
        _gather(card, patience)
    else:
        _report(card, patience)


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
        """Raises when the time is over."""
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


# --- Number 0 ----------------------------------------------------------------------------------------------------


def _gather(own: Card, patience: _Patience) -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listening(patience))
        present: dict[socket.socket, Card | None] = {}  # None: has not said who it is
        stack.callback(_close, present)
        while missing := _missing(own, present, patience.kind):
            with _told(present):
                patience.check(missing)
            for ready in _readable([listener, *present]):
                if ready is listener:
                    peer, _ = listener.accept()
                    peer.setblocking(False)
                    present[peer] = None
                else:
                    _hear(ready, own, present, patience.kind)
        listener.close()  # before the others go on to torch's store at the same port
        for peer in present:
            _say(peer, {"go": True})


def _close(peers: Iterable[socket.socket]) -> None:
    for peer in peers:
        peer.close()


def _listening(patience: _Patience) -> socket.socket:
    _, port = _split(patience.endpoint)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
    except OSError as error:
        raise ValueError(
            f"the port of {patience.endpoint} is in use on {socket.gethostname()}: choose another {patience.kind.port}."
            if "in use" in str(error)
            else f"{socket.gethostname()} can't listen at port {port}: {error.strerror}."
        ) from None


def _missing(own: Card, present: Mapping[socket.socket, Card | None], kind: Kind) -> str:
    here = {card.machine for card in present.values() if card}
    absent = [str(number) for number in range(1, own.machines) if number not in here]
    name = kind.name if len(absent) == 1 else f"{kind.name}s"
    return f"{name} {', '.join(absent)} of {own.machines} (counted from 0)" if absent else ""


def _readable(sockets: list[socket.socket]) -> list[socket.socket]:
    with selectors.DefaultSelector() as selector:
        for one in sockets:
            selector.register(one, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(_PAUSE) if isinstance(key.fileobj, socket.socket)]


def _hear(peer: socket.socket, own: Card, present: dict[socket.socket, Card | None], kind: Kind) -> None:
    """Whoever hangs up, or is none of ours, is forgotten. A card that doesn't fit ends the launch on all machines."""
    try:
        card = Card.from_line(peer.recv(_LONGEST_LINE))  # a short line comes in one piece
    except (OSError, ValueError, TypeError, KeyError):
        del present[peer]
        peer.close()
        return
    problem = _problem(own, card, [other for other in present.values() if other], kind)
    present[peer] = card
    with _told(present):
        if problem:
            raise ValueError(problem)


@contextlib.contextmanager
def _told(present: Mapping[socket.socket, Card | None]) -> Iterator[None]:
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


def _report(card: Card, patience: _Patience) -> None:
    first = f"{patience.kind.name} 0"
    while True:
        try:
            answer = _asked(card, patience)
        except OSError as error:
            patience.check(first, f" ({_reason(error)})")
            time.sleep(_PAUSE)
            continue
        if answer.get("problem"):
            raise ValueError(str(answer["problem"]))
        if answer.get("go"):
            return
        time.sleep(_PAUSE)  # somebody else listens there, perhaps the store of a training that is about to end
        patience.check(first, " (who listens there is another program)")


def _asked(card: Card, patience: _Patience) -> dict[str, object]:
    """Number 0's answer, which comes when all are there; nothing if it hung up."""
    with socket.create_connection(_split(patience.endpoint), timeout=5) as peer:
        peer.sendall(json.dumps(asdict(card)).encode() + b"\n")
        while not _readable([peer]):
            patience.check(f"the other {patience.kind.name}s", grace=10)  # number 0 knows better who is missing
        line = peer.recv(_LONGEST_LINE)
    try:
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "its name can't be resolved"
    if isinstance(error, TimeoutError):
        return "nobody answers there"
    return os.strerror(error.errno) if error.errno else str(error)


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)
