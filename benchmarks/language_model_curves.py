"""Does a language model learn with cputrain as with stock? A small Llama on real text, several seeds.

    python benchmarks/language_model_curves.py --report
    python benchmarks/language_model_curves.py --train lora --steps 200 --block 128 --report

Each training is examples/language_modeling/run_clm.py from scratch, by `python` and by `cputrain run` in each
precision. There is no dropout, so that the sides of one seed see the same batches and weights. `--train lora` is
run_sft.py with LoRA (dropout 0.05) and QLoRA: a model that run_clm.py has trained on half of the text learns to answer
as in the other half. In every window of steps the mean over the seeds must be no farther from stock's (in 4 bits from
stock's in 4 bits) than stock's seeds are from each other. Nothing is timed.
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
# In 4 bits stock's evaluation needs rows of whole blocks of 64.
SIZES = "hidden_size=128,intermediate_size=384,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2"
SFT = SCRIPT.with_name("run_sft.py")
# Each side: the side that it is compared with, the precision of cputrain, options of run_sft.py.
SIDES: dict[str, dict[str, tuple[str, str, list[str]]]] = {
    "full": {side: ("stock", side, []) for side in ("stock", "fp32", "int16")},
    "lora": {
        "stock": ("stock", "stock", []),
        "cputrain": ("stock", "auto", []),
        "NF4 stock": ("NF4 stock", "stock", ["--qlora"]),
        "NF4 cputrain": ("NF4 stock", "auto", ["--qlora"]),
    },
}
LOGGED = {"full": 1, "lora": 5}  # steps of a line of the log
TEMPLATE = "{% for message in messages %}{{ message.content + '\n\n' }}{% endfor %}"
Curves = dict[str, list[list[float]]]  # for each side, for each seed, the loss of each step; last, of held-back text


def from_scratch(text: Path, steps: int, seed: int, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """What run_clm.py is called with."""
    options = {
        "model_type": "llama",
        "config_overrides": SIZES,
        "train_file": text,
        "block_size": arguments.block,
        "per_device_train_batch_size": arguments.batch,
        "max_steps": steps,
        "learning_rate": 2e-3,
        "warmup_steps": steps // 10,
        "seed": seed,
        "logging_steps": 1,
        "output_dir": folder,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return [str(SCRIPT), *words(options), "--do_train", "--do_eval", "--use_cpu"]


def with_adapters(base: Path, seed: int, folder: Path, arguments: argparse.Namespace) -> list[str]:
    """What run_sft.py is called with. Trainer trains: TRL would round the adapters of 4-bit layers to bf16."""
    options = {
        "model": base / "model",
        "train_file": base / "train.jsonl",
        "eval_file": base / "held_back.jsonl",
        "output_dir": folder,
        "batch_size": arguments.batch,
        "max_length": arguments.block,
        "max_steps": arguments.steps,
        "learning_rate": 1e-3,
        "seed": seed,
    }
    return [str(SFT), *words(options), "--no_trl", "--no_merge"]


def words(options: dict[str, object]) -> list[str]:
    return [str(word) for name, value in options.items() for word in (f"--{name}", value)]


def run(script: list[str], dtype: str, folder: Path, arguments: argparse.Namespace) -> None:
    """By python if dtype is stock, else by `cputrain run`."""
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(arguments.threads), "HF_DATASETS_CACHE": str(folder / "cache")}
    environment = os.environ | own | ({} if dtype == "stock" else {"CPUTRAIN_DTYPE": dtype})
    launcher = [] if dtype == "stock" else ["-m", "cputrain", "run"]
    command = [sys.executable, *launcher, *script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{folder.name}: {done.stderr[-2000:]}")


def train(side: str, seed: int, base: Path, arguments: argparse.Namespace) -> list[float]:
    _, dtype, options = SIDES[arguments.train][side]
    folder = base / f"{side}-{seed}".replace(" ", "-")
    if arguments.train == "full":
        script = from_scratch(arguments.text, arguments.steps, seed, folder, arguments)
    else:
        script = [*with_adapters(base, seed, folder, arguments), *options]
    run(script, dtype, folder, arguments)
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    if arguments.train == "full":
        history.append(json.loads((folder / "eval_results.json").read_text()))
    steps = [line["loss"] for line in history if "loss" in line for _ in range(LOGGED[arguments.train])]
    return [*steps, *[line["eval_loss"] for line in history if "eval_loss" in line][-1:]]


def prepare(base: Path, arguments: argparse.Namespace) -> None:
    """A model trained on half of the text, and the other half as conversations of two speeches."""
    text = arguments.text.read_text()
    (base / "first.txt").write_text(text[: len(text) // 2])
    run(from_scratch(base / "first.txt", 300, 0, base / "model", arguments), "stock", base / "model", arguments)
    (base / "model" / "chat_template.jinja").write_text(TEMPLATE)
    speeches = text[len(text) // 2 :].split("\n\n")[1:]
    chats = [
        json.dumps({"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]})
        for said, answer in zip(speeches[::2], speeches[1::2], strict=False)
    ]
    for name, part in (("train", chats[:-100]), ("held_back", chats[-100:])):
        (base / f"{name}.jsonl").write_text("\n".join(part))


def compare(curves: Curves, width: int, references: dict[str, str]) -> list[dict[str, str]]:
    """For each window: the mean of each side, how far it is from its reference's, and how far those seeds are apart."""
    steps = len(next(iter(curves.values()))[0]) - 1
    ends = [str(min(first + width, steps)) for first in range(0, steps, width)]
    smooth = {
        side: [[*windows(curve[:-1], width), curve[-1]] for curve in of_seeds] for side, of_seeds in curves.items()
    }
    rows = []
    for number, name in enumerate([*ends, "held-back text"]):
        values = {side: [curve[number] for curve in of_seeds] for side, of_seeds in smooth.items()}
        means = {side: statistics.mean(of_seeds) for side, of_seeds in values.items()}
        spreads = {side: max(values[side]) - min(values[side]) for side in set(references.values())}
        apart = {side: abs(means[side] - means[of]) for side, of in references.items() if side != of}
        row = {"up to step": name, **{side: f"{mean:.4f}" for side, mean in means.items()}}
        row |= {f"{side} apart": f"{value:.4f}" for side, value in apart.items()}
        row |= {f"spread of {side}": f"{spread:.4f}" for side, spread in sorted(spreads.items(), reverse=True)}
        is_within = all(value <= spreads[references[side]] for side, value in apart.items())
        rows.append(row | {"within": "yes" if is_within else "**no**"})
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
    parser.add_argument("--train", choices=SIDES, default="full", help="lora: LoRA and QLoRA by run_sft.py")
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
    sides = SIDES[arguments.train]
    curves: Curves = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.train == "lora":
            prepare(Path(folder), arguments)
        for seed in arguments.seeds:
            for side in sides:
                curves[side].append(train(side, seed, Path(folder), arguments))
                print(f"{side}, seed {seed}: held-back text {curves[side][-1][-1]:.4f}", file=sys.stderr, flush=True)
    references = {side: of for side, (of, _, _) in sides.items()}
    text = report(compare(curves, arguments.window, references), arguments)
    print(text)
    if arguments.report:
        path = report_path("_".join(["language_model_curves", *(["lora"] if arguments.train == "lora" else [])]))
        path.write_text(text)
        print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
