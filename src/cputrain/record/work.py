"""How much arithmetic a step needs: multiplications and additions of real tokens, whatever is computed in truth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

_ONE_A_SEQUENCE = ("pooler", "classifier", "seq_relationship")  # see one token of each sequence


class Work(NamedTuple):
    """Operations of forward and backward: of each real token, of each trained one (vocabulary), of a pair of tokens."""

    token: float
    trained: float
    pair: float


class Tokens(NamedTuple):
    real: int
    padded: int
    trained: int
    squares: int  # of the sequences' lengths, added up


def of_model(model: nn.Module) -> Work:
    token = trained = 0.0
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    for name, part in model.named_modules():
        weight: Any = getattr(part, "weight", None)
        rows, columns = getattr(part, "out_features", None), getattr(part, "in_features", None)
        if type(part).__name__ == "Conv1D" and getattr(weight, "ndim", 0) == 2:  # GPT-2's
            columns, rows = weight.shape
        if not rows or not columns or weight is None or any(word in name for word in _ONE_A_SEQUENCE):
            continue
        needs = 2.0 * rows * columns * (3 if weight.requires_grad else 2)
        if rows == vocabulary:
            trained += needs
        else:
            token += needs
    return Work(
        token, trained, 3 * _pair(config, "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__)
    )


def _pair(config: Any, causal: bool) -> float:
    """Scores and their product with values, for one pair of tokens, in all layers."""
    config = getattr(config, "text_config", config)
    layers, heads = getattr(config, "num_hidden_layers", 0), getattr(config, "num_attention_heads", 0)
    hidden = getattr(config, "hidden_size", 0)
    size = getattr(config, "head_dim", None) or (hidden // heads if heads else 0)
    return 4.0 * layers * heads * size / (2 if causal else 1)


def of_batch(batch: Mapping[str, Any]) -> Tokens | None:
    """None if these are no tokens."""
    given: list[Any] = [batch.get(name) for name in ("input_ids", "attention_mask", "labels")]
    ids, mask, labels = given
    shown: Any = ids if ids is not None else mask
    if getattr(shown, "ndim", 0) != 2:
        return None
    padded = shown.numel()
    if getattr(mask, "ndim", 0) == 2:
        lengths = mask.sum(1).tolist()
    else:
        lengths = [shown.shape[1]] * shown.shape[0]
    real = sum(lengths)
    trained = real
    if getattr(labels, "ndim", 0) == 2 and labels.shape == shown.shape:
        trained = int((labels != -100).sum())
    return Tokens(int(real), padded, trained, int(sum(length * length for length in lengths)))


def gflop(work: Work, tokens: Tokens) -> float:
    return (work.token * tokens.real + work.trained * tokens.trained + work.pair * tokens.squares) / 1e9
