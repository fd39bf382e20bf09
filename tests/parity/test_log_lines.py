"""What the log says of a call in which something isn't replaced: no more than is true."""

from __future__ import annotations

import pytest

import cputrain
from cputrain import log
from tests.model_zoo import tiny


@pytest.fixture(autouse=True)
def nothing_said_yet(caplog):
    log.mention_once.cache_clear()
    caplog.set_level("INFO", "cputrain")


@pytest.mark.parametrize(("name", "part"), [("bert", "BertEncoder"), ("gpt2", "GPT2Model")])
def test_padding_that_stays_is_not_a_model_that_runs_as_stock(name, part, caplog):
    model, batch = tiny(name, padding="right")
    cputrain.optimize(model)
    model(**batch, output_hidden_states=True)
    (line,) = [line for line in caplog.messages if line.startswith(part)]
    assert line == f"{part} keeps its padding in this call: output_hidden_states was asked for"
    (row,) = [row for row in cputrain.explain(model).modules if row[1] == part]
    assert row[2].startswith("padding kept in its last call: output_hidden_states was asked for; else padding dropped")


def test_a_part_that_runs_as_stock_says_so(caplog):
    model, batch = tiny("bert")
    cputrain.optimize(model)
    dense = model.bert.encoder.layer[0].output.dense
    dense.register_forward_hook(lambda *_: None)
    model(**batch)
    assert any("runs as stock in this call: Linear has a hook" in line for line in caplog.messages)
    assert "as stock in its last call: Linear has a hook" in str(cputrain.explain(model))
