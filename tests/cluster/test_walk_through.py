"""The commands of docs/kubernetes.md, "From script to model", as written there, as far as no cluster is needed.

test_kubectl.py goes on from here, with an API server; test_image_build.py builds such an image.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cputrain.cluster import image
from tests.cluster.command_line import cputrain

TREE = Path(__file__).parents[2]
PAGE = (TREE / "docs" / "kubernetes.md").read_text()
WALK = re.search(r"^## From script to model\n+```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[1]
LINES = [shlex.split(line, comments=True) for line in WALK.replace("\\\n", " ").splitlines()]


def the_line(*beginning: str) -> list[str]:
    (found,) = [words for words in LINES if words[: len(beginning)] == list(beginning)]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example, in which the page's commands have run. The wheel has no kernels: that takes seconds."""
    _, example = the_line("cd")
    folder = tmp_path_factory.mktemp("walk") / "example"
    shutil.copytree(TREE / example, folder, ignore=shutil.ignore_patterns("__pycache__"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPUTRAIN_WITHOUT_KERNELS", "1")
        for line in (the_line("cputrain", "image"), the_line("cputrain", "k8s", "render")):
            done = cputrain(*line[1:], folder=folder)
            assert done.returncode == 0, done.stderr
    return folder


def copied(dockerfile: str, target: str) -> list[str]:
    """What the Dockerfile copies to a folder of the image."""
    pairs = re.findall(r'^COPY \["(.*?)", "(.*?)"\]$', dockerfile, re.MULTILINE)
    return [source for source, place in pairs if place.startswith(target)]


def test_the_image_has_a_wheel_of_this_checkout(folder: Path) -> None:
    dockerfile = (folder / "Dockerfile").read_text()
    (wheel,) = copied(dockerfile, "/tmp/")
    assert (folder / wheel).is_file() and wheel.startswith("cputrain-")
    assert f'"/tmp/{wheel}[hf]"' in dockerfile
    assert (folder / ".dockerignore").read_text().splitlines() == [
        "*",
        f"!{wheel}",
        "!run_qa.py",
        "!squad.py",
        "!answers.py",
    ]


def test_torch_comes_by_the_flag_that_the_readme_names(folder: Path) -> None:
    assert f"uv pip install {image.UV_CPU} " in (TREE / "README.md").read_text()
    assert f"{image.UV_CPU} torch" in (folder / "Dockerfile").read_text()


def test_the_script_starts_with_nothing_but_what_is_copied(folder: Path, tmp_path: Path) -> None:
    for file in copied((folder / "Dockerfile").read_text(), "/workspace/"):
        shutil.copy(folder / file, tmp_path)
    render = the_line("cputrain", "k8s", "render")
    script, *arguments = render[render.index("--") + 1 :]
    known = subprocess.run([sys.executable, script, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    for option in filter(lambda word: word.startswith("--"), arguments):
        assert f"{option} " in known.stdout


def test_the_job_is_faultless_and_names_the_image(folder: Path) -> None:
    files = [word for word in the_line("cputrain", "k8s", "submit") if word.endswith(".yaml")]
    done = cputrain("k8s", "check", *files, "--fail-on", "warning", folder=folder)
    assert done.returncode == 0, done.stdout
    built = the_line("cputrain", "image")
    assert f"image: {built[built.index('--tag') + 1]}" in (folder / files[0]).read_text()
    for command in ("status", "logs", "copy", "delete"):
        name = the_line("cputrain", "k8s", command)[3]
        assert f"name: {name}\n" in (folder / files[0]).read_text()


def test_what_can_not_be_built_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "tree"
    broken.mkdir()
    (broken / "pyproject.toml").write_text("[build-system]\nrequires = []\nbuild-backend = 'absent'\n")
    monkeypatch.setattr(image, "source_tree", lambda: broken)
    done = cputrain("image", folder=tmp_path)
    assert done.returncode == 2
    assert re.search(r"^cputrain: pip could not build a wheel from [^\n]*--cputrain\.$", done.stderr)
    assert {path.name for path in tmp_path.iterdir()} == {"tree"}
