"""A launch that is told to end lets its ranks save, whatever starts them."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launch.programs import CLEAN, LAUNCH

SCRIPT = """
import time, torch, torch.distributed as dist
import cputrain, cputrain.distributed
dist.init_process_group("ccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoints = cputrain.Checkpoints("out", model=model, optimizer=optimizer)
for batch in checkpoints.batches(torch.utils.data.DataLoader([torch.ones(2)] * 10_000, 1)):
    model(batch).sum().backward()
    optimizer.step()
    checkpoints.step()
    print("STEP", checkpoints.steps, flush=True)
    time.sleep(0.05)
"""


@pytest.mark.parametrize("engine", ["local", "mpi"])
def test_ranks_save_when_their_launch_is_told_to_end(engine: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [*LAUNCH, "-n", "2", "--engine", engine, "script.py"]
    environ = {**CLEAN, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(words, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True)
    assert running.stdout
    next(line for line in running.stdout if "STEP 3" in line)
    os.kill(running.pid, signal.SIGTERM)
    steps = [int(line.split()[-1]) for line in running.stdout if "STEP" in line]
    assert running.wait(60) == 143
    [saved] = (tmp_path / "out").glob("checkpoint-*")
    assert saved.name == f"checkpoint-{max(steps, default=3) + 1}"  # after its last step nothing was printed
