"""Connections between the agents of machines: a machine that is gone is broken, and a stranger is no machine."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import HashStore

from cputrain import authentication
from cputrain.launch import liveness, rendezvous
from cputrain.launch.liveness import Links

HERE = "127.0.0.1"


@pytest.fixture
def store(monkeypatch) -> HashStore:
    monkeypatch.setenv(authentication.TOKEN, "the token")
    return HashStore()


@contextlib.contextmanager
def linked(store: HashStore, own: int, endpoint: str = HERE) -> Iterator[Links]:
    made = Links(store, "key", own, 3, endpoint)
    yield made
    made.close()


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def sees(one: Links, *numbers: int) -> bool:
    one.look()
    return sorted(one._links) == list(numbers)


def test_a_machine_that_is_gone_is_broken(store: HashStore) -> None:
    with linked(store, 0) as first, linked(store, 1) as second, linked(store, 2) as third:
        until(lambda: sees(first, 1, 2))
        assert sees(second, 0) and sees(third, 0) and not first.broken
        second.close()
        until(lambda: sees(first, 2))
        assert first.broken == {1} and sees(third, 0) and not third.broken


def test_strangers_are_no_machines(store: HashStore, monkeypatch) -> None:
    monkeypatch.setattr(liveness, "_LINK_SECONDS", 1.0)
    with linked(store, 0) as first:
        port = int(store.get("key").decode().split(",")[0])
        strangers = [socket.create_connection((HERE, port)) for _ in range(20)]
        for number, stranger in enumerate(strangers):
            stranger.sendall(b"x" * 10 * number)
        monkeypatch.setenv(authentication.TOKEN, "another")
        with linked(store, 1) as liar:
            assert sees(liar)
        monkeypatch.setenv(authentication.TOKEN, "the token")
        with linked(store, 2):
            until(lambda: sees(first, 2))
            for stranger in strangers:
                stranger.close()
            assert sees(first, 2) and not first.broken


@pytest.mark.parametrize(("endpoint", "bound"), [(HERE, HERE), ("box1", "::")])
def test_machine_0_listens_at_the_address_that_the_others_use(
    endpoint: str, bound: str, store: HashStore, monkeypatch
) -> None:
    """box1 is this machine's own name, which is 127.0.1.1 here and another address elsewhere."""
    made = []
    monkeypatch.setattr(rendezvous, "address_towards", lambda _: "127.0.1.1" if endpoint == "box1" else HERE)
    server_at = rendezvous.server_at
    monkeypatch.setattr(rendezvous, "server_at", lambda *where: made.append(server_at(*where)) or made[0])
    with linked(store, 0, endpoint):
        assert made[0].getsockname()[0] in (bound, "0.0.0.0" if bound == "::" else bound)
