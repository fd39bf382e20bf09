"""The `cputrain` command: one small module per sub-command.

Modules here import nothing heavy at their top, so that `--help` answers at once and without torch.
"""

from __future__ import annotations

import sys
from types import TracebackType

import typer

from cputrain import __version__
from cputrain.cli import doctor

app = typer.Typer(
    name="cputrain",
    help="Train transformer models on CPUs several times faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(doctor.doctor)


def main() -> None:
    """Runs the command. What a user did wrong is one sentence and exit code 2; our own faults keep their traceback."""
    try:
        app()
    except ValueError as error:
        if not _is_ours(error.__traceback__):
            raise
        print(f"cputrain: {error}", file=sys.stderr)
        sys.exit(2)


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether our code raised it, rather than a library that it called."""
    name = ""
    while trace is not None:
        name, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return name.split(".")[0] == "cputrain"


def _print_version(asked: bool) -> None:
    if asked:
        print(f"cputrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Train transformer models on CPUs several times faster."""
