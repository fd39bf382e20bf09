"""Where processes of ours look for modules: not in the current folder, whose files would hide the standard library's.

`python -m` puts the current folder first, even before its own imports. So ranks and agents are started by a path to a
file, which puts the folder of that file first; nothing there has a name of the standard library. A user's script gets
the path that python would give it when it starts (cli/run.py).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def program(*parts: str) -> str:
    """A file of this package, to be started by its path."""
    return str(_PACKAGE.joinpath(*parts))


def begins_with_a_folder() -> bool:
    """Whether Python put a folder before all others; -P, -I and PYTHONSAFEPATH tell it not to."""
    return not getattr(sys.flags, "safe_path", sys.flags.isolated)


def leave_out_first() -> None:
    """Puts what the installed command has there into the place of the folder that Python put first."""
    if begins_with_a_folder():
        sys.path[0] = os.path.dirname(sys.executable)
