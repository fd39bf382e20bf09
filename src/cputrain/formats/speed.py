"""How much faster than fp32 a layer's products are in another format on this CPU: measured until clear, and remembered.

The three products of a linear layer, packing and converting included, against torch's own, on one thread. Other
programs may be using the machine meanwhile, so CPU time is measured, not wall time: the best of each product within a
round. They still disturb (caches, the core's second thread): it takes rounds that agree to say faster or slower, and an
unclear result is not kept. What is clear goes to the user's cache folder, for this CPU and these versions.

CPUs with bf16 are not always fast at it: with AVX512_BF16 but without AMX, on virtual machines of large Xeons, a
layer's products take twice as long as in fp32 (on AMD's Zen 4 half as long). They are treated as CPUs without bf16.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from cputrain import hardware, measurements
from cputrain.formats import FORMATS, Bf16, Dense, Fp32, Int16

# Each product is 0.15 billion multiplications: 4 ms on a core with AVX2, and as deep and wide as in a real layer.
_TOKENS, _IN, _OUT = 256, 768, 768
# Of CPU time, and of wall time: a thread gets little of a busy machine, and a repetition that has begun is finished.
_SECONDS, _MOST_SECONDS = 0.5, 9.0
_FEWEST_ROUNDS, _REPETITIONS = 5, 2
# A round's ratio that speaks against a format. Under load, a round is off by a few percent.
_SLOWER = 0.95
# With these, bf16 is known to be fast: a measurement that isn't clear speaks neither for nor against it.
FAST_BF16 = {"amx_bf16", "bf16"}

_KIND = "product_speed"
_found: dict[str, float | None] = {}  # by this process


def bf16_pays() -> bool:
    """Whether this CPU multiplies bf16 itself, and not slower than fp32."""
    return hardware.has_bf16() and pays(Bf16.name)


def pays(name: str) -> bool:
    """Whether this format is to be used. int16 is unless it is clearly slower; bf16 may be half as fast without AMX."""
    speed = ratio(name)
    if speed is not None:
        return speed >= 1
    return name == Int16.name or bool(FAST_BF16 & set(hardware.this_machine().instruction_sets.value))


def ratio(name: str) -> float | None:
    """Time of fp32 over the time of this format: above 1 if it pays, None if the measurement wasn't clear."""
    # "by CPU time": what earlier versions measured by wall time could be off by half, and is not read any more.
    key = measurements.key("by CPU time", name)
    if key not in _found:
        _found[key] = measurements.known(_KIND).get(key)
        if _found[key] is None:
            _found[key] = found = measure(name)
            if found is not None:
                _found[key] = round(found, 3)
                measurements.remember(_KIND, key, round(found, 3))
    return _found[key]


def measure(name: str) -> float | None:
    """Half a second of CPU time, less if it is soon clear that this format is faster."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(*size, generator=generator, dtype=torch.float32)
        for size in ((_TOKENS, _IN), (_OUT, _IN), (_TOKENS, _OUT))
    )
    begin, end = time.thread_time(), time.perf_counter() + _MOST_SECONDS
    rounds: list[float] = []
    with torch.no_grad(), torch.autocast("cpu", enabled=False), _one_thread():
        while not (whole := time.thread_time() >= begin + _SECONDS) and not _is_faster(rounds):
            found = _round(name, (x, w, dy), end)
            if found is None:
                break
            rounds.append(found)
    return clear_ratio(rounds, whole)


def clear_ratio(rounds: list[float], whole: bool) -> float | None:
    """The median, if the rounds agree: nearly all say faster, or all slower and the measurement ran to its end."""
    slower = whole and len(rounds) >= _FEWEST_ROUNDS and max(rounds) <= _SLOWER
    return statistics.median(rounds) if slower or _is_faster(rounds) else None


def _is_faster(rounds: list[float]) -> bool:
    return len(rounds) >= _FEWEST_ROUNDS and sum(ratio < 1 for ratio in rounds) <= len(rounds) // _FEWEST_ROUNDS


def _round(name: str, operands: tuple[Tensor, Tensor, Tensor], end: float) -> float | None:
    """fp32 and this format in turns; of each product the best time. None if the time is over."""
    times: dict[str, list[tuple[float, ...]]] = {Fp32.name: [], name: []}
    for _ in range(_REPETITIONS):
        if time.perf_counter() > end:
            return None
        for side, of_side in times.items():
            of_side.append(_seconds(side, *operands))
    best = {side: sum(map(min, zip(*of_side, strict=True))) for side, of_side in times.items()}
    return best[Fp32.name] / best[name]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(name: str, x: Tensor, w: Tensor, dy: Tensor) -> tuple[float, ...]:
    """CPU time of each product: short enough that many are never interrupted."""
    call, weight = FORMATS[name]().start().beside(), Dense(w)
    times = [time.thread_time()]
    _, saved = call.forward(x, weight, None)
    times.append(time.thread_time())
    gradient = call.output_grad(dy, weight=True)
    gradient.input(weight)
    times.append(time.thread_time())
    gradient.weight(weight, saved)
    times.append(time.thread_time())
    return tuple(after - before for before, after in itertools.pairwise(times))
