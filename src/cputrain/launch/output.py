"""What ranks print: each line with its rank before it, a file per rank, and one progress bar."""

from __future__ import annotations

import os
import re
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

from cputrain import text_files
from cputrain.launch import sinks
from cputrain.launch.sinks import FileSink

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
        """Copies what comes from a pipe."""
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
            sinks.lose("standard output or standard error is not read any more.")
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
    copier = os.fork()
    if copier == 0:
        try:
            _copy_for(rank_process, rank, folder, bars, [read for read, _ in pipes])
        finally:
            os._exit(1)  # whatever happens: it must never come back as a second rank
    originals = [os.dup(1), os.dup(2)]
    for (read, write), standard in zip(pipes, (1, 2), strict=True):
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
    sinks.take_over()
    output = Output(folder, bars)
    for read, stream in zip(reads, standard_streams(), strict=True):
        output.add(read, rank, stream)
    output.close(while_lives=rank_process)
    os._exit(sinks.exit_code(0))


def _unlabel(copier: int, originals: list[int], seconds: float = 3.0) -> bool:
    """Gives the streams back, and waits until the copier has copied all. Whether some is lost."""
    _flush()
    for original, standard in zip(originals, (1, 2), strict=True):
        os.dup2(original, standard)
        os.close(original)
    limit = time.monotonic() + seconds  # children of the script may hold the pipes
    while (ended := os.waitpid(copier, os.WNOHANG)) == (0, 0) and time.monotonic() < limit:
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1]) == sinks.LOST


def _flush() -> None:
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed when Python started
        stream.flush()


def standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """After `sinks.take_over`."""
    return sys.stdout.buffer, sys.stderr.buffer
