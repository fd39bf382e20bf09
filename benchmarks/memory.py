"""Peak memory, page faults and CPU time of training language models on batches of varying size: never more than stock.

    python benchmarks/memory.py --report
    python benchmarks/memory.py --model bert --dtype fp32 --padding keep --steps 30

Each side has a process of its own for each setting, and their steps (forward, backward, AdamW) alternate. Batches are
like those of real text: 4 to 8 sequences, padded to the longest, which has 64 to 256 tokens. Peak memory is the
process's VmHWM minus what it was before the model was built. The floor is stock's + 32 MB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import statistics
import sys
import time
from typing import Any

from interleaved import Answer, Side, environment, in_turns, median_ratio, peak_memory_mb, serve, usable_cores
from machine import description, facts_table, report_path, table

ALLOWANCE_MB = 32

SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    # All MiniLM's; a masked language model.
    "bert": (
        "BertForMaskedLM",
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    ),
    # SmolLM-135M.
    "llama": (
        "LlamaForCausalLM",
        {
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        },
    ),
    # Gemma 3 270M.
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "hidden_size": 640,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "intermediate_size": 2048,
            "vocab_size": 262144,
            "sliding_window": 512,
        },
    ),
    "gpt2": ("GPT2LMHeadModel", {}),
}


def build(name: str) -> Any:
    import transformers

    class_name, sizes = SIZES[name]
    model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class(**sizes, use_cache=False))


def batch(number: int, vocabulary: int) -> dict[str, Any]:
    """The same for the same number: sequences of random lengths, padded on the right to the longest."""
    import torch

    chance = random.Random(number)
    longest = chance.randint(64, 256)
    lengths = [longest] + [chance.randint(longest // 4, longest) for _ in range(chance.randint(3, 7))]
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    ids = torch.randint(10, vocabulary, mask.shape, generator=torch.Generator().manual_seed(number))
    ids = ids.where(mask, 0)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}


class Training:
    """One side: builds the model, and trains it step by step."""

    def __init__(self, *, ours: bool, model: str, threads: int, dtype: str, padding: str) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        getattr(transformers, SIZES[model][0])  # transformers imports its models when they are asked for
        if ours:
            import cputrain
        self.before = peak_memory_mb()
        self.model = build(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        if ours:
            cputrain.optimize(self.model, self.optimizer, dtype=dtype, padding=padding)  # type: ignore[arg-type]

    def step(self, number: int) -> Answer:
        inputs = batch(number, self.model.config.vocab_size)
        begin, faults = time.process_time(), _faults()
        loss = self.model(**inputs).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "cpu_seconds": time.process_time() - begin,
            "faults": _faults() - faults,
            "peak_mb": peak_memory_mb() - self.before,
            "loss": loss.item(),
        }


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def compare(model: str, dtype: str, padding: str, arguments: argparse.Namespace) -> Answer:
    settings = {"model": model, "threads": arguments.threads, "dtype": dtype, "padding": padding}
    sides = [
        Side(name, __file__, settings, environment(arguments.isa, arguments.threads, ours=name == "cputrain"))
        for name in ("stock", "cputrain")
    ]
    try:
        pairs = list(in_turns(sides, arguments.warmup + arguments.steps))
    finally:
        for side in sides:
            side.close()
    result = {"model": model, "dtype": dtype, "padding": padding} | figures(pairs, arguments.warmup)
    print(f"{model} {dtype} {padding}: {result['peak_mb']} MB", file=sys.stderr)
    return result


def figures(pairs: list[list[Answer]], warmup: int) -> Answer:
    """Peaks are those of the whole run; faults and CPU time are medians behind the warm-up."""
    sides = list(zip(*pairs[warmup:], strict=True))
    seconds = [[answer["cpu_seconds"] for answer in side] for side in sides]
    return {
        "peak_mb": [round(answer["peak_mb"]) for answer in pairs[-1]],
        "faults": [round(statistics.median(answer["faults"] for answer in side)) for side in sides],
        "cpu_seconds": [round(statistics.median(side), 3) for side in seconds],
        "ratio_of_cpu_time": median_ratio(*seconds),
        "last_losses": [answer["loss"] for answer in pairs[-1]],
    }


def row(result: Answer) -> dict[str, str]:
    stock, ours = result["peak_mb"]
    told = {key: result[key] for key in ("model", "dtype", "padding")}
    return told | {
        "stock MB": f"{stock}",
        "ours MB": f"{ours}",
        f"at most stock + {ALLOWANCE_MB}": "yes" if ours <= stock + ALLOWANCE_MB else "**no**",
        "page faults of a step": "{:,} → {:,}".format(*result["faults"]),
        "CPU s of a step": "{:.2f} → {:.2f}".format(*result["cpu_seconds"]),
        "times less CPU time": f"{result['ratio_of_cpu_time']:.2f}",
    }


def report(results: list[Answer], arguments: argparse.Namespace) -> str:
    settings = {
        "environment": str(environment(arguments.isa, arguments.threads, ours=True)),
        "steps, warm-up steps left out": f"{arguments.steps}, {arguments.warmup}",
    }
    return (
        "# Peak memory of language models: stock PyTorch against cputrain\n\n"
        f"    python benchmarks/memory.py {' '.join(sys.argv[1:])}\n\n"
        "Forward, backward and AdamW on 4 – 8 sequences padded to 64 – 256 tokens, others in each step; two\n"
        "processes, steps in turns. Peak memory of the whole run, above the process before the model; faults and\n"
        "CPU time are medians of the steps.\n\n"
        + table([row(result) for result in results])
        + "\n"
        + facts_table(description() | settings)
    )


def run_side(name: str, settings: Answer) -> None:
    serve({"step": Training(ours=name == "cputrain", **settings).step})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--dtype", nargs="+", default=["fp32", "int16"])
    parser.add_argument("--padding", nargs="+", choices=["drop", "keep"], default=["drop", "keep"])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--isa", default="native", choices=["native", "avx2"])
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    parser.add_argument("--report", action="store_true", help="also write a dated report into benchmarks/results")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.side:
        return run_side(arguments.side, json.loads(arguments.settings))
    settings = itertools.product(arguments.model, arguments.dtype, arguments.padding)
    results = [compare(*setting, arguments) for setting in settings]
    text = report(results, arguments)
    print(json.dumps(results, indent=2) if arguments.json else text)
    if arguments.report:
        path = report_path("memory" if arguments.isa == "native" else f"memory_{arguments.isa}")
        path.write_text(text)
        print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
