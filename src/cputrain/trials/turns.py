"""Sides of a comparison, each in a process of its own, that take turns on the same cores.

The parent asks one side for a step while the others wait on their standard input, so that all see the same machine and
none sees another's allocator, thread pool or patches. Requests and answers are JSON, one per line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

Answer = dict[str, Any]

# libgomp's idle threads spin for a few milliseconds (GOMP_SPINCOUNT, 300,000 rounds) before they sleep: let them.
PAUSE_BETWEEN_TURNS = 0.03


class Asked(Protocol):
    def ask(self, request: str, **arguments: Any) -> Answer: ...


class Side:
    """A child process that answers requests, and sleeps between them."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
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
        code = self.process.wait()
        if code == -signal.SIGKILL:
            raise ValueError(
                "the kernel killed a trial's process: too little memory is free; end other programs first."
            )
        raise RuntimeError(f"the {self.name} side ended with code {code}; its own message is above")

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


def in_turns(sides: Sequence[Asked], steps: int, request: str = "step", **arguments: Any) -> Iterator[list[Answer]]:
    """For each step every side's answer, in the order of `sides`; who goes first alternates."""
    for step in range(steps):
        order = list(range(len(sides)))
        if step % 2:
            order.reverse()
        answers: list[Answer] = [{} for _ in sides]
        for index in order:
            time.sleep(PAUSE_BETWEEN_TURNS)
            answers[index] = sides[index].ask(request, number=step, **arguments)
        yield answers


def median_ratio(stock: Sequence[float], ours: Sequence[float]) -> float:
    """How many times faster ours is: the median over the pairs of neighbouring steps."""
    return statistics.median(a / b for a, b in zip(stock, ours, strict=True))
