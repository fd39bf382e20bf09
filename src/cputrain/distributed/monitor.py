"""Notices ranks of other machines that die, and links that break.

Every rank holds a TCP connection to the group's first rank. A process that is killed loses its connection at once; a
machine or link that is gone no longer answers the kernel's keep-alive probes, and its connection breaks after 7 to 9
seconds. The probes are answered by the other kernel: a rank that computes, holds the GIL or is stopped is late,
not dead. Forked workers close their copy of the connection, so they don't keep a dead rank alive.

A rank that is in a collective for more than a second says so, with the collective's number, and the first rank passes
it on: so all ranks know which one is late when the time is over.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from cputrain import authentication
from cputrain.distributed import native_calls
from cputrain.distributed.work import move_to_communication_cpus
from cputrain.keep_alive import keep_alive
from cputrain.settings import is_first_rank

_NUMBER = struct.Struct("i")
_PAIR = struct.Struct("ii")
_TICK = 1.0  # seconds
# A rank that is crowded out by strangers comes again; one with another token would come for ever.
_REFUSED_SECONDS = 30.0
_BYE = -1  # of the rank that sends it; -2 - r: of rank r, passed on by the first rank; r: that rank has died
_IN_COLLECTIVE = -(2**31)  # a rank follows, and the number of the collective that it is in
DIFFERS = _IN_COLLECTIVE + 1  # a rank follows, and one that called another collective than it
LATE = _IN_COLLECTIVE + 2  # a rank follows, and one for which it has waited in vain

_Tell = Callable[[int, int], None]
_live: weakref.WeakSet[Monitor] = weakref.WeakSet()


class Monitor:
    """Which ranks of a group have died, as far as the connections tell."""

    def __init__(self, store: dist.Store, rank: int, size: int, address: str, timeout: timedelta, tell: _Tell) -> None:
        """`tell` is called in a thread of its own: what happened (native_calls.DIED, MISMATCH), and to which rank."""
        self.rank, self.dead, self._tell = rank, -1, tell
        self.found: dict[int, tuple[int, int]] = {}  # the two ranks of the first DIFFERS, and of the first LATE
        self._connections = _connect(store, rank, size, address, timeout)
        self._wake, self._woken = socket.socketpair()
        self.left: dict[int, float] = {}  # the ranks that have ended the group properly, and when
        self._size, self._entered, self._entered_at = size, 0, time.monotonic()
        self._progress = dict.fromkeys(range(size), 0)  # the collective that each rank is known to have come to
        self._told: dict[int, int] = {}  # what of it was passed on
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="cputrain-monitor", daemon=True)
        self._thread.start()
        _live.add(self)

    def enter(self, number: int) -> None:
        """This rank comes to its next collective."""
        self._entered, self._entered_at = number, time.monotonic()

    def absent(self) -> int | None:
        """The rank that has not come to the collective in which this rank waits; None if unknown, or too early."""
        return next(iter(self.all_absent()), None)

    def all_absent(self) -> list[int]:
        """The first rank passes on what the others say: if it is late itself, nothing is known of them."""
        if time.monotonic() - self._entered_at < 3 * _TICK:
            return []
        absent = [r for r in range(self._size) if r != self.rank and self._progress[r] < self._entered]
        return [0] if absent[:1] == [0] else absent

    def culprit(self) -> int | None:
        """The rank that most likely caused a collective's failure; None if no rank is known to be gone."""
        return self.dead if self.dead >= 0 else next(iter(self.left), None)

    def tell_found(self, what: int, other: int) -> None:
        """This rank and another one are in different collectives (DIFFERS), or it has given up waiting for that one.

        All others wait in vain; this rank's end, which follows, is no death.
        """
        if what not in self.found:
            self.found[what] = self.rank, other
            self._pass_on(what, self.rank, other)

    def close(self) -> None:
        """Says that this rank ends properly."""
        self._closing = True
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(_NUMBER.pack(_BYE))
        self._wake.send(b"x")
        self._thread.join()
        self.forget()

    def forget(self) -> None:
        """In a forked child: the connections are the parent's."""
        for connection in (*self._connections.values(), self._wake, self._woken):
            connection.close()

    def _serve(self) -> None:
        move_to_communication_cpus()
        with selectors.DefaultSelector() as selector:
            for peer, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, peer)
            selector.register(self._woken, selectors.EVENT_READ, None)
            while not self._closing and self.dead < 0 and self._connections.keys() - self.left.keys():
                for key, _ in selector.select(_TICK):
                    if key.data is not None and not self._listen(key.data):
                        selector.unregister(key.fileobj)
                self._tell_progress()

    def _listen(self, peer: int) -> bool:
        """Whether there is more to hear from this peer."""
        try:
            (number,) = self._read(peer, _NUMBER)
            if number == _IN_COLLECTIVE:
                rank, came_to = self._read(peer, _PAIR)
                self._progress[rank] = max(came_to, self._progress[self._checked(rank)])
                return True
            if number in (DIFFERS, LATE):
                self._note_found(number, *map(self._checked, self._read(peer, _PAIR)))
                return True
            if number != _BYE:
                self._checked(number if number >= 0 else -2 - number)
        except OSError:
            if peer not in self.left and not self._closing:
                self._report(peer)
            return False
        if number >= 0:
            self._report(number)
            return False
        self._note_end(peer if number == _BYE else -2 - number)
        return number != _BYE

    def _read(self, peer: int, layout: struct.Struct) -> tuple[int, ...]:
        content = self._connections[peer].recv(layout.size, socket.MSG_WAITALL)
        if len(content) < layout.size:
            raise ConnectionError("the peer's process or machine is gone")
        return layout.unpack(content)

    def _checked(self, rank: int) -> int:
        """What speaks of a rank that isn't there is no peer of ours any more."""
        if rank not in self._progress:
            raise ConnectionError(f"the peer speaks of a rank {rank}, which this group doesn't have")
        return rank

    def _tell_progress(self) -> None:
        if time.monotonic() - self._entered_at > _TICK:
            self._progress[self.rank] = self._entered
        known = self._progress if self.rank == 0 else {self.rank: self._progress[self.rank]}
        news = {rank: number for rank, number in known.items() if self._told.get(rank, 0) != number}
        self._told |= news
        if news:
            self._pass_on(*(number for rank, came_to in news.items() for number in (_IN_COLLECTIVE, rank, came_to)))

    def _note_end(self, ended: int) -> None:
        self.left[ended] = time.monotonic()
        if self.rank == 0:
            self._pass_on(-2 - ended, but=ended)

    def _note_found(self, what: int, rank: int, other: int) -> None:
        if what in self.found:
            return
        self.found[what] = rank, other
        if self.rank == 0:
            self._pass_on(what, rank, other, but=rank)
        if what == DIFFERS:
            self._tell(native_calls.MISMATCH, rank)
        else:
            self._tell(native_calls.TIMEOUT, other)

    def _pass_on(self, *numbers: int, but: int = -1) -> None:
        text = b"".join(map(_NUMBER.pack, numbers))  # in one piece: several threads write
        for peer, connection in self._connections.items():
            if peer != but and peer not in self.left:
                with contextlib.suppress(OSError):
                    connection.sendall(text)

    def _report(self, dead: int) -> None:
        """Remembers, tells this machine, and as the first rank tells all others."""
        if self.dead >= 0:
            return
        self.dead = dead
        if self.rank == 0:
            self._pass_on(dead, but=dead)
        self._tell(native_calls.DIED, dead)


def _connect(store: dist.Store, rank: int, size: int, address: str, timeout: timedelta) -> dict[int, socket.socket]:
    """The first rank: a connection for each other one. All others: one to the first."""
    deadline = time.monotonic() + timeout.total_seconds()
    found = _gather(store, size, address, deadline) if rank == 0 else {0: _report(store, rank, timeout, deadline)}
    for connection in found.values():
        connection.settimeout(None)
        keep_alive(connection)
    return found


def _gather(store: dist.Store, size: int, address: str, deadline: float) -> dict[int, socket.socket]:
    """Of each rank its last connection: a rank whose first one broke has come again."""
    if is_first_rank():  # said by the first group, of all ranks; later groups have other first ranks
        authentication.say_if_unprotected()
    group = secrets.token_hex(16)  # other groups, and earlier attempts, have ports of their own
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family, backlog=1024)
    with contextlib.closing(authentication.Listener(server, _key(group), size)) as listener:
        store.set("monitor", f"{address} {listener.port} {group}")
        found: dict[int, socket.socket] = {}
        while len(found) < size - 1:
            if time.monotonic() > deadline:
                missing = ", ".join(str(rank) for rank in range(1, size) if rank not in found)
                raise TimeoutError(f"rank {missing} of this group did not come within the group's timeout.")
            for rank, connection in listener.wait(_TICK):
                if rank in found:
                    found.pop(rank).close()
                if 0 < rank < size:
                    found[rank] = connection
                else:
                    connection.close()
    return found


def _report(store: dist.Store, rank: int, timeout: timedelta, deadline: float) -> socket.socket:
    store.wait(["monitor"], timeout)
    host, port, group = store.get("monitor").decode().split()
    patience = time.monotonic() + _REFUSED_SECONDS
    while True:
        try:
            return authentication.connect((host, int(port)), _key(group), rank)
        except authentication.Refused:
            if time.monotonic() > patience:
                raise
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _key(group: str) -> bytes:
    return authentication.key_for(f"monitor {group}")


def _forget_all() -> None:
    for monitor in list(_live):
        monitor.forget()


os.register_at_fork(after_in_child=_forget_all)
