"""Notices ranks of other machines that die, and links that break.

Every rank holds a TCP connection to the group's first rank. A process that is killed loses its connection at once; a
machine or link that is gone no longer answers the kernel's keep-alive probes, and its connection breaks after about
ten seconds. The probes are answered by the other kernel: a rank that computes, holds the GIL or is stopped is late,
not dead. Forked workers close their copy of the connection, so they don't keep a dead rank alive.

A rank that is in a collective for more than a second says so, with the collective's number, and the first rank passes
it on: so everybody knows who is late when the time is over.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from cputrain.distributed import communication_cpus, native_calls
from cputrain.keep_alive import keep_alive

_NUMBER = struct.Struct("i")
_PROGRESS = struct.Struct("ii")  # a rank, and the number of the collective that it is in
_TICK = 1.0  # seconds
_BYE = -1  # of the one who sends it; -2 - r: of rank r, passed on by the first rank; r: that rank has died
_IN_COLLECTIVE = -(2**31)  # a progress follows
_DIFFERS = _IN_COLLECTIVE + 1  # a rank follows that called another collective than its machine's others

_live: weakref.WeakSet[Monitor] = weakref.WeakSet()


class Monitor:
    """Who of a group has died, as far as the connections tell."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        address: str,
        timeout: timedelta,
        tell: Callable[[int, int], None],
    ) -> None:
        """`tell` is called in a thread of its own: what happened (native_calls.DIED, MISMATCH), and to which rank."""
        self.rank, self.dead, self.differing, self._tell = rank, -1, -1, tell
        self._connections = _connect(store, rank, size, address, timeout)
        self._wake, self._woken = socket.socketpair()
        self.left: dict[int, float] = {}  # who has ended the group properly, and when
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
        """Who has not come to the collective that this rank waits in; None if nobody is known, or it is too early."""
        if time.monotonic() - self._entered_at < 3 * _TICK:
            return None
        others = (rank for rank in range(self._size) if rank != self.rank)
        # The first rank passes on what the others say: if it is late itself, nothing is known of them.
        return next((rank for rank in others if self._progress[rank] < self._entered), None)

    def culprit(self) -> int | None:
        """Who is most likely the cause if a collective has failed; None if nobody is known to be gone."""
        return self.dead if self.dead >= 0 else next(iter(self.left), None)

    def tell_difference(self) -> None:
        """The ranks of this machine are in different collectives: everybody else waits in vain."""
        if self.differing < 0:
            self.differing = self.rank
            self._pass_on(_DIFFERS, self.rank)

    def close(self) -> None:
        """Says that this rank ends properly."""
        self._closing = True
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(_NUMBER.pack(_BYE))
        self._wake.send(b"x")
        self._thread.join()
        for connection in (*self._connections.values(), self._wake, self._woken):
            connection.close()

    def forget(self) -> None:
        """In a forked child: the connections are the parent's."""
        for connection in (*self._connections.values(), self._wake, self._woken):
            connection.close()

    def _serve(self) -> None:
        communication_cpus.move_there()
        with selectors.DefaultSelector() as selector:
            for peer, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, peer)
            selector.register(self._woken, selectors.EVENT_READ, None)
            while not self._closing and self.dead < 0 and not self._nobody_is_left():
                for key, _ in selector.select(_TICK):
                    if key.data is not None and not self._listen(key.data):
                        selector.unregister(key.fileobj)
                self._tell_progress()

    def _listen(self, peer: int) -> bool:
        """Whether there is more to hear from this peer."""
        try:
            (number,) = self._read(peer, _NUMBER)
            if number == _IN_COLLECTIVE:
                rank, came_to = self._read(peer, _PROGRESS)
                self._progress[rank] = max(came_to, self._progress[rank])
                return True
            if number == _DIFFERS:
                self._note_difference(*self._read(peer, _NUMBER))
                return True
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

    def _tell_progress(self) -> None:
        if time.monotonic() - self._entered_at > _TICK:
            self._progress[self.rank] = self._entered
        known = self._progress if self.rank == 0 else {self.rank: self._progress[self.rank]}
        news = {rank: number for rank, number in known.items() if self._told.get(rank, 0) != number}
        self._told |= news
        text = b"".join(_NUMBER.pack(_IN_COLLECTIVE) + _PROGRESS.pack(*one) for one in news.items())
        for peer, connection in self._connections.items():
            if text and peer not in self.left:
                with contextlib.suppress(OSError):
                    connection.sendall(text)

    def _nobody_is_left(self) -> bool:
        return all(peer in self.left for peer in self._connections)

    def _note_end(self, ended: int) -> None:
        self.left[ended] = time.monotonic()
        if self.rank == 0:
            self._pass_on(-2 - ended, but=ended)

    def _note_difference(self, rank: int) -> None:
        if self.differing >= 0:
            return
        self.differing = rank
        if self.rank == 0:
            self._pass_on(_DIFFERS, rank, but=rank)
        self._tell(native_calls.MISMATCH, rank)

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
    if rank == 0:
        with socket.create_server((address, 0), family=_family(address), backlog=size) as listener:
            listener.settimeout(timeout.total_seconds())
            store.set("monitor", f"{address} {listener.getsockname()[1]}")
            found: dict[int, socket.socket] = {}
            while len(found) < size - 1:
                connection, _ = listener.accept()
                connection.settimeout(timeout.total_seconds())
                found[_NUMBER.unpack(connection.recv(_NUMBER.size, socket.MSG_WAITALL))[0]] = connection
    else:
        store.wait(["monitor"], timeout)
        host, port = store.get("monitor").decode().split()
        connection = socket.create_connection((host, int(port)), timeout.total_seconds())
        connection.sendall(_NUMBER.pack(rank))
        found = {0: connection}
    for connection in found.values():
        connection.settimeout(None)
        keep_alive(connection)
    return found


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _forget_all() -> None:
    for monitor in list(_live):
        monitor.forget()


os.register_at_fork(after_in_child=_forget_all)
