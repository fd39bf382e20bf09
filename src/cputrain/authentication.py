"""Connections whose two ends show each other that they know the run's token, before anything else is read.

Challenge and response: each side sends random bytes (a nonce), and answers the other's with an HMAC-SHA256 of both
nonces, whose key is made of the token. So the token never travels, and an answer that was overheard is of no use.

    listening side → greeting: MAGIC, nonce                   connecting side → nonce, own number, HMAC
    listening side → HMAC                                     from here on the connection belongs to the caller

A port is open to anyone: scanners connect, send nonsense, reset or stay silent. None of that ends the listening
process, takes the place of a rank, or makes the others wait.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from cputrain.log import logger, say_once
from cputrain.settings import TOKEN, Environ, value_of

SECONDS = 10.0  # for one connection to show that it knows the token
_MAGIC = b"cputrain"
_NONCE, _CODE = 16, 32  # bytes; an HMAC-SHA256 has 32
_NUMBER = struct.Struct("!I")
_ANSWER = _NONCE + _NUMBER.size + _CODE
_AT_ONCE = 64  # connections that are accepted before those that wait are served again
_STRANGERS = 64  # connections that may wait beside the expected ones
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Refused(ConnectionError):
    """The other end is not one of this run, or has another token."""


def new_token() -> str:
    return secrets.token_hex(32)


def key_for(purpose: str, environ: Environ | None = None) -> bytes:
    """The key of one port: an answer that is right there is wrong at any other port of the same run."""
    return hmac.digest(value_of(TOKEN, environ).encode(), purpose.encode(), "sha256")


def say_if_unprotected(environ: Environ | None = None) -> None:
    """For the process that listens: without a token any program that speaks this protocol may take part."""
    if not value_of(TOKEN, environ):
        say_once(
            f"{TOKEN} isn't set: any program that reaches the ports of this run could take a rank's place; set it to "
            "the same secret on all machines"
        )


def _code(key: bytes, side: bytes, nonces: bytes, number: bytes) -> bytes:
    return hmac.digest(key, side + nonces + number, "sha256")


# --- The side that listens ---------------------------------------------------------------------------------------


@dataclass
class _Stranger:
    """A connection that has not yet shown that it knows the token."""

    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE))
    heard: bytes = b""
    deadline: float = field(default_factory=lambda: time.monotonic() + SECONDS)


class Listener:
    """A listening socket. It hands out connections that know the token, with the number that each has given.

    No call waits for a single connection: all are served side by side, and each has a deadline of its own.
    """

    def __init__(self, server: socket.socket, key: bytes, expected: int) -> None:
        """`expected`: how many connections of ours may come at the same time."""
        self._server, self._key, self._most = server, key, expected + _STRANGERS
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._has_said = False
        server.setblocking(False)

    @property
    def port(self) -> int:
        return self._server.getsockname()[1]

    @property
    def sockets(self) -> list[socket.socket]:
        """Those of which `advance` wants to know if they are readable."""
        return [self._server, *self._strangers]

    def wait(self, seconds: float) -> list[tuple[int, socket.socket]]:
        """What `advance` admits, as soon as something happens or the time is over."""
        return self.advance(readable(self.sockets, seconds))

    def advance(self, ready: Iterable[socket.socket]) -> list[tuple[int, socket.socket]]:
        """Serves the sockets that are readable: (number, connection) of those that have shown they know the token."""
        admitted = []
        for one in ready:
            if one is self._server:
                self._accept()
            elif one in self._strangers and (number := self._hear(one)) is not None:
                admitted.append((number, one))
        now = time.monotonic()
        for one in [one for one, stranger in self._strangers.items() if stranger.deadline < now]:
            self._drop(one)
        return admitted

    def close(self) -> None:
        self._server.close()
        for one in list(self._strangers):
            self._drop(one)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _ = self._server.accept()
            except OSError as error:  # also one that was reset before it was accepted
                if error.errno in _NO_ROOM:
                    self._make_room()
                return
            self._greet(connection)
            if len(self._strangers) > self._most:
                self._drop(next(iter(self._strangers)))

    def _make_room(self) -> None:
        """The process may open no more files: the oldest stranger goes. Without one, the server stays readable."""
        if self._strangers:
            self._drop(next(iter(self._strangers)))
        else:
            time.sleep(0.1)

    def _greet(self, connection: socket.socket) -> None:
        stranger = _Stranger()
        try:
            connection.setblocking(False)
            connection.send(_MAGIC + stranger.nonce)  # fits into the buffer of a new connection
        except OSError:
            connection.close()
            return
        self._strangers[connection] = stranger

    def _hear(self, connection: socket.socket) -> int | None:
        """The number that it gave, if it knows the token. Never reads beyond the answer: the rest is the caller's."""
        stranger = self._strangers[connection]
        try:
            heard = connection.recv(_ANSWER - len(stranger.heard))
        except BlockingIOError:
            return None
        except OSError:
            heard = b""
        stranger.heard += heard
        if heard and len(stranger.heard) < _ANSWER:
            return None
        if not heard or not self._answer(connection, stranger):
            self._drop(connection)
            return None
        del self._strangers[connection]
        return _NUMBER.unpack(stranger.heard[_NONCE:-_CODE])[0]

    def _answer(self, connection: socket.socket, stranger: _Stranger) -> bool:
        nonces, number = stranger.nonce + stranger.heard[:_NONCE], stranger.heard[_NONCE:-_CODE]
        if not hmac.compare_digest(stranger.heard[-_CODE:], _code(self._key, b"connects", nonces, number)):
            self._say_refused(connection)
            return False
        try:
            return connection.send(_code(self._key, b"listens", nonces, number)) == _CODE
        except OSError:
            return False

    def _say_refused(self, connection: socket.socket) -> None:
        """Once: a scanner comes again and again."""
        if not self._has_said:
            self._has_said = True
            with contextlib.suppress(OSError):
                where = connection.getpeername()[0]
                logger.info(f"refused a connection from {where}: no part of this run, or {TOKEN} differs there")

    def _drop(self, connection: socket.socket) -> None:
        del self._strangers[connection]
        connection.close()


def readable(sockets: Iterable[socket.socket], seconds: float) -> list[socket.socket]:
    with selectors.DefaultSelector() as selector:
        for one in sockets:
            selector.register(one, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds) if isinstance(key.fileobj, socket.socket)]


# --- The side that connects --------------------------------------------------------------------------------------


def connect(address: tuple[str, int], key: bytes, number: int, seconds: float = SECONDS) -> socket.socket:
    """A connection to a `Listener` of the same key, as a socket without a time-out; an OSError if there is none."""
    deadline = time.monotonic() + seconds
    connection = socket.create_connection(address, timeout=seconds)
    try:
        _introduce(connection, key, _NUMBER.pack(number), deadline)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


def _introduce(connection: socket.socket, key: bytes, number: bytes, deadline: float) -> None:
    greeting = _read(connection, len(_MAGIC) + _NONCE, deadline)
    if not greeting.startswith(_MAGIC):
        raise Refused("another program listens there")
    nonce = secrets.token_bytes(_NONCE)
    nonces = greeting[len(_MAGIC) :] + nonce
    connection.sendall(nonce + number + _code(key, b"connects", nonces, number))
    try:
        answer = _read(connection, _CODE, deadline)
    except ConnectionError:
        raise Refused(f"it refuses us: is {TOKEN} the same there?") from None
    if not hmac.compare_digest(answer, _code(key, b"listens", nonces, number)):
        raise Refused(f"another program listens there, or {TOKEN} differs")


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    found = b""
    while len(found) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(size - len(found))
        if not more:
            raise ConnectionResetError(errno.ECONNRESET, "it hung up")
        found += more
    return found
