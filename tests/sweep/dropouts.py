"""Whether as many dropouts of the same rates and sizes happen in an optimised model as in stock's.

Stock's are calls of torch functions, which a TorchFunctionMode sees. Ours are applications of autograd functions in
cputrain.ops that were given a key; together with those that stock's parts still make they must be stock's.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import cputrain
import cputrain.ops
from tests.sweep import measure

if TYPE_CHECKING:
    from tests.sweep.cases import Case, Pristine, Verdict

Drop = tuple[str, float, int]  # what was drawn, its rate, its elements

_ELEMENTWISE = {F.dropout, torch.dropout, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout_}
_CHANNELS = {F.dropout1d, F.dropout2d, F.dropout3d}
_DRAWS = {torch.rand, torch.rand_like, torch.bernoulli, Tensor.bernoulli_, torch.randn, torch.randn_like}


class Watch(TorchFunctionMode):
    """Records the dropouts among the torch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Drop] = Counter()

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        drop = _drop_of(func, args, kwargs)
        if drop is not None:
            self.seen[drop] += 1
        out = func(*args, **kwargs)
        if func in _DRAWS and isinstance(out, Tensor):
            self.seen[(func.__name__, 0.0, out.numel())] += 1
        return out


def _drop_of(func: Callable, args: tuple, kwargs: dict) -> Drop | None:
    if func in _ELEMENTWISE or func in _CHANNELS:
        named = _named(args, kwargs, "input", "p", "training", defaults=(None, 0.5, True))
        alive = named["training"] if "train" not in kwargs else kwargs["train"]
        kind = "dropout" if func in _ELEMENTWISE else "channels"
        return (kind, float(named["p"]), named["input"].numel()) if alive and named["p"] > 0 else None
    if func is F.scaled_dot_product_attention:
        named = _named(args, kwargs, "query", "key", "value", "attn_mask", "dropout_p", defaults=(None,) * 4 + (0.0,))
        q, k, p = named["query"], named["key"], named["dropout_p"]
        return ("dropout", float(p), q.numel() // q.shape[-1] * k.shape[-2]) if p > 0 else None
    if func is F.multi_head_attention_forward:
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        q, k, heads = (bound.arguments[n] for n in ("query", "key", "num_heads"))
        batch = q.shape[1] if q.dim() == 3 else 1
        alive = bound.arguments["training"] and bound.arguments["dropout_p"] > 0
        return (
            ("dropout", float(bound.arguments["dropout_p"]), batch * heads * q.shape[0] * k.shape[0]) if alive else None
        )
    return None


def _named(args: tuple, kwargs: dict, *names: str, defaults: tuple) -> dict[str, Any]:
    return dict(zip(names, defaults, strict=True)) | dict(zip(names, args, strict=False)) | kwargs


def _operators() -> Iterator[type[torch.autograd.Function]]:
    for found in pkgutil.iter_modules(cputrain.ops.__path__):
        module = importlib.import_module(f"cputrain.ops.{found.name}")
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, torch.autograd.Function)
                and value.__module__ == module.__name__
            ):
                yield value


@contextlib.contextmanager
def our_drops() -> Iterator[Counter[Drop]]:
    """Records every application of an operator of ours that has a key."""
    seen: Counter[Drop] = Counter()
    operators = list(_operators())
    for operator in operators:
        operator.apply = staticmethod(functools.partial(_recorded, operator, super(operator, operator).apply, seen))
    try:
        yield seen
    finally:
        for operator in operators:
            del operator.apply


def _recorded(operator: type, apply: Callable, seen: Counter[Drop], *args: Any) -> Any:
    named = dict(zip(list(inspect.signature(operator.forward).parameters)[1:], args, strict=False))
    settings = named.get("settings")
    if settings is not None and getattr(settings, "p", 0) > 0:
        heads = named["heads"] if "heads" in named else named["q"].shape[1]
        elements = int((settings.sequences.lengths**2).sum()) * heads
        seen[("dropout", float(settings.p), elements)] += 1
    elif "options" in named and operator.__name__ == "_Embed" and named["options"][1] > 0:
        seen[("dropout", float(named["options"][1]), named["word_ids"].numel() * named["word"].shape[1])] += 1
    elif named.get("p", 0) and named["p"] > 0:
        of = next(named[n] for n in ("residual_TO", "residual", "x_TH", "x", "y") if n in named)
        seen[("dropout", float(named["p"]), of.numel())] += 1
    return apply(*args)


@contextlib.contextmanager
def counted_keys() -> Iterator[list[int]]:
    """Counts keys drawn, wherever `draw_key` was imported; more than were recorded come from an unknown operator."""
    drawn = [0]
    modules = [importlib.import_module(f"cputrain.ops.{m.name}") for m in pkgutil.iter_modules(cputrain.ops.__path__)]
    modules = [module for module in modules if hasattr(module, "draw_key")]
    stock = modules[0].draw_key

    def draw_key() -> int:
        drawn[0] += 1
        return stock()

    for module in modules:
        module.draw_key = draw_key
    try:
        yield drawn
    finally:
        for module in modules:
            module.draw_key = stock


def drops(model: nn.Module, given: Pristine, seed: int) -> Counter[Drop]:
    watch = Watch()
    model.train()
    measure.seed_everything(seed)
    with our_drops() as ours, counted_keys() as keys, watch, torch.no_grad():
        model(**copy.deepcopy(given.inputs.arguments))
    if keys[0] != ours.total():
        raise AssertionError(f"{keys[0]} keys were drawn, but the sweep knows the operators of {ours.total()}")
    return watch.seen + ours


def check(case: Case, given: Pristine) -> Verdict:
    from tests.sweep.cases import NotBuilt, Verdict, _told, _told_last, optimised

    try:
        stock = drops(copy.deepcopy(given.model), given, case.seed)
    except Exception as error:
        raise NotBuilt(f"with dropout: {_told(error)}") from error
    try:
        ours = drops(optimised(case, given.model), given, case.seed)
    except Exception:  # noqa: BLE001
        return Verdict("crash", f"with dropout: {_told_last()}")
    if stock != ours and drops(copy.deepcopy(given.model), given, case.seed + 1) != stock:
        stock, ours = _totals(stock), _totals(ours)  # routing follows the random numbers, and the sizes follow it
    if case.padding == "drop" and case.side != "none":
        stock, ours = (Counter({k: n for k, n in _without_sizes(c).items()}) for c in (stock, ours))
    if stock != ours:
        lost, added = stock - ours, ours - stock
        return Verdict("wrong", f"dropouts (what, rate, elements): lost {dict(lost)}, added {dict(added)}"[:400])
    return Verdict("same")


def _totals(seen: Counter[Drop]) -> Counter[Drop]:
    """One entry for each kind and rate: the elements of all together."""
    totals: dict[tuple[str, float], int] = {}
    for (kind, rate, elements), count in seen.items():
        totals[(kind, rate)] = totals.get((kind, rate), 0) + count * elements
    return Counter((kind, rate, elements) for (kind, rate), elements in totals.items())


def _without_sizes(seen: Counter[Drop]) -> Counter:
    rates: Counter = Counter()
    for (kind, rate, _), count in seen.items():
        rates[(kind, rate)] += count
    return rates
