"""Every model that cputrain promises to train, at hidden size 384, two layers, 8 x 128 tokens: never slower than stock.

    python benchmarks/models_speed.py --report
    python benchmarks/models_speed.py --model gpt2 vit --steps 20
    python benchmarks/models_speed.py --padding squad --model bert gpt2

Each side has a process of its own, and their steps (forward, backward, AdamW) alternate. The floor for the median
ratio is 0.97, whether or not cputrain recognises anything in the model. With `--padding squad` 44% of the tokens are
real, in the models that read text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from interleaved import Answer, Side, environment, in_turns, median_ratio, serve, usable_cores
from machine import description, facts_table, report_path, table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the zoo is shared with the parity tests

FLOOR = 0.97


class ZooTraining:
    """One side: builds the model that it is asked for, and trains it step by step."""

    def __init__(self, *, ours: bool, threads: int, dtype: str, padding: str) -> None:
        import torch

        torch.set_num_threads(threads)
        self.ours, self.dtype, self.padding = ours, dtype, padding
        self.model: Any = None

    def build(self, name: str) -> Answer:
        import model_zoo
        import torch

        torch.manual_seed(0)
        self.model, self.batch = model_zoo.speed(name, padding=self.padding)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        if self.ours:
            import cputrain

            cputrain.optimize(self.model, self.optimizer, dtype=self.dtype)
        return {}

    def step(self, number: int) -> Answer:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        loss = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "seconds": time.perf_counter() - begin,
            "cpu_seconds": time.process_time() - begin_cpu,
            "loss": loss.item(),
        }


def compare(name: str, sides: list[Side], steps: int, warmup: int) -> Answer:
    for side in sides:
        side.ask("build", name=name)
    pairs = list(in_turns(sides, warmup + steps))[warmup:]
    stock, ours = zip(*pairs, strict=True)
    result = {
        "model": name,
        "stock_ms": 1e3 * statistics.median(a["seconds"] for a in stock),
        "ours_ms": 1e3 * statistics.median(a["seconds"] for a in ours),
        "ratio": median_ratio([a["seconds"] for a in stock], [a["seconds"] for a in ours]),
        "ratio_of_cpu_time": median_ratio([a["cpu_seconds"] for a in stock], [a["cpu_seconds"] for a in ours]),
        "first_losses": [stock[0]["loss"], ours[0]["loss"]],
    }
    print(f"{name}: {result['ratio']:.2f}", file=sys.stderr)
    return result


def row(result: Answer) -> dict[str, str]:
    return {
        "model": result["model"],
        "stock ms": f"{result['stock_ms']:.0f}",
        "ours ms": f"{result['ours_ms']:.0f}",
        "ratio": f"{result['ratio']:.2f}",
        "ratio of CPU time": f"{result['ratio_of_cpu_time']:.2f}",
        f"at least {FLOOR}": "yes" if result["ratio"] >= FLOOR else "**no**",
    }


def report(results: list[Answer], arguments: argparse.Namespace) -> str:
    settings = {
        "environment": str(environment(arguments.isa, arguments.threads, ours=True)),
        "steps, warm-up steps left out": f"{arguments.steps}, {arguments.warmup}",
        "dtype": arguments.dtype,
        "padding": arguments.padding,
        "dropout": "0.1",
    }
    return (
        f"# Every model of the list: stock PyTorch against {arguments.against}\n\n"
        f"    python benchmarks/models_speed.py {' '.join(sys.argv[1:])}\n\n"
        "Hidden size 384, two layers, 8 x 128 tokens; forward, backward and AdamW; two processes, steps in turns,\n"
        "median ratio of neighbouring steps.\n\n"
        + table([row(result) for result in results])
        + "\n"
        + facts_table(description() | settings)
    )


def run_side(name: str, settings: Answer) -> None:
    training = ZooTraining(ours=name == "cputrain", **settings)
    serve({"build": training.build, "step": training.step})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", help="names from tests/model_zoo.py; all of them unless given")
    parser.add_argument("--against", default="cputrain", choices=["cputrain", "stock"])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--isa", default="native", choices=["native", "avx2"])
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--padding", default="none", choices=["none", "squad"])
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    parser.add_argument("--report", action="store_true", help="also write a dated report into benchmarks/results")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.side:
        return run_side(arguments.side, json.loads(arguments.settings))
    import model_zoo

    settings = {"threads": arguments.threads, "dtype": arguments.dtype, "padding": arguments.padding}
    sides = [
        Side(name, __file__, settings, environment(arguments.isa, arguments.threads, ours=name == "cputrain"))
        for name in ("stock", arguments.against)
    ]
    try:
        names = arguments.model or model_zoo.NAMES
        results = [compare(name, sides, arguments.steps, arguments.warmup) for name in names]
    finally:
        for side in sides:
            side.close()
    text = report(results, arguments)
    print(json.dumps(results, indent=2) if arguments.json else text)
    if arguments.report:
        usual = ("native", "fp32", "none")
        told = [x for x in (arguments.isa, arguments.dtype, arguments.padding) if x not in usual]
        path = report_path("_".join(("models_speed", *told)))
        path.write_text(text)
        print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
