"""The process between an mpirun and a rank: it knows how the rank ended, and says so before mpirun ends all others.

mpirun itself may exit with any code where a rank was killed, and MPICH names a process and no rank.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import MutableMapping

from cputrain import blame
from cputrain.launch import first_failure, processes

# How long the others have to say what they noticed: mpirun ends them as soon as this process has failed.
_LAST_WORDS_SECONDS = 0.7
# A rank that blames another one lets that one's parent fail first, so that its exit code is the one that counts.
_CULPRIT_SECONDS = 3.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def stay_behind(rank: int, environ: MutableMapping[str, str]) -> None:
    """Returns in a child, which is the rank; this process waits for its end, and ends alike."""
    environ[blame.FOLDER] = folder = tempfile.mkdtemp(prefix="cputrain-blame-")
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        processes.die_with(parent)
        return
    code = 1
    try:
        code = _ended(child, rank, folder, environ)
    finally:
        os._exit(code)  # whatever happens: it must never come back as a second rank


def _ended(child: int, rank: int, folder: str, environ: MutableMapping[str, str]) -> int:
    asked: list[int] = []  # signals that mpirun sent: then the rank's end is no failure of its own

    def forward(number: int, frame: object) -> None:
        asked.append(number)
        processes.send(child, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    blamed = blame.read(folder, rank)
    known = blame.seconds_ago(folder, rank) if blamed else 0.0
    shutil.rmtree(folder, ignore_errors=True)
    if code == 0 or asked:
        return processes.exit_code(code)
    failure = first_failure.judge({rank: code}, {rank: blamed} if blamed else {}, socket.gethostname())
    if blamed:
        time.sleep(max(0.0, _CULPRIT_SECONDS - known))
    os.write(2, f"cputrain: {failure.sentence}.\n".encode())
    time.sleep(_LAST_WORDS_SECONDS)
    _abort(failure.code, environ)
    return failure.code


def _abort(code: int, environ: MutableMapping[str, str]) -> None:
    """Intel MPI and MPICH: a rank that never spoke to them may fail without the end of all others."""
    if environ.get("PMI_FD"):
        with contextlib.suppress(OSError, ValueError):
            os.write(int(environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % code)
