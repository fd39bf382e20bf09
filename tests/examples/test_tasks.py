"""The commands of docs/tasks, page by page, as they are written there; examples/ is where a clone has it."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "docs" / "tasks"
PAGES = sorted(TASKS.glob("*.md"))
# What a page's commands leave behind, and what the last one says.
LEAVES = {
    "accelerate": ["cpu.yaml"],
    "language_model": ["model/config.json"],
    "fastest_settings": ["fast.yaml"],
    "seeing_a_run": ["seen/_cputrain/report.html", "seen/_cputrain/report.png"],
    "going_on": ["model/checkpoint-4/cputrain_manifest.json"],
    "cluster": ["job.yaml", "job.sbatch"],
}


def commands(page: Path) -> Iterator[str]:
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        yield from re.sub(r"\\\n\s*", "", block).splitlines()


def run_elsewhere() -> set[str]:
    """Commands of the examples' own docstrings, which test_by_feature.py runs."""
    files = (ROOT / "examples" / "by_feature").glob("*.py")
    return {(ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()[-1] for file in files}


def ran(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = shlex.split(command)
    runner = {"python": [sys.executable], "cputrain": [sys.executable, "-m", "cputrain"]}[words[0]]
    environ = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    answer = subprocess.run(
        [*runner, *words[1:]], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert answer.returncode == 0, f"{command}\n{answer.stdout[-2000:]}{answer.stderr[-4000:]}"
    return answer


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_commands_of_a_page_work(page: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    found = list(commands(page))
    assert found
    for command in found:
        if command not in run_elsewhere():
            ran(command, tmp_path)
    for name in LEAVES.get(page.stem, []):
        assert (tmp_path / name).is_file(), name


def test_every_page_that_leaves_something_is_there() -> None:
    assert LEAVES.keys() <= {page.stem for page in PAGES} and len(run_elsewhere()) >= 4
