"""Debian in a folder, made by debootstrap from the mirror that apt uses here, and commands that run in it by chroot."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Root:
    """A system of its own below `folder`: no file, package, compiler or variable of this machine is seen there."""

    folder: Path

    def run(self, *words: str, **environ: str) -> str:
        """What a command prints. It sees its own processes; /proc is mounted for it alone, and gone afterwards."""
        command = ["unshare", "--mount", "--pid", "--fork", f"--mount-proc={self.folder}/proc"]
        command += ["chroot", str(self.folder), *words]
        return finished(command, {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", **environ})

    def copy(self, source: Path, target: str) -> None:
        """A file, or a folder without what Python compiled in it, to the path `target` inside."""
        place = self.folder / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, place)

    def has(self, program: str) -> bool:
        return any((self.folder / path.lstrip("/") / program).exists() for path in PATH.split(":"))


def debian(suite: str, folder: Path, packages: list[str]) -> Root:
    """The smallest Debian with these packages."""
    include = f"--include={','.join(packages)}"
    finished(["debootstrap", "--variant=minbase", include, suite, str(folder), *_mirror()], dict(os.environ))
    shutil.rmtree(folder / "var" / "cache" / "apt" / "archives")
    return Root(folder)


def _mirror() -> list[str]:
    """Where apt gets Debian's main packages here; nothing leaves the choice to debootstrap."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Component: main"]
    found = finished([*command, "Label: Debian"], dict(os.environ)).split()
    return found[:1]


def finished(command: list[str], environ: dict[str, str], folder: Path | None = None) -> str:
    """The output of a command that ends well; else its last lines are the error."""
    done = subprocess.run(
        command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stdout[-2000:] + done.stderr[-4000:]).strip()
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    return done.stdout


def megabytes(path: Path) -> float:
    """What a file or folder takes on the disk. A file with two names counts once."""
    inodes = {}
    for file in [path, *path.rglob("*")]:
        about = file.lstat()
        inodes[about.st_dev, about.st_ino] = about.st_blocks * 512
    return sum(inodes.values()) / 1e6
