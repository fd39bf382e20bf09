"""What ranks tell each other through mpirun, before torch is there: by PMI-1, by PMIx, or by MPI itself.

A process that has spoken to mpirun's process manager counts as an MPI process: if it ends without a goodbye, its peers
are ended. After the goodbye MPI can't be initialised any more, so it is said last of all.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import itertools
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cputrain.launch.processes import JOB
from cputrain.launch.ranks import Place

# Processes of an mpirun on each machine, which start the ranks and stay beside them.
PROXIES = ("hydra_pmi_proxy", "orted", "prted")
# What a value may hold in PMI-1: lines of words, `key=value`.
_WORD = re.compile(r"[!-~]+")
# PMIx 3, 4 and 5, hence Open MPI 4 and 5. What we use of the interface is the same in all of them.
_PMIX = "libpmix.so.2"
_STRING, _GLOBAL = 3, 3  # PMIx's type of values, and its scope: for all ranks


def exchange(place: Place, environ: Mapping[str, str]) -> Exchange | None:
    """By the process manager's own protocol, without any MPI library; else by mpi4py, if it is installed."""
    if place.by == "pmi" and environ.get("PMI_FD"):
        return Pmi(environ)
    if place.by == "openmpi" and (calls := pmix_library(environ)):
        return Pmix(calls)
    if place.by in ("openmpi", "pmi") and importlib.util.find_spec("mpi4py"):
        return Mpi4py(place)
    return None


def _keys() -> Iterator[str]:
    """A name for each broadcast, the same on all ranks."""
    return (f"cputrain-{number}" for number in itertools.count())


class Pmi:
    """How the ranks of Intel MPI and MPICH (Hydra) talk: by the socket that mpirun left open for this rank.

    A rank that fails sets `exit_code`: its peers are ended, rather than left to wait.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.rank = int(environ["PMI_RANK"])
        # A copy: MPI, if the script initialises it, keeps using the original.
        self._socket = socket.socket(fileno=os.dup(int(environ["PMI_FD"])))
        self._lines = self._socket.makefile("rb")
        self._space = self._ask("cmd=get_my_kvsname", "my_kvsname")["kvsname"]
        self._keys, self._process = _keys(), os.getpid()
        self.exit_code = 0
        self._has_parent = JOB in environ  # which says how this rank ended (`processes.stay_behind`)
        atexit.register(self._finalize)

    def broadcast(self, value: str) -> str:
        """Rank 0's value, on every rank."""
        assert _WORD.fullmatch(value) and len(value) < 900, value  # the least maximum of the known managers is 1024
        key = next(self._keys)
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
        if _script_uses_mpi() and not self.exit_code:  # which finalises by itself
            return
        with contextlib.suppress(OSError):  # if MPI has finalised before us, the manager has hung up
            if not self.exit_code:
                self._socket.sendall(b"cmd=finalize\n")
                self._lines.readline()
            elif not self._has_parent:
                self._socket.sendall(b"cmd=abort exitcode=%d\n" % self.exit_code)
        self._socket.close()


def _script_uses_mpi() -> bool:
    """Whether some MPI library in this process is initialised."""
    with open("/proc/self/maps") as file:
        loaded = set(re.findall(r"/\S*/libmpi(?:ch)?\.so\S*", file.read()))
    for path in loaded:
        flag = ctypes.c_int(0)
        library = ctypes.CDLL(path)
        if library.MPI_Initialized(ctypes.byref(flag)) == 0 and flag.value:
            return True
    return False


class _Process(ctypes.Structure):
    _fields_ = [("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]


class _Value(ctypes.Structure):
    """Of its union only the string is used; the rest is room for the largest member."""

    _fields_ = [("type", ctypes.c_uint16), ("string", ctypes.c_char_p), ("room", ctypes.c_byte * 64)]


def pmix_library(environ: Mapping[str, str]) -> ctypes.CDLL | None:
    """The system's, or the one beside mpirun; None if there is none, or mpirun doesn't speak PMIx."""
    if not (environ.get("PMIX_NAMESPACE") and environ.get("PMIX_RANK")):
        return None
    mpirun = shutil.which("mpirun", path=environ.get("PATH"))
    roots = [environ.get("OPAL_PREFIX"), str(Path(mpirun).resolve().parents[1]) if mpirun else None]
    for path in [*(f"{root}/lib/{_PMIX}" for root in roots if root), _PMIX]:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    return None


class Pmix:
    """How Open MPI's ranks talk: this process is a client of the server that mpirun left on its machine."""

    def __init__(self, calls: ctypes.CDLL) -> None:
        self._calls, self._own = calls, _Process()
        self._keys, self._process = _keys(), os.getpid()
        self.exit_code = 0
        self._call("Init", ctypes.byref(self._own), None, ctypes.c_size_t(0))
        atexit.register(self._finalize)

    def broadcast(self, value: str) -> str:
        key = next(self._keys).encode()
        if self._own.rank == 0:
            said = _Value(_STRING, value.encode())
            self._call("Put", ctypes.c_uint8(_GLOBAL), key, ctypes.byref(said))
            self._call("Commit")
        self.barrier()
        first, found = _Process(self._own.namespace, 0), ctypes.POINTER(_Value)()
        self._call("Get", ctypes.byref(first), key, None, ctypes.c_size_t(0), ctypes.byref(found))
        return found.contents.string.decode()

    def barrier(self) -> None:
        self._call("Fence", None, ctypes.c_size_t(0), None, ctypes.c_size_t(0))

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._calls, f"PMIx_{name}")(*arguments):
            raise ValueError(f"mpirun's process manager answered {status} to PMIx_{name}: set MASTER_ADDR.")

    def _finalize(self) -> None:
        """Not after a failure, so that the peers are ended, and not by a script's own children."""
        if os.getpid() == self._process and not self.exit_code:
            self._calls.PMIx_Finalize(None, ctypes.c_size_t(0))


class Mpi4py:
    """MPI itself, where its process manager has no protocol of its own. mpi4py finalises it at the end."""

    def __init__(self, place: Place) -> None:
        if place.by == "openmpi":  # it would prefer an Intel MPI that lies beside this Python
            os.environ.setdefault("MPI4PY_MPIABI", "openmpi")
        from mpi4py import MPI

        self._world: Any = MPI.COMM_WORLD
        if self._world.size != place.size:
            raise ValueError(
                f"mpirun started {place.size} ranks, mpi4py sees {self._world.size}: it loads another MPI's library."
            )

    @property
    def exit_code(self) -> int:
        return 0

    @exit_code.setter
    def exit_code(self, code: int) -> None:
        """MPI_Finalize would wait for the peers for ever: they are ended instead."""
        from mpi4py.run import set_abort_status

        set_abort_status(code)

    def broadcast(self, value: str) -> str:
        return self._world.bcast(value, root=0)

    def barrier(self) -> None:
        self._world.Barrier()


Exchange = Pmi | Pmix | Mpi4py
