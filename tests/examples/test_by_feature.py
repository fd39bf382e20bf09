"""Every example runs by the command in its docstring, learns, and is a few lines over the one before."""

from __future__ import annotations

import ast
import difflib
import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "by_feature"
IN_ORDER = ["own_loop", "with_accelerate", "mixed_precision", "gradient_accumulation"]
EXAMPLES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "task")
RUNNERS = {"python": [sys.executable], "cputrain": [sys.executable, "-m", "cputrain"]}


def command_of(name: str) -> list[str]:
    words = shlex.split(ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())).splitlines()[-1])
    return [*RUNNERS[words[0]], *words[1:]]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_learns(name: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command_of(name), capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert answer.returncode == 0, answer.stderr
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\d\.\d+)", answer.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.9 * losses[0]
    if name != "own_loop":
        assert "BertForSequenceClassification is optimised" in answer.stderr
    assert ("the script asks for bf16" in answer.stderr) == (name not in ("own_loop", "with_accelerate"))


@pytest.mark.parametrize(("one", "next_one"), list(itertools.pairwise(IN_ORDER)))
def test_each_is_a_few_lines_over_the_one_before(one: str, next_one: str) -> None:
    before, after = ((FOLDER / f"{name}.py").read_text().splitlines() for name in (one, next_one))
    added = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line.strip("+ ")]
    assert len(added) <= 10
