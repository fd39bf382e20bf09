"""The source tree that this cputrain was started from, and a wheel of it for images."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

_PARTS = ("pyproject.toml", "CMakeLists.txt", "csrc", "src/cputrain")


def find() -> Path | None:
    """The tree of `pip install -e .` or `make install`; None if a wheel is installed."""
    tree = Path(__file__).resolve().parents[3]
    return tree if all((tree / part).exists() for part in _PARTS) else None


def build_wheel(tree: Path, folder: Path) -> str:
    """Compiles `tree` into a wheel in `folder`, and gives the wheel's name."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    if importlib.util.find_spec("scikit_build_core"):  # `make install` has it; else pip fetches it for the build
        command.append("--no-build-isolation")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".cputrain-wheel-") as made:
        done = subprocess.run([*command, "--wheel-dir", made, str(tree)], capture_output=True, text=True, check=False)
        wheels = list(Path(made).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise ValueError(
                f"pip could not build a wheel from {tree} ({''.join(last) or 'it said nothing'}): "
                "build one there by `make wheel`, or name a release by --cputrain."
            )
        wheels[0].replace(folder / wheels[0].name)
    return wheels[0].name
