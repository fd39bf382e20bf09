"""TRL's function and ours give the same values and gradients, and ours leaves when it is undone."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import cputrain

kernels = pytest.importorskip("trl.kernels", reason="TRL isn't installed")
from trl.trainer import utils  # noqa: E402

from cputrain.blocks import fused_lm_head  # noqa: E402

FIELDS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=99, **sizes)).train()


@pytest.fixture(scope="module")
def head():
    model = cputrain.optimize(llama(), dtype="fp32")
    yield model.lm_head


def both(head, *options, frozen: bool = False, entropies: bool = True) -> list[list]:
    found = []
    for function in (fused_lm_head.LogProbs, kernels.ChunkedLogProbFunction):
        torch.manual_seed(4)
        x, targets = torch.randn(11, 32).requires_grad_(), torch.randint(99, (11,))
        head.weight.requires_grad_(not frozen)
        head.weight.grad = None
        values = function.apply(x, head.weight, None, targets, *options)
        total = (values[0] * torch.rand(11)).sum()
        if entropies and values[1] is not None:
            total = total + values[1].sin().sum()
        total.backward()
        found.append([*values, x.grad, head.weight.grad])
    return found


@pytest.mark.parametrize("options", [(1.0, 32, None, 1.0), (0.7, 40, None, 0.25), (1.3, 200, 5.0, 2.0)])
@pytest.mark.parametrize("outputs", [(), ("entropy", "is_top1"), FIELDS])
@pytest.mark.parametrize("frozen", [False, True])
def test_values_and_gradients(head, options, outputs, frozen):
    ours, trls = both(head, *options, ("log_probs", *outputs), frozen=frozen)
    for one, other in zip(ours, trls, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def fused(model, labels: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    ids = torch.arange(14).view(2, 7) % 99 + 3
    found = model(input_ids=ids, attention_mask=MASK, labels=labels, fused_lm_head=True)
    (found.loss + found.entropy.mean()).backward()
    return [found.loss, found.log_probs, found.entropy, found.is_top1, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("optimized_first", [True, False])
def test_the_forward_that_trl_puts_on_a_model(optimized_first, monkeypatch):
    """Labels at some positions, and at none."""
    models = [llama(), llama()]
    for model in models:
        is_ours = model is models[0]
        if is_ours and optimized_first:
            cputrain.optimize(model, dtype="fp32")
        utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        if is_ours and not optimized_first:
            cputrain.optimize(model, dtype="fp32")
    rows, described = [], fused_lm_head.described_tokens
    monkeypatch.setattr(
        fused_lm_head, "described_tokens", lambda x, *a, **k: (rows.append(len(x)), described(x, *a, **k))[1]
    )
    labels = torch.full((2, 7), -100)
    labels[0, 3:], labels[1, 2] = torch.arange(4), 5
    for given in (labels, torch.full((2, 7), -100)):
        for one, other in zip(*(fused(model, given) for model in models), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert rows == [5, 0]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_model_in_half_precision(frozen, monkeypatch):
    """Its head stays in two bytes if it is frozen, and hidden states come in bf16."""
    monkeypatch.setattr(kernels.ChunkedLogProbFunction, "apply", lambda *_: pytest.fail("TRL computes it itself"))
    labels = torch.arange(14).view(2, 7)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        model = llama().bfloat16().to(dtype)
        model.lm_head.requires_grad_(not frozen)
        if dtype is torch.bfloat16:
            cputrain.optimize(model, dtype="fp32")
            utils.add_fused_lm_head(model, outputs=("log_probs",))
            out = model(input_ids=labels + 3, labels=labels, fused_lm_head=True)
        else:
            out = model(input_ids=labels + 3, labels=labels)
        out.loss.backward()
        found.append([out.loss.detach().double(), *(p.grad.double() for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        assert ((one - other).norm() / other.norm()).item() < 1e-2  # of the bf16 between body and head


def test_what_ours_does_not_serve_is_trls(caplog):
    x, weight, targets = torch.randn(3, 8), torch.randn(40, 8), torch.tensor([1, 2, 3])
    model = cputrain.optimize(llama(), dtype="fp32")
    found = fused_lm_head.LogProbs.apply(x, weight, None, targets, 1.0, 64)
    for one, other in zip(found, kernels.ChunkedLogProbFunction.apply(x, weight, None, targets, 1.0, 64), strict=True):
        assert torch.equal(one, other)
    cputrain.restore(model)


def test_it_leaves_with_the_last_optimised_model(monkeypatch):
    monkeypatch.setattr(fused_lm_head, "_installed", 0)
    monkeypatch.setattr(fused_lm_head, "_stock", {})
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", kernels.ChunkedLogProbFunction)
    monkeypatch.setattr(utils, "_use_triton", before := lambda device: False)
    for _ in range(2):
        fused_lm_head.install()
    assert utils._ChunkedLogProbFunction is fused_lm_head.LogProbs and utils._use_triton(torch.device("cpu"))
    fused_lm_head.uninstall()
    assert utils._ChunkedLogProbFunction is fused_lm_head.LogProbs
    fused_lm_head.uninstall()
    assert utils._ChunkedLogProbFunction is kernels.ChunkedLogProbFunction and utils._use_triton is before


def test_a_function_that_is_called_otherwise_stays(monkeypatch):
    class Later:
        @staticmethod
        def forward(ctx, hidden, weight, labels): ...

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Later)
    assert not fused_lm_head._is_known(utils)
