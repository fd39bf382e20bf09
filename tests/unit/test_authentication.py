"""Both ends of a connection know the token, or there is no connection; nonsense from anyone else changes nothing."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from cputrain import authentication, log
from cputrain.authentication import TOKEN, Listener, Refused

KEY = authentication.key_for("a test", {TOKEN: "the token"})
ADDRESS = "127.0.0.1"


class Server:
    """A listener that is served in a thread, and whom it has admitted."""

    def __init__(self, key: bytes = KEY, expected: int = 4) -> None:
        self.listener = Listener(socket.create_server((ADDRESS, 0)), key, expected)
        self.address = (ADDRESS, self.listener.port)
        self.admitted: list[tuple[int, socket.socket]] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing.is_set():
            self.admitted += self.listener.wait(0.01)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self.listener.close()
        for _, connection in self.admitted:
            connection.close()

    def numbers(self, count: int) -> list[int]:
        """Of all that it has admitted, when so many have been, which a client may know a moment before."""
        limit = time.monotonic() + 20
        while len(self.admitted) < count and time.monotonic() < limit:
            time.sleep(0.001)
        return [number for number, _ in self.admitted]


@pytest.fixture
def server() -> Iterator[Server]:
    with contextlib.closing(Server()) as made:
        yield made


@pytest.fixture(scope="module")
def patient_server() -> Iterator[Server]:
    """One for all examples of a test."""
    with contextlib.closing(Server()) as made:
        yield made


def test_who_knows_the_token_is_admitted_with_its_number(server: Server) -> None:
    with authentication.connect(server.address, KEY, 3) as first, authentication.connect(server.address, KEY, 1):
        first.sendall(b"what follows is the caller's")
        assert server.numbers(2) == [3, 1]
        server.admitted[0][1].settimeout(5)
        assert server.admitted[0][1].recv(100) == b"what follows is the caller's"
        server.admitted[0][1].sendall(b"so is this")
        assert first.gettimeout() is None and first.recv(100) == b"so is this"


@pytest.mark.parametrize(
    "key",
    [
        authentication.key_for("a test", {TOKEN: "another"}),
        authentication.key_for("a test", {}),
        authentication.key_for("another port", {TOKEN: "the token"}),
    ],
    ids=["token", "none", "purpose"],
)
def test_another_token_or_port_is_refused(key: bytes, server: Server, caplog) -> None:
    with caplog.at_level(logging.INFO, "cputrain"):
        for _ in range(3):
            with pytest.raises(Refused, match=r"is CPUTRAIN_TOKEN the same there\?"):
                authentication.connect(server.address, key, 1)
    assert server.numbers(0) == []
    (said,) = caplog.messages
    assert "refused a connection from 127.0.0.1" in said and "the token" not in said


def test_without_a_token_the_protocol_is_the_same() -> None:
    key = authentication.key_for("a test", {})
    with contextlib.closing(Server(key)) as server, authentication.connect(server.address, key, 2):
        assert server.numbers(1) == [2]


def test_a_run_without_a_token_is_told_once(caplog) -> None:
    log.say_once.cache_clear()
    authentication.say_if_unprotected({TOKEN: "the token"})
    assert caplog.messages == []
    for _ in range(2):
        authentication.say_if_unprotected({})
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("CPUTRAIN_TOKEN isn't set")


# --- Strangers who connect ---------------------------------------------------------------------------------------


def test_silent_connections_make_nobody_wait(server: Server) -> None:
    silent = [socket.create_connection(server.address) for _ in range(20)]
    with authentication.connect(server.address, KEY, 1):
        assert server.numbers(1) == [1]
    for one in silent:
        one.close()


def test_a_silent_connection_has_a_deadline(monkeypatch) -> None:
    monkeypatch.setattr(authentication, "SECONDS", 0.2)
    with contextlib.closing(Server()) as server, socket.create_connection(server.address, timeout=20) as silent:
        while silent.recv(100):  # the greeting, and then the end
            pass


def test_however_many_come_the_oldest_strangers_go(server: Server) -> None:
    crowd = [socket.create_connection(server.address, timeout=20) for _ in range(100)]
    with authentication.connect(server.address, KEY, 1):
        assert server.numbers(1) == [1] and len(server.listener.sockets) < 80
    while crowd[0].recv(100):
        pass
    for one in crowd:
        one.close()


def test_an_answer_may_come_byte_by_byte(server: Server) -> None:
    with socket.create_connection(server.address, timeout=20) as slow:
        greeting = slow.recv(24, socket.MSG_WAITALL)
        nonce, number = b"n" * 16, struct.pack("!I", 9)
        code = authentication._code(KEY, b"connects", greeting[8:] + nonce, number)
        for byte in nonce + number + code:
            slow.sendall(bytes([byte]))
        assert len(slow.recv(32, socket.MSG_WAITALL)) == 32
        assert server.numbers(1) == [9]


def test_an_answer_that_was_overheard_is_of_no_use(server: Server) -> None:
    with socket.create_connection(server.address, timeout=20) as first:
        greeting = first.recv(24, socket.MSG_WAITALL)
        nonce, number = b"n" * 16, struct.pack("!I", 9)
        said = nonce + number + authentication._code(KEY, b"connects", greeting[8:] + nonce, number)
        first.sendall(said)
        assert first.recv(32, socket.MSG_WAITALL)
    with socket.create_connection(server.address, timeout=20) as again:
        again.sendall(said)
        assert len(again.recv(24, socket.MSG_WAITALL)) == 24 and not _rest(again)
    assert server.numbers(1) == [9]


def _rest(connection: socket.socket) -> bytes:
    """What comes until the other end closes, or resets because not all was read."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(100):
            found += more
    return found


FRAMES = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FRAMES
@given(words=some.lists(some.binary(max_size=120), max_size=4), ending=some.sampled_from(["close", "reset", "shut"]))
def test_nonsense_is_never_admitted(words: list[bytes], ending: str, patient_server: Server) -> None:
    before = len(patient_server.admitted)
    with socket.create_connection(patient_server.address, timeout=20) as stranger:
        with contextlib.suppress(ConnectionError):
            for one in words:
                stranger.sendall(one)
            if ending == "shut":
                with contextlib.suppress(OSError):  # ENOTCONN: the server has hung up already
                    stranger.shutdown(socket.SHUT_WR)
                assert len(_rest(stranger)) <= 24
        if ending == "reset":
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with authentication.connect(patient_server.address, KEY, 5):
        assert patient_server.numbers(before + 1)[before:] == [5]


@FRAMES
@given(at=some.integers(0, 51), flip=some.integers(1, 255))
def test_one_wrong_bit_is_refused(at: int, flip: int, patient_server: Server) -> None:
    before = len(patient_server.admitted)
    with socket.create_connection(patient_server.address, timeout=20) as stranger:
        greeting = stranger.recv(24, socket.MSG_WAITALL)
        nonce, number = b"n" * 16, struct.pack("!I", 9)
        said = bytearray(nonce + number + authentication._code(KEY, b"connects", greeting[8:] + nonce, number))
        said[at] ^= flip
        stranger.sendall(said)
        assert _rest(stranger) == b""
    assert len(patient_server.admitted) == before


# --- Strangers who listen ----------------------------------------------------------------------------------------


@FRAMES
@given(words=some.binary(max_size=200), knows_magic=some.booleans())
def test_who_listens_must_know_the_token_too(words: bytes, knows_magic: bool) -> None:
    with socket.create_server((ADDRESS, 0)) as liar:

        def lie() -> None:
            connection, _ = liar.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall((b"cputrain" if knows_magic else b"") + words)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(100)

        thread = threading.Thread(target=lie)
        thread.start()
        with pytest.raises(ConnectionError):
            authentication.connect(liar.getsockname(), KEY, 1)
        thread.join()


def test_who_listens_and_is_silent_costs_a_deadline_and_no_more() -> None:
    with socket.create_server((ADDRESS, 0)) as silent, pytest.raises(TimeoutError):
        authentication.connect(silent.getsockname(), KEY, 1, seconds=0.2)
