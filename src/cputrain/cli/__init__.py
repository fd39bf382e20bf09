"""The `cputrain` command. `run` is dispatched here, before anything but the standard library is imported."""

from __future__ import annotations

import sys
from types import TracebackType


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
        from cputrain import plain_text
        from cputrain.cli import commands

        plain_text.for_this_terminal()
        commands.run(arguments)


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether our code raised it, rather than a library that it called."""
    name = ""
    while trace is not None:
        name, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return name.split(".")[0] == "cputrain"
