"""Scripts that know nothing of cputrain, on two ranks of `cputrain launch`: its backend, and gradients as bf16."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

# A loop of its own.
dist.init_process_group("ccl")
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
model(torch.ones(1, 3)).sum().backward()
found = [hook.__name__ for hook, _ in model._comm_hooks]
assert "accelerate" not in sys.modules
dist.monitored_barrier()
dist.destroy_process_group()

from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

asked = InitProcessGroupKwargs(backend="ccl", timeout=timedelta(seconds=33))
accelerator = Accelerator(cpu=True, kwargs_handlers=[asked])
assert dist.get_backend() == "ccl" and dist.group.WORLD._timeout == 33
model = accelerator.prepare(nn.Linear(3, 3))
model(torch.ones(1, 3)).sum().backward()
found += [hook.__name__ for hook, _ in model._comm_hooks]
if accelerator.is_main_process:
    print("hooks", *found)
accelerator.end_training()
"""


def launched(folder: Path, *options: str) -> str:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "cputrain", "launch", "-n", "2", *options, str(script)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert answer.returncode == 0, answer.stderr
    assert "gradients travel as bf16" in answer.stderr
    return answer.stdout


def test_an_option_lets_gradients_travel_as_bf16(tmp_path: Path) -> None:
    assert "hooks bf16 bf16" in launched(tmp_path, "--grad_compression", "bf16")


def test_the_configuration_lets_gradients_travel_as_bf16(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\ngrad_compression: bf16\nbalance: 'off'\n")
    assert "hooks bf16 bf16" in launched(tmp_path, "--config_file", str(config))
