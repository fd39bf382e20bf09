"""A copy of a module to be asked in its place: random weights, no hooks, no memory worth mentioning.

A module can't be asked itself. Its weights may hide what it does (ones and zeros at first), its hooks are the user's,
and some modules change when they run. A twin has the module's class, code and attributes, and its parameters are views
of a few small buffers of random numbers: rows overlap, so that a matrix of a gigabyte costs a megabyte.
"""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# A row of a large matrix begins this many numbers behind the one before: a prime, which no period of heads meets.
_ROW_STEP = 13
# Matrices of a stack (experts) overlap in the same way, but begin where vectors of 64 bytes may.
_MATRIX_STEP = 208
_LARGE = 1 << 24  # numbers: what is smaller is contiguous, which products needn't copy
_SMALL = 32
_OWN = "_cputrain"  # begins the names of what cputrain keeps on modules


class CannotCopy(Exception):
    """A module has parts that can't be copied, or that would bring along more than the module."""


def small_sizes(module: nn.Module, kept: Collection[int] = ()) -> dict[int, int]:
    """Smaller ones for the sizes of its parameters, in the same order, but for those to be kept: large layers are slow.

    Code that knows a size fails with another, and then has to be asked in full.
    """
    found = {size for shape in _shapes(module) for size in shape if size > _SMALL}
    return {size: _SMALL + 8 * (rank + 1) for rank, size in enumerate(sorted(found.difference(kept)))}


def attention_sizes(module: nn.Module) -> set[int]:
    """Sizes that attention cuts into heads; all sizes, if no part is known to be attention."""
    parts = [part for part in module.modules() if "attention" in type(part).__name__.lower()] or [module]
    return {size for part in parts for shape in _shapes(part) for size in shape}


def _shapes(module: nn.Module) -> Iterator[tuple[int, ...]]:
    for part in module.modules():
        if _is_packed(part):
            yield part.out_features, part.in_features  # type: ignore[misc]
        else:
            yield from (tuple(found.shape) for found in part._parameters.values() if found is not None)


def _is_packed(part: nn.Module) -> bool:
    """A linear layer whose weight is stored in fewer bits (bitsandbytes): in a twin a plain one stands for it."""
    if not isinstance(part, nn.Linear) or type(part) is nn.Linear or not isinstance(part.weight, Tensor):
        return False
    shape = part.out_features, part.in_features
    return type(part.weight) is not nn.Parameter and (
        tuple(part.weight.shape) != shape or not part.weight.is_floating_point()
    )


def twin_of(
    module: nn.Module, omitted: Callable[[nn.Module], bool] | None = None, sizes: dict[int, int] | None = None
) -> nn.Module:
    """A twin; modules of lists for which `omitted` is true are left out of it, and `sizes` are replaced."""
    noise = _Noise(sizes or {})
    memo: dict[int, Any] = {}
    parts = list(module.modules())
    left_out = {id(part) for part in parts if omitted is not None and omitted(part)}
    inside = {id(part) for part in parts}
    for part in parts:
        if id(part) in left_out:
            memo[id(part)] = _OMITTED
            continue
        if _is_packed(part):
            memo[id(part)] = noise.linear(part)  # type: ignore[arg-type]
            continue
        _prepare(part, inside, noise, memo)
    try:
        twin = copy.deepcopy(module, memo)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        raise CannotCopy(f"it can't be copied ({type(error).__name__})") from error
    for part in twin.modules():
        if isinstance(part, nn.ModuleList) and _OMITTED in list(part):
            part._modules = {str(i): m for i, m in enumerate(m for m in part if m is not _OMITTED)}
        for name in [name for name in part.__dict__ if name.startswith(_OWN)]:
            del part.__dict__[name]
        _tell_size(part)
    return twin


def _tell_size(part: nn.Module) -> None:
    """The attributes by which torch's own layers tell their sizes."""
    if type(part) is nn.Linear:
        part.out_features, part.in_features = part.weight.shape
    elif type(part) is nn.LayerNorm and part.weight is not None:
        part.normalized_shape = tuple(part.weight.shape)
    elif type(part) is nn.Embedding:
        part.num_embeddings, part.embedding_dim = part.weight.shape
        if part.padding_idx is not None and part.padding_idx >= part.num_embeddings:
            part.padding_idx = 0


_OMITTED = nn.Identity()


def _prepare(part: nn.Module, inside: set[int], noise: _Noise, memo: dict[int, Any]) -> None:
    """Tells deepcopy what stands for the parameters, hooks and records of one module."""
    for name, value in part.__dict__.items():
        if name in _HOOKS:
            memo[id(value)] = OrderedDict()
        elif name.startswith(_OWN) and not isinstance(value, (bool, str, tuple)):  # which others may have, too
            memo[id(value)] = None
        elif any(id(found) not in inside for found in _modules_in(value)):
            raise CannotCopy(f"its {name} holds a module that is no part of it")
    for parameter in part._parameters.values():
        if parameter is not None and id(parameter) not in memo:
            memo[id(parameter)] = noise.parameter(parameter)
    for buffer in part._buffers.values():
        if buffer is not None and buffer.requires_grad:
            raise CannotCopy("a buffer of it requires gradients")


def _modules_in(value: Any) -> list[nn.Module]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else (value,)
    return [found for found in values if isinstance(found, nn.Module)]


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a matrix, or of a stack of matrices: contiguous rows, which overlap where the matrix is large."""
    *leading, rows, width = shape
    row_step = _ROW_STEP if not leading and rows * width > _LARGE else width
    steps = [_MATRIX_STEP * torch.Size(leading[i + 1 :]).numel() for i in range(len(leading))]
    return *steps, row_step, 1


class _Noise:
    """Random parameters: matrices whose products keep the size of their input, vectors of about one, none of them 0."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self._sizes = sizes
        self._generator = torch.Generator().manual_seed(20240229)
        self._buffers: dict[int, Tensor] = {}
        self._next = 0

    def parameter(self, like: nn.Parameter) -> nn.Parameter:
        try:
            shape = tuple(like.shape)
        except (RuntimeError, ValueError) as error:  # a lazy parameter has no shape yet
            raise CannotCopy("a parameter of it has no shape yet") from error
        dtype = like.dtype if like.dtype.is_floating_point else None
        if dtype is None or like.layout is not torch.strided:
            raise CannotCopy(f"a parameter of it is {like.dtype}")
        return nn.Parameter(self._view(tuple(self._sizes.get(size, size) for size in shape)))

    def linear(self, like: nn.Linear) -> nn.Linear:
        shape = like.out_features, like.in_features
        made = nn.Linear(1, 1, bias=like.bias is not None, device="meta")  # draws no random numbers
        made.weight = self.parameter(nn.Parameter(torch.empty(shape, device="meta")))
        if like.bias is not None:
            made.bias = self.parameter(like.bias)
        return made.train(like.training)

    def _view(self, shape: tuple[int, ...]) -> Tensor:
        self._next = (self._next + 104) % 1000  # another part of the buffer for each parameter, as aligned as torch's
        if len(shape) < 2:
            count = torch.Size(shape).numel()
            return self._buffer(0, self._next + count)[self._next : self._next + count].view(shape)
        strides = _strides(shape)
        count = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size) + 1
        return self._buffer(shape[-1], self._next + count).as_strided(shape, strides, self._next)

    def _buffer(self, width: int, count: int) -> Tensor:
        """Numbers of a size for matrices of this width; 0: for vectors."""
        known = self._buffers.get(width)
        if known is None or len(known) < count:
            self._buffers[width] = known = self._numbers(width, count)
        return known

    def _numbers(self, width: int, count: int) -> Tensor:
        options = {"generator": self._generator, "dtype": torch.float32, "device": "cpu"}
        if width:
            return torch.randn(count, **options) / width**0.5
        sign = torch.randint(0, 2, (count,), generator=self._generator, device="cpu") * 2 - 1
        return (0.5 + torch.rand(count, **options)) * sign


# Attributes in which the layers of a stack differ although they compute the same; peft notes each target's name.
_NUMBERS = {"layer_idx", "layer_id", "layer_index", "layer_number", "target_name"}


def signature(module: nn.Module) -> tuple:
    """Equal for modules whose code, sizes and settings are the same, whatever their weights."""
    return tuple((name, type(part), _sizes(part), _settings(part)) for name, part in module.named_modules())


def _sizes(part: nn.Module) -> tuple:
    tensors = (*part._parameters.items(), *part._buffers.items())
    return tuple((name, None if x is None else (tuple(x.shape), x.dtype)) for name, x in tensors)


def _settings(part: nn.Module) -> tuple:
    if _is_packed(part):  # its twin is a plain layer, whatever is kept beside the weight
        return part.out_features, part.in_features
    named = ((name, value) for name, value in part.__dict__.items() if not name.startswith("_"))
    return tuple((name, _comparable(value)) for name, value in named if name not in _NUMBERS)


def _comparable(value: Any) -> Any:
    if isinstance(value, (int, float, str, bytes, type(None), torch.dtype, torch.device)):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_comparable, value))
    if type(value) is dict:  # what peft notes of each adapter
        return dict, tuple((key, _comparable(entry)) for key, entry in value.items() if key not in _NUMBERS)
    if isinstance(value, types.MethodType):  # a method on the instance is bound to each layer for itself
        return type(value), value.__func__
    return type(value), id(getattr(value, "_cputrain_original", value))


def repeated_layers(module: nn.Module) -> set[nn.Module]:
    """Layers of its lists that repeat earlier ones: what a list computes is seen in the layers before them.

    At least two layers of a list stay, and all before the last of a new kind, because models count their layers.
    """
    repeated: set[nn.Module] = set()
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            kinds = [(signature(layer), _of_layer(module, i, len(child))) for i, layer in enumerate(child)]
            last_new = max((kinds.index(kind) for kind in kinds), default=0)
            repeated.update(list(child)[max(last_new + 1, 2) :])
    return repeated


def _of_layer(module: nn.Module, number: int, count: int) -> tuple:
    """What the config says of one layer: lists with an entry for each (`layer_types`)."""
    config = getattr(module, "config", None)
    lists = [v for v in vars(config).values() if isinstance(v, (list, tuple)) and len(v) == count] if config else []
    return tuple(repr(values[number]) for values in lists)


def short_twins(module: nn.Module, *stacks: nn.Module) -> Iterator[tuple[dict[int, int], nn.Module]]:
    """Twins of `module`, and which sizes are smaller in each: without layers of `stacks` that repeat others, if need be
    at full size, at last with all layers."""
    repeated = {layer for stack in stacks for layer in repeated_layers(stack)}
    sizes = small_sizes(module, attention_sizes(module))
    if sizes:
        yield sizes, twin_of(module, repeated.__contains__, sizes)
    yield {}, twin_of(module, repeated.__contains__)
    if repeated:
        yield {}, twin_of(module)
