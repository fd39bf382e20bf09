"""`cputrain image`: a Dockerfile for trainings, and the image if something here can build one."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from cputrain import __version__
from cputrain.cli.app import command, new_app, setting, with_fields
from cputrain.cluster import image as cluster

app = new_app()
EXAMPLES = """
    cputrain image --script run_qa.py --file squad.py --file answers.py
    cputrain image --script train.py --cputrain "cputrain[hf]==0.1.0"
    cputrain image --tag registry.example.com/me/train:1 --mpi openmpi --build
"""


@dataclass(frozen=True)
class Options:
    """Options as they were given, most of them under the names that Image has for them."""

    tag: str = setting("What the image is called, with its registry.", "--tag", default="cputrain:latest")
    base: str = setting("A Debian image with Python.", "--base", metavar="IMAGE", default="python:3.12-slim")
    script: str | None = setting("A script to put into /workspace.", "--script", metavar="FILE")
    beside: list[str] | None = setting(
        "A file that the script needs beside it; may be repeated.", "--file", metavar="FILE"
    )
    requirements: str | None = setting(
        "What else pip shall install, as pip reads it.", "--requirements", metavar="FILE"
    )
    mpi: str | None = setting("An MPI, and ssh: for an MPIJob.", "--mpi", metavar="openmpi|mpich|intel")
    torch_index: str | None = setting(
        "Where pip finds torch for CPUs; else uv takes PyTorch's own CPU build.", "--torch-index", metavar="URL"
    )
    package: str | None = setting(
        "A wheel in the folder, or a requirement; else a wheel built from this checkout, or this release.",
        "--cputrain",
        metavar="PACKAGE",
    )
    user: int = setting("The number of the user that pods run as, not 0.", "--user", metavar="NUMBER", default=1000)
    folder: Path = setting("Where the files are written and the build runs.", "--folder", default=Path())
    build: bool = setting("Build with docker, podman or buildah.", "--build", default=False)


@command(app, EXAMPLES)
@with_fields
def image(options: Options) -> None:
    """Write a Dockerfile and .dockerignore for trainings, and say how to build and push the image."""
    same = {name: value for name, value in vars(options).items() if name in cluster.Image.__dataclass_fields__}
    package = options.package or f"cputrain[hf]=={__version__}"
    chosen = cluster.Image(**{**same, "cputrain": package, "beside": tuple(options.beside or ())})
    torch_index, folder = options.torch_index, options.folder
    if torch_index is not None and ("://" not in torch_index or not torch_index.isprintable() or " " in torch_index):
        raise ValueError(f"--torch-index must be a URL, found {torch_index!r}.")
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder.")
    builder = cluster.find_builder()
    if options.build and builder is None:
        raise ValueError(f"none of {', '.join(cluster.BUILDERS)} works here: build without --build where one does.")
    cluster.check_target(chosen, folder)
    if options.package is None:
        chosen = _from_checkout(chosen, folder)
    written = cluster.write(chosen, folder)
    making, pushing = cluster.build_and_push(chosen, folder, builder or "docker", torch_index)
    print(f"Written: {' and '.join(map(str, written))}.")
    print(f"  build: {shlex.join(making)}\n  push:  {shlex.join(pushing)}")
    if options.build:
        cluster.build(making)
        print(f"Built: {options.tag}")


def _from_checkout(chosen: cluster.Image, folder: Path) -> cluster.Image:
    """The image with a wheel of the tree that this cputrain runs from; as it is, if that is a release."""
    tree = cluster.source_tree()
    if tree is None:
        return chosen
    print(f"Building a wheel of {tree} …", flush=True)
    return replace(chosen, cputrain=f"{cluster.build_wheel(tree, folder)}[hf]")
