"""What checkpoints cost: the share that saving takes, the end after SIGTERM, resuming within a long epoch.

    python benchmarks/checkpoints.py --report

MiniLM's shape, 12 x 384 tokens, `save_steps 50`: trainings with and without checkpoints take turns. The long epoch has
1,000,000 samples, of which half are done, dealt to two ranks by length.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import description, report_path

SAMPLES = 1_000_000
LONG_BATCH = 25_000  # of each of two ranks: ten steps are half of the epoch


def minilm(folder: str, steps: int, save_steps: int) -> None:
    """In a child: prints what it took, from the first step on."""
    import torch
    from transformers import BertConfig, BertForQuestionAnswering, TrainerCallback

    import cputrain

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                self.began = time.perf_counter()
                print("BEGINS", flush=True)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            print(json.dumps({"seconds": time.perf_counter() - self.began}), flush=True)

    torch.manual_seed(0)
    model = BertForQuestionAnswering(
        BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    )
    window = {"input_ids": torch.randint(5, 30_000, (384,)), "attention_mask": torch.ones(384, dtype=torch.long)}
    data = [{**window, "start_positions": torch.tensor(3), "end_positions": torch.tensor(5)}] * (12 * steps)
    arguments = cputrain.TrainingArguments(
        folder, per_device_train_batch_size=12, max_steps=steps, save_steps=save_steps or 500, report_to=[],
        save_strategy="steps" if save_steps else "no", save_total_limit=2, use_cpu=True, disable_tqdm=True, bf16=True,
    )  # fmt: skip
    cputrain.Trainer(model, arguments, train_dataset=data, callbacks=[Clock()]).train()


def long_epoch(folder: str, steps: int) -> None:
    """In a child, a rank of two: prints how long it was until the first step, and until the first batch was there."""
    import torch
    from transformers import TrainerCallback

    import cputrain

    class Data(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.lengths = [1 + number % 50 for number in range(SAMPLES)]  # so that samples are dealt by length

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": torch.tensor([float(index % 7)]), "labels": index % 2}

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 2)

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            y = self.linear(x)
            return {"loss": torch.nn.functional.cross_entropy(y, labels), "logits": y}

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.began and args.process_index == 0:
                print(json.dumps({"step": state.global_step, "seconds": time.perf_counter() - self.began}), flush=True)
            self.began = 0.0

    arguments = cputrain.TrainingArguments(
        folder, per_device_train_batch_size=LONG_BATCH, max_steps=steps, save_steps=10, report_to=[], use_cpu=True,
        disable_tqdm=True, ddp_backend="ccl",
    )  # fmt: skip
    cputrain.Trainer(Model(), arguments, train_dataset=Data(), callbacks=[Clock()]).train()


def child(*words: object, launch: bool = False, **environ: str) -> list[str]:
    command = [sys.executable, "-m", "cputrain", *(("launch", "-n", "2") if launch else ("run",)), "--record", "off"]
    words_of_child = [*command, *environ.pop("options", "").split(), __file__, *map(str, words)]
    answer = subprocess.run(words_of_child, capture_output=True, text=True, env={**os.environ, **environ}, check=False)
    if answer.returncode or (launch and "by length (" not in answer.stderr):
        sys.exit(answer.stdout[-2000:] + answer.stderr[-3000:])
    return [line.partition("{")[2] for line in answer.stdout.splitlines() if '": ' in line and "{" in line]


def seconds(lines: list[str]) -> float:
    return float(json.loads("{" + lines[0])["seconds"])


def added(place: Path, steps: int, turns: int) -> list[str]:
    taken: dict[int, list[float]] = {0: [], 50: []}
    for turn in range(turns):
        for save_steps, times in taken.items():
            times.append(seconds(child("minilm", place / f"{turn}-{save_steps}", steps, save_steps)))
    without, with_them = (statistics.median(times) for times in taken.values())
    share = statistics.median(b / a for a, b in zip(*taken.values(), strict=True)) - 1
    return [
        f"| {steps} steps without checkpoints | {without:.1f} s |",
        f"| with one every 50 steps | {with_them:.1f} s |",
        f"| what checkpoints add (median of {turns}) | **{100 * share:.1f}%** (floor: 2%) |",
    ]


def stopping(place: Path, times: int) -> list[str]:
    taken = []
    for number in range(times):
        command = [sys.executable, "-m", "cputrain", "run", "--record", "off", __file__, "minilm"]
        words = [*command, str(place / f"stop-{number}"), "1000", "500"]
        running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert running.stdout
        next(line for line in running.stdout if "BEGINS" in line)
        time.sleep(5 + number % 3)
        began = time.perf_counter()
        running.send_signal(signal.SIGTERM)
        if running.wait() != 143 or not list((place / f"stop-{number}").glob("checkpoint-*")):
            sys.exit(f"it ended with {running.returncode}, or saved nothing")
        taken.append(time.perf_counter() - began)
    return [f"| from SIGTERM to 143, saved ({times} times) | at most **{max(taken):.1f} s** (floor: 10 s) |"]


def resuming(place: Path) -> list[str]:
    folder = place / "long"
    first = seconds(child("long_epoch", folder, 10, launch=True))
    again = seconds(child("long_epoch", folder, 11, launch=True, options="--resume auto"))
    return [
        f"| {SAMPLES:,} samples: from the beginning of the training to its first step | {first:.2f} s |",
        f"| the same in the middle of the epoch, resumed | {again:.2f} s: **{again - first:+.2f} s** (floor: 1 s) |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--stops", type=int, default=30)
    parser.add_argument("--only", choices=("added", "stopping", "resuming"))
    parser.add_argument("--report", action="store_true", help="write benchmarks/results/checkpoints_…")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as name:
        place, rows = Path(name), []
        if asked.only in (None, "added"):
            rows += added(place, asked.steps, asked.turns)
        if asked.only in (None, "stopping"):
            rows += stopping(place, asked.stops)
        if asked.only in (None, "resuming"):
            rows += resuming(place)
    head = [
        "# What checkpoints cost",
        "",
        (__doc__ or "").split("\n\n")[2].strip(),
        "",
        "| what | found |",
        "|---|---|",
    ]
    text = "\n".join([*head, *rows, "", *(f"- {key}: {value}" for key, value in description().items()), ""])
    print(text)
    if asked.report:
        report_path("checkpoints").write_text(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["minilm"]:
        minilm(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["long_epoch"]:
        long_epoch(sys.argv[2], int(sys.argv[3]))
    else:
        main()
