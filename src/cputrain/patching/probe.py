"""Asks a module what it computes, so that it is recognised by what it does and not by what it is called.

A candidate's twin (twin.py) runs its class's method and the formula that a fused operator would compute, in training
and in evaluation, on inputs of three sizes. Results, gradients of the inputs and gradients of every parameter must
agree, the dropouts must be the same, and nothing else may be random. What a probe can't see, an attribute that changes
nothing yet, is found by its name (code_names.py).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from cputrain.formats import probing
from cputrain.patching.code_names import unexplained
from cputrain.patching.twin import CannotCopy, signature, small_sizes, twin_of

# What a module may raise that wants other inputs than its structure suggests: anything. It isn't what we took it for.
REFUSALS = (Exception,)
_SIZES = (1.0, 1e-2, 1e3, 1e6)  # of the inputs: large ones reach a clamp, small ones an epsilon
# Two orders of summation differ by less, beside what the module itself makes of a change in its inputs' last digits.
_TOLERANCE, _LAST_DIGITS = 1e-4, 1e-6
_RESULTS = "its results"


@dataclass(frozen=True)
class Formula:
    """What a fused operator computes in the place of `method`, written with a module's own parts.

    `build(module)` gives a function of the inputs, whose last dimensions are `widths`; it calls `dropped` for dropout.
    `reads` names the attributes that the operator reads at each call, or by which it is checked.
    """

    method: str
    build: Callable[[nn.Module], Callable[..., Tensor]]
    widths: tuple[int, ...]
    reads: frozenset[str]
    # Whether it holds for any sizes, so that a small twin can be asked for a large module.
    any_size: bool = False
    # The module's method as a function of the inputs, where it takes more than these.
    call: Callable[[nn.Module], Callable[..., Any]] | None = None
    # Changes attributes of the twin that the operator reads, so that both sides are seen to read them.
    vary: Callable[[nn.Module], None] | None = None


@dataclass
class Dropouts:
    """The dropouts of one run: their rates, and which were on attention weights."""

    rates: list[tuple[str, float]] = field(default_factory=list)


_dropouts: ContextVar[Dropouts | None] = ContextVar("cputrain_dropouts_of_a_probe", default=None)


def dropped(x: Tensor, p: float, training: bool) -> Tensor:
    """What stands for dropout in a formula: factors that don't commute with a product, and differ with the rate."""
    seen = _dropouts.get()
    if not training or seen is None:
        return x
    seen.rates.append(("dropout", float(p)))
    return x * (torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype, device=x.device) * (1 + p))


def note_attention_dropout(p: float) -> float:
    """Notes the rate of a dropout on attention weights while a module is probed, and gives the rate to use then: 0."""
    seen = _dropouts.get()
    if seen is None:
        return p
    if p:
        seen.rates.append(("attention", float(p)))
    return 0.0


@contextmanager
def attention_noted() -> Iterator[None]:
    """Within it stock's attention runs whose dropout was noted already: it may call dropout with a rate of 0."""
    token = _dropouts.set(None)
    try:
        yield
    finally:
        _dropouts.reset(token)


class _FixedDropout(TorchFunctionMode):
    """Puts `dropped` in the place of stock's dropout, wherever it is called."""

    def __torch_function__(self, function: Callable, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is F.dropout:
            given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
            return dropped(given["input"], given.get("p", 0.5), given.get("training", True))
        if function is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            kwargs = dict(zip(names, args, strict=False)) | kwargs
            kwargs["dropout_p"] = note_attention_dropout(kwargs.get("dropout_p", 0.0))
            return function(**kwargs)
        return function(*args, **kwargs)


@contextmanager
def fixed_dropout() -> Iterator[Dropouts]:
    """Within it dropout is a fixed pattern, and noted."""
    dropouts = Dropouts()
    token = _dropouts.set(dropouts)
    try:
        with _FixedDropout():
            yield dropouts
    finally:
        _dropouts.reset(token)


class DrawsRandomNumbers(Exception):
    """A module has drawn random numbers other than for a dropout that is called by its name."""


@contextmanager
def quietly(may_draw: bool = False) -> Iterator[None]:
    """Within it a twin can be run without a trace: gradients on, autocast off, and random numbers put back.

    On one thread: on a busy machine, threads that wait for each other make small operators a hundred times slower.
    Raises DrawsRandomNumbers if any were drawn, unless the twin `may_draw` some.
    """
    token = probing.set(True)
    before, threads = _random_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False), _no_saving_hooks():
            yield
        if not may_draw and _comparable(before) != _comparable(_random_state()):
            raise DrawsRandomNumbers
    finally:
        probing.reset(token)
        torch.set_num_threads(threads)
        _put_back(before)


def _no_saving_hooks() -> torch.autograd.graph.saved_tensors_hooks:
    """Only the innermost hooks are called: a checkpoint around the model must not count a twin's tensors as its own.

    Detached, because a result that its own node saves would keep the graph, and with it the twin, in memory for ever.
    """
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda x: x)


def _random_state() -> tuple:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def _comparable(state: tuple) -> tuple:
    """The states as values; torch's and numpy's are arrays."""
    of_torch, python, of_numpy = state
    return of_torch.numpy().tobytes(), python, None if of_numpy is None else (of_numpy[1].tobytes(), *of_numpy[2:])


def _put_back(state: tuple) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy"].random.set_state(state[2])


def random_rows(*shape: int, seed: int = 20240229) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")


# ---- comparing a module with a formula -----------------------------------------------------------------------------

# Verdicts of one call of `optimize`, by a module's signature: the layers of a model are alike.
_verdicts: ContextVar[dict[tuple, str | None] | None] = ContextVar("cputrain_verdicts", default=None)


@contextmanager
def remembering() -> Iterator[None]:
    """Within it modules that are alike are asked once."""
    token = _verdicts.set({})
    try:
        yield
    finally:
        _verdicts.reset(token)


def difference(module: nn.Module, formula: Formula) -> str | None:
    """Why `formula` can't stand for the module's method, or None if it can."""
    key = (formula.method, formula.build, formula.call, formula.widths, signature(module))
    known = _verdicts.get()
    if known is not None and key in known:
        return known[key]
    verdict = _ask(module, formula)
    if known is not None:
        known[key] = verdict
    return verdict


def _ask(module: nn.Module, formula: Formula) -> str | None:
    if formula.method == "forward":
        own = [*module._parameters, *module._buffers, *module._modules]
        unused = [name for name in own if name not in formula.reads]
        if unused:
            return f"it has a {unused[0]} that the fused operator knows nothing of"
    reason = unexplained(module, formula.method, formula.reads)
    if reason is not None:
        return reason
    try:
        return _compare(module, formula)
    except CannotCopy as error:
        return str(error)
    except DrawsRandomNumbers:
        return "it draws random numbers"
    except REFUSALS as error:
        return f"it takes other inputs ({type(error).__name__})"


def _compare(module: nn.Module, formula: Formula) -> str | None:
    sizes = small_sizes(module) if formula.any_size else {}
    if sizes:
        try:
            return _compare_twin(module, formula, sizes)
        except REFUSALS:  # its code knows its sizes
            pass
    return _compare_twin(module, formula, {})


def _compare_twin(module: nn.Module, formula: Formula, sizes: dict[int, int]) -> str | None:
    with quietly():
        twin = twin_of(module, sizes=sizes)
        stock = formula.call(twin) if formula.call else getattr(type(twin), formula.method).__get__(twin)
        _vary_rates(twin)
        if formula.vary is not None:
            formula.vary(twin)
        widths = [sizes.get(width, width) for width in formula.widths]
        inputs = random_rows(len(widths), 2, 3, max(widths)).unbind()
        inputs = tuple(x[..., :width] for x, width in zip(inputs, widths, strict=True))
        for training in (True, False):
            twin.train(training)
            ours = formula.build(twin)
            for size in _SIZES:
                reason = _differ(stock, ours, twin, [size * x for x in inputs])
                if reason is not None:
                    mode = "training" if training else "evaluation"
                    return f"it computes something else in {mode}: {reason}"
    return None


def _vary_rates(twin: nn.Module) -> None:
    """Another rate for each dropout layer, so that one read in the place of another is noticed."""
    layers = [part for part in twin.modules() if isinstance(part, nn.Dropout)]
    for number, layer in enumerate(layers):
        layer.p = 0.11 + 0.07 * (number % 11)


def _differ(stock: Callable, ours: Callable, twin: nn.Module, inputs: list[Tensor]) -> str | None:
    theirs, found = _Run(twin, stock, inputs), _Run(twin, ours, inputs)
    if theirs.rates != found.rates:
        return "its dropouts are others than the fused operator's"
    floor = rounding_of(theirs.tensors[1:])
    unlike = _unlike(theirs, found, theirs, floor)
    if unlike is None:
        return None
    digits = random_rows(*inputs[0].shape, seed=1)
    beside = _Run(twin, stock, [x * (1 + _LAST_DIGITS * digits[..., : x.shape[-1]]) for x in inputs])
    return _unlike(theirs, found, beside, floor)


def _unlike(theirs: _Run, found: _Run, beside: _Run, floor: float) -> str | None:
    for name, x, y, moved in zip(theirs.names, theirs.tensors, found.tensors, beside.tensors, strict=True):
        if not same(x, y, moved, 0.0 if name == _RESULTS else floor):
            return f"{name} differ{'' if name == _RESULTS else 's'}"
    return None


class _Run:
    """One run of a function of a module: its result, the gradients of its inputs and of the module's parameters."""

    def __init__(self, module: nn.Module, function: Callable, inputs: list[Tensor]) -> None:
        parameters = dict(module.named_parameters())
        leaves = [x.clone().requires_grad_() for x in inputs]
        given = [leaf * 1 for leaf in leaves]
        versions = [x._version for x in given]
        with fixed_dropout() as dropouts:
            out = function(*given)
        self.rates = dropouts.rates
        out = out[0] if isinstance(out, tuple) else out
        if not isinstance(out, Tensor) or not out.dtype.is_floating_point:
            raise TypeError("no tensor")
        if versions != [x._version for x in given]:
            raise ValueError("an input was changed in place")
        toward = random_rows(*out.shape, seed=7).to(out.dtype)
        wanted = [*leaves, *parameters.values()]
        grads = (
            torch.autograd.grad(out, wanted, toward, allow_unused=True) if out.requires_grad else [None] * len(wanted)
        )
        self.names = [_RESULTS, *("an input's gradient" for _ in leaves)]
        self.names += [f"the gradient of {name}" for name in parameters]
        self.tensors: list[Tensor | None] = [out.detach(), *grads]


def same(
    expected: Tensor | None,
    found: Tensor | None,
    moved: Tensor | None,
    floor: float = 0.0,
    tolerance: float = _TOLERANCE,
) -> bool:
    """Whether two results agree; `moved` is `expected` for inputs that differ in their last digits.

    What is below `floor` is 0 but for rounding, as the gradient of a key's bias.
    """
    if expected is None or found is None or moved is None:
        return expected is None and found is None
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    if not bool(expected.isfinite().all()):
        return torch.allclose(expected, found, rtol=tolerance, equal_nan=True)
    if not expected.numel():
        return True
    allowed = tolerance * expected.abs().amax() + 10 * (moved - expected).abs().amax() + floor
    return bool(((found - expected).abs() <= allowed).all())


def rounding_of(gradients: Sequence[Tensor | None]) -> float:
    """What the largest of them lets the others lose in float32."""
    return 1e-5 * max((x.abs().amax().item() for x in gradients if x is not None and x.numel()), default=0.0)
