"""Does a language model learn with cputrain as with stock? A small Llama from scratch on real text, several seeds.

    python benchmarks/language_model_curves.py --report

Each training is examples/language_modeling/run_clm.py, by `python` and by `cputrain run` in each precision. There is no
dropout, so that the sides of one seed see the same batches and weights. In every window of steps the mean over the
seeds must be no farther from stock's than stock's seeds are from each other. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from loss_curves import windows
from machine import description, facts_table, report_path, table

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "language_modeling" / "run_clm.py"
TEXT = ROOT.parent / "shared" / "data" / "tinyshakespeare" / "input.txt"
SIZES = "hidden_size=128,intermediate_size=352,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2"
SIDES = ("stock", "fp32", "int16")
Curves = dict[str, list[list[float]]]  # for each side, for each seed, the loss of each step; last, of held-back text


def command(side: str, seed: int, folder: Path, arguments: argparse.Namespace) -> list[str]:
    options = {
        "model_type": "llama",
        "config_overrides": SIZES,
        "train_file": arguments.text,
        "block_size": arguments.block,
        "per_device_train_batch_size": arguments.batch,
        "max_steps": arguments.steps,
        "learning_rate": 2e-3,
        "warmup_steps": arguments.steps // 10,
        "seed": seed,
        "logging_steps": 1,
        "output_dir": folder,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    launcher = [] if side == "stock" else ["-m", "cputrain", "run"]
    return [sys.executable, *launcher, str(SCRIPT), *words, "--do_train", "--do_eval", "--use_cpu"]


def train(side: str, seed: int, folder: Path, arguments: argparse.Namespace) -> list[float]:
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(arguments.threads), "HF_DATASETS_CACHE": str(folder / "cache")}
    environment = os.environ | own | ({} if side == "stock" else {"CPUTRAIN_DTYPE": side})
    done = subprocess.run(
        command(side, seed, folder, arguments), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{side}, seed {seed}: {done.stderr[-2000:]}")
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    held_back = json.loads((folder / "eval_results.json").read_text())["eval_loss"]
    return [*(line["loss"] for line in history if "loss" in line), held_back]


def compare(curves: Curves, width: int) -> list[dict[str, str]]:
    """For each window: the mean of each side, how far it is from stock's, and how far stock's seeds are apart."""
    steps = len(curves["stock"][0]) - 1
    ends = [str(min(first + width, steps)) for first in range(0, steps, width)]
    smooth = {
        side: [[*windows(curve[:-1], width), curve[-1]] for curve in of_seeds] for side, of_seeds in curves.items()
    }
    rows = []
    for number, name in enumerate([*ends, "held-back text"]):
        values = {side: [curve[number] for curve in of_seeds] for side, of_seeds in smooth.items()}
        means = {side: statistics.mean(of_seeds) for side, of_seeds in values.items()}
        spread = max(values["stock"]) - min(values["stock"])
        row = {"up to step": name, **{side: f"{mean:.4f}" for side, mean in means.items()}}
        apart = {side: abs(means[side] - means["stock"]) for side in means if side != "stock"}
        row |= {f"{side} apart": f"{value:.4f}" for side, value in apart.items()} | {"spread of stock": f"{spread:.4f}"}
        rows.append(row | {"within": "yes" if max(apart.values()) <= spread else "**no**"})
    return rows


def report(rows: list[dict[str, str]], arguments: argparse.Namespace) -> str:
    inside = sum(row["within"] == "yes" for row in rows)
    settings = {"seeds": " ".join(map(str, arguments.seeds)), "text": arguments.text.name, "model": f"llama, {SIZES}"}
    settings |= {name: str(getattr(arguments, name)) for name in ("steps", "batch", "block", "threads")}
    return (
        "# Loss curves of a language model: stock and cputrain\n\n"
        f"    python benchmarks/language_model_curves.py {' '.join(sys.argv[1:])}\n\n"
        f"Mean loss of each {arguments.window} steps, mean over the seeds. *Apart*: from stock's mean; *spread*: the\n"
        f"largest less the smallest seed of stock. {inside} of {len(rows)} rows lie within the spread.\n\n"
        + f"{table(rows)}\n"
        + facts_table(description() | settings)
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT, help="a text file (default tinyshakespeare)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--block", type=int, default=64, help="tokens of a sequence (default 64)")
    parser.add_argument("--window", type=int, default=50, help="steps that are averaged (default 50)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report", action="store_true", help="also write the report into benchmarks/results")
    arguments = parser.parse_args()
    if len(arguments.seeds) < 2:
        parser.error("one seed has no spread; give at least two --seeds")
    if not arguments.text.is_file():
        parser.error(f"there is no text {arguments.text}; give --text FILE")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    curves: Curves = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            for side in SIDES:
                curves[side].append(train(side, seed, Path(folder) / f"{side}-{seed}", arguments))
                print(f"{side}, seed {seed}: held-back text {curves[side][-1][-1]:.4f}", file=sys.stderr, flush=True)
    text = report(compare(curves, arguments.window), arguments)
    print(text)
    if arguments.report:
        path = report_path("language_model_curves")
        path.write_text(text)
        print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
