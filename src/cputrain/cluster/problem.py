"""What a check has to say about one place of a manifest, and how grave it is."""

from __future__ import annotations

from dataclasses import dataclass

Where = tuple["str | int", ...]
# error: it is refused, or can't work as written. warning: it starts, but will probably not do what is meant.
# hint: it works, and could be faster or safer.
ERROR, WARNING, HINT = SEVERITIES = ("error", "warning", "hint")


@dataclass(frozen=True)
class Problem:
    """What is wrong, and the path of where."""

    where: Where
    sentence: str
    severity: str = ERROR


def warning(where: Where, sentence: str) -> Problem:
    return Problem(where, sentence, WARNING)


def hint(where: Where, sentence: str) -> Problem:
    return Problem(where, sentence, HINT)


def reaches(severity: str, threshold: str) -> bool:
    """Whether a finding is at least as grave as `threshold`."""
    return SEVERITIES.index(severity) <= SEVERITIES.index(threshold)
