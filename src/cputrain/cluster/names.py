"""What Kubernetes accepts as a name, and a sentence for what it doesn't."""

from __future__ import annotations

import re

_LABEL_1035 = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_LABEL_1123 = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")
_ENVIRONMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"[-._a-zA-Z0-9]+")
# registry.example:5000/team/image:tag@sha256:…, as container runtimes read it.
_IMAGE = re.compile(
    r"(?:[A-Za-z0-9](?:[-A-Za-z0-9.]*[A-Za-z0-9])?(?::\d{1,5})?/)?[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*"
    r"(?:/[a-z0-9]+(?:(?:\.|_{1,2}|-+)[a-z0-9]+)*)*(?::[A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?"
    r"(?:@sha256:[0-9a-f]{64})?"
)


def label_1035(value: str, what: str, longest: int = 63) -> str:
    """A job's name: it becomes the names of services and pods, which must begin with a letter."""
    if not _LABEL_1035.fullmatch(value) or len(value) > longest:
        raise ValueError(
            f"{what} must be lower-case letters, digits and hyphens, beginning with a letter and at most {longest} "
            f"long, found {value!r}."
        )
    return value


def label_1123(value: str, what: str) -> str:
    if not _LABEL_1123.fullmatch(value) or len(value) > 63:
        raise ValueError(f"{what} must be lower-case letters, digits and hyphens, at most 63 long, found {value!r}.")
    return value


def subdomain(value: str, what: str) -> str:
    """The name of a claim, a secret, a class."""
    if not _SUBDOMAIN.fullmatch(value) or len(value) > 253:
        raise ValueError(
            f"{what} must be lower-case letters, digits, hyphens and dots, at most 253 long, found {value!r}."
        )
    return value


def label_key(value: str, what: str) -> str:
    prefix, slash, name = value.rpartition("/")
    if slash:
        subdomain(prefix, f"the part before / of {what}")
    if not _QUALIFIED.fullmatch(name) or len(name) > 63:
        raise ValueError(f"{what} must be a label's key such as node-type or example.org/pool, found {value!r}.")
    return value


def label_value(value: str, what: str) -> str:
    if value and (not _QUALIFIED.fullmatch(value) or len(value) > 63):
        raise ValueError(
            f"{what} must be letters, digits, hyphens, dots and underscores, at most 63 long, found {value!r}."
        )
    return value


def environment(value: str, what: str) -> str:
    if not _ENVIRONMENT.fullmatch(value):
        raise ValueError(
            f"{what} must be letters, digits and underscores, not beginning with a digit, found {value!r}."
        )
    return value


def key(value: str, what: str) -> str:
    """A key of a secret or a config map: it becomes a file's name."""
    if not _KEY.fullmatch(value) or len(value) > 253 or value in (".", "..") or value.startswith(".."):
        raise ValueError(f"{what} must be letters, digits, hyphens, dots and underscores, found {value!r}.")
    return value


def image(value: str, what: str) -> str:
    if not _IMAGE.fullmatch(value) or len(value) > 500:
        raise ValueError(f"{what} must be an image such as registry.example/team/train:1.0, found {value!r}.")
    return value


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
