"""Some hundred calls of everything in a row: no hang, and no abort at exit. soak.py as a program makes more."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import spawn
from tests.distributed.soak import rounds


@pytest.mark.parametrize("ranks", [2, 3])
def test_many_calls_in_a_row(ranks: int, tmp_path) -> None:
    spawn(rounds, ranks, ranks, str(tmp_path), 300)
