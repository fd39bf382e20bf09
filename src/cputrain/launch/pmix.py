"""Asks Open MPI's process manager by its own protocol, PMIx, through its client library, without starting MPI.

As with PMI (`pmi.py`), a process that has spoken to it and ends without a goodbye makes mpirun end its peers.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

# PMIx 3, 4 and 5, hence Open MPI 4 and 5. What we use of the interface is the same in all of them.
_LIBRARY = "libpmix.so.2"
_STRING, _GLOBAL = 3, 3  # a type of values, and a scope: for all ranks


class _Process(ctypes.Structure):
    _fields_ = [("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]


class _Value(ctypes.Structure):
    """Of its union only the string is used; the rest is room for the largest member."""

    _fields_ = [("type", ctypes.c_uint16), ("string", ctypes.c_char_p), ("room", ctypes.c_byte * 64)]


def library(environ: Mapping[str, str]) -> ctypes.CDLL | None:
    """The system's, or the one beside mpirun; None if there is none, or mpirun doesn't speak PMIx."""
    if not (environ.get("PMIX_NAMESPACE") and environ.get("PMIX_RANK")):
        return None
    mpirun = shutil.which("mpirun", path=environ.get("PATH"))
    roots = [environ.get("OPAL_PREFIX"), str(Path(mpirun).resolve().parents[1]) if mpirun else None]
    for path in [*(f"{root}/lib/{_LIBRARY}" for root in roots if root), _LIBRARY]:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


class Connection:
    """This process as a client of the server that mpirun left on its machine."""

    def __init__(self, calls: ctypes.CDLL) -> None:
        self._calls, self._own = calls, _Process()
        self._process, self._broadcasts = os.getpid(), 0
        self.exit_code = 0
        self._call("Init", ctypes.byref(self._own), None, ctypes.c_size_t(0))
        atexit.register(self._finalize)

    def broadcast(self, value: str) -> str:
        """Rank 0's value, on every rank."""
        key = f"cputrain-{self._broadcasts}".encode()
        self._broadcasts += 1
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
        status = getattr(self._calls, f"PMIx_{name}")(*arguments)
        if status:
            raise ValueError(f"mpirun's process manager answered {status} to PMIx_{name}: set MASTER_ADDR.")

    def _finalize(self) -> None:
        """Not after a failure, so that the peers are ended, and not by a script's own children."""
        if os.getpid() == self._process and not self.exit_code:
            self._calls.PMIx_Finalize(None, ctypes.c_size_t(0))
