"""A checkpoint is written into a staging folder by all ranks, and appears under its name when it is whole.

    output = Output.take(path, keep=3)                               once, all ranks
    with Writing(output, "checkpoint-40", step=40) as writing:       all ranks
        writing.write(lambda: torch.save(…, writing.folder / "optimizer.pt"))
    writing.saved                                                    whether it is there, the same on all ranks

With `later=True` the files are written, into the system's cache, when the block ends; a thread sums them up, flushes
them to the disk and gives the checkpoint its name. `wait`, of all ranks, has to come before the next one.

What can't be written (a full disk, a read-only one) leaves the training running, with one line. Ranks that don't see
rank 0's folder have a disk of their own: there the first of them gives the checkpoint its name.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType

from cputrain import output_folder
from cputrain.checkpoints import folder, manifest, ranks
from cputrain.checkpoints.lock import Lock, Superseded
from cputrain.checkpoints.manifest import Manifest
from cputrain.log import logger

# A disk that has no room for so many is nearly full.
_CHECKPOINTS = 3
# What torch and safetensors raise where Python raises OSError.
_WRITERS = ("PytorchStreamWriter failed", "unexpected pos", "I/O error", "basic_ios", "iostream error", "os error")


def cannot_write(error: BaseException) -> bool:
    """Whether it is the disk that failed, rather than the program."""
    known = isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError"
    return isinstance(error, OSError) or (known and any(words in str(error) for words in _WRITERS))


class Output:
    """A folder that a run saves into. `leads`: this rank is the one that gives checkpoints their names on its disk."""

    def __init__(self, path: Path, run: str, keep: int | None, spared: Callable[[], Iterable[Path]]) -> None:
        self.path, self.run, self.keep, self.spared = path, run, keep, spared
        self.lock: Lock | None = None
        self.leads = True
        self._said_that_little_is_free = False

    @classmethod
    def take(
        cls, path: str | Path, run: str, keep: int | None = None, spared: Callable[[], Iterable[Path]] = tuple
    ) -> Output:
        """Of all ranks. Takes the folder from an older writer, and finishes what it left."""
        output = cls(Path(path), run, keep, spared)
        wait(tuple(_in_threads))  # of a training that failed in this process
        if ranks.number() == 0:
            output._take()
        name = ranks.of_first(output.lock.name if output.lock else "")
        own_disk = ranks.number() > 0 and not (name and Lock.is_held_by(output.path, name))
        disks = ranks.of_all(socket.gethostname() if own_disk and name else "")
        output.leads = disks.index(disks[ranks.number()]) == ranks.number()
        if output.leads and own_disk:
            output._take()
        ranks.of_all(None)  # none looks for checkpoints before all disks are cleared
        return output

    def free_after_saying_if_little(self, room: int) -> int:
        """Free bytes of the disk. The old checkpoints stay until the new one is there, and logs grow, too."""
        free = shutil.disk_usage(self.path).free
        if free < _CHECKPOINTS * room and not self._said_that_little_is_free:
            self._said_that_little_is_free = True
            logger.warning(
                "the disk of %s is nearly full: %.1f GB are free, and a checkpoint takes %.1f GB",
                self.path,
                free / 1e9,
                room / 1e9,
            )
        return free

    def _take(self) -> None:
        try:
            self.lock = Lock(self.path)
            folder.clear(self.path)
        except OSError as error:
            logger.error("checkpoints can't be saved in %s: %s", self.path, error.strerror)


class Writing:
    """One checkpoint on its way."""

    def __init__(
        self, output: Output, name: str, step: int, *, by_time: bool = False, room: int = 0, later: bool = False
    ) -> None:
        """`room`: bytes that it will take at least."""
        self.target = output.path / name
        self.saved = False
        self._output, self._step, self._by_time, self._later = output, step, by_time, later
        self._error = ""
        self._was_said = self._has_ended = False
        self._superseded: Callable[[], str] = str  # by which writer, or an empty string; waits for the thread
        self._staging = output_folder.path(output.path) / folder.STAGING / ranks.of_first(secrets.token_hex(8))
        self.folder = self._staging / name
        if output.leads:
            self.write(lambda: self._make(room))
        self._agree()

    def _make(self, room: int) -> None:
        output_folder.make(self._output.path)
        free = self._output.free_after_saying_if_little(room)
        if free < room:
            raise OSError(errno.ENOSPC, f"it needs {room:,} bytes, the disk has {free:,}")
        self.folder.mkdir(parents=True)

    @property
    def failed(self) -> bool:
        """A write has failed: nothing more need be written."""
        return bool(self._error)

    def write(self, save: Callable[[], object]) -> None:
        """Runs what writes into the folder, unless a write has failed. Ranks that wait for each other still can."""
        if self._error:
            return
        try:
            save()
        except Exception as error:
            if not cannot_write(error):
                raise
            self._error = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self._agree()
            if self._output.leads:
                self._superseded = _in_thread(self._finish) if self._later else self._finish
            if not self._later:
                self.wait()
        elif self._output.leads:
            shutil.rmtree(self._staging, ignore_errors=True)

    def wait(self) -> None:
        """Of all ranks: until it has its name, or can't have it."""
        if self._has_ended:
            return
        self._has_ended = True
        superseded = self._superseded()
        self._agree()
        if lost := next(filter(None, ranks.of_all(superseded)), ""):
            raise Superseded(lost)
        self.saved = not self._error
        if self._error and ranks.number() == 0:
            self._say_why()

    def _agree(self) -> None:
        """All have come this far; what failed on one has failed."""
        self._error = next(filter(None, ranks.of_all(self._error)), "")

    def _finish(self) -> str:
        """Why this writer is to stop, or nothing. The other one may be the reason that a write failed."""
        failed_before = self.failed
        superseded = self._named_or_superseded()
        shutil.rmtree(self._staging, ignore_errors=True)
        if self._error and not superseded and (ranks.number() == 0 or not failed_before):
            self._say_why()  # here: a program may end without waiting
        return superseded

    def _named_or_superseded(self) -> str:
        try:
            self.write(self._name)
            if self._error and self._output.lock is not None:
                with self._output.lock.held():
                    pass
        except Superseded as lost:
            return str(lost)
        except OSError:  # the lock can't be read where nothing can be written
            pass
        return ""

    def _name(self) -> None:
        """All files are in: they go to the disk, then the manifest does, and the folder gets its name."""
        output = self._output
        files = manifest.flushed(self.folder, manifest.files_in(self.folder))
        manifest.write(self.folder, Manifest(self._step, output.run, files, self._by_time))
        if output.lock is None:  # the disk couldn't be written when the training began
            output.lock = Lock(output.path)
        with output.lock.held():
            folder.put_in_place(output.path, self.folder, self.target)
            folder.rotate(output.path, output.run, output.keep, [*output.spared(), self.target])

    def _say_why(self) -> None:
        if not self._was_said:
            self._was_said = True
            logger.error("%s was not saved, the training goes on: %s", self.target, self._error)


_in_threads: set[Future[str]] = set()


def _in_thread(work: Callable[[], str]) -> Callable[[], str]:
    """It ends before the process does. A thread of its own each time: a process that is forked has none of a pool's."""
    executor = ThreadPoolExecutor(1)
    future = executor.submit(work)
    executor.shutdown(wait=False)
    _in_threads.add(future)
    future.add_done_callback(_in_threads.discard)
    return future.result


os.register_at_fork(after_in_child=_in_threads.clear)
