"""`cputrain …` as a user types it, run within this process: to start Python takes longer than most commands do."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from cputrain import cli


def cputrain(
    *words: str, environ: Mapping[str, str] | None = None, folder: Path | None = None, given: str = ""
) -> subprocess.CompletedProcess[str]:
    """What the process would have answered, with these variables, in this folder, and this on its standard input."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    before, handler = Path.cwd(), signal.getsignal(signal.SIGTERM)
    stdin = io.TextIOWrapper(io.BytesIO(given.encode()))
    variables = mock.patch.dict(os.environ, environ or {}, clear=environ is not None)
    argv = mock.patch.object(sys, "argv", ["cputrain", *words])
    try:
        os.chdir(folder or before)
        with variables, argv, mock.patch.object(sys, "stdin", stdin), redirect_stdout(out), redirect_stderr(err):
            cli.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        os.chdir(before)
        signal.signal(signal.SIGTERM, handler)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
