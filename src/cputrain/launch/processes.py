"""The processes of one machine: how they end with the process that started them, and which rank failed first.

"Liveness" in docs/architecture.md says which mechanism notices what, here and between machines.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import NamedTuple

from cputrain import blame
from cputrain.blame import Blame

# In the environment of what a guarded rank starts; its value is the guard's own.
_MARK = "CPUTRAIN_STARTED_BY"
# In the environment of every rank that an mpirun of ours starts, and of what they start.
JOB = "CPUTRAIN_JOB"
# A child that is still on its way from fork to exec has no mark, and may be told to end for so long.
_LATE_SECONDS = 1.0
# A rank that is blamed has this long to end, and to say how, before those that blame it are believed.
CULPRIT_SECONDS = 3.0
# mpirun ends the other ranks as soon as one has failed: so long they have to say what they noticed.
_LAST_WORDS_SECONDS = 0.7
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


def fork(work: Callable[[], object]) -> int:
    """The number of a child that does the work; whatever happens, it never comes back as a second rank."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    return child


# --- Ending with the parent --------------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Grandchildren whose parent dies become our children, rather than init's: so they can be found and ended."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Ends this process when its parent is gone, even if that was killed and could end no child."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(128 + signal.SIGKILL)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, even if its parent hasn't asked for its exit code yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True


def is_guarded(environ: Mapping[str, str]) -> bool:
    """Whether this is a rank that has a guard already, or something that one started."""
    return bool(environ.get(_MARK))


def guard(environ: MutableMapping[str, str]) -> None:
    """Leaves a small process behind that ends what this one started, wherever it went, when this one is gone.

    Found by a mark in their environment: mpirun kills a rank's process group, and children may have left it.
    """
    if not is_guarded(environ):
        environ[_MARK] = mark = secrets.token_hex(8)
        guarded = os.getpid()
        fork(lambda: _outlive(guarded, mark))


def _outlive(guarded: int, mark: str) -> None:
    os.setsid()
    os.closerange(0, 65_536)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGUSR1)
    if os.getppid() == guarded:
        signal.sigwait({signal.SIGUSR1})
    asked: set[int] = set()
    limit = time.monotonic() + _LATE_SECONDS
    while time.monotonic() < limit:
        new = set(marked(_MARK, mark)) - asked  # the guard itself was started without the mark
        for pid in new:
            send(pid, signal.SIGTERM)
        asked |= new
        time.sleep(_LATE_SECONDS / 4)
    for pid in marked(_MARK, mark):
        send(pid, signal.SIGKILL)


def marked(name: str, value: str) -> list[int]:
    """The processes, of those that we may look at, that were started with a variable of this value."""
    entry = f"{name}={value}".encode()
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if entry in file.read().split(b"\0"):
                found.append(int(pid))
    return found


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def end(living: Callable[[], Iterable[int]], seconds: float = 5.0) -> None:
    """Asks processes to end, then kills those that are left. What ends may leave others: hence several rounds."""
    for ask in (signal.SIGTERM, signal.SIGKILL):
        asked: set[int] = set()
        limit = time.monotonic() + seconds
        while pids := set(living()):
            for pid in pids - asked:
                send(pid, ask)
            asked |= pids
            if time.monotonic() > limit:
                break
            time.sleep(0.05)


def wait_until(done: Callable[[], bool], seconds: float) -> None:
    """Returns when it is done, or the time is over."""
    limit = time.monotonic() + seconds
    while not done() and time.monotonic() < limit:
        time.sleep(0.1)


def end_descendants() -> None:
    """Ends them, also orphans, which are our children once `adopt_orphans` was called."""
    end(_descendants)


def _descendants() -> list[int]:
    """Zombies of ours are reaped here; other zombies are their parents' business."""
    import psutil

    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
            else:
                os.waitpid(child.pid, os.WNOHANG)
    return found


def send(pid: int, number: int) -> None:
    """Signals a process, unless it is gone, or its number has become another's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Within it SIGTERM raises KeyboardInterrupt, as Ctrl-C does: what was begun is ended in one way."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(number)


def interrupted_code(interrupt: KeyboardInterrupt) -> int:
    """The exit code of a process that Ctrl-C or SIGTERM ended."""
    return 128 + (signal.SIGTERM if interrupt.args else signal.SIGINT)


def exit_code(code: int) -> int:
    """As a shell counts: 128 and the signal's number where a signal ended the process."""
    return 128 - code if code < 0 else code


class Failure(NamedTuple):
    """Why the training is over on all ranks, in words, and with which exit code.

    `from_outside`: no rank of this machine was the cause.
    """

    sentence: str
    code: int
    from_outside: bool = False

    @property
    def code_of_pod(self) -> int:
        """An operator starts a pod anew that ends with 128 and more, and gives up with 1 to 127."""
        return blame.STOPPED if self.from_outside else 1 if self.code > 127 else self.code


def cause_may_show(codes: Mapping[int, int | None], blames: Mapping[int, Blame]) -> bool:
    """Whether every rank that failed blames one that hasn't ended, or is elsewhere.

    `codes` are the exit codes of this machine's ranks, None while they run; `blames` are those of the failed ones.
    """
    failed = {rank for rank, code in codes.items() if code}
    culprits = {one.culprit for rank, one in blames.items() if rank in failed}
    return failed <= set(blames) and any(codes.get(culprit) is None for culprit in culprits)


def first_failure(codes: Mapping[int, int | None], blames: Mapping[int, Blame]) -> Failure:
    """At least one rank has failed: one that names no other rank as the cause, or the one that the others name."""
    host = socket.gethostname()
    failed = {rank: code for rank, code in codes.items() if code}
    if by_themselves := [rank for rank in failed if rank not in blames]:
        rank = by_themselves[0]
        return Failure(f"rank {rank} on {host} {_ending(failed[rank])}", exit_code(failed[rank]) or 1)
    culprit = Counter(blames[rank].culprit for rank in failed).most_common(1)[0][0]
    witness = next(rank for rank in failed if blames[rank].culprit == culprit)
    words = blames[witness].sentence.rstrip(".")
    if words.startswith("CollectivesDiffer"):  # each blames the other: the sentence says what both called
        return Failure(f"rank {witness} on {host} failed: {words}", 1)
    return Failure(f"rank {culprit} is the cause, as rank {witness} on {host} found: {words}", 1, culprit not in codes)


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"


# --- Between an mpirun and a rank --------------------------------------------------------------------------------


def stay_behind(rank: int, environ: MutableMapping[str, str]) -> None:
    """Returns in a child, which is the rank; this process waits for its end, says how it failed, and ends alike.

    mpirun itself may exit with any code where a rank was killed, and MPICH names a process and no rank.
    """
    environ[blame.FOLDER] = folder = tempfile.mkdtemp(prefix="cputrain-blame-")
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        die_with(parent)
        return
    code = 1
    try:
        code = _ended(child, rank, folder, environ)
    finally:
        os._exit(code)  # whatever happens: it must never come back as a second rank


def _ended(child: int, rank: int, folder: str, environ: Mapping[str, str]) -> int:
    asked = _forward_signals(child)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    blamed = blame.read(folder, rank)
    known = blame.seconds_ago(folder, rank) if blamed else 0.0
    shutil.rmtree(folder, ignore_errors=True)
    if code == 0 or asked:
        return exit_code(code)
    failure = first_failure({rank: code}, {rank: blamed} if blamed else {})
    if blamed:  # the culprit's parent is to fail first, so that its exit code is the one that counts
        time.sleep(max(0.0, CULPRIT_SECONDS - known))
    os.write(2, f"cputrain: {failure.sentence}.\n".encode())
    time.sleep(_LAST_WORDS_SECONDS)
    _abort(failure.code, environ)
    return failure.code


def _forward_signals(child: int) -> list[int]:
    """The signals that mpirun has sent: after one of them, the rank's end is no failure of its own."""
    asked: list[int] = []

    def forward(number: int, frame: object) -> None:
        asked.append(number)
        send(child, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    return asked


def _abort(code: int, environ: Mapping[str, str]) -> None:
    """Intel MPI and MPICH: a rank that never spoke to them may fail without the end of all others."""
    if environ.get("PMI_FD"):
        with contextlib.suppress(OSError, ValueError):
            os.write(int(environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % code)
