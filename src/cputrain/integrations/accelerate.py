"""Accelerate's `Accelerator`, whose `prepare` also optimises the models and the optimizers that it is given.

Trainer calls `prepare` too, so this is the one place where either kind of script is taken over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import accelerate.accelerator as stock
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, DynamoBackend
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from cputrain import hardware
from cputrain.integrations import collectives, data_parallel, hook, memory_need, settings
from cputrain.integrations.accelerate_checkpoints import CheckpointingAccelerator
from cputrain.integrations.notices import Refused, say_stock_once
from cputrain.log import mention_once, say_once, show_where_nobody_logs

_OTHER_ENGINES = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)


class Accelerator(CheckpointingAccelerator, stock.Accelerator):
    """Stock's, with models and optimizers optimised in place before stock's own `prepare` sees them."""

    # Why models are left as they are, or None if they are optimised.
    _why_stock: str | None = None
    _stock_autocasts = False
    # Trainer knows which loader is for training; an accelerator of a script's own must guess.
    _is_trainers = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with collectives.offered():
            super().__init__(*args, **kwargs)
        self._stock_autocasts = self.native_amp
        self._decide(use_ipex=None)

    @classmethod
    def adopt(cls, accelerator: stock.Accelerator, use_ipex: bool | None) -> None:
        """Makes the accelerator that Trainer created one of ours; `use_ipex=False` is a script's wish for stock."""
        if type(accelerator) is stock.Accelerator and not isinstance(accelerator, cls):
            accelerator.__class__ = cls
            accelerator._stock_autocasts = accelerator.native_amp
        if isinstance(accelerator, cls):
            accelerator._is_trainers = True
            accelerator._decide(use_ipex)
        else:
            say_stock_once(f"{type(accelerator).__name__} isn't Accelerate's own class: the training runs as stock")

    def _decide(self, use_ipex: bool | None) -> None:
        self._why_stock = _why_stock(self, use_ipex)
        if self._why_stock is None and self.mixed_precision == "fp16":
            raise Refused("fp16 doesn't train on CPUs: write bf16, which runs in the fastest precision of this CPU.")
        # Autocast would take every product away from our kernels, and is emulated where the CPU has no bf16.
        self.native_amp = self._stock_autocasts if self._why_stock else False

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        self.optimise(args)
        prepared = super().prepare(*args, **kwargs)
        if not self._is_trainers:
            _record(self, args)
        return prepared

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """`prepare` comes through here too; Trainer comes here alone if it evaluates without training."""
        self.optimise([model])
        _spare_a_copy_of_gradients(self)
        prepared = super().prepare_model(model, *args, **kwargs)
        if isinstance(prepared, DistributedDataParallel) and not hook.is_active():  # else every DDP does it
            data_parallel.compress(prepared)
        return prepared

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **kwargs: Any) -> DataLoader:
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if prepared is not data_loader and not self._is_trainers and self.balances():
            from cputrain.integrations import balance

            balance.balance(prepared, order_counts=not balance.is_shuffled(data_loader), own_loss=False)
        return prepared

    def optimise(self, objects: Iterable[object]) -> None:
        """In place: models, with those optimizers among `objects` that train them."""
        _optimise(self, objects)

    @property
    def why_stock(self) -> str | None:  # type: ignore[override]
        """Why nothing is ours here, or None."""
        return self._why_stock

    def balances(self) -> bool:
        """Whether samples may be dealt to several ranks by length."""
        return self.num_processes > 1 and self._why_stock is None

    def _prepare_ipex_or_xpu(self, *args: Any) -> tuple[Any, ...]:
        """Where accelerate before 1.13 called IPEX."""
        return args


def _record(accelerator: Accelerator, objects: Iterable[object]) -> None:
    """Of a script with a loop of its own; Trainer's is recorded when it begins to train."""
    from cputrain.integrations import recording

    objects = list(objects)
    model = next((item for item in objects if isinstance(item, nn.Module)), None)
    if model is not None and any(isinstance(item, Optimizer) for item in objects):
        folder = accelerator.project_dir
        recording.begin_own(model, str(folder) if folder else None)


def _why_stock(accelerator: stock.Accelerator, use_ipex: bool | None) -> str | None:
    if use_ipex is False or (use_ipex is None and settings.is_off()):
        return "IPEX is off (use_ipex, or ipex in the configuration)"
    if accelerator.device.type != "cpu":
        return f"it runs on {accelerator.device}; --use_cpu or Accelerator(cpu=True) chooses the CPU"
    if accelerator.distributed_type in _OTHER_ENGINES:
        return f"{accelerator.distributed_type.value} has its own way with models"
    dynamo = getattr(accelerator.state, "dynamo_plugin", None)
    if dynamo is not None and dynamo.backend not in (None, DynamoBackend.NO):
        return "torch.compile was asked for, and fuses by itself"
    return None


def _spare_a_copy_of_gradients(accelerator: Accelerator) -> None:
    """In each step of several ranks, and in memory: DDP's own copy serves as the gradients. A script's wishes stay."""
    handler: DistributedDataParallelKwargs | None = accelerator.ddp_handler
    if accelerator._why_stock is None and (handler is None or accelerator._is_trainers):
        handler = handler or DistributedDataParallelKwargs()
        handler.gradient_as_bucket_view = True
        accelerator.ddp_handler = handler


def _optimise(accelerator: Accelerator, objects: Iterable[object]) -> None:
    """Models with their optimizers, whatever the order in which they stand."""
    objects = list(objects)
    models = [item for item in objects if isinstance(item, nn.Module)]
    optimizers = [item for item in objects if isinstance(item, Optimizer)]
    if not models and not optimizers:
        return
    if accelerator._why_stock:
        _say_why_stock(accelerator)
        return
    from cputrain import api  # here: a script that only imports accelerate shouldn't wait for our layers
    from cputrain.optimizers import takeover

    for model in models:
        if not api.is_optimized(model):
            own = next((optimizer for optimizer in optimizers if _trains(optimizer, model)), None)
            _optimise_model(model, own, accelerator.mixed_precision == "bf16")
    for optimizer in optimizers:  # of models that came earlier, or a second one for the same model
        result = takeover.take_over(optimizer)
        if not result.taken:
            say_once(result.reason)


def _optimise_model(model: nn.Module, optimizer: Optimizer | None, bf16: bool) -> None:
    from cputrain import api
    from cputrain.native import LibraryError

    name = type(model).__name__
    dtype, padding = settings.precision(script_asks_for_bf16=bf16), settings.padding()
    try:
        if optimizer is None:
            api.optimize(model, dtype=dtype, padding=padding)
        else:
            memory_need.check(model, optimizer)
            api.optimize(model, optimizer, dtype=dtype, padding=padding)
    except Refused:
        raise
    except LibraryError as error:  # a broken installation, which the user must hear of
        raise Refused(str(error)) from None
    except ValueError as error:
        say_stock_once(f"{name} trains as stock: {error}")
        return
    reason = api.why_stock(model)
    if reason is not None:
        say_stock_once(f"{name} trains as stock: {reason}")
    else:
        facts = [f"{what} {value}" for what, value, _ in api.explain(model).facts]
        mention_once(f"{name} is optimised: {', '.join(facts)}")


def _trains(optimizer: Optimizer, model: nn.Module) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def _say_why_stock(accelerator: Accelerator) -> None:
    say_stock_once(f"cputrain stays out: {accelerator._why_stock}")
    emulated = accelerator.native_amp and accelerator.mixed_precision == "bf16" and accelerator.device.type == "cpu"
    if emulated and not hardware.has_bf16():
        say_once("this CPU has no bf16: stock PyTorch emulates it, many times slower than fp32")


show_where_nobody_logs()
hook.take_place(stock, Accelerator)
