"""Whether the other machines of a training still live. "Liveness" in docs/architecture.md says what notices what.

`Links` are connections between agents, which the kernels keep asking: an agent that is stopped, or ends its ranks,
still has a kernel that answers. `Peers` is what agents say in the store: my ranks run, have ended, have failed. Between
a launch and machines that it reaches by ssh, `beating` speaks and `listen` hears; a `watch` ends what an mpirun left.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from cputrain import __version__, authentication
from cputrain.keep_alive import LAST_WORDS_SECONDS, SSH_SECONDS, keep_alive
from cputrain.launch import processes, rendezvous, ssh
from cputrain.launch.pmi import PROXIES
from cputrain.launch.processes import Failure
from cputrain.launch.ssh import Session

if TYPE_CHECKING:
    import psutil

_LINK_SECONDS = 5.0
_TICK = 0.5


class Links:
    """Machine 0 listens, and says in the store where; each other one connects to it.

    Nothing is sent but what shows that both know the run's token. `broken`: the numbers of the machines that were
    connected, and aren't any more.
    """

    def __init__(self, store: Any, key: str, own: int, size: int, endpoint: str) -> None:
        """`endpoint`: the host where the machines meet, which may be machine 0 or another one."""
        self.broken: set[int] = set()
        self._links: dict[int, socket.socket] = {}
        self._closing = threading.Event()
        self._arrived: SimpleQueue[tuple[int, socket.socket]] = SimpleQueue()
        if own == 0:
            self._listen(store, key, size, endpoint)
        else:
            port, start, *addresses = store.get(key).decode().split(",")
            self._connect(own, dict.fromkeys([endpoint, *addresses]), int(port), start)

    def look(self) -> None:
        while not self._arrived.empty():
            self._add(*self._arrived.get())
        for number, link in list(self._links.items()):
            try:
                if link.recv(1):
                    continue
            except BlockingIOError:
                continue
            except OSError:  # no answer: ETIMEDOUT, EHOSTUNREACH …
                pass
            self._links.pop(number).close()
            self.broken.add(number)

    def close(self) -> None:
        self._closing.set()
        for link in self._links.values():
            link.close()

    def _listen(self, store: Any, key: str, size: int, endpoint: str) -> None:
        authentication.say_if_unprotected(os.environ)
        start = secrets.token_hex(16)  # the machines of an earlier start have another port, and another key
        address = _own_address(endpoint)
        listener = authentication.Listener(rendezvous.server_at(address, 0), _key(start), size)
        threading.Thread(target=self._serve, args=(listener,), name="cputrain-links", daemon=True).start()
        addresses = [address] if address else rendezvous.own_addresses()
        store.set(key, ",".join([str(listener.port), start, *addresses]))

    def _serve(self, listener: authentication.Listener) -> None:
        """In a thread of its own: the other machines wait for an answer before they start their ranks."""
        while not self._closing.is_set():
            for arrived in listener.wait(_TICK):
                self._arrived.put(arrived)
        listener.close()

    def _connect(self, own: int, addresses: Iterable[str], port: int, start: str) -> None:
        for address in addresses:
            with contextlib.suppress(OSError):
                self._add(0, authentication.connect((address, port), _key(start), own, _LINK_SECONDS))
                return

    def _add(self, number: int, link: socket.socket) -> None:
        keep_alive(link)
        link.setblocking(False)
        self._links[number] = link


def _key(start: str) -> bytes:
    return authentication.key_for(f"links {start}", os.environ)


def _own_address(endpoint: str) -> str:
    """This machine's on the way to the place where all meet; "", all of them, if that is here under a local name."""
    address = rendezvous.address_towards(endpoint) or ""
    return address if rendezvous.is_loopback(endpoint) or not rendezvous.is_loopback(address) else ""


def keep_all_alive() -> None:
    """Connections that torch's store has made in this process: else it waits for ever for a machine that is gone."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    keep_alive(copy)


_STATE_SECONDS = 5.0
# An agent that ends its ranks, or is stopped for a minute, is late and not gone.
_SILENT_AGENT_SECONDS = 90.0


class Peers:
    """The agents of one round, by their numbers, through the store that they share."""

    def __init__(self, store: Any, own: int, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._own, self._size, self._clock = store, own, size, clock
        self._beats = 0
        self._next_beat = 0.0
        self._heard: dict[int, tuple[str, float]] = {}  # the last state of a peer, and since when it is the same
        # A static rendezvous keeps one store for all starts: without a count, the last start's end would count again.
        self.start = self._store.add(f"cputrain/starts/{own}", 1)
        self._failed = f"cputrain/failed/{self.start}"
        self.beat()

    def beat(self) -> None:
        if self._clock() >= self._next_beat:
            self._beats += 1
            self._say(f"running {self._beats}")

    def say_ended(self) -> None:
        self._say("ended")

    def say_failed(self, failure: Failure) -> None:
        """The first counts: what fails then fails because of it."""
        self._store.compare_set(self._failed, "", json.dumps(failure))

    def failure(self) -> Failure | None:
        if not self._store.check([self._failed]):
            return None
        self._store.set(f"cputrain/heard/{self.start}/{self._own}", "")
        return Failure(*json.loads(self._store.get(self._failed)))

    def all_heard(self) -> bool:
        """Whether no machine needs the store any more, which may end with this process."""
        return self._store.check(
            [f"cputrain/heard/{self.start}/{peer}" for peer in range(self._size) if peer != self._own]
        )

    def has_ended(self, peer: int) -> bool:
        return self._state(peer) == f"{self.start} ended"

    def all_ended(self) -> bool:
        return all(map(self.has_ended, range(self._size)))

    def lost(self) -> list[int]:
        """Those that have been silent for long, or have started anew without us. To be asked again and again."""
        return [peer for peer in range(self._size) if peer != self._own and self._is_lost(peer)]

    def _is_lost(self, peer: int) -> bool:
        state, now = self._state(peer), self._clock()
        before, since = self._heard.setdefault(peer, (state, now))
        if state != before:
            self._heard[peer] = (state, now)
            since = now
        start, _, doing = state.partition(" ")
        return int(start or 0) > self.start or (doing != "ended" and now - since > _SILENT_AGENT_SECONDS)

    def _say(self, doing: str) -> None:
        self._store.set(f"cputrain/state/{self._own}", f"{self.start} {doing}")
        self._next_beat = self._clock() + _STATE_SECONDS

    def _state(self, peer: int) -> str:
        """The number of its start, and what it does; nothing if it hasn't begun."""
        key = f"cputrain/state/{peer}"
        return self._store.get(key).decode() if self._store.check([key]) else ""


# --- Between a launch and the programs that its ssh has started --------------------------------------------------

BEAT_SECONDS = 3.0
# What is left of a lost launch ends when the ranks have had as long as there to say which rank is gone.
SILENT_SECONDS = SSH_SECONDS + LAST_WORDS_SECONDS


@contextlib.contextmanager
def beating(sessions: list[Session]) -> Iterator[None]:
    """While it lasts, all machines hear that we live: from a process of its own, which Ctrl-Z doesn't stop."""
    inputs, parent = [session.input for session in sessions], os.getpid()
    child = processes.fork(lambda: _beat(inputs, parent))
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)  # it holds the sessions' ends, which are about to be closed
        os.waitpid(child, 0)


def _beat(inputs: list[int], parent: int) -> None:
    os.setsid()
    processes.die_with(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        for descriptor in inputs:
            os.set_blocking(descriptor, False)
            with contextlib.suppress(OSError):  # its ssh has ended, or can't send: there is nothing to be done here
                os.write(descriptor, b"\n")
        time.sleep(BEAT_SECONDS)


def listen(descriptor: int, ended: Callable[[], None], heard: Callable[[], None] | None = None) -> None:
    """The starter of this process holds the other end; when it closes, for any reason, or is silent, this is over."""
    while select.select([descriptor], [], [], SILENT_SECONDS)[0] and os.read(descriptor, 4096):
        if heard:
            heard()
    ended()


# --- A watch on each other machine of an mpirun, whose proxies wait for ever for one that is gone ------------------

_READY = b"ready\n"
_LOOK_SECONDS = 20.0


def watched(machines: list[str], mark: str) -> list[Session]:
    """Starts a watch on each, side by side; a ValueError says which machines can't be reached, and why.

    By the mark, a variable's value, a watch knows the processes of the job.
    """
    words = json.dumps({"mark": mark, "version": __version__})
    sessions = [Session(name, words) for name in machines]
    for one in sessions:
        one.start(answers=True)
    if problems := [one.ending(one.process.wait()) for one in sessions if _answer(one) != _READY]:
        ssh.end(sessions)
        raise ValueError("; ".join(problems) + ".")
    return sessions


def _answer(one: Session) -> bytes:
    assert one.process.stdout
    return one.process.stdout.readline()


def watch(mark: str) -> None:
    """On the other machine: until standard input ends or is silent, and then ends all that is left of the job."""
    job = _Job(mark)
    sys.stdout.buffer.write(_READY)
    sys.stdout.flush()
    listen(0, lambda: processes.end(job.living), heard=job.look)


class _Job:
    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._proxies: set[psutil.Process] = set()
        self._next_look = 0.0

    def look(self) -> None:
        """Remembers the proxies: when their ranks have ended, nothing tells whose they were."""
        import psutil

        if time.monotonic() < self._next_look:
            return
        for pid in processes.marked(processes.JOB, self._mark):
            with contextlib.suppress(psutil.Error):
                parent = psutil.Process(pid).parent()
                if parent and parent.name() in PROXIES and parent.uids().real == os.getuid():
                    self._proxies.add(parent)
        if self._proxies:
            self._next_look = time.monotonic() + _LOOK_SECONDS

    def living(self) -> list[int]:
        proxies = [proxy.pid for proxy in self._proxies if proxy.is_running()]
        return [*processes.marked(processes.JOB, self._mark), *proxies]
