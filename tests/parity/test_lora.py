"""LoRA by peft: gradients against float64, and everything that peft does to a layer between two calls."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import transformers as hf
from torch import nn

import cputrain
from cputrain.ops import dropout
from tests.parity.small import what_runs

SIZES = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 400, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
IDS = torch.randint(0, 300, (2, 96), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(96) < torch.tensor([[96], [60]])).long()
BATCH = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100), "use_cache": False}
PLAIN = {"r": 8, "target_modules": "all-linear", "lora_dropout": 0.0, "init_lora_weights": False}
MLP, QUERY = "base_model.model.model.layers.*.mlp", "base_model.model.model.layers.*.self_attn.q_proj"


def model(kind: str = "Llama", **fields) -> nn.Module:
    torch.manual_seed(0)
    if not hasattr(hf, f"{kind}Config"):
        pytest.skip(f"transformers {hf.__version__} has no {kind}")
    config = getattr(hf, f"{kind}Config")(**SIZES | HEADS | fields)
    return hf.AutoModelForCausalLM.from_config(config).train()


def adapted(settings: dict, **fields) -> nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(model(**fields), peft.LoraConfig(**PLAIN | settings)).train()


def step(m: nn.Module, **more) -> dict[str, torch.Tensor]:
    m.zero_grad()
    loss = m(**BATCH, **more).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], most: float) -> None:
    assert found.keys() == exact.keys()
    for name, truth in exact.items():
        error = ((found[name] - truth).norm() / truth.norm().clamp_min(1e-12)).item()
        assert error < most, f"{name}: {error:.1e}"


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma2"])
@pytest.mark.parametrize(("dtype", "most"), [("fp32", 1e-5), ("int16", 3e-3)])
def test_gradients_against_float64(kind, dtype, most):
    fields = {"head_dim": 32} if kind != "Llama" else {}
    stock = adapted({"use_rslora": True}, kind=kind, **fields)
    ours = cputrain.optimize(copy.deepcopy(stock), dtype=dtype)
    assert_same(step(ours), step(stock.double()), most)
    assert "gated feed-forward" in what_runs(ours, MLP) and "adapter in one operator" in what_runs(ours, QUERY)
    assert "as stock" not in what_runs(ours, MLP) + what_runs(ours, QUERY)


def test_gpt2_whose_layers_lie_the_other_way_round():
    torch.manual_seed(0)
    base = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=300, n_embd=192, n_layer=2, n_head=6, n_positions=96))
    settings = PLAIN | {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    for p in (m for m in base.modules() if isinstance(m, nn.Dropout)):
        p.p = 0.0
    stock = peft.get_peft_model(base, peft.LoraConfig(**settings)).train()
    ours = cputrain.optimize(copy.deepcopy(stock), dtype="fp32")
    assert_same(step(ours), step(stock.double()), 1e-5)
    assert "one operator" in what_runs(ours, "base_model.model.transformer.h.*.mlp.c_fc")


def test_every_target_draws_a_mask_of_its_own(monkeypatch):
    """With dropout on: the loss is that of peft's formula under the masks of the keys that were drawn."""
    keys: list[int] = []
    from cputrain.blocks import projection

    monkeypatch.setattr(projection, "draw_key", lambda: keys.append(4321 + len(keys)) or keys[-1])
    stock = adapted({"lora_dropout": 0.3})
    ours = cputrain.optimize(copy.deepcopy(stock), dtype="fp32", padding="keep")
    found = step(ours)
    assert len(keys) == len(set(keys)) == 14
    order = iter(keys)

    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return dropout.plain(x, 0.3, next(order))

    for layer in stock.modules():
        if hasattr(layer, "lora_dropout"):
            layer.lora_dropout["default"] = Masked()
    assert_same(found, step(stock.double()), 1e-5)


def test_checkpointing_recomputes_the_masks():
    fields = {"lora_dropout": 0.3}
    plain, checked = (cputrain.optimize(adapted(fields), dtype="fp32") for _ in range(2))
    checked.gradient_checkpointing_enable({"use_reentrant": False})
    checked.enable_input_require_grads()
    torch.manual_seed(5)
    expected = step(plain)
    torch.manual_seed(5)
    assert_same(step(checked), expected, 1e-6)


# ---- what peft does to a layer -------------------------------------------------------------------------------------


def two_adapters() -> nn.Module:
    m = adapted({})
    torch.manual_seed(2)
    m.add_adapter("other", peft.LoraConfig(**PLAIN | {"r": 4, "lora_alpha": 3}))
    return m


def merged(m: nn.Module) -> None:
    m.merge_adapter()


CHANGES = {
    "another adapter": lambda m: m.set_adapter("other"),
    "both adapters": lambda m: m.base_model.set_adapter(["default", "other"]),
    "disabled": lambda m: m.base_model.disable_adapter_layers(),
    "merged": merged,
    "merged and undone": lambda m: (m.merge_adapter(), m.unmerge_adapter()),
    "deleted": lambda m: m.delete_adapter("default"),
    "half precision": lambda m: [p.data.copy_(p.data.bfloat16()) for n, p in m.named_parameters() if "lora" in n],
    "weights replaced": lambda m: [p.data.mul_(1.5) for n, p in m.named_parameters() if "base_layer" in n],
    "another rate of scaling": lambda m: [
        x.set_scale("default", 3.0) for x in m.modules() if isinstance(x, peft.tuners.lora.LoraLayer)
    ],
    "evaluation": lambda m: m.eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_two_steps_are_seen(change):
    stock = two_adapters()
    ours = cputrain.optimize(copy.deepcopy(stock), dtype="fp32")
    step(ours)
    for m in (stock, ours):
        CHANGES[change](m)
        head = m.get_output_embeddings().weight.requires_grad_()  # so that there is something to train
        head.grad = None
    assert_same(step(ours), step(stock), 1e-4)


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"lora_bias": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"r": 1}]
)
def test_variants(settings):
    stock = adapted(settings, attention_bias=True)
    ours = cputrain.optimize(copy.deepcopy(stock), dtype="fp32")
    assert_same(step(ours), step(stock.double()), 1e-3)
    if "use_dora" in settings:
        assert "its adapter is Dora, a variant" in what_runs(ours, QUERY)


def test_trainable_tokens():
    stock = adapted({"target_modules": ["q_proj"], "trainable_token_indices": [1, 5, 7]})
    ours = cputrain.optimize(copy.deepcopy(stock), dtype="fp32")
    assert_same(step(ours), step(stock), 1e-4)


def test_adapters_of_a_batch_by_name():
    stock = two_adapters().eval()
    ours = cputrain.optimize(copy.deepcopy(stock), dtype="fp32")
    names = {"adapter_names": ["other", "__base__"]}
    with torch.no_grad():
        found, exact = (m(**BATCH, **names).loss for m in (ours, stock))
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)


def test_an_adapter_added_after_optimize():
    stock, ours = model(), cputrain.optimize(model(), dtype="fp32")
    made = []
    for m in (stock, ours):
        torch.manual_seed(1)
        made.append(peft.get_peft_model(m, peft.LoraConfig(**PLAIN)).train())
    assert_same(step(made[1]), step(made[0]), 1e-4)


def test_saved_merged_and_restored_as_stock(tmp_path):
    stock = adapted({})
    ours = cputrain.optimize(copy.deepcopy(stock), dtype="fp32")
    ours.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(model(), tmp_path, is_trainable=True)
    assert_same(step(again), step(stock), 1e-5)
    merged_ours, merged_stock = (copy.deepcopy(m).merge_and_unload().eval() for m in (ours, stock))
    with torch.no_grad():
        torch.testing.assert_close(merged_ours(IDS).logits, merged_stock(IDS).logits, rtol=1e-4, atol=1e-4)
    cputrain.restore(ours)
    assert_same(step(ours), step(stock), 1e-6)


def test_a_hook_inside_an_adapter_is_called():
    ours = cputrain.optimize(adapted({}), dtype="fp32")
    seen: list[int] = []
    layer = ours.base_model.model.model.layers[0]
    layer.self_attn.q_proj.lora_A["default"].register_forward_hook(lambda *_: seen.append(1))
    layer.mlp.up_proj.base_layer.register_forward_hook(lambda *_: seen.append(2))
    step(ours)
    assert sorted(seen) == [1, 2]


def test_explain_tells_of_adapters_in_one_line():
    ours = cputrain.optimize(two_adapters())
    row = next(row for row in cputrain.explain(ours).facts if row[0] == "adapters")
    assert row[1:] == ("LoRA", "default, other loaded; default (rank 8, scaling 1) on 14 layers")
    ours.base_model.disable_adapter_layers()
    assert "disabled on 14 layers" in str(cputrain.explain(ours))


def test_an_adapter_of_another_size():
    ours = cputrain.optimize(adapted({}), dtype="fp32")
    layer = ours.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_A["default"].weight = nn.Parameter(torch.randn(8, 64))
    with pytest.raises(ValueError, match="load one that was trained for this model"):
        step(ours)
