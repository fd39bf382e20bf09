"""The sources are Python 3.10's, whatever runs the tests: later syntax would end in a SyntaxError for some users."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = (3, 10)
SOURCES = [path for folder in ("src", "examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_the_oldest_python_is_the_one_that_is_promised() -> None:
    promised = re.search(r'^requires-python = ">=(\d+)\.(\d+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert promised and tuple(map(int, promised.groups())) == OLDEST
    with pytest.raises(SyntaxError):
        ast.parse("try:\n    pass\nexcept* ValueError:\n    pass", feature_version=OLDEST)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_parses_as_the_oldest_python(path: Path) -> None:
    """`feature_version` doesn't know every novelty, such as nested quotes in f-strings: ruff's py310 does."""
    ast.parse(path.read_text(), str(path), feature_version=OLDEST)


def interpreter(version: str) -> str | None:
    """A shim of pyenv's that is on the PATH may have nothing behind it, so pyenv's own come first."""
    own = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    return str(own[-1]) if own else shutil.which(f"python{version}")


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_an_interpreter_of_this_machine_compiles_every_source(version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"python{version} is not on this machine")
    code = "import sys; [compile(open(path).read(), path, 'exec') for path in sys.argv[1:]]"
    command = [python, "-W", "error", "-c", code, *map(str, SOURCES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
