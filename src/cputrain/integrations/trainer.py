"""transformers' `Trainer`, whose accelerator is ours: model and optimizer are optimised when it prepares them."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import transformers.trainer as stock
from torch import nn
from torch.utils.data import DataLoader

from cputrain.integrations import hook, liger
from cputrain.integrations.accelerate import Accelerator
from cputrain.integrations.label_smoothing import LabelSmoother
from cputrain.integrations.trainer_checkpoints import CheckpointingTrainer
from cputrain.integrations.trainer_nan import GuardingTrainer
from cputrain.integrations.trainer_record import RecordingTrainer
from cputrain.integrations.trainer_stop import StoppingTrainer


class Trainer(RecordingTrainer, GuardingTrainer, CheckpointingTrainer, StoppingTrainer, stock.Trainer):
    """Stock's, optimised."""

    @functools.wraps(stock.Trainer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        LabelSmoother.adopt(getattr(self, "label_smoother", None))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with liger.accepted(self.accelerator):
            return super().train(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer computes the loss of smoothed labels, and a script's own, from logits of a call without labels."""
        from cputrain.blocks import head  # here: a script that only imports Trainer shouldn't wait for our layers

        with head.loss_follows():
            return super().prediction_step(*args, **kwargs)

    def keeps_checkpoints_whole(self) -> bool:
        return isinstance(self.accelerator, Accelerator) and self.accelerator.why_stock is None

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        Accelerator.adopt(self.accelerator, use_ipex=getattr(self.args, "use_ipex", None))

    def get_train_dataloader(self) -> DataLoader:
        loader = super().get_train_dataloader()
        if isinstance(self.accelerator, Accelerator) and self.accelerator.balances():
            from cputrain.integrations import balance

            own_loss = type(self).compute_loss is not stock.Trainer.compute_loss or self.compute_loss_func is not None
            balance.balance(loader, order_counts=False, own_loss=own_loss)
        return loader

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """A checkpoint of a model that was loaded in bf16 is fp32's: its parameters must be fp32 before it is read."""
        if isinstance(self.accelerator, Accelerator):
            self.accelerator.optimise([self.model])
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager:
        """Where transformers of old entered CPU autocast by itself, without asking accelerate."""
        entered = super().autocast_smart_context_manager(*args, **kwargs)
        return entered if self.accelerator.native_amp else contextlib.nullcontext()

    # Where transformers before 5.0 called IPEX and torch.jit, if use_ipex or jit_mode_eval was given.

    def ipex_optimize_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return model

    def torch_jit_model_eval(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return model


hook.take_place(stock, Trainer)
