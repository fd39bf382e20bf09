"""Ranks that an mpirun starts, for engines that need one. As a program it is one of them:

mpirun -n 2 python -m tests.distributed.mpi_ranks tests.distributed.ranks:run_cases '["FOLDER", "MODULE", {}]'
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import Outcome

ROOT = Path(__file__).parents[2]
BESIDE = Path(sys.prefix)


def intel(ranks: int) -> list[str]:
    """From pip, beside this Python; its mpirun is a script that may call another MPI's mpiexec."""
    command = BESIDE / "bin" / "mpiexec.hydra"
    if not command.exists():
        pytest.skip("needs Intel MPI: pip install impi-rt==2021.18.1")
    return [str(command), "-n", str(ranks)]


def mpich(ranks: int) -> list[str]:
    return [shutil.which("mpirun.mpich") or "mpirun.mpich", "-n", str(ranks)]


def open_mpi(ranks: int) -> list[str]:
    return [shutil.which("mpirun.openmpi") or "", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]


def run(
    command: list[str], function: str, *arguments: Any, seconds: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """ "module:function" with (rank, size, *arguments), on every rank of an mpirun."""
    program = ["-m", "tests.distributed.mpi_ranks", function, json.dumps(arguments)]
    environ = {**os.environ, "I_MPI_PIN": "0", "OMPI_MCA_hwloc_base_binding_policy": "none", **environment}
    environ["PATH"] = f"{BESIDE / 'bin'}:{environ['PATH']}"
    return subprocess.run(
        [*command, sys.executable, *program], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=seconds
    )


class MpiOutcome(Outcome):
    """What the cases of a module gave on every rank that an mpirun started."""

    def __init__(self, folder: Path, command: list[str], ranks: int, module: str, **environment: str) -> None:
        answer = run(command, "tests.distributed.ranks:run_cases", str(folder), module, {}, **environment)
        failed = [path.read_text() for path in folder.glob("failed-*.json")]
        assert answer.returncode == 0, "\n".join([answer.stdout, answer.stderr, *failed])
        self._collect(folder, ranks, module)


def place() -> tuple[int, int]:
    """Rank and size, from whichever mpirun it was."""
    for rank, size in (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    raise SystemExit("start this with mpirun")


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), name)(*place(), *json.loads(sys.argv[2]))
