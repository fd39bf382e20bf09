"""Sixty models of transformers against stock, one setting each; `python -m tests.sweep` has all of them."""

from __future__ import annotations

import pytest

from tests.sweep import sixty
from tests.sweep.cases import Case
from tests.sweep.report import case_of, line
from tests.sweep.runner import Worker


@pytest.fixture(scope="module")
def worker():
    worker = Worker()
    yield worker
    worker.close()


def test_there_are_sixty():
    assert len(sixty.SIXTY) == len(set(sixty.SIXTY)) == 60


@pytest.mark.parametrize("cases", sixty.cases(), ids=lambda cases: cases[0].model)
def test_model_is_as_stock(cases: list[Case], worker: Worker):
    records = [worker.ask(case) for case in cases]
    bad = [record for record in records if record["verdict"] != "same"]
    assert not bad, "\n".join(f"{line(record)}\n    {case_of(record).command()}" for record in bad)
