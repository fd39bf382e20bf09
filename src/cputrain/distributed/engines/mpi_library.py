"""The MPI library that fits the mpirun which started this process, through mpi4py."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

from cputrain import settings
from cputrain.distributed.engines import compiled

# MPI is only ever called by who holds this: MPI_THREAD_SERIALIZED is enough, and every MPI has it.
lock = threading.Lock()
_INTEL, _MPICH, _OPEN_MPI = "libmpi.so.12", "libmpich.so.12", "libmpi.so.40"


def load() -> Any:
    """The module mpi4py.MPI, with MPI initialised; ValueError says what is missing."""
    if "mpi4py.MPI" not in sys.modules and not settings.is_set(settings.MPI_LIBRARY):
        path = _library()
        if path:
            os.environ[settings.MPI_LIBRARY] = path
    try:
        with lock:
            from mpi4py import MPI
    except ImportError as error:
        raise ValueError(
            f"MPI can't be used ({error}): pip install mpi4py, beside an MPI (Intel's from pip: impi-rt==2021.18.1)."
        ) from None
    except RuntimeError as error:  # mpi4py lists all the places where it found no library
        raise ValueError(f"mpi4py finds no MPI library ({str(error).splitlines()[-1]}): install one.") from None
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise ValueError("MPI was initialised for one thread only; ccl needs MPI_THREAD_SERIALIZED.")
    return MPI


def _library() -> str | None:
    """What mpi4py is to load. By itself it takes the one beside Python, which under another's mpirun sees one rank."""
    starter = settings.mpirun_of()
    if starter == "Open MPI":
        return _OPEN_MPI
    if starter == "MPICH" and not _loads(_INTEL) and _loads(_MPICH):
        return _debians_mpich()
    return None


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _debians_mpich() -> str:
    """mpi4py's wheel wants MPICH as libmpi.so.12, Debian calls it libmpich.so.12: an empty library leads there."""
    with open("/proc/self/maps") as file:
        mpich = next(line.split()[-1] for line in file if "/libmpich.so" in line)
    arguments = ["-Wl,-soname,libmpi.so.12", "-Wl,--no-as-needed", mpich]
    made = str(compiled.library(_INTEL, "// Nothing but a name.\n", arguments, "mpi4py with Debian's MPICH"))
    ctypes.CDLL(made)  # mpi4py's own asks for it by the short name, and finds it loaded
    return made
