"""A scanner on every port of a run, from start to end: the ranks train on. strangers.py as a program runs more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.strangers import WAYS, run


@pytest.mark.parametrize("name", WAYS)
def test_ranks_train_on_under_a_scanner(name: str, tmp_path: Path) -> None:
    outcome = run(WAYS[name], tmp_path)
    assert outcome.faults(WAYS[name]) == [], outcome.text
