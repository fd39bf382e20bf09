"""Runs cases in worker processes, each case within a time limit, and collects the verdicts."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from tests.sweep.cases import Case, Verdict

Record = dict[str, Any]
TIME_LIMIT = 120  # seconds for one case; building a large model type takes the most
CASES_OF_A_WORKER = 3000  # modules that were imported stay in memory


class Worker:
    """One process at a time; a new one when it has crashed, hung or done enough."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` closes it
        self.done = 0

    def ask(self, case: Case) -> Record:
        if self.process is None or self.done >= CASES_OF_A_WORKER:
            self.start()
        assert self.process is not None and self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `line` will find
            self.process.stdin.write(json.dumps(asdict(case)) + "\n")
            self.process.stdin.flush()
        line = self.line()
        self.done += 1
        if line:
            return json.loads(line)
        return self.lost(case)

    def start(self) -> None:
        self.stop()
        self.done = 0
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "tests.sweep.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            text=True,
        )

    def line(self) -> str:
        """The worker's answer, or "" if it has ended or takes too long."""
        assert self.process is not None and self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            return self.process.stdout.readline() if selector.select(TIME_LIMIT) else ""

    def lost(self, case: Case) -> Record:
        assert self.process is not None
        try:
            code = self.process.wait(timeout=20)  # one that has closed its output may take a while to end
        except subprocess.TimeoutExpired:
            self.stop()
            return Verdict("crash", f"no answer within {TIME_LIMIT} s").record(case)
        self.process = None
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Verdict("crash", f"the process ended with {name}{self.last_words()}").record(case)

    def last_words(self) -> str:
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        ours = [line for line in lines[-40:] if "cputrain" in line or "Error" in line]
        return f": {ours[0] if ours else lines[-1]}"[:200] if lines else ""

    def close(self) -> None:
        self.stop()
        self.errors.close()

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]
        self.process = None


def run_all(groups: Iterable[list[Case]], workers: int, seen: Callable[[Record], None]) -> None:
    """Each group (one class) stays with one worker; `seen` gets every verdict. A class that isn't built is done."""
    todo: queue.Queue[list[Case]] = queue.Queue()
    for group in groups:
        todo.put(group)
    threads = [threading.Thread(target=_work, args=(todo, seen)) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _work(todo: queue.Queue[list[Case]], seen: Callable[[Record], None]) -> None:
    worker = Worker()
    try:
        while True:
            try:
                group = todo.get_nowait()
            except queue.Empty:
                return
            for number, case in enumerate(group):
                record = worker.ask(case)
                seen(record)
                if number == 0 and record["verdict"] == "not built":
                    break
    finally:
        worker.close()
