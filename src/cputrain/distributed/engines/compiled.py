"""Small libraries that are compiled on their first use, because what they need is there only then."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


def library(name: str, source: str, arguments: Sequence[str], reason: str) -> Path:
    """The shared library that g++ makes of a source, from the cache if it was made before. `reason` is for the user."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise ValueError(f"{reason} needs a C++ compiler once, and there is neither g++ nor c++: install one.")
    key = hashlib.sha256("\0".join([source, compiler, *arguments]).encode()).hexdigest()[:16]
    made = _folder() / key / name
    if not made.exists():
        _compile([compiler, "-shared", "-fPIC", "-O2", "-std=c++17"], source, arguments, made, reason)
    return made


def _folder() -> Path:
    """Ours alone: whatever lies there is loaded into the process."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cputrain" / "compiled"
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = cache.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
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
