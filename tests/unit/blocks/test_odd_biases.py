"""A bias that the kernels can't take makes its layer run as stock: with stock's result, or stock's error."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import cputrain

CONFIG = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LAYER = "encoder.layer.0."
NAMES = [
    "embeddings.LayerNorm.bias",
    LAYER + "attention.self.query.bias",
    LAYER + "attention.self.value.bias",
    LAYER + "attention.output.dense.bias",
    LAYER + "attention.output.LayerNorm.bias",
    LAYER + "intermediate.dense.bias",
    LAYER + "output.dense.bias",
    LAYER + "output.LayerNorm.bias",
]


def replaced(model: nn.Module, name: str, bias: torch.Tensor) -> None:
    module, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module), attribute, nn.Parameter(bias))


def outcome(model: nn.Module) -> list[torch.Tensor] | type[Exception]:
    ids = torch.arange(48).view(2, 24)
    try:
        out = model(ids).last_hidden_state
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    except RuntimeError as error:
        return type(error)
    return [out, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", ["fp32", "int16", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_bias_of_another_type_or_size_is_stocks_affair(name: str, dtype: str) -> None:
    torch.manual_seed(0)
    stock = BertModel(BertConfig(**CONFIG))
    optimised = cputrain.optimize(copy.deepcopy(stock), dtype=dtype)
    size = stock.get_parameter(name).numel()
    for bias in (torch.randn(size).double(), torch.randn(1), torch.randn(size + 1), torch.randn(size - 1)):
        for model in (stock, optimised):
            model.zero_grad()
            replaced(model, name, bias)
        expected, found = outcome(stock), outcome(optimised)
        if isinstance(expected, type):
            assert found is expected
        else:
            bound = 2e-5 if dtype == "fp32" else 2e-2
            for ours, theirs in zip(found, expected, strict=True):
                assert (ours - theirs).norm() <= bound * (theirs.norm() + 1)  # a bias of keys has no gradient but noise
