"""The native code under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, over 500 random shapes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHAPES = 500


def why_not(tmp_path: Path, sanitizer: str) -> str | None:
    """What keeps this compiler's sanitizer from running here."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return "there is no C++ compiler"
    program, source = tmp_path / "program", tmp_path / "program.cpp"
    source.write_text("int main() { return 0; }\n")
    for command in ([compiler, f"-fsanitize={sanitizer}", "-fopenmp", str(source), "-o", str(program)], [str(program)]):
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode:
            return f"{sanitizer} sanitizer: {(answer.stderr or answer.stdout).strip().splitlines()[-1]}"
    return None


@pytest.fixture(autouse=True)
def sanitizers_work(tmp_path: Path) -> None:
    for sanitizer in ("address,undefined", "thread"):
        if reason := why_not(tmp_path, sanitizer):
            pytest.skip(reason)


def test_kernels_and_collectives_are_clean() -> None:
    command = ["make", "sanitize", f"SHAPES={SHAPES}"]
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    output = answer.stdout + answer.stderr
    assert answer.returncode == 0, output[-6000:]
    assert output.count(f"{SHAPES // 2} shapes on portable") == 2
    assert f"{SHAPES // 10} groups of ranks: clean" in output
    assert "runtime error" not in output and "WARNING: ThreadSanitizer" not in output
