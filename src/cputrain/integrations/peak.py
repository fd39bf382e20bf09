"""The most that this CPU's cores reach in a matrix product: what a run's speed is compared with.

Measured at the start of each run, a third of a second. Other programs may be busy meanwhile, so the most that was ever
seen with this CPU, number of threads and format counts; the user's cache keeps it.
"""

from __future__ import annotations

import time

import torch

from cputrain import measurements, native
from cputrain.formats import FORMATS, Dense

# 8.6 billion operations each: long enough for every thread to start, and larger than any cache.
_TOKENS, _IN, _OUT = 1024, 2048, 2048
_TIMES = 5
_KIND = "peak"


def gflops(name: str = "fp32") -> float:
    """Of products in fp32 and in this format, the faster one's: the CPU's peak as this run may use it."""
    key = measurements.key(f"{torch.get_num_threads()} threads", name)
    found = round(max(_measured(one) for one in {"fp32", name}), 1)
    before = measurements.known(_KIND).get(key, 0.0)
    if found > before:
        measurements.remember(_KIND, key, found)
    return max(found, before)


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
