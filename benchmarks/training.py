"""One training step of a BERT-type model, stock PyTorch against cputrain.

    python benchmarks/training.py --model minilm --lengths full squad --isa avx2 --report

Each side has a process of its own; their steps alternate, and the ratio is the median over neighbouring steps. A step
is forward, backward, `clip_grad_norm_`, AdamW and `zero_grad`, with dropout 0.1. `--baseline` puts another side in
stock's place: stock under autocast (stock-bf16), or cputrain in one precision. `--against stock` compares stock with
itself, which shows how far the method can be trusted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import bound
from interleaved import Answer, Side, environment, in_turns, median_ratio, peak_memory_mb, serve, usable_cores
from machine import description, facts_table, report_path, table

VOCABULARY = 30522
DROPOUT = 0.1
PADDED_LENGTH = 384
BOUND_BATCHES = 2  # whose parts are measured alone

# Percentiles 0, 1, ... 100 of the tokens per feature in SQuAD v1.1 train (78,161 unambiguous questions) under BERT's
# uncased WordPiece vocabulary at max_seq_length 384, doc_stride 128: mean 169, median 158, 95th percentile 290.
# fmt: off
SQUAD_PERCENTILES = (
    36, 55, 63, 71, 76, 82, 87, 93, 98, 102, 106, 108, 111, 113, 115, 116, 118, 119, 120, 122, 123, 124, 125, 127,
    128, 129, 130, 131, 132, 133, 134, 135, 137, 138, 139, 140, 141, 142, 143, 145, 146, 147, 148, 149, 150, 152,
    153, 154, 155, 156, 158, 159, 160, 161, 163, 164, 166, 167, 169, 170, 172, 173, 175, 176, 178, 180, 181, 183,
    185, 187, 188, 190, 192, 195, 197, 199, 202, 204, 207, 210, 212, 215, 219, 222, 225, 229, 233, 237, 242, 247,
    252, 258, 264, 271, 280, 290, 302, 317, 340, 382, 384,
)
# fmt: on


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    batch: int

    @property
    def intermediate(self) -> int:
        return 4 * self.hidden

    def step_flops(self, lengths: list[int]) -> float:
        """Multiplications and additions that real tokens need, forward and backward; heads and embeddings left out."""
        per_token = 2 * (4 * self.hidden**2 + 2 * self.hidden * self.intermediate)
        attention = 4 * self.hidden * sum(n * n for n in lengths)
        return 3 * self.layers * (per_token * sum(lengths) + attention)


SHAPES = {
    "minilm": Shape(layers=6, hidden=384, heads=12, batch=12),
    "base": Shape(layers=12, hidden=768, heads=12, batch=4),
    "large": Shape(layers=24, hidden=1024, heads=16, batch=2),
}

# What `--baseline` can be, as the report's title says it; its columns say "stock" whichever it is.
BASELINES = {
    "stock": "stock PyTorch",
    "stock-bf16": "stock PyTorch under autocast to bf16 (the columns called stock)",
    "fp32": "cputrain in fp32 (the columns called stock)",
    "bf16": "cputrain in bf16 (the columns called stock)",
    "int16": "cputrain in int16 (the columns called stock)",
}


@dataclass(frozen=True)
class Settings:
    """What both sides are told."""

    model: str
    lengths: str
    batch: int
    length: int
    threads: int
    dtype: str
    padding: str
    seed: int


def sample_lengths(kind: str, batch: int, seed: int, length: int = PADDED_LENGTH) -> list[int]:
    """Real tokens of each row: all of them, or drawn from SQuAD's distribution."""
    import torch

    if kind == "full":
        return [length] * batch
    place = torch.rand(batch, generator=torch.Generator().manual_seed(seed)) * (len(SQUAD_PERCENTILES) - 1)
    below, share = place.long(), place.frac()
    percentiles = torch.tensor(SQUAD_PERCENTILES, dtype=torch.float32)
    tokens = torch.lerp(percentiles[below], percentiles[below + 1], share).round().long()
    return tokens.clamp(max=length).tolist()


def is_ours(side: str) -> bool:
    return not side.startswith("stock")


class Training:
    """One side's model, optimizer and steps."""

    def __init__(self, settings: Settings, side: str) -> None:
        import torch
        from transformers import BertConfig, BertForQuestionAnswering

        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        self.settings, self.shape = settings, SHAPES[settings.model]
        self.cpu_at_last_end = 0.0
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.shape.hidden,
            num_hidden_layers=self.shape.layers,
            num_attention_heads=self.shape.heads,
            intermediate_size=self.shape.intermediate,
            hidden_dropout_prob=DROPOUT,
            attention_probs_dropout_prob=DROPOUT,
        )
        self.model = BertForQuestionAnswering(config).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-5)
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=side == "stock-bf16")
        if is_ours(side):
            import cputrain

            dtype = settings.dtype if side == "cputrain" else side
            cputrain.optimize(self.model, self.optimizer, dtype=dtype, padding=settings.padding)

    def batch(self, number: int) -> tuple[dict[str, Any], list[int]]:
        import torch

        settings, seed = self.settings, self.settings.seed * 1000 + number
        generator = torch.Generator().manual_seed(seed)
        lengths = sample_lengths(settings.lengths, settings.batch, seed, settings.length)
        mask = (torch.arange(settings.length) < torch.tensor(lengths)[:, None]).long()
        ids = torch.randint(1000, VOCABULARY, mask.shape, generator=generator) * mask
        answers = (torch.rand(2, len(lengths), generator=generator) * torch.tensor(lengths)).long().sort(0).values
        batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
        return batch | {"start_positions": answers[0], "end_positions": answers[1]}, lengths

    def step(self, number: int) -> Answer:
        import torch

        batch, lengths = self.batch(number)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        with self.autocast:
            loss = self.model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds, idle = time.perf_counter() - begin, begin_cpu - self.cpu_at_last_end
        self.cpu_at_last_end = time.process_time()
        return {
            "seconds": seconds,
            "cpu_seconds": self.cpu_at_last_end - begin_cpu,
            "cpu_seconds_while_waiting": idle,  # spinning threads, and making the batch
            "loss": loss.item(),
            "flops": self.shape.step_flops(lengths),
            "tokens": sum(lengths),
        }


def matmul_peak(size: int = 2048, tries: int = 4) -> Answer:
    """The most GFLOP/s that torch's own fp32 matrix product reaches with these threads and this instruction set."""
    import torch

    a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    best = float("inf")
    for _ in range(tries):
        begin = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - begin)
    return {"gflops": 2 * size**3 / best / 1e9}


def run_side(name: str, settings: Settings) -> None:
    training = Training(settings, name)
    serve(
        {
            "step": training.step,
            "memory": lambda: {"peak_mb": peak_memory_mb()},
            "peak": matmul_peak,
            "bound": lambda: bound.share_of_bound(training.step, range(BOUND_BATCHES)),
        }
    )


def compare(settings: Settings, arguments: argparse.Namespace) -> Answer:
    """All that one row of the report says."""
    steps, memories, peaks, parts = [], [], [], {}
    for start in range(arguments.starts):
        names = [arguments.baseline, arguments.against][:: -1 if start % 2 else 1]
        sides = [
            Side(name, __file__, asdict(settings), environment(arguments.isa, settings.threads, ours=is_ours(name)))
            for name in names
        ][:: -1 if start % 2 else 1]
        try:
            for number, pair in enumerate(in_turns(sides, arguments.warmup + arguments.steps)):
                show_progress(settings, number, arguments.warmup + arguments.steps, pair)
                steps += [pair] if number >= arguments.warmup else []
            # Memory first: the matrix product below would add its own.
            memories.append([side.ask("memory")["peak_mb"] for side in sides])
            peaks += [sides[0].ask("peak")["gflops"] for _ in range(3)]
            if is_ours(arguments.against):
                parts = sides[1].ask("bound")
        finally:
            for side in sides:
                side.close()
    return summary(settings, steps, [max(of_side) for of_side in zip(*memories, strict=True)], max(peaks)) | parts


def summary(settings: Settings, pairs: list[list[Answer]], memory: list[float], peak: float) -> Answer:
    stock, ours = zip(*pairs, strict=True)
    seconds = [[answer["seconds"] for answer in side] for side in (stock, ours)]
    cpu = [[answer["cpu_seconds"] for answer in side] for side in (stock, ours)]
    speeds = [statistics.median(a["flops"] / a["seconds"] / 1e9 for a in side) for side in (stock, ours)]
    ratios = [a / b for a, b in zip(*seconds, strict=True)]
    return asdict(settings) | {
        "steps": len(pairs),
        "mean_real_tokens": statistics.mean(a["tokens"] for a in stock) / settings.batch,
        "stock_seconds": statistics.median(seconds[0]),
        "ours_seconds": statistics.median(seconds[1]),
        "ratio": median_ratio(*seconds),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else [ratios[0]] * 2,
        "ratio_of_cpu_time": median_ratio(*cpu),
        "stock_peak_mb": memory[0],
        "ours_peak_mb": memory[1],
        "memory_ratio": memory[1] / memory[0],
        "matmul_gflops": peak,
        "stock_share_of_peak": speeds[0] / peak,
        "ours_share_of_peak": speeds[1] / peak,
        "ms_of_cpu_while_waiting": [
            1e3 * statistics.median(a["cpu_seconds_while_waiting"] for a in s) for s in (stock, ours)
        ],
        "first_losses": [stock[0]["loss"], ours[0]["loss"]],
    }


def show_progress(settings: Settings, number: int, total: int, pair: list[Answer]) -> None:
    times = " | ".join(f"{answer['seconds']:.2f} s" for answer in pair)
    print(f"{settings.model} {settings.lengths} {number + 1}/{total}: {times}", file=sys.stderr)


def row(result: Answer) -> dict[str, str]:
    low, high = result["ratio_quartiles"]
    return {
        "model": result["model"],
        "batch": f"{result['batch']} x {result['length']}",
        "lengths (mean)": f"{result['lengths']} ({result['mean_real_tokens']:.0f})",
        "steps": str(result["steps"]),
        "stock s": f"{result['stock_seconds']:.2f}",
        "ours s": f"{result['ours_seconds']:.2f}",
        "ratio (quartiles)": f"**{result['ratio']:.2f}** ({low:.2f} - {high:.2f})",
        "ratio of CPU time": f"{result['ratio_of_cpu_time']:.2f}",
        "stock MB": f"{result['stock_peak_mb']:.0f}",
        "ours MB": f"{result['ours_peak_mb']:.0f}",
        "memory": f"{result['memory_ratio']:.2f}",
        "share of peak, stock / ours": f"{result['stock_share_of_peak']:.0%} / {result['ours_share_of_peak']:.0%}",
        "share of the bound": f"{result['share_of_bound']:.2f}" if "share_of_bound" in result else "",
        "products": f"{result['products_share']:.2f}" if "products_share" in result else "",
    }


def parts_table(results: list[Answer]) -> str:
    """Where our step's time goes, beside what each part takes alone."""
    groups = list(dict.fromkeys(name for result in results for name in result.get("parts", {})))
    rows = [
        {"ms in the step / alone": name}
        | {
            f"{result['model']} {result['lengths']}": " / ".join(f"{ms:.1f}" for ms in result["parts"].get(name, []))
            for result in results
        }
        for name in groups
    ]
    return f"{bound.__doc__}\n{table(rows)}\n" if rows else ""


def report(results: list[Answer], arguments: argparse.Namespace) -> str:
    command = "python benchmarks/training.py " + " ".join(sys.argv[1:])
    peaks = ", ".join(f"{result['matmul_gflops']:.0f}" for result in results)
    waiting = ", ".join(f"{ms:.0f}" for result in results for ms in result["ms_of_cpu_while_waiting"])
    settings = {
        f"{arguments.baseline} environment": str(
            environment(arguments.isa, arguments.threads, ours=is_ours(arguments.baseline))
        ),
        f"{arguments.against} environment": str(environment(arguments.isa, arguments.threads, ours=True)),
        "dtype / padding of optimize": f"{arguments.dtype} / {arguments.padding}",
        "dropout, vocabulary, seed": f"{DROPOUT}, {VOCABULARY}, {arguments.seed}",
        "warm-up steps left out": f"{arguments.warmup}, after each of {arguments.starts} starts of both processes",
        "CPU time of a waiting side": f"{waiting} ms per turn: the next batch, and threads that spin",
        "arithmetic peak, GFLOP/s": f"{peaks} (best fp32 product of two 2048 x 2048 matrices by torch in the same run)",
    }
    return (
        f"# A training step: {BASELINES[arguments.baseline]} against {arguments.against}\n\n    {command}\n\n"
        "Two processes, steps in turns; the ratio is the median over neighbouring steps. The share of the peak counts\n"
        "the arithmetic of real tokens only. On a busy machine the ratio of CPU time is the steadier one.\n\n"
        + table([row(result) for result in results])
        + "\n"
        + parts_table(results)
        + facts_table(description() | settings)
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["minilm"], choices=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", default=["full"], choices=["full", "squad"])
    parser.add_argument("--baseline", default="stock", choices=list(BASELINES), help="what it is compared with")
    parser.add_argument("--against", default="cputrain", choices=["cputrain", "stock"])
    parser.add_argument("--batch", type=int, help="rows of a batch (minilm 12, base 4, large 2)")
    parser.add_argument("--length", type=int, default=PADDED_LENGTH, help="tokens of a row, padding included")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument(
        "--starts",
        type=int,
        default=1,
        help="start both processes so many times, each first in turn: fp32 against itself is off by up to 1%% in one",
    )
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--isa", default="native", choices=["native", "avx2"])
    parser.add_argument("--dtype", default="fp32", help="dtype that optimize is given; stock is fp32")
    parser.add_argument("--padding", default="drop", choices=["drop", "keep"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    parser.add_argument("--report", action="store_true", help="also write a dated report into benchmarks/results")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.side:
        return run_side(arguments.side, Settings(**json.loads(arguments.settings)))
    results = []
    for model in arguments.model:
        for lengths in arguments.lengths:
            batch = arguments.batch or SHAPES[model].batch
            shared = (arguments.length, arguments.threads, arguments.dtype, arguments.padding, arguments.seed)
            results.append(compare(Settings(model, lengths, batch, *shared), arguments))
    text = report(results, arguments)
    print(json.dumps(results, indent=2) if arguments.json else text)
    if arguments.report:
        special = [name for name in (arguments.isa, arguments.dtype) if name not in ("native", "auto", "fp32")]
        special += [f"over_{arguments.baseline}"] if arguments.baseline != "stock" else []
        path = report_path("_".join(["training", *special]))
        path.write_text(text)
        print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
