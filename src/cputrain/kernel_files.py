"""Files of /proc and /sys, below a root that tests can replace, and how the kernel writes numbers in them."""

from __future__ import annotations

import re
from pathlib import Path

Cpus = tuple[int, ...]


class Tree:
    """Files below a root, named by the absolute paths that they have on a real machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.is_real = root == Path("/")

    def read(self, path: str) -> str | None:
        """The text of a file, or None where it is missing or hidden (containers mask some)."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def numbered(self, folder: str, prefix: str) -> list[tuple[int, str]]:
        """The entries prefix0, prefix1, … of a folder, in the order of their numbers."""
        try:
            names = [entry.name for entry in (self.root / folder.lstrip("/")).iterdir()]
        except OSError:
            return []
        found = [(int(match[1]), name) for name in names if (match := re.fullmatch(prefix + r"(\d+)", name))]
        return [(number, f"{folder}/{name}") for number, name in sorted(found)]


def parse_cpus(text: str) -> Cpus:
    """ "0-2,8" means 0, 1, 2, 8."""
    cpus: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cpus))


def parse_size(text: str) -> int:
    """ "48K" means 49152."""
    number = text.rstrip("KMG")
    return int(number) << {"": 0, "K": 10, "M": 20, "G": 30}[text[len(number) :]]
