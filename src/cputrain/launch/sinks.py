"""Where output goes: standard streams and files. One that fails is dropped, which is said once on stderr.

A full disk or a closed terminal must not stop a training: if the launch no longer read the ranks' pipes, the ranks
would wait for ever. The launch's exit code says that output was lost, unless a rank failed: its own code tells more.
"""

from __future__ import annotations

import io
import os
import re
import select
import sys
import threading
from pathlib import Path
from typing import IO, Any, BinaryIO

# Of a launch that trained to its end, but whose output is not whole: sysexits.h has it for errors of input and output.
LOST = os.EX_IOERR
_WORDS = b"cputrain: output is lost: "
# Said by a copier of ours, and not by a rank, whose lines are labelled; a progress bar may stand before it.
_SAID = re.compile(rb"(?<!\] )" + re.escape(_WORDS))
_STANDARD = ("standard input", "standard output", "standard error")
_STDERR = 2

_lost: list[str] = []


class Sink(io.RawIOBase):
    """Takes all that it is given, and never raises. `name` is for people."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__()
        self._descriptor, self._name = descriptor, name
        self._failed = False
        self._is_within_a_line = False
        self._lock = threading.Lock()

    def write(self, data: Any) -> int:
        with self._lock:
            self._write(data)
        return len(data)

    def write_line(self, line: bytes) -> None:
        """On a line of its own, wherever others have stopped."""
        with self._lock:
            self._write((b"\n" if self._is_within_a_line else b"") + line + b"\n")

    def _write(self, data: bytes) -> None:
        if self._failed or not data:
            return
        self._is_within_a_line = not data.endswith(b"\n")
        try:
            _write_all(self._descriptor, data)
        except OSError as error:
            self.fail(error)

    def fail(self, error: OSError) -> None:
        self._failed = True
        said = f"{self._name} can't be written ({error.strerror}); the ranks go on."
        lose(said, is_stderr=self._descriptor == _STDERR)

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True


class FileSink(Sink):
    """The end of a file, which is made if it is missing."""

    def __init__(self, path: Path) -> None:
        super().__init__(-1, str(path))
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            self.fail(error)

    def close(self) -> None:
        if self._descriptor >= 0 and not self.closed:
            try:
                os.close(self._descriptor)
            except OSError as error:  # a file system across the network says only now that it is full
                self.fail(error)
        super().close()


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # a stream that its owner reads without waiting: ssh's, for example
            select.select([], [descriptor], [])


def lose(what: str, is_stderr: bool = False) -> None:
    """Remembers that output is lost, and says so where that is possible."""
    _lost.append(what)
    if is_stderr:
        return
    stderr = getattr(sys.stderr, "buffer", None)
    sink = stderr if isinstance(stderr, Sink) else Sink(_STDERR, _STANDARD[_STDERR])
    sink.write_line(_WORDS + what.encode(errors="replace"))


def exit_code(code: int) -> int:
    """Of this process, if its work ended with `code`."""
    return code or (LOST if _lost else 0)


def take_over() -> None:
    """From here on nothing that this process prints raises, and a stream that was closed counts as failed."""
    reserve_descriptors()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        if isinstance(getattr(before, "buffer", None), Sink):
            continue
        sink = Sink(descriptor, _STANDARD[descriptor])
        try:
            if before is not None:  # it was closed when Python started
                before.flush()
        except OSError as error:
            sink.fail(error)
        # Python's own type for it asks for a buffered stream; `python -u` uses it as we do.
        text = io.TextIOWrapper(  # type: ignore[type-var]
            sink, getattr(before, "encoding", None), "backslashreplace", write_through=True
        )
        setattr(sys, name, text)


def reserve_descriptors() -> None:
    """A pipe of ours must not get the number of a standard stream that is closed: it would be taken for that stream.

    What stands there instead can't be written, as a closed stream can't.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDONLY)
            if nothing != descriptor:
                os.dup2(nothing, descriptor)
                os.close(nothing)
            os.set_inheritable(descriptor, True)


def pass_on(source: IO[bytes], sink: BinaryIO) -> threading.Thread:
    """Copies a child's output until it ends, and hears if a process of ours on the way there lost some."""
    thread = threading.Thread(target=_pass_on, args=(source, sink), daemon=True)
    thread.start()
    return thread


def _pass_on(source: IO[bytes], sink: BinaryIO) -> None:
    before = b""
    while data := os.read(source.fileno(), 1 << 16):
        sink.write(data)
        seen = before + data
        if any(found.end() > len(before) for found in _SAID.finditer(seen)):
            _lost.append("said by a child")
        before = seen[-len(_WORDS) - 1 :]  # a sentence may come in two pieces
