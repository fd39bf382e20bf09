"""Files of hosts as Intel MPI, MPICH and Open MPI write them, and how ranks are dealt to the hosts."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from cputrain import text_files

# What ssh and mpirun take on their command lines: never an option, a user or something for a shell.
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_SLOTS = re.compile(r"slots\s*=\s*(\d{1,6})")
# Open MPI's further words on a line, which change nothing here.
_OTHER_WORDS = re.compile(r"max[_-]slots\s*=\s*\d+")


@dataclass(frozen=True)
class Host:
    """A machine and how many ranks its line allows; None if the line doesn't say."""

    name: str
    slots: int | None


@dataclass(frozen=True)
class Machine:
    """A machine and the ranks that it gets: `first_rank` and the following ones."""

    name: str
    processes: int
    first_rank: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.processes)


def read(path: str | Path) -> list[Host]:
    """`node1`, `node1:4` or `node1 slots=4` a line; a host that stands in several lines has the slots of all."""
    try:
        return parse(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise ValueError(f"the hostfile {path} can't be read: {error.strerror}.") from None


def parse(data: bytes, path: str) -> list[Host]:
    """`path` names the file in messages."""
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"the hostfile {path} is not UTF-8 text.") from None
    hosts: dict[str, int | None] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            host = _parsed(text)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {text_files.quoted(str(error))}") from None
        if host.name in hosts:
            hosts[host.name] = (hosts[host.name] or 1) + (host.slots or 1)
        else:
            hosts[host.name] = host.slots
    if not hosts:
        raise ValueError(f"the hostfile {path} names no host: write one a line, such as node1 or node1:4.")
    return [Host(name, slots) for name, slots in hosts.items()]


def check_name(name: str) -> str:
    """The name, if it is one, or an address."""
    if _NAME.fullmatch(name):
        return name
    try:
        return str(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        raise ValueError(f"{name!r} is not a host name or an address.") from None


def _parsed(text: str) -> Host:
    name, _, rest = re.sub(r"\s*=\s*", "=", text).partition(" ")
    name, slots = _name_and_slots(name)
    for word in rest.split():
        if found := _SLOTS.fullmatch(word):
            slots = int(found[1])
        elif not _OTHER_WORDS.fullmatch(word):
            raise ValueError(f"{word!r} is not understood: write node1, node1:4 or node1 slots=4.")
    if slots == 0:
        raise ValueError(f"{name} has no slots: leave the line out.")
    return Host(check_name(name), slots)


def _name_and_slots(word: str) -> tuple[str, int | None]:
    """node1:4 and [fe80::1]:4 have a number; a bare IPv6 address has colons of its own."""
    name, colon, number = word.rpartition(":")
    if not colon or (":" in name and not name.endswith("]")) or word.endswith("]"):
        return word, None
    if not re.fullmatch(r"[0-9]{1,6}", number):
        raise ValueError(f"{word!r}: a whole number must stand after the colon.")
    return name, int(number)


def deal(hosts: list[Host], processes: int | None, ppn: int | None) -> list[Machine]:
    """Ranks in the order of the hosts: `ppn` on each, else as many as its slots, else evenly."""
    if processes is None:
        processes = sum(ppn or host.slots or 1 for host in hosts)
    unknown = [host for host in hosts if not (ppn or host.slots)]
    if unknown and processes % len(hosts):
        raise ValueError(f"{processes} processes can't be shared evenly by {len(hosts)} hosts: give --ppn.")
    machines: list[Machine] = []
    first = 0
    for host in hosts:
        room = ppn or host.slots or processes // len(hosts)
        here = min(room, processes - first)
        if here > 0:
            machines.append(Machine(host.name, here, first))
            first += here
    if first < processes:
        raise ValueError(
            f"{processes} processes were asked for, but {len(hosts)} hosts have room for {first}: "
            "raise --ppn or the slots, or name more hosts."
        )
    return machines
