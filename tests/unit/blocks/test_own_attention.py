"""Self-attention outside transformers' registry, as BERT's before transformers 5: recognised by what it computes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cputrain
from cputrain.blocks.masks import hides_nothing, padding_of
from cputrain.padding import PaddingMask

LOWEST = torch.finfo(torch.float32).min
REAL = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0]]).bool()
HIDDEN = 16


def mask_of(real, queries=None):
    mask = torch.where(real, 0.0, LOWEST)[:, None, None, :]
    return mask if queries is None else mask.expand(-1, 1, queries, -1).contiguous()


class Attention(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.attention_head_size, self.dropout = 8, nn.Dropout(rate)

    def heads(self, x):
        return [part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.query, self.key, self.value)]

    def forward(self, hidden_states, attention_mask=None, head_mask=None, output_attentions=False):
        q, k, v = self.heads(self.prepared(hidden_states))
        scores = q @ k.mT / math.sqrt(8)
        weights = self.dropout((scores if attention_mask is None else scores + attention_mask).softmax(-1))
        weights = weights if head_mask is None else weights * head_mask
        return self.finished((weights @ v).transpose(1, 2).flatten(2), weights, attention_mask)

    def prepared(self, hidden_states):
        return hidden_states

    def finished(self, out, weights, attention_mask):
        return out, weights


class Fused(Attention):
    """Keeps its rate in a number, beside a dropout layer that it never calls, as stock's classes for SDPA."""

    def __init__(self, rate=0.0):
        super().__init__(rate)
        self.dropout_prob = rate

    def forward(self, hidden_states, attention_mask=None, head_mask=None, output_attentions=False):
        q, k, v = self.heads(hidden_states)
        out = F.scaled_dot_product_attention(q, k, v, attention_mask, self.dropout_prob if self.training else 0.0)
        return (out.transpose(1, 2).flatten(2),)


class Layer(nn.Module):
    def __init__(self, kind, rate):
        super().__init__()
        self.attention, self.norm, self.dense = kind(rate), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, mask, head_mask):
        return self.norm(x + self.dense(self.attention(x, mask, head_mask)[0]))


class Encoder(nn.Module):
    def __init__(self, kind=Attention, rate=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(kind, rate) for _ in range(2)])

    def forward(self, hidden_states, attention_mask=None, head_mask=None):
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask, head_mask)
        return hidden_states


def what_runs(model):
    return " | ".join(f"{name}: {what}" for name, _, what in cputrain.explain(model).modules)


def both(kind=Attention):
    stock = Encoder(kind)
    return stock, cputrain.optimize(copy.deepcopy(stock))


def assert_same_at_real_tokens(stock, ours, mask, **options):
    x = torch.randn(3, 6, HIDDEN)
    found, expected = (model(x, mask, **options) for model in (ours, stock))
    torch.testing.assert_close(found[REAL], expected[REAL], rtol=1e-4, atol=1e-5)
    for model, out in ((stock, expected), (ours, found)):
        model.zero_grad()
        out[REAL].square().sum().backward()
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)
    return found


@pytest.mark.parametrize("queries", [None, 6], ids=["one row", "a row for each query"])
@pytest.mark.parametrize("kind", [Attention, Fused])
def test_padding_is_read_from_a_mask_that_is_added(kind, queries):
    stock, ours = both(kind)
    found = assert_same_at_real_tokens(stock, ours, mask_of(REAL, queries))
    assert (found[~REAL] == 0).all()
    assert "layers.*.attention: query, key, value as one product" in what_runs(ours)
    assert "padding dropped" in what_runs(ours) and "stock" not in what_runs(ours).replace("as stock; autocast", "")


def test_a_mask_of_zeros_hides_nothing():
    stock, ours = both()
    x = torch.randn(3, 6, HIDDEN)
    torch.testing.assert_close(ours(x, torch.zeros(3, 1, 1, 6)), stock(x), rtol=1e-4, atol=1e-5)
    assert "in its last call" not in what_runs(ours)


def test_masks_that_are_more_than_padding_stay_stocks():
    window = mask_of(REAL, 6) + torch.full((6, 6), LOWEST / 2).triu(3)
    for mask in (window, mask_of(REAL) / 2, mask_of(REAL).clamp(-1e4), mask_of(REAL, 6).expand(3, 2, 6, 6)):
        stock, ours = both()
        x = torch.randn(3, 6, HIDDEN)
        torch.testing.assert_close(ours(x, mask), stock(x, mask), rtol=1e-4, atol=1e-5)
        assert "its mask is not a plain one" in what_runs(ours) and "the mask is not plain" in what_runs(ours)


@pytest.mark.parametrize("touch", ["hook", "head mask", "another class"])
def test_where_ours_steps_aside_stocks_gets_the_padded_batch(touch):
    stock, ours = both()
    options = {}
    for model in (stock, ours):
        attention = model.layers[0].attention
        if touch == "hook":  # on a part of the module, put there while the encoder has already begun
            model.layers[0].register_forward_pre_hook(
                lambda m, args: m.attention.query.register_forward_hook(lambda *_: None) and None
            )
        elif touch == "head mask":
            options = {"head_mask": torch.tensor([0.5, 2.0])[None, :, None, None]}
        else:
            attention.key.__class__ = type("Doubled", (nn.Linear,), {"forward": lambda s, x: 2 * F.linear(x, s.weight)})
    assert_same_at_real_tokens(stock, ours, mask_of(REAL), **options)


# ---- what looks alike ----------------------------------------------------------------------------------------------


class WithTemperature(Attention):
    def __init__(self, rate=0.0):
        super().__init__(rate)
        self.temperature = nn.Parameter(torch.ones(()))

    def prepared(self, hidden_states):
        return self.temperature * hidden_states


class Causal(Fused):
    def forward(self, hidden_states, attention_mask=None, head_mask=None):
        q, k, v = self.heads(hidden_states)
        rate, causal = self.dropout_prob if self.training else 0.0, attention_mask is None
        out = F.scaled_dot_product_attention(q, k, v, attention_mask, rate, causal)
        return out.transpose(1, 2).flatten(2), None


class MultipliedMask(Attention):
    def finished(self, out, weights, attention_mask):
        return (out if attention_mask is None else out * attention_mask[:, 0, 0, :, None]), None


class NoiseInTraining(Attention):
    def prepared(self, hidden_states):
        return hidden_states + (1e-6 * torch.randn_like(hidden_states) if self.training else 0.0)


class AnotherRate(Fused):
    def forward(self, hidden_states, attention_mask=None, head_mask=None):
        q, k, v = self.heads(hidden_states)
        out = F.scaled_dot_product_attention(q, k, v, attention_mask, self.dropout_prob / 2 if self.training else 0.0)
        return out.transpose(1, 2).flatten(2), None


class WithCache(Attention):
    def finished(self, out, weights, attention_mask):
        return out, weights, (out, out)


LOOK_ALIKES = [WithTemperature, Causal, MultipliedMask, NoiseInTraining, AnotherRate, WithCache]


@pytest.mark.parametrize("kind", LOOK_ALIKES)
def test_attention_that_computes_something_else_is_left_alone(kind):
    ours = cputrain.optimize(Encoder(kind, rate=0.3))
    assert "one product" not in what_runs(ours) and "padding dropped" not in what_runs(ours)


def test_the_rate_is_the_one_that_the_code_reads():
    ours = cputrain.optimize(Encoder(Fused, rate=0.5))
    assert "one product" in what_runs(ours)
    x = torch.randn(3, 6, HIDDEN)
    for layer in ours.layers:
        layer.attention.dropout.p = 0.0
    assert not torch.equal(ours(x), ours(x))
    for layer in ours.layers:
        layer.attention.dropout_prob = 0.0
    assert torch.equal(ours(x), ours(x))


# ---- reading masks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowest", [LOWEST, torch.finfo(torch.bfloat16).min, -torch.inf])
def test_what_a_mask_hides(lowest):
    mask = torch.where(REAL, 0.0, lowest)[:, None, None, :]
    padding = padding_of(mask, 3, 6)
    assert torch.equal(padding.real, REAL) and padding.causal is False and padding.stock is mask
    assert padding_of(torch.zeros(3, 1, 6, 6), 3, 6).real is None


@pytest.mark.parametrize(
    "mask",
    [
        None, REAL, REAL[:, None, None, :], torch.where(REAL, 0.0, LOWEST), mask_of(REAL).requires_grad_(),
        mask_of(REAL)[:2], mask_of(REAL)[..., :5], torch.full((3, 1, 6, 6), LOWEST).triu(1), mask_of(REAL) + torch.nan,
    ],
)  # fmt: skip
def test_masks_that_say_more_or_something_else(mask):
    assert padding_of(mask, 3, 6) is None
    assert not hides_nothing(mask)


@pytest.mark.parametrize("causal", [False, True, None])
def test_ragged_tokens_keep_what_their_mask_hides(causal):
    """GIT's images see each other and its text is causal: None, a mask that only stock's attention can follow."""
    stock, ours = (model.layers[0].attention for model in both())
    x, order = torch.randn(3, 6, HIDDEN), torch.arange(6)
    seen = {False: order[:, None] >= 0, True: order[:, None] >= order, None: (order[:, None] >= order) | (order < 2)}
    mask = torch.where(seen[causal] & REAL[:, None, None, :], 0.0, LOWEST)
    ragged = PaddingMask(3, 6, REAL, causal, lambda: mask).ragged
    torch.testing.assert_close(ours(x[REAL][None], ragged)[0][0], stock(x, mask)[0][REAL], rtol=1e-4, atol=1e-5)
