"""QLoRA by bitsandbytes: layers of 4 and 8 bits in all layouts, whole models, and what is refused.

The weight that a layer stands for is computed here from its bytes: on a CPU, bitsandbytes 0.50 unpacks wrongly where a
row isn't a multiple of the block size.
"""

from __future__ import annotations

import copy
from importlib import metadata

import peft
import pytest
import torch
import transformers as hf
from torch import nn

import cputrain
from cputrain.blocks import quantised
from tests.parity import releases
from tests.parity.gradients import with_loss, worst
from tests.parity.small import what_runs

if not releases.SERVES_HALF_PRECISION:
    pytest.skip("today's bitsandbytes goes with transformers 5", allow_module_level=True)
bnb = pytest.importorskip("bitsandbytes")
IDS = torch.randint(0, 300, (2, 96), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(96) < torch.tensor([[96], [60]])).long()
BATCH = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS.masked_fill(MASK == 0, -100), "use_cache": False}


def layer(rows: int, cols: int, bias: bool = True, **options) -> nn.Module:
    storage = options.pop("quant_storage", torch.uint8)
    made = bnb.nn.Linear4bit(cols, rows, bias=bias, compute_dtype=torch.float32, quant_storage=storage)
    weight = torch.randn(rows, cols) * 0.05
    made.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_storage=storage, module=made, **options)
    made = made.to("cpu")
    if made.weight.quant_state is None:
        made.weight._quantize(torch.device("cpu"))
    return made.train()


def matrix(of: nn.Module) -> torch.Tensor:
    """What the bytes stand for, in float64."""
    state, count = of.weight.quant_state, of.out_features * of.in_features
    scales = state.absmax.double()
    if state.nested:
        inner = state.state2
        scales = (
            inner.code.double()[state.absmax.int()]
            * inner.absmax.double().repeat_interleave(inner.blocksize)[: len(scales)]
            + state.offset.double()
        )
    data = of.weight.data.contiguous().view(-1).view(torch.uint8)
    numbers = torch.stack((data >> 4, data & 15), 1).view(-1)[:count].int()
    return (state.code.double()[numbers] * scales.repeat_interleave(state.blocksize)[:count]).view(of.out_features, -1)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("block", [32, 64, 128, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(128, 192), (66, 101), (300, 100)])
def test_products_are_those_of_the_unpacked_weight(kind, block, nested, shape):
    torch.manual_seed(0)
    ours = layer(*shape, quant_type=kind, blocksize=block, compress_statistics=nested)
    w, bias = matrix(ours), ours.bias.detach().double()
    cputrain.optimize(ours, dtype="fp32")
    x = torch.randn(40, shape[1], requires_grad=True)
    toward = torch.randn(40, shape[0])
    for training in (True, False):
        y = ours.train(training)(x)
        (grad,) = torch.autograd.grad(y, x, toward)
        for found, exact in ((y, x.double() @ w.t() + bias), (grad, toward.double() @ w)):
            assert ((found - exact).norm() / exact.norm()).item() < 1e-5


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
def test_any_storage(storage):
    torch.manual_seed(0)
    ours = layer(64, 96, quant_type="nf4", quant_storage=storage)
    w = matrix(ours)
    cputrain.optimize(ours, dtype="fp32")
    x = torch.randn(40, 96)
    torch.testing.assert_close(ours(x).double(), x.double() @ w.t() + ours.bias.double(), rtol=1e-5, atol=1e-5)
    assert ours.weight.dtype == storage


# ---- whole models --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    place = str(tmp_path_factory.mktemp("llama"))
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2}
    config = hf.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4)
    hf.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(place)
    return place


def loaded(checkpoint: str, prepared: bool = True, **quantising) -> nn.Module:
    settings = hf.BitsAndBytesConfig(**quantising or {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    model = hf.AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=settings, device_map="cpu")
    if prepared:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0, init_lora_weights=False)
    return peft.get_peft_model(model, settings).train()


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    return with_loss(model, BATCH)


def unpacked(model: nn.Module, values) -> nn.Module:
    """The same in float64 without quantised layers."""
    plain = hf.AutoModelForCausalLM.from_config(model.get_base_model().config).double()
    del plain.config.quantization_config
    for name, part in model.get_base_model().named_modules():
        target = dict(plain.named_modules()).get(name.replace(".base_layer", ""))
        if quantised.is_quantised(part):
            target.weight.data = values(part)
        elif target is not None and type(getattr(part, "weight", None)) is nn.Parameter:
            target.weight.data = part.weight.data.double()
    made = peft.get_peft_model(plain, copy.deepcopy(model.peft_config["default"])).double().train()
    made.load_state_dict({n: p.data for n, p in model.named_parameters() if "lora_" in n}, strict=False)
    return made


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("format", ["fp32", "int16"])
@pytest.mark.parametrize("half", [False, True])
def test_a_model_of_four_bits(checkpoint, prepared, format, half):
    """As prepare_model_for_kbit_training makes it, or in bf16; its adapters as TRL casts them."""
    ours = loaded(checkpoint, prepared, load_in_4bit=True, bnb_4bit_use_double_quant=True)
    for p in ours.parameters():
        p.data = p.data.bfloat16() if half and p.requires_grad else p.data
    exact = step(unpacked(ours, matrix))
    cputrain.optimize(ours, dtype=format)
    assert worst(step(ours), exact) < (2e-5 if format == "fp32" else 3e-3)
    for part in ("mlp", "self_attn.q_proj"):
        assert "as stock" not in what_runs(ours, f"base_model.model.model.layers.*.{part}")
    assert "gated feed-forward" in what_runs(ours, "base_model.model.model.layers.*.mlp")
    assert "real tokens only" in what_runs(ours, "base_model.model.model.layers.*")


def test_evaluation_repacks_nothing(checkpoint):
    ours = cputrain.optimize(loaded(checkpoint), dtype="fp32")
    before = step(ours)
    inside = ours.base_model.model.model.layers[0]
    hook = inside.mlp.up_proj.base_layer.register_forward_hook(lambda *_: None)  # peft's own code runs around it
    with torch.no_grad(), ours.disable_adapter():
        ours.eval()(**BATCH)
        inside.self_attn.q_proj.base_layer(torch.randn(2, 256).double())  # an input that isn't ours
        ours(**BATCH)
    assert worst(step(ours.train()), before) < 1e-5
    hook.remove()
    layers = [part for part in ours.modules() if quantised.is_four_bits(part)]
    assert not any(getattr(part.weight.quant_state, "packing_format_for_cpu", False) for part in layers)
    assert worst(step(ours), before) < 1e-6


def test_a_layer_that_was_repacked_is_refused(checkpoint):
    from bitsandbytes.functional import _convert_weight_packed_for_cpu

    model = loaded(checkpoint)
    spoilt = model.base_model.model.model.layers[1].mlp.up_proj.base_layer
    spoilt.weight.data, _ = _convert_weight_packed_for_cpu(spoilt.weight.data, spoilt.weight.quant_state)
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj.base_layer can't be trained: its weight was repacked"):
        cputrain.optimize(model)
    assert not any("forward" in part.__dict__ for part in model.modules())


DAMAGES = {
    "one of a layer": lambda state: setattr(state, "shape", torch.Size((8, 8))),
    "has blocks of 7": lambda state: setattr(state, "blocksize", 7),
    "no code of 16": lambda state: setattr(state, "code", state.code[:8]),
    "scales, 96 are needed": lambda state: setattr(state, "absmax", state.absmax[:-1]),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_a_damaged_layer_is_refused(reason):
    model = nn.Sequential(layer(64, 96, quant_type="nf4"))
    DAMAGES[reason](model[0].weight.quant_state)
    with pytest.raises(ValueError, match=reason):
        cputrain.optimize(model)
    assert "forward" not in model[0].__dict__


def test_an_old_library_is_refused(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: "0.45.5")
    with pytest.raises(ValueError, match=r"bitsandbytes 0.45.5 doesn't train on CPUs: install 0.46 or later"):
        cputrain.optimize(nn.Sequential(layer(64, 96)))


def test_eight_bits(checkpoint):
    ours = loaded(checkpoint, load_in_8bit=True)

    def values(of: nn.Module) -> torch.Tensor:
        return of.weight.CB.double() * of.weight.SCB.double()[:, None] / 127

    exact = step(unpacked(ours, values))
    cputrain.optimize(ours, dtype="fp32")
    for _ in range(2):  # CB moves at the first forward of bitsandbytes
        assert worst(step(ours), exact) < 2e-5
        with torch.no_grad():
            ours.eval()(**BATCH)
        ours.train()
