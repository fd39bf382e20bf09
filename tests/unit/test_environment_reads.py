"""Only settings.py and launch read the environment, settings.py knows every variable, and docs/settings.md lists them.

Handing the environment to a function or to a child, and writing a variable, is no reading.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cputrain import settings

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "cputrain"
# Paths that begin like this may read, for the reason beside them.
ALLOWED = {
    "settings.py": "it is the one place",
    "integrations/collectives.py": "takes CCL_WORKER_COUNT away while accelerate looks, and puts it back",
    "launch/": "reads the launchers' variables from the mapping that it is given; settings.py describes each",
}
FILES = sorted(PACKAGE.rglob("*.py"))
GROUPS = {
    "Yours to set": settings.OF_THE_USER,
    "Set by launchers": settings.OF_LAUNCHERS,
    "Of libraries and the system": settings.OF_LIBRARIES,
    "Set by cputrain for its own processes": settings.OF_CPUTRAIN,
}


def is_environment(node: ast.AST) -> bool:
    """os.environ, or a mapping that is handed along under that name."""
    return isinstance(node, (ast.Attribute, ast.Name)) and ast.unparse(node) in ("os.environ", "environ")


def reads(source: str) -> Iterator[str]:
    """The expressions that look into the environment."""
    for node in ast.walk(ast.parse(source)):
        found = False
        if isinstance(node, ast.Subscript):
            found = isinstance(node.ctx, ast.Load) and is_environment(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            looks = node.func.attr in ("get", "pop") and is_environment(node.func.value)
            found = looks or ast.unparse(node.func) == "os.getenv"
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
            found = is_environment(node.comparators[0])
        if found:
            yield ast.unparse(node)


@pytest.mark.parametrize("file", [str(file.relative_to(PACKAGE)) for file in FILES])
def test_no_other_module_reads_the_environment(file: str) -> None:
    if not file.startswith(tuple(ALLOWED)):
        assert list(reads((PACKAGE / file).read_text())) == [], "read it through cputrain.settings"


@pytest.mark.parametrize(
    "source",
    ['os.environ["A"]', 'os.environ.get("A")', 'os.getenv("A")', '"A" in os.environ', 'environ.pop("A")', "environ[A]"],
)
def test_every_way_to_read_is_seen(source: str) -> None:
    assert list(reads(source)) == [ast.unparse(ast.parse(source))]


@pytest.mark.parametrize("source", ['os.environ["A"] = "1"', "run({**os.environ})", 'os.environ.setdefault("A", "1")'])
def test_writing_and_handing_along_is_no_reading(source: str) -> None:
    assert list(reads(source)) == []


def test_every_variable_that_is_read_by_its_name_is_known() -> None:
    """Also where the environment is still read: a variable's meaning is written in one place."""
    read = " ".join(expression for file in FILES for expression in reads(file.read_text()))
    assert set(re.findall(r"'([A-Z]\w+)'", read)) <= settings.VARIABLES.keys()


def row(name: str, variable: settings.Variable) -> str:
    values = ", ".join(f"`{value}`" for value in variable.values)
    return f"| `{name}` | {variable.meaning}{f': {values}' if values else ''} | {variable.default} |"


def table(variables: dict[str, settings.Variable]) -> str:
    rows = [row(name, variable) for name, variable in variables.items()]
    return "\n".join(["| variable | what it says | if it isn't set |", "|---|---|---|", *rows])


def test_the_page_lists_every_variable() -> None:
    """What is printed where this fails is what docs/settings.md should say."""
    page = (ROOT / "docs" / "settings.md").read_text()
    for title, variables in GROUPS.items():
        assert f"## {title}\n\n{table(variables)}\n" in page, f"\n## {title}\n\n{table(variables)}"
    assert page.count("\n| `") == len(settings.VARIABLES) == sum(map(len, GROUPS.values()))
