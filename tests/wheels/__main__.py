"""What `make wheel` made, used where it is meant to be used: in roots of their own, made by debootstrap.

    python -m tests.wheels                # or: make wheel-test; needs root, debootstrap and dist/; 15 minutes
    python -m tests.wheels --only training --steps 50

library: the wheel's library multiplies in Debian 11 (glibc 2.31), which has neither torch nor a compiler.
training: the wheel, beside CPU torch, trains the demo in Debian 12 without a compiler. pip gets its packages here.
sdist: `pip wheel` and `make build` work in the unpacked sdist.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.wheels.roots import debian, finished, megabytes

TREE = Path(__file__).parents[2]
DIST = TREE / "dist"
COMPILERS = ("cc", "c++", "gcc", "g++", "clang")
DEMO_STEPS = 500
LEAST_F1 = 75.0  # of 500 steps, which give 84 – 85
LIBRARY = "cputrain/lib/libcputrain_native.so"


@contextmanager
def timed(what: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    print(f"  {what}: {time.monotonic() - begin:.0f} s", flush=True)


def the_one(pattern: str) -> Path:
    found = sorted(DIST.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{DIST} must have one {pattern}, found {len(found)}: run `make wheel` first.")
    return found[0]


def library(folder: Path, steps: int) -> None:
    with timed("Debian 11 made"):
        root = debian("bullseye", folder / "bullseye", ["python3", "libgomp1"])
    with zipfile.ZipFile(the_one("*-manylinux_*.whl")) as wheel:
        wheel.extract(LIBRARY, root.folder / "wheel")
    root.copy(Path(__file__).with_name("library_alone.py"), "/library_alone.py")
    assert not any(map(root.has, COMPILERS))
    print(f"  root {megabytes(root.folder):.0f} MB")
    print(root.run("python3", "/library_alone.py", f"/wheel/{LIBRARY}"), end="")


def training(folder: Path, steps: int) -> None:
    with timed("Debian 12 made"):
        root = debian("bookworm", folder / "bookworm", ["python3", "python3-venv"])
    assert not any(map(root.has, COMPILERS))
    wheels = root.folder / "wheels"
    with timed("packages fetched by this machine's pip"):
        fetch(wheels)
    root.copy(the_one("*-any.whl"), f"/wheels/{the_one('*-any.whl').name}")  # pip must prefer the other one
    print(f"  root {megabytes(root.folder) - megabytes(wheels):.0f} MB, wheels {megabytes(wheels):.0f} MB")
    with timed("cputrain[hf] installed"):
        root.run("python3", "-m", "venv", "/venv")
        root.run("/venv/bin/pip", "install", "--no-index", "--find-links", "/wheels", "cputrain[hf]")
    (site,) = (root.folder / "venv" / "lib").glob("python3*/site-packages")
    assert (site / LIBRARY).exists(), "pip chose the wheel without kernels"
    print(f"  installed {megabytes(site):.0f} MB, of which torch {megabytes(site / 'torch'):.0f} MB")
    root.copy(TREE / "examples" / "demo", "/tree/examples/demo")
    root.copy(TREE / "benchmarks" / "interleaved.py", "/tree/benchmarks/interleaved.py")
    with timed(f"demo of {steps} steps"):
        demo = ["/venv/bin/python", "/tree/examples/demo/run_demo.py", "--steps", str(steps), "--json", "/demo.json"]
        root.run(*demo)
    check_demo(json.loads((root.folder / "demo.json").read_text()), steps)


def fetch(wheels: Path) -> None:
    """Debian 12's Python is 3.11, which this machine's need not be."""
    wheel = the_one("*-manylinux_*.whl")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--python-version", "3.11"]
    command += ["-c", str(TREE / "constraints.txt"), "--dest", str(wheels), f"{wheel}[hf]"]
    finished(command, dict(os.environ))


def check_demo(results: dict, steps: int) -> None:
    stock, ours = results["stock"], results["cputrain"]
    for name, value in (("stock", stock), ("cputrain", ours)):
        print(f"  {name}: loss {value['loss']:.3f}, F1 {value['f1']:.1f}, {value['steps_per_second']:.1f} steps/s")
    print(f"  {results['ratio']:.2f} × stock")
    assert abs(ours["loss"] - stock["loss"]) < 0.1 * stock["loss"]
    assert steps < DEMO_STEPS or min(stock["f1"], ours["f1"]) > LEAST_F1


def sdist(folder: Path, steps: int) -> None:
    archive = the_one("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder / "sdist", filter="data")
    (tree,) = (folder / "sdist").iterdir()
    print(f"  sdist {archive.stat().st_size / 1e6:.1f} MB")
    with timed("pip wheel of the sdist, without an index"):
        command = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-build-isolation", "--no-deps"]
        finished([*command, "--wheel-dir", str(folder / "made"), str(archive)], outside())
    (wheel,) = (folder / "made").glob("*.whl")
    assert LIBRARY in zipfile.ZipFile(wheel).namelist()
    with timed("make build in the sdist, its .venv included"):
        finished(["make", "build"], outside(), tree)
    run = [".venv/bin/python", "tests/wheels/library_alone.py", f"src/{LIBRARY}"]
    print(finished(run, outside(), tree), end="")


def outside() -> dict[str, str]:
    """Without what the make that started us hands to a make below it; the build tools of .venv stay within reach."""
    environ = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return {**environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"}


PARTS: dict[str, Callable[[Path, int], None]] = {"library": library, "training": training, "sdist": sdist}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone; may be repeated")
    parser.add_argument("--steps", type=int, default=DEMO_STEPS, help=f"of the demo (default {DEMO_STEPS})")
    arguments = parser.parse_args()
    for name in arguments.only or PARTS:
        print(f"{name}:", flush=True)
        with tempfile.TemporaryDirectory(prefix="cputrain-wheels-") as folder:
            PARTS[name](Path(folder), arguments.steps)


if __name__ == "__main__":
    main()
