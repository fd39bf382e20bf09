"""The README's translations show the same commands and the same figures as the original."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRANSLATIONS = ["README.zh.md", "README.ja.md"]


def blocks(text: str) -> list[str]:
    """What stands between fences, without comments, which are translated."""
    found = re.findall(r"^```(?:diff)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [re.sub(r" +# .*", "", block) for block in found]


def tables(text: str) -> list[list[list[str]]]:
    """The rows of each table, cells apart, without its title."""
    found = re.findall(r"(?:^\|.*\|$\n)+", text, re.MULTILINE)
    return [[row.strip("|\n").split("|") for row in table.splitlines()[2:]] for table in found]


def figures(text: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", text)


ORIGINAL = (ROOT / "README.md").read_text()
RESULTS, COMMANDS = tables(ORIGINAL)[:2]


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_each_language_shows_the_same_code(name: str) -> None:
    assert blocks((ROOT / name).read_text()) == blocks(ORIGINAL)[:2]


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_each_language_has_the_same_results(name: str) -> None:
    results = tables((ROOT / name).read_text())[0]
    assert [[figures(cell) for cell in row] for row in results] == [[figures(cell) for cell in row] for row in RESULTS]


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_each_language_has_the_same_commands(name: str) -> None:
    commands = tables((ROOT / name).read_text())[1]
    assert [row[0].strip() for row in commands] == [row[0].strip() for row in COMMANDS]
    for translated, original in zip(commands, COMMANDS, strict=True):
        assert set(re.findall(r"`[^`]+`", translated[1])) == set(re.findall(r"`[^`]+`", original[1]))


@pytest.mark.parametrize("name", ["README.md", *TRANSLATIONS])
def test_each_language_leads_to_the_others(name: str) -> None:
    links = (ROOT / name).read_text().splitlines()[2]
    assert all(f"({other})" in links for other in {"README.md", *TRANSLATIONS} - {name})
