"""The page loads nothing and runs nothing, whatever a record holds, and shows every chart at every width and theme."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from cputrain.record.read import read
from cputrain.report import charts
from cputrain.report.page import page
from cputrain.report.text import text
from tests.cluster.command_line import cputrain
from tests.report.runs import HOSTILE, hostile, make


def test_every_chart_is_drawn_for_both_widths(tmp_path: Path) -> None:
    runs = [read(make(tmp_path, ranks=2))]
    titles = list(charts.charts(runs))
    assert titles == ["Loss", "Speed", "Share of the CPU's measured peak", "Where the time goes", "Memory"]
    made = page(runs)
    assert made.count("<svg ") == made.count("</svg>") == 2 * len(titles)
    assert charts.INK not in made and charts.FAINT not in made and "var(--ink)" in made


@pytest.mark.parametrize("forbidden", ["<script", "<img", "javascript:", "@import", "<link rel=stylesheet", "<iframe"])
def test_nothing_of_a_hostile_record_becomes_markup(tmp_path: Path, forbidden: str) -> None:
    folder = hostile(tmp_path / "<script>alert(1)<")
    made = page([read(folder), read(make(tmp_path / "b"))])
    assert forbidden not in made and "&lt;script&gt;" in made
    assert not re.findall(r"<[^>]*\son\w+=", made)
    # Addresses stand in it only as names of XML's formats, which nothing loads.
    assert set(re.findall(r"https?://[\w./]+", made)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "default-src 'none'" in made


def test_a_text_moves_no_cursor(tmp_path: Path) -> None:
    made = text([read(hostile(tmp_path))])
    assert "\x1b" not in made and "\u202e" not in made and "<script>" in made


def test_the_command_writes_page_and_picture(tmp_path: Path) -> None:
    make(tmp_path / "out")
    answer = cputrain("report", "out", "--png", folder=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == ["out/_cputrain/report.html", "out/_cputrain/report.png"]
    assert (tmp_path / "out/_cputrain/report.png").read_bytes().startswith(b"\x89PNG")
    assert "times the first run" in cputrain("report", "out", "out", "--text", folder=tmp_path).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing"], "there is no missing"),
        (["."], "holds no record of a run"),
        (["broken"], "holds no record that can be read"),
        (["out", "--output", "out/_cputrain/run-0.jsonl/x.html"], "can't be written"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, words: list[str], said: str) -> None:
    make(tmp_path / "out")
    (tmp_path / "broken" / "_cputrain").mkdir(parents=True)
    (tmp_path / "broken" / "_cputrain" / "run-0.jsonl").write_bytes(b'{"kind":"run"\xff\n{"ki')
    answer = cputrain("report", *words, folder=tmp_path)
    assert answer.returncode == 2 and said in answer.stderr and answer.stderr.count("\n") == 1


def test_without_altair_it_says_what_to_install(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "altair", None)
    make(tmp_path / "out")
    answer = cputrain("report", "out", folder=tmp_path)
    assert answer.returncode == 2 and 'pip install "cputrain[report]"' in answer.stderr
    assert cputrain("report", "out", "--text", folder=tmp_path).returncode == 0


@pytest.mark.needs_program("chromium", "chromium")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_chromium_shows_it_without_a_word(tmp_path: Path, theme: str) -> None:
    """Console messages, blocked loads and scripts would be on stderr; a script of the record would set the title."""
    (tmp_path / "page.html").write_text(page([read(hostile(tmp_path / "a")), read(make(tmp_path / "b", ranks=2))]))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--blink-settings=preferredColorScheme={int(theme == 'light')}", f"--user-data-dir={tmp_path}/profile"]
    answer = subprocess.run(
        [*command, f"file://{tmp_path}/page.html"], capture_output=True, text=True, check=True, timeout=120
    )
    assert "CONSOLE" not in answer.stderr
    assert "<title>2 runs compared</title>" in answer.stdout
    assert answer.stdout.count("<svg ") == 10 and HOSTILE[:8] not in answer.stdout
