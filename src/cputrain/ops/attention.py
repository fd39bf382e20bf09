"""Attention over ragged sequences: scores, softmax and dropout in tiles that never leave the cache.

Tensors are (tokens, heads, size); `Sequences` says which tokens belong together. Only the output and the log-sum-exp
of each row of scores are kept; the backward pass recomputes the probabilities (csrc/kernels/attention_*.cpp).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cputrain import native
from cputrain.native.operands import address, require, rows_of, saved_dtype
from cputrain.ops.dropout import draw_key, factors
from cputrain.ops.gradient import fp32_backward


@dataclass(frozen=True, eq=False)  # tensors have no one answer to ==
class Sequences:
    """Sequence i is tokens starts[i] … starts[i] + lengths[i]; tokens of no sequence are padding, with results of 0."""

    starts: Tensor  # int64
    lengths: Tensor  # int64
    total: int

    def __post_init__(self) -> None:
        """The kernels trust these numbers with memory, and threads write what belongs to different sequences."""
        for tensor in (self.starts, self.lengths):
            if tensor.dtype != torch.int64 or tensor.shape != (len(self.lengths),) or not tensor.is_contiguous():
                found = " and ".join(f"{x.dtype} {tuple(x.shape)}" for x in (self.starts, self.lengths))
                raise ValueError(f"sequences need starts and lengths as int64 vectors of one length, found {found}")
        previous = 0
        for start, length in sorted(zip(self.starts.tolist(), self.lengths.tolist(), strict=True)):
            if length < 0 or start < previous or start + length > self.total:
                raise ValueError(
                    f"sequences must lie behind one another within {self.total} tokens; "
                    f"found one of {length} tokens that starts at {start}, where {previous} was the first free token"
                )
            previous = start + length

    @staticmethod
    def from_lengths(lengths: Sequence[int] | Tensor) -> Sequences:
        """Sequences behind one another without gaps."""
        lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu").flatten()
        return Sequences(lengths.cumsum(0) - lengths, lengths, int(lengths.sum()))

    @staticmethod
    def dense(batch: int, length: int) -> Sequences:
        """`batch` sequences of one length, as a (batch, length, …) tensor holds them."""
        return Sequences(torch.arange(batch) * length, torch.full((batch,), length), batch * length)

    @cached_property
    def order(self) -> Tensor:
        """The sequences' numbers, longest first: threads that take the long ones first finish together."""
        return self.lengths.argsort(descending=True, stable=True)

    @cached_property
    def longest(self) -> int:
        return int(self.lengths.max()) if len(self.lengths) else 0

    @cached_property
    def padded(self) -> bool:
        """Whether there are tokens of no sequence."""
        return int(self.lengths.sum()) < self.total


@dataclass(frozen=True)
class Settings:
    """What a forward and its backward have in common beside tensors."""

    sequences: Sequences
    scale: float
    causal: bool = False
    p: float = 0.0
    key: int = 0  # of the dropout
    window: int | None = None
    cap: float = 0.0


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    *,
    scale: float,
    causal: bool = False,
    p: float = 0.0,
    bias: Tensor | None = None,
    window: int | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """dropout(softmax(scale · q kᵀ + bias)) v within each sequence.

    q is (tokens, heads, size), k and v are (tokens, kv_heads, size): each key/value head serves heads / kv_heads
    query heads. bias broadcasts to (sequences, heads, queries, keys) and may hold -inf; a query all of whose keys are
    masked so has a zero result and no gradient. `window`: keys more than so many tokens away are hidden. `cap`: a score
    s becomes cap · tanh(s / cap), before the bias. `sinks`, one for each head, are scores without a key that take their
    share of the softmax.
    """
    _check(q, k, v, sequences)
    if (window is not None and window < 0) or cap < 0:
        raise ValueError(f"attention needs a window and a cap of 0 or more, found {window} and {cap}")
    if bias is not None:
        require_bias(bias)
        bias = four_dimensions(bias, sequences, q.shape[1])
    require("attention", (q.shape[1],), sinks=sinks)
    settings = Settings(sequences, scale, causal, p, draw_key() if p > 0 else 0, window, cap)
    return _Attention.apply(q, k, v, bias, sinks, settings)


def split_packed(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the three parts, each (tokens, heads, size)."""
    if qkv.dim() != 2 or qkv.shape[1] % (3 * heads):
        raise ValueError(f"packed attention needs (tokens, 3 · {heads} heads · size), found {tuple(qkv.shape)}")
    return qkv.view(qkv.shape[0], 3, heads, qkv.shape[1] // (3 * heads)).unbind(1)


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    *,
    scale: float,
    causal: bool = False,
    p: float = 0.0,
    key: int = 0,
    bias: Tensor | None = None,
    window: int | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same in PyTorch, in any dtype, sequence by sequence: what `attention` computes once its key is drawn."""
    heads = q.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    if bias is not None:
        bias = four_dimensions(bias, sequences, heads)
    kept = None
    if p > 0:
        rows, longest = sequences.total, sequences.longest
        kept = factors(key, p, heads * rows, longest).view(heads, rows, longest)
    out = torch.zeros_like(q)
    for number, (start, length) in enumerate(zip(sequences.starts.tolist(), sequences.lengths.tolist(), strict=True)):
        tokens = slice(start, start + length)
        scores = torch.einsum("qhd,khd->hqk", q[tokens], k[tokens]) * scale
        scores = cap * (scores / cap).tanh() if cap else scores
        if bias is not None:
            scores = scores + bias[number if bias.shape[0] > 1 else 0, :, :length, :length]
        if causal:
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        if window is not None:
            near = torch.ones(length, length).tril(window).triu(-window).bool()
            scores = scores.masked_fill(~near, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, length, 1)), -1)
        masked = (scores == -torch.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(masked, 0).softmax(-1).masked_fill(masked, 0)[..., :length]
        if kept is not None:
            weights = weights * kept[:, tokens, :length].to(q.dtype)
        out = out.index_put((torch.arange(start, start + length),), torch.einsum("hqk,khd->qhd", weights, v[tokens]))
    return out


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, settings: Settings, bias: Tensor | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp (heads, tokens) that the backward pass needs, without autograd.

    q, k and v may be bfloat16, all of them; the output is float32.
    """
    sequences = settings.sequences
    new = torch.zeros if sequences.padded else torch.empty
    out, lse = (new(shape, dtype=torch.float32) for shape in (q.shape, (q.shape[1], sequences.total)))
    problem = _problem(q, k, v, out, lse, settings, bias, sinks)
    native.kernels().attention_forward(ctypes.addressof(problem))
    return out, lse


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    settings: Settings,
    into: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None = None,
    dbias: Tensor | None = None,
) -> None:
    """Writes the gradients of q, k and v into three tensors, whatever their token and head strides; adds to dbias.

    q, k and v may be bfloat16, all of them.
    """
    if settings.sequences.padded:
        for grad in into:
            grad.zero_()
    problem = _problem(q, k, v, out, lse, settings, bias)
    names = ("gradient", "gradient of q", "gradient of k", "gradient of v")
    shapes = (q.shape, q.shape, k.shape, k.shape)
    tensors = (_head_tensor(*part) for part in zip(names, (grad_out, *into), shapes, strict=True))
    grads = _Gradients(*tensors, _bias_tensor("gradient of the bias", dbias, settings.sequences, q.shape[1]))
    native.kernels().attention_backward(ctypes.addressof(problem), ctypes.addressof(grads))


def sinks_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Of each head: a sink's probability takes from every query what this would gain by its result."""
    gained = (grad_out * out).sum(-1).T
    return -((sinks[:, None] / math.log(2) - lse).exp2() * gained).sum(1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, settings):
        q, k, v, bias, sinks = (_unit_stride(x) for x in (q, k, v, bias, sinks))
        out, lse = attention_forward(q, k, v, settings, bias, sinks)
        ctx.save_for_backward(q, k, v, out, lse, bias, sinks)
        ctx.settings = settings
        return out

    @staticmethod
    @fp32_backward
    def backward(ctx, grad):
        q, k, v, out, lse, bias, sinks = ctx.saved_tensors
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dbias = bias.new_zeros(bias.shape) if ctx.needs_input_grad[3] else None
        attention_backward(_unit_stride(grad), q, k, v, out, lse, ctx.settings, grads, bias, dbias)
        dsinks = sinks_gradient(grad, out, lse, sinks) if ctx.needs_input_grad[4] else None
        return *grads, dbias, dsinks, None


def _check(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != torch.float32 or x.device.type != "cpu" or x.dim() != 3 or x.shape[0] != sequences.total:
            raise ValueError(
                f"attention needs {name} as float32 on the CPU of shape ({sequences.total} tokens, heads, size), "
                f"found {x.dtype} on {x.device} of shape {tuple(x.shape)}"
            )
    if k.shape != v.shape or k.shape[2] != q.shape[2] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            "attention needs keys and values of one shape, with the queries' head size and a number of heads that "
            f"divides theirs; found q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )


def require_bias(bias: Tensor) -> None:
    if bias.dtype != torch.float32 or not bias.is_cpu:
        raise ValueError(f"attention's bias must be float32 on the CPU, found {bias.dtype} on {bias.device}")


def four_dimensions(bias: Tensor, sequences: Sequences, heads: int) -> Tensor:
    """The bias as (sequences or 1, heads or 1, queries, keys); autograd brings its gradient back to its shape."""
    four = bias[(None,) * (4 - bias.dim())]
    count, length = len(sequences.lengths), sequences.longest
    if (
        four.shape[0] not in (1, count)
        or four.shape[1] not in (1, heads)
        or not all(size == 1 or size >= length for size in four.shape[2:])
    ):
        raise ValueError(
            f"attention's bias must broadcast to ({count} sequences, {heads} heads, {length} queries, {length} keys), "
            f"found {tuple(bias.shape)}"
        )
    return four.expand(-1, -1, *(max(size, length) for size in four.shape[2:]))


def _unit_stride(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


# The structures of csrc/api.h, field by field.
class _HeadTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]


class _BiasTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sequence_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
    ]


_COUNTS = ("sequences", "total", "heads", "kv_heads", "size", "causal", "window", "bf16")


class _Problem(ctypes.Structure):
    _fields_ = [
        *((name, _HeadTensor) for name in ("q", "k", "v", "out")),
        ("lse", ctypes.c_void_p),
        ("bias", _BiasTensor),
        *((name, ctypes.c_void_p) for name in ("starts", "lengths", "order")),
        *((name, ctypes.c_int64) for name in _COUNTS),
        *((name, ctypes.c_float) for name in ("scale", "p", "cap")),
        ("sinks", ctypes.c_void_p),
        ("key", ctypes.c_uint64),
    ]


class _Gradients(ctypes.Structure):
    _fields_ = [*((name, _HeadTensor) for name in ("out", "q", "k", "v")), ("bias", _BiasTensor)]


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    settings: Settings,
    bias: Tensor | None,
    sinks: Tensor | None = None,
) -> _Problem:
    sequences, (_, heads, size) = settings.sequences, q.shape
    total, count, kv_heads, dtype = sequences.total, len(sequences.lengths), k.shape[1], saved_dtype(q)
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"attention: {kv_heads} heads of keys and values don't divide {heads} heads of queries")
    orders = (("starts", sequences.starts), ("lengths", sequences.lengths), ("order", sequences.order))
    return _Problem(
        _head_tensor("q", q, (total, heads, size), dtype),
        _head_tensor("k", k, (total, kv_heads, size), dtype),
        _head_tensor("v", v, (total, kv_heads, size), dtype),
        _head_tensor("out", out, (total, heads, size)),
        address("attention: log-sum-exp", lse, heads * total),
        _bias_tensor("bias", bias, sequences, heads),
        *(address(f"attention: the sequences' {name}", x, count, torch.int64) for name, x in orders),
        *(count, total, heads, kv_heads, size),
        *(settings.causal, -1 if settings.window is None else settings.window, q.dtype == torch.bfloat16),
        *(settings.scale, settings.p, settings.cap),
        address("attention: sinks", sinks, heads),
        settings.key,
    )


def _head_tensor(
    name: str, x: Tensor, shape: tuple[int, int, int] | torch.Size, dtype: torch.dtype = torch.float32
) -> _HeadTensor:
    return _HeadTensor(*rows_of(f"attention: {name}", x, shape, dtype))


def _bias_tensor(name: str, bias: Tensor | None, sequences: Sequences, heads: int) -> _BiasTensor:
    """Of what `_four_dimensions` has made, or of its gradient; queries and keys beyond the longest aren't read."""
    if bias is None:
        return _BiasTensor(None, 0, 0, 0)
    count, head_count, queries, keys = bias.shape
    if count not in (1, len(sequences.lengths)) or head_count not in (1, heads):
        raise ValueError(f"attention: {name} is for {count} sequences and {head_count} heads")
    if min(queries, keys) < sequences.longest:
        raise ValueError(f"attention: {name} is for {queries} queries and {keys} keys, not {sequences.longest}")
    data, sequence_stride, head_stride, row_stride = rows_of(f"attention: {name}", bias, bias.shape)
    return _BiasTensor(data, sequence_stride if count > 1 else 0, head_stride if head_count > 1 else 0, row_stride)
