"""Architectures beyond the list: recognised in part or not at all, they give what stock gives."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from tests.model_zoo import stir_parameters
from tests.parity import releases
from tests.parity.small import RIGHT, assert_close, gradients_of, ids, pair

# What configs call the sizes; each gets those that it knows.
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "attention_window": 4,
    "layer_types": None,
}
ENCODERS = ["ernie", "esm", "roformer", "megatron-bert", "layoutlm", "mobilebert", "roberta-prelayernorm", "longformer"]
DECODERS = ["llama", "qwen3", "gemma2", "phi", "gpt_neox", "bloom", "mixtral"]
BOTH = ["bart", "pegasus", "umt5"]
SLIDING_OR_CAPPED = ["gemma3_text", "gemma2"]


def make(name):
    releases.needs_model(name)
    kind = hf.CONFIG_MAPPING[name]
    config = kind(**{key: value for key, value in SMALL.items() if hasattr(kind(), key)})
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(config)
    stir_parameters(model)
    return model.train()


def loss_over_real_tokens(mask):
    given = {"input_ids": ids(mask), "attention_mask": mask}

    def loss(model):
        decoded = {"decoder_input_ids": ids(torch.ones(3, 5), 2).long()} if model.config.is_encoder_decoder else {}
        out = model(**given, **decoded).last_hidden_state
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        return (out * weights * (mask[..., None] if out.shape[:2] == mask.shape else 1)).sum()

    return loss


@pytest.mark.parametrize("mask", [RIGHT, torch.ones_like(RIGHT)], ids=["padded", "full"])
@pytest.mark.parametrize("name", sorted({*ENCODERS, *DECODERS, *BOTH, *SLIDING_OR_CAPPED}))
def test_as_stock(name, mask):
    stock, ours = pair(make(name))
    loss = loss_over_real_tokens(mask)
    torch.testing.assert_close(loss(ours), loss(stock), rtol=1e-4, atol=1e-3)
    found, expected = gradients_of(ours, loss), gradients_of(stock, loss)
    assert_close(found, releases.without_experts_of_padding_only(found, expected))
