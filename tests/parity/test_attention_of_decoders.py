"""Windows, packed sequences, soft caps and sinks in whole models: our attention runs, and gives stock's gradients."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers as hf

import cputrain
from cputrain.blocks import attention_registry
from cputrain.padding import PaddingMask
from tests.model_zoo import stir_parameters
from tests.parity import releases
from tests.parity.small import HOLES, LEFT, RIGHT, assert_close, gradients_of, ids, pair
from tests.parity.test_other_models import SMALL

if not releases.ASKS_MASKS_AT_ONCE:
    pytest.skip("windows and packed sequences are served from transformers 5 on", allow_module_level=True)

FULL = torch.ones_like(RIGHT)
PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 0, 1]])
WINDOWS = ["mistral", "gemma3_text", "qwen2", "starcoder2"]


def make(name, **settings):
    releases.needs_model(name)
    kind = hf.CONFIG_MAPPING[name]
    known = {key: value for key, value in SMALL.items() if hasattr(kind(), key)}
    if "use_sliding_window" in vars(kind()):
        settings |= {"use_sliding_window": True, "max_window_layers": 1}
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(kind(**known | settings))
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        if isinstance(getattr(part, "attention_dropout", None), float):
            part.attention_dropout = 0.0
    stir_parameters(model)
    return model.train()


def loss_of(mask=None, **given):
    given = {"input_ids": ids(torch.ones_like(PACKED)) if mask is None else ids(mask), **given}

    def loss(model):
        out = model(**given, attention_mask=mask, use_cache=False).last_hidden_state
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        return (out * weights * (1 if mask is None else mask[..., None])).sum()

    return loss


def attentions_of_stock(monkeypatch):
    """Records each call of stock's attention that ours makes, but for questions of five tokens what it computes."""
    calls, find = [], attention_registry._stock_function

    def noted(module, stock):
        def function(module, query, *args, **kwargs):
            calls.extend([type(module).__name__] * (query.shape[2] != 5))
            return find(module, stock)(module, query, *args, **kwargs)

        return function

    monkeypatch.setattr(attention_registry, "_stock_function", noted)
    return calls


def assert_ours_alone(monkeypatch, model, loss):
    """The gradients of stock, without its attention and without its mask."""
    stock, ours = pair(model)
    expected = gradients_of(stock, loss)
    with monkeypatch.context() as patch:
        calls = attentions_of_stock(patch)
        patch.setattr(PaddingMask, "stock", property(lambda self: pytest.fail("stock's mask was made")))
        assert_close(gradients_of(ours, loss), expected)
    assert not calls


@pytest.mark.parametrize("mask", [FULL, LEFT, RIGHT], ids=["full", "left", "right"])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(monkeypatch, name, mask):
    assert_ours_alone(monkeypatch, make(name, sliding_window=3), loss_of(mask))


def test_windows_of_both_sides(monkeypatch):
    model = make("modernbert", local_attention=4, global_attn_every_n_layers=2)
    assert_ours_alone(monkeypatch, model, loss_of(LEFT))


def test_windows_over_holes_are_stocks():
    stock, ours = pair(make("mistral", sliding_window=3))
    assert_close(gradients_of(ours, loss_of(HOLES)), gradients_of(stock, loss_of(HOLES)))
    assert "rows have holes" in str(cputrain.explain(ours))


@pytest.mark.parametrize("extra", [{}, {"cu_seq_lens_q": None, "seq_idx": None}], ids=["positions", "lengths"])
@pytest.mark.parametrize("name", [*WINDOWS, "llama", "qwen3"])
def test_packed_sequences(monkeypatch, name, extra):
    """Where transformers tells sequences apart by their positions, with what its collator hands over beside them."""
    if extra:
        lengths = torch.tensor([0, 5, 11, 14, 15, 17], dtype=torch.int32)
        numbers = torch.arange(5, dtype=torch.int32).repeat_interleave(lengths.diff())[None]
        extra = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), lengths) | {"seq_idx": numbers}
        extra |= {"max_length_q": 6, "max_length_k": 6}
    settings = {"sliding_window": 3} if name in WINDOWS else {}
    assert_ours_alone(monkeypatch, make(name, **settings), loss_of(position_ids=PACKED, **extra))


def test_positions_beside_a_mask_pack_nothing():
    """Stock looks at positions only where there is no mask: a guess from the positions would be another model."""
    stock, ours = pair(make("llama"))
    mask = torch.ones_like(PACKED)
    loss = loss_of(mask, position_ids=PACKED)
    expected = gradients_of(stock, loss)
    assert_close(gradients_of(ours, loss), expected)
    with pytest.raises(AssertionError):
        assert_close(gradients_of(ours, loss_of(position_ids=PACKED)), expected)


@pytest.mark.parametrize("mask", [FULL, LEFT, RIGHT], ids=["full", "left", "right"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_soft_caps_and_sinks(monkeypatch, name, mask):
    model = make(name, sliding_window=3)
    if name == "gemma2":
        model.config.attn_logit_softcapping = 1.5
        for layer in model.layers:
            layer.self_attn.attn_logit_softcapping = 1.5
            layer.self_attn.scaling = 2.0  # scores beyond the cap
    assert_ours_alone(monkeypatch, model, loss_of(mask))


def test_a_cap_that_is_another_formula_is_stocks(monkeypatch):
    """The same name in other code: ours is compared with it before it is used."""
    model = make("gemma2")
    module = sys.modules[type(model).__module__]
    stocks = module.eager_attention_forward

    def halved(*args, softcap=None, **kwargs):
        return stocks(*args, softcap=softcap / 2, **kwargs)

    monkeypatch.setattr(module, "eager_attention_forward", halved)
    stock, ours = pair(model)
    calls = attentions_of_stock(monkeypatch)
    assert_close(gradients_of(ours, loss_of(RIGHT)), gradients_of(stock, loss_of(RIGHT)))
    assert calls and "another formula" in str(cputrain.explain(ours))
