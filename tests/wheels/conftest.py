"""The sdist, the wheel without kernels that is built from it, and a fresh virtual environment that has this wheel."""

from __future__ import annotations

import os
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from tests.wheels.roots import finished

TREE = Path(__file__).parents[2]
BUILD_SDIST = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    finished([sys.executable, "-c", BUILD_SDIST, str(folder)], dict(os.environ), TREE)
    (archive,) = folder.iterdir()
    return archive


@pytest.fixture(scope="session")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as file:
        file.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


@pytest.fixture(scope="session")
def wheel_without_kernels(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [*PIP, "wheel", "--no-index", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder)]
    finished([*command, str(unpacked)], {**os.environ, "CPUTRAIN_WITHOUT_KERNELS": "1"})
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture(scope="session")
def python_without_kernels(wheel_without_kernels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of a virtual environment with the wheel. All else comes from .venv, but not its editable cputrain:
    a path in a .pth file is searched without the .pth files that lie there."""
    folder = tmp_path_factory.mktemp("venv")
    finished([sys.executable, "-m", "venv", "--without-pip", str(folder)], dict(os.environ))
    python = folder / "bin" / "python"
    finished(
        [*PIP, "--python", str(python), "install", "--no-index", "--no-deps", str(wheel_without_kernels)],
        dict(os.environ),
    )
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python
