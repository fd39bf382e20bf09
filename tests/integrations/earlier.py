"""Earlier releases of transformers and accelerate, installed beside .venv's for tests in processes of their own.

    .venv/bin/python -m tests.integrations.earlier 4.48 -m pytest tests/parity

runs python with the packages of that release.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RELEASES = {path.stem.partition("-")[2]: path for path in sorted((Path(__file__).parent / "releases").glob("*.txt"))}


def folder_of(release: str) -> Path:
    """Where a release is installed. Once for each content of its list: `make clean` removes it."""
    wanted = RELEASES[release]
    content = hashlib.sha256(wanted.read_bytes()).hexdigest()[:8]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = ROOT / "build" / f"{wanted.stem}-python{version}-{content}"
    if not folder.exists():
        _install(wanted, folder)
    return folder


def _install(wanted: Path, folder: Path) -> None:
    half = folder.with_name(f"{folder.name}.{os.getpid()}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    try:
        done = subprocess.run(
            [*command, "--target", str(half), "-r", str(wanted)], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            half.rename(folder)
            return
    finally:
        shutil.rmtree(half, ignore_errors=True)
    reason = f"pip could not install {wanted.name}: {done.stderr.strip().splitlines()[-1:]}"
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def start(release: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """This python, with a release's packages before .venv's; `options` are Popen's."""
    path = os.pathsep.join([str(folder_of(release)), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return subprocess.Popen([sys.executable, *arguments], text=True, cwd=ROOT, env=environment, **options)


def run(release: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same, to its end."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start(release, *arguments, env=environment, **pipes)
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in RELEASES:
        found = repr(arguments[0]) if arguments else "nothing"
        raise SystemExit(
            f"the first argument is a release of transformers: one of {', '.join(RELEASES)}, found {found}."
        )
    return start(arguments[0], *arguments[1:]).wait()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
