"""The most that this CPU's cores reach in a matrix product: what a run's speed is compared with.

Measured at the start of each run, a third of a second. Other programs may be busy meanwhile, so the most that was ever
seen with this CPU, number of threads and format counts; the user's cache keeps it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import torch

from cputrain import __version__, hardware, native, settings, user_folders
from cputrain.formats import FORMATS, Dense

# 8.6 billion operations each: long enough for every thread to start, and larger than any cache.
_TOKENS, _IN, _OUT = 1024, 2048, 2048
_TIMES = 5


def gflops(name: str = "fp32") -> float:
    """Of products in fp32 and in this format, the faster one's: the CPU's peak as this run may use it."""
    known, key = _read(), _key(name)
    found = round(max(_measured(one) for one in {"fp32", name}), 1)
    if found > known.get(key, 0.0):
        known[key] = found
        _write(known)
    return known[key]


def _measured(name: str) -> float:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*size, generator=generator) for size in ((_TOKENS, _IN), (_OUT, _IN)))
    best = float("inf")
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for _ in range(_TIMES):
            began = time.perf_counter()
            if name == "fp32" or native.why_not() is not None:
                torch.mm(x, w.t())
            else:
                FORMATS[name]().start().beside().forward(x, Dense(w), None)
            best = min(best, time.perf_counter() - began)
    return 2 * _TOKENS * _IN * _OUT / best / 1e9


def _key(name: str) -> str:
    limits = [f"{name}={settings.value_of(name)}" for name in settings.PRODUCT_LIMITS if settings.is_set(name)]
    isa = hardware.best_isa()[0]
    machine = hardware.this_machine().model.value
    return " | ".join((machine, isa, __version__, torch.__version__, f"{torch.get_num_threads()}", *limits, name))


def _file() -> Path | None:
    cache = user_folders.cache()
    return cache / "cputrain" / "peak.json" if cache else None


def _read() -> dict[str, float]:
    path = _file()
    try:
        known = json.loads(path.read_text()) if path is not None else {}
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, float) and v > 0} if isinstance(known, dict) else {}


def _write(known: dict[str, float]) -> None:
    """In one go, as two ranks may write at once; without a cache it is measured again."""
    path = _file()
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                json.dump(known, file, indent=1)
            os.replace(file.name, path)
    except OSError:
        return
