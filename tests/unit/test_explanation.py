"""What `explain` returns, as a REPL, a notebook and `print` show it; whatever names hold is text."""

from __future__ import annotations

import doctest
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch

import cputrain
from cputrain.explanation import Explanation
from tests import model_zoo

FACTS = [("precision", "fp32", "asked for"), ("padding", "drop", "real tokens only " * 12)]
MODULES = [("bert.layer.*.output", "<script>alert(1)</script> & Co × 6", "linear with residual")]
SHOWN = Explanation(FACTS, MODULES)


class Cells(HTMLParser):
    """The texts of a table's cells, and every tag that was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_a_repl_shows_a_table_within_the_terminals_width(columns: int, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = repr(SHOWN).splitlines()
    assert max(map(len, lines)) <= columns
    words = " ".join(repr(SHOWN).split())
    assert ("real tokens only " * 12).strip() in words and "linear with residual" in words and "what runs" in words


def test_print_leaves_lines_whole(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert f"padding    drop  {'real tokens only ' * 12}" in str(SHOWN)


def test_a_notebook_shows_tables_in_which_names_are_only_text() -> None:
    found = Cells(SHOWN._repr_html_())
    assert set(found.tags) == {"table", "tr", "th", "td"} and found.tags.count("table") == 2
    rows = [*FACTS, ("module", "class", "what runs"), *MODULES]
    assert [text for text in found.texts if text] == [cell.strip() for row in rows for cell in row]


def test_a_model_that_was_not_optimised_is_one_row() -> None:
    found = cputrain.explain(torch.nn.Linear(2, 2))
    assert "as stock" in repr(found) and found._repr_html_().count("<table>") == 1


def test_print_works_where_only_ascii_is_known() -> None:
    code = (
        "from cputrain.explanation import Explanation\n"
        "shown = Explanation([('a', 'b', 'measured 1.86 × fp32 …')], [])\nprint(shown)\nprint(repr(shown))"
    )
    command = [sys.executable, "-X", "utf8=0", "-c", code]
    environment = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)}
    answer = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.decode("ascii").splitlines() == ["a  b  measured 1.86 x fp32 ..."] * 2


@pytest.mark.parametrize("function", ["optimize", "explain", "restore"])
def test_the_examples_of_the_docstrings_run(function: str) -> None:
    model, batch = model_zoo.tiny("bert")
    optimizer = torch.optim.AdamW(model.parameters())
    names = {"cputrain": cputrain, "model": model, "optimizer": optimizer, "batch": batch}
    examples = doctest.DocTestFinder(recurse=False).find(getattr(cputrain, function), function, globs=names)
    runner = doctest.DocTestRunner()
    assert [runner.run(one).failed for one in examples] == [0] and runner.tries > 0


def test_every_choice_is_in_the_docstring() -> None:
    from cputrain import settings

    for choice in (*settings.DTYPES, *settings.PADDINGS):
        assert f'- "{choice}"' in str(cputrain.optimize.__doc__)


def test_public_names_are_listed_before_their_first_use() -> None:
    code = "import cputrain, sys; print(*dir(cputrain)); sys.exit('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(cputrain.__all__) <= set(answer.stdout.split())


def test_warnings_have_their_prefix_where_nobody_logs() -> None:
    code = "import logging, cputrain.api\nlogging.getLogger('cputrain').warning('the model computes in int16')"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stderr == "cputrain: the model computes in int16\n"


def test_a_script_that_logs_gets_the_lines_once_and_in_its_own_form() -> None:
    code = (
        "import logging, cputrain.api\nlogging.basicConfig(format='mine: %(message)s')\n"
        "logging.getLogger('cputrain').warning('the model computes in int16')"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stderr == "mine: the model computes in int16\n"
