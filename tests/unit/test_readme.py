"""The README can't drift: its tree, its paths and its commands exist, and so does what any document links to."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cputrain.cli import SUMMARIES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FENCED = re.findall(r"^```\w*\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
INLINE = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE))
CODE = "\n".join([*FENCED, *INLINE])


def tree_paths(tree: str) -> Iterator[str]:
    """`name/` opens a folder, two more blanks are one level deeper, two blanks after a name begin its comment."""
    folders: list[str] = []
    for line in filter(str.strip, tree.splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2
        name = re.split(r"\s{2,}", line.strip())[0]
        del folders[depth:]
        yield "".join([*folders, name])
        if name.endswith("/"):
            folders.append(name)


TREE = list(tree_paths(re.search(r"^## Where things are\n+```\n(.*?)^```", README, re.DOTALL | re.MULTILINE)[1]))
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "csrc" / "README.md",
    *(ROOT / "docs").glob("*.md"),
]


def linked(document: Path) -> Iterator[str]:
    """Files that a document links to, as paths from the root."""
    for link in re.findall(r"\]\(([^)#]+)", document.read_text()):
        if "://" not in link:
            yield os.path.relpath(document.parent / link, ROOT)


LINKS = [link for document in DOCUMENTS for link in linked(document)]
# Files and folders that the text names in passing, such as `src/cputrain/ops/dropout.py`.
NAMED = [word for word in INLINE if re.fullmatch(r"[\w.]+/[\w./]*", word)]
MAKE_TARGETS = sorted(set(re.findall(r"\bmake ([a-z]+)", CODE)))
SUB_COMMANDS = sorted(set(re.findall(r"(?:^|[^\w/.])cputrain ([a-z]\w*)", CODE, re.MULTILINE)))


def test_a_tree_is_read_as_it_is_drawn() -> None:
    drawn = "a/\n  b/      what b is\n    c.py  what c is\n  d.py\ne/f.txt\n"
    assert list(tree_paths(drawn)) == ["a/", "a/b/", "a/b/c.py", "a/d.py", "e/f.txt"]


def test_there_is_something_to_check() -> None:
    assert len(TREE) > 10
    assert {"demo", "test", "build"} <= set(MAKE_TARGETS)
    assert "doctor" in SUB_COMMANDS
    assert "LICENSE" in LINKS


def test_the_tree_names_everything_once() -> None:
    assert sorted(TREE) == sorted(set(TREE))


@pytest.mark.parametrize("path", sorted({*TREE, *LINKS, *NAMED}))
def test_paths_exist(path: str) -> None:
    found = ROOT / path
    assert found.is_dir() if path.endswith("/") else found.is_file()


@pytest.mark.parametrize("target", MAKE_TARGETS)
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", SUB_COMMANDS)
def test_sub_commands_exist(name: str) -> None:
    assert name in SUMMARIES


FAMILIES = re.search(r"^## Which models\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)[1]
TYPES = {
    name.strip()
    for row in (ROOT / "docs" / "models.md").read_text().splitlines()
    for name in row.split("|")[1:2]
    for name in re.split(r",| and ", name)
}
# As transformers spells the model type, where that isn't the name in small letters.
SPELT = {"GPT-2": "gpt2", "GPT-NeoX": "gpt_neox", "OLMo": "olmo", "ConvNeXT": "convnext"}


@pytest.mark.parametrize(
    "family", [name for row in re.findall(r"^\| ([A-Z].*?) \|", FAMILIES, re.MULTILINE) for name in row.split(", ")]
)
def test_families_are_those_of_the_models_page(family: str) -> None:
    name = family.partition(" (")[0]
    assert SPELT.get(name, name.lower()) in TYPES


def numbers(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", text)


RESULTS = re.search(r"^## Results\n(.*?)^## ", README, re.DOTALL | re.MULTILINE)[1]
REPORTS = "\n".join((ROOT / path).read_text() for path in re.findall(r"\((benchmarks/results/\S+\.md)\)", RESULTS))
# Without its head, and without the column that says what was measured.
ROWS = [row.split("|")[2:-1] for row in RESULTS.splitlines() if row.startswith("|")][2:]


def is_reported(number: str, reported: str) -> bool:
    """Whether a report has it, with as many digits or more."""
    digits = len(number.partition(".")[2])
    return any(f"{float(found):.{digits}f}" == number for found in numbers(reported))


@pytest.mark.parametrize("cells", ROWS, ids=range(len(ROWS)))
def test_figures_are_those_of_the_reports(cells: list[str]) -> None:
    row = " ".join(cells)
    ratios, others = re.findall(r"\*\*(.+?)\*\*", row), numbers(re.sub(r"\*\*.+?\*\*", "", row))
    assert ratios and others
    assert [one for one in ratios if not is_reported(one, " ".join(re.findall(r"\*\*(.+?)\*\*", REPORTS)))] == []
    assert [one for one in others if not is_reported(one, REPORTS)] == []


def test_a_figure_that_no_report_has_is_found() -> None:
    assert is_reported("3.0", "**2.97** (2.85 - 3.05)") and not is_reported("3.1", "**2.97** 13.1 3.1x")
    assert len(ROWS) > 5 and len(numbers(REPORTS)) > 100


def test_every_script_that_make_runs_exists() -> None:
    scripts = re.findall(r"python ([\w/]+\.py)", (ROOT / "Makefile").read_text())
    assert scripts
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
