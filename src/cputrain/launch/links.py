"""Connections between the agents of several machines, which break when a machine is gone.

Machine 0 listens, and says in the store where; each other one connects to it. Nothing is sent but what shows that both
know the run's token: the kernels keep asking each other. An agent that is stopped, or ends its ranks, still has a
kernel that answers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any

from cputrain import authentication
from cputrain.keep_alive import keep_alive
from cputrain.launch import rendezvous

_SECONDS = 5.0
_TICK = 0.5


class Links:
    """`broken`: the numbers of the machines that were connected, and aren't any more."""

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
        """To be called again and again."""
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
                self._add(0, authentication.connect((address, port), _key(start), own, _SECONDS))
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
    """Those that torch's store has made in this process: else it waits for ever for a machine that is gone."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    keep_alive(copy)
