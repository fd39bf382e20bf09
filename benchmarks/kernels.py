"""Each kernel against its plain twin, and against what the machine's memory or arithmetic allows.

    python benchmarks/kernels.py                            # everything, with this CPU's best instructions
    python benchmarks/kernels.py --isa avx2 --only norm     # both sides limited to AVX2, kernels named so
    python benchmarks/kernels.py --threads 1 --json

A case's three parts (ours, the twin, the limit) run in turns and each figure is a median, so that a noisy neighbour
troubles all three alike. The limit is the time that torch's `copy_` needs for as many bytes as the kernel must read and
write, or torch's best fp32 matrix product for as many operations: `share` is limit / ours. `of the best` is the same of
the fastest turn of each, which says more where others use the same cores: a kernel's second barrier then costs a time
slice.

To add a kernel: write a generator of `Case`s and decorate it with `@kernel`.
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


@dataclass
class Case:
    """`bytes_moved` (read and written, each once) or `operations` says what the kernel can't do without."""

    name: str
    ours: Callable[[], object]
    twin: Callable[[], object]
    bytes_moved: float = 0
    operations: float = 0


KERNELS: dict[str, Callable[[], Iterator[Case]]] = {}


def kernel(cases: Callable[[], Iterator[Case]]) -> Callable[[], Iterator[Case]]:
    KERNELS[cases.__name__] = cases
    return cases


# Tokens × hidden of the models that the floors are stated for, and one that no cache holds twice.
SIZES = [(4608, 384), (4608, 768), (65536, 768)]


def _name(what: str, rows: int, cols: int) -> str:
    return f"{what} {rows}x{cols}"


def _gradients(outputs, inputs, grads) -> None:
    """Of the twin: only the backward is timed, so the graph is kept."""
    import torch

    torch.autograd.grad(outputs, inputs, grads, retain_graph=True)


@kernel
def layer_norm() -> Iterator[Case]:
    import torch

    from cputrain.ops.norm import layer_norm_forward, norm_backward, plain

    for rows, cols in SIZES:
        x, grad = torch.randn(rows, cols), torch.randn(rows, cols)
        weight, bias = torch.randn(cols), torch.randn(cols)
        yield Case(
            _name("layer_norm", rows, cols),
            lambda x=x, w=weight, b=bias: layer_norm_forward(x, w, b, 1e-5),
            lambda x=x, w=weight, b=bias: plain(x, w, b, 1e-5),
            bytes_moved=2 * x.nbytes,
        )
        _, mean, rstd, _ = layer_norm_forward(x, weight, bias, 1e-5)
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        out = plain(*leaves, 1e-5)
        yield Case(
            _name("layer_norm backward", rows, cols),
            lambda g=grad, x=x, m=mean, r=rstd, w=weight: norm_backward(g, x, m, r, w, want_bias=False),
            lambda out=out, leaves=leaves, g=grad: _gradients(out, leaves, g),
            bytes_moved=3 * x.nbytes,
        )


@kernel
def residual_norm() -> Iterator[Case]:
    import torch

    from cputrain.ops.norm import norm_backward, residual_norm_forward

    for rows, cols in SIZES:
        y, residual, grad = (torch.randn(rows, cols) for _ in range(3))
        bias, weight, beta = (torch.randn(cols) for _ in range(3))
        for p in (0.1, 0.0):
            _, mean, rstd, _ = residual_norm_forward(y, bias, residual, weight, beta, 1e-5, p, 1)
            leaves = [t.clone().requires_grad_() for t in (y, bias, residual, weight, beta)]

            def twin(leaves=leaves, p=p):
                # In training stock draws its mask each time: that is part of what it costs.
                z = torch.nn.functional.dropout(leaves[0] + leaves[1], p) + leaves[2]
                return torch.nn.functional.layer_norm(z, z.shape[-1:], *leaves[3:], 1e-5)

            yield Case(
                _name(f"residual_norm p={p}", rows, cols),
                lambda y=y, r=residual, b=bias, w=weight, e=beta, p=p: residual_norm_forward(y, b, r, w, e, 1e-5, p, 1),
                twin,
                bytes_moved=4 * y.nbytes,
            )
            kept = twin()
            yield Case(
                _name(f"residual_norm backward p={p}", rows, cols),
                lambda g=grad, y=y, m=mean, r=rstd, w=weight, p=p: norm_backward(g, y, m, r, w, p, 1),
                lambda kept=kept, leaves=leaves, g=grad: _gradients(kept, leaves, g),
                bytes_moved=(4 if p else 3) * y.nbytes,
            )


# Text in the 12 features of one batch of SQuAD, mean 170; stock works on all 384.
TEXT = [384, 296, 238, 206, 181, 165, 150, 133, 110, 87, 60, 30]


@kernel
def activation() -> Iterator[Case]:
    import torch

    from cputrain.ops.activation import activation_backward, activation_forward, plain

    # The middle of a feed-forward block is four times as wide as the model.
    sizes = [("gelu", rows, 4 * cols) for rows, cols in SIZES[:2]]
    (rows, cols), (many, _) = SIZES[0], SIZES[-1]
    sizes += [("gelu", many, 4 * cols), ("gelu_tanh", rows, 4 * cols), ("silu", rows, 4 * cols)]
    for kind, rows, cols in sizes:
        h, grad, bias = torch.randn(rows, cols), torch.randn(rows, cols), torch.randn(cols)
        yield Case(
            _name(kind, rows, cols),
            lambda h=h, b=bias, k=kind: activation_forward(h, b, k),
            lambda h=h, b=bias, k=kind: plain(h, b, k),
            bytes_moved=2 * h.nbytes,
        )
        leaves = [h.clone().requires_grad_(), bias.clone().requires_grad_()]
        out = plain(*leaves, kind)
        yield Case(
            _name(f"{kind} backward and value", rows, cols),
            lambda g=grad, h=h, b=bias, k=kind: activation_backward(g, h, b, k, torch.empty_like(h)),
            lambda out=out, leaves=leaves, g=grad: _gradients(out, leaves, g),
            bytes_moved=4 * h.nbytes,
        )


@kernel
def embeddings() -> Iterator[Case]:
    """BERT's tables; every byte of the word table's gradient is written, though few rows are in use."""
    import torch

    from cputrain.ops.embeddings import embed, plain

    for rows, cols in SIZES[:2]:
        tables = [torch.randn(size, cols).requires_grad_() for size in (30522, 512, 2)]
        tensors = [*tables, torch.randn(cols).requires_grad_(), torch.randn(cols).requires_grad_()]
        ids = [torch.randint(30522, (rows,)), torch.randint(2, (rows,)), torch.arange(rows) % 384]
        padding, activations = (0, None, None), rows * cols * 4
        yield Case(
            _name("embed", rows, cols),
            lambda ids=ids, tensors=tensors, padding=padding: embed(*ids, *tensors, 1e-12, 0.1, padding),
            lambda ids=ids, tensors=tensors, padding=padding: torch.nn.functional.dropout(
                plain(*ids, *tensors, 1e-12, padding), 0.1
            ),
            bytes_moved=2 * activations,
        )
        grad = torch.randn(rows, cols)
        ours, twin = embed(*ids, *tensors, 1e-12, 0.1, padding), plain(*ids, *tensors, 1e-12, padding)
        yield Case(
            _name("embed backward", rows, cols),
            lambda out=ours, tensors=tensors, g=grad: _gradients(out, tensors, g),
            lambda out=twin, tensors=tensors, g=grad: _gradients(out, tensors, g),
            bytes_moved=3 * activations + tables[0].nbytes,
        )


@kernel
def attention() -> Iterator[Case]:
    """Forward and backward together, the product of queries, keys and values being given; operations of 7 products."""
    import torch

    from cputrain.ops.attention import Sequences, attention, split_packed

    longest = max(TEXT)
    for lengths, size in (([longest] * 12, 32), ([longest] * 4, 64), (TEXT, 32), (TEXT, 64)):
        sequences, heads = Sequences.from_lengths(lengths), 12
        qkv = torch.randn(sequences.total, 3 * heads * size, requires_grad=True)
        grad = torch.randn(sequences.total, heads, size)
        padded = [torch.randn(len(lengths), heads, longest, size, requires_grad=True) for _ in range(3)]
        padded_grad = torch.randn(padded[0].shape)
        for p in (0.1, 0.0):

            def ours(qkv=qkv, sequences=sequences, grad=grad, size=size, p=p):
                out = attention(*split_packed(qkv, 12), sequences, scale=size**-0.5, p=p)
                return torch.autograd.grad(out, qkv, grad)

            def stock(padded=padded, grad=padded_grad, p=p):
                out = torch.nn.functional.scaled_dot_product_attention(*padded, dropout_p=p)
                return torch.autograd.grad(out, padded, grad)

            yield Case(
                f"attention p={p} {len(lengths)}x{sequences.total // len(lengths)}, 12 heads of {size}",
                ours,
                stock,
                operations=7 * 2 * heads * size * sum(length**2 for length in lengths),
            )


# Parameters of a BERT model with that many layers and hidden size: 22 and 110 million elements.
MODELS = {"22M": (6, 384), "110M": (12, 768)}


def _bert_parameters(layers: int, hidden: int) -> list:
    import torch

    block = (
        [(hidden, hidden), (hidden,)] * 4
        + [(4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden)]
        + [(hidden,)] * 5
    )
    shapes = [(30522, hidden), (512, hidden), *block * layers]
    return [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]


def _optimizer_case(name: str, kind, floats_moved: int, layers: int, hidden: int, **options) -> Case:
    """Ours and stock's step on parameters of their own and the same gradients."""
    import torch

    from cputrain.optimizers import take_over

    optimizers = []
    grads = [torch.randn_like(parameter) * 1e-3 for parameter in _bert_parameters(layers, hidden)]
    for _ in range(2):
        parameters = _bert_parameters(layers, hidden)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        optimizers.append(kind(parameters, lr=1e-5, **options))
    take_over(optimizers[0])
    size = sum(grad.nbytes for grad in grads)
    return Case(name, optimizers[0].step, optimizers[1].step, bytes_moved=floats_moved * size)


@kernel
def optimizers() -> Iterator[Case]:
    """AdamW reads four numbers per element and writes three, SGD with momentum three and two; the twin is stock."""
    import torch

    for size, (layers, hidden) in MODELS.items():
        yield _optimizer_case(f"adamw {size}", torch.optim.AdamW, 7, layers, hidden)
        yield _optimizer_case(f"sgd momentum {size}", torch.optim.SGD, 5, layers, hidden, momentum=0.9)


@kernel
def clip_grad_norm() -> Iterator[Case]:
    """The norm alone, and with the scaling that a large norm brings (the bound shrinks each time, so that it does)."""
    import torch

    from cputrain.optimizers.clipping import clip_grad_norm_

    stock = torch.nn.utils.clip_grad_norm_
    for size, (layers, hidden) in MODELS.items():
        parameters = _bert_parameters(layers, hidden)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        moved = sum(parameter.nbytes for parameter in parameters)
        yield Case(
            f"clip_grad_norm {size}, below the bound",
            lambda p=parameters: clip_grad_norm_(p, 1e9),
            lambda p=parameters: stock(p, 1e9),
            bytes_moved=moved,
        )
        bound = (1e4 * 0.9999**turn for turn in range(10**9))
        yield Case(
            f"clip_grad_norm {size}, above it",
            lambda p=parameters, b=bound: clip_grad_norm_(p, next(b)),
            lambda p=parameters, b=bound: stock(p, next(b)),
            bytes_moved=3 * moved,
        )


def copy_limit(bytes_moved: float) -> Callable[[], object]:
    """A copy that reads and writes as many bytes in all, so that as much of it fits the caches."""
    import torch

    source = torch.randn(max(int(bytes_moved) // 8, 1))
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def product_limit(operations: float) -> tuple[Callable[[], object], float]:
    """torch's product of two large matrices, and how many times it would fit into `operations`."""
    import torch

    size = 1024
    a, b, c = (torch.randn(size, size) for _ in range(3))
    return lambda: torch.mm(a, b, out=c), operations / (2 * size**3)


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(case: Case, budget: float) -> dict[str, float | str]:
    """Medians over as many turns as fit the budget (seconds), at least five."""
    if case.bytes_moved:
        limit, scale = copy_limit(case.bytes_moved), 1.0
    else:
        limit, scale = product_limit(case.operations)
    parts = [case.ours, case.twin, limit]
    for part in parts:
        part()
    turns: list[list[float]] = []
    end = time.perf_counter() + budget
    while len(turns) < 5 or time.perf_counter() < end:
        turns.append([seconds(part) for part in parts])
    ours, twin, bound = (statistics.median(times) for times in zip(*turns, strict=True))
    bound *= scale
    amount = case.bytes_moved or case.operations
    return {
        "kernel": case.name,
        "ours_ms": ours * 1e3,
        "twin_ms": twin * 1e3,
        "ratio": statistics.median(t[1] / t[0] for t in turns),
        "limit_ms": bound * 1e3,
        "share": statistics.median(scale * t[2] / t[0] for t in turns),
        "best_share": scale * min(t[2] for t in turns) / min(t[0] for t in turns),
        "giga_per_second": amount / ours / 1e9,
        "unit": "GB/s" if case.bytes_moved else "GFLOP/s",
    }


def printed(result: dict[str, float | str]) -> dict[str, str]:
    return {
        "kernel": str(result["kernel"]),
        "ours": f"{result['ours_ms']:.3f} ms",
        "twin": f"{result['twin_ms']:.3f} ms",
        "ratio": f"{result['ratio']:.2f}",
        "limit": f"{result['limit_ms']:.3f} ms",
        "share": f"{result['share']:.0%}",
        "of the best": f"{result['best_share']:.0%}",
        "speed": f"{result['giga_per_second']:.1f} {result['unit']}",
    }


def all_cases() -> Iterator[Case]:
    return itertools.chain.from_iterable(cases() for cases in KERNELS.values())


if __name__ == "__main__":
    small_cases.run("kernels", str(__doc__), all_cases, lambda case, given: measure(case, given.seconds), printed, 1.0)
