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
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from cputrain import __version__, hardware, native, user_folders
from cputrain.ops.arithmetic import Arithmetic, Kind
from cputrain.ops.linear import OutputGradient, forward_product

logger = logging.getLogger("cputrain")

# Each product is 0.15 billion multiplications: 4 ms on a core with AVX2, and as deep and wide as in a real layer.
_TOKENS, _IN, _OUT = 256, 768, 768
# Of CPU time, and of wall time: a thread gets little of a busy machine, and a repetition that has begun is finished.
_SECONDS, _MOST_SECONDS = 0.5, 9.0
_FEWEST_ROUNDS, _REPETITIONS = 5, 2
# A round's ratio that speaks against a format. Under load, a round is off by a few percent.
_SLOWER = 0.95
# With these, bf16 is known to be fast: a measurement that isn't clear speaks neither for nor against it.
FAST_BF16 = {"amx_bf16", "bf16"}

# By these, users hold torch's libraries to lower instruction sets: what was measured under them holds only there.
_LIMITS = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")

_found: dict[str, float | None] = {}  # by this process


def bf16_pays() -> bool:
    """Whether this CPU multiplies bf16 itself, and not slower than fp32."""
    return hardware.has_bf16() and pays("native_bf16")


def pays(kind: Kind) -> bool:
    """Whether `kind` is to be used. int16 is unless it is clearly slower; bf16 may be half as fast without AMX."""
    speed = ratio(kind)
    if speed is not None:
        return speed >= 1
    return kind == "int16" or bool(FAST_BF16 & set(hardware.this_machine().instruction_sets.value))


def ratio(kind: Kind) -> float | None:
    """Time of fp32 over the time of `kind`: above 1 if it pays, None if the measurement wasn't clear."""
    name = _key(kind)
    if name not in _found:
        _found[name] = _read().get(name)
        if _found[name] is None:
            _found[name] = found = measure(kind)
            if found is not None:
                _found[name] = round(found, 3)
                _write(_read() | {name: round(found, 3)})
    return _found[name]


def measure(kind: Kind) -> float | None:
    """Half a second of CPU time, less if it is soon clear that `kind` is faster."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(*size, generator=generator, dtype=torch.float32)
        for size in ((_TOKENS, _IN), (_OUT, _IN), (_TOKENS, _OUT))
    )
    begin, end = time.thread_time(), time.perf_counter() + _MOST_SECONDS
    rounds: list[float] = []
    with torch.no_grad(), torch.autocast("cpu", enabled=False), _one_thread():
        while not (whole := time.thread_time() >= begin + _SECONDS) and not _is_faster(rounds):
            found = _round(kind, (x, w, dy), end)
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


def _round(kind: Kind, operands: tuple[Tensor, Tensor, Tensor], end: float) -> float | None:
    """fp32 and `kind` in turns; of each product the best time. None if the time is over."""
    times: dict[Kind, list[tuple[float, ...]]] = {"fp32": [], kind: []}
    for _ in range(_REPETITIONS):
        if time.perf_counter() > end:
            return None
        for side, of_side in times.items():
            of_side.append(_seconds(side, *operands))
    best = {side: sum(map(min, zip(*of_side, strict=True))) for side, of_side in times.items()}
    return best["fp32"] / best[kind]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(kind: Kind, x: Tensor, w: Tensor, dy: Tensor) -> tuple[float, ...]:
    """CPU time of each product: short enough that many are never interrupted."""
    call = Arithmetic(kind, forwards=1).begin()
    times = [time.thread_time()]
    _, kept = forward_product(x, w, None, call)
    times.append(time.thread_time())
    gradient = OutputGradient(dy, call, need_w=True)
    gradient.of_input(w)
    times.append(time.thread_time())
    gradient.of_weight(kept, w.shape[1])
    times.append(time.thread_time())
    return tuple(after - before for before, after in itertools.pairwise(times))


def _key(kind: Kind) -> str:
    machine = hardware.this_machine()
    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ]
    # "by CPU time": what earlier versions measured by wall time could be off by half, and is not read any more.
    return " | ".join(
        (machine.model.value, native.kernels().isa, f"cputrain {__version__}",
         f"torch {torch.__version__}", *limits, "by CPU time", kind)
    )  # fmt: skip


def _file() -> Path | None:
    cache = user_folders.cache()
    return cache / "cputrain" / "product_speed.json" if cache else None


def _read() -> dict[str, float]:
    path = _file()
    try:
        known = json.loads(path.read_text()) if path is not None else {}
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, float) and v > 0} if isinstance(known, dict) else {}


def _write(known: dict[str, float]) -> None:
    """In one go, so that two processes at once leave one whole file; without a cache folder it is measured again."""
    path = _file()
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(known, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        logger.info("the speed of products can't be remembered: %s", error)
