"""Intel oneCCL as pip installed it: found, set up, and reached through a small library of ours (csrc/oneccl).

That library is compiled on its first use, with the header from oneCCL's own package. Compiled with cputrain it would
need oneCCL wherever cputrain is built; written without the header it would have to know the insides of C++ classes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import psutil

from cputrain.distributed.engines import compiled
from cputrain.settings import (
    ATL_TRANSPORT,
    CCL_ROOT,
    MPI_ROOT,
    OFFLOAD,
    WORKERS,
    Environ,
    communication_cpus,
    mpirun_of,
    value_of,
)

ADDRESS_BYTES = 256
_INSTALL = 'pip install "cputrain[oneccl]"'
_SOURCE = Path(__file__).parents[2] / "lib" / "oneccl_bridge.cpp"
_pointer, _number = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "meet": (_pointer, [ctypes.c_char_p, _number]),
    "join": (_number, [_pointer, _number, _number]),
    "leave": (_number, [_pointer]),
    "abandon": (None, []),
    "all_reduce": (_pointer, [_pointer, _pointer, _number, _number, _number]),
    "all_gather": (_pointer, [_pointer, _pointer, _number, _pointer, _pointer, _number]),
    "all_to_all": (_pointer, [_pointer, _pointer, _pointer, _pointer, _pointer, _number]),
    "broadcast": (_pointer, [_pointer, _pointer, _number, _number]),
    "done": (_number, [_pointer, _number]),
    "error": (ctypes.c_char_p, []),
}


class Library:
    """Its functions without their common prefix. One thread calls them all."""

    def __init__(self, address: str) -> None:
        for name, value in variables(address).items():
            os.environ.setdefault(name, value)
        prefix = _prefix()
        arguments = [f"-I{prefix}/include", f"-L{prefix}/lib/ccl/cpu/lib", "-l:libccl.so.1"]
        arguments += [f"-Wl,-rpath,{prefix}/lib/ccl/cpu/lib", "-fvisibility=hidden"]
        source, reason = _SOURCE.read_text(), "oneCCL's transport"
        path = compiled.library("libcputrain_oneccl.so", source, arguments, reason, _release(prefix))
        # By its path: LD_LIBRARY_PATH, which Intel's mpirun needs, would lead to the one for GPUs.
        ctypes.CDLL(f"{prefix}/lib/ccl/cpu/lib/libccl.so.1")
        library = ctypes.CDLL(str(path))
        for name, (result, parameters) in _FUNCTIONS.items():
            function = getattr(library, f"cputrain_oneccl_{name}")
            function.restype, function.argtypes = result, parameters
            setattr(self, name, function)


def _prefix() -> Path:
    """Where pip put it: beside this Python. Another one may be named as CCL_ROOT, as Intel's own installers do."""
    for prefix in map(Path, filter(None, [sys.prefix, value_of(CCL_ROOT)])):
        if (prefix / "lib/ccl/cpu/lib/libccl.so.1").exists() and (prefix / "include/oneapi/ccl.hpp").exists():
            return prefix
    raise ValueError(f"oneCCL is not installed beside this Python ({sys.prefix}): {_INSTALL}.")


def _release(prefix: Path) -> str:
    """What is compiled with the headers of one oneCCL must not be loaded with another that was installed in its place.

    The version is pkg-config's, which some installers leave out; the headers differ wherever it matters to us.
    """
    digest = hashlib.sha256()
    for header in sorted((prefix / "include/oneapi").rglob("*.h*")):
        digest.update(header.read_bytes())
    described = prefix / "lib/pkgconfig/ccl.pc"
    version = re.search(r"^Version: *(.+)$", described.read_text() if described.exists() else "", re.MULTILINE)
    return f"oneCCL {version[1] if version else 'of unknown version'}, {digest.hexdigest()}"


def variables(address: str, environ: Environ | None = None) -> dict[str, str]:
    """What oneCCL is told, unless the user has set it; its own defaults hang or are several times as slow."""
    mpi = _mpi_root(environ)
    found = {"CCL_ALLREDUCE": "nreduce", "CCL_LOG_LEVEL": "error", **_workers()}
    if mpi is not None:
        found |= {
            MPI_ROOT: str(mpi),
            "CCL_MPI_LIBRARY_PATH": f"{mpi}/lib/libmpi.so.12",
            "CCL_OFI_LIBRARY_PATH": f"{mpi}/lib/libfabric.so.1",
            "FI_PROVIDER_PATH": f"{mpi}/lib",
        }
    if mpirun_of(environ) in ("Intel", "MPICH") and mpi is not None:
        # By default it is MPI_Iallgatherv, which takes seconds or hangs if the parts differ in size.
        return {**found, ATL_TRANSPORT: "mpi", "CCL_ALLGATHERV": "ring"}
    interface = _interface(address)
    found |= {ATL_TRANSPORT: "ofi", "CCL_PROCESS_LAUNCHER": "none", "CCL_ATL_SHM": "1"}
    return found | ({"CCL_KVS_IFACE": interface, "FI_TCP_IFACE": interface} if interface else {})


def _workers() -> dict[str, str]:
    """A worker of oneCCL burns its core. Without a core kept for it, the rank that waits does the work."""
    kept = sorted(communication_cpus())
    if not kept:
        return {OFFLOAD: "0"}
    return {WORKERS: str(len(kept)), "CCL_WORKER_AFFINITY": ",".join(map(str, kept))}


def _mpi_root(environ: Environ | None) -> Path | None:
    """Intel MPI, which also has the libfabric that oneCCL needs without MPI."""
    for root in map(Path, filter(None, [value_of(MPI_ROOT, environ), sys.prefix])):
        if (root / "lib/libmpi.so.12").exists():
            return root
    return None


def _interface(address: str) -> str | None:
    """The name of the network interface that has this address."""
    names = psutil.net_if_addrs().items()
    return next((name for name, entries in names if any(one.address == address for one in entries)), None)
