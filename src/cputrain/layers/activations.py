"""Which activation modules the kernels know."""

from __future__ import annotations

from torch import nn

# Classes of transformers.activations by name, so that transformers need not be imported to recognise them.
_BY_NAME = {
    "GELUActivation": "gelu",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "SiLUActivation": "silu",
    "ReLU": "relu",
    "SiLU": "silu",
}


def known_kind(module: nn.Module) -> str:
    """The kernel's name for an activation that is known to have one."""
    kind = activation_kind(module)
    assert kind is not None
    return kind


def activation_kind(module: nn.Module) -> str | None:
    """The kernel's name for this activation, or None."""
    if not isinstance(module, nn.Module):
        return None
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    home = type(module).__module__
    if not (home.startswith("torch.nn.") or home == "transformers.activations"):
        return None
    return _BY_NAME.get(type(module).__name__)
