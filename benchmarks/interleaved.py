"""Two sides of a comparison, each in a process of its own, that take turns on the same cores: what benchmarks add."""

from __future__ import annotations

import json
import os
from pathlib import Path

from cputrain.trials import turns
from cputrain.trials.turns import Answer, in_turns, median_ratio, serve

__all__ = ["Answer", "Side", "environment", "in_turns", "median_ratio", "peak_memory_mb", "serve", "usable_cores"]

# How stock is told to use no more than an instruction set: PyTorch's kernels, MKL and oneDNN ask separately.
STOCK_ISA = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


class Side(turns.Side):
    """A child process of a benchmark's own script, which is told its name and settings."""

    def __init__(self, name: str, script: str, settings: Answer, environment: dict[str, str]) -> None:
        super().__init__(name, [script, "--side", name, "--settings", json.dumps(settings)], environment)


def environment(isa: str, threads: int, *, ours: bool) -> dict[str, str]:
    """Both sides get the same limits; ours also `CPUTRAIN_ISA`."""
    if isa not in ("native", "avx2"):
        raise ValueError(f"isa is {isa!r}; choose native or avx2")
    settings = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if isa == "avx2":
        settings |= STOCK_ISA
        settings |= {"CPUTRAIN_ISA": "avx2"} if ours else {}
    return settings


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def peak_memory_mb() -> float:
    """The most memory that this process ever had resident, as the kernel counted it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM line; this needs Linux")
