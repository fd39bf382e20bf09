"""Machines without MPI: ssh starts `cputrain.launch.node` on each, and hands it its order over standard input."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import BinaryIO

from cputrain.launch import processes
from cputrain.launch.hostfile import Machine, check_name
from cputrain.launch.mpi import SSH_OPTIONS
from cputrain.launch.node import Order
from cputrain.launch.rendezvous import address_towards

# Constant, but for where this Python is: what is run, and with what, comes as JSON and never meets a shell.
_NODE = (sys.executable, "-m", "cputrain.launch.node")
_ADVICE = {
    "Host key verification failed": "its host key isn't known: `ssh {host}` once by hand, or add it to known_hosts",
    "Could not resolve hostname": "the name can't be resolved: check the hostfile",
    "Permission denied": "it refuses the login: put your key into its authorized_keys",
    "Connection refused": "no sshd listens there",
    "timed out": "it doesn't answer",
    "No route to host": "there is no way there",
}


def command(machine: str) -> list[str]:
    """By ssh, unless it is this machine."""
    if is_here(machine):
        return list(_NODE)
    return _login(machine, shlex.join(_NODE))


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


def check(machines: list[str]) -> None:
    """Logs in everywhere, side by side, before mpirun does, which would say less about what went wrong."""
    elsewhere = [name for name in machines if not is_here(name)]
    trials = [
        (name, subprocess.Popen(_login(name, "true"), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        for name in elsewhere
    ]
    problems = []
    for name, trial in trials:
        said = trial.communicate()[1].splitlines()
        if trial.returncode:
            problems.append(_unreachable(name, said))
    if problems:
        raise ValueError("; ".join(problems) + ".")


def _login(machine: str, words: str) -> list[str]:
    return ["ssh", "-T", *SSH_OPTIONS, "--", check_name(machine), words]


def _unreachable(machine: str, said: list[str]) -> str:
    last = " ".join(said[-3:])
    advice = next((text for word, text in _ADVICE.items() if word in last), last)
    return f"{machine} can't be reached by ssh: {advice.format(host=machine)}"


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
    nodes = [_Node(machine.name, one) for machine, one in zip(machines, orders(order, machines), strict=True)]
    processes.adopt_orphans()
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for node in nodes:
            node.start()
        code = _wait(nodes)
    except KeyboardInterrupt as interrupt:
        code = 128 + (signal.SIGTERM if interrupt.args else signal.SIGINT)
    finally:
        _end(nodes)
        signal.signal(signal.SIGTERM, previous)
    return code


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


def _wait(nodes: list[_Node]) -> int:
    while True:
        codes = [node.process.poll() for node in nodes]
        for node, code in zip(nodes, codes, strict=True):
            if code:
                print(f"cputrain: {node.ending(code)}; all machines are ended.", file=sys.stderr)
                return 2 if node.is_unreachable(code) else processes.exit_code(code)
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.1)


def _end(nodes: list[_Node], seconds: float = 15.0) -> None:
    """Closing its input is what ends a machine's ranks; ssh itself is killed only if that doesn't help."""
    started = [node for node in nodes if node.started]
    for node in started:
        node.close()
    limit = time.monotonic() + seconds
    for node in started:
        try:
            node.process.wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            node.process.kill()
    for node in started:
        node.reader.join(2)


class _Node:
    """One machine: its ssh, its order, and the last that ssh itself said."""

    def __init__(self, name: str, order: Order) -> None:
        self.name, self._order = name, order
        self.started = False
        self._said: list[str] = []
        self._command = command(name)

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches us alone, and we close its input
        )
        self.started = True
        assert self.process.stdin and self.process.stderr
        self.reader = threading.Thread(target=self._copy, args=(self.process.stderr,), daemon=True)
        self.reader.start()
        with contextlib.suppress(BrokenPipeError):  # ssh has ended: its code and its words say why
            self.process.stdin.write(self._order.to_json().encode() + b"\n")
            self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def _copy(self, stream: BinaryIO) -> None:
        """Ranks' lines begin with their number, and ours with our name; the rest is ssh's."""
        for line in stream:
            text = line.decode(errors="replace").rstrip()
            if re.match(r"(\r\x1b\[K)?\[\d+\] |cputrain: ", text):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
            elif text:
                self._said.append(text)

    def is_unreachable(self, code: int) -> bool:
        """ssh's own failures are 255, with some words of its own."""
        self.reader.join(2)
        return code == 255 and bool(self._said)

    def ending(self, code: int) -> str:
        if not self.is_unreachable(code):
            return " ".join([f"{self.name} ended with exit code {processes.exit_code(code)}", *self._last_words()])
        return _unreachable(self.name, self._said)

    def _last_words(self) -> list[str]:
        return [f"({self._said[-1]})"] if self._said else []
