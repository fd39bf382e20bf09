"""The process of a side: builds a model, takes real steps of it, and says how long they took and what they needed.

python -m cputrain.trials.worker '{"cpus": [0, 1]}'
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from cputrain import process_memory
from cputrain.trials import models, turns
from cputrain.trials.jobs import Job, from_answer
from cputrain.trials.turns import Answer


class Training:
    """A model, its optimizer, and steps as Trainer takes them."""

    def __init__(self, job: Job, layers: int) -> None:
        models.load(job)
        self.before = process_memory.resident(), process_memory.in_use()
        self.job, self.seen = job, 0
        self.model = models.build(job, layers)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        kind = getattr(torch.optim, job.optimizer, torch.optim.AdamW)
        self.optimizer: Any = kind(trained, lr=1e-5)
        if job.dtype != "stock":
            import cputrain

            cputrain.optimize(self.model, self.optimizer, dtype=job.dtype, padding=job.padding)  # type: ignore[call-overload]

    def described(self) -> Answer:
        parameters = list(self.model.parameters())
        stored = sum(p.numel() * p.element_size() for p in [*parameters, *self.model.buffers()])
        return {
            "weights": stored,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            "before": self.before[0],
        }

    def step(self, sequences: int) -> Answer:
        torch.manual_seed(self.seen)
        self.seen += 1
        batch = models.batch(self.job, self.model, sequences)
        times, at_rest = [time.perf_counter()], process_memory.in_use()
        loss = self.model(**batch).loss
        times.append(time.perf_counter())
        forward = process_memory.in_use()
        loss.backward()
        times.append(time.perf_counter())
        backward = process_memory.in_use()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(time.perf_counter())
        return {
            "forward": times[1] - times[0],
            "backward": times[2] - times[1],
            "optimizer": times[3] - times[2],
            "seconds": times[3] - times[0],
            "saved": forward - at_rest,
            "after_forward": forward - self.before[1],
            "after_backward": backward - self.before[1],
        }

    def measured(self, sequences: int, steps: int) -> Answer:
        """The last of some steps, and the peak of all."""
        process_memory.forget_peak()
        for _ in range(steps - 1):
            self.step(sequences)
        return {**self.step(sequences), "peak": process_memory.peak()}


class Worker:
    def __init__(self) -> None:
        self.training: Training | None = None

    def build(self, job: Answer, layers: int, share: float) -> Answer:
        """`share`: of the memory that is free, what this process may take."""
        self.drop()
        process_memory.allow(int(share * process_memory.available()))
        self.training = Training(from_answer(job), layers)
        return self.training.described()

    def measure(self, sequences: int, steps: int) -> Answer:
        assert self.training is not None
        return self.training.measured(sequences, steps)

    def step(self, number: int, sequences: int) -> Answer:
        assert self.training is not None
        return self.training.step(sequences)

    def drop(self) -> Answer:
        """What the last model had goes back to the kernel."""
        from cputrain import api, memory

        if self.training is not None and self.training.job.dtype != "stock":
            api.restore(self.training.model)
        self.training = None
        gc.collect()
        memory.release()
        return {}


def resolve(model: str, task: str | None) -> Answer:
    return models.resolve(model, task)


def rates(dtype: str) -> Answer:
    """The most that products reach, and bytes a second of a copy that no cache holds: read and written."""
    from cputrain.integrations import peak

    source = torch.zeros(16 << 20)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begin)
    return {"gflops": peak.gflops(dtype), "copied": 8 * len(source) / min(seconds)}


def chosen(dtype: str) -> Answer:
    """What a format's name means on this CPU."""
    from cputrain.formats import choose

    choice = choose.choose(dtype)
    return {"dtype": choice.dtype, "reason": choice.reason}


def _answering(handler: Callable[..., Answer]) -> Callable[..., Answer]:
    """What a user can mend becomes a sentence, and so does memory that ran out; all else ends the process."""

    def answer(**arguments: Any) -> Answer:
        try:
            return handler(**arguments)
        except ValueError as error:
            return {"error": str(error)}
        except MemoryError:
            return {"no_memory": True}
        except RuntimeError as error:
            if any(words in str(error) for words in ("can't allocate memory", "not enough memory", "bad_alloc")):
                return {"no_memory": True}
            raise

    return answer


def _be_quiet() -> None:
    """What libraries say about models of random weights is nothing that a user asked about."""
    warnings.simplefilter("ignore")
    for name in ("cputrain", "transformers", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main(settings: Answer) -> None:
    if settings.get("cpus"):
        os.sched_setaffinity(0, settings["cpus"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word: the parent has one
    _be_quiet()
    worker = Worker()
    handlers: dict[str, Callable[..., Answer]] = {
        "build": worker.build,
        "measure": worker.measure,
        "step": worker.step,
        "drop": worker.drop,
    }
    handlers |= {"resolve": resolve, "rates": rates, "chosen": chosen}
    turns.serve({name: _answering(handler) for name, handler in handlers.items()})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
