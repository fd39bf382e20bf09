"""Small libraries that are compiled on their first use, because what they need is there only then."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cputrain import user_folders


def library(name: str, source: str, arguments: Sequence[str], reason: str, release: str = "") -> Path:
    """The shared library that g++ makes of a source, from the cache if it was made before.

    `reason` is for the user, `release` tells apart what the source includes and is linked with.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise ValueError(f"{reason} needs a C++ compiler once, and there is neither g++ nor c++: install one.")
    key = hashlib.sha256("\0".join([source, compiler, *arguments, release]).encode()).hexdigest()[:16]
    made = _folder() / key / name
    if not made.exists():
        _compile([compiler, "-shared", "-fPIC", "-O2", "-std=c++17"], source, arguments, made, reason)
    return made


def _folder() -> Path:
    """Ours alone: whatever lies there is loaded into the process."""
    found = user_folders.cache()
    if found is None:
        raise ValueError("there is no folder for what is compiled: set HOME or XDG_CACHE_HOME.")
    cache = found / "cputrain" / "compiled"
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    stats = cache.stat()
    if stats.st_uid != os.geteuid() or stats.st_mode & 0o022:
        raise ValueError(f"{cache} can be written by others, and libraries would be loaded from it: chmod 700 it.")
    return cache


def _compile(command: list[str], source: str, arguments: Sequence[str], made: Path, reason: str) -> None:
    """In a folder of its own, then moved in one go: several ranks may do it at once."""
    made.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        code, result = Path(folder, "source.cpp"), Path(folder, made.name)
        code.write_text(source)
        answer = subprocess.run(
            [*command, "-o", str(result), str(code), *arguments], capture_output=True, text=True, timeout=300
        )
        if answer.returncode:
            raise ValueError(f"{reason} could not be compiled:\n{answer.stderr[-2000:]}")
        os.replace(result, made)
