"""What the name of a setting doesn't tell about how small it may be, by model type; a dot leads into a sub-config.

Settings under "default" are given to the configuration before it is shrunk.
"""

from __future__ import annotations

from typing import Any

_RESNET = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "out_features": ["stage4"],
}  # fmt: skip
_WITH_RESNET = {"use_timm_backbone": False, "backbone": None, "backbone_config": _RESNET, "backbone_kwargs": None}
_SERIES = {"prediction_length": 6, "context_length": 12, "lags_sequence": [1, 2, 3]}
_HEAD = {"head_dim": 16}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16}

OVERRIDES: dict[str, dict[str, Any]] = {
    "autoformer": _SERIES,
    "bamba": _MAMBA,
    "big_bird": {"block_size": 2, "num_random_blocks": 1},
    "bigbird_pegasus": {"block_size": 2, "num_random_blocks": 1},
    "conditional_detr": _WITH_RESNET,
    "dab-detr": _WITH_RESNET,
    "deformable_detr": _WITH_RESNET,
    "detr": _WITH_RESNET,
    "efficientloftr": {"hidden_size": 256},
    "esm": {"vocab_size": 33},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128},
    "granitemoehybrid": _MAMBA,
    "hunyuan_v1_dense": _HEAD,
    "hunyuan_v1_moe": _HEAD,
    "hunyuan_vl_text": _HEAD,
    "hunyuan_vl": {"text_config.head_dim": 16},
    "informer": _SERIES,
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 16},
    "ministral": _HEAD,
    "nemotron": _HEAD,
    "omdet-turbo": _WITH_RESNET,
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [4, 5], "num_buckets": 4},
    "table-transformer": _WITH_RESNET,
    "time_series_transformer": _SERIES,
    "xlnet": {"d_head": 16},
}
