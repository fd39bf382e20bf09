"""The portable kernels and the collectives against formulas in double, compiled for this CPU and for aarch64.

The drivers are those of the sanitizers (kernels.cpp, collectives.cpp); aarch64 shows that nothing in them needs x86.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DRIVERS = ("portable_kernels", "portable_collectives")
AARCH64 = [
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
]


def tool(name: str) -> str:
    """cmake or ninja, which pip put beside Python."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"needs {name}")
    return found


def run(*command: str) -> str:
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    environment.pop("CXXFLAGS", None)
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, f"{' '.join(command)}\n{(answer.stdout + answer.stderr)[-6000:]}"
    return answer.stdout + answer.stderr


def built(folder: Path, *options: str) -> list[str]:
    """Both drivers, in a build tree of their own. A warning is a failure: no compiler but this one sees these lines."""
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DCPUTRAIN_PORTABLE=ON"]
    run(tool("cmake"), "-S", str(ROOT), "-B", str(folder), *generator, *options)
    output = run(tool("cmake"), "--build", str(folder), "--target", *DRIVERS)
    assert "warning" not in output, output[-6000:]
    return [str(folder / "tests" / "native" / driver) for driver in DRIVERS]


def test_on_this_cpu(tmp_path: Path) -> None:
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("there is no C++ compiler")
    kernels, collectives = built(tmp_path)
    assert run(kernels, "200") == "200 shapes on portable: clean\n"
    assert run(collectives, "20") == "20 groups of ranks: clean\n"


@pytest.mark.needs_program("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
@pytest.mark.needs_program("qemu-aarch64", "qemu-user")
def test_on_aarch64(tmp_path: Path) -> None:
    kernels, collectives = built(tmp_path, *AARCH64)
    emulated = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
    assert run(*emulated, kernels, "30") == "30 shapes on portable: clean\n"
    assert run(*emulated, collectives, "5") == "5 groups of ranks: clean\n"
