"""The sixty models that `make test` sweeps, at hidden size 384 and 4 × 128 tokens: none slower than stock.

    python benchmarks/sweep_speed.py --report
    python benchmarks/sweep_speed.py --model gpt2 vit --dtype fp32 --steps 15

Three processes take turns: stock, a second stock as the control, and cputrain. A step is forward, backward and AdamW;
its cost is the CPU time of the whole process, all threads of it. The floor for the median ratio of neighbouring steps
is 0.97. A miss is measured three times more, and counts if all of them miss and the control never does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from interleaved import Answer, Side, environment, in_turns, median_ratio, serve, usable_cores
from machine import description, facts_table, report_path, table

sys.path.insert(0, str(Path(__file__).parent.parent))  # the sweep lies in tests/sweep

FLOOR = 0.97
REPETITIONS = 3
SIDES = ("stock", "control", "cputrain")


class SweepTraining:
    """One side: builds the model that it is asked for, and trains it step by step."""

    def __init__(self, *, ours: bool, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.ours = ours
        self.model: Any = None

    def build(self, model: str, kind: str, dtype: str) -> Answer:
        import torch

        from tests.sweep import large

        self.model, self.arguments = large.model_and_inputs(model, kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        if self.ours:
            import cputrain

            cputrain.optimize(self.model, self.optimizer, dtype=dtype)
        return {"parameters": sum(p.numel() for p in self.model.parameters())}

    def step(self, number: int) -> Answer:
        from tests.sweep import large

        begin, begin_cpu = time.perf_counter(), time.process_time()
        loss = large.mean_square(self.model(**self.arguments))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "seconds": time.perf_counter() - begin,
            "cpu_seconds": time.process_time() - begin_cpu,
            "loss": loss.item(),
        }


def measured(case: tuple[str, str], dtype: str, sides: list[Side], steps: int, warmup: int) -> Answer:
    """One comparison, with its control."""
    for side in sides:
        side.ask("build", model=case[0], kind=case[1], dtype=dtype)
    pairs = list(in_turns(sides, warmup + steps))[warmup:]
    stock, control, ours = ([answer["cpu_seconds"] for answer in side] for side in zip(*pairs, strict=True))
    return {
        "stock_ms": 1e3 * sum(stock) / len(stock),
        "ratio": median_ratio(stock, ours),
        "control": median_ratio(stock, control),
        "losses": [answer["loss"] for answer in pairs[0]],
    }


def misses(repeated: list[Answer]) -> bool:
    """Whether a model is slower than stock: every repetition says so, and none of the controls."""
    return bool(repeated) and all(again["ratio"] < FLOOR <= again["control"] for again in repeated)


def judged(case: tuple[str, str], dtype: str, sides: list[Side], arguments: argparse.Namespace) -> Answer:
    first = measured(case, dtype, sides, arguments.steps, arguments.warmup)
    repeated = []
    if first["ratio"] < FLOOR:
        repeated = [measured(case, dtype, sides, arguments.steps, arguments.warmup) for _ in range(REPETITIONS)]
    print(f"{case[0]} {dtype}: {first['ratio']:.2f}, control {first['control']:.2f}", file=sys.stderr)
    return {
        "model": case[0],
        "class": case[1],
        "dtype": dtype,
        "repeated": repeated,
        "misses": misses(repeated),
    } | first


def row(result: Answer) -> dict[str, str]:
    again = ", ".join(f"{one['ratio']:.2f} ({one['control']:.2f})" for one in result["repeated"])
    return {
        "model": result["model"],
        "class": result["class"],
        "dtype": result["dtype"],
        "stock ms of CPU": f"{result['stock_ms']:.0f}",
        "ratio": f"{result['ratio']:.2f}",
        "control": f"{result['control']:.2f}",
        "repeated (control)": again or "–",
        f"at least {FLOOR}": "**no**" if result["misses"] else "yes",
    }


def report(results: list[Answer], arguments: argparse.Namespace) -> str:
    settings = {
        "environment": str(environment(arguments.isa, arguments.threads, ours=True)),
        "steps, warm-up steps left out": f"{arguments.steps}, {arguments.warmup}",
    }
    return (
        f"# The sixty models of the sweep: stock PyTorch against cputrain\n\n"
        f"    python benchmarks/sweep_speed.py {' '.join(sys.argv[1:])}\n\n"
        "Hidden size 384, two layers, 4 × 128 tokens, no padding, with dropout; forward, backward and AdamW; three\n"
        "processes, steps in turns; medians of the ratios of CPU time of neighbouring steps.\n\n"
        + table([row(result) for result in results])
        + "\n"
        + facts_table(description() | settings)
    )


def run_side(name: str, settings: Answer) -> None:
    training = SweepTraining(ours=name == "cputrain", **settings)
    serve({"build": training.build, "step": training.step})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", help="model types from tests/sweep/sixty.py; all of them unless given")
    parser.add_argument("--dtype", nargs="+", default=["fp32", "auto"])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--isa", default="native", choices=["native", "avx2"])
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    parser.add_argument("--report", action="store_true", help="also write a dated report into benchmarks/results")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.side:
        run_side(arguments.side, json.loads(arguments.settings))
        return 0
    from tests.sweep import large

    cases = large.chosen(arguments.model)
    sides = [
        Side(name, __file__, {"threads": arguments.threads}, environment(arguments.isa, arguments.threads, ours=True))
        for name in SIDES
    ]
    try:
        results = [judged(case, dtype, sides, arguments) for case in cases for dtype in arguments.dtype]
    finally:
        for side in sides:
            side.close()
    text = report(results, arguments)
    print(json.dumps(results, indent=2) if arguments.json else text)
    if arguments.report:
        path = report_path("sweep_speed" if arguments.isa == "native" else f"sweep_speed_{arguments.isa}")
        path.write_text(text)
        print(f"wrote {path}", file=sys.stderr)
    return 1 if any(result["misses"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
