"""For mkdocs: a link from a page to a file outside of docs/ leads to that file in the repository."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import Any

SOURCE = "https://github.com/cputrain/cputrain/blob/main/"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    folder = PurePosixPath("docs", page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        path = os.path.normpath(folder / found[1])
        return found[0] if path.startswith("docs/") else f"]({SOURCE}{path}{found[2]})"

    return re.sub(r"\]\((\.\./[^)#]+)((?:#[^)]*)?)\)", link, markdown)
