"""How much faster than fp32 a layer's products are in another format on this CPU: measured once, and remembered.

The three products of a linear layer, packing and converting included, against torch's own, interleaved, for at most one
second: where a first format is vetoed a second one is measured, and two seconds are what `auto` may take. Others may be
using the machine meanwhile: so it is one thread's best time of each, in pieces that are short enough to be left alone.
What was found is kept in the user's cache folder for this CPU and these versions.

CPUs with bf16 are not always fast at it: with AVX512_BF16 but without AMX, on virtual machines of large Xeons, a
layer's products take twice as long as in fp32 (on AMD's Zen 4 half as long). They are treated as CPUs without bf16.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from cputrain import __version__, hardware, native
from cputrain.ops.arithmetic import Arithmetic, Kind
from cputrain.ops.linear import OutputGradient, forward_product

logger = logging.getLogger("cputrain")

# Each product is 0.15 billion multiplications: 4 ms on a core with AVX2, and as deep and wide as in a real layer.
_TOKENS, _IN, _OUT = 256, 768, 768
_SECONDS, _ROUNDS = 0.9, 40

# By these, users hold torch's libraries to lower instruction sets: what was measured under them holds only there.
_LIMITS = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")

_found: dict[str, float] = {}  # by this process


def bf16_pays() -> bool:
    """Whether this CPU multiplies bf16 itself, and not slower than fp32."""
    return hardware.has_bf16() and ratio("native_bf16") >= 1


def ratio(kind: Kind) -> float:
    """Time of fp32 over the time of `kind`: above 1 if it pays."""
    name = _key(kind)
    if name not in _found:
        known = _read()
        if name not in known:
            known[name] = round(measure(kind), 3)
            _write(known)
        _found[name] = known[name]
    return _found[name]


def measure(kind: Kind) -> float:
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(*size, generator=generator, dtype=torch.float32)
        for size in ((_TOKENS, _IN), (_OUT, _IN), (_TOKENS, _OUT))
    )
    end = time.perf_counter() + _SECONDS
    best: dict[Kind, float] = {"fp32": float("inf"), kind: float("inf")}
    with torch.no_grad(), torch.autocast("cpu", enabled=False), _one_thread():
        for _ in range(_ROUNDS):
            for side in best:
                best[side] = min(best[side], _seconds(side, x, w, dy))
            if time.perf_counter() > end:
                break
    return best["fp32"] / best[kind]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(kind: Kind, x: Tensor, w: Tensor, dy: Tensor) -> float:
    call = Arithmetic(kind, forwards=1).begin()
    start = time.perf_counter()
    _, kept = forward_product(x, w, None, call)
    gradient = OutputGradient(dy, call, True, True)
    gradient.of_input(w)
    gradient.of_weight(kept, w.shape[1])
    return time.perf_counter() - start


def _key(kind: Kind) -> str:
    machine = hardware.this_machine()
    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ]
    return " | ".join(
        (machine.model.value, native.kernels().isa, f"cputrain {__version__}",
         f"torch {torch.__version__}", *limits, kind)
    )  # fmt: skip


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cputrain" / "product_speed.json"


def _read() -> dict[str, float]:
    try:
        known = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, (int, float))} if isinstance(known, dict) else {}


def _write(known: dict[str, float]) -> None:
    """In one go, so that two processes at once leave one whole file; without a cache folder it is measured again."""
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=_file().parent, delete=False) as file:
            json.dump(known, file, indent=1)
        os.replace(file.name, _file())
    except OSError as error:
        logger.info("the speed of products can't be remembered: %s", error)
