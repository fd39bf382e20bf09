"""A line to another machine: a program of ours there, started by ssh, which lives as long as it hears from us.

A machine that is gone without a word is noticed from both ends: here by ssh's own questions, there by our beats, which
come from a process of their own, so that a launch that is stopped for a while (Ctrl-Z) is not taken for dead.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from cputrain.keep_alive import LAST_WORDS_SECONDS, SSH_SECONDS
from cputrain.launch import processes, sinks
from cputrain.launch.hostfile import check_name
from cputrain.launch.mpi import SSH_OPTIONS

BEAT_SECONDS = 3.0
# What is left of a lost launch ends when the ranks have had as long as there to say which rank is gone.
SILENT_SECONDS = SSH_SECONDS + LAST_WORDS_SECONDS
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


def login(machine: str, words: Iterable[str]) -> list[str]:
    return ["ssh", "-T", *SSH_OPTIONS, "--", check_name(machine), shlex.join(words)]


class Line:
    """One machine: its ssh, what is said to it first, and the last that ssh itself said."""

    def __init__(self, name: str, command: list[str], first_words: str) -> None:
        self.name, self._command, self._first_words = name, command, first_words
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
        errors = threading.Thread(target=self._copy, args=(self.process.stderr,), daemon=True)
        errors.start()
        self._readers = [errors]
        if not answers:
            self._readers.append(sinks.pass_on(self.process.stdout, sys.stdout.buffer))
        with contextlib.suppress(BrokenPipeError):  # ssh has ended: its code and its words say why
            self.process.stdin.write(self._first_words.encode() + b"\n")
            self.process.stdin.flush()

    @property
    def input(self) -> int:
        assert self.process.stdin
        return self.process.stdin.fileno()

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
            elif text:
                self._said.append(text)

    def read_to_end(self, seconds: float = 2.0) -> None:
        """Soon after ssh has ended; what it started may hold the streams."""
        for reader in self._readers:
            reader.join(seconds)

    def exit_code(self, code: int) -> int:
        """Of the whole launch: 2 if the machine could not be used at all."""
        if not self._is_unreachable(code):
            return processes.exit_code(code)
        return 1 if self.is_lost() else 2

    def ending(self, code: int) -> str:
        if not self._is_unreachable(code):
            return " ".join([f"{self.name} ended with exit code {processes.exit_code(code)}", *self._last_words()])
        last = " ".join(self._said[-3:])
        if self.is_lost():
            return f"{self.name} is lost: it, or the network on the way there, doesn't answer any more ({last})"
        advice = next((text for word, text in _ADVICE.items() if word in last), last)
        return f"{self.name} can't be reached by ssh: {advice.format(host=self.name)}"

    def _is_unreachable(self, code: int) -> bool:
        """ssh's own failures are 255, with some words of its own."""
        self.read_to_end()
        return code == 255 and bool(self._said)

    def is_lost(self) -> bool:
        return any(word in text for text in self._said[-3:] for word in _LOST)

    def _last_words(self) -> list[str]:
        return [f"({self._said[-1]})"] if self._said else []


def end(lines: Iterable[Line], seconds: float = 15.0) -> None:
    """Closing its input is what ends a machine's ranks; ssh itself is killed only if that doesn't help."""
    started = [line for line in lines if line.started]
    for line in started:
        line.close()
    limit = time.monotonic() + seconds
    for line in started:
        try:
            line.process.wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            line.process.kill()
            line.process.wait()
    for line in started:
        line.read_to_end()


@contextlib.contextmanager
def beating(lines: list[Line]) -> Iterator[None]:
    """While it lasts, all lines hear that we live."""
    child = _start_beats([line.input for line in lines])
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)  # it holds the lines' ends, which are about to be closed
        os.waitpid(child, 0)


def _start_beats(inputs: list[int]) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        processes.die_with(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while True:
            for descriptor in inputs:
                os.set_blocking(descriptor, False)
                with contextlib.suppress(OSError):  # its ssh has ended, or can't send: there is nothing to be done here
                    os.write(descriptor, b"\n")
            time.sleep(BEAT_SECONDS)
    finally:
        os._exit(1)


# --- The other end -----------------------------------------------------------------------------------------------


def listen(descriptor: int, ended: Callable[[], None], heard: Callable[[], None] | None = None) -> None:
    """The starter of this process holds the other end; when it closes, for any reason, or is silent, this is over."""
    while select.select([descriptor], [], [], SILENT_SECONDS)[0] and os.read(descriptor, 4096):
        if heard:
            heard()
    ended()
