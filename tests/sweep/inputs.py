"""Random inputs for any model, found by the names in its forward's signature.

A recipe says which main inputs a model gets and in which form; several are offered, the richest first, and the first
that the stock model accepts is taken. What goes with the main inputs (masks, boxes, token types, decoder ids) follows
from the signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.sweep import pixels
from tests.sweep.pixels import number, part_of
from tests.sweep.shrink import SMALL

CHOICES = 2


@dataclass(frozen=True)
class Shape:
    """How many sequences, how long each is, how long its target is; how much sound, and the sides of an image."""

    lengths: tuple[int, ...] = (20, 13, 6)
    target_lengths: tuple[int, ...] = (9, 7, 4)
    samples: int = 6400  # 19 frames behind the usual convolutions
    image: int = 32

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def length(self) -> int:
        return max(self.lengths)

    @property
    def target_length(self) -> int:
        return max(self.target_lengths)


# No two of its numbers are alike, and none is like a width in shrink.py: an output's shape tells what it is of.
SHORT = Shape()
SIDES = ("none", "right", "left")

# "text", "image", "input_features" … with the number of the form that is tried; "image tokens": as many as needed.
Recipe = tuple[tuple[str, int], ...]


@dataclass
class Inputs:
    """What a model is called with, and which positions of its sequences are real."""

    arguments: dict[str, Any] = field(default_factory=dict)
    # (rows, length) → True at real positions; outputs whose shape begins so have padding there.
    real: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def real_positions(self, shape: torch.Size) -> Tensor | None:
        """A mask that broadcasts to an output of this shape, or None if no padding can be in it."""
        for (rows, length), real in self.real.items():
            if len(shape) >= 2 and shape[0] == rows and length in shape[1:]:
                at = list(shape).index(length, 1)
                return real.view(rows, *[1] * (at - 1), length, *[1] * (len(shape) - at - 1))
            if len(shape) == 3 and shape[0] == rows and shape[1] - length in self._lengths_of_image():
                return torch.cat([real.new_ones(rows, shape[1] - length), real], 1)[..., None]
        return None

    def _lengths_of_image(self) -> range:
        """Of an image's tokens that a model sets before the text (GIT, FLAVA): its patches, with a token or two."""
        patches = (SMALL.image // SMALL.patch) ** 2
        return range(patches, patches + 3) if "pixel_values" in self.arguments else range(0)


def padding_mask(lengths: tuple[int, ...], side: str) -> Tensor:
    longest = max(lengths)
    place = torch.arange(longest)[None, :]
    lengths_column = torch.tensor(lengths)[:, None]
    if side == "none":
        return torch.ones(len(lengths), longest, dtype=torch.long)
    return (place < lengths_column if side == "right" else place >= longest - lengths_column).long()


def names_of(model: nn.Module) -> list[str]:
    return list(inspect.signature(type(model).forward).parameters)[1:]


def recipes(model: nn.Module) -> list[Recipe]:
    """Text with an image first, then each alone; the model's main input before others."""
    names, main = names_of(model), getattr(model, "main_input_name", "input_ids")
    main = main if isinstance(main, str) else main[0]
    has_text, has_image = "input_ids" in names, "pixel_values" in names
    found: list[Recipe] = []
    if has_text and has_image and image_token(model) is not None:
        found += [(("image", form), ("image tokens", 0)) for form in range(4)]
    if has_text and has_image:
        found += [(("text", 0), ("image", form)) for form in range(3)]
    if has_text and "input_features" in names:
        found += [(("text", 0), ("input_features", form)) for form in range(3)]
    kinds = {"input_ids": "text", "pixel_values": "image", "decoder_input_ids": "decoder"}
    single = [main, *names, "input_ids"] if main in names or "kwargs" in names else names
    for name in dict.fromkeys(single):
        kind = kinds.get(name, name)
        if kind in FORMS:
            found += [((kind, form),) for form in range(FORMS[kind])]
    return found


def image_token(model: nn.Module) -> int | None:
    names = ("image_token_id", "image_token_index", "media_placeholder_token_id", "image_token_ids")
    return next((value for name in names if isinstance(value := getattr(model.config, name, None), int)), None)


FORMS = {
    "text": 1, "image": 6, "input_features": 4, "input_values": 3, "inputs_embeds": 1, "hidden_states": 3,
    "pixel_values_videos": 1, "audio_values": 1, "flattened_patches": 1, "past_values": 1, "audio_codes": 1,
    "spectrogram": 1, "inputs": 1, "states": 1,
}  # fmt: skip


class Maker:
    """Inputs for one model; every call with the same seed gives the same."""

    def __init__(self, model: nn.Module, side: str, seed: int, shape: Shape = SHORT) -> None:
        self.model, self.side, self.shape = model, side, shape
        self.config: Any = model.config
        self.names = names_of(model)
        self.generator = torch.Generator().manual_seed(seed)
        self.choices = "MultipleChoice" in type(model).__name__
        self.classifies_by_eos = (
            "ForSequenceClassification" in type(model).__name__ and "decoder_input_ids" in self.names
        )

    def make(self, recipe: Recipe) -> Inputs:
        made, steps = Inputs(), dict(recipe)
        if "image tokens" in steps:
            del steps["image tokens"]
            made.arguments |= pixels.one_image(self, steps.pop("image"))
            self.text(made, image_tokens=pixels.token_count(self.model, made.arguments))
        for kind, form in steps.items():
            self.main(made, kind, form)
        self.decoder(made)
        for name, extra in _EXTRAS.items():
            if name in self.names and name not in made.arguments:
                made.arguments[name] = extra(self)
        if "use_cache" in self.names:
            made.arguments["use_cache"] = False
        return made

    def main(self, made: Inputs, kind: str, form: int) -> None:
        if kind == "text":
            self.text(made)
        elif kind == "image":
            made.arguments |= pixels.images(self, form)
        elif kind in ("inputs_embeds", "hidden_states"):
            shapes = [
                (self.shape.batch, self.shape.length, self.width()),
                (16, self.width()),
                (16, pixels.values_of_a_patch(self.config)),
            ]
            made.arguments[kind] = self.numbers(*shapes[form])
            if form == 0:
                self.masks(made, padding_mask(self.shape.lengths, self.side))
        else:
            made.arguments[kind] = getattr(self, f"_{kind}")(form)
        if kind == "input_features" and "input_features_mask" in self.names:
            value = made.arguments[kind]
            made.arguments["input_features_mask"] = torch.ones(
                self.shape.batch, value.shape[1 if form == 1 else -1], dtype=torch.long
            )

    def text(self, made: Inputs, image_tokens: int = 0) -> None:
        mask = padding_mask(self.shape.lengths, self.side)
        if self.choices:
            mask = mask[:, None].expand(self.shape.batch, CHOICES, self.shape.length).contiguous()
        ids = self.tokens(*mask.shape)
        if self.side != "none":
            pad = getattr(self.config, "pad_token_id", None)
            ids = ids if pad is None or pad < 0 else ids.masked_fill(mask == 0, pad)
        if image_tokens > self.shape.length - 2:
            raise ValueError(f"an image of {image_tokens} tokens is longer than the text")
        if image_tokens:
            ids[0, 1 : 1 + image_tokens] = image_token(self.model)
        if "mm_token_type_ids" in self.names:
            made.arguments["mm_token_type_ids"] = (ids == image_token(self.model)).long()
        if self.classifies_by_eos:  # stock reads the hidden state of the last eos, and wants as many in every row
            last = (mask * torch.arange(self.shape.length)).argmax(1)
            ids[torch.arange(self.shape.batch), last] = self.config.eos_token_id
        made.arguments["input_ids"] = ids
        self.masks(made, mask)

    def masks(self, made: Inputs, mask: Tensor) -> None:
        made.real[(mask.numel() // self.shape.length, self.shape.length)] = mask.reshape(-1, self.shape.length).bool()
        if self.side != "none" and "attention_mask" in self.names:
            made.arguments["attention_mask"] = mask
        if "token_type_ids" in self.names:
            kinds = getattr(self.config, "type_vocab_size", 1) or 1
            kinds = 1 if isinstance(kinds, (list, tuple)) else kinds
            shape = (
                (*mask.shape, len(self.config.type_vocab_sizes))
                if hasattr(self.config, "type_vocab_sizes")
                else mask.shape
            )
            made.arguments["token_type_ids"] = self.integers(0, max(1, min(2, kinds)), shape)
        if "bbox" in self.names:
            made.arguments["bbox"] = self.boxes(mask.shape)

    def decoder(self, made: Inputs) -> None:
        if "decoder_input_ids" not in self.names or self.classifies_by_eos:
            return
        mask = padding_mask(self.shape.target_lengths, "right" if self.side == "left" else self.side)
        made.arguments["decoder_input_ids"] = self.tokens(self.shape.batch, self.shape.target_length)
        made.real[(self.shape.batch, self.shape.target_length)] = mask.bool()
        if self.side != "none" and "decoder_attention_mask" in self.names:
            made.arguments["decoder_attention_mask"] = mask

    # the random parts

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def tokens(self, *shape: int) -> Tensor:
        """Ids that mean nothing special to the model."""
        special = set(_special_tokens(self.config))
        plain = [x for x in range(5, self.vocabulary()) if x not in special] or [0]
        return torch.tensor(plain)[self.integers(0, len(plain), shape)]

    def vocabulary(self) -> int:
        try:
            table = self.model.get_input_embeddings().weight
            return int(table.shape[0]) if table.dim() == 2 else 50
        except (AttributeError, NotImplementedError, TypeError):
            return int(getattr(self.config, "vocab_size", None) or 50)

    def boxes(self, shape: tuple[int, ...]) -> Tensor:
        corners = self.integers(0, 50, (*shape, 2))
        return torch.cat([corners, corners + self.integers(1, 50, (*shape, 2))], -1)

    def width(self) -> int:
        return number(self.config, "hidden_size", "d_model", "n_embd", "dim", default=64)

    # sound and series

    def _input_features(self, form: int) -> Tensor:
        audio = next((v for n in ("audio_config", "encoder_config") if (v := part_of(self.config, n))), self.config)
        bins = number(
            audio, "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_dim", "mel_bins",
            default=80,
        )  # fmt: skip
        frames = 2 * number(audio, "max_source_positions", default=32)
        shapes = [
            (self.shape.batch, bins, frames),
            (self.shape.batch, 64, bins),
            (self.shape.batch, bins, 64),
            (self.shape.batch, 1, 64, bins),
        ]
        return self.numbers(*shapes[form])

    def _input_values(self, form: int) -> Tensor:
        bins = number(self.config, "num_mel_bins", default=80)
        shapes = [
            (self.shape.batch, self.shape.samples),
            (self.shape.batch, 1, self.shape.samples),
            (self.shape.batch, number(self.config, "max_length", default=64), bins),
        ]
        return self.numbers(*shapes[form])

    def _audio_values(self, form: int) -> Tensor:
        return self.numbers(self.shape.batch, 1, self.shape.samples)

    def _audio_codes(self, form: int) -> Tensor:
        books = number(self.config, "num_quantizers", "n_codebooks", "num_codebooks", default=2)
        return self.integers(0, 16, (self.shape.batch, books, self.shape.length))

    def _spectrogram(self, form: int) -> Tensor:
        return self.numbers(
            self.shape.batch, self.shape.length, number(self.config, "model_in_dim", "num_mel_bins", default=80)
        )

    def _pixel_values_videos(self, form: int) -> Tensor:
        return pixels.images(self, 1)["pixel_values"]

    def _flattened_patches(self, form: int) -> Tensor:
        vision = part_of(self.config, "vision_config") or self.config
        width = number(vision, "patch_embed_hidden_size", default=64)
        places = torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 5)).float()
        patches = self.numbers(self.shape.batch, 16, width)
        return torch.cat([places[None].expand(self.shape.batch, 16, 2), patches], -1)

    def _past_values(self, form: int) -> Tensor:
        past = number(self.config, "context_length", default=12) + max(
            getattr(self.config, "lags_sequence", None) or [0]
        )
        channels = number(self.config, "num_input_channels", "input_size", default=1)
        return self.numbers(self.shape.batch, past, channels) if channels > 1 else self.numbers(self.shape.batch, past)

    def _inputs(self, form: int) -> Tensor:
        return self.numbers(self.shape.batch, self.shape.length, self.width())

    def _states(self, form: int) -> Tensor:
        return self.numbers(self.shape.batch, self.shape.length, number(self.config, "state_dim", default=17))


def _special_tokens(config: Any) -> Iterator[int]:
    for name, value in config.to_dict().items():
        if name.endswith(("token_id", "token_index", "token_ids")):
            yield from value if isinstance(value, list) else [value] if isinstance(value, int) else []
        if (part := part_of(config, name)) is not None:
            yield from _special_tokens(part)


def _series(maker: Maker, features: int | None = None, future: bool = False) -> Tensor:
    past = number(maker.config, "context_length", default=12) + max(getattr(maker.config, "lags_sequence", None) or [0])
    length = number(maker.config, "prediction_length", default=6) if future else past
    return (
        maker.numbers(maker.shape.batch, length)
        if features is None
        else maker.numbers(maker.shape.batch, length, features)
    )


def _time_features(maker: Maker) -> int:
    return number(maker.config, "num_time_features", default=0)


def _actions(maker: Maker, name: str, default: int) -> Tensor:
    return maker.numbers(maker.shape.batch, maker.shape.length, number(maker.config, name, default=default))


# What some models need beside their main input.
_EXTRAS: dict[str, Callable[[Maker], Any]] = {
    "grid_thw": lambda maker: torch.tensor([pixels.GRID]),
    "qformer_input_ids": lambda maker: maker.tokens(maker.shape.batch, maker.shape.length),
    "image": lambda maker: maker.numbers(maker.shape.batch, 3, maker.shape.image, maker.shape.image),
    "query_embeds": lambda maker: maker.numbers(maker.shape.batch, 8, maker.width()),
    "past_observed_mask": lambda maker: torch.ones_like(_series(maker)),
    "past_time_features": lambda maker: _series(maker, _time_features(maker)),
    "future_time_features": lambda maker: _series(maker, _time_features(maker), future=True),
    "future_values": lambda maker: _series(maker, future=True),
    "actions": lambda maker: _actions(maker, "act_dim", 4),
    "rewards": lambda maker: maker.numbers(maker.shape.batch, maker.shape.length, 1),
    "returns_to_go": lambda maker: maker.numbers(maker.shape.batch, maker.shape.length, 1),
    "timesteps": lambda maker: torch.arange(maker.shape.length).expand(maker.shape.batch, maker.shape.length),
}
