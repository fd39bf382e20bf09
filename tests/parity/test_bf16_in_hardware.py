"""Products of bf16 by the CPU's own instructions: on CPUs that have them, also where a virtual machine hides them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cputrain import hardware

NOT_POSSIBLE = 77  # as in hidden_bf16.c
SCRIPT = """
import copy
import cputrain
from cputrain.formats import speed
from tests.model_zoo import tiny
from tests.parity.gradients import distance, gradients, in_bf16

speed.bf16_pays = lambda: True  # so it is asked for, however slow it is
model, batch = tiny("bert", padding="right")
exact = gradients(cputrain.optimize(copy.deepcopy(model), dtype="fp32"), lambda m: m(**batch).loss)
stock = distance(in_bf16(model, batch), gradients(copy.deepcopy(model), lambda m: m(**batch).loss))
ours = cputrain.optimize(model, dtype="bf16")
assert "multiplies bf16 itself" in str(cputrain.explain(ours))
found = distance(gradients(ours, lambda m: m(**batch).loss), exact)
print("ERRORS", found, stock)
assert 1e-5 < found < 1.5 * stock
"""


def test_gradients_by_the_instructions_themselves(tmp_path: Path) -> None:
    """About as exact as stock's autocast on the same instructions, which oneDNN says it used."""
    environ = os.environ | {"ONEDNN_VERBOSE": "1"}
    if not hardware.has_bf16():
        compiler = shutil.which("cc") or shutil.which("c++")
        if compiler is None:
            pytest.skip("no C compiler")
        library = tmp_path / "hidden_bf16.so"
        source = Path(__file__).with_name("hidden_bf16.c")
        subprocess.run([compiler, "-xc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        environ["LD_PRELOAD"] = str(library)
    answer = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environ, timeout=300)
    if answer.returncode in (NOT_POSSIBLE, -signal.SIGILL):
        pytest.skip("this CPU has no bf16, or can't be asked")
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-2000:]
    products = [line for line in answer.stdout.splitlines() if ",exec," in line and "matmul" in line and "bf16" in line]
    assert products and all("_bf16" in line or "amx" in line for line in products), answer.stdout[-2000:]
