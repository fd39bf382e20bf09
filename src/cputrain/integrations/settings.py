"""What was asked of cputrain for this run: by the environment, which wins, and by the script.

Kept in the environment, so that processes which the script starts have the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cputrain.integrations.notices import Refused
from cputrain.log import say_once
from cputrain.settings import BALANCE, DTYPE, GRADIENTS, IPEX, PADDING, PROGRESS, expected, one_of

if TYPE_CHECKING:
    from cputrain.api import Padding


def check() -> None:
    """Refuses misspelt settings at once, rather than when the model is there."""
    for name in (DTYPE, PADDING, GRADIENTS, BALANCE, PROGRESS, IPEX):
        _one_of(name)


def checked(name: str, value: str, option: str) -> str:
    """What `option` says about the variable `name`; a misspelt value is refused."""
    if asked := expected(name, value):
        raise Refused(f"{option} must be {asked}, found {value!r}.")
    return value


def is_off() -> bool:
    """Whether stock was asked for."""
    return _one_of(IPEX) == "false"


def padding() -> Padding:
    return "keep" if _one_of(PADDING) == "keep" else "drop"


def grad_compression() -> str:
    """How gradients travel between ranks."""
    return _one_of(GRADIENTS) or "none"


def balances() -> bool:
    """Whether the samples of a global batch may be dealt to the ranks by length."""
    return _one_of(BALANCE) != "off"


def precision(script_asks_for_bf16: bool) -> str:
    """The dtype to give to `optimize`; what runs then is said in one line whenever a precision was asked for.

    The only place where the integrations ask which format runs. A script's bf16 means "the fastest that is at least as
    accurate as bf16 on this CPU", which is `auto`.
    """
    from cputrain.formats import choose

    asked = _one_of(DTYPE)
    try:
        dtype = asked or ("auto" if script_asks_for_bf16 else "fp32")
        choice = choose.choose(dtype)
    except ValueError as error:
        raise Refused(f"{DTYPE}={asked}: {error}") from None
    why = choice.reason.removeprefix(choose.AUTO)
    if asked:
        say_once(f"{choice.dtype} runs: {DTYPE}={asked} ({why})")
    elif script_asks_for_bf16:
        say_once(f"the script asks for bf16, {choice.dtype} runs ({why})")
    choose.note_told(choice)
    return dtype


def _one_of(name: str) -> str | None:
    try:
        return one_of(name)
    except ValueError as error:
        raise Refused(str(error)) from None
