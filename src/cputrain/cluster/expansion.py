"""Kubernetes replaces `$(NAME)` in commands, arguments and variables. What users give is data, and arrives as given."""

from __future__ import annotations

import re

# The kubelet reads `$$` as `$` and `$(` as a reference; a `$` before a byte beyond ASCII it would garble.
_MEANT = re.compile(r"\$\$+|\$(?=\(|[^\x00-\x7f])")


def escape(value: str) -> str:
    """The text whose expansion is `value`: `$(` becomes `$$(`."""
    return _MEANT.sub(lambda found: found[0] * 2, value)
