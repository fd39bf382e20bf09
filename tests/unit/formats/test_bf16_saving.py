"""What is saved for the backward as bf16: once for two operators, read again, and forgotten with its tensor."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch

from cputrain.formats import FORMATS, Dense, bf16_saving
from cputrain.formats.bf16_saving import as_bf16, as_float, rounded
from cputrain.ops.attention import Sequences
from cputrain.ops.norm import layer_norm, layer_norm_forward
from cputrain.ops.self_attention import self_attention


def test_what_two_operators_save_is_saved_once():
    x = torch.randn(6, 8)
    saved, _ = as_bf16(x)
    assert as_bf16(x.view(2, 3, 8))[0].data_ptr() == saved.data_ptr()
    x.add_(1)  # a change must not go unnoticed
    other = torch.randn(6, 8)
    for y in (x, x.view(3, 16), other, other.t(), other[:3]):
        assert torch.equal(as_bf16(y)[0], y.bfloat16())
        assert torch.equal(as_float(as_bf16(y)), y.bfloat16().float())


@pytest.mark.parametrize("with_weight", [True, False])
def test_a_norms_result_is_saved_as_its_backward_saves_it(isa, threads, with_weight):
    """And read again within what rounding the normalised values costs; products in bf16 get the result itself."""
    for rows, features in ((1, 1), (7, 63), (65, 65), (300, 130)):
        x = torch.randn(rows, features)
        weight, bias = torch.randn(2, features) if with_weight else (None, None)
        out, _, _, normed = layer_norm_forward(x, weight, bias, 1e-5, torch.bfloat16)
        saved = as_bf16(out)
        assert saved[0].data_ptr() == normed.data_ptr()
        size = (out if bias is None else out - bias).abs()
        assert ((as_float(saved) - out).abs() <= size / 256 + 1e-6).all()
        assert torch.equal(as_bf16(out, rounded_only=True)[0], out.bfloat16())
        if weight is not None:  # a copy: the parameter may change or be gone by then
            before = as_float(saved).clone()
            weight.zero_()
            assert torch.equal(as_float(saved), before)


@pytest.mark.parametrize("name", ["fp32", "bf16_saved", "bf16"])
def test_what_is_saved_has_one_form(name):
    """A checkpoint that runs the forward again finds other neighbours, and must find as many tensors, of one kind."""
    out = layer_norm_forward(torch.randn(6, 8), None, None, 1e-5, FORMATS[name].saves)[0]
    weight = Dense(torch.randn(4, 8))
    after_norm, alone = (FORMATS[name]().begin().forward(x, weight, None)[1] for x in (out, out.clone()))
    assert [(t.shape, t.dtype) for t in after_norm] == [(t.shape, t.dtype) for t in alone]


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8), (-1, 8), (1, 6, 8)])
def test_the_next_operator_finds_what_a_norm_saved(shape):
    """In the graph, through whatever shape the code between gives it."""
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    out = layer_norm(x, weight, None, 1e-5, torch.bfloat16)
    (saved,) = (t for t in out.grad_fn.saved_tensors if t.dtype == torch.bfloat16)
    assert as_bf16(out.reshape(shape))[0].data_ptr() == saved.data_ptr()


def test_the_next_operator_finds_what_attention_saved():
    x = torch.randn(6, 8, requires_grad=True)
    weights = [torch.randn(8, 8) for _ in range(3)]
    out = self_attention(
        x, weights, [None] * 3, Sequences.from_lengths([6]), heads=2, scale=0.5, format=FORMATS["bf16"]()
    )
    saved = [t.data_ptr() for t in out.grad_fn.saved_tensors if t.dtype == torch.bfloat16]
    assert as_bf16(out.view(2, 3, 8), rounded_only=True)[0].data_ptr() in saved


def test_nothing_outlives_the_tensor_or_goes_into_a_pickle():
    x = torch.randn(4, 4, requires_grad=True)
    y = (x * 2).contiguous()
    saved, rows = as_bf16(y)
    assert saved.grad_fn is None and rows.grad_fn is None
    assert len(pickle.dumps(y.detach())) < 1000 and not y.__dict__
    count = len(bf16_saving._noted)
    del y
    gc.collect()
    assert len(bf16_saving._noted) == count - 1


@pytest.mark.parametrize("shape", [(1, 1), (7, 63), (65, 65), (300, 130), (0, 8), (3, 0)])
def test_rounded_with_its_bias(isa, threads, shape):
    x, bias = torch.randn(shape), torch.randn(shape[1])
    if x.numel() > 10:
        x.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e-40])
    for given in (None, bias):
        expected = (x if given is None else x + given).bfloat16()
        torch.testing.assert_close(rounded(x, given), expected, rtol=0, atol=0, equal_nan=True)
