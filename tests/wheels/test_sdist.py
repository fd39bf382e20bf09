"""The sdist has the tree's files and no others, its Makefile works, and the wheel's library needs nothing but OpenMP.

`make wheel-test` does the rest: it compiles from the sdist, and uses the wheels in roots of their own.
"""

from __future__ import annotations

import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from cputrain import native
from tests.wheels import library_alone
from tests.wheels.roots import finished

TREE = Path(__file__).parents[2]
LEFT_OUT = (".ci/", ".github/")


@pytest.mark.skipif(not (TREE / ".git").exists(), reason="only git knows which files are the tree's")
def test_the_sdist_has_what_git_has(sdist: Path) -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    known = {name for name in finished(command, dict(os.environ), TREE).splitlines() if (TREE / name).exists()}
    with tarfile.open(sdist) as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    assert packed == {name for name in known if not name.startswith(LEFT_OUT)} | {"PKG-INFO"}


def test_its_makefile_lists_every_target(unpacked: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    listed = re.findall(r"^  make (\S+) +\S", finished(["make"], environ, unpacked), re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)$", (unpacked / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None and sorted(listed) == sorted(phony[1].split())


def test_the_wheel_without_kernels_is_for_every_platform(wheel_without_kernels: Path) -> None:
    assert wheel_without_kernels.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel_without_kernels).namelist()
    assert "cputrain/py.typed" in names and not [name for name in names if "cputrain/lib" in name]


def test_the_library_multiplies_without_torch() -> None:
    said = finished([sys.executable, library_alone.__file__, str(native.LIBRARY)], dict(os.environ))
    assert said.count("int16 product's error") == len(library_alone.instruction_sets())
