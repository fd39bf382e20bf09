"""What ranks print: each line with its rank before it, a file per rank, one progress bar, and where all of it goes.

A stream or file that fails is dropped, which is said once on stderr: a full disk or a closed terminal must not stop a
training, and a rank whose pipe is not read would wait for ever. The launch's exit code then says that output was lost,
unless a rank failed: its own code tells more.
"""

from __future__ import annotations

import io
import os
import re
import select
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, NoReturn

from cputrain import text_files
from cputrain.launch import processes

_MOST = 1 << 16
_LONGEST = 1 << 20  # of a line: what never ends must not fill our memory
# tqdm's bar, to its closing bracket: others write behind it without a new line.
_BAR = re.compile(rb"[^\r\n]*\d+(?:/\d+)? \[[^\]\r\n]*\]")


class Output:
    """Takes over the standard streams of ranks through pipes, and copies what comes.

    A progress bar goes back to the line's start again and again. Rank 0's is shown as it moves where there is a
    terminal, and otherwise once, when it is done; other ranks' only stands in their files.
    """

    def __init__(self, folder: str | None, bars: bool) -> None:
        self._folder = Path(folder) if folder else None
        self._bars = bars
        self._selector = selectors.DefaultSelector()
        self._files: dict[int, FileSink] = {}
        self._writers: list[int] = []
        self._lock = threading.Lock()
        self._bar_shown = False
        self._said: dict[bytes, int] = {}  # our own messages, and which rank said it first
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        if self._folder:
            text_files.make_folder(self._folder)
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def pipe(self, rank: int, stream: BinaryIO) -> str:
        """A path that a rank's stdout or stderr can be opened at."""
        read, write = os.pipe()
        self._writers.append(write)
        self.add(read, rank, stream)
        return f"/proc/{os.getpid()}/fd/{write}"

    def add(self, read: int, rank: int, stream: BinaryIO) -> None:
        os.set_blocking(read, False)
        with self._lock:
            self._selector.register(read, selectors.EVENT_READ, _Source(stream, rank))
        os.write(self._wake_write, b"x")

    def close(self, while_lives: int | None = None) -> None:
        """Copies what is left, until the last writer is gone; a writer that outlives our parent may lose the rest."""
        for write in self._writers:
            os.close(write)
        self._writers.clear()
        while while_lives is not None and os.getppid() == while_lives and len(self._selector.get_map()) > 1:
            time.sleep(0.05)
        os.write(self._wake_write, b"q")
        self._thread.join(10)
        if self._thread.is_alive():
            lose("standard output or standard error is not read any more.")
            return
        for file in self._files.values():
            file.close()

    def _copy(self) -> None:
        ending = False
        while not ending or len(self._selector.get_map()) > 1:
            events = self._selector.select(timeout=2 if ending else None)
            if ending and not events:
                break  # a process that outlived the ranks holds a pipe, and is silent
            for key, _ in events:
                if key.data is None:
                    ending = b"q" in os.read(self._wake_read, _MOST) or ending
                else:
                    self._take(key.fd, key.data)

    def _take(self, fd: int, source: _Source) -> None:
        try:
            data = os.read(fd, _MOST)
        except BlockingIOError:
            return
        for line in source.split(data):
            self._keep(line)
            self._show(source.stream, line)
        if not data:
            with self._lock:
                self._selector.unregister(fd)
            os.close(fd)

    def _keep(self, line: _Line) -> None:
        if self._folder is None or not line.text.endswith(b"\n"):
            return
        if line.rank not in self._files:
            self._files[line.rank] = FileSink(self._folder / f"rank-{line.rank}.log")
        self._files[line.rank].write(line.text)

    def _show(self, stream: BinaryIO, line: _Line) -> None:
        """A bar that moves stays on the terminal's last line, and the next line takes its place."""
        moves = line.is_bar and not line.text.endswith(b"\n")
        if line.is_bar and (line.rank or (moves and not self._bars)):
            return
        if line.text.startswith(b"cputrain: ") and self._said.setdefault(line.text, line.rank) != line.rank:
            return  # all ranks have the same to say
        start = b"\r\x1b[K" if self._bar_shown else b""
        stream.write(start + b"[%d] " % line.rank + line.text)
        self._bar_shown = moves


class _Line(NamedTuple):
    rank: int
    text: bytes
    is_bar: bool


class _Source:
    """One stream of one rank, and a line that hasn't ended."""

    def __init__(self, stream: BinaryIO, rank: int) -> None:
        self.stream, self._rank = stream, rank
        self._rest = b""

    def split(self, data: bytes) -> list[_Line]:
        """No data means that the stream has ended."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if (not data and self._rest) or len(self._rest) > _LONGEST:
            lines.append(self._rest)
            self._rest = b""
        found = [part for line in lines for part in self._lines(line)]
        if b"\r" in self._rest:  # a bar that moves: only its last state is kept
            bar = self._last(self._rest)
            found.append(_Line(self._rank, bar, True))
            self._rest = b"\r" + bar
        return found

    def _lines(self, line: bytes) -> list[_Line]:
        """One, or two where something was written behind a bar that moves."""
        last = self._last(line)
        if b"\r" not in line.removesuffix(b"\r"):
            return [_Line(self._rank, last + b"\n", False)]
        bar = _BAR.match(last)
        behind = last[bar.end() :].strip() if bar else b""
        if bar is None or not behind:
            return [_Line(self._rank, last + b"\n", True)]
        return [_Line(self._rank, bar[0], True), _Line(self._rank, self._unlabelled(behind) + b"\n", False)]

    def _last(self, line: bytes) -> bytes:
        return self._unlabelled(next((part for part in reversed(line.split(b"\r")) if part.strip()), b""))

    def _unlabelled(self, text: bytes) -> bytes:
        """torch labels tracebacks and warnings, too: once is enough."""
        label = b"[rank%d]:" % self._rank
        return text.removeprefix(label + b" ").removeprefix(label)


def label(rank: int, folder: str | None, bars: bool) -> Callable[[], bool]:
    """Labels what this process prints from now on, where the launcher doesn't: under mpirun.

    A child process copies, so that the last words of a rank that crashes come through; it ends when no process can
    write any more, or soon after the rank itself. The function that is returned waits for it, and answers whether
    output was lost.
    """
    if folder:
        text_files.make_folder(Path(folder))  # a sentence about it is this process's, not the child's
    _flush()
    pipes = [os.pipe(), os.pipe()]
    rank_process = os.getpid()
    copier = processes.fork(lambda: _copy_for(rank_process, rank, folder, bars, [read for read, _ in pipes]))
    originals = [os.dup(1), os.dup(2)]
    for standard, (read, write) in enumerate(pipes, 1):
        os.close(read)
        os.dup2(write, standard)
        os.close(write)
    return lambda: _unlabel(copier, originals)


def _copy_for(rank_process: int, rank: int, folder: str | None, bars: bool, reads: list[int]) -> NoReturn:
    os.setsid()  # mpirun kills the rank's group, perhaps before the last words are out
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # mpirun's connections are closed, too: a rank must not seem to live on in its copier.
    for first, last in zip([2, *sorted(reads)], [*sorted(reads), 65_536], strict=True):
        os.closerange(first + 1, last)
    take_over()
    output = Output(folder, bars)
    for read, stream in zip(reads, (sys.stdout.buffer, sys.stderr.buffer), strict=True):
        output.add(read, rank, stream)
    output.close(while_lives=rank_process)
    os._exit(exit_code(0))


def _unlabel(copier: int, originals: list[int], seconds: float = 3.0) -> bool:
    """Gives the streams back, and waits until the copier has copied all. Whether some is lost."""
    _flush()
    for standard, original in enumerate(originals, 1):
        os.dup2(original, standard)
        os.close(original)
    limit = time.monotonic() + seconds  # children of the script may hold the pipes
    while (ended := os.waitpid(copier, os.WNOHANG)) == (0, 0) and time.monotonic() < limit:
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1]) == LOST


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed when Python started
        stream.flush()


# --- Where it goes -----------------------------------------------------------------------------------------------

# Of a launch that trained to its end, but whose output is not whole: EX_IOERR of sysexits.h.
LOST = 74
_WORDS = b"cputrain: output is lost: "
# Said by a copier of ours, and not by a rank, whose lines are labelled; a progress bar may stand before it.
_SAID = re.compile(rb"(?<!\] )" + re.escape(_WORDS))
_STANDARD = ("standard input", "standard output", "standard error")
_STDERR = 2

_lost: list[str] = []


class Sink(io.RawIOBase):
    """Takes all that it is given, and never raises; messages call it by its `name`."""

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
        rest = memoryview(data)
        while rest and not self._failed:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # a stream that its owner reads without waiting: ssh's, for example
                select.select([], [self._descriptor], [])
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


def lose(what: str, is_stderr: bool = False) -> None:
    """Remembers that output is lost, and says so where that is possible."""
    _lost.append(what)
    if is_stderr:
        return
    stderr = getattr(sys.stderr, "buffer", None)
    sink = stderr if isinstance(stderr, Sink) else Sink(_STDERR, _STANDARD[_STDERR])
    sink.write_line(_WORDS + what.encode(errors="replace"))


def exit_code(code: int) -> int:
    """The exit code of this process, whose work ended with `code`."""
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
