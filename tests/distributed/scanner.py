"""A port scanner: connects to whatever the processes below some launches listen at, as long as they run.

    python -m tests.distributed.scanner PID...

It sends garbage, hangs up, resets, stays silent, or says what our own ports expect from a rank, without the token. At
SIGTERM it prints, as JSON, how often it came to which port: {"tcp 127.0.0.1:40001": 23, …}.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import random
import signal
import socket
import struct
import sys
import time
from collections import Counter, deque
from pathlib import Path

import psutil

_LISTENING, _LISTENING_UNIX = "0A", "00010000"  # as the kernel writes them
_HELD = 100  # silent connections at once
_PAUSE = 0.01
WORDS = (
    b"GET / HTTP/1.1\r\n\r\n",
    struct.pack("i", 1),  # what a rank once said to the monitor
    b'{"machine": 1, "machines": 2, "host": "x", "version": "0.1.0"}\n',
    b'{"machine": Infinity}\n',
    b"[" * 4000 + b"\n",
    b"cputrain" + b"n" * 16,  # the greeting of our own protocol
    b"n" * 16 + struct.pack("!I", 1) + b"m" * 32,  # an answer by the protocol, with a wrong code
    b"\0" + struct.pack("I", 0x3C85F7CE) + b"\1" + struct.pack("Q", 2**40) + b"x",  # of torch's store: a huge key
    b"\0\1",  # half of the store's first word
)


class Scanner:
    def __init__(self, roots: list[int], seed: int = 0) -> None:
        self._roots, self._random = roots, random.Random(seed)
        self._silent: deque[socket.socket] = deque()
        self.came: Counter[str] = Counter()

    def scan(self) -> None:
        """Comes once to every port that is open now."""
        inodes = self._inodes()
        for name, family, address in (*tcp_ports(inodes), *unix_ports(inodes)):
            with contextlib.suppress(OSError):
                self._come(socket.socket(family, socket.SOCK_STREAM), address)
                self.came[name] += 1

    def _inodes(self) -> set[str]:
        """Of all sockets of the processes below the roots."""
        found: set[str] = set()
        for root in self._roots:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(root)
                for one in (process, *process.children(recursive=True)):
                    found |= _sockets(one.pid)
        return found

    def _come(self, connection: socket.socket, address: tuple[str, int] | str) -> None:
        connection.settimeout(1)
        connection.connect(address)
        what = self._random.randrange(4)
        if what > 0:
            garbage = self._random.randbytes(self._random.randint(9, 300))
            connection.sendall(garbage if what == 1 else self._random.choice(WORDS))
        if self._random.random() < 0.4:
            self._silent.append(connection)
            if len(self._silent) > _HELD:
                self._silent.popleft().close()
            return
        if self._random.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        connection.close()


def _sockets(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    found.add(target[len("socket:[") : -1])
    return found


def tcp_ports(inodes: set[str]) -> list[tuple[str, socket.AddressFamily, tuple[str, int]]]:
    """(name, family, address to connect to) of each listening socket among these."""
    found = []
    for file, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in Path(f"/proc/net/{file}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == _LISTENING and words[9] in inodes:
                text, _, port = words[1].partition(":")
                bound = _address(text)
                reached = str(bound) if not bound.is_unspecified else "127.0.0.1" if bound.version == 4 else "::1"
                found.append((f"tcp {bound}:{int(port, 16)}", family, (reached, int(port, 16))))
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The kernel writes words of four bytes in the machine's own order."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))


def unix_ports(inodes: set[str]) -> list[tuple[str, socket.AddressFamily, str]]:
    found = []
    for row in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = row.split()
        if len(words) == 8 and words[3] == _LISTENING_UNIX and words[6] in inodes and words[7].startswith("@"):
            found.append((f"unix {words[7]}", socket.AF_UNIX, "\0" + words[7][1:]))
    return found


def main() -> None:
    scanner = Scanner([int(word) for word in sys.argv[1:]])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        while True:
            scanner.scan()
            time.sleep(_PAUSE)
    finally:
        print(json.dumps(scanner.came), flush=True)


if __name__ == "__main__":
    main()
