"""What the integrations tell the user: a line said once, or a sentence that ends the run."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger("cputrain")


class Refused(ValueError):
    """The user asked for what can't be done. `cputrain run` shows the sentence alone, and ends with 2."""


@functools.cache
def say_once(line: str) -> None:
    """What the user should know of, but needn't act on at once."""
    logger.warning(line)


@functools.cache
def mention_once(line: str) -> None:
    """What went as it should."""
    logger.info(line)


def show() -> None:
    """Shows lines on the terminal whatever the script does with logging; `cputrain run` asks for it."""
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("cputrain: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(logging.INFO)


def leave_to_rank_0() -> None:
    """All ranks go the same way: one says how. What may differ, and matters, every rank still says."""
    logger.setLevel(logging.WARNING)
