"""LD_PRELOAD of an allocator: only of what exists and loads. ld.so ignores the rest with one line on the terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# By the names that stay the same between releases. The minimal tcmalloc has no profiler, and needs no libunwind.
_LIBRARIES = {
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"),
    "jemalloc": ("libjemalloc.so.2",),
}
NAMES = ("default", *_LIBRARIES)
_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")


def preload(name: str, environ: Mapping[str, str], folders: tuple[str, ...] = ()) -> tuple[str, list[str]]:
    """LD_PRELOAD for the ranks, and warnings. What the user preloads stays if it loads."""
    kept, warnings = [], []
    for library in filter(None, re.split(r"[: ]", environ.get("LD_PRELOAD", ""))):
        if loads(library):
            kept.append(library)
        else:
            warnings.append(f"LD_PRELOAD names {library}, which can't be loaded: it is left out.")
    if name != "default":
        kept.append(_found(name, folders))
    return ":".join(kept), warnings


def _found(name: str, folders: tuple[str, ...]) -> str:
    if name not in _LIBRARIES:
        raise ValueError(f"--allocator must be one of {', '.join(NAMES)}, found {name!r}.")
    places = folders or (f"{sys.prefix}/lib", *_FOLDERS)
    for file in (Path(folder) / library for library in _LIBRARIES[name] for folder in places):
        if file.exists() and loads(str(file)):
            return str(file)
    package = {"tcmalloc": "libtcmalloc-minimal4", "jemalloc": "libjemalloc2"}[name]
    raise ValueError(f"--allocator {name}: none of {', '.join(_LIBRARIES[name])} was found; apt install {package}.")


def loads(library: str) -> bool:
    """Asked of the loader itself: it runs a program with the library, and complains on stderr if it can't."""
    environ = {"LD_PRELOAD": library, "PATH": os.defpath}
    answer = subprocess.run(["/bin/true"], env=environ, capture_output=True, text=True, check=False)
    return answer.returncode == 0 and "cannot be preloaded" not in answer.stderr
