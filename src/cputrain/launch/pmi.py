"""Asks the process manager of Intel MPI and MPICH (Hydra) by its own protocol, PMI-1, without any MPI library.

A process that has spoken to it counts as an MPI process: if it ends without `cmd=finalize`, its peers are ended. After
`finalize` MPI can't be initialised any more, so it is sent last of all, and not if the script used MPI itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import socket
from collections.abc import Mapping

from cputrain.launch.processes import JOB

# What a value may hold in this protocol: lines of words, `key=value`.
_WORD = re.compile(r"[!-~]+")


class Connection:
    """The socket that mpirun left open for this rank."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.rank = int(environ["PMI_RANK"])
        # A copy: MPI, if the script initialises it, keeps using the original.
        self._socket = socket.socket(fileno=os.dup(int(environ["PMI_FD"])))
        self._lines = self._socket.makefile("rb")
        self._space = self._ask("cmd=get_my_kvsname", "my_kvsname")["kvsname"]
        self._broadcasts, self._process = 0, os.getpid()
        self.exit_code = 0
        self._has_parent = JOB in environ  # which says how this rank ended (rank_parent.py)
        atexit.register(self._finalize)

    def broadcast(self, value: str) -> str:
        """Rank 0's value, on every rank."""
        assert _WORD.fullmatch(value) and len(value) < 900, value  # the least maximum of the known managers is 1024
        key = f"cputrain-{self._broadcasts}"
        self._broadcasts += 1
        if self.rank == 0:
            self._ask(f"cmd=put kvsname={self._space} key={key} value={value}", "put_result")
        self.barrier()
        return self._ask(f"cmd=get kvsname={self._space} key={key}", "get_result")["value"]

    def barrier(self) -> None:
        self._ask("cmd=barrier_in", "barrier_out")

    def _ask(self, line: str, expected: str) -> dict[str, str]:
        self._socket.sendall(line.encode() + b"\n")
        answer = self._lines.readline().decode().strip()
        words = dict(word.partition("=")[::2] for word in answer.split())
        if words.get("cmd") != expected or words.get("rc", "0") != "0":
            raise ValueError(f"mpirun's process manager answered {answer!r} to {line.split()[0]}: set MASTER_ADDR.")
        return words

    def _finalize(self) -> None:
        """After a failure the peers are ended, and mpirun ends with our exit code."""
        if os.getpid() != self._process:  # a child that the script forked
            return
        if _script_uses_mpi() and not self.exit_code:
            return
        with contextlib.suppress(OSError):  # if MPI has finalised before us, the manager has hung up
            if self.exit_code and self._has_parent:
                pass
            elif self.exit_code:
                self._socket.sendall(b"cmd=abort exitcode=%d\n" % self.exit_code)
            else:
                self._socket.sendall(b"cmd=finalize\n")
                self._lines.readline()
        self._socket.close()


def _script_uses_mpi() -> bool:
    """Whether some MPI library in this process is initialised, which then finalises by itself."""
    with open("/proc/self/maps") as file:
        loaded = set(re.findall(r"/\S*/libmpi(?:ch)?\.so\S*", file.read()))
    for path in loaded:
        flag = ctypes.c_int(0)
        library = ctypes.CDLL(path)
        if library.MPI_Initialized(ctypes.byref(flag)) == 0 and flag.value:
            return True
    return False
