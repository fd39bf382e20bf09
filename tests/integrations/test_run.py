"""`cputrain run` is python: the same output, tracebacks, exit codes and process for whatever script it is given."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PYTHON = [sys.executable]
RUN = [sys.executable, "-m", "cputrain", "run"]

LOOKS_AROUND = """
import os, sys
print(__name__, globals().get("__file__"), __package__, __spec__ and __spec__.name, type(__loader__).__name__)
print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
print(sorted(name for name in globals() if not name.startswith("__")))
print(sys.stdin.read())
"""
SCRIPTS = {
    "looks_around": LOOKS_AROUND,
    "raises": "def inner():\n    raise KeyError('a word')\n\ninner()\n",
    "raises_ours": "import cputrain\ncputrain.optimize(3)\n",
    "chains": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise RuntimeError('then') from error\n",
    "exits_3": "import sys\nprint('before')\nsys.exit(3)\n",
    "exits_with_words": "import sys\nsys.exit('words')\n",
    "exits_none": "raise SystemExit\n",
    "at_exit": "import atexit\natexit.register(print, 'at exit')\nraise ValueError\n",
    "own_hook": "import sys\nsys.excepthook = lambda *of: print('hooked', of[0].__name__)\nraise ValueError\n",
    "not_python": "This is a letter, not a program.\n",
    "null_bytes": "print(1)\0\n",
    "unclosed": "print(\n",
    "neighbour": "import looks_around\n",
    "pickles": "import pickle\nclass C: pass\nprint(type(pickle.loads(pickle.dumps(C()))) is C)\n",
    "spawns": (
        "import multiprocessing as m\ndef f(x): return x + 1\n"
        "if __name__ == '__main__':\n    print(m.get_context('spawn').Pool(1).map(f, [1]))\n"
    ),
    "warns": "import warnings\nwarnings.warn('mind')\n",
    "interrupted": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(5)\n",
    "dies": "import os\nos._exit(7)\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in SCRIPTS.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "latin.py").write_bytes(b"print('\xe9')\n")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "__main__.py").write_text(LOOKS_AROUND)
    (folder / "package" / "module.py").write_text(LOOKS_AROUND + "raise ValueError('at its end')\n")
    (folder / "plain_folder").mkdir()
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", LOOKS_AROUND)
    (folder / "linked").mkdir()
    (folder / "linked" / "link.py").symlink_to(folder / "looks_around.py")
    return folder


def outcome(command: list[str], folder: Path, **environment: str) -> tuple[int, str, str]:
    answer = subprocess.run(
        command,
        cwd=folder,
        input="typed",
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    return answer.returncode, answer.stdout, answer.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        *([f"{name}.py", "one", "--two", "-m"] for name in SCRIPTS),
        ["latin.py"],
        ["linked/link.py", "x"],
        ["missing.py"],
        ["plain_folder"],
        ["package"],
        ["archive.zip", "one"],
        ["-m", "package", "--dtype", "x"],
        ["-m", "package.module"],
        ["-m", "missing_module"],
        ["-c", LOOKS_AROUND, "one", "-c"],
        ["-c", "raise SystemExit(4)"],
        ["-c", "print("],
    ],
    ids=lambda arguments: " ".join(arguments[:2]).partition("\n")[0],
)
def test_a_script_runs_as_under_python(arguments: list[str], folder: Path) -> None:
    assert outcome([*RUN, *arguments], folder) == outcome([*PYTHON, *arguments], folder)


def test_a_console_script_runs_as_under_python(folder: Path) -> None:
    console_script = str(Path(sys.executable).with_name("cputrain"))
    expected = outcome([*PYTHON, "looks_around.py", "x"], folder)
    assert outcome([console_script, "run", "looks_around.py", "x"], folder) == expected


def test_run_may_be_left_out(folder: Path) -> None:
    expected = outcome([*PYTHON, "looks_around.py", "x"], folder)
    assert outcome([sys.executable, "-m", "cputrain", "looks_around.py", "x"], folder) == expected
    assert outcome([sys.executable, "-m", "cputrain", "--padding=keep", "looks_around.py", "x"], folder) == expected


def test_an_interrupt_kills_the_process_as_a_signal(folder: Path) -> None:
    assert outcome([*RUN, "interrupted.py"], folder)[0] == -signal.SIGINT


def test_neither_torch_nor_the_command_lines_libraries_are_imported(folder: Path) -> None:
    code = "import sys; print(*{'torch', 'typer', 'rich', 'transformers', 'accelerate'} & set(sys.modules))"
    assert outcome([*RUN, "-c", code], folder) == (0, "\n", "")


def test_options_reach_the_environment(folder: Path) -> None:
    code = "import os; print(os.environ['CPUTRAIN_DTYPE'], os.environ['CPUTRAIN_PADDING'])"
    assert outcome([*RUN, "--dtype", "fp32", "--padding=keep", "-c", code], folder) == (0, "fp32 keep\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "run needs a script"),
        (["--dtype"], "--dtype needs a value"),
        (["-m"], "-m needs a value"),
        (["--dtype", "fp64", "exits_3.py"], "--dtype must be one of auto, fp32, bf16, int16, found 'fp64'"),
        (["--padding", "some", "exits_3.py"], "--padding must be one of drop, keep, found 'some'"),
        (["--fast", "exits_3.py"], "run has no option --fast"),
    ],
)
def test_bad_options_are_one_sentence_and_exit_2(arguments: list[str], said: str, folder: Path) -> None:
    code, out, err = outcome([*RUN, *arguments], folder)
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"cputrain: {re.escape(said)}.*\n", err)


def test_a_misspelt_environment_is_refused_before_the_script_runs(folder: Path) -> None:
    code, out, err = outcome([*RUN, "exits_3.py"], folder, CPUTRAIN_PADDING="some")
    assert (code, out) == (2, "")
    assert "CPUTRAIN_PADDING" in err


OWN_LOOP = """
import sys, torch
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{}
for _ in range(2):
    model(torch.ones(2, 3)).sum().backward()
    {}.step()
{}
"""
OPTIMISES = "import cputrain\nmodel, optimizer = cputrain.optimize(model, optimizer, dtype='fp32')"


@pytest.mark.parametrize(
    ("before", "steps", "end", "said"),
    [
        ("", "optimizer", "", True),
        ("", "optimizer", "sys.exit(0)", True),
        ("", "optimizer", "raise ValueError", False),
        ("", "torch.profiler.profile()", "", False),  # no optimizer's
        (OPTIMISES, "optimizer", "del model, optimizer", False),
    ],
)
def test_a_loop_of_its_own_is_told_what_to_add(before: str, steps: str, end: str, said: bool, folder: Path) -> None:
    script = OWN_LOOP.format(before, steps, end)
    _, out, err = outcome([*RUN, "-c", script], folder)
    lines = [line for line in err.splitlines() if "cputrain.optimize(" in line]
    assert out == "" and len(lines) == said
    if said:
        assert lines == err.splitlines() and lines[0].startswith("cputrain: nothing was optimised")
        assert "`import cputrain`" in lines[0] and OPTIMISES.splitlines()[1].replace(", dtype='fp32'", "") in lines[0]


BAR = """
import logging, sys, tqdm
for step in tqdm.tqdm(range(3), mininterval=0):
    if step == 1:
        logging.getLogger("cputrain").warning("a layer returns")
        logging.getLogger("cputrain").warning("cputrain stays out")
"""


def test_lines_have_one_prefix_and_stand_above_progress_bars(folder: Path) -> None:
    written = subprocess.run([*RUN, "-c", BAR], cwd=folder, capture_output=True, check=True).stderr.decode()
    shown = [_as_a_terminal_shows(line) for line in written.rstrip("\n").split("\n")]
    assert shown[:2] == ["cputrain: a layer returns", "cputrain stays out"]
    assert "3/3" in shown[2] and len(shown) == 3


def _as_a_terminal_shows(line: str) -> str:
    """What comes after a carriage return is written over what came before."""
    shown = ""
    for part in line.split("\r"):
        shown = part + shown[len(part) :]
    return shown.rstrip()


def test_without_run_warnings_have_the_prefix_unless_the_script_logs(folder: Path) -> None:
    code = "from cputrain.integrations import accelerate, notices; from cputrain import log; {}; log.say_once('mind')"
    for logs, expected in (
        ("", "cputrain: mind\n"),
        ("import logging; logging.basicConfig()", "WARNING:cputrain:mind\n"),
    ):
        said = outcome([*PYTHON, "-c", code.format(logs or "0")], folder)[2]
        assert said.endswith(expected) and said.count("mind") == 1


def test_help_names_every_option() -> None:
    answer = subprocess.run([*RUN, "--help"], capture_output=True, text=True, check=True)
    for option in ("--dtype", "--padding", "-m MODULE", "-c CODE"):
        assert option in answer.stdout
