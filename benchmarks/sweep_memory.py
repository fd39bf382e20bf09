"""Peak memory of the sweep's language models, stock against cputrain: none above stock's by more than 32 MB.

    python benchmarks/sweep_memory.py --report
    python benchmarks/sweep_memory.py --model bert gpt2 --steps 20 --dtype fp32

Masked and causal language models at hidden size 384 with a vocabulary of 30,000 train on batches of 8 texts whose
longest has 32 to 128 tokens, another length in every step. Each side is a process of its own; what counts is its most
resident memory, as the kernel counted it, above what it had before the model was made.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from interleaved import Answer, Side, environment, peak_memory_mb, serve, usable_cores
from machine import description, facts_table, report_path, table

sys.path.insert(0, str(Path(__file__).parent.parent))  # the sweep lies in tests/sweep

FLOOR_MB = 32.0


def train(ours: bool, model: str, kind: str, dtype: str, padding: str, steps: int, threads: int) -> Answer:
    """The peak in MB above the process before the model."""
    import torch

    import cputrain
    from tests.sweep import large

    torch.set_num_threads(threads)
    torch.rand(64, 64) @ torch.rand(64, 64)  # threads and their stacks come with the first product
    Path("/proc/self/clear_refs").write_text("5")  # from here on the kernel counts the peak anew
    before = peak_memory_mb()
    trained = large.language_model(model, kind)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
    if ours:
        cputrain.optimize(trained, optimizer, dtype=dtype, padding=padding)
    loss = torch.zeros(())
    for number in range(steps):
        loss = trained(**large.batch_of_varying_length(trained, number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"peak_mb": peak_memory_mb() - before, "loss": loss.item()}


def asked(name: str, case: tuple[str, str], dtype: str, arguments: argparse.Namespace) -> Answer:
    """A fresh process for one side."""
    settings = {
        "model": case[0], "kind": case[1], "dtype": dtype, "padding": arguments.padding, "steps": arguments.steps,
        "threads": arguments.threads,
    }  # fmt: skip
    side = Side(name, __file__, settings, environment("native", arguments.threads, ours=True))
    try:
        return side.ask("train")
    finally:
        side.close()


def compared(case: tuple[str, str], dtype: str, stock: Answer, arguments: argparse.Namespace) -> Answer:
    ours = asked("cputrain", case, dtype, arguments)
    print(f"{case[0]} {dtype}: {ours['peak_mb']:.0f} MB, stock {stock['peak_mb']:.0f} MB", file=sys.stderr)
    return {"model": case[0], "class": case[1], "dtype": dtype, "stock": stock["peak_mb"], "ours": ours["peak_mb"]}


def above(result: Answer) -> bool:
    return result["ours"] > result["stock"] + FLOOR_MB


def row(result: Answer) -> dict[str, str]:
    return {
        "model": result["model"],
        "class": result["class"],
        "dtype": result["dtype"],
        "stock MB": f"{result['stock']:.0f}",
        "ours MB": f"{result['ours']:.0f}",
        "ratio": f"{result['ours'] / result['stock']:.2f}",
        f"at most {FLOOR_MB:.0f} MB more": "**no**" if above(result) else "yes",
    }


def report(results: list[Answer], arguments: argparse.Namespace) -> str:
    settings = {"steps": str(arguments.steps), "padding": arguments.padding, "threads": str(arguments.threads)}
    return (
        "# Peak memory of the sweep's language models: stock PyTorch against cputrain\n\n"
        f"    python benchmarks/sweep_memory.py {' '.join(sys.argv[1:])}\n\n"
        "Hidden size 384, two layers, a vocabulary of 30,000, 8 texts of up to 32 – 128 tokens; forward, backward and\n"
        "AdamW; each side in a process of its own; above the process before the model.\n\n"
        + table([row(result) for result in results])
        + "\n"
        + facts_table(description() | settings)
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", nargs="+", help="model types from tests/sweep/sixty.py; all language models unless given"
    )
    parser.add_argument("--dtype", nargs="+", default=["fp32", "auto"])
    parser.add_argument("--padding", default="drop", choices=["drop", "keep"])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    parser.add_argument("--report", action="store_true", help="also write a dated report into benchmarks/results")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.side:
        settings = json.loads(arguments.settings)
        serve({"train": lambda: train(arguments.side == "cputrain", **settings)})
        return 0
    from tests.sweep import large

    results = []
    for case in large.language_models(arguments.model):
        stock = asked("stock", case, "fp32", arguments)
        results += [compared(case, dtype, stock, arguments) for dtype in arguments.dtype]
    text = report(results, arguments)
    print(json.dumps(results, indent=2) if arguments.json else text)
    if arguments.report:
        path = report_path("sweep_memory" if arguments.padding == "drop" else f"sweep_memory_{arguments.padding}")
        path.write_text(text)
        print(f"wrote {path}", file=sys.stderr)
    return 1 if any(map(above, results)) else 0


if __name__ == "__main__":
    sys.exit(main())
