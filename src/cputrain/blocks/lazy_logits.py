"""Logits that are computed only where code looks at them: the loss of a language model needs them nowhere.

A vocabulary head returns `LazyLogits`, a tensor that knows hidden states, weight and bias. What models and loss
functions do to logits before the loss (float, view, slices and masks of tokens, a factor, a cap by tanh) gives such a
tensor again, and `F.cross_entropy` of one is one operator (ops/cross_entropy.py). All other code gets the values, as if
they had been there from the beginning: computed once, connected to autograd, with views that share their memory.

Code in C++ that is handed one finds a tensor with a node in the graph (`_Deferred`), whose backward is the linear
layer's. If such code has put a node of its own behind it (DDP does), results are connected through that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from cputrain.formats import Format
from cputrain.log import say_once
from cputrain.ops.cross_entropy import AS_THEY_ARE, Capping, Loss, summed_loss
from cputrain.ops.gradient import fp32_backward, without_autocast
from cputrain.ops.linear import flat, linear
from cputrain.ops.token_losses import token_losses


@dataclass(frozen=True)
class Source:
    """What logits are made of: hidden states x (…, in-features), the head's weight and bias.

    At positions that are not `real` (…) an encoder without padding has left nothing, and logits are 0.
    """

    x: Tensor
    w_VI: Tensor
    bias_V: Tensor | None
    real: Tensor | None
    format: Format
    capping: Capping = AS_THEY_ARE
    dtype: torch.dtype = torch.float32  # of the logits; a loss is computed as if they hadn't been rounded

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-1], self.w_VI.shape[0])

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.x, self.w_VI, self.bias_V) if tensor is not None]

    def of_rows(self, choose: Callable[[Tensor], Tensor]) -> Source:
        """`choose` acts on leading dimensions only."""
        return replace(self, x=choose(self.x), real=None if self.real is None else choose(self.real))

    def reshaped(self, *leading: int) -> Source:
        real = None if self.real is None else self.real.reshape(leading)
        return replace(self, x=self.x.reshape(*leading, self.x.shape[-1]), real=real)

    def values(self) -> Tensor:
        z = linear(flat(self.x).contiguous(), self.w_VI, self.bias_V, self.format).view(self.shape)
        if self.real is not None and self.bias_V is not None:
            z = z.masked_fill(~self.real.unsqueeze(-1), 0.0)
        return self.capping(z).to(self.dtype)


class _Deferred(torch.autograd.Function):
    """A tensor of the logits' shape without memory, at their place in the graph."""

    @staticmethod
    def forward(ctx, x: Tensor, w_VI: Tensor, bias_V: Tensor | None, source: Source) -> Tensor:
        ctx.save_for_backward(x, w_VI, bias_V)
        ctx.source = replace(source, x=x[..., :0], w_VI=w_VI[:0], bias_V=None)  # all but the tensors
        return Tensor._make_wrapper_subclass(LazyLogits, source.shape, dtype=source.dtype, device=x.device)  # type: ignore[attr-defined]

    @staticmethod
    @fp32_backward
    def backward(ctx, grad: Tensor):
        x, w_VI, bias_V = ctx.saved_tensors
        leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in (x, w_VI, bias_V)]
        with torch.enable_grad():
            values = replace(ctx.source, x=leaves[0], w_VI=leaves[1], bias_V=leaves[2]).values()
        wanted = [i for i in range(3) if ctx.needs_input_grad[i]]
        found = torch.autograd.grad(values, [leaves[i] for i in wanted], grad)
        grads = dict(zip(wanted, found, strict=True))
        return *(grads.get(i) for i in range(3)), None


class _Behind(torch.autograd.Function):
    """The values of logits whose gradient has to pass the node that other code has put behind ours."""

    @staticmethod
    def forward(ctx, logits: LazyLogits) -> Tensor:
        return logits.source.values()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad


class LazyLogits(Tensor):
    source: Source
    _node: Any  # ours in the graph
    _versions: list[int]  # of the source's tensors when the logits would have been computed
    _root: LazyLogits  # whose memory these are a view of; itself, if of none
    _view: Callable[[Tensor], Tensor]
    _found: Tensor | None  # the values, once computed: a root's, or a view of them
    _compute: Callable[[], Tensor] | None  # how, if not as `source.values`

    @staticmethod
    def of(
        source: Source,
        compute: Callable[[], Tensor] | None = None,
        view_of: LazyLogits | None = None,
        view: Callable[[Tensor], Tensor] | None = None,
    ) -> LazyLogits:
        made: LazyLogits = _Deferred.apply(source.x, source.w_VI, source.bias_V, source)
        made.source, made._compute, made._found = source, compute, None
        made._node = _node_of(made)
        made._versions = [_version(tensor) for tensor in source.tensors()]
        made._root, made._view = made, view or (lambda values: values)
        if view_of is not None:
            outer = view_of._view
            made._root, made._view = view_of._root, lambda values: view(outer(values))  # type: ignore[misc]
        return made

    @property
    def is_lazy(self) -> bool:
        """Nothing has looked at these logits, or at others that share their memory, and no node is behind ours."""
        return self._root._found is None and _node_of(self) is self._node

    def as_dtype(self, dtype: torch.dtype) -> LazyLogits:
        """The same as logits of a model in that dtype; only values that are read are rounded to it."""
        return self if dtype is self.dtype else LazyLogits.of(replace(self.source, dtype=dtype))

    @without_autocast
    def computed(self) -> Tensor:
        """The values, as stock would have them: what is made under autocast isn't lazy."""
        if (node := _node_of(self)) is not self._node:
            values = _Behind.apply(self)
            self._node, self._root, self._view, self._found = node, self, lambda values: values, values
        if self._found is not None:
            return self._found
        root = self._root
        if root._found is None:
            root.check()
        # Connected to the graph even if code without gradients (an accuracy) is the first to look.
        has_gradient = _plainly(Tensor.requires_grad.__get__, root)  # type: ignore[attr-defined]
        with torch.set_grad_enabled(has_gradient):
            values = root._found if root._found is not None else (root._compute or root.source.values)()
            view = values if self is root else self._view(values)
        # What is computed in inference mode can't be used outside, what is computed below autograd has no graph.
        if not torch.is_inference_mode_enabled() and values.requires_grad == has_gradient:
            root._found, self._found = values, view
        return view

    def check(self) -> None:
        """Raises if what the logits are made of is no longer what it was."""
        tensors = self.source.tensors()
        if any(tensor.untyped_storage().size() == 0 and tensor.numel() for tensor in tensors):
            raise RuntimeError(
                "cputrain: these logits are computed where they are read, and the weight of their head has been freed "
                "since (sharding does that). Read them inside the model, or set CPUTRAIN_LOGITS=computed."
            )
        if self._versions != [_version(tensor) for tensor in tensors]:
            raise RuntimeError(
                "cputrain: these logits are computed where they are read, and the weights have changed since. "
                "Read them before optimizer.step(), or set CPUTRAIN_LOGITS=computed."
            )

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if function in _ABOUT and isinstance(first, LazyLogits) and first._found is None:
            return _plainly(function, *args, **kwargs)
        lazily = _LAZILY.get(function)
        if lazily is not None and isinstance(first, LazyLogits) and first.is_lazy:
            result = lazily(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return function(*tree_map(_computed, args), **tree_map(_computed, kwargs))

    @classmethod
    def __torch_dispatch__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Operators that come from C++, below autograd."""
        args, kwargs = tree_map(_detached, args), tree_map(_detached, kwargs or {})
        return function(*args, **kwargs)


def _plainly(function: Callable, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def _node_of(logits: Tensor) -> Any:
    return _plainly(Tensor.grad_fn.__get__, logits)  # type: ignore[attr-defined]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _computed(x: Any) -> Any:
    return x.computed() if isinstance(x, LazyLogits) else x


def _detached(x: Any) -> Any:
    return x.computed().detach() if isinstance(x, LazyLogits) else x


# ---- what keeps logits lazy ----------------------------------------------------------------------------------------

# Questions that need no values.
_ABOUT = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "grad_fn", "is_leaf")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_cpu", "is_cuda", "is_sparse", "is_meta")),
    *(getattr(Tensor, name).__get__ for name in ("is_mps", "is_quantized", "is_nested", "is_mkldnn", "is_xpu")),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.get_device, Tensor.is_inference),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference),
}


def _float(logits: LazyLogits) -> Any:
    return logits.as_dtype(torch.float32)


def _to(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    given = [*args, *kwargs.values()]
    if kwargs.get("copy") or not {torch.float32, logits.dtype, "cpu", torch.device("cpu"), False, None}.issuperset(
        given
    ):
        return NotImplemented
    return _float(logits) if torch.float32 in given else logits


def _contiguous(logits: LazyLogits, memory_format: Any = torch.contiguous_format) -> Any:
    if memory_format is not torch.contiguous_format:
        return NotImplemented
    return logits if logits.source.x.is_contiguous() else LazyLogits.of(logits.source)


def _clone(logits: LazyLogits, *, memory_format: Any = None) -> Any:
    return LazyLogits.of(logits.source)


def _detach(logits: LazyLogits) -> Any:
    source = logits.source
    bias = None if source.bias_V is None else source.bias_V.detach()
    detached = replace(source, x=source.x.detach(), w_VI=source.w_VI.detach(), bias_V=bias)
    return LazyLogits.of(detached, view_of=logits, view=Tensor.detach)


def _reshape(logits: LazyLogits, *sizes: Any, shape: Any = None) -> Any:
    sizes = sizes if shape is None else (shape,)
    sizes = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    if not all(isinstance(size, int) for size in sizes) or not sizes or sizes[-1] not in (-1, logits.shape[-1]):
        return NotImplemented
    wanted = torch.empty(logits.shape, device="meta").reshape(sizes).shape
    if wanted[-1] != logits.shape[-1]:
        return NotImplemented
    reshaped = logits.source.reshaped(*wanted[:-1])
    return LazyLogits.of(reshaped, view_of=logits, view=lambda values: values.reshape(wanted))


def _index(logits: LazyLogits, index: Any) -> Any:
    """Slices and masks of tokens; the vocabulary stays whole."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(entry is None or entry is ... or isinstance(entry, (slice, int, Tensor)) for entry in entries):
        return NotImplemented
    if any(isinstance(entry, bool) for entry in entries):  # to torch a mask without dimensions, to Python 0 or 1
        return NotImplemented
    used = sum(_dimensions_used(entry) for entry in entries)
    if ... in [entry for entry in entries if not isinstance(entry, Tensor)]:
        at = next(i for i, entry in enumerate(entries) if entry is ...)
        entries[at : at + 1] = [slice(None)] * (logits.dim() - used)
        used = logits.dim()
    if used == logits.dim():
        last = entries.pop()
        if not isinstance(last, slice) or last != slice(None):
            return NotImplemented
    if not entries or any(isinstance(entry, Tensor) and entry.is_floating_point() for entry in entries):
        return NotImplemented
    copies = any(isinstance(entry, Tensor) for entry in entries)
    chosen = logits.source.of_rows(lambda x: x[tuple(entries)])
    return LazyLogits.of(chosen) if copies else LazyLogits.of(chosen, view_of=logits, view=lambda z: z[index])


def _dimensions_used(entry: Any) -> int:
    if entry is None or entry is ...:
        return 0
    is_mask = isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8)
    return entry.dim() if is_mask else 1


def _times(logits: LazyLogits, factor: Any, *, out: Any = None) -> Any:
    return _scaled(logits, factor, lambda x, by: x * by) if out is None else NotImplemented


def _divided(logits: LazyLogits, divisor: Any, *, rounding_mode: Any = None, out: Any = None) -> Any:
    if rounding_mode is not None or out is not None or (not isinstance(divisor, Tensor) and divisor == 0):
        return NotImplemented
    return _scaled(logits, divisor, lambda x, by: x / by)


def _scaled(logits: LazyLogits, by: Any, scale: Callable[[float, float], float]) -> Any:
    if isinstance(by, bool) or not isinstance(by, (int, float)):
        return NotImplemented
    before, after, tanh = logits.source.capping
    capping = Capping(before, scale(after, by), True) if tanh else Capping(scale(before, by))
    return LazyLogits.of(replace(logits.source, capping=capping))


def _plus(logits: LazyLogits, row: Any, *, alpha: Any = 1, out: Any = None) -> Any:
    """A row for all tokens, as BART's `final_logits_bias`, is one more bias."""
    source = logits.source
    if out is not None or alpha != 1 or source.capping != AS_THEY_ARE or source.real is not None:
        return NotImplemented
    vocabulary = logits.shape[-1]
    if type(row) not in (Tensor, Parameter) or row.dtype != torch.float32 or not row.is_cpu or row.dim() > logits.dim():
        return NotImplemented
    if row.shape[-1:] != (vocabulary,) or row.numel() != vocabulary:
        return NotImplemented
    row = row.reshape(vocabulary)
    return LazyLogits.of(replace(source, bias_V=row if source.bias_V is None else source.bias_V + row))


def _tanh(logits: LazyLogits, *, out: Any = None) -> Any:
    capping = logits.source.capping
    if out is not None or capping.tanh:
        return NotImplemented
    return LazyLogits.of(replace(logits.source, capping=capping._replace(tanh=True)))


def _cross_entropy(
    input: LazyLogits,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    source = input.source
    if weight is not None or size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    if input.dim() != 2 or type(target) is not Tensor or target.dtype != torch.int64 or not target.is_cpu:
        return NotImplemented
    if target.shape != input.shape[:1] or not 0 <= label_smoothing <= 1 or source.capping.after == 0:
        return NotImplemented
    counts = target != ignore_index
    if not bool((counts if source.real is None else counts & source.real).any()):
        return NotImplemented
    input._root.check()
    return _loss(source, target, counts, reduction, Loss(source.capping, label_smoothing)).to(source.dtype)


_BEHIND_PADDING = (
    "labels that stock predicts from a padded position (the first token behind padding on the left) add "
    "log(vocabulary) to the loss and have no gradient: give them -100, pad on the right, or keep padding"
)


@without_autocast
def _loss(source: Source, labels: Tensor, counts: Tensor, reduction: str, loss: Loss) -> Tensor:
    """Of the tokens that count. Padded positions, whose logits are 0, lose log(vocabulary) each."""
    vocabulary = source.w_VI.shape[0]
    tokens, padded = int(counts.sum()), torch.zeros_like(counts) if source.real is None else counts & ~source.real
    if bool(padded.any()):
        say_once(_BEHIND_PADDING)
    place = (counts & ~padded).nonzero().squeeze(1)
    x_TI, chosen = (source.x, labels) if len(place) == len(labels) else (source.x[place], labels[place])
    operands = x_TI, source.w_VI, source.bias_V, chosen
    if reduction == "none":
        of_padding = padded.float() * math.log(vocabulary)
        return of_padding.index_copy(0, place, token_losses(*operands, loss, source.format))
    divisor = tokens if reduction == "mean" else 1
    found = summed_loss(*operands, divisor, loss, source.format)
    of_padding = int(padded.sum()) * math.log(vocabulary) / divisor
    return found + of_padding if of_padding else found


_LAZILY: dict[Callable, Callable] = {
    F.cross_entropy: _cross_entropy,
    Tensor.float: _float,
    Tensor.cpu: lambda logits: logits,
    Tensor.to: _to,
    Tensor.contiguous: _contiguous,
    **dict.fromkeys((Tensor.clone, torch.clone), _clone),
    **dict.fromkeys((Tensor.detach, torch.detach), _detach),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape), _reshape),
    Tensor.__getitem__: _index,
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), _times),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, Tensor.true_divide, torch.div, torch.true_divide), _divided),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _tanh),
    **dict.fromkeys((Tensor.add, Tensor.__add__, torch.add), _plus),
}
