"""Ranks find modules where `python script.py` or `python -m module` would, and nothing in the current folder before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cputrain.launch import import_path
from tests.launch.lost_output import ENGINES, PROGRAMS
from tests.launch.programs import CLEAN

COMMAND = [sys.executable, import_path.program("__main__.py")]
SHOW_PATH = "import json, sys\nsys.stdout.write(f'PATH {json.dumps(sys.path)}\\n')\n"
# The name of a module, and what tells that it was executed.
TRAP = "open({mark!r}, 'a').close()\nraise ImportError('this is a file of the current folder')\n"
# In the current folder `runpy` alone would do: it is what -m imports first.
TRAPS = {*sys.stdlib_module_names, "psutil", "torch", "typer", "cputrain"} - set(sys.builtin_module_names)
ALL = [
    pytest.param(["launch", "-n", "2", *words], {}, 2, id=name, marks=pytest.mark.needs_program(*of))
    for name, words in ENGINES.items()
    for of in [PROGRAMS.get(name, ("sh", "dash"))]
] + [
    pytest.param(["launch"], {}, 1, id="one process"),
    pytest.param(["launch"], {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}, 2, id="Kubeflow"),
    pytest.param(["run"], {}, 1, id="run"),
]


def paths(folder: Path, command: list[str], **environ: str) -> list[list[str]]:
    answer = subprocess.run(
        command, cwd=folder, env={**CLEAN, "HOME": str(folder), **environ}, capture_output=True, text=True, timeout=100
    )
    assert answer.returncode == 0, answer.stderr
    return [json.loads(line.partition("PATH ")[2]) for line in answer.stdout.splitlines() if "PATH " in line]


@pytest.mark.parametrize(("words", "environ", "number"), ALL)
def test_a_script_has_the_path_that_python_gives_it(
    words: list[str], environ: dict[str, str], number: int, tmp_path: Path
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "show.py").write_text(SHOW_PATH)
    (tmp_path / "hosts").write_text("localhost:2\n")
    for name in TRAPS:
        (tmp_path / f"{name}.py").write_text(TRAP.format(mark=str(tmp_path / f"executed-{name}")))
    expected = paths(tmp_path, [sys.executable, "scripts/show.py"])
    assert expected[0][0] == str(tmp_path / "scripts")
    assert paths(tmp_path, [*COMMAND, *words, "scripts/show.py"], **environ) == expected * number
    assert not list(tmp_path.glob("executed-*"))


@pytest.mark.parametrize("words", [["launch", "-n", "2", "-m"], ["run", "-m"]])
def test_a_module_has_the_path_that_python_gives_it(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "show.py").write_text(SHOW_PATH)
    expected = paths(tmp_path, [sys.executable, "-m", "package.show"])
    assert expected[0][0] == str(tmp_path)
    found = paths(tmp_path, [*COMMAND, *words, "package.show"])
    assert found == expected * len(found) and found


@pytest.mark.skipif(sys.version_info < (3, 11), reason="earlier Pythons don't have it")
def test_a_safe_path_stays_safe(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW_PATH)
    expected = paths(tmp_path, [sys.executable, "show.py"], PYTHONSAFEPATH="1")
    assert paths(tmp_path, [*COMMAND, "launch", "-n", "2", "show.py"], PYTHONSAFEPATH="1") == expected * 2


def test_our_files_hide_nothing_of_the_standard_library() -> None:
    """Their folder is the first that is searched, until the first line of a program of ours has run."""
    for folder in (Path(import_path.program()), Path(import_path.program("launch"))):
        assert not {path.stem for path in folder.iterdir()} & sys.stdlib_module_names
