"""A few kills; `python -m tests.checkpoints.kills --times 100` has more."""

from __future__ import annotations

import pytest

from tests.checkpoints import kills


@pytest.mark.parametrize(("how", "ranks", "times"), [("trainer", 2, 1), ("checkpoints", 1, 2)])
def test_kills_leave_no_trace(how: str, ranks: int, times: int) -> None:
    _, undisturbed = kills.result(how, ranks, 0, 0)
    happened, found = kills.result(how, ranks, times, 1)
    assert happened == times
    assert found == undisturbed
