"""What a call of a kernel must do at least: operations, bytes to be moved, or a product that can be replayed alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

# Kernels that answer questions, and take no time of a step.
IGNORED = {"int16_packed_bytes", "int16_use_vnni"}


class Work(NamedTuple):
    """What a call must do at least: the group that it is reported in, and bytes, operations or a product to replay."""

    group: str
    bytes_moved: int = 0
    operations: int = 0
    product: Product | None = None


class Source(NamedTuple):
    """A side of an int16 product: packed on the way from `stride`, or packed before; 8 or 4 bits count as two bytes."""

    packed: bool
    two_bytes: bool = False
    stride: int = 0
    by_columns: bool = False
    sums: bool = False


class Product(NamedTuple):
    rows: int
    cols: int
    depth: int
    left: Source
    right: Source
    bias: bool
    accumulate: bool
    plus: int = 0  # depth of the second product that is added, as an adapter's


class Fp32Product(NamedTuple):
    """A product of torch's: the name of its function, and shape and strides of each operand."""

    function: str
    operands: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @property
    def operations(self) -> int:
        (rows, depth), (_, cols) = (shape for shape, _ in self.operands[-2:])
        return 2 * rows * depth * cols


def work_of(name: str, args: tuple) -> Work:
    """From a kernel's arguments, whose order csrc/api.h has."""
    if name.startswith("attention_"):
        return _attention(name, args)
    if name == "int16_product":
        return _int16_product(args)
    group, bytes_moved = MOVED[name]
    return Work(group, bytes_moved(*args))


def _attention(name: str, args: tuple) -> Work:
    """Two products in the forward, five in the backward; half of each if it is causal."""
    from cputrain.ops import attention

    problem = attention._Problem.from_address(args[0])
    lengths = (ctypes.c_int64 * problem.sequences).from_address(problem.lengths)
    pairs = sum(n * (n + 1) // 2 if problem.causal else n * n for n in lengths)
    products = 2 if name == "attention_forward" else 5
    return Work("attention", operations=products * 2 * problem.heads * problem.size * pairs)


def _int16_product(args: tuple) -> Work:
    from cputrain.formats.int16_matmul import _Operand, _Term

    left, right = (
        Source(not side.source, bool(side.kind), side.stride, bool(side.by_columns), bool(side.sums))
        for side in (_Operand.from_address(place) for place in args[:2])
    )
    rows, cols, depth, term, bias, accumulate = args[4:10]
    plus = 0 if term is None else _Term.from_address(term).depth
    return Work("products", product=Product(rows, cols, depth, left, right, bias is not None, bool(accumulate), plus))


def torch_product(name: str, args: tuple) -> Work:
    operands = tuple((tuple(x.shape), tuple(x.stride())) for x in args)
    return Work("products", product=Fp32Product(name, operands))


def _sum(count: int, sizes: int) -> int:
    return sum((ctypes.c_int64 * count).from_address(sizes))


def _floats(rows: int, cols: int, times: float) -> int:
    return int(4 * rows * cols * times)


# Group, and the bytes that a kernel reads and writes at least, from its arguments.
MOVED: dict[str, tuple[str, Callable[..., int]]] = {
    "activation": ("activations", lambda h, b, out, kept, rows, cols, kind: _floats(rows, cols, 2.5 if kept else 2)),
    "activation_backward": (
        "activations",
        lambda grad, h, bf16, b, grad_h, value, gb, rows, cols, kind: _floats(rows, cols, 4 if value else 3),
    ),
    "gated": ("activations", lambda gate, up, out, count, kind: 12 * count),
    "gated_backward": ("activations", lambda g, gate, up, gg, gu, value, count, kind: (24 if value else 20) * count),
    "dropout": ("norms, embeddings, dropout", lambda x, y, rows, cols, p, key: _floats(rows, cols, 2)),
    "layer_norm": (
        "norms, embeddings, dropout",
        lambda x, w, b, out, kept, mean, rstd, rows, cols, eps: _floats(rows, cols, 2.5 if kept else 2),
    ),
    "residual_norm": (
        "norms, embeddings, dropout",
        lambda *a: _floats(a[10], a[11], (3 if a[5] else 2) + (0.5 if a[6] else 0) + 1),
    ),
    "norm_backward": ("norms, embeddings, dropout", lambda *a: _floats(a[12], a[13], 4 if a[8] else 3)),
    "rms_norm": ("norms, embeddings, dropout", lambda x, w, o, out, rstd, rows, cols, eps: _floats(rows, cols, 2)),
    "rms_norm_backward": ("norms, embeddings, dropout", lambda *a: _floats(a[7], a[8], 3)),
    "embed": ("norms, embeddings, dropout", lambda *a: _floats(a[11], a[12], 2)),
    "embed_backward": ("norms, embeddings, dropout", lambda *a: _floats(a[13], a[14], 3)),
    "embedding_grad": (
        "norms, embeddings, dropout",
        lambda grad, ids, table, rows, cols, skip: _floats(rows, cols, 3),
    ),
    "find_outside": ("norms, embeddings, dropout", lambda ids, count, limit, place: 8 * count),
    "cross_entropy": ("loss", lambda *a: _floats(a[7], a[8], 2)),
    "round_to_bf16": ("packing", lambda x, b, out, rows, cols: _floats(rows, cols, 1.5)),
    "round_to_int16": ("packing", lambda x, out, rows, cols: _floats(rows, cols, 1.5)),
    "read_int16": ("packing", lambda kept, out, rows, cols: _floats(rows, cols, 1.5)),
    "read_bf16": ("packing", lambda kept, f, o, out, rows, cols: _floats(rows, cols, 1.5)),
    "int16_pack": (
        "packing",
        lambda x, bf16, s, rows, cols, by_rows, r, by_columns, c, sums: _floats(
            rows, cols, (0.5 if bf16 else 1) + (0.5 if by_rows else 0) + (0.5 if by_columns else 0)
        ),
    ),
    "int16_pack_activated": ("packing", lambda h, b, kind, stride, rows, cols, out: _floats(rows, cols, 1.5)),
    "low_rank": ("low-rank paths", lambda x, stride, a, out, rows, cols, *rest: _floats(rows, cols, 1)),
    "low_rank_a_grad": ("low-rank paths", lambda g, x, stride, grad_a, rows, cols, *rest: _floats(rows, cols, 1)),
    "low_rank_x_grad": ("low-rank paths", lambda g, a, grad_x, rows, cols, *rest: _floats(rows, cols, 2)),
    "unpack_weight": ("packing", lambda weight, out, rows, cols: _floats(rows, cols, 1)),
    "adam": ("optimizer", lambda count, sizes, *rest: 28 * _sum(count, sizes)),
    "sgd": ("optimizer", lambda count, sizes, p, g, buffers, *rest: (20 if buffers else 12) * _sum(count, sizes)),
    "sum_of_squares": ("optimizer", lambda count, sizes, *rest: 4 * _sum(count, sizes)),
    "scale": ("optimizer", lambda count, sizes, *rest: 8 * _sum(count, sizes)),
    "ccl_reduce": ("communication", lambda dtype, kind, out, sources, ranks, count, *rest: 4 * count * (ranks + 1)),
}
