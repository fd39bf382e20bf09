"""Query, key, value and attention as one operator, against the same in PyTorch."""

from __future__ import annotations

import pytest
import torch
from accuracy import assert_as_accurate

from cputrain.formats import FORMATS
from cputrain.ops.attention import Sequences
from cputrain.ops.self_attention import plain, self_attention


def _inputs(tokens, width, out, biased):
    x, weights = torch.randn(tokens, width), [torch.randn(out, width) * 0.3 for _ in range(3)]
    return x, weights, [torch.randn(out) if biased else None for _ in range(3)]


def _run(function, inputs, grad, dtype, *args, **options):
    x, weights, biases = inputs
    leaves = [x, *weights, *(b for b in biases if b is not None)]
    leaves = [t.detach().clone().to(dtype).requires_grad_() for t in leaves]
    biases = leaves[4:] or biases
    out = function(leaves[0], leaves[1:4], biases, *args, **options)
    out.backward(grad.to(dtype))
    return [out.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("lengths", [[1, 2], [7, 0, 63], [65, 130, 5]])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_equals_plain_twin(isa, threads, lengths, biased, causal):
    sequences = Sequences.from_lengths(lengths)
    inputs, grad = _inputs(sequences.total, 30, 36, biased), torch.randn(sequences.total, 36)
    options = {"heads": 3, "scale": 0.25, "causal": causal}
    ours, stock, exact = (
        _run(f, inputs, grad, dtype, sequences, **options)
        for f, dtype in ((self_attention, torch.float32), (plain, torch.float32), (plain, torch.float64))
    )
    # The gradient of the key's bias is zero in exact arithmetic: compared on the scale of the others.
    names = ["out", "x", "query", "key", "value", *(["query bias", "key bias", "value bias"] if biased else [])]
    if biased:
        for results in (ours, stock, exact):
            del results[6]
        names.remove("key bias")
    assert_as_accurate(ours, stock, exact, names, floor=2e-6)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["fp32", "int16"])
def test_hidden_keys(isa, threads, batch, name):
    """One row of -inf for each sequence, or one for all; a sequence whose keys are all hidden gives 0."""
    sequences = Sequences.dense(3, 21)
    key_bias = torch.zeros(batch, 1, 1, 21)
    key_bias[0, ..., 5:] = -torch.inf
    key_bias[-1, ..., :2] = -torch.inf
    if batch == 3:
        key_bias[1] = -torch.inf
    inputs, grad = _inputs(63, 30, 36, True), torch.randn(63, 36)
    options = {"heads": 3, "scale": 0.25, "key_bias": key_bias}
    ours = _run(self_attention, inputs, grad, torch.float32, sequences, **options, format=FORMATS[name]())
    exact = _run(plain, inputs, grad, torch.float64, sequences, **options)
    for a, b in zip(ours, exact, strict=True):
        scale = 1e-5 if name == "fp32" else 1e-2
        torch.testing.assert_close(a.double(), b, rtol=0, atol=scale * max(b.abs().max().item(), 1))
    if batch == 3:
        assert not ours[0][21:42].any()


def test_dropout_is_that_of_its_key(isa, monkeypatch):
    from cputrain.ops import self_attention as module

    monkeypatch.setattr(module, "draw_key", lambda: 1234)
    sequences = Sequences.from_lengths([40, 9])
    inputs, grad = _inputs(49, 30, 36, True), torch.randn(49, 36)
    ours = _run(self_attention, inputs, grad, torch.float32, sequences, heads=3, scale=0.25, p=0.3)
    twin = _run(plain, inputs, grad, torch.float32, sequences, heads=3, scale=0.25, p=0.3, key=1234)
    for a, b in zip(ours, twin, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "forward", "backward"), [
    ("int16", 1e-3, 2e-3), ("bf16_saved", 5e-3, 1e-2), ("bf16", 2e-2, 3e-2),
])  # fmt: skip
def test_low_precision(isa, kind, forward, backward):
    sequences = Sequences.from_lengths([65, 33])
    inputs, grad = _inputs(98, 64, 64, True), torch.randn(98, 64)
    exact = _run(plain, inputs, grad, torch.float64, sequences, heads=4, scale=0.1)
    ours = _run(self_attention, inputs, grad, torch.float32, sequences, heads=4, scale=0.1, format=FORMATS[kind]())
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(ours, exact, strict=True)]
    del errors[6]  # the key's bias
    assert errors[0] < forward and max(errors[1:]) < backward


def test_bf16_gradients_are_those_of_what_the_forward_computed(isa):
    """With scores this sharp, probabilities from rounded scores and an exact log-sum-exp would not add up to one."""
    sequences = Sequences.from_lengths([65, 33])
    inputs, grad = _inputs(98, 64, 64, True), torch.randn(98, 64)
    exact = _run(plain, inputs, grad, torch.float64, sequences, heads=4, scale=2.0)
    ours = _run(self_attention, inputs, grad, torch.float32, sequences, heads=4, scale=2.0, format=FORMATS["bf16"]())
    of_value_bias = 7  # sums of whole rows of probabilities
    torch.testing.assert_close(ours[of_value_bias], exact[of_value_bias].float(), rtol=1e-4, atol=1e-4)


def test_two_calls_do_not_disturb_each_other():
    """What is passing lies in one workspace: what is kept must not."""
    sequences, format = Sequences.from_lengths([20]), FORMATS["bf16_saved"]()
    inputs, other = _inputs(20, 24, 24, True), _inputs(20, 24, 24, True)
    grad, options = torch.randn(20, 24), {"heads": 2, "scale": 0.3, "format": format}
    alone = _run(self_attention, inputs, grad, torch.float32, sequences, **options)
    x = inputs[0].clone().requires_grad_()
    out = self_attention(x, inputs[1], inputs[2], sequences, **options)
    self_attention(other[0], other[1], other[2], sequences, **options)
    out.backward(grad)
    assert torch.equal(out, alone[0]) and torch.equal(x.grad, alone[1])
