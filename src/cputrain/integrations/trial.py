"""A few steps for `cputrain tune`: the training leaves nothing behind but its record, and ends after the last."""

from __future__ import annotations

import os
import sys
from typing import Any

from cputrain import settings
from cputrain.integrations.notices import Refused

OWN_LOOP = (
    "the script trains in a loop of its own, and what that writes can't be kept from it: give --it-may-write to tune it"
)


def steps() -> int:
    """How many; 0: this is no trial."""
    return settings.number(settings.TRIAL_STEPS)


def arrange(arguments: Any) -> None:
    """TrainingArguments of a trial: the record's folder is the output folder; no hub, no trackers."""
    if steps():
        arguments.output_dir = settings.value_of(settings.RECORD)
        arguments.max_steps = steps()
        arguments.push_to_hub = arguments.eval_on_start = False
        arguments.report_to = "none"


def share_batch(trainer: Any) -> None:
    """Each rank takes its part of what one process takes, so that the global batch stays the same."""
    size, batch = settings.number(settings.WORLD_SIZE, 1), trainer.args.per_device_train_batch_size
    if batch % size:
        raise Refused(f"{size} ranks can't share a batch of {batch} evenly.")
    trainer.args.per_device_train_batch_size = batch // size
    trainer._train_batch_size = trainer.args.train_batch_size


def check_own_loop() -> None:
    if steps() and settings.one_of(settings.TRIAL_OWN_LOOPS) != "true":
        raise Refused(OWN_LOOP)


def watch_own_loop() -> None:
    """At a step of an optimizer: from here on a loop is recorded that neither Trainer nor Accelerate knows of."""
    from cputrain.integrations import recording

    if steps() and recording.current() is None:
        recording.begin_own(None, None)


def end_after_the_last(record: Any, entry: dict[str, Any]) -> None:
    """Listens to a recorder. At once, whatever the script would still do: save, evaluate, push."""
    if entry["step"] < steps():
        return
    from torch import distributed

    from cputrain.integrations import recording

    recording.end()
    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()  # a rank that is gone too early would fail another one's last exchange
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
