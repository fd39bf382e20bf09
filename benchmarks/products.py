"""The three products of a linear layer in int16 block precision against torch's fp32 (MKL), at the models' shapes.

    python benchmarks/products.py                    # with this CPU's best instructions
    python benchmarks/products.py --isa avx2         # both sides limited to AVX2
    python benchmarks/products.py --isa avx_vnni     # the same, but ours with AVX_VNNI
    python benchmarks/products.py --threads 1 --json

Both run in turns; with one thread by its CPU time, so that other processes don't count. Quantising and packing of both
operands is inside our time. `best` is the ratio of the shortest times, which a busy machine disturbs least; `ratio` is
the median over the turns. The errors are relative to a float64 product, of normally distributed values whose rows
differ in magnitude.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import small_cases

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

# tokens (full batch, SQuAD lengths), then (in-features, out-features): projection, joined q k v, feed-forward up, down.
SHAPES = {
    "minilm": ((4608, 2040), ((384, 384), (384, 1152), (384, 1536), (1536, 384))),
    "base": ((1536, 680), ((768, 768), (768, 2304), (768, 3072), (3072, 768))),
}


@dataclass
class Case:
    name: str
    ours: Callable[[], object]
    torch: Callable[[], object]
    operations: float
    errors: Callable[[], tuple[float, float, float]]  # int16, bf16, fp32


def _case(name: str, ours, a, b) -> Case:
    """Against a · b in torch, into memory that is there already, as ours has."""
    import torch

    out = torch.empty(a.shape[0], b.shape[1])

    def errors() -> tuple[float, float, float]:
        exact = a.double() @ b.double()
        results = (ours(), a.bfloat16().float() @ b.bfloat16().float(), torch.mm(a, b))
        int16, bf16, fp32 = (((r.double() - exact).norm() / exact.norm()).item() for r in results)
        return int16, bf16, fp32

    return Case(name, ours, lambda: torch.mm(a, b, out=out), 2.0 * a.shape[0] * a.shape[1] * b.shape[1], errors)


def cases(model: str) -> Iterator[Case]:
    import torch

    from cputrain import memory
    from cputrain.formats.int16_matmul import linear_forward, linear_input_grad, linear_weight_grad

    memory.keep_freed_memory()  # as `optimize` does: what is packed goes where the last call's was
    token_counts, layers = SHAPES[model]
    for tokens in token_counts:
        for inputs, outputs in layers:
            x = torch.randn(tokens, inputs) * torch.rand(tokens, 1).exp()
            dy = torch.randn(tokens, outputs) * torch.randn(tokens, 1).exp() * 1e-4
            w = torch.randn(outputs, inputs) * 0.03
            name = f"{model} {tokens} tokens {inputs}→{outputs}"
            yield _case(f"{name} forward", lambda x=x, w=w: linear_forward(x, w), x, w.t())
            yield _case(f"{name} input gradient", lambda dy=dy, w=w: linear_input_grad(dy, w), dy, w)
            yield _case(f"{name} weight gradient", lambda dy=dy, x=x: linear_weight_grad(dy, x), dy.t(), x)


def seconds(function: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    function()
    return clock() - start


def measure(case: Case, budget: float, threads: int) -> dict[str, float | str]:
    clock = time.thread_time if threads == 1 else time.perf_counter
    case.ours(), case.torch()
    turns: list[tuple[float, float]] = []
    end = time.perf_counter() + budget
    while len(turns) < 7 or time.perf_counter() < end:
        turns.append((seconds(case.ours, clock), seconds(case.torch, clock)))
    ours, theirs = (min(times) for times in zip(*turns, strict=True))
    int16, bf16, fp32 = case.errors()
    return {
        "product": case.name,
        "ratio": statistics.median(t / o for o, t in turns),
        "best": theirs / ours,
        "ours_gflops": case.operations / ours / 1e9,
        "torch_gflops": case.operations / theirs / 1e9,
        "error_int16": int16,
        "error_bf16": bf16,
        "error_fp32": fp32,
    }


def printed(result: dict) -> dict[str, str]:
    return {
        "product": result["product"],
        "ratio": f"{result['ratio']:.2f}",
        "best": f"{result['best']:.2f}",
        "int16 GFLOP/s": f"{result['ours_gflops']:.0f}",
        "fp32 GFLOP/s": f"{result['torch_gflops']:.0f}",
        "error int16": f"{result['error_int16']:.1e}",
        "bf16": f"{result['error_bf16']:.1e}",
        "fp32": f"{result['error_fp32']:.1e}",
    }


def all_cases() -> Iterator[Case]:
    return itertools.chain.from_iterable(map(cases, SHAPES))


if __name__ == "__main__":
    small_cases.run(
        "products",
        str(__doc__),
        all_cases,
        lambda case, given: measure(case, given.seconds, given.threads),
        printed,
        seconds=0.5,
    )
