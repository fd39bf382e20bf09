"""For mkdocs: a link from docs/ to elsewhere leads to the repository; pictures from there are copied into the site."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
SOURCE = "https://github.com/cputrain/cputrain/blob/main/"
_LINK = re.compile(r"(!?)\[([^]]*)\]\((\.\./[^)#]+)((?:#[^)]*)?)\)")


def _outside(page: PurePosixPath, link: str) -> str | None:
    """The path from the repository's root, if it isn't in docs/."""
    path = os.path.normpath(PurePosixPath("docs") / page.parent / link)
    return None if path.startswith("docs/") else path


def on_files(files: Any, config: Any, **_: Any) -> Any:
    for file in list(files.documentation_pages()):
        for is_picture, _text, link, _anchor in _LINK.findall(file.content_string):
            path = _outside(PurePosixPath(file.src_uri), link)
            name = f"pictures/{os.path.basename(link)}"
            if is_picture and path and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = PurePosixPath(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        is_picture, text, target, anchor = found.groups()
        path = _outside(here, target)
        if path is None:
            return found[0]
        if is_picture:
            return f"![{text}]({'../' * (len(here.parts) - 1)}pictures/{os.path.basename(target)})"
        return f"[{text}]({SOURCE}{path}{anchor})"

    return _LINK.sub(link, markdown)
