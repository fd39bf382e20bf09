"""Ranks are killed at random moments, also within a save, and started anew by `launch --max_restarts`.

python -m tests.checkpoints.kills --times 100

The weights at the end are an undisturbed run's, bit for bit. As a script of ranks, `kills.py HOW FOLDER KILLS SEED`, it
is what trains and kills itself: one rank, or all, in each of the first KILLS starts.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import random
import re
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.launch.programs import launch

HOWS = ("trainer", "checkpoints")
STEPS, SAMPLES, BATCH = 30, 44, 4
# A start is killed within it, from the beginning of its training, or at its end if that comes first.
SECONDS = 1.5
ROOT = Path(__file__).parents[2]

_killer: list[threading.Timer] = []


def kill_within(seconds: float, kills: int, seed: int) -> None:
    """This process, if it is its turn in this start: one rank's, or that of all at once."""
    start, rank = (int(os.environ.get(name, "0")) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
    draw = random.Random(f"{seed} {start}")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    unlucky = draw.randrange(size + 1)
    if start < kills and unlucky in (rank, size):
        moment = draw.uniform(0, seconds)
        _killer.append(threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)))
        _killer[0].start()


def survive() -> None:
    """Not if this process was to be killed, and was quicker."""
    for killer in _killer:
        killer.join()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layers(x)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [{name: torch.randn(8, generator=generator) for name in ("x", "labels")} for _ in range(SAMPLES)]


def with_trainer(folder: str, kill: Any) -> tuple[nn.Module, Any]:
    from transformers import TrainerCallback

    import cputrain

    class Kill(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            kill()

    arguments = cputrain.TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH, save_steps=3, save_total_limit=2, logging_steps=1,
        report_to="none", use_cpu=True, ddp_backend="ccl", disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip
    trainer = cputrain.Trainer(Model(), arguments, train_dataset=data(), callbacks=[Kill()])
    trainer.train()
    return trainer.model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_checkpoints(folder: str, kill: Any) -> tuple[nn.Module, Any]:
    import cputrain

    ranks, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
    model: Any = Model()
    if ranks > 1:
        dist.init_process_group("ccl")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = torch.utils.data.DistributedSampler(data(), ranks, rank)  # type: ignore[arg-type,var-annotated]
    loader = torch.utils.data.DataLoader(data(), BATCH, sampler=sampler)  # type: ignore[arg-type,var-annotated]
    checkpoints = cputrain.Checkpoints(folder, model=model, optimizer=optimizer, every=3, keep=2)
    kill()
    for epoch in checkpoints.epochs(STEPS * BATCH * ranks // SAMPLES):
        sampler.set_epoch(epoch)
        for batch in checkpoints.batches(loader):
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.step()
    return model, None


def train(how: str, folder: str, kills: int, seed: int) -> None:
    torch.manual_seed(7 + int(os.environ.get("RANK", "0")))
    run = with_trainer if how == "trainer" else with_checkpoints
    model, losses = run(folder, lambda: kill_within(SECONDS, kills, seed))
    survive()
    if int(os.environ.get("RANK", "0")) == 0:
        values = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        starts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(f"kills {starts} weights {hashlib.sha256(values).hexdigest()} losses {losses}", flush=True)


def result(how: str, ranks: int, kills: int, seed: int) -> tuple[int, str]:
    """How many kills came before the end, and what rank 0 printed there."""
    with tempfile.TemporaryDirectory() as name:
        words = [__file__, how, f"{name}/out", str(kills), str(seed)]
        options = ("-n", str(ranks), "--max_restarts", str(kills))
        environment = {"PYTHONPATH": str(ROOT), "CPUTRAIN_RUN_ID": f"kills-{seed}", "OMP_NUM_THREADS": "1"}
        answer = launch(*options, *words, folder=Path(name), seconds=120 + 90 * kills, **environment)
        assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
        found = re.findall(r"kills (\d+) weights (.*)", answer.stdout)  # rank 0 may have ended, and another one not
        assert found, answer.stdout[-3000:]
        return int(found[-1][0]), found[-1][1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100, help="kills, dealt to Trainer and Checkpoints, 1 and 2 ranks")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    cases, most = list(itertools.product(HOWS, (1, 2))), 10
    undisturbed = {case: result(*case, 0, 0)[1] for case in cases}
    left, good, number = arguments.times, 0, 0
    while left > 0:
        case = cases[number % len(cases)]
        kills, found = result(*case, min(most, left), arguments.seed + number)
        same = found == undisturbed[case]
        print(f"{case[0]}, {case[1]} ranks, {kills} kills: {'the same' if same else 'OTHER'} weights", flush=True)
        left, good, number = left - kills, good + kills * same, number + 1
    print(f"{good} of {arguments.times - left} kills left no trace")
    return 0 if good == arguments.times - left else 1


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in HOWS:
        train(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())
