"""Twins: random weights that cost no memory, no hooks, and a module that is left as it was."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import cputrain
from cputrain.patching.twin import CannotCopy, repeated_layers, short_twins, signature, small_sizes, twin_of


class Layer(nn.Module):
    def __init__(self, number: int, size: int = 8) -> None:
        super().__init__()
        self.layer_idx, self.dense, self.norm = number, nn.Linear(size, size), nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dense(x))


class Stack(nn.Module):
    def __init__(self, *layers: Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_twin_has_other_weights_and_no_hooks() -> None:
    layer = Layer(0)
    layer.dense.register_forward_hook(lambda *call: pytest.fail("a user's hook was called"))
    nn.init.zeros_(layer.dense.weight)
    twin = twin_of(layer)
    assert type(twin) is Layer and twin.dense.weight.any() and not layer.dense.weight.any()
    assert all(bool((p != 0).all()) for p in twin.parameters())
    assert twin(torch.randn(2, 8)).isfinite().all()
    assert len(layer.dense._forward_hooks) == 1


def test_shared_parameters_stay_shared() -> None:
    first, second = Layer(0), Layer(1)
    second.dense.weight = first.dense.weight
    twin = twin_of(Stack(first, second))
    assert twin.layers[0].dense.weight is twin.layers[1].dense.weight


def test_a_large_matrix_costs_little() -> None:
    layer = nn.Linear(1, 1)
    layer.weight = nn.Parameter(torch.empty(1, 1).expand(1 << 17, 1 << 13))  # four gigabytes, if it were contiguous
    weight = twin_of(layer).weight
    assert weight.shape == (1 << 17, 1 << 13) and weight.untyped_storage().nbytes() < 16 << 20
    assert len(set(weight[:, 0][:1000].tolist())) > 500


def test_what_would_bring_along_other_modules_is_not_copied() -> None:
    layer = Layer(0)
    layer.__dict__["owner"] = [Stack(Layer(1))]
    with pytest.raises(CannotCopy, match="owner"):
        twin_of(layer)


def test_layers_that_are_alike_are_left_out() -> None:
    layers = [Layer(0), Layer(1), Layer(2), Layer(3)]
    assert signature(layers[0]) == signature(layers[3]) != signature(Layer(0, 9))
    stack = Stack(*layers)
    assert repeated_layers(stack) == {layers[2], layers[3]}
    assert [len(twin.layers) for _, twin in short_twins(stack, stack)] == [2, 4]
    layers[2].norm.eps = 1e-3
    assert repeated_layers(stack) == {layers[3]}
    assert len(stack.layers) == 4


def test_small_sizes_keep_their_order() -> None:
    module = nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 100), nn.Linear(100, 16))
    sizes = small_sizes(module)
    assert sizes.keys() == {512, 2048, 100} and sizes[100] < sizes[512] < sizes[2048] < 100
    twin = twin_of(module, sizes=sizes)
    assert twin(torch.randn(3, sizes[512])).shape == (3, 16)
    assert (twin[0].in_features, twin[0].out_features) == (sizes[512], sizes[2048])


def test_no_twin_outlives_optimize():
    """An autograd graph that is never run backwards, and saved by hooks, kept itself and its twin."""
    model = hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=50, bos_token_id=1, eos_token_id=2)
    )
    cputrain.optimize(copy.deepcopy(model), dtype="fp32")  # what is made once stays
    gc.collect()
    before = sum(isinstance(found, nn.Parameter) for found in gc.get_objects())
    cputrain.optimize(model, dtype="fp32")
    assert sum(isinstance(found, nn.Parameter) for found in gc.get_objects()) == before


def test_layers_with_adapters_are_alike():
    """Else a stack would be asked with all its layers, and the gradients of all their weights."""
    import peft

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=4))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1))
    stack = adapted.base_model.model.model
    assert repeated_layers(stack) == set(stack.layers[2:])
    stack.layers[3].mlp.up_proj.scaling["default"] = 7.0
    assert repeated_layers(stack) == {stack.layers[4]}
