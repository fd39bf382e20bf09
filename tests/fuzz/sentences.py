"""What users may be shown of a refusal: one line that ends like a sentence, from our own code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cputrain import cli


@contextmanager
def refused_in_one() -> Iterator[None]:
    """A ValueError of ours is an answer; anything else that is raised is a fault."""
    try:
        yield
    except ValueError as error:
        if not cli._is_ours(error.__traceback__):
            raise
        check(str(error))


def check(text: str) -> None:
    """Whatever stands in a file must not reach a terminal as it is: it could move the cursor."""
    assert text.isprintable(), text
    assert text.endswith((".", "?")) and len(text) < 2000, text
