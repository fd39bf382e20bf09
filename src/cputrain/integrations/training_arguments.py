"""transformers' `TrainingArguments` with the flags of the CPU guides, which today's transformers no longer knows."""

from __future__ import annotations

import copy
import copyreg
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import transformers.training_args as stock

from cputrain.integrations import collectives, hook, trial
from cputrain.integrations.notices import Refused
from cputrain.log import say_once

_BACKEND = stock.TrainingArguments.__dataclass_fields__["ddp_backend"].metadata


@dataclass(repr=False)
class TrainingArguments(stock.TrainingArguments):
    """Stock's, and: use_ipex, no_cuda, jit_mode_eval, ddp_backend="ccl"."""

    ddp_backend: str | None = field(
        default=None, metadata={**_BACKEND, "choices": sorted({*_BACKEND.get("choices", []), "ccl"})}
    )
    use_ipex: bool | None = field(
        default=None,
        metadata={"help": "True: on the CPU; False: stock, without cputrain.", "nargs": "?", "const": True},
    )
    no_cuda: bool = field(default=False, metadata={"help": "Deprecated: write use_cpu."})
    jit_mode_eval: bool = field(default=False, metadata={"help": "Accepted for old commands; has no effect."})

    def __post_init__(self) -> None:
        _say_what_changed(self)
        trial.arrange(self)
        if self.no_cuda or self.use_ipex or not torch.accelerator.is_available():
            self.use_cpu = True
        if self.use_cpu:
            _check_precision(self)
        super().__post_init__()

    @cached_property
    def _setup_devices(self) -> torch.device:
        """`ccl` among one rank is no backend at all: stock would ask for a process group that doesn't exist."""
        asked = self.ddp_backend
        if asked == "ccl":
            self.ddp_backend = None  # among several ranks that means ours
        try:
            with collectives.offered():
                device = super()._setup_devices
        finally:
            self.ddp_backend = asked
        collectives.set_timeout(self.ddp_timeout_delta)
        return device

    def __reduce_ex__(self, protocol: Any) -> Any:
        """training_args.bin names stock's class, so that it loads where cputrain isn't installed."""
        kind = stock.TrainingArguments if type(self) is TrainingArguments else type(self)
        return copyreg._reconstructor, (kind, object, None), self.__dict__  # type: ignore[attr-defined]

    def __copy__(self) -> TrainingArguments:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingArguments:
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def _say_what_changed(arguments: TrainingArguments) -> None:
    if arguments.no_cuda:
        say_once("--no_cuda is deprecated: write --use_cpu")
    if arguments.use_ipex:
        say_once(
            "--use_ipex is deprecated: leave it out, cputrain is active without it (--use_ipex False turns it off)"
        )
    if arguments.jit_mode_eval:
        say_once("--jit_mode_eval has no effect: leave it out, evaluation is optimised without it")


def _check_precision(arguments: TrainingArguments) -> None:
    if arguments.fp16 or arguments.fp16_full_eval:
        raise Refused("--fp16 doesn't train on CPUs: write --bf16, which runs in the fastest precision of this CPU.")
    if arguments.bf16_full_eval and arguments.use_ipex is not False:
        say_once("--bf16_full_eval has no effect: evaluation runs in the precision of the training")
        arguments.bf16_full_eval = False


hook.take_place(stock, TrainingArguments)
