"""What a training step would take if each of its parts ran as fast as the same machine runs it alone.

One step is recorded: every call of a kernel, and every product that torch computes for us in fp32. Then

- products are replayed alone, each shape on operands of its own, which it has just used;
- attention counts at the rate of torch's fp32 product of large matrices;
- kernels that only pass over memory, packing among them, count at the rate at which torch copies as many bytes;
- what runs outside our kernels (torch's operators, autograd, Python) counts nothing.

The sum is the bound, and bound / step our share of it. Steps, recorded steps and parts take turns; all are medians.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kernel_work import IGNORED, Fp32Product, Product, Source, Work, torch_product, work_of

ROUNDS = 5
PEAK_SIZE = 2048  # of torch's product
OUTSIDE = "outside our kernels"
Answer = dict[str, Any]
Parts = dict[str, float]  # seconds by group


def share_of_bound(step: Callable[[int], Answer], numbers: Iterable[int]) -> Answer:
    """Medians over the batches of these numbers; parts are [milliseconds in the step, alone]."""
    batches = [_Batch(step, number) for number in numbers]
    spent = [batch.spent() for batch in batches]
    alone = [batch.alone() for batch in batches]
    names = sorted({name for parts in spent for name in parts}, key=lambda name: -spent[0].get(name, 0.0))
    return {
        "share_of_bound": statistics.median(
            sum(bound.values()) / batch.seconds for batch, bound in zip(batches, alone, strict=True)
        ),
        "products_share": statistics.median(
            bound["products"] / parts["products"] for bound, parts in zip(alone, spent, strict=True)
        ),
        "parts": {
            name: [1e3 * statistics.median(parts.get(name, 0.0) for parts in side) for side in (spent, alone)]
            for name in names
        },
    }


class _Batch:
    """One batch's step, measured as it is and recorded, in turns with its parts."""

    def __init__(self, step: Callable[[int], Answer], number: int) -> None:
        step(number)  # allocates what this batch needs
        with recording() as self.calls:
            step(number)
        self.runs = {key: run for key, run in ((_key(work), _ready(work)) for work, _ in self.calls)}
        times: dict[Any, list[float]] = defaultdict(list)
        steps, recorded = [], []
        for _ in range(ROUNDS):
            steps.append(step(number)["seconds"])
            with recording() as calls:
                step(number)
            recorded.append(by_group((work.group, seconds) for work, seconds in calls))
            for key, run in self.runs.items():
                run()  # its operands come into the caches, as its own panels do in a loop
                times[key].append(_seconds(run))
        self.seconds = statistics.median(steps)
        self.recorded = recorded
        self.times = {key: statistics.median(found) for key, found in times.items()}

    def spent(self) -> Parts:
        parts = {name: statistics.median(parts.get(name, 0.0) for parts in self.recorded) for name in self.recorded[0]}
        return parts | {OUTSIDE: max(self.seconds - sum(parts.values()), 0.0)}

    def alone(self) -> Parts:
        return by_group((work.group, self._alone(work)) for work, _ in self.calls)

    def _alone(self, work: Work) -> float:
        seconds = self.times[_key(work)]
        if work.operations:
            return seconds * work.operations / (2 * PEAK_SIZE**3)
        return seconds * (work.bytes_moved / _copied(work) if work.product is None else 1)


def by_group(parts: Iterable[tuple[str, float]]) -> Parts:
    totals: Parts = defaultdict(float)
    for name, seconds in parts:
        totals[name] += seconds
    return dict(totals)


@contextmanager
def recording() -> Iterator[list[tuple[Work, float]]]:
    """Every kernel of ours and every product of torch's is timed meanwhile, which adds some microseconds to each."""
    import torch

    from cputrain import native

    calls: list[tuple[Work, float]] = []

    def timed(function: Callable, name: str, work: Callable[[str, tuple], Work]) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            calls.append((work(name, args), time.perf_counter() - begin))
            return result

        return run

    table = native.kernels()
    ours = [(table, name, work_of) for name in native.SIGNATURES if name not in IGNORED]
    theirs = [(torch, "mm", torch_product), (torch, "addmm", torch_product), (torch.Tensor, "addmm_", torch_product)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in ours + theirs]
    try:
        for owner, name, work in ours + theirs:
            setattr(owner, name, timed(getattr(owner, name), name, work))
        yield calls
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _copied(work: Work) -> int:
    """Bytes that the copy for this work moves: the next power of two."""
    return 1 << max(work.bytes_moved.bit_length(), 12)


def _key(work: Work) -> object:
    """What is run to find out how long this work takes alone; many calls share it."""
    return work.product or ("peak" if work.operations else _copied(work))


def _ready(work: Work) -> Callable[[], object]:
    import torch

    if work.operations:
        a, b, c = (torch.randn(PEAK_SIZE, PEAK_SIZE) for _ in range(3))
        return lambda: torch.mm(a, b, out=c)
    if work.product is None:
        source = torch.randn(_copied(work) // 8)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    return _ready_fp32(work.product) if isinstance(work.product, Fp32Product) else _ready_int16(work.product)


def _ready_fp32(product: Fp32Product) -> Callable[[], object]:
    import torch

    def matrix(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return torch.randn(extent).as_strided(shape, strides)

    operands = [matrix(*operand) for operand in product.operands]
    return lambda: getattr(torch, product.function.rstrip("_"))(*operands)


def _ready_int16(product: Product) -> Callable[[], object]:
    import torch

    from cputrain.formats import int16_matmul as matmul

    def operand(vectors: int, side: Source, role: matmul.Role) -> matmul.Operand:
        shape = (product.depth, vectors) if side.by_columns else (vectors, product.depth)
        x = torch.randn(shape[0], max(side.stride, shape[1]))[:, : shape[1]]
        x = x.bfloat16() if side.two_bytes else x
        if side.packed:
            packed = matmul.pack(x, rows=role)[0]
            assert packed is not None
            return packed
        sums = torch.empty(vectors) if side.sums else None
        return matmul.by_columns(x, role, sums) if side.by_columns else matmul.by_rows(x, role)

    left, right = operand(product.rows, product.left, "left"), operand(product.cols, product.right, "right")
    out = torch.zeros(product.rows, product.cols)
    bias = torch.randn(product.cols) if product.bias else None
    plus = None
    if product.plus:
        plus = (
            matmul.by_rows(torch.randn(product.rows, product.plus), "left"),
            matmul.by_rows(torch.randn(product.cols, product.plus), "right"),
        )
    return lambda: matmul.product(left, right, out=out, bias=bias, accumulate=product.accumulate, plus=plus)


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
