"""Who may import whom, as docs/architecture.md draws it: each part only what lies below it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "cputrain"

# Each part, and what it may import directly; what those may import is allowed too.
MAY_IMPORT = {
    "log": [],
    "kernel_files": [],
    "hardware": ["kernel_files", "settings"],
    "settings": [],
    "keep_alive": [],
    "blame": ["settings"],
    "stop": ["blame", "settings"],
    "authentication": ["settings"],
    "text_files": [],
    "secrets_in_clear": [],
    "user_folders": ["settings"],
    "output_folder": [],
    "process_memory": ["kernel_files", "memory"],
    "record": ["hardware", "secrets_in_clear", "output_folder", "process_memory"],
    "native": ["hardware"],
    "measurements": ["hardware", "user_folders"],
    "formats": ["native", "measurements"],
    "ops": ["formats"],
    "memory": ["native"],
    "padding": ["ops"],
    "patching": ["padding"],
    "blocks": ["patching"],
    "optimizers": ["native"],
    "explanation": ["blocks"],
    "estimation": ["process_memory"],
    "api": ["explanation", "memory", "optimizers"],  # "optimize" is the function's name
    "distributed": ["native", "keep_alive", "authentication", "blame", "user_folders"],
    "launch": [
        "hardware",
        "keep_alive",
        "authentication",
        "blame",
        "text_files",
        "secrets_in_clear",
        "user_folders",
    ],
    "cluster": ["launch"],
    "checkpoints": ["api", "output_folder", "stop"],
    "integrations": ["checkpoints", "distributed", "record", "stop"],
    "compat": ["integrations"],
    "report": ["record"],
    "trials": ["integrations"],
    "plan": ["trials"],
    "tune": ["launch", "record"],
    "cli": ["cluster", "integrations", "plan", "report", "tune"],
    "__main__": ["cli", "launch"],
}
LIGHT = [
    "cputrain",
    "cputrain.hardware",
    "cputrain.cli",
    "cputrain.cli.run",
    "cputrain.cli.run_options",
    "cputrain.cli.env",
    "cputrain.cli.launch",
    "cputrain.cli.doctor",
]


def allowed(part: str) -> set[str]:
    """All that lies below a part, and itself."""
    return {part}.union(*(allowed(lower) for lower in MAY_IMPORT[part]))


def part_of(module: str) -> str:
    """cputrain.ops.dropout belongs to ops."""
    return module.split(".")[1]


def modules() -> list[str]:
    files = [file.relative_to(PACKAGE.parent).with_suffix("") for file in sorted(PACKAGE.rglob("*.py"))]
    names = [".".join(file.parts).removesuffix(".__init__") for file in files]
    return [name for name in names if name != "cputrain"]


def file_of(module: str) -> Path:
    plain = PACKAGE.parent.joinpath(*module.split("."))
    return plain / "__init__.py" if plain.is_dir() else plain.with_suffix(".py")


def imported(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Modules of ours that a source imports, wherever in it: at the top, in a function or for the type checker."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from cputrain import ops` names a part, `from cputrain.ops import dropout` is within one.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def ours(names: Iterator[str]) -> list[str]:
    """Without what isn't ours, and without the package's version and its log, which every part may use."""
    free = ("cputrain.__version__", "cputrain.log")
    return [name for name in names if name.startswith("cputrain.") and not name.startswith(free)]


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_what_lies_below_it(module: str) -> None:
    assert part_of(module) in MAY_IMPORT, f"{module} has no place among the layers: give it one here and in the docs"
    file = file_of(module)
    names = ours(imported(file.read_text(), module, file.name == "__init__.py"))
    wrong = [name for name in names if part_of(name) not in allowed(part_of(module))]
    assert not wrong, f"{part_of(module)} may import {sorted(allowed(part_of(module)))}"


def test_no_two_parts_lie_below_each_other() -> None:
    for part in MAY_IMPORT:
        for lower in allowed(part) - {part}:
            assert part not in allowed(lower)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\nimport cputrain.ops.dropout", ["cputrain.ops.dropout"]),
        ("from cputrain import __version__, native", ["cputrain.native"]),
        ("from cputrain.log import say_once", []),
        ("def f():\n    from cputrain.ops import dropout", ["cputrain.ops.dropout"]),
        ("from . import linear\nfrom .linear import product", ["cputrain.ops.linear", "cputrain.ops.linear.product"]),
        ("from .. import cli\nfrom ..cli import main", ["cputrain.cli", "cputrain.cli.main"]),
    ],
)
def test_every_way_to_import_is_seen(source: str, found: list[str]) -> None:
    assert ours(imported(source, "cputrain.ops.dropout", is_package=False)) == found


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_bring_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor", "--help"]])
def test_help_brings_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom cputrain.cli import main\n"
        f"sys.argv = ['cputrain', *{arguments}]\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "False"
