"""The limits of this process's cgroups, v1 and v2: its own and each one above it, because any can be the tightest."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from cputrain.kernel_files import Tree


def limits(tree: Tree, controller: str, name: str) -> Iterator[tuple[str, str]]:
    """(path, text) of the file `name` in this process's cgroup and in each one above it."""
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
