"""The user's home and cache. Containers also start processes for users that /etc/passwd doesn't know, without HOME."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from cputrain.settings import CACHE, HOME, Environ, value_of


def home(environ: Environ | None = None) -> Path | None:
    """None if neither HOME nor /etc/passwd has it."""
    if told := value_of(HOME, environ):
        return Path(told)
    try:
        import pwd
    except ImportError:  # Windows, where Python knows another way
        return Path.home()
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def cache(environ: Environ | None = None) -> Path | None:
    """For what can be made again. Without a home it is a folder for temporary files; None if even that isn't ours."""
    if told := value_of(CACHE, environ):
        return Path(told)
    own = home(environ)
    return own / ".cache" if own else _temporary()


def _temporary() -> Path | None:
    """Everyone may write beside it: what another user put there is not used."""
    folder = Path(tempfile.gettempdir()) / f"cputrain-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return folder if is_ours else None
