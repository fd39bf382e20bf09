"""What the integrations tell the user: a line said once, or a sentence that ends the run.

`cputrain run` shows the lines of the logger `cputrain` whatever the script does with logging. Without it, they go where
the script's logging sends them; a script that set up none sees warnings, in the same form.
"""

from __future__ import annotations

import logging

from cputrain.log import Terminal, logger, say_once


class Refused(ValueError):
    """The user asked for what can't be done. `cputrain run` shows the sentence alone, and ends with 2."""


_stays_stock: list[str] = []  # why


def say_stock_once(why: str) -> None:
    """What is not optimised, and why."""
    _stays_stock.append(why)
    say_once(why)


def said_why_stock() -> bool:
    return bool(_stays_stock)


def show() -> None:
    """Shows lines on the terminal whatever the script does with logging; `cputrain run` asks for it."""
    for handler in [handler for handler in logger.handlers if isinstance(handler, Terminal)]:
        logger.removeHandler(handler)
    if not logger.handlers:
        logger.addHandler(Terminal())
        logger.propagate = False
    logger.setLevel(logging.INFO)


def leave_to_rank_0() -> None:
    """All ranks go the same way: one says how. What may differ, and matters, every rank still says."""
    logger.setLevel(logging.WARNING)
