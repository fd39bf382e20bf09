"""The wheel for macOS, Windows and ARM, installed: models train as stock, and commands that write files work.

The processes here run on Linux; what other systems lack is taken from them before cputrain is imported.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import cputrain

# Imported first: other systems' asyncio and torch don't ask for what is taken away.
_ELSEWHERE = """
import os, platform, sys
import asyncio, subprocess, threading
NEEDS_TORCH and __import__("torch")
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("sched_getaffinity", "sched_setaffinity", "fork", "getuid", "geteuid", "setsid", "pidfd_open"):
    delattr(os, name) if hasattr(os, name) else None
platform.machine = lambda: "aarch64"
"""
_COMMAND = (
    "import sys; NEEDS_TORCH = sys.argv[1] in ('doctor', 'env')"
    + _ELSEWHERE
    + """
from cputrain.cli import main
sys.argv[0] = "cputrain"
main()
"""
)
_HERE = """
import torch
import cputrain
assert "site-packages" in cputrain.__file__
cputrain.optimize(torch.nn.Linear(4, 4))
"""
_TRAINING = (
    "NEEDS_TORCH = True"
    + _ELSEWHERE
    + """
import torch
from torch import nn
import cputrain
model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
optimizer = torch.optim.AdamW(model.parameters())
forward = model[1].forward
found = cputrain.optimize(model, optimizer)
assert found[0] is model and found[1] is optimizer and model[1].forward == forward
model(torch.rand(2, 4)).sum().backward()
optimizer.step()
print(cputrain.explain(model))
cputrain.restore(model)
"""
)


def run(python: Path, script: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, "-c", script, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def test_a_model_trains_as_stock_and_that_is_said_once(python_without_kernels: Path, tmp_path: Path) -> None:
    done = run(python_without_kernels, _TRAINING, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    sentence = "cputrain's kernels need Linux on x86-64, this is Linux on aarch64"
    assert done.stderr.count(sentence) == 1 and "Traceback" not in done.stderr
    assert f"as stock: {sentence}" in done.stdout


def test_where_there_is_a_better_wheel_its_lack_is_an_error(python_without_kernels: Path, tmp_path: Path) -> None:
    done = run(python_without_kernels, _HERE, folder=tmp_path)
    assert done.returncode == 1
    assert "native library was not found" in done.stderr and "--force-reinstall" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["k8s", "render", "--image", "x:1", "--workers", "2", "--", "run_qa.py"], 0, "kind: PyTorchJob"),
        (["slurm", "render", "--", "run_qa.py"], 0, "srun"),
        (["env"], 0, "aarch64"),
        (["doctor"], 1, "models train as stock here"),
        (["config", "--default", "--config_file", "file.yaml"], 0, "file.yaml"),
        (["help"], 0, "cputrain run"),
    ],
)
def test_a_command_works(
    python_without_kernels: Path, tmp_path: Path, words: list[str], code: int, expected: str
) -> None:
    done = run(python_without_kernels, _COMMAND, *words, folder=tmp_path)
    assert done.returncode == code, done.stderr
    assert expected in " ".join((done.stdout + done.stderr).split()) and "Traceback" not in done.stderr


def test_an_image_made_by_a_release_has_the_same_release(python_without_kernels: Path, tmp_path: Path) -> None:
    done = run(python_without_kernels, _COMMAND, "image", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f'"cputrain[hf]=={cputrain.__version__}"' in (tmp_path / "Dockerfile").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"Dockerfile", ".dockerignore"}
