"""The `cputrain` command. `run` is dispatched here, before anything but the standard library is imported."""

from __future__ import annotations

import sys
from types import TracebackType


def main() -> None:
    """Runs the command. What a user did wrong is one sentence and exit code 2; our own faults keep their traceback."""
    from cputrain.cli import run

    try:
        if run.is_meant(sys.argv[1:]):
            run.main(sys.argv[1:])
        else:
            from cputrain.cli.commands import app

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
