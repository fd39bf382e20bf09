"""Trains a small question-answering model from nothing, with stock PyTorch and with cputrain, side by side.

    python examples/demo/run_demo.py            (or: make demo; two to three minutes on two quiet cores)

Data, tokenizer and model are the project's own, so that nothing is downloaded. Each side has a process of its own;
they take turns of a few steps on the same cores, with the same seed, batches and settings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))  # how processes take turns

from interleaved import Side, environment, in_turns, median_ratio, usable_cores
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

STEPS_PER_TURN = 5  # as in training_side.py, which this process doesn't import: it needs no torch
STEPS = 500
QUICK_STEPS, QUICK_QUESTIONS = 10, 32
LAST_STEPS = 50  # the loss that is reported is the mean of so many
LINE_EVERY = 100  # steps, where there is no terminal
NAMES = ("stock", "cputrain")


@dataclass
class Result:
    """What one side achieved."""

    steps_per_second: float
    loss: float
    f1: float
    exact_match: float
    peak_mb: float


def start_sides(steps: int, seed: int, threads: int, questions: int | None) -> list[Side]:
    script = str(Path(__file__).parent / "training_side.py")
    settings = {"steps": steps, "seed": seed, "threads": threads, "questions": questions}
    return [Side(name, script, settings, environment("native", threads, ours=name == "cputrain")) for name in NAMES]


def train(sides: list[Side], steps: int, console: Console) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds of each turn and loss of each step, for both sides."""
    seconds: list[list[float]] = [[], []]
    losses: list[list[float]] = [[], []]
    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]:5.1f} steps/s  loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = [progress.add_task(name, total=steps, speed=0.0, loss=0.0) for name in NAMES]
        for answers in in_turns(sides, steps // STEPS_PER_TURN, "turn"):
            for side, answer in enumerate(answers):
                seconds[side].append(answer["seconds"])
                losses[side] += answer["losses"]
                speed = STEPS_PER_TURN / statistics.median(seconds[side][-10:])
                loss = statistics.mean(losses[side][-LAST_STEPS:])
                progress.update(bars[side], advance=STEPS_PER_TURN, speed=speed, loss=loss)
                if not console.is_terminal and len(losses[side]) % LINE_EVERY == 0:  # a log shows no moving bar
                    console.print(f"{NAMES[side]:>9}  step {len(losses[side])}: {speed:.1f} steps/s, loss {loss:.3f}")
    return seconds, losses


def finish(side: Side, seconds: list[float], losses: list[float]) -> Result:
    memory = side.ask("memory")  # before the evaluation, whose larger batches would count
    return Result(
        steps_per_second=STEPS_PER_TURN / statistics.median(seconds),
        loss=statistics.mean(losses[-LAST_STEPS:]),
        **memory,
        **side.ask("evaluate"),
    )


def results_table(results: list[Result], ratio: float, steps: int) -> Table:
    stock, ours = results
    table = Table(title=f"{steps} steps, the same seed, batches and settings", title_justify="left")
    for head in ("", *NAMES, "ratio"):
        table.add_column(head, justify="right" if head else "left")
    rows = (
        ("steps per second", f"{stock.steps_per_second:.1f}", f"{ours.steps_per_second:.1f}", f"{ratio:.2f} ×"),
        (f"loss, last {min(steps, LAST_STEPS)} steps", f"{stock.loss:.3f}", f"{ours.loss:.3f}", ""),
        ("F1 on held-back questions", f"{stock.f1:.1f}", f"{ours.f1:.1f}", ""),
        ("exact match", f"{stock.exact_match:.1f}", f"{ours.exact_match:.1f}", ""),
        ("peak memory, MB", f"{stock.peak_mb:.0f}", f"{ours.peak_mb:.0f}", f"{ours.peak_mb / stock.peak_mb:.2f} ×"),
    )
    for row in rows:
        table.add_row(*row)
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps of each side (default {STEPS})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--quick", action="store_true", help="a few steps and questions, to see that all of it runs")
    parser.add_argument("--json", type=Path, help="also write the results into this file")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps = QUICK_STEPS
    if arguments.steps < STEPS_PER_TURN or arguments.steps % STEPS_PER_TURN:
        parser.error(f"--steps is {arguments.steps}; choose a multiple of {STEPS_PER_TURN}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    console = Console()
    console.print("Training a 3-layer BERT to answer questions, from random weights, once per side.")
    questions = QUICK_QUESTIONS if arguments.quick else None
    sides = start_sides(arguments.steps, arguments.seed, arguments.threads, questions)
    try:
        seconds, losses = train(sides, arguments.steps, console)
        results = [finish(side, *measured) for side, *measured in zip(sides, seconds, losses, strict=True)]
        explanation = sides[1].ask("explain")["text"]
    finally:
        for side in sides:
            side.close()
    ratio = median_ratio(*seconds)
    console.print(results_table(results, ratio, arguments.steps))
    console.print("\nWhat cputrain.explain(model) says:\n", style="bold")
    console.print(explanation, markup=False, highlight=False, soft_wrap=True)
    if arguments.json:
        outcome = {name: asdict(result) for name, result in zip(NAMES, results, strict=True)}
        arguments.json.write_text(json.dumps(outcome | {"ratio": ratio, "steps": arguments.steps}, indent=2))


if __name__ == "__main__":
    main()
