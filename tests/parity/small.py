"""What the tests of `optimize` with other things share: small models, padded batches, and stock beside ours."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import transformers as hf
from torch import Tensor, nn

import cputrain
from tests.model_zoo import TINY, bert_like, stir_parameters

RIGHT = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]])
LEFT = RIGHT.flip(1)
HOLES = torch.tensor([[1, 0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1]])
EMPTY_ROW = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])


def bert(kind: type = hf.BertModel, dropout: float = 0.0, seed: int = 0, **settings) -> nn.Module:
    """A BERT of two layers whose biases are not 0; `settings` go to its config."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(hf.BertConfig(**bert_like(TINY, dropout) | {"num_labels": 2} | settings))
        stir_parameters(model)
    return model.train()


def ids(mask: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, TINY.vocabulary, mask.shape, generator=generator) * (mask != 0)


def pair(model: nn.Module, **options) -> tuple[nn.Module, nn.Module]:
    """The stock model, and an optimised copy."""
    return model, cputrain.optimize(copy.deepcopy(model), **options)


def gradients_of(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor | None]:
    model.zero_grad()
    loss(model).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_close(ours: dict[str, Tensor | None], stock: dict[str, Tensor | None], scale: float = 1e-5) -> None:
    """The same names, None where stock has None, and values as close as two orders of summation are."""
    assert ours.keys() == stock.keys()
    assert [n for n, g in ours.items() if g is None] == [n for n, g in stock.items() if g is None]
    largest = max(float(g.abs().max()) for g in stock.values() if g is not None)
    for name, grad in stock.items():
        if grad is not None:
            torch.testing.assert_close(
                ours[name], grad, rtol=1e-3, atol=scale * largest, msg=lambda m, n=name: f"{n}: {m}"
            )


def what_runs(model: nn.Module, name: str) -> str:
    """The third column of `explain` in the row of the module called `name`, numbers of layers as *."""
    rows = [what for found, _, what in cputrain.explain(model).modules if found == name]
    assert rows, f"{name} is not among {[row[0] for row in cputrain.explain(model).modules]}"
    return " | ".join(rows)


def batch(mask=RIGHT):
    return {
        "input_ids": ids(mask),
        "attention_mask": mask,
        "labels": (ids(mask, seed=1) % 2).masked_fill(mask == 0, -100),
    }


def loss(model):
    """Token classification, labels of -100 at padding: the same loss with padding and without."""
    return model(**batch()).loss


def token_bert(**settings):
    return bert(hf.BertForTokenClassification, **settings)


FULL = torch.ones(3, 7, dtype=torch.long)


def span_batch(mask=FULL, seed=0):
    start = mask.argmax(1)
    return {"input_ids": ids(mask, seed), "attention_mask": mask, "start_positions": start, "end_positions": start}
