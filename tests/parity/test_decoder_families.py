"""Every family of decoders, tiny: gradients against float64, padding, holes, packed rows, checkpoints, generation.

A case is a family with widths that are square (q as wide as the model) or not. CI runs a selection that changes with
the code's version; `CPUTRAIN_SOAK=1` (`make soak`) runs all of them.
"""

from __future__ import annotations

import copy
import os
import random
import warnings
from typing import Any

import pytest
import torch
import transformers as hf

import cputrain
from tests.model_zoo import stir_parameters
from tests.parity import releases
from tests.parity.gradients import assert_as_exact_as_stock, distance, gradients
from tests.parity.small import HOLES, LEFT, RIGHT, ids

if not releases.ASKS_MASKS_AT_ONCE:
    pytest.skip("families are compared with transformers 5", allow_module_level=True)

# What configurations call the sizes; each gets those that it knows.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **{"num_key_value_heads": 2, "vocab_size": 99, "rotary_dim": 4, "layer_types": None},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2},
}
NOT_SQUARE = {"head_dim": 16}  # q is twice as wide as the model, where a configuration can say that
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 3},
    "gemma": {},
    "gemma2": {"sliding_window": 3},
    "gemma3_text": {"sliding_window": 3},
    "phi": {},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "smollm3": {},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "gpt2": {},
    "gpt_neox": {},
    "gptj": {},
    "falcon": {},
    "bloom": {},
    "opt": {},
    "starcoder2": {},
    "stablelm": {},
    "cohere": {"logit_scale": 0.25},
    "lfm2": {},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
}
CHOSEN = 4  # of a run of CI


def _cases() -> list[tuple[str, bool]]:
    """Not square only where a configuration can say so."""
    known = {name: vars(hf.CONFIG_MAPPING[name]()) for name in FAMILIES if name in hf.CONFIG_MAPPING}
    return [(name, square) for name, has in known.items() for square in (True, False) if square or "head_dim" in has]


CASES = _cases()


def _selection() -> list[tuple[str, bool]]:
    if os.environ.get("CPUTRAIN_SOAK"):
        return CASES
    return random.Random(f"{cputrain.__version__} {hf.__version__}").sample(CASES, CHOSEN)


def _id(case: tuple[str, bool]) -> str:
    return f"{case[0]}-{'square' if case[1] else 'not square'}"


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Tiny layers must be ours, too."""
    monkeypatch.setattr("cputrain.blocks.leaves.WORTHWHILE", 0)
    monkeypatch.setattr("cputrain.blocks.leaves.WORTHWHILE_PRODUCT", 0)
    monkeypatch.setattr("cputrain.blocks.head.FEWEST_BYTES", 0)


def decoder(name: str, square: bool) -> torch.nn.Module:
    kind = hf.CONFIG_MAPPING[name]
    known = vars(kind())
    sizes = SIZES | ({"head_dim": 8} if square else NOT_SQUARE)
    config = kind(**{key: value for key, value in sizes.items() if key in known} | FAMILIES[name])
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    # Torch's grouped product of experts knows no float64.
    experts = {"experts_implementation": "eager"} if "num_experts_per_tok" in known else {}
    model = hf.AutoModelForCausalLM.from_config(config, **experts)
    stir_parameters(model)
    return model.train()


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    """Right and left padding, holes, packed rows; a word of each row has no label."""
    if kind == "packed":
        positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0, 1, 2]])
        tokens = ids(torch.ones_like(positions)) % 99
        return {"input_ids": tokens, "position_ids": positions, "labels": tokens.masked_fill(positions == 0, -100)}
    mask = {"right": RIGHT, "left": LEFT, "holes": HOLES, "full": torch.ones_like(RIGHT)}[kind]
    tokens = ids(mask) % 99
    labels = tokens.masked_fill(mask == 0, -100)
    labels[:, 1:].masked_fill_(mask[:, :-1] == 0, -100)  # what padding predicts is anything, in stock NaN under windows
    labels[:, 3] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _loss(batch):
    return lambda model: model(**batch, use_cache=False).loss


def _trained(model, loss, dtype):
    ours = cputrain.optimize(copy.deepcopy(model), dtype=dtype)
    return gradients(ours, loss)


@pytest.mark.parametrize("case", _selection(), ids=_id)
@pytest.mark.parametrize("kind", ["full", "right", "left", "holes", "packed"])
def test_gradients(case, kind):
    model, loss = decoder(*case), _loss(batch_of(kind))
    stock, exact = gradients(copy.deepcopy(model), loss), gradients(copy.deepcopy(model).double(), loss)
    if any(grad.isnan().any() for grad in exact.values()):
        pytest.skip("stock's own gradients are NaN: a window hides all keys of a token")
    assert_as_exact_as_stock(_trained(model, loss, "fp32"), stock, exact)

    def in_bf16(m):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(m)

    bf16 = gradients(copy.deepcopy(model), in_bf16)
    assert distance(_trained(model, loss, "int16"), exact) <= distance(bf16, exact) / 4


@pytest.mark.parametrize("case", _selection(), ids=_id)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing_changes_nothing(case, reentrant):
    model, loss = decoder(*case), _loss(batch_of("right"))
    expected = _trained(model, loss, "int16")
    ours = cputrain.optimize(model, dtype="int16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has a new name in transformers 5.23
        ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        ours.enable_input_require_grads()
    found = gradients(ours, loss)
    assert distance(found, expected) < 1e-4


@pytest.mark.parametrize("case", _selection(), ids=_id)
def test_generation_is_stocks_before_during_and_after_training(case):
    model, batch = decoder(*case), batch_of("left")
    ours = cputrain.optimize(copy.deepcopy(model), dtype="fp32")
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    for _ in range(2):
        assert torch.equal(*(m.generate(**given, **options) for m in (ours, model)))
        for m in (ours, model):
            m.train()
            m(**batch).loss.backward()
            with torch.no_grad():
                for parameter in m.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.01 * parameter.grad.sign()
            m.zero_grad()
        ours.load_state_dict(model.state_dict())  # of the same words after the step, too
    cputrain.restore(ours)
    assert torch.equal(*(m.generate(**given, **options) for m in (ours, model)))
