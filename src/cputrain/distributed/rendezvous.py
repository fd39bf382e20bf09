"""How the ranks of a group find each other: who shares a machine, and under which addresses machines are reached.

Ranks offer memory over abstract Unix sockets, and those that can open it share it. Nothing else is asked: host names,
addresses and boot ids are the same in places that share no memory (two pods of one node), and different in places that
do. The memory has no name (`memfd`), so nothing is left of it when the last process ends, and the size of /dev/shm is
no limit.

The address under which other machines reach this one is that of its route to the master, never its own name's.
"""

from __future__ import annotations

import array
import contextlib
import ipaddress
import json
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from cputrain import __version__, authentication, settings
from cputrain.distributed import native_calls
from cputrain.distributed.failures import Peer

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_RANK = struct.Struct("i")


@dataclass
class Machine:
    """The ranks of a group that share this rank's machine, in ascending order, and what they share."""

    ranks: list[int]
    memory: mmap.mmap | None = None  # None: alone
    pidfds: list[int] = field(default_factory=list)  # one for each of `ranks`
    cpus: set[int] = field(default_factory=set)  # that any of `ranks` may run on

    def close(self) -> None:
        for descriptor in self.pidfds:
            os.close(descriptor)
        self.pidfds = []


@dataclass
class Meeting:
    """All that the ranks of a group found out about one another."""

    peers: list[Peer]
    machines: list[list[int]]  # a partition of the ranks; each machine's ranks ascending, machines by first rank
    here: Machine


def meet(store: dist.Store, rank: int, global_ranks: list[int], timeout: timedelta) -> Meeting:
    """Every rank of the group calls this; it returns the same partition on each."""
    size = len(global_ranks)
    with _listening_socket() as listener:
        card = {
            "version": __version__,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "socket": listener.getsockname()[1:].decode(),
            "cpus": sorted(os.sched_getaffinity(0)),
        }
        cards = [json.loads(text) for text in all_answer(store, "card", rank, size, timeout, json.dumps(card))]
        _check_versions(cards, global_ranks)
        peers = [Peer(other, global_ranks[other], card["host"], card["pid"]) for other, card in enumerate(cards)]
        leader, connection = _first_that_opens(cards, rank, global_ranks)
        machines = _partition([int(text) for text in all_answer(store, "leader", rank, size, timeout, str(leader))])
        here = Machine(next(machine for machine in machines if rank in machine))
        here.cpus = {cpu for other in here.ranks for cpu in cards[other]["cpus"]}
        if len(here.ranks) > 1:
            _share(here, rank, listener, connection, time.monotonic() + timeout.total_seconds())
        if connection is not None:
            connection.close()
    return Meeting(peers, machines, here)


def all_answer(store: dist.Store, question: str, rank: int, size: int, timeout: timedelta, answer: str) -> list[str]:
    """The answers of all ranks of the group, each of which calls this."""
    keys = [f"{question}/{other}" for other in range(size)]
    store.set(keys[rank], answer)
    store.wait(keys, timeout)
    return [store.get(key).decode() for key in keys]


def _check_versions(cards: list[dict], global_ranks: list[int]) -> None:
    for other, card in enumerate(cards):
        if card["version"] != __version__:
            raise ValueError(
                f"rank {global_ranks[other]} on host {card['host']} has cputrain {card['version']}, this rank has "
                f"{__version__}: install the same version on all hosts."
            )


def _listening_socket() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.bind(f"\0cputrain-{secrets.token_hex(16)}")
    listener.listen(socket.SOMAXCONN)
    return listener


def _first_that_opens(cards: list[dict], rank: int, global_ranks: list[int]) -> tuple[int, socket.socket | None]:
    """The lowest rank whose socket this rank reaches, as the same user; itself if there is none."""
    for other in range(rank):
        if _kept_apart(global_ranks[rank], global_ranks[other]):
            continue
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.connect("\0" + cards[other]["socket"])
        except OSError:
            connection.close()
            continue
        if _is_same_user(connection):
            return other, connection
        connection.close()
    return rank, None


def _kept_apart(one: int, other: int) -> bool:
    machines = settings.machines_of_tests()
    return bool(machines) and not any(one in machine and other in machine for machine in machines)


def _is_same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == os.geteuid()


def _partition(leaders: list[int]) -> list[list[int]]:
    """Machines from every rank's choice. A rank whose leader follows another one is alone: all must share with all."""
    machines: dict[int, list[int]] = {}
    for rank, leader in enumerate(leaders):
        machines.setdefault(leader if leaders[leader] == leader else rank, []).append(rank)
    return [machines[first] for first in sorted(machines)]


def _share(
    here: Machine, rank: int, listener: socket.socket, connection: socket.socket | None, deadline: float
) -> None:
    """The machine's first rank makes the memory, collects a pidfd of every rank and hands all of it out."""
    size = native_calls.segment_bytes(len(here.ranks))
    own = os.pidfd_open(os.getpid())
    if rank == here.ranks[0]:
        descriptor = os.memfd_create("cputrain", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        here.pidfds = _hand_out(here.ranks, own, descriptor, listener, deadline)
    else:
        assert connection is not None, "a rank that isn't first has connected to the first"
        _send(connection, rank, [own])
        os.close(own)
        received = _receive(connection, 1 + len(here.ranks), deadline)
        if not received:
            raise ConnectionError("the rank of this machine that offered memory has gone before it gave it.")
        descriptor, *here.pidfds = received
    here.memory = mmap.mmap(descriptor, size)
    os.close(descriptor)


def _hand_out(ranks: list[int], own: int, memory: int, listener: socket.socket, deadline: float) -> list[int]:
    """Connections are served side by side: one that says nothing, or nonsense, keeps no rank waiting."""
    pidfds, connections, silent = {ranks[0]: own}, list[socket.socket](), list[socket.socket]()
    with contextlib.ExitStack() as stack:
        while len(pidfds) < len(ranks):
            for ready in _wait_readable([listener, *silent], deadline):
                if ready is listener:
                    silent += _accept(listener, stack)
                    continue
                silent.remove(ready)
                other, received = _receive_part(ready)
                if other in ranks and other not in pidfds and len(received) == 1:
                    pidfds[other] = received[0]
                    connections.append(ready)
                else:
                    _close_all(received)
                    ready.close()
        in_order = [pidfds[rank] for rank in ranks]
        for connection in connections:
            _send(connection, ranks[0], [memory, *in_order])
    return in_order


def _accept(listener: socket.socket, stack: contextlib.ExitStack) -> list[socket.socket]:
    """The next connection, if it comes from the same user."""
    connection, _ = listener.accept()
    if not _is_same_user(connection):
        connection.close()
        return []
    stack.callback(connection.close)
    return [connection]


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _wait_readable(sockets: list[socket.socket], deadline: float) -> list[socket.socket]:
    left = deadline - time.monotonic()
    found = authentication.readable(sockets, left) if left > 0 else []
    if not found:
        raise TimeoutError("a rank of this machine did not come to share memory within the group's timeout.")
    return found


# The kernel passes at most 253 descriptors in one message.
_DESCRIPTORS_AT_ONCE = 200


def _send(connection: socket.socket, rank: int, descriptors: list[int]) -> None:
    for start in range(0, len(descriptors), _DESCRIPTORS_AT_ONCE):
        socket.send_fds(connection, [_RANK.pack(rank)], descriptors[start : start + _DESCRIPTORS_AT_ONCE])


def _receive(connection: socket.socket, count: int, deadline: float) -> list[int]:
    """`count` descriptors; none if the other side has gone."""
    found = list[int]()
    while len(found) < count:
        _wait_readable([connection], deadline)
        rank, part = _receive_part(connection)
        if rank < 0:
            _close_all(found)
            return []
        found += part
    return found


def _receive_part(connection: socket.socket) -> tuple[int, list[int]]:
    """What came in one message; (-1, []) if the other side has gone, or it is none of ours."""
    found = array.array("i")
    try:
        space = socket.CMSG_SPACE(_DESCRIPTORS_AT_ONCE * found.itemsize)
        data, messages, _, _ = connection.recvmsg(_RANK.size, space, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return -1, []
    for level, kind, content in messages:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    if len(data) == _RANK.size and found:
        return _RANK.unpack(data)[0], found.tolist()
    _close_all(found)
    return -1, []


def reachable_address(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """This rank's address for the others. Every rank of the group calls this.

    On the master's own machine the way to the master is loopback (where torchrun gives its name, which is 127.0.1.1 on
    many systems): there it is the way to the first rank that has come from elsewhere.
    """
    own = own_address()
    answers = all_answer(store, "address", rank, size, timeout, own)
    elsewhere = [address for address in answers if not ipaddress.ip_address(address).is_loopback]
    if elsewhere and ipaddress.ip_address(own).is_loopback:
        return _towards(elsewhere[0], 9)
    return own


def own_address() -> str:
    """The address that the kernel would use to reach MASTER_ADDR; this machine's own loopback if all is local."""
    master, port = settings.meeting_place()
    if not master:
        return "127.0.0.1"
    try:
        return _towards(master, port)
    except socket.gaierror as error:
        raise ValueError(f"MASTER_ADDR={master} can't be resolved: {error}; give an address or a known name.") from None


def _towards(host: str, port: int) -> str:
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect(target)
        return probe.getsockname()[0]
