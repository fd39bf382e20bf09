"""`cputrain run SCRIPT ARGS…`: a user's unmodified script, in this process, as `python SCRIPT ARGS…` would run it.

Nothing but the standard library is imported here: transformers and accelerate are changed when the script imports them.
"""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import signal
import sys
import types
from collections.abc import Callable
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import TYPE_CHECKING, NoReturn

from cputrain import blame
from cputrain.cli.run_options import Target
from cputrain.integrations import hook, notices
from cputrain.launch import import_path, join
from cputrain.log import say_once
from cputrain.settings import is_first_rank

if TYPE_CHECKING:
    from cputrain.launch.pmi import Exchange


def main(target: Target) -> NoReturn:
    notices.show()
    # Before anything is imported that reads the number of threads, or who this is.
    exchange = join.join(os.environ)
    if not is_first_rank():
        notices.leave_to_rank_0()
    hook.activate()
    _as_python_would(_prepared(target), exchange)
    _say_if_nothing_was_optimised()
    sys.exit(0)


# --- As python does it -------------------------------------------------------------------------------------------


def _prepared(target: Target) -> Callable[[], object]:
    """Gives the process the argv, the path and the `__main__` that python would, and returns what runs the target."""
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__builtins__=builtins, __annotations__={}, __loader__=BuiltinImporter)
    sys.argv = [target.what if target.flag == "" else target.flag, *target.arguments]
    if target.flag == "-m":
        code, folder = None, os.getcwd()
    elif target.flag == "-c":
        code, folder = _compiled(target, target.what.encode(), "<string>"), ""
    elif pkgutil.get_importer(target.what) is not None:  # a folder or a zip file with a __main__.py
        code, folder = None, os.path.abspath(target.what)
    else:
        path = os.path.abspath(target.what)
        code, folder = _compiled(target, _source(target, path), path), os.path.dirname(os.path.realpath(path))
        main_module.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    if import_path.begins_with_a_folder():
        sys.path[0] = folder
    sys.modules["__main__"] = main_module
    if code is None:
        return lambda: _run_module(target)
    return lambda: exec(code, main_module.__dict__)


def _run_module(target: Target) -> object:
    """What the interpreter itself calls for -m, and for folders and zip files."""
    name = target.what if target.flag else "__main__"
    return runpy._run_module_as_main(name, alter_argv=bool(target.flag))  # type: ignore[attr-defined]


def _source(target: Target, path: str) -> bytes:
    try:
        with io.open_code(path) as file:
            return file.read()
    except OSError:
        _let_python_say_it(target)


def _compiled(target: Target, source: bytes, name: str) -> types.CodeType:
    try:
        return compile(source, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        _let_python_say_it(target)


def _let_python_say_it(target: Target) -> NoReturn:
    """What can't even be read or compiled gets python's own words and exit code, from python."""
    flag = [target.flag] if target.flag else []
    os.execv(sys.executable, [sys.executable, *flag, target.what, *target.arguments])


def _as_python_would(run: Callable[[], object], exchange: Exchange | None) -> None:
    """Uncaught exceptions end the process as they do under python: the same traceback, without our frames in it."""
    try:
        run()
    except SystemExit as end:
        _note_failure(exchange, end.code if isinstance(end.code, int) else int(bool(end.code)))
        if not end.code:
            _say_if_nothing_was_optimised()
        raise
    except notices.Refused as error:
        blame.note_exception(error)
        _note_failure(exchange, 2)
        print(f"cputrain: {error}", file=sys.stderr)
        sys.exit(2)
    except BaseException as error:  # noqa: BLE001 - printed and answered as the interpreter does
        error.__traceback__ = _without_ours(error.__traceback__)
        # Ctrl-C reaches all ranks: one shows where it was.
        if is_first_rank() or not isinstance(error, KeyboardInterrupt):
            sys.excepthook(type(error), error, error.__traceback__)
        blame.note_exception(error)
        _note_failure(exchange, 1)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)


def _say_if_nothing_was_optimised() -> None:
    """Scripts with a training loop of their own need two lines more, unless a reason to stay as stock was given."""
    own_loops = sys.modules.get("cputrain.integrations.own_loops")
    advice = own_loops.advice() if own_loops is not None and is_first_rank() else None
    if advice is not None and not notices.said_why_stock():
        say_once(advice)


def _note_failure(exchange: Exchange | None, code: int) -> None:
    """Under mpirun the ranks that wait for one that failed are ended, rather than left to wait."""
    if code:
        join.keep_exit_code()
    if exchange is not None and code:
        exchange.exit_code = code


def _without_ours(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__:
        trace = trace.tb_next
    return trace
