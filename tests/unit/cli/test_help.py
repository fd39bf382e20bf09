"""Every help page as a person sees it, on a narrow and on a wide terminal; examples are commands that work."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import typer

from cputrain.cli import SUMMARIES, app_of, completion, run_options
from tests.cluster.command_line import cputrain

PATHS = [one.path for one in completion.entries() if one.path != "help"]


def examples(path: str) -> Iterator[str]:
    """The commands below "Examples:", with continued lines joined; two blanks begin an explanation."""
    text = cputrain(*path.split(), "--help", environ={"COLUMNS": "100"}).stdout.partition("\nExamples:\n")[2]
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        yield line.strip().partition("   ")[0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("columns", [80, 140])
def test_pages_are_as_wide_as_the_terminal_and_readable(path: str, columns: int) -> None:
    answer = cputrain(*path.split(), "--help", environ={"COLUMNS": str(columns)})
    assert (answer.returncode, answer.stderr) == (0, "")
    lines = answer.stdout.splitlines()
    assert lines[0].startswith(f"Usage: cputrain {path}".rstrip())
    assert max(map(len, lines)) <= columns
    assert "<" not in answer.stdout and "{" not in answer.stdout  # typer's <str> and {files}
    assert list(examples(path))


def test_a_wide_terminal_is_used() -> None:
    narrow, wide = (cputrain("launch", "-h", environ={"COLUMNS": str(columns)}).stdout for columns in (80, 140))
    assert len(wide.splitlines()) < len(narrow.splitlines())


@pytest.mark.parametrize("path", PATHS)
def test_examples_can_be_typed(path: str) -> None:
    """Each is parsed by the command that it names; nothing runs."""
    for example in examples(path):
        words = shlex.split(example.rpartition("| ")[2].replace('"$(', "").replace(')"', "").partition(" && ")[0])
        if words[0] == "eval":
            words = words[1:]
        assert words[0] == "cputrain", example
        parse(words[1:])


def parse(words: list[str]) -> None:
    name = words[0]
    if name == "run":
        with mock.patch.dict("os.environ"):
            assert run_options.read(words).what.strip()
    elif name == "help":
        assert words[1] in SUMMARIES
    else:
        rest = words[1 : words.index(">")] if ">" in words else words[1:]
        found = typer.main.get_command(app_of(name))
        if hasattr(found, "commands"):
            found, rest = found.commands[rest[0]], rest[1:]
        assert found.make_context(name, rest) is not None


def test_run_stands_first() -> None:
    page = cputrain("--help").stdout
    assert page.partition("Commands:\n")[2].split()[0] == "run"


@pytest.mark.parametrize("words", [[], ["help"], ["--help"], ["-h"], ["help", "help"]])
def test_the_bare_command_shows_its_help_and_ends_with_zero(words: list[str]) -> None:
    answer = cputrain(*words)
    assert answer.returncode == 0 and answer.stdout.startswith("Usage: cputrain COMMAND") and not answer.stderr


@pytest.mark.parametrize("path", [path for path in PATHS if path])
def test_help_of_a_command_is_its_help(path: str) -> None:
    asked = cputrain("help", *path.split())
    assert asked.returncode == 0 and asked.stdout == cputrain(*path.split(), "-h").stdout


@pytest.mark.parametrize("group", ["k8s", "slurm"])
def test_a_bare_group_shows_its_help_too(group: str) -> None:
    answer = cputrain(group)
    assert answer.returncode == 0 and answer.stdout == cputrain(group, "--help").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["docter"], "there is no command docter; did you mean doctor?"),
        (["--verison"], "there is no option --verison; did you mean --version?"),
        (["qqqq"], "there is no command qqqq; `cputrain help` lists what there is."),
        (["help", "lanch"], "there is no command lanch; did you mean launch?"),
        (["run", "--dtpye", "fp32", "x.py"], "run has no option --dtpye; did you mean --dtype?"),
        (["run", "--paddings=keep", "x.py"], "run has no option --paddings; did you mean --padding?"),
        (["run", "--zzz", "x.py"], "run has no option --zzz; options of the script stand after it."),
    ],
)
def test_a_misspelt_word_is_answered_with_the_right_one(words: list[str], said: str) -> None:
    answer = cputrain(*words)
    assert (answer.returncode, answer.stdout) == (2, "") and answer.stderr.startswith(f"cputrain: {said}")


def test_misspelt_options_of_other_commands_too() -> None:
    for words, meant in ((["launch", "--num_proceses", "2", "x.py"], "--num_processes"), (["k8s", "rendr"], "render")):
        answer = cputrain(*words)
        assert answer.returncode == 2 and meant in answer.stderr, answer.stderr


@pytest.mark.parametrize("path", PATHS)
def test_help_imports_nothing_heavy(path: str) -> None:
    """A page within a quarter of a second of CPU time; these alone would take longer."""
    code = (
        "import sys\nfrom cputrain import cli\n"
        f"sys.argv = ['cputrain', *{path.split()!r}, '--help']\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich', 'transformers', 'accelerate', 'questionary', 'ruamel.yaml'}\n"
        "print(*heavy & set(sys.modules), file=sys.stderr)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stderr.strip() == ""
