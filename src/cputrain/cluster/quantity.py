"""Kubernetes' quantities: `8`, `1500m`, `128Gi`. Read exactly, because a wrong letter is a factor of a thousand."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_BINARY = {f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", start=1)}
_DECIMAL = {"": Fraction(1), "k": Fraction(10**3)} | {
    letter: Fraction(1000**power) for power, letter in enumerate("MGTPE", start=2)
}
_SMALL = {"m": Fraction(1, 10**3), "u": Fraction(1, 10**6), "n": Fraction(1, 10**9)}
_SUFFIXES = {**_BINARY, **_DECIMAL, **_SMALL}
# At most 18 digits each: what the API server itself can hold, and nothing that takes a minute to multiply.
_FORM = re.compile(r"\+?(\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(?:([eE][+-]?\d{1,2})|([KMGTPE]i|[numkMGTPE]?))", re.ASCII)


def parse(text: str, what: str) -> Fraction:
    """The exact value. `what` names the thing that is wrong, for the sentence that says so."""
    found = _FORM.fullmatch(text)
    if not found:
        raise ValueError(f"{what} must be a Kubernetes quantity such as 8 or 16Gi, found {text!r}{_remedy(text)}.")
    number, exponent, suffix = found.groups()
    factor = Fraction(10) ** int(exponent[1:]) if exponent else _SUFFIXES[suffix]
    return Fraction(number if number[-1] != "." else number[:-1]) * factor


def found(value: Any) -> Fraction | None:
    """The value of what stands in a manifest; None if it is no quantity, which is the schema's to say."""
    try:
        return parse(str(value), "") if isinstance(value, (str, int, float)) else None
    except ValueError:
        return None


def in_words(size: Fraction) -> str:
    """A size as one says it: `64 MB`, `64 bytes`."""
    for power, unit in ((3, "GB"), (2, "MB"), (1, "kB")):
        if size >= 1000**power:
            return f"{float(size / 1000**power):.3g} {unit}"
    return f"{float(size):.3g} bytes"


def positive(text: str, what: str) -> Fraction:
    value = parse(text, what)
    if value <= 0:
        raise ValueError(f"{what} must be more than 0, found {text!r}.")
    return value


def bytes_of(text: str, what: str) -> int:
    """A size in whole bytes; half a byte, as in `100m` of memory, is a mistake."""
    value = positive(text, what)
    if value.denominator != 1:
        raise ValueError(
            f"{what} must be a whole number of bytes, found {text!r}: did you mean {_without_milli(text)}?"
        )
    return int(value)


def whole_cpus(text: str, what: str) -> int:
    """A whole number of CPUs: the static CPU manager pins only those, and a quota on a fraction stops threads."""
    value = positive(text, what)
    if value.denominator != 1:
        raise ValueError(f"{what} must be a whole number of CPUs, found {text!r}: only whole CPUs are pinned to a pod.")
    return int(value)


def in_mebibytes(size: int) -> str:
    """A size as a quantity, rounded down to whole mebibytes and written in gibibytes where that is exact."""
    mebibytes = max(1, size // 2**20)
    return f"{mebibytes // 1024}Gi" if mebibytes % 1024 == 0 else f"{mebibytes}Mi"


def _without_milli(text: str) -> str:
    return f"{text[:-1]}Mi" if text.endswith("m") else f"{text}i"


def _remedy(text: str) -> str:
    """`128GB` and `16 gb` are what people write most."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtTpP])i?[bB]?\s*", text, re.ASCII)
    return f": write {found[1]}{found[2].upper()}i" if found else ""
