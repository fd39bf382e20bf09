"""How a module's method is replaced on the instance, and when the replacement may run.

The class, the names, the state-dict keys and the signature stay; `undo` takes everything back. A replacement
checks at each call that nothing it bypasses has been touched (a hook, an adapter, a parametrization, another forward),
and runs stock's method otherwise, saying why once.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from cputrain.formats import FP32, Format, Fp32, probing
from cputrain.log import mention_once
from cputrain.patching import autocast, half_precision
from cputrain.patching.probe import Formula, difference

# Begins the names of all that cputrain keeps in a module's __dict__ beside methods.
OWN = "_cputrain_"
# module.__dict__ key under which a patched module keeps why its stock method ran instead, if it did.
STEPPED_ASIDE = "_cputrain_stepped_aside"
# … and its number format, unless that is stock's.
FORMAT = "_cputrain_format"


@dataclass
class Replacement:
    """One replaced method of one module."""

    name: str
    module: nn.Module
    method: str
    what: str
    bypassed: tuple[nn.Module, ...]  # while it runs; they run by themselves only while it steps aside
    computes: bool  # whether something of ours runs in stock's place, rather than around it


@dataclass
class Patches:
    """Everything that `optimize` replaced in one model, and what it left alone."""

    format: type[Format] = Fp32
    halves: bool = False  # frozen matrices of half precision are served, and activations are fp32
    replaced: list[Replacement] = field(default_factory=list)
    left: list[tuple[str, str, str]] = field(default_factory=list)  # (module name, its class, why it was left alone)

    def bind(
        self,
        name: str,
        module: nn.Module,
        method: str,
        fused: Callable,
        what: str,
        bypassed: Iterable[nn.Module] = (),
        computes: bool = True,
    ) -> None:
        """Puts `fused(module, stock, *args)` in the place of `module.method`; `stock` is the method of the class."""
        assert untouched(module, method), "a method that other code put on the instance would be bypassed"
        stock = getattr(type(module), method)
        wrapper = _wrapper(fused, type(module), method, stock)  # type: ignore[arg-type]
        module.__dict__[method] = types.MethodType(wrapper, module)
        if computes and not self.format.is_stock:
            module.__dict__[FORMAT] = self.format()
        self.replaced.append(Replacement(name, module, method, what, tuple(bypassed), computes))

    def bind_if_same(
        self,
        name: str,
        module: nn.Module,
        formula: Formula | None,
        fused: Callable,
        what: str,
        bypassed: Iterable[nn.Module],
    ) -> bool:
        """Binds `fused`, which computes `formula`, if the module's method computes that too; notes why if not."""
        if formula is None:
            return False
        reason = difference(module, formula)
        if reason is not None:
            self.leave(name, module, reason)
            return False
        self.bind(name, module, formula.method, fused, what, bypassed)
        return True

    def take_back(self, count: int) -> None:
        """Undoes all replacements but the first `count`."""
        for entry in self.replaced[count:]:
            del entry.module.__dict__[entry.method]
        del self.replaced[count:]

    def leave(self, name: str, module: nn.Module, reason: str) -> None:
        self.left.append((name, type(module).__name__, reason))


def undo(model: nn.Module) -> None:
    """Takes every method of ours off the model, also off copies of parts made since."""
    for part in model.modules():
        state = part.__dict__
        for name in [name for name, value in state.items() if is_ours(value)]:
            del state[name]
        for name in [name for name in state if name.startswith(OWN)]:
            del state[name]


def has_patches(model: nn.Module) -> bool:
    """Whether a method of ours is on any part of it."""
    return any(is_ours(value) for part in model.modules() for value in part.__dict__.values())


def probed(fused: Callable) -> Callable:
    """Marks what drops padding: it runs on twins too, which are asked whether they can do without."""
    fused.cputrain_probed = True  # type: ignore[attr-defined]
    return fused


@functools.cache
def _wrapper(fused: Callable, owner: type, method: str, stock: Callable) -> Callable:
    """A function with the name and signature of `owner.method`, which is `stock`; deepcopy rebinds it to the copy."""
    expected = [p for p in inspect.signature(fused).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][2:]
    names = parameter_names(stock)[: len(expected)]

    @functools.wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler can't look into native calls, and fuses by itself
            setattr(self, STEPPED_ASIDE, "torch.compile took it over")
            return stock(self, *args, **kwargs)
        if (current := getattr(type(self), method)) is not stock:
            # The class was changed (a parametrization), or its method was (a patch of the class): that one runs.
            step_aside(self, f"the {method} of {type(self).__name__} is not the one that optimize found")
            return current(self, *args, **kwargs)
        if probing.get() and not hasattr(fused, "cputrain_probed"):  # fused operators were asked before
            return stock(self, *args, **kwargs)
        if half_precision.is_outermost(self):
            return half_precision.call(self, forward, args, kwargs)
        in_bf16 = autocast.wanted(self, format_of(self))
        if in_bf16 is not None:
            with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
                named = dict(zip(kwargs, autocast.as_floats(kwargs.values()), strict=True))
                return forward(self, *autocast.as_floats(args), **named)
        self.__dict__.pop(STEPPED_ASIDE, None)
        if kwargs:  # models name their inputs as they like, and their callers use the names
            args += tuple(kwargs.pop(name) for name in names[len(args) :] if name in kwargs)
        return fused(self, functools.partial(stock, self), *args, **kwargs)

    forward.cputrain_replaces = owner  # type: ignore[attr-defined]
    forward.cputrain_stock = stock  # type: ignore[attr-defined]
    return forward


def format_of(module: nn.Module) -> Format:
    return module.__dict__.get(FORMAT) or FP32


def is_ours(method: Any) -> bool:
    return isinstance(method, types.MethodType) and hasattr(method.__func__, "cputrain_replaces")


# What a module does in a call that it steps aside in: all of it runs stock's code, or only padding isn't dropped while
# the parts inside are ours.
AS_STOCK, KEEPS_PADDING = "runs as stock", "keeps its padding"


def step_aside(module: nn.Module, reason: str, what: str = AS_STOCK) -> None:
    """Notes why stock's method runs in this call instead of the patched one; each reason is logged once."""
    if probing.get():
        return
    module.__dict__[STEPPED_ASIDE] = reason
    mention_once(f"{type(module).__name__} {what} in this call: {reason}")


def why_not_now() -> str | None:
    """Why the kernels can't run now, whatever the tensors."""
    return "autocast is on" if torch.is_autocast_enabled("cpu") else why_not_transform()


def why_not_transform() -> str | None:
    """Who watches or transforms every operator now, and would not see ours."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "inside a function transform (torch.func)"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation is on"
    if torch.jit.is_tracing():
        return "it is being traced (torch.jit)"
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode watches every operator"
    return None


def why_not_tensors(*tensors: Tensor | None) -> str | None:
    """Why the kernels can't take these tensors now, or None."""
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            return f"a tensor is a {type(tensor).__name__}"
        if tensor.dtype is not torch.float32:
            return f"a tensor is {str(tensor.dtype).removeprefix('torch.')}, not float32"
        if not tensor.is_cpu:
            return f"a tensor is on {tensor.device}"
        if tensor.layout is not torch.strided:
            return f"a tensor is {str(tensor.layout).removeprefix('torch.')}"
    return why_not_now()


def why_not_linears(x: Tensor, *linears: nn.Linear) -> str | None:
    """Why the kernels can't take x and these layers' parameters now; stock may promote or broadcast an odd bias."""
    parameters = (parameter for linear in linears for parameter in (linear.weight, linear.bias))
    sizes = (why_not_bias_size(linear.bias, linear.weight.shape[0]) for linear in linears)
    return next((reason for reason in sizes if reason), None) or why_not_tensors(x, *parameters)


def why_not_bias_size(bias: Tensor | None, out_features: int) -> str | None:
    return None if bias is None or bias.shape == (out_features,) else f"a bias of shape {tuple(bias.shape)}"


def why_not_module(module: nn.Module, *kinds: type) -> str | None:
    """Why `module` must be called rather than bypassed, or None: it must be exactly of a known class and untouched."""
    if kinds and type(module) not in kinds:
        return f"a part is {type(module).__name__}, not {' or '.join(kind.__name__ for kind in kinds)}"
    if has_hook(module):
        return f"{type(module).__name__} has a hook"
    forward = module.__dict__.get("forward")
    if not is_ours(forward) and not untouched(module):
        return f"the forward of {type(module).__name__} was replaced"
    if is_ours(forward):
        if forward.__func__.cputrain_replaces is not type(module):
            return f"its class was changed to {type(module).__name__}"
        known = forward.__func__.cputrain_stock
    else:
        known = _TORCH_FORWARDS.get(type(module))
    if known is not None and type(module).forward is not known:
        return f"the forward of {type(module).__name__} was replaced in the class"
    return None


# The forwards that the fused operators stand for, as they were when cputrain was imported.
_TORCH_FORWARDS = {
    kind: kind.forward for kind in (nn.Linear, nn.Dropout, nn.LayerNorm, nn.Embedding, nn.GELU, nn.SiLU, nn.ReLU)
}


def has_hook(module: nn.Module) -> bool:
    """Whether a hook of other code is to be called when `module` runs."""
    found = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(found) and any(not _is_idle(hook, module) for hooks in found for hook in hooks.values())


def _is_idle(hook: Callable, module: nn.Module) -> bool:
    """Hooks of transformers' own that do nothing now: of recorded outputs, and of checkpointing with frozen weights."""
    if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
        return not outputs_to_record(module)
    if getattr(hook, "__name__", "") == "make_inputs_require_grads":
        return all(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return False


def untouched(module: nn.Module, method: str = "forward") -> bool:
    """Whether `module.method` is its class's own: a method that other code put on the instance is never replaced."""
    if isinstance(module, torch.jit.ScriptModule):  # runs what was compiled, whatever its instance says
        return False
    found = module.__dict__.get(method)
    return found is None or getattr(found, "__func__", None) is getattr(type(module), method)


def why_not_global_hooks() -> str | None:
    if module_hooks._has_any_global_hook():
        return "a global module hook is registered"
    return None


def outputs_to_record(module: nn.Module) -> set[str]:
    """What the caller wants recorded inside the model besides its result: "hidden_states", "attentions" …"""
    config = getattr(module, "config", None)
    asked = {name for name in ("hidden_states", "attentions") if getattr(config, f"output_{name}", False)}
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    return asked | _recorded_by_wrapper(module) if collector is None else asked | set(collector.get() or ())


def _recorded_by_wrapper(module: nn.Module) -> set[str]:
    """What transformers 4.5x records of this module: it wraps its forward for the time of one call."""
    forward = module.__dict__.get("forward")
    if getattr(forward, "__globals__", {}).get("__name__") != "transformers.utils.generic":
        return set()
    return {inspect.getclosurevars(forward).nonlocals["key"]}


def why_not_parts(parts: Iterable[nn.Module], kind: type) -> str | None:
    """The first part that must be called rather than bypassed."""
    return next((reason for part in parts if (reason := why_not_module(part, kind))), None)


def parameter_names(method: Callable) -> list[str]:
    """Names of a method's parameters, without self."""
    return [name for name in inspect.signature(method).parameters if name != "self"]
