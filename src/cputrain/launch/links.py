"""Connections between the agents of several machines, which break when a machine is gone.

Machine 0 listens, and says in the store where; each other one connects to it. Nothing is sent but who one is: the
kernels keep asking each other. An agent that is stopped, or ends its ranks, still has a kernel that answers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from typing import Any

from cputrain.keep_alive import keep_alive
from cputrain.launch import rendezvous

_SECONDS = 5.0
_WHO = 64  # bytes: a token and a number


class Links:
    """`broken`: the numbers of the machines that were connected, and aren't any more."""

    def __init__(self, store: Any, key: str, own: int, endpoint: str) -> None:
        """`endpoint`: an address at which machine 0 may be reached, beside those that it knows itself."""
        self.broken: set[int] = set()
        self._links: dict[int, socket.socket] = {}
        self._known: set[int] = set()  # who has shown that it is the one: ports may belong to anybody
        self._strangers: list[socket.socket] = []
        self._server: socket.socket | None = None
        if own == 0:
            self._token = secrets.token_hex(8)
            self._server = socket.create_server(("", 0), backlog=1024)
            self._server.setblocking(False)
            port = self._server.getsockname()[1]
            store.set(key, ",".join([str(port), self._token, *rendezvous.own_addresses()]))
        else:
            port, self._token, *addresses = store.get(key).decode().split(",")
            self._connect(own, [endpoint, *addresses], int(port))

    def look(self) -> None:
        """To be called again and again."""
        if self._server:
            self._accept(self._server)
        for number, link in list(self._links.items()):
            try:
                heard = link.recv(_WHO)
            except BlockingIOError:
                continue
            except OSError:  # no answer: ETIMEDOUT, EHOSTUNREACH …
                heard = b""
            if heard:
                self._known.add(number)
            else:
                self._links.pop(number).close()
                self.broken |= {number} & self._known

    def close(self) -> None:
        for link in (self._server, *self._links.values(), *self._strangers):
            if link:
                link.close()

    def _connect(self, own: int, addresses: list[str], port: int) -> None:
        for address in addresses:
            with contextlib.suppress(OSError):
                link = socket.create_connection((address, port), timeout=_SECONDS)
                link.sendall(f"{self._token} {own}".encode().ljust(_WHO))
                self._add(0, link)
                return

    def _add(self, number: int, link: socket.socket) -> None:
        keep_alive(link)
        link.setblocking(False)
        self._links[number] = link

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                link, _ = server.accept()
                link.setblocking(False)
                self._strangers.append(link)
        for link in self._strangers.copy():
            with contextlib.suppress(BlockingIOError):
                self._strangers.remove(link)
                self._introduce(link)

    def _introduce(self, link: socket.socket) -> None:
        """Whoever doesn't know the token is none of ours."""
        try:
            token, _, number = link.recv(_WHO).decode(errors="replace").partition(" ")
        except BlockingIOError:
            self._strangers.append(link)
            raise
        except OSError:
            token = ""
        if token == self._token and number.strip().isdecimal():
            self._add(int(number), link)
            self._known.add(int(number))
            link.send(self._token.encode())
        else:
            link.close()


def keep_all_alive() -> None:
    """Those that torch's store has made in this process: else it waits for ever for a machine that is gone."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    keep_alive(copy)
