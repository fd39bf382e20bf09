"""Models that come in bf16 or fp16: against float64, through steps, checkpoints and `restore`."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

import cputrain
from cputrain.blocks import head
from cputrain.blocks.lazy_logits import LazyLogits
from tests.parity import releases
from tests.parity.gradients import with_loss, worst
from tests.parity.small import what_runs

if not releases.SERVES_HALF_PRECISION:
    pytest.skip("half precision is served from transformers 5 on", allow_module_level=True)

SIZES = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
IDS = torch.randint(0, 300, (2, 96), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(96) < torch.tensor([[96], [60]])).long()
BATCH = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100), "use_cache": False}
OFF = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
KINDS = {
    "Llama": SIZES | HEADS,
    "Qwen3": SIZES | HEADS | {"head_dim": 32, "tie_word_embeddings": True},
    "Gemma3Text": SIZES | HEADS | {"head_dim": 32},
    "GPT2": {"vocab_size": 300, "n_embd": 256, "n_head": 8, "n_layer": 2} | OFF,
}


def loaded(kind: str = "Llama", dtype: torch.dtype = torch.bfloat16, lora: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(hf, f"{kind}Config")(**KINDS[kind])
    model = hf.AutoModelForCausalLM.from_config(config).to(dtype).train()
    if lora:
        settings = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, settings).train()
    return model


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return with_loss(model, BATCH)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("format", "most"), [("fp32", 1e-5), ("int16", 3e-3)])
def test_gradients_are_those_of_fp32(kind, lora, format, most, monkeypatch):
    monkeypatch.setattr(head, "FEWEST_BYTES", 0)  # lazy logits, too
    ours = loaded(kind, lora=lora)
    exact = copy.deepcopy(ours).double()
    ours = cputrain.optimize(ours, dtype=format)
    assert worst(gradients(ours), gradients(exact)) < most
    assert not any("as stock in its last" in row[2] or "unpacks" in row[2] for row in cputrain.explain(ours).modules)


ADDING = {
    "tokens": peft.TrainableTokensConfig(token_indices=[1, 5, 7]),
    "tokens beside LoRA": peft.LoraConfig(r=4, target_modules="all-linear", trainable_token_indices=[1, 5]),
    "Shira": peft.ShiraConfig(target_modules=["q_proj", "up_proj"], init_weights=False),
}


@pytest.mark.parametrize("adapter", ADDING)
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])  # Qwen3's head is its embedding
def test_adapters_that_add_to_a_frozen_weight(kind, adapter):
    torch.manual_seed(1)
    ours = peft.get_peft_model(loaded(kind), copy.deepcopy(ADDING[adapter])).train()
    exact = copy.deepcopy(ours).double()
    dtypes = {name: p.dtype for name, p in ours.named_parameters()}
    cputrain.optimize(ours, dtype="fp32")
    assert worst(gradients(ours), gradients(exact)) < 1e-5
    assert dtypes == {name: p.dtype for name, p in cputrain.restore(ours).named_parameters()}


def test_fp16_whose_gradients_would_vanish():
    """The loss is a mean of so many that fp16 has no numbers for the gradients of a layer's output."""
    for lora in (False, True):
        ours = loaded(dtype=torch.float16, lora=lora)
        exact = copy.deepcopy(ours).double()
        assert worst(gradients(cputrain.optimize(ours, dtype="fp32")), gradients(exact)) < 1e-5


@pytest.mark.parametrize("lora", [False, True])
def test_results_keep_the_dtype(lora, monkeypatch):
    stock = loaded(lora=lora)
    ours = cputrain.optimize(copy.deepcopy(stock), dtype="fp32")
    for model in (ours, ours.get_base_model() if lora else ours):
        out, expected = model(**BATCH, output_hidden_states=True), stock(**BATCH, output_hidden_states=True)
        assert out.loss.dtype == expected.loss.dtype == torch.float32
        assert out.logits.dtype == torch.bfloat16
        assert all(state.dtype == torch.bfloat16 for state in out.hidden_states)
    inner = (ours.get_base_model() if lora else ours).model
    assert inner(IDS).last_hidden_state.dtype == torch.bfloat16
    embedded = inner.embed_tokens(IDS).bfloat16()
    assert inner(inputs_embeds=embedded).last_hidden_state.dtype == torch.bfloat16
    monkeypatch.setattr(head, "FEWEST_BYTES", 0)
    logits = ours(IDS).logits
    assert isinstance(logits, LazyLogits) and logits.is_lazy and logits.dtype == torch.bfloat16
    loss = F.cross_entropy(logits.float().view(-1, 300), IDS.view(-1))
    exact = F.cross_entropy(copy.deepcopy(stock).double()(IDS).logits.view(-1, 300), IDS.view(-1))
    assert logits.is_lazy and abs(loss.item() / exact.item() - 1) < 1e-6
    torch.testing.assert_close(logits + 0, stock(IDS).logits, rtol=0.1, atol=0.02)


def test_an_optimizer_and_its_moments_go_along():
    model = loaded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gradients(model)
    optimizer.step()  # stock, in bf16
    gradients(model)
    before = {name: id(p) for name, p in model.named_parameters()}
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    cputrain.optimize(model, optimizer, dtype="fp32")
    assert before == {name: id(p) for name, p in model.named_parameters()}
    for parameter, moment in zip(model.parameters(), moments, strict=True):
        state = optimizer.state[parameter]
        assert parameter.dtype == parameter.grad.dtype == state["exp_avg_sq"].dtype == torch.float32
        assert torch.equal(state["exp_avg"], moment.float())
    cputrain.optimize(model, optimizer, dtype="int16")  # once more: nothing is rounded on the way
    optimizer.step()
    kept = [p.detach().clone() for p in model.parameters()]
    assert any(not torch.equal(p, p.bfloat16().float()) for p in kept)
    cputrain.restore(model)
    for parameter, value in zip(model.parameters(), kept, strict=True):
        assert torch.equal(parameter, value.bfloat16()) and parameter.grad.dtype == torch.bfloat16
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.bfloat16
    gradients(model)
    optimizer.step()  # stock goes on


def test_a_checkpoint_is_that_of_fp32_and_resumes_exactly(tmp_path):
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
        for _ in range(steps):
            loss = gradients(model)["loss"]
            optimizer.step()
        return loss.item()

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = loaded()
        return cputrain.optimize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), dtype="fp32")

    model, optimizer = made()
    train(model, optimizer, 2)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "both.pt")
    model.save_pretrained(tmp_path / "model")
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.float32
    expected = train(model, optimizer, 2)
    again, its_optimizer = made()
    weights, moments = torch.load(tmp_path / "both.pt")
    again.load_state_dict(weights)
    its_optimizer.load_state_dict(moments)
    assert train(again, its_optimizer, 2) == expected


def test_frozen_matrices_are_not_copied():
    model = loaded(lora=True)
    places = {n: p.data_ptr() for n, p in model.named_parameters() if not p.requires_grad and p.dim() > 1}
    cputrain.optimize(model, dtype="int16")
    gradients(model)
    assert places == {n: p.data_ptr() for n, p in model.named_parameters() if n in places}
    assert all(p.dtype == torch.bfloat16 for n, p in model.named_parameters() if n in places)
    row = next(row for row in cputrain.explain(model).facts if row[0] == "parameters")
    assert row[1] == "bfloat16" and "16 frozen matrices stay" in row[2]


def test_checkpointing_and_a_copy():
    plain, checked = (cputrain.optimize(loaded(lora=True), dtype="fp32") for _ in range(2))
    checked.gradient_checkpointing_enable({"use_reentrant": False})
    checked.enable_input_require_grads()
    expected = gradients(plain)
    assert worst(gradients(checked), expected) < 1e-6
    assert worst(gradients(copy.deepcopy(plain)), expected) < 1e-6


@pytest.mark.parametrize("kind", ["an encoder", "no transformer"])
def test_other_models(kind):
    torch.manual_seed(0)
    if kind == "an encoder":
        config = hf.BertConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        model = hf.BertModel(config).to(torch.bfloat16)
        model.requires_grad_(False).encoder.layer[1].requires_grad_(True)
        given = {"input_ids": IDS, "attention_mask": MASK}
    else:
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64)).bfloat16()
        model[3].requires_grad_(False)
        given = {"input": torch.randn(512, 64).bfloat16()}
    exact = copy.deepcopy(model).double()
    ours = cputrain.optimize(model, dtype="fp32")
    results = []
    for side in (ours, exact):
        out = side(**({n: x.double() if x.is_floating_point() and side is exact else x for n, x in given.items()}))
        out = out if isinstance(out, torch.Tensor) else out.last_hidden_state * MASK[..., None]
        (out * torch.linspace(-1, 1, out.shape[-1])).sin().sum().backward()
        grads = {n: p.grad.double() for n, p in side.named_parameters() if p.grad is not None}
        results.append({n: grad for n, grad in grads.items() if not n.endswith("key.bias")})  # 0 but for rounding
    assert worst(*results) < 6e-3  # the result is bf16


def test_models_whose_code_multiplies_by_itself_are_left_as_they_are():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.matrix = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) @ self.matrix

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.first.weight + self.first.bias

    for kind, reason in ((Own, "multiplied by its own code"), (Reads, "reads weights of its parts by itself")):
        model = kind().bfloat16().requires_grad_(False)
        model.first.bias.requires_grad_(True)
        x = torch.randn(128, 64).bfloat16()
        expected = model(x)
        cputrain.optimize(model, dtype="int16")
        assert torch.equal(model(x), expected) and model.first.bias.dtype == torch.bfloat16
        assert reason in str(cputrain.explain(model))


def test_a_weight_that_is_unfrozen_later_is_trained():
    ours = cputrain.optimize(loaded(lora=True), dtype="int16")
    ours.get_output_embeddings().weight.requires_grad_(True)
    layer = ours.base_model.model.model.layers[0].self_attn.q_proj.base_layer
    layer.weight.requires_grad_(True)
    found = gradients(ours)
    assert found["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"].norm() > 0
    assert "a base layer is trained" in what_runs(ours, "base_model.model.model.layers.*.self_attn.q_proj")
