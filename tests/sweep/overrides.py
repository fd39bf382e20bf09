"""What the name of a setting doesn't tell about how small it may be, by model type; a dot leads into a sub-config.

Settings under "default" are given to the configuration before it is shrunk; COMPUTED ones it works out itself.
A function gets the Size.
"""

from __future__ import annotations

from typing import Any

COMPUTED = object()

_RESNET = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "out_features": ["stage4"],
}  # fmt: skip
_WITH_RESNET = {"use_timm_backbone": False, "backbone": None, "backbone_config": _RESNET, "backbone_kwargs": None}
_SERIES = {"prediction_length": 6, "context_length": 12, "lags_sequence": [1, 2, 3], "feature_size": COMPUTED}
_SPARSE = {"block_size": lambda size: 2 if size.block < 16 else size.block, "num_random_blocks": 1}
_HEAD = {"head_dim": lambda size: size.head}


def _thirds(size: Any) -> list[int]:
    """How many of a head's frequencies count frames, rows and columns."""
    return [size.head // 8, size.head * 3 // 16, size.head * 3 // 16]


_SECTIONS = {"rope_parameters.mrope_section": _thirds}
_TEXT_SECTIONS = {"text_config.rope_parameters.mrope_section": _thirds}
_HALF_SECTIONS = {"rope_parameters.mrope_section": [1, 1, 2]}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16}

OVERRIDES: dict[str, dict[str, Any]] = {
    "autoformer": _SERIES,
    "bamba": _MAMBA,
    "big_bird": _SPARSE,
    "bigbird_pegasus": _SPARSE,
    "bit": {"num_groups": 4},
    "blip-2": {"image_token_id": 100, "num_query_tokens": 8},
    "bros": dict.fromkeys(("dim_bbox_sinusoid_emb_2d", "dim_bbox_sinusoid_emb_1d", "dim_bbox_projection"), COMPUTED),
    "chameleon": {"vocabulary_map": {"<image>": 100}},
    "colqwen2": {"vlm_config.text_config.rope_parameters.mrope_section": _thirds},
    "conditional_detr": _WITH_RESNET,
    "dab-detr": _WITH_RESNET,
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "deformable_detr": _WITH_RESNET,
    "detr": _WITH_RESNET,
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "efficientloftr": {"hidden_size": 256},
    "esm": {"vocab_size": 33},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128},
    "glm46v": _TEXT_SECTIONS,
    "glm4v": _TEXT_SECTIONS,
    "glm4v_moe": {"text_config.rope_parameters.mrope_section": [1, 1, 2]},
    "glm4v_moe_text": _HALF_SECTIONS,
    "glm4v_text": _SECTIONS,
    "glm_image": _TEXT_SECTIONS,
    "glm_image_text": _SECTIONS,
    "glm_ocr": _TEXT_SECTIONS,
    "glm_ocr_text": _SECTIONS,
    "glmga": _TEXT_SECTIONS,
    "granitemoehybrid": _MAMBA,
    "hunyuan_v1_dense": _HEAD,
    "hunyuan_v1_moe": _HEAD,
    "hunyuan_vl_text": _HEAD,
    "hunyuan_vl": {"text_config.head_dim": lambda size: size.head},
    "informer": _SERIES,
    "instructblip": {"image_token_id": 100, "num_query_tokens": 8},
    "instructblipvideo": {"video_token_id": 100, "num_query_tokens": 8},
    "lilt": {"hidden_size": 96},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 16},
    "ministral": _HEAD,
    "nemotron": _HEAD | {"num_key_value_heads": 2},
    "omdet-turbo": _WITH_RESNET,
    "qwen2_5_vl": _TEXT_SECTIONS | {"vision_config.window_size": 32},
    "qwen2_5_vl_text": _SECTIONS,
    "qwen2_5_vl_vision": {"window_size": 32},
    "qwen2_vl": _TEXT_SECTIONS,
    "qwen2_vl_text": _SECTIONS,
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [4, 5], "num_buckets": 4},
    "table-transformer": _WITH_RESNET,
    "time_series_transformer": _SERIES,
}
