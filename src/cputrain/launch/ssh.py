"""Machines that are reached by ssh: their addresses, how one logs in, and a program of ours that runs there."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from typing import BinaryIO

from cputrain import settings
from cputrain.keep_alive import SSH_INTERVAL, SSH_QUESTIONS
from cputrain.launch import import_path, output, processes
from cputrain.launch.hostfile import Machine, check_name
from cputrain.launch.rendezvous import address_towards

# Constant, but for where Python and cputrain are: what is run, and with what, comes as JSON and never meets a shell.
_PROGRAM = (sys.executable, import_path.program("launch", "node.py"))
_ADVICE = {
    "Host key verification failed": "its host key isn't known: `ssh {host}` once by hand, or add it to known_hosts",
    "Could not resolve hostname": "the name can't be resolved: check the hostfile",
    "Permission denied": "it refuses the login: put your key into its authorized_keys",
    "Connection refused": "no sshd listens there",
    "timed out": "it doesn't answer",
    "No route to host": "there is no way there",
}
# What ssh says if it had been there, and isn't any more.
_LOST = ("not responding", "closed by remote host", "Connection reset", "Broken pipe")


def options(interval: int = SSH_INTERVAL) -> tuple[str, ...]:
    """No questions, only hosts whose keys are known, and an end if one is gone."""
    return (
        *("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=15"),
        *("-o", f"ServerAliveInterval={interval}", "-o", f"ServerAliveCountMax={SSH_QUESTIONS}"),
    )


def command(machine: str) -> list[str]:
    """Starts `node.py` there: by ssh, unless it is this machine."""
    if is_here(machine):
        return list(_PROGRAM)
    return ["ssh", "-T", *options(), "--", check_name(machine), shlex.join(_PROGRAM)]


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
    """The first machine's address, as the others reach it."""
    first = machines[0].name
    if not is_here(first):
        return addresses(first)[0]
    other = next((machine.name for machine in machines if not is_here(machine.name)), first)
    return address_towards(addresses(other)[0]) or addresses(first)[0]


class Session:
    """One machine: its ssh, what is said to it first, and the last that ssh itself said."""

    def __init__(self, name: str, first_words: str) -> None:
        self.name, self._first_words = name, first_words
        self._command = command(name)
        self.started = False
        self._said: list[str] = []

    def start(self, answers: bool = False) -> None:
        """`answers`: what it prints is for us, and not for the user."""
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches us alone, and we close its input
        )
        self.started = True
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self._stdin = self.process.stdin
        errors = threading.Thread(target=self._copy, args=(self.process.stderr,), daemon=True)
        errors.start()
        self._readers = [errors]
        if not answers:
            self._readers.append(output.pass_on(self.process.stdout, sys.stdout.buffer))
        with contextlib.suppress(BrokenPipeError):  # ssh has ended: its code and its words say why
            self._stdin.write(self._first_words.encode() + b"\n")
            self._stdin.flush()

    @property
    def input(self) -> int:
        return self._stdin.fileno()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def _copy(self, stream: BinaryIO) -> None:
        """Ranks' lines begin with their number, and ours with our name; the rest is ssh's."""
        for line in stream:
            text = line.decode(errors="replace").rstrip()
            if re.match(r"(\r\x1b\[K)?\[\d+\] |cputrain: ", text):
                sys.stderr.buffer.write(line)
            elif text:
                self._said.append(text)

    def read_to_end(self, seconds: float = 2.0) -> None:
        """Soon after ssh has ended; what it started may hold the streams."""
        for reader in self._readers:
            reader.join(seconds)

    def exit_code(self, code: int) -> int:
        """The exit code of the whole launch: 2 if the machine could not be used at all."""
        if not self._is_unreachable(code):
            return processes.exit_code(code)
        return 1 if self.is_lost() else 2

    def ending(self, code: int) -> str:
        if not self._is_unreachable(code):
            last = [f"({self._said[-1]})"] if self._said else []
            return " ".join([f"{self.name} ended with exit code {processes.exit_code(code)}", *last])
        words = " ".join(self._said[-3:])
        if self.is_lost():
            return f"{self.name} is lost: it, or the network on the way there, doesn't answer any more ({words})"
        advice = next((text for word, text in _ADVICE.items() if word in words), words)
        return f"{self.name} can't be reached by ssh: {advice.format(host=self.name)}"

    def _is_unreachable(self, code: int) -> bool:
        """ssh's own failures are 255, with some words of its own."""
        self.read_to_end()
        return code == 255 and bool(self._said)

    def is_lost(self) -> bool:
        return any(word in text for text in self._said[-3:] for word in _LOST)


def end(sessions: Iterable[Session]) -> None:
    """Closing its input is what ends a machine's ranks; ssh itself is killed only if that doesn't help."""
    started = [session for session in sessions if session.started]
    for session in started:
        session.close()
    limit = time.monotonic() + settings.grace(2)
    for session in started:
        try:
            session.process.wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            session.process.kill()
            session.process.wait()
    for session in started:
        session.read_to_end()
