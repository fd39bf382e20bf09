"""Files of /proc and /sys, below a root that tests can replace, how the kernel writes numbers, and cgroups' limits."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
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


# --- Limits of cgroups, v1 and v2 ------------------------------------------------------------------------------------


def cgroup_limits(tree: Tree, controller: str, name: str) -> Iterator[tuple[str, str]]:
    """(path, text) of the file `name` in this process's cgroup and in each one above it: any can be the tightest."""
    for folder in _cgroup_folders(tree, controller):
        text = tree.read(f"{folder}/{name}")
        if text is not None:
            yield f"{folder}/{name}", text


def _cgroup_folders(tree: Tree, controller: str) -> list[str]:
    """This process's cgroup folders, v1 and v2, innermost first."""
    folders = []
    for mount_root, mount, version in _cgroup_mounts(tree, controller):
        below = _below_mount(_own_cgroup(tree, controller, version), mount_root)
        while below not in ("", "/"):
            folders.append(mount + below)
            below = posixpath.dirname(below)
        folders.append(mount)
    return list(dict.fromkeys(folders))


def _cgroup_mounts(tree: Tree, controller: str) -> list[tuple[str, str, int]]:
    """(root within the hierarchy, mount point, version) of each hierarchy that may hold the controller."""
    text = tree.read("/proc/self/mountinfo")
    if text is None:
        return [("/", "/sys/fs/cgroup", 2), ("/", f"/sys/fs/cgroup/{controller}", 1)]
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        where, what = before.split(), after.split()
        if len(where) < 5 or len(what) < 3:
            continue
        if what[0] == "cgroup2" or (what[0] == "cgroup" and controller in what[-1].split(",")):
            mounts.append((_unescape(where[3]), _unescape(where[4]), 2 if what[0] == "cgroup2" else 1))
    return mounts


def _own_cgroup(tree: Tree, controller: str, version: int) -> str:
    """This process's path within a hierarchy, from /proc/self/cgroup: `number:controllers:path` a line."""
    for line in (tree.read("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers if version == 2 else controller in controllers.split(","):
            return path
    return "/"


def _below_mount(path: str, mount_root: str) -> str:
    """`path` as seen from the mount point. A container may see its path from outside, but its own part as the mount."""
    if ".." in path.split("/"):
        return ""
    if mount_root == "/":
        return path.rstrip("/")
    inside = path == mount_root or path.startswith(mount_root + "/")
    return path[len(mount_root) :] if inside else ""


def _unescape(text: str) -> str:
    """mountinfo writes blanks and the like as three octal digits."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), text)
