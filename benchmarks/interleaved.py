"""Two sides of a comparison, each in a process of its own, that take turns on the same cores.

The parent asks one side for a step while the other waits on its standard input, so that both see the same machine
and neither sees the other's allocator, thread pool or patches. Requests and answers are JSON, one per line.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Answer = dict[str, Any]

# libgomp's idle threads spin for a few milliseconds (GOMP_SPINCOUNT, 300,000 rounds) before they sleep: let them.
PAUSE_BETWEEN_TURNS = 0.03

# How stock is told to use no more than an instruction set: PyTorch's kernels, MKL and oneDNN ask separately.
STOCK_ISA = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


class Side:
    """A child process that answers requests, and sleeps between them."""

    def __init__(self, name: str, script: str, settings: Answer, environment: dict[str, str]) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, script, "--side", name, "--settings", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
            text=True,
        )

    def send(self, request: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"request": request} | arguments) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.fail()

    def receive(self) -> Answer:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.fail()
        return json.loads(line)

    def ask(self, request: str, **arguments: Any) -> Answer:
        self.send(request, **arguments)
        return self.receive()

    def fail(self) -> None:
        raise RuntimeError(f"the {self.name} side ended with code {self.process.wait()}; its own message is above")

    def close(self) -> None:
        """Closing its input ends the child; one that does not end is killed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # if it is gone already, it said why on standard error
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def serve(handlers: dict[str, Callable[..., Answer]]) -> None:
    """The child's loop. Whatever libraries print goes to standard error, so that the answers stay clean."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        arguments = json.loads(line)
        answer = handlers[arguments.pop("request")](**arguments)
        print(json.dumps(answer), file=answers, flush=True)


def in_turns(sides: Sequence[Side], steps: int, request: str = "step") -> Iterator[list[Answer]]:
    """For each step every side's answer, in the order of `sides`; who goes first alternates."""
    for step in range(steps):
        order = list(range(len(sides)))
        if step % 2:
            order.reverse()
        answers: list[Answer] = [{} for _ in sides]
        for index in order:
            time.sleep(PAUSE_BETWEEN_TURNS)
            answers[index] = sides[index].ask(request, number=step)
        yield answers


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


def median_ratio(stock: Sequence[float], ours: Sequence[float]) -> float:
    """How many times faster ours is: the median over the pairs of neighbouring steps."""
    return statistics.median(a / b for a, b in zip(stock, ours, strict=True))


def peak_memory_mb() -> float:
    """The most memory that this process ever had resident, as the kernel counted it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM line; this needs Linux")
