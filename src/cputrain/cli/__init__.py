"""The `cputrain` command: its sub-commands, each a module that is imported when it is asked for.

So `--help` answers at once, and `run` starts before anything but the standard library is imported.
"""

from __future__ import annotations

import importlib
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from cputrain import __version__

if TYPE_CHECKING:
    import typer

SUMMARIES = {
    "run": "Run a training script, optimised, as python would.",
    "launch": "Start a script as one process or many, here or elsewhere.",
    "plan": "Say what a training needs, before it runs.",
    "bench": "This CPU against stock PyTorch, in three minutes.",
    "tune": "Find the fastest settings of this machine for a script.",
    "report": "Show what runs recorded, as a page or a text.",
    "checkpoints": "List a training's checkpoints, and say which are whole.",
    "config": "Answer Accelerate's questions; writes what launch reads.",
    "doctor": "What this CPU is, what runs on it, and what to mend.",
    "env": "What a bug report needs: versions, settings, machine.",
    "k8s": "Train on Kubernetes with Kubeflow's operators.",
    "slurm": "Train on a Slurm cluster.",
    "image": "Write a Dockerfile for trainings, or build the image.",
    "completion": "Print what lets bash, zsh or fish complete commands.",
    "help": "Show this page, or that of a command.",
}
_TEXT = "Train transformer models on CPUs several times faster."
_EXAMPLES = """
    cputrain doctor                        what this machine can do
    cputrain run run_qa.py --do_train      instead of python run_qa.py --do_train
    cputrain launch -n 2 nlp_example.py    two processes
    cputrain help launch                   all options of launch
"""


def main() -> None:
    """Runs the command. What a user did wrong is one sentence and exit code 2; our own faults keep their traceback."""
    try:
        _dispatch(sys.argv[1:])
    except KeyboardInterrupt:  # while something is imported: a script's own is answered by `run`, as python does
        sys.exit(130)
    except ValueError as error:
        if not _is_ours(error.__traceback__):
            raise
        print(f"cputrain: {error}", file=sys.stderr)
        sys.exit(2)


def _dispatch(arguments: list[str]) -> None:
    from cputrain.cli import run_options

    if run_options.is_meant(arguments):
        target = run_options.read(arguments)
        from cputrain.cli import run

        run.main(target)
    else:
        from cputrain import log

        log.tolerate_ascii_terminals()
        _run_command(arguments)


def _run_command(arguments: list[str]) -> None:
    """Runs any command but `run`, and ends the process."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help") or (name == "help" and (not rest or rest[0] in ("help", "-h", "--help"))):
        print(_help())
    elif name == "--version":
        print(f"cputrain {__version__}")
    elif name == "help":
        _show_help(rest)
    else:
        _call(_known(name), rest)
    sys.exit(0)


def app_of(name: str) -> typer.Typer:
    return importlib.import_module(f"cputrain.cli.{name}").app


def _call(name: str, arguments: list[str]) -> None:
    from cputrain.cli import app

    app.run(app_of(name), name, arguments)


def _show_help(words: list[str]) -> None:
    if _known(words[0]) == "run":
        from cputrain.cli import run_options

        print(run_options.help_text())
    else:
        _call(words[0], [*words[1:], "--help"])


def _known(name: str) -> str:
    if name in SUMMARIES:
        return name
    from difflib import get_close_matches

    what = "option" if name.startswith("-") else "command"
    close = get_close_matches(name, [*SUMMARIES, "--version", "--help"], 1)
    meant = f"did you mean {close[0]}?" if close else "`cputrain help` lists what there is."
    raise ValueError(f"there is no {what} {name}; {meant}")


def _help() -> str:
    from cputrain.cli.terminal import help_page

    options = [("--version", "Print the version."), ("-h, --help", "Show this page.")]
    lists = [("Commands", list(SUMMARIES.items())), ("Options", options)]
    return help_page(["cputrain COMMAND [ARGUMENTS]..."], _TEXT, lists, _EXAMPLES)


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether our code raised it, rather than a library that it called."""
    name = ""
    while trace is not None:
        name, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return name.split(".")[0] == "cputrain"
