"""What Kubernetes accepts as a name, a path or a quantity, and a sentence for what it doesn't."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True)
class Form:
    """A kind of name: its pattern, and what it must be in words. Called with a name of another form, it raises."""

    pattern: str
    longest: int
    words: str

    def __call__(self, value: str, what: str, longest: int | None = None) -> None:
        most = longest or self.longest
        if not re.fullmatch(self.pattern, value) or len(value) > most:
            raise ValueError(f"{what} must be {self.words.format(most=most)}, found {value!r}.")


_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
_QUALIFIED = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"
_PATH = r"[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
# A job's name becomes the names of services and pods, which must begin with a letter.
label_1035 = Form(
    r"[a-z](?:[-a-z0-9]*[a-z0-9])?",
    63,
    "lower-case letters, digits and hyphens, beginning with a letter and at most {most} long",
)
label_1123 = Form(_LABEL, 63, "lower-case letters, digits and hyphens, at most {most} long")
# The name of a claim, a secret, a class.
subdomain = Form(_SUBDOMAIN, 253, "lower-case letters, digits, hyphens and dots, at most {most} long")
label_value = Form(rf"(?:{_QUALIFIED})?", 63, "letters, digits, hyphens, dots and underscores, at most {most} long")
environment = Form(r"[A-Za-z_][A-Za-z0-9_]*", 1 << 20, "letters, digits and underscores, not beginning with a digit")
# A key of a secret or a config map becomes a file's name.
key = Form(r"(?!\.\.|\.$)[-._a-zA-Z0-9]+", 253, "letters, digits, hyphens, dots and underscores")
# registry.example:5000/team/image:tag@sha256:…, as container runtimes read it.
image = Form(
    rf"(?:[A-Za-z0-9](?:[-A-Za-z0-9.]*[A-Za-z0-9])?(?::\d{{1,5}})?/)?{_PATH}(?:/{_PATH})*"
    r"(?::[A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?(?:@sha256:[0-9a-f]{64})?",
    500,
    "an image such as registry.example/team/train:1.0",
)


def label_key(value: str, what: str) -> None:
    prefix, slash, name = value.rpartition("/")
    if slash:
        subdomain(prefix, f"the part before / of {what}")
    if not re.fullmatch(_QUALIFIED, name) or len(name) > 63:
        raise ValueError(f"{what} must be a label's key such as node-type or example.org/pool, found {value!r}.")


def folder(value: str, what: str) -> str:
    """An absolute path within a container. Kubernetes refuses a colon, and `..` would leave the volume."""
    parts = value.split("/")
    if not value.startswith("/") or ":" in value or ".." in parts or not value.strip("/") or "\n" in value:
        raise ValueError(f"{what} must be an absolute path without .. or a colon, found {value!r}.")
    return value.rstrip("/")


def text(value: str, what: str) -> str:
    """Any text that a manifest can carry: it is UTF-8, and no process can be given a zero byte."""
    if "\0" in value:
        raise ValueError(f"{what} holds a zero byte, which no argument or variable can.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} is not UTF-8 text: {value!r}.") from None
    return value


def without_release(library: str) -> str | None:
    """`libx.so.4` for `/lib/libx.so.4.5.9`: a name that more than one release's image has; None if it is one."""
    found = re.fullmatch(r"(?:.*/)?(.+\.so\.\d+)\.[\d.]+", library)
    return found[1] if found else None


# --- Quantities, read exactly, because a wrong letter is a factor of a thousand ------------------------------------

_SUFFIXES = {
    **{f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", start=1)},
    **{letter: Fraction(1000**power) for power, letter in enumerate(("", *"kMGTPE"))},
    **{letter: Fraction(1, 1000**power) for power, letter in enumerate("mun", start=1)},
}
# At most 18 digits each: what the API server itself can hold, and nothing that takes a minute to multiply.
_QUANTITY = re.compile(
    r"\+?(\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(?:([eE][+-]?\d{1,2})|([KMGTPE]i|[numkMGTPE]?))", re.ASCII
)


def _parsed(text: str, what: str) -> Fraction:
    found = _QUANTITY.fullmatch(text)
    if not found:
        raise ValueError(f"{what} must be a Kubernetes quantity such as 8 or 16Gi, found {text!r}{_remedy(text)}.")
    number, exponent, suffix = found.groups()
    factor = Fraction(10) ** int(exponent[1:]) if exponent else _SUFFIXES[suffix]
    return Fraction(number.removesuffix(".")) * factor


def _remedy(text: str) -> str:
    """`128GB` and `16 gb` are what people write most."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtTpP])i?[bB]?\s*", text, re.ASCII)
    return f": write {found[1]}{found[2].upper()}i" if found else ""


def quantity(value: Any) -> Fraction | None:
    """The value of what stands in a manifest; None if it is no quantity, which is the schema's to say."""
    try:
        return _parsed(str(value), "") if isinstance(value, (str, int, float)) else None
    except ValueError:
        return None


def bytes_of(text: str, what: str) -> int:
    """A size in whole bytes; half a byte, as in `100m` of memory, is a mistake."""
    meant = f"{text[:-1]}Mi" if text.endswith("m") else f"{text}i"
    return _whole(text, what, "bytes", f"did you mean {meant}?")


def whole_cpus(text: str, what: str) -> int:
    """A whole number of CPUs: the static CPU manager pins only those, and a quota on a fraction stops threads."""
    return _whole(text, what, "CPUs", "only whole CPUs are pinned to a pod.")


def _whole(text: str, what: str, unit: str, remedy: str) -> int:
    value = _parsed(text, what)
    if value <= 0:
        raise ValueError(f"{what} must be more than 0, found {text!r}.")
    if value.denominator != 1:
        raise ValueError(f"{what} must be a whole number of {unit}, found {text!r}: {remedy}")
    return int(value)


def size_in_words(size: Fraction) -> str:
    """`64 MB`, `64 bytes`."""
    for power, unit in ((3, "GB"), (2, "MB"), (1, "kB")):
        if size >= 1000**power:
            return f"{float(size / 1000**power):.3g} {unit}"
    return f"{float(size):.3g} bytes"


def in_mebibytes(size: int) -> str:
    """A size as a quantity, rounded down to whole mebibytes and written in gibibytes where that is exact."""
    mebibytes = max(1, size // 2**20)
    return f"{mebibytes // 1024}Gi" if mebibytes % 1024 == 0 else f"{mebibytes}Mi"
