"""The image for real: built by `cputrain image --build` with Debian's buildah on a debootstrap base, and used.

Minutes on a calm machine and an hour on a busy one, most of it for unpacking torch, so it runs only when asked for:
`apt-get install buildah debootstrap; CPUTRAIN_BUILD_IMAGE=1 python -m pytest tests/cluster/test_image_build.py`
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif("CPUTRAIN_BUILD_IMAGE" not in os.environ, reason="takes minutes: set CPUTRAIN_BUILD_IMAGE=1"),
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="wheels are for this Python, the base has 3.11"),
    pytest.mark.skipif(os.geteuid() != 0, reason="debootstrap needs root"),
    pytest.mark.timeout(7200),
]
BASE = "localhost/debian-python:3.11"
TASK = """
def loss_of(model, inputs):
    return (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
"""
TRAIN = """
import os, torch, cputrain
from task import loss_of
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 1))
model, optimizer = cputrain.optimize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
inputs, losses = torch.randn(64, 16), []
for _ in range(100):
    loss = loss_of(model, inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print("TRAINED", os.getuid(), losses[-1] < losses[0] / 100)
"""


def run(*words: str | Path, environ: dict[str, str], may_fail: bool = False) -> subprocess.CompletedProcess[str]:
    answer = subprocess.run(list(map(str, words)), env=environ, capture_output=True, text=True, check=False)
    assert may_fail or not answer.returncode, f"{words}\n{answer.stdout[-3000:]}\n{answer.stderr[-3000:]}"
    return answer


def write_index(wheels: Path) -> None:
    """What pip takes for a package index: a page of links for every package."""
    for wheel in wheels.glob("*.whl"):
        name = re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()
        page = wheels / "simple" / name / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        with page.open("a") as file:
            file.write(f'<a href="../../{wheel.name}">{wheel.name}</a>\n')


def write_torch_for_cuda(wheel: Path) -> None:
    wheel.parent.mkdir()
    about = "torch-99.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch/__init__.py", "from . import version\n")
        archive.writestr("torch/version.py", "cuda = '13.0'\n")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 99.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """buildah without an engine or special kernel: chroot isolation, plain folders; pip with this machine's wheels."""
    folder = tmp_path_factory.mktemp("image")
    wheels = folder / "wheels"
    wheels.mkdir()
    storage = f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
    (folder / "storage.conf").write_text(storage)
    (folder / "containers.conf").write_text(f'[containers]\nvolumes = ["{wheels}:/wheels:ro"]\n')
    made = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
        "BUILDAH_ISOLATION": "chroot",
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "FOLDER": str(folder),
    }
    yield made
    run("buildah", "rm", "--all", environ=made)
    run("buildah", "rmi", "--all", "--force", environ=made)


@pytest.fixture(scope="module")
def base(environ: dict[str, str]) -> str:
    """Debian with a `python` and `pip` on the PATH, as the official images of Python have."""
    root = Path(environ["FOLDER"]) / "root"
    packages = "--include=python3,python3-venv,ca-certificates"
    run("debootstrap", "--variant=minbase", packages, "bookworm", root, environ=environ)
    container = run("buildah", "from", "scratch", environ=environ).stdout.strip()
    run("buildah", "add", container, root, "/", environ=environ)
    run("buildah", "run", container, "--", "python3", "-m", "venv", "/opt/python", environ=environ)
    path = "PATH=/opt/python/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    index = "PIP_INDEX_URL=file:///wheels/simple"
    run("buildah", "config", "--env", path, "--env", index, container, environ=environ)
    run("buildah", "commit", "--rm", container, BASE, environ=environ)
    return BASE


def test_it_is_built_trains_and_refuses_a_torch_for_cuda(environ: dict[str, str], base: str) -> None:
    folder = Path(environ["FOLDER"])
    wheels, context = folder / "wheels", folder / "context"
    context.mkdir()
    (context / "train.py").write_text(TRAIN)
    (context / "task.py").write_text(TASK)
    (context / "secret.txt").write_text("stays out")
    (context / "needs.txt").write_text("safetensors\n")
    image = [
        sys.executable,
        "-m",
        "cputrain",
        "image",
        "--folder",
        context,
        "--script",
        "train.py",
        "--file",
        "task.py",
    ]
    image += ["--requirements", "needs.txt", "--torch-index", "file:///wheels/simple"]
    run(*image, environ=dict(os.environ))  # compiles a wheel of this checkout
    (wheel,) = context.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir"]
    run(*pip, wheels, f"{wheel}[hf]", f"torch=={torch.__version__}", environ=dict(os.environ))
    write_index(wheels)
    write_torch_for_cuda(wheels / "cuda" / "torch-99.0-py3-none-any.whl")
    image += ["--build", "--cputrain", f"{wheel.name}[hf]"]  # the same, without compiling again
    run(*image, "--base", base, "--tag", "localhost/qa:1", environ=environ)

    container = run("buildah", "from", "--pull-never", "localhost/qa:1", environ=environ).stdout.strip()
    inside = ["buildah", "run", container, "--"]
    assert "torch 2." in run(*inside, "cputrain", "doctor", environ=environ).stdout
    trained = run(*inside, "cputrain", "launch", "--num_processes", "2", "train.py", environ=environ)
    assert trained.stdout.count("TRAINED 1000 True") == 2, trained.stdout
    assert "another allocator" not in trained.stderr  # Debian's python3 is served by glibc
    assert run(*inside, "ls", "/workspace", environ=environ).stdout.split() == ["task.py", "train.py"]
    assert (
        "5." in run(*inside, "python", "-c", "import transformers as t; print(t.__version__)", environ=environ).stdout
    )
    preloaded = ["env", "LD_PRELOAD=libtcmalloc.so.4", "grep", "-c", "libtcmalloc", "/proc/self/maps"]
    assert int(run(*inside, *preloaded, environ=environ).stdout) > 0

    # The user's requirements bring another torch.
    (context / "needs.txt").write_text("/wheels/cuda/torch-99.0-py3-none-any.whl\n")
    refused = run(*image, "--base", "localhost/qa:1", "--tag", "localhost/qa:2", environ=environ, may_fail=True)
    assert refused.returncode == 2
    assert "this torch is built for CUDA" in refused.stderr
    assert refused.stderr.endswith("could not build the image: the reason is above.\n")
