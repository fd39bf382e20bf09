"""A Dockerfile for trainings: a slim Python, CPU torch, cputrain, and the user's requirements and script."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cputrain import text_files
from cputrain.cluster import syntax

UV_CPU = "--torch-backend cpu"  # as in README's line for users: no index has to be named
# By these a folder is known as the source tree of cputrain.
_PARTS = ("pyproject.toml", "CMakeLists.txt", "csrc", "src/cputrain")
BUILDERS = ("docker", "podman", "buildah")
# MPIJob's launcher and workers talk through ssh; the other kinds need neither.
_SSH = ("openssh-client", "openssh-server")
_MPI_PACKAGES = {None: (), "openmpi": ("openmpi-bin", *_SSH), "mpich": ("mpich", *_SSH), "intel": _SSH}
_TORCH = (
    "# uv knows where PyTorch's CPU builds are. Others are for CUDA: they take gigabytes and compute nothing here.",
    'ARG TORCH_INDEX=""',
    'RUN if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir --index-url "$TORCH_INDEX" torch; \\',
    "    else pip install --no-cache-dir uv \\",
    f'     && uv pip install --python "$(command -v python)" --no-cache {UV_CPU} torch; fi',
)
_EXTRAS = r"(?:\[[A-Za-z0-9,._-]+\])?"
_REQUIREMENT = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]*{_EXTRAS}(?:[=<>!~]=?[A-Za-z0-9.*+!]+)?", re.ASCII)
_WHEEL = re.compile(rf"(?P<file>.*\.whl)(?P<extras>{_EXTRAS})", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class Image:
    """What goes into the image. Files lie in the build's folder and are named relative to it.

    `cputrain` is a requirement (cputrain[hf]==0.1.0) or a wheel, which may have extras too (cputrain-0.1.0.whl[hf]).
    """

    tag: str
    cputrain: str
    base: str = "python:3.12-slim"
    requirements: str | None = None
    script: str | None = None
    beside: tuple[str, ...] = ()  # what the script imports or reads
    mpi: str | None = None
    user: int = 1000

    def __post_init__(self) -> None:
        syntax.image(self.base, "the base image")
        syntax.image(self.tag, "the image's tag")
        if self.mpi not in _MPI_PACKAGES:
            raise ValueError(f"the MPI must be openmpi, mpich or intel, found {self.mpi!r}.")
        if not 1 <= self.user < 2**31:
            raise ValueError(f"the user's number must be 1 or more, found {self.user}.")
        for file in self.files:
            outside = file.startswith(("/", "-", "!")) or ".." in file.split("/")
            if not file or outside or not file.isprintable():
                raise ValueError(f"{file!r} must lie in the build's folder, and be named from there.")
        names_inside = [Path(file).name for file in self.workspace]
        if len(set(names_inside)) < len(names_inside):
            raise ValueError(f"two of {', '.join(self.workspace)} would have one name in /workspace: rename one.")
        if self.wheel is None and not _REQUIREMENT.fullmatch(self.cputrain):
            raise ValueError(f"cputrain must be a requirement or a .whl file, found {self.cputrain!r}.")

    @property
    def wheel(self) -> str | None:
        found = _WHEEL.fullmatch(self.cputrain)
        return found["file"] if found else None

    @property
    def workspace(self) -> list[str]:
        return [*([self.script] if self.script is not None else []), *self.beside]

    @property
    def files(self) -> list[str]:
        return [file for file in (self.wheel, self.requirements, *self.workspace) if file is not None]


def dockerfile(image: Image) -> str:
    packages = ("libgoogle-perftools4", *_MPI_PACKAGES[image.mpi])
    lines = [
        "# Made by `cputrain image`.",
        f"FROM {image.base}",
        "# The base may be an image of this kind, which runs as its own user.",
        "USER root",
        "",
        "# tcmalloc" + (", MPI and ssh, which an MPIJob needs" if image.mpi else ""),
        "RUN apt-get update \\",
        f" && apt-get install -y --no-install-recommends {' '.join(packages)} \\",
        *([" && mkdir -p /run/sshd \\"] if image.mpi else []),
        " && rm -rf /var/lib/apt/lists/*",
        "",
        *_TORCH,
        "",
        *_cputrain(image),
        "",
        *_users_files(image),
        "# After all that pip installed: requirements may have brought another torch.",
        "RUN python -c \"import sys, torch; sys.exit('this torch is built for CUDA: give --build-arg TORCH_INDEX=URL "
        "of CPU builds' if torch.version.cuda else 0)\"",
        "",
        "# A number, because Kubernetes can't tell whether a name is root; sshd wants it to have a name, too.",
        f"RUN getent passwd {image.user} || useradd --uid {image.user} --create-home --shell /bin/bash job",
        f"USER {image.user}",
        "",
    ]
    return "\n".join(lines)


def _cputrain(image: Image) -> list[str]:
    extra = ["impi-rt==2021.18.1"] if image.mpi == "intel" else []
    extra += ["mpi4py"] if image.mpi in ("openmpi", "mpich") else []
    if image.wheel is None:
        return [f"RUN pip install --no-cache-dir {json.dumps(image.cputrain)} {' '.join(extra)}".rstrip()]
    target = f"/tmp/{Path(image.wheel).name}"
    extras = image.cputrain.removeprefix(image.wheel)
    return [
        f"COPY {json.dumps([image.wheel, target])}",
        f"RUN {json.dumps(['pip', 'install', '--no-cache-dir', target + extras, *extra])}",
    ]


def _users_files(image: Image) -> list[str]:
    lines = ["WORKDIR /workspace"]
    if image.requirements:
        lines += [
            f"COPY {json.dumps([image.requirements, '/tmp/requirements.txt'])}",
            "RUN pip install --no-cache-dir -r /tmp/requirements.txt",
        ]
    lines += [f"COPY {json.dumps([file, '/workspace/' + Path(file).name])}" for file in image.workspace]
    return [*lines, ""]


def dockerignore(image: Image) -> str:
    """Everything stays out but what is named: keys and data beside a script are no part of an image."""
    return "\n".join(["*", *(f"!{file}" for file in image.files), ""])


def build_and_push(image: Image, folder: Path, builder: str, torch_index: str | None) -> tuple[list[str], list[str]]:
    build = [builder, "build", "--tag", image.tag]
    build += ["--build-arg", f"TORCH_INDEX={torch_index}"] if torch_index else []
    return [*build, str(folder)], [builder, "push", image.tag]


def find_builder() -> str | None:
    """The first that works here: docker's client is often installed where no engine answers it."""
    return next((name for name in BUILDERS if shutil.which(name) and _answers(name)), None)


def _answers(builder: str) -> bool:
    quiet = subprocess.DEVNULL
    try:
        answer = subprocess.run([builder, "info"], stdin=quiet, stdout=quiet, stderr=quiet, check=False, timeout=30)
    except subprocess.TimeoutExpired:
        return False
    return answer.returncode == 0


def check_target(image: Image, folder: Path) -> None:
    """Whether `write` would find all files, and overwrite no Dockerfile but our own."""
    missing = [file for file in image.files if not (folder / file).is_file()]
    if missing:
        raise ValueError(f"{folder / missing[0]} can't be read: there is no such file.")
    target = folder / "Dockerfile"
    if target.exists() and not text_files.read(target).startswith("# Made by `cputrain image`."):
        raise ValueError(f"{target} exists and isn't cputrain's: move it, or choose another --folder.")


def write(image: Image, folder: Path) -> list[Path]:
    check_target(image, folder)
    target = folder / "Dockerfile"
    text_files.write(folder / ".dockerignore", dockerignore(image))
    text_files.write(target, dockerfile(image))
    return [target, folder / ".dockerignore"]


def build(command: list[str]) -> None:
    if subprocess.run(command, check=False).returncode:
        raise ValueError(f"{command[0]} could not build the image: the reason is above.")


def source_tree() -> Path | None:
    """The tree of `pip install -e .` or `make install`; None if a wheel is installed."""
    tree = Path(__file__).resolve().parents[3]
    return tree if all((tree / part).exists() for part in _PARTS) else None


def build_wheel(tree: Path, folder: Path) -> str:
    """Compiles `tree` into a wheel in `folder`, and gives the wheel's name."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    if importlib.util.find_spec("scikit_build_core"):  # `make install` has it; else pip fetches it for the build
        command.append("--no-build-isolation")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".cputrain-wheel-") as made:
        done = subprocess.run([*command, "--wheel-dir", made, str(tree)], capture_output=True, text=True, check=False)
        wheels = list(Path(made).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise ValueError(
                f"pip could not build a wheel from {tree} ({''.join(last) or 'it said nothing'}): "
                "build one there by `make wheel`, or name a release by --cputrain."
            )
        wheels[0].replace(folder / wheels[0].name)
    return wheels[0].name
