"""Every operator with each of its operands replaced by one that doesn't fit: none may reach a kernel.

`python -O -m tests.unit.ops.wrong_operands` prints what went wrong, and nothing if all is well: checks that are
`assert` statements don't run there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from cputrain.formats import FORMATS
from cputrain.ops.activation import bias_activation
from cputrain.ops.attention import Sequences, attention
from cputrain.ops.dropout import dropout
from cputrain.ops.embeddings import embed
from cputrain.ops.feed_forward import feed_forward, feed_forward_norm
from cputrain.ops.linear import linear
from cputrain.ops.norm import layer_norm
from cputrain.ops.residual_block import residual_block
from cputrain.ops.self_attention import self_attention

# In the names of shapes: T tokens, H hidden, M middle; heads of 8.
T, H, M, HEADS = 20, 32, 48, 4
SEQUENCES = Sequences.from_lengths([12, 8])
EPS = 1e-5
KINDS = ("fp32", "int16", "bf16")
Operator = Callable[..., Tensor]


def _embed(word_ids, type_ids, position_ids, *weights):
    return embed(word_ids, type_ids, position_ids, *weights, EPS, 0.0)


def _self_attention(kind: str) -> Operator:
    def run(x, *weights_and_biases):
        parts = list(weights_and_biases)
        format = FORMATS[kind]()
        return self_attention(x, parts[:3], parts[3:], SEQUENCES, heads=HEADS, scale=0.3, format=format)

    return run


def _in_kind(kind: str) -> dict[str, tuple[Operator, dict[str, tuple[int, ...]]]]:
    """The operators that multiply, in one of the number formats."""
    two = {"x": (T, H), "weight1": (M, H), "bias1": (M,), "weight2": (H, M), "bias2": (H,)}
    norm = {"norm_weight": (H,), "norm_bias": (H,)}
    triple = {f"weight_{n}": (H, H) for n in "qkv"} | {f"bias_{n}": (H,) for n in "qkv"}
    return {
        "linear": (lambda x, w, b: linear(x, w, b, FORMATS[kind]()), {"x": (T, H), "weight": (M, H), "bias": (M,)}),
        "feed_forward": (lambda *a: feed_forward(*a, "gelu", 0.0, FORMATS[kind]()), two),
        "feed_forward_norm": (lambda *a: feed_forward_norm(*a, "gelu", EPS, 0.0, FORMATS[kind]()), two | norm),
        "residual_block": (
            lambda *a: residual_block(*a, EPS, 0.0, FORMATS[kind]()),
            {"x": (T, M), "residual": (T, H), "weight": (H, M), "bias": (H,)} | norm,
        ),
        "self_attention": (_self_attention(kind), {"x": (T, H)} | triple),
    }


_SIMPLE: dict[str, tuple[Operator, dict[str, tuple[int, ...]]]] = {
    "dropout": (lambda x: dropout(x, 0.0), {"x": (T, H)}),
    "bias_activation": (lambda h, b: bias_activation(h, b, "gelu"), {"h": (T, H), "bias": (H,)}),
    "layer_norm": (lambda *a: layer_norm(*a, EPS), {"x": (T, H), "weight": (H,), "bias": (H,)}),
    "attention": (
        lambda q, k, v, bias: attention(q, k, v, SEQUENCES, scale=0.3, bias=bias),
        {"q": (T, HEADS, 8), "k": (T, HEADS, 8), "v": (T, HEADS, 8), "bias": (2, HEADS, 12, 12)},
    ),
    "embed": (
        _embed,
        {"input_ids": (T,), "token_type_ids": (T,), "position_ids": (T,), "word": (50, H), "position": (50, H)}
        | {"token_type": (50, H), "ln_weight": (H,), "ln_bias": (H,)},
    ),
}
OPERATORS = _SIMPLE | {f"{name} in {kind}": case for kind in KINDS for name, case in _in_kind(kind).items()}


def operands_of(operator: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    operands = {}
    for name, shape in OPERATORS[operator][1].items():
        if name.endswith("_ids"):
            operands[name] = torch.randint(50, shape, generator=generator)
            operands[name][0] = 49  # the table's last row
        else:
            operands[name] = torch.randn(shape, generator=generator)
    return operands


def results(operator: str, operands: dict[str, Tensor]) -> list[Tensor | None]:
    """The output and all gradients; a sum's gradient is one number, expanded."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in operands.values()]
    out = OPERATORS[operator][0](*leaves)
    out.sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@cache
def expected_results(operator: str) -> list[Tensor | None]:
    return results(operator, operands_of(operator))


def _widened(x: Tensor) -> Tensor:
    """The same numbers with a gap behind each."""
    return torch.stack((x, x), -1)[..., 0]


VARIANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "float64": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
    "too short": lambda x: x[..., :-1].contiguous(),
    "too long": lambda x: torch.cat((x, x[..., :1]), -1),
    "fewer rows": lambda x: x[:-1].contiguous(),
    "more rows": lambda x: torch.cat((x, x[:1])),
    "another dimension": lambda x: x[None],
    "not contiguous": _widened,
}


# What fits although it looks odd: an input that alone decides the result's shape, ids of any shape, longer tables, a
# bias for all sequences or with more keys than there are.
FITS = {
    *(("dropout", "x", variant) for variant in VARIANTS if variant not in ("float64", "bfloat16")),
    *(
        (name, "h", variant)
        for name in ("bias_activation",)
        for variant in ("fewer rows", "more rows", "another dimension")
    ),
    *((name, "x", variant) for name in ("layer_norm",) for variant in ("fewer rows", "more rows", "another dimension")),
    *(
        (f"{name} in {kind}", "x", variant)
        for name in ("linear", "feed_forward", "feed_forward_norm")
        for kind in KINDS
        for variant in ("fewer rows", "more rows")
    ),
    ("attention", "bias", "fewer rows"),
    ("embed", "word", "more rows"),
    ("embed", "position", "more rows"),
    ("embed", "token_type", "more rows"),
    ("embed", "input_ids", "another dimension"),
    ("embed", "token_type_ids", "another dimension"),
    ("embed", "position_ids", "another dimension"),
    ("attention", "bias", "too long"),
}


def outcome(operator: str, operand: str, variant: str) -> str:
    """ "" if the operand was refused, or was served where it fits; else what happened."""
    operands = operands_of(operator)
    operands[operand] = VARIANTS[variant](operands[operand])
    try:
        found = results(operator, operands)
    except (ValueError, RuntimeError, IndexError) as error:
        fits = variant == "not contiguous" or (operator, operand, variant) in FITS
        known = isinstance(error, ValueError) or (operator == "embed" and variant in ("float64", "bfloat16"))
        known = known or (variant == "fewer rows" and isinstance(error, IndexError))  # of a table, as in stock
        return "" if known and not fits else f"{type(error).__name__}: {error}"
    if variant != "not contiguous" and (operator, operand, variant) not in FITS:
        return "it was not refused"
    if variant != "not contiguous":
        return ""
    pairs = zip(found, expected_results(operator), strict=True)
    same = all(a is b or torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in pairs)
    return "" if same else "other results"


def trouble(operator: str) -> list[str]:
    """What went wrong with an operator."""
    cases = [(operand, variant) for operand in OPERATORS[operator][1] for variant in VARIANTS]
    found = ((operand, variant, outcome(operator, operand, variant)) for operand, variant in cases)
    return [": ".join(case) for case in found if case[2]]


if __name__ == "__main__":
    if __debug__:
        raise SystemExit("run with python -O")
    torch.set_num_threads(1)
    for name in OPERATORS:
        print(*trouble(name), sep="\n", end="")
