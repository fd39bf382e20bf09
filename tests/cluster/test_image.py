"""`cputrain image`: what the Dockerfile holds, what stays out, and that nobody's own is overwritten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cputrain.cluster import image
from cputrain.cluster.image import Image


def test_mpi_and_ssh_only_for_an_mpijob() -> None:
    assert "ssh" not in image.dockerfile(Image("x:1", "cputrain==0.1.0")).replace("sshd wants", "")
    for mpi, package in (("openmpi", "openmpi-bin"), ("mpich", "mpich"), ("intel", "impi-rt")):
        text = image.dockerfile(Image("x:1", "cputrain==0.1.0", mpi=mpi))
        assert package in text
        assert "openssh-server" in text


def test_a_torch_for_cuda_ends_the_build_and_the_user_is_a_number() -> None:
    text = image.dockerfile(Image("x:1", "cputrain==0.1.0", user=1234))
    assert "torch.version.cuda" in text
    assert 'ARG TORCH_INDEX=""' in text
    assert text.splitlines()[-1] == "USER 1234"


def test_only_named_files_reach_the_build(tmp_path: Path) -> None:
    made = Image("x:1", "dist/cputrain.whl[hf]", requirements="needs.txt", script="my script.py", beside=("a/b.py",))
    admitted = ["!dist/cputrain.whl", "!needs.txt", "!my script.py", "!a/b.py"]
    assert image.dockerignore(made).splitlines() == ["*", *admitted]
    assert '"/tmp/cputrain.whl[hf]"' in image.dockerfile(made)
    assert 'COPY ["a/b.py", "/workspace/b.py"]' in image.dockerfile(made)
    assert 'COPY ["my script.py", "/workspace/my script.py"]' in image.dockerfile(made)
    with pytest.raises(ValueError, match="no such file"):
        image.write(made, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_dockerfile_of_somebody_elses_stays(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    with pytest.raises(ValueError, match="isn't cputrain's"):
        image.write(Image("x:1", "cputrain"), tmp_path)
    assert (tmp_path / "Dockerfile").read_text() == "FROM scratch\n"


def test_the_command_says_how_to_build_and_push(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cputrain", "image", "--folder", str(tmp_path), "--tag", "r.example/qa:1"]
    command += ["--cputrain", "cputrain[hf]==0.1.0"]
    for _ in range(2):  # its own files are written anew
        answer = subprocess.run(
            [*command, "--torch-index", "https://i.example/cpu"], capture_output=True, text=True, check=True
        )
        assert f"build --tag r.example/qa:1 --build-arg TORCH_INDEX=https://i.example/cpu {tmp_path}" in answer.stdout
        assert "push r.example/qa:1" in answer.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"Dockerfile", ".dockerignore"}


@pytest.mark.parametrize(
    "wrong",
    [{"tag": "A B"}, {"base": "x\nRUN id"}, {"script": "../x"}, {"script": "/x"}, {"requirements": "a\nb"},
     {"mpi": "lam"}, {"user": 0}, {"cputrain": "x; id"}, {"script": "!x"}, {"cputrain": "/a.whl"},
     {"cputrain": "a.whl[x y]"}, {"beside": ("../a",)}, {"script": "a.py", "beside": ("b/a.py",)}],
)  # fmt: skip
def test_bad_input_is_a_sentence(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+\.$"):
        Image(**{"tag": "x:1", "cputrain": "cputrain", **wrong})
