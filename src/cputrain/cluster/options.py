"""From what stands on a command line to the parts of a Job: `NAME=value`, `1:4`, `key=value:NoSchedule`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from cputrain.cluster.job import SecretVariable, Toleration


def assignments(texts: Iterable[str], option: str) -> tuple[tuple[str, str], ...]:
    """`NAME=value`; the value may hold anything, `=` too."""
    made = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"{option} must be NAME=value, found {text!r}.")
        made.append((name, value))
    return tuple(made)


def secrets(texts: Iterable[str]) -> tuple[SecretVariable, ...]:
    made = []
    for text in texts:
        found = re.fullmatch(r"([^=]+)=([^/]+)/(.+)", text, re.DOTALL)
        if not found:
            raise ValueError(f"--secret-env must be NAME=secret/key, found {text!r}.")
        made.append(SecretVariable(*found.groups()))
    return tuple(made)


def tolerations(texts: Iterable[str]) -> tuple[Toleration, ...]:
    made = []
    for text in texts:
        found = re.fullmatch(r"([^=:]+)(?:=([^:]*))?(?::([A-Za-z]+))?", text)
        if not found:
            raise ValueError(f"--toleration must be key, key:Effect or key=value:Effect, found {text!r}.")
        made.append(Toleration(*found.groups()))
    return tuple(made)


def least_and_most(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text, re.ASCII)
    if not found or int(found[1]) > int(found[2]):
        raise ValueError(f"--elastic must be LEAST:MOST such as 1:4, found {text!r}.")
    return int(found[1]), int(found[2])


def name_of(script: str) -> str:
    """A job's name after its script: `examples/run_qa.py` → `run-qa`."""
    words = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")
    return (words if words[:1].isalpha() else f"job-{words}".rstrip("-"))[:40].rstrip("-")
