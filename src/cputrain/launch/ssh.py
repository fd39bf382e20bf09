"""Machines without MPI: ssh starts `node.py` on each, and hands it its order over standard input."""

from __future__ import annotations

import ipaddress
import socket
import sys
import time
from dataclasses import replace

from cputrain.keep_alive import LAST_WORDS_SECONDS
from cputrain.launch import import_path, line, processes, sinks
from cputrain.launch.hostfile import Machine
from cputrain.launch.line import Line
from cputrain.launch.node import Order
from cputrain.launch.rendezvous import address_towards

# Constant, but for where Python and cputrain are: what is run, and with what, comes as JSON and never meets a shell.
_NODE = (sys.executable, import_path.program("launch", "node.py"))


def command(machine: str) -> list[str]:
    """By ssh, unless it is this machine."""
    return list(_NODE) if is_here(machine) else line.login(machine, _NODE)


def is_here(machine: str) -> bool:
    """Whether a name means this machine: one of its addresses is ours."""
    import psutil

    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    return any(address in own or ipaddress.ip_address(address).is_loopback for address in addresses(machine))


def addresses(machine: str) -> list[str]:
    try:
        found = socket.getaddrinfo(machine, None, type=socket.SOCK_STREAM)
    except OSError:
        raise ValueError(f"the host {machine} can't be resolved: check its name in the hostfile.") from None
    return [str(entry[4][0]) for entry in found]


def meeting_address(machines: list[Machine]) -> str:
    """Of the first machine, as the others reach it."""
    first = machines[0].name
    if not is_here(first):
        return addresses(first)[0]
    other = next((machine.name for machine in machines if not is_here(machine.name)), first)
    return address_towards(addresses(other)[0]) or addresses(first)[0]


def orders(order: Order, machines: list[Machine]) -> list[Order]:
    """The order of each machine."""
    return [
        replace(order, processes=machine.processes, machines=len(machines), machine=number)
        for number, machine in enumerate(machines)
    ]


def run(order: Order, machines: list[Machine]) -> int:
    """Starts all machines, waits, and ends all as soon as one fails."""
    nodes = [
        Line(machine.name, command(machine.name), one.to_json())
        for machine, one in zip(machines, orders(order, machines), strict=True)
    ]
    processes.adopt_orphans()
    with processes.sigterm_interrupts():
        try:
            for node in nodes:
                node.start()
            with line.beating(nodes):
                return _wait(nodes)
        except KeyboardInterrupt as interrupt:
            return processes.interrupted_code(interrupt)
        finally:
            line.end(nodes)


def _let_others_end(nodes: list[Line]) -> None:
    """By themselves, when their ranks have noticed, too, and named the rank that is gone.

    Their agents give the ranks as long, and need a moment then.
    """
    limit = time.monotonic() + LAST_WORDS_SECONDS + 1.0
    while any(node.process.poll() is None for node in nodes) and time.monotonic() < limit:
        time.sleep(0.1)


def _wait(nodes: list[Line]) -> int:
    while True:
        codes = [node.process.poll() for node in nodes]
        for node, code in zip(nodes, codes, strict=True):
            if code and code != sinks.LOST:
                print(f"cputrain: {node.ending(code)}; all machines are ended.", file=sys.stderr)
                if node.is_lost():
                    _let_others_end([other for other in nodes if other is not node])
                return node.exit_code(code)
        if None not in codes:
            for node in nodes:
                node.read_to_end()
            return sinks.exit_code(max(filter(None, codes), default=0))
        time.sleep(0.1)
