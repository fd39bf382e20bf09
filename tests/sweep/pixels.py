"""Images in the forms that models want: one tensor, frames of a video, patches with the grid that they lie on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from tests.sweep.inputs import Maker

GRID = (1, 4, 4)  # frames, rows and columns of patches


def part_of(config: Any, name: str) -> Any:
    """A sub-configuration, or None."""
    found = getattr(config, name, None)
    return found if hasattr(found, "to_dict") else None


def number(config: Any, *names: str, default: int) -> int:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), default)


def _vision(config: Any) -> Any:
    names = ("vision_config", "backbone_config", "encoder", "image_config", "thinker_config", "vlm_config")
    part = next((v for n in names if (v := part_of(config, n))), None)
    return config if part is None else _vision(part)


def _channels(vision: Any) -> int:
    return number(vision, "num_channels", "in_channels", "in_chans", default=3)


def _size(maker: Maker, vision: Any) -> tuple[int, int]:
    size = getattr(vision, "image_size", None) or getattr(maker.config, "image_size", None) or maker.shape.image
    if isinstance(size, dict):
        return size["height"], size["width"]
    return (size, size) if isinstance(size, int) else tuple(size)[-2:]


def values_of_a_patch(config: Any) -> int:
    vision = _vision(config)
    patch = number(vision, "patch_size", default=8)
    return _channels(vision) * patch * patch * number(vision, "temporal_patch_size", default=1)


def images(maker: Maker, form: int) -> dict[str, Tensor]:
    """A batch: of images, of videos, of larger images, of wide images; or an image as patches."""
    if form > 3:
        return one_image(maker, form - 2)
    vision = _vision(maker.config)
    channels, size = _channels(vision), _size(maker, vision)
    frames = number(vision, "num_frames", default=2)
    side = 2 * maker.shape.image
    shapes = [(channels, *size), (frames, channels, *size), (channels, side, side), (channels, side, 2 * side)]
    return {"pixel_values": maker.numbers(maker.shape.batch, *shapes[form])}


def token_count(model: nn.Module, arguments: dict[str, Any]) -> int:
    """How many tokens of the text the image takes the place of."""
    owner = next((m for m in (model, getattr(model, "model", None)) if hasattr(m, "get_image_features")), None)
    if owner is None:
        raise ValueError(f"{type(model).__name__} has no get_image_features to ask how many tokens an image has")
    with torch.no_grad():
        found = owner.eval().get_image_features(**arguments)
    found = getattr(found, "pooler_output", found)
    found = found[0] if isinstance(found, (list, tuple)) else found
    return found.numel() // found.shape[-1]


def one_image(maker: Maker, form: int) -> dict[str, Any]:
    """For a model that has image tokens in its text: as a batch of one, in tiles, or as patches with their grid."""
    vision = _vision(maker.config)
    channels, size = _channels(vision), _size(maker, vision)
    if form < 2:
        shape = (1, channels, *size) if form == 0 else (1, 1, channels, *size)
        sizes = {"image_sizes": torch.tensor([size])} if "image_sizes" in maker.names else {}
        return {"pixel_values": maker.numbers(*shape)} | sizes
    patch = number(vision, "patch_size", default=8)
    grid = GRID if form == 2 else GRID[1:]
    name = next(
        (n for n in ("image_grid_thw", "image_grid_hws", "grid_thw", "spatial_shapes") if n in maker.names), None
    )
    grids = {} if name is None else {name: torch.tensor([grid])}
    shape = (16, values_of_a_patch(maker.config)) if form == 2 else (16, channels, patch, patch)
    return {"pixel_values": maker.numbers(*shape)} | grids
