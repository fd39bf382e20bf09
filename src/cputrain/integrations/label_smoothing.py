"""Trainer's label smoothing (`label_smoothing_factor`) without the logits: stock's number, of logits that stay lazy."""

from __future__ import annotations

from typing import Any

import transformers.trainer_pt_utils as stock
from torch import Tensor
from torch.nn import functional as F


class LabelSmoother(stock.LabelSmoother):
    @classmethod
    def adopt(cls, smoother: Any) -> None:
        """Makes the smoother that Trainer created one of ours."""
        if type(smoother) is stock.LabelSmoother:
            smoother.__class__ = cls

    def __call__(self, model_output: Any, labels: Tensor, shift_labels: bool = False, **options: Any) -> Tensor:
        from cputrain.blocks.lazy_logits import LazyLogits  # here: a script that only imports Trainer doesn't need it

        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        is_served = isinstance(logits, LazyLogits) and labels.shape == logits.shape[:-1]
        if not is_served or options.keys() - {"num_items_in_batch"}:
            return super().__call__(model_output, labels, shift_labels, **options)
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        counts = labels != self.ignore_index
        labels = labels.clamp(min=0).where(counts, self.ignore_index)  # stock takes other negative labels for 0
        rows = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
        loss = F.cross_entropy(*rows, ignore_index=self.ignore_index, reduction="sum", label_smoothing=self.epsilon)
        items = options.get("num_items_in_batch")
        return loss / (counts.sum() if items is None else items)
