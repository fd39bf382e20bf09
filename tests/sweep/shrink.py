"""Configurations of a few thousand parameters for any model type that transformers knows.

The default configuration is turned into a dictionary, every number that sets a size is replaced according to its name,
and the configuration is built again from the dictionary. `OVERRIDES` has what a name alone doesn't tell.
"""

from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.sweep.overrides import COMPUTED, OVERRIDES


@dataclass(frozen=True)
class Size:
    """How large a model is made; settings that are smaller already stay."""

    hidden: int = 64
    heads: int = 4
    key_value_heads: int = 2
    head: int = 16
    layers: int = 2
    middle: int = 96  # of the feed-forward
    ratio: float = 1.5  # the same, where it is given so
    vocabulary: int = 120
    codes: int = 64
    rank: int = 32
    positions: int = 128
    image: int = 32
    patch: int = 8
    window: int = 8  # of tokens
    image_window: int = 4
    # Of models in stages, each of which halves the image and doubles the width; the last has one window.
    staged_window: int = 2
    staged_image: int = 64
    staged_hidden: int = 64
    staged_heads: int = 4
    block: int = 4
    experts: int = 4
    chosen_experts: int = 2
    shared_experts: int = 1
    groups: int = 1
    chosen_keys: int = 8  # of sparse attention: fewer than the longest row has
    kpool: int = 4  # keys that sparse attention chooses together
    queries: int = 10
    nothing: int = 0

    def square(self) -> Size:
        """Its feed-forwards are as wide inside as outside."""
        return replace(self, middle=self.hidden, ratio=1.0)


SMALL = Size()
# 4 × 128 tokens of hidden size 384, as the floor for speed is stated: tests/model_zoo.py has the same.
FOR_SPEED = Size(
    hidden=384, heads=12, key_value_heads=4, head=32, middle=1536, ratio=4.0, vocabulary=1000, rank=128, positions=144,
    image=176, patch=16, window=64, image_window=7, staged_window=7, staged_image=224, staged_hidden=96,
    staged_heads=3, block=16, queries=100,
)  # fmt: skip

_NOT_ARGUMENTS = {"transformers_version", "architectures", "stage_names", "label2id", "id2label", "_name_or_path"}
_LAYER_LISTS = re.compile(
    r".*layer_types|.*layers?_block_type|no_rope_layers|layer_rope_theta|indexer_types|attention_layers|.*_layer_types"
    r"|layers_type|block_types|rope_layers|attention_types|attn_layers"
)

_IN_PARTS = ("head_dim", "num_key_value_heads", "num_attention_heads", "intermediate_size", "hidden_size")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")

# The first name that matches decides which field of Size takes the setting's place; None leaves it.
Rule = tuple[str, str | None]
_RULES: list[Rule] = [
    (r".*type_vocab_size", None),
    (r".*codebook_size|num_embeddings", "codes"),
    (r".*vocab_size.*|.*_vocab", "vocabulary"),
    (r".*(key_value|kv)_(heads|head_num)|n_head_kv|multi_query_group_num", "key_value_heads"),
    (r"d_head", "head"),
    (r".*_?heads?|.*num_attention_heads.*", "heads"),
    (r"num_kv_shared_layers|num_hash_layers|num_nextn_predict_layers|first_k_dense_replace", "nothing"),
    (r"num_feat_extract_layers|num_adapter_layers|num_residual_layers", None),
    (r".*num_.*layers|.*n_layers?|.*_layers|depth|.*_depth|num_blocks|.*num_.*_blocks", "layers"),
    (r".*intermediate.*size|.*ffn_.*(dim|size)|d_ff|n_inner|mlp_dim|.*mlp_.*size|.*feedforward_dim", "middle"),
    (r".*dim_feedforward|ffn_dim", "middle"),
    (r"mlp_ratio|.*mlp_ratio|.*expansion_ratio", "ratio"),
    (r".*_rank", "rank"),
    (r".*head_dim|dim_head|d_kv|d_k|d_v|.*head_size|.*kv_channels|rotary_dim", "head"),
    (r".*experts_per_tok.*|.*moe_topk|.*moe_k|num_selected_experts|.*experts_topk", "chosen_experts"),
    (r"index_topk", "chosen_keys"),
    (r"index_kpool", "kpool"),
    (r".*shared_experts", "shared_experts"),
    (r".*experts.*", "experts"),
    (r"n_group|topk_group", "groups"),
    (r".*(hidden|model|embed|embd|emb|embedding|projection|proj|output|latent|context|cond|query|key|value|text|vision|"
     r"audio|input|inner|attention|fpn|neck|fusion|state|channel)s?_(size|dim|dims|width|channels)|.*d_model|n_embd|dim|"
     r"width|.*_dim|.*_width|.*hidden_size.*|.*channels", "hidden"),
    (r".*max_.*position.*|n_positions|n_ctx|.*max_seq_len.*|seq_length|max_sequence_length", "positions"),
    (r".*image_size|img_size|input_size", "image"),
    (r".*patch_size|encoder_stride", "patch"),
    (r"window_size|local_window_size", "image_window"),
    (r"sliding_window|attention_window|.*window|local_attention|attention_chunk_size", "window"),
    (r"num_queries|num_object_queries|.*_num_points", "queries"),
    (r"block_size|chunk_size|.*chunk_length|.*_chunk_size", "block"),
]  # fmt: skip
_TOKEN = re.compile(r".*token_id|.*token_index|.*_token_ids?|.*token_idx")


class _Shrinker:
    def __init__(self, size: Size) -> None:
        self.size = size
        self.next_token = size.vocabulary - 1

    def config(self, old: dict[str, Any]) -> dict[str, Any]:
        new = {name: self.value(name, value) for name, value in old.items() if name not in _NOT_ARGUMENTS}
        heads, keys = old.get("num_attention_heads"), old.get("num_key_value_heads")
        if heads is not None and heads == keys:
            new["num_key_value_heads"] = new["num_attention_heads"]
        name = next((n for n in _LAYERS if isinstance(new.get(n), int)), None)
        if "depths" in new:  # stages with layers of their own; their number stays
            new = {key: value for key, value in new.items() if key not in _LAYERS or key == "depth"}
            if isinstance(new.get("embed_dim"), int):
                new["embed_dim"] = self.size.staged_hidden
            if isinstance(new.get("window_size"), int) and "image_size" in new:  # no stage may be smaller than a window
                new |= {"window_size": self.size.staged_window, "image_size": self.size.staged_image}
        elif name is not None:
            _cut_stages(new, name)
            self.cut_lists(old, new, old[name], new[name])
        return new

    def cut_lists(self, old: dict[str, Any], new: dict[str, Any], before: int, layers: int) -> None:
        """Lists and dictionaries with one entry per layer lose those of the layers that are gone."""
        for name, value in ((name, old[name]) for name in list(new)):
            if isinstance(value, (list, tuple)) and (len(value) == before or _LAYER_LISTS.fullmatch(name)):
                if name not in ("out_features", "out_indices"):
                    new[name] = _kinds_kept([self.value(name, x) for x in value], layers)
            elif isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
                new[name] = {key: x for key, x in new[name].items() if int(key) < layers}

    def value(self, name: str, old: Any) -> Any:
        if isinstance(old, dict):
            return self.config(old) if "model_type" in old else self.dictionary(name, old)
        if isinstance(old, bool) or old is None:
            return old
        if isinstance(old, (int, float)):
            return self.token(old) if _TOKEN.fullmatch(name) else self.number(name, old)
        if isinstance(old, (list, tuple)) and old and all(type(x) is int for x in old):
            return self.integers(name, list(old))
        return old

    def dictionary(self, name: str, old: dict[str, Any]) -> dict[str, Any]:
        new = {
            key: self.value(str(key), x) if isinstance(x, dict) or str(key) in _IN_PARTS else x
            for key, x in old.items()
        }
        section = new.get("mrope_section")
        if section:
            new["mrope_section"] = sections(section, self.size.head // 2)
        return new

    def token(self, old: int) -> int:
        if old < self.size.vocabulary:
            return old
        self.next_token -= 1
        return self.next_token

    def number(self, name: str, old: float) -> float:
        field = next((field for pattern, field in _RULES if re.fullmatch(pattern, name)), None)
        if field is None or old <= 0:
            return old
        if field == "ratio":
            return self.size.ratio if isinstance(old, float) else math.ceil(self.size.ratio)
        if isinstance(old, float):
            return old
        if name == "qk_head_dim":  # a part with positions and one without
            return 2 * self.size.head
        least = {"middle": 0, "positions": 64}.get(field, getattr(SMALL, field))
        return old if old < least else getattr(self.size, field)

    def integers(self, name: str, old: list[int]) -> list[int]:
        if re.fullmatch(r"depths|.*_depths|layers|num_blocks|stage_num_blocks|blocks_per_stage", name):
            return [1] * len(old)
        if _TOKEN.fullmatch(name):
            return [self.token(x) for x in old]
        if re.fullmatch(r"(stage|stem|(en|de)coder_in|mid).*channels", name):  # by one factor: they follow one another
            return [x if x <= 3 else max(8, x // 4) for x in old]
        if len(set(old)) == 1:
            return [self.number(name, x) for x in old]
        first = self.number(name.removesuffix("s"), old[0]) if old[0] > 0 else old[0]
        if "heads" in name and old[0] > 1:
            first = self.size.staged_heads
        elif first == self.size.hidden:
            first = self.size.staged_hidden
        if (
            re.search(r"size|dim|channels|heads", name)
            and old[0] > 0
            and not re.search(r"kernel|patch|window|feat", name)
        ):
            return [max(1, x * first // old[0]) for x in old]
        return old


def _cut_stages(settings: dict[str, Any], layers_name: str) -> None:
    """A backbone's chosen stages are layers that still exist; a neck that wants four of them gets four layers."""
    chosen = settings.get("out_features")
    if not isinstance(chosen, list) or "depths" in settings or not all(re.fullmatch(r"stage\d+", x) for x in chosen):
        return
    settings[layers_name] = max(settings[layers_name], len(chosen))
    last = settings[layers_name]
    settings["out_features"] = [f"stage{last - len(chosen) + 1 + number}" for number in range(len(chosen))]
    settings.pop("out_indices", None)


def _kinds_kept(values: list, layers: int) -> list:
    """As many entries as layers; the last two kinds that occur, so that a mixed model stays mixed."""
    kinds = list(dict.fromkeys(values if all(isinstance(x, (str, int, float)) for x in values) else []))
    return [*kinds, *values][:layers] if len(kinds) >= layers else values[:layers]


def sections(section: list[int], total: int) -> list[int]:
    """Split in the same number of parts, in order of size, with the given sum."""
    parts = [max(1, x * total // sum(section)) for x in section]
    parts[0] += total - sum(parts)
    return parts


def shrunken(model_type: str, size: Size = SMALL, *, dropout: bool = False) -> PretrainedConfig:
    kind = CONFIG_MAPPING[model_type]
    default = kind(**copy.deepcopy(OVERRIDES.get(model_type, {}).get("default", {})))
    settings = _Shrinker(size).config(default.to_dict())
    settings.pop("model_type", None)
    settings = _with_dropout(settings, dropout)
    for path, value in OVERRIDES.get(model_type, {}).items():
        if path != "default":
            _put(settings, path.split("."), value(size) if callable(value) else value)
    config = kind(**settings)
    for part in (config, *map(config.__getattribute__, _text_parts(config))):  # classifiers look for it
        if getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0
    return config


def _text_parts(config: PretrainedConfig) -> list[str]:
    names = ("text_config", "decoder", "generator", "text_encoder", "thinker_config")
    return [name for name in names if isinstance(getattr(config, name, None), PretrainedConfig)]


_RATE = re.compile(r"(?!.*(layer_?drop|quantizer|adapter_drop)).*drop.*")


def _with_dropout(settings: dict[str, Any], on: bool) -> dict[str, Any]:
    """All rates 0, or each another one, so that a dropout in another's place is seen; layers are never skipped."""
    new, rate = {}, 0.05
    for name, value in settings.items():
        if isinstance(value, dict):
            value = _with_dropout(value, on)
        elif "drop" in name and isinstance(value, float):
            rate += 0.05
            value = round(min(rate, 0.4), 2) if on and _RATE.fullmatch(name) else 0.0
        elif name == "apply_spec_augment":
            value = False
        elif re.fullmatch(r"mask_(time|feature)_prob", name):  # inputs are shorter than what is masked at once
            value = 0.0
        new[name] = value
    return new


def _put(settings: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        settings = settings.setdefault(name, {})
    if value is COMPUTED:
        settings.pop(path[-1], None)
    else:
        settings[path[-1]] = value
