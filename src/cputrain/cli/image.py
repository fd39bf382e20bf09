"""`cputrain image`: a Dockerfile for trainings, and the image if something here can build one."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cputrain import __version__
from cputrain.cli.app import command, new_app, option
from cputrain.cluster import image as cluster

app = new_app()
EXAMPLES = """
    cputrain image --script run_qa.py --file squad.py --file answers.py
    cputrain image --script train.py --cputrain "cputrain[hf]==0.1.0"
    cputrain image --tag registry.example.com/me/train:1 --mpi openmpi --build
"""


@command(app, EXAMPLES)
def image(
    tag: Annotated[str, option("What the image is called, with its registry.", "--tag")] = "cputrain:latest",
    base: Annotated[str, option("A Debian image with Python.", "--base", metavar="IMAGE")] = "python:3.12-slim",
    script: Annotated[str | None, option("A script to put into /workspace.", "--script", metavar="FILE")] = None,
    beside: Annotated[
        list[str], option("A file that the script needs beside it; may be repeated.", "--file", metavar="FILE")
    ] = [],  # noqa: B006 typer's way to say: none
    requirements: Annotated[
        str | None, option("What else pip shall install, as pip reads it.", "--requirements", metavar="FILE")
    ] = None,
    mpi: Annotated[
        str | None, option("An MPI, and ssh: for an MPIJob.", "--mpi", metavar="openmpi|mpich|intel")
    ] = None,
    torch_index: Annotated[
        str | None,
        option(
            "Where pip finds torch for CPUs; else uv takes PyTorch's own CPU build.", "--torch-index", metavar="URL"
        ),
    ] = None,
    package: Annotated[
        str | None,
        option(
            "A wheel in the folder, or a requirement; else a wheel built from this checkout, or this release.",
            "--cputrain",
            metavar="PACKAGE",
        ),
    ] = None,
    user: Annotated[int, option("The number of the user that pods run as, not 0.", "--user", metavar="NUMBER")] = 1000,
    folder: Annotated[Path, option("Where the files are written and the build runs.", "--folder")] = Path(),
    build: Annotated[bool, option("Build with docker, podman or buildah.", "--build")] = False,
) -> None:
    """Write a Dockerfile and .dockerignore for trainings, and say how to build and push the image."""
    chosen = cluster.Image(
        tag=tag,
        cputrain=package or f"cputrain[hf]=={__version__}",
        base=base,
        requirements=requirements,
        script=script,
        beside=tuple(beside),
        mpi=mpi,
        user=user,
    )
    if torch_index is not None and ("://" not in torch_index or not torch_index.isprintable() or " " in torch_index):
        raise ValueError(f"--torch-index must be a URL, found {torch_index!r}.")
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder.")
    builder = cluster.find_builder()
    if build and builder is None:
        raise ValueError(f"none of {', '.join(cluster.BUILDERS)} works here: build without --build where one does.")
    cluster.check_target(chosen, folder)
    if package is None:
        chosen = _from_checkout(chosen, folder)
    written = cluster.write(chosen, folder)
    making, pushing = cluster.commands(chosen, folder, builder or "docker", torch_index)
    print(f"Written: {' and '.join(map(str, written))}.")
    print(f"  build: {shlex.join(making)}\n  push:  {shlex.join(pushing)}")
    if build:
        cluster.build(making)
        print(f"Built: {tag}")


def _from_checkout(chosen: cluster.Image, folder: Path) -> cluster.Image:
    """The image with a wheel of the tree that this cputrain runs from; as it is, if that is a release."""
    tree = cluster.source_tree()
    if tree is None:
        return chosen
    print(f"Building a wheel of {tree} …", flush=True)
    return replace(chosen, cputrain=f"{cluster.build_wheel(tree, folder)}[hf]")
