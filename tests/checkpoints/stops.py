"""A stop in each phase of a training: saved, 143, and the resumed weights equal those of an undisturbed run.

python -m tests.checkpoints.stops --times 30
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
PHASES = ("loading", "training", "accumulation", "evaluation", "saving")
# Each signal at a place that the script reaches, so that every phase is met for certain.
SCRIPT = """
import glob, os, sys, threading, time
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from tests.integrations import tiny

phase, number, step, workers = sys.argv[1], *map(int, sys.argv[2:5])
def hit(state, where):
    if phase == where and state.global_step == step:
        os.kill(os.getpid(), number)

class Signal(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        hit(state, "training")
        if phase == "saving" and state.global_step == 4:
            threading.Thread(target=watch, daemon=True).start()
    def on_substep_end(self, args, state, control, **kwargs):
        hit(state, "accumulation")
    def on_prediction_step(self, args, state, control, **kwargs):
        hit(state, "evaluation")
    def on_train_begin(self, args, state, control, **kwargs):
        if phase == "loading":
            os.kill(os.getpid(), number)

def watch():
    while not (glob.glob("out/checkpoint-4*") or glob.glob("out/_cputrain/*4*")):
        time.sleep(0.0002)
    os.kill(os.getpid(), number)

model = tiny.bert()
for module in model.modules():
    if isinstance(module, torch.nn.Dropout):
        module.p = 0.1
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=12, report_to=[], save_steps=4,
    eval_strategy="steps", eval_steps=3, logging_steps=2, use_cpu=True, disable_tqdm=True,
    dataloader_num_workers=workers)
trainer = Trainer(
    model, arguments, train_dataset=tiny.windows(64), eval_dataset=tiny.windows(16), callbacks=[Signal()])
last = max(glob.glob("out/checkpoint-*"), key=lambda name: int(name.rpartition("-")[2]), default=None)
trainer.train(resume_from_checkpoint=last)
print("THE SCRIPT WENT ON")
trainer.save_model("trained")
print(sorted((one["step"], one["eval_loss"]) for one in trainer.state.log_history if "eval_loss" in one))
"""


class Stop(NamedTuple):
    phase: str = "none"
    number: int = signal.SIGTERM
    step: int = 6
    workers: int = 0


def run(folder: Path, stop: Stop) -> subprocess.CompletedProcess[str]:
    """One start of the script."""
    (folder / "script.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "cputrain", "run", "--progress", "off", "script.py", stop.phase]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CPUTRAIN_RECORD": "off"}
    words += [str(int(stop.number)), str(stop.step), str(stop.workers)]
    return subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=300)


def undisturbed(folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    """The weights, and the evaluations."""
    folder.mkdir()
    ended = run(folder, Stop())
    assert ended.returncode == 0, ended.stderr
    return load_file(folder / "trained" / "model.safetensors"), ended.stdout.splitlines()[-1]


def check(folder: Path, stops: Iterable[Stop], expected: tuple[dict[str, torch.Tensor], str]) -> None:
    """Stopped again and again, then finished."""
    folder.mkdir()
    for stop in stops:
        stopped = run(folder, stop)
        assert stopped.returncode == 143, (stop, stopped.returncode, stopped.stderr)
        assert "WENT ON" not in stopped.stdout
        saved = {int(path.name.rpartition("-")[2]) for path in (folder / "out").glob("checkpoint-*")}
        assert saved if stop.phase != "loading" else True, stop
        assert stop.phase in ("loading", "saving") or max(saved) == stop.step, (stop, saved)
    finished = run(folder, Stop())
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == expected[1], (*stops, finished.stdout, expected[1], finished.stderr)
    found = load_file(folder / "trained" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in expected[0].items()), stops


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    with tempfile.TemporaryDirectory(prefix="stops-") as folder:
        expected = undisturbed(Path(folder, "undisturbed"))
        for time_ in range(asked.times):
            for phase in PHASES:
                number = draw.choice([signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT])
                step = draw.choice([3, 6, 9]) if phase == "evaluation" else draw.randrange(1, 11)
                began = time.monotonic()
                stop = Stop(phase, number, step, draw.choice([0, 2]))
                check(Path(folder, f"{phase}-{time_}"), [stop], expected)
                print(f"{stop}: {time.monotonic() - began:.1f} s", flush=True)
    print(f"{asked.times} of {asked.times} in each of {len(PHASES)} phases: saved, 143, resumed to the bit")


if __name__ == "__main__":
    main()
