"""What every number format gives to the operators.

    format = FORMATS["int16"]()                                 one object for each layer
    call = format.begin()                                       once in each forward
    y, saved = call.forward(x, weight, bias, save=…)            y_TO = x wᵀ + bias, and what the weight's gradient needs
    grad = call.output_grad(dy, weight=…, bias=…)               in the backward of the same call
    grad.input(weight), grad.weight(weight, saved), grad.bias

Shapes: x_TI tokens × in-features, w_OI out × in, y_TO.

To add a format: a file here with a subclass of Format, Call and OutputGrad, a line in `__init__.py`, and a name for
users in `choose.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from cputrain.formats.int16_matmul import Operand
from cputrain.formats.weights import Weight

# For `save_for_backward`. How many tensors, and of which dtypes, follows from the format alone: a checkpoint that runs
# the forward again expects to find the same.
Saved = tuple[Tensor, ...]

# Set while a twin of a module is asked what it computes: in fp32, whatever the layer's format.
probing: ContextVar[bool] = ContextVar("cputrain_probing", default=False)

FORMATS: dict[str, type[Format]] = {}


class Activated(Protocol):
    """An input that is computed on its way into a product: an activation of h (ops/activation.py)."""

    h: Tensor

    def values(self, saves: torch.dtype = torch.float32, inplace: bool = False) -> tuple[Tensor, Tensor]:
        """The input, and h as `saves`; `inplace` lets the input take h's place if h isn't what is saved."""

    def packed(self) -> Operand:
        """The input's rows for the left side of an int16 product, never written as floats."""


class Format(ABC):
    """A number format. One object belongs to one layer, so that a format may remember what it found there."""

    name: ClassVar[str]
    # The dtype of what operators save for the backward: a norm's input, an activation's.
    saves: ClassVar[torch.dtype] = torch.float32
    # Products and all that is saved are stock's: a linear layer alone gains nothing.
    is_stock: ClassVar[bool] = False
    # Fused blocks compute in this format even if the user's autocast asks for bf16.
    overrules_autocast: ClassVar[bool] = False
    # What isn't recognised runs under autocast to bf16, because the CPU is fast at it.
    wants_autocast: ClassVar[bool] = False

    @property
    def fallback(self) -> str | None:
        """Why this layer's products returned to fp32, if they did."""
        return None

    def __init_subclass__(cls) -> None:
        FORMATS[cls.name] = cls

    @abstractmethod
    def start(self) -> Call:
        """The products of one forward, and of its backward."""

    def begin(self) -> Call:
        """As `start`, but in fp32 while a twin is probed."""
        return FORMATS["fp32"]().start() if probing.get() else self.start()

    def keep(self, x_TI: Tensor) -> Tensor:
        """A norm's input as it is saved for the backward; `int16_saving.as_float` gives it back."""
        return x_TI

    def remembered(self) -> dict[str, Any]:
        """What it has found in its layer, as plain values for a checkpoint."""
        return {}

    def remember(self, found: dict[str, Any]) -> None:
        """What `remembered` gave."""
        return

    def __deepcopy__(self, memo: dict) -> Format:
        return type(self)()

    def __reduce__(self) -> tuple:
        return type(None), ()  # a pickled model is loaded as stock, even where cputrain isn't installed


class Use(NamedTuple):
    """What becomes of a product's input and output."""

    save: bool = True  # the weight's gradient will be asked for
    held: bool = False  # another operator saves x as it is, so that a copy in fewer bits would be one more
    scratch: str = ""  # y is read within this operator only, and may lie in the workspace of that name
    until_kept: str = ""  # the same, where `Call.keep` makes a copy of y
    as_saved: bool = False  # y is saved for the backward, and comes in the dtype that this format saves
    out: Tensor | None = None  # y's memory
    plus: tuple[Tensor, Tensor] | None = None  # t_TR and b_OR, frozen or not: t bᵀ is added to y


class Call(ABC):
    """One forward of a layer, and its backward. Holds no tensor of the graph."""

    saves: torch.dtype = torch.float32  # the format's, fp32 while a twin is probed

    def forward(self, x: Tensor, weight: Weight, bias: Tensor | None, **use: Any) -> tuple[Tensor, Saved]:
        """y_TO = x wᵀ + bias, and what the weight's gradient needs of x; the options are `Use`'s."""
        return self.product(x, weight, bias, Use(**use))

    @abstractmethod
    def product(self, x: Tensor, weight: Weight, bias: Tensor | None, use: Use) -> tuple[Tensor, Saved]:
        """What `forward` gives."""

    def forward_activated(
        self, x: Activated, weight: Weight, bias: Tensor | None, *, scratch: str = ""
    ) -> tuple[Tensor, Tensor]:
        """y_TO = activation(h) wᵀ + bias, and h as it is saved; the backward computes the activation again."""
        values, saved_h = x.values(self.saves, inplace=True)
        return self.forward(values, weight, bias, save=False, scratch=scratch)[0], saved_h

    @abstractmethod
    def save_input(self, x_TI: Tensor) -> Saved:
        """What the weight's gradient needs of x, for an input that the backward has computed again."""

    def keep(self, y_TM: Tensor) -> Tensor:
        """A product's raw output as it is saved for the backward; `int16_saving.as_float` gives it back."""
        return y_TM

    def save_output(self, out: Tensor) -> Tensor:
        """What is saved of an operator's output that the next product multiplies."""
        return out

    @abstractmethod
    def output_grad(self, dy_TO: Tensor, *, weight: bool, bias: bool = False) -> OutputGrad:
        """The gradient of an output; says whether the weight's and the bias' will be asked for."""

    def beside(self) -> Call:
        """For another part of the same product."""
        return self


class OutputGrad(ABC):
    """The gradient of a product's output. The bias' is there once the weight's was asked for."""

    bias: Tensor | None = None

    @abstractmethod
    def input(self, weight: Weight, *, add_to: Tensor | None = None, scratch: str = "") -> Tensor:
        """dx_TI = dy w, added to `add_to` in place if given; `scratch` as in `Use`."""

    def weight(self, weight: Weight, saved: Saved) -> tuple[Tensor, ...]:
        """The gradients of the weight's leaves."""
        return weight.leaf_grads(self.matrix(weight.in_features, saved))

    @abstractmethod
    def matrix(self, in_features: int, saved: Saved, *, add_to: Tensor | None = None) -> Tensor:
        """dw_OI = dyᵀ x, from what was saved of x; added to `add_to` in place if given."""


def weight_grad_in_fp32(dy_TO: Tensor, x_TI: Tensor, add_to: Tensor | None) -> Tensor:
    return torch.mm(dy_TO.t(), x_TI) if add_to is None else add_to.addmm_(dy_TO.t(), x_TI)


def added(y_TO: Tensor, plus: tuple[Tensor, Tensor] | None) -> Tensor:
    """y, to which `Use.plus` is added in place."""
    return y_TO if plus is None else y_TO.addmm_(plus[0], plus[1].t())


def product_in_fp32(x_TI: Tensor, w_OI: Tensor, bias_O: Tensor | None, out: Tensor | None = None) -> Tensor:
    """torch's own (MKL)."""
    return torch.mm(x_TI, w_OI.t(), out=out) if bias_O is None else torch.addmm(bias_O, x_TI, w_OI.t(), out=out)


def input_grad_in_fp32(dy_TO: Tensor, w_OI: Tensor, add_to: Tensor | None, out: Tensor | None) -> Tensor:
    return torch.mm(dy_TO, w_OI, out=out) if add_to is None else add_to.addmm_(dy_TO, w_OI)
