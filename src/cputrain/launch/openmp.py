"""Settings for the OpenMP runtime that torch really loads: GNU's, Intel's or LLVM's read different variables."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

_RUNTIMES = {"gomp": "GNU", "iomp5": "Intel", "omp": "LLVM"}
_NAME = re.compile(r"lib(gomp|iomp5|omp)\b[^/\0]*\.so")


def runtime(environ: Mapping[str, str], torch_folder: Path | None = None) -> tuple[str, str]:
    """(GNU, Intel, LLVM or unknown; why). Asked without importing torch: the settings must be there before it."""
    for library in re.split(r"[: ]", environ.get("LD_PRELOAD", "")):
        found = _NAME.fullmatch(re.sub(r"\.so[.\d]*$", ".so", os.path.basename(library)))
        if found:
            return _RUNTIMES[found[1]], f"LD_PRELOAD={library}"
    folder = torch_folder or _torch_folder()
    deps = folder / "lib" / "libtorch_global_deps.so" if folder else None
    if deps is None or not deps.exists():
        return "unknown", "torch's libraries were not found"
    # torch opens this tiny library first, globally, and what it needs is what everybody gets.
    found = _NAME.search(deps.read_bytes().decode("latin-1"))
    if not found:
        return "unknown", f"{deps} names none"
    return _RUNTIMES[found[1]], f"{deps} needs {found[0]}"


def settings(kind: str, crowded: bool) -> dict[str, str]:
    """What to add beside OMP_NUM_THREADS.

    Threads are not bound one by one: the first would keep data-loader workers and communication on its core. Threads
    that wait must not burn a core on which another process computes: Intel's and LLVM's spin for 200 ms by default.
    """
    if kind in ("Intel", "LLVM"):
        return {"KMP_BLOCKTIME": "0" if crowded else "1"}
    if kind == "GNU" and crowded:
        return {"OMP_WAIT_POLICY": "PASSIVE"}
    return {}


def _torch_folder() -> Path | None:
    found = importlib.util.find_spec("torch")
    return Path(found.origin).parent if found and found.origin else None
