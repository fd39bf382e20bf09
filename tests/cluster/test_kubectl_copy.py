"""`k8s copy` through the real kubectl, against an API server of our own."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from cluster.kubectl_shell import Here, add_job

pytestmark = pytest.mark.needs_program("kubectl", "kubernetes-client")


def volume_of(here: Here) -> Path:
    volume = here.folder / "volume"
    (volume / "output" / "deep").mkdir(parents=True)
    (volume / "output" / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    (volume / "output" / "deep" / "config.json").write_text("{}")
    here.cluster.mounts = {"/data": volume}
    return volume


def test_copy_brings_the_model_and_leaves_no_pod(here: Here) -> None:
    add_job(here.cluster)
    volume = volume_of(here)
    readers = []
    here.cluster.fault = lambda method, path: readers.extend(here.cluster.kinds("pods"))  # type: ignore[func-returns-value]
    answer = here.cputrain("copy", "qa", "/data/output", "model")
    assert answer.returncode == 0, answer.stderr
    assert "2 files are in model" in answer.stdout
    for file in ("model.safetensors", "deep/config.json"):
        assert (here.folder / "model" / file).read_bytes() == (volume / "output" / file).read_bytes()
    assert here.cluster.kinds("pods") == []
    spec = readers[0]["spec"]
    [mount] = spec["containers"][0]["volumeMounts"]
    assert mount["readOnly"]
    # It may read what the job's user wrote, and runs where the job may.
    assert spec["securityContext"]["runAsUser"] == 1234
    assert spec["tolerations"][0]["key"] == "dedicated"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]


COMPLAINS = """
import subprocess, sys
for _ in range(20_000):
    print("tar: ./a/long/name/of/a/file: file changed as we read it", file=sys.stderr)
packed = subprocess.run(["tar", "-C", sys.argv[1], "-cf", "-", "."], capture_output=True, check=True).stdout
sys.stdout.buffer.write(packed)
sys.stdout.flush()
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [0, 1])
def test_many_warnings_of_tar_do_not_stop_the_copy(here: Here, code: int) -> None:
    """A megabyte before the archive: a pipe holds 64 KB."""
    add_job(here.cluster)
    volume = volume_of(here)
    here.cluster.replies["tar"] = [sys.executable, "-c", COMPLAINS, str(volume / "output"), str(code)]
    if code:
        said = here.refused("copy", "qa", "/data/output", "model")
        assert "file changed as we read it" in said and len(said) < 2000
        assert not (here.folder / "model").exists()
    else:
        answer = here.cputrain("copy", "qa", "/data/output", "model")
        assert answer.returncode == 0, answer.stderr
        assert (here.folder / "model" / "deep" / "config.json").read_text() == "{}"


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk needs root")
def test_a_full_disk_here_is_a_sentence(here: Here) -> None:
    add_job(here.cluster)
    volume_of(here)
    command = 'mkdir small && mount -t tmpfs -o size=64k tmpfs small && exec "$@"'
    words = [sys.executable, "-m", "cputrain", "k8s", "copy", "qa", "/data/output", "small/model"]
    answer = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, "sh", *words],
        env=here.environ, cwd=here.folder, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (answer.returncode, answer.stderr.count("\n")) == (2, 1), answer.stderr
    assert "can't be written here: No space left on device" in answer.stderr
    assert here.cluster.kinds("pods") == []


def test_copy_of_what_isnt_there(here: Here) -> None:
    add_job(here.cluster)
    volume_of(here)
    assert "No such file" in here.refused("copy", "qa", "/data/none", "model")
    assert "is on no volume of qa" in here.refused("copy", "qa", "/elsewhere", "model")
    assert "must lie in the volume" in here.refused("copy", "qa", "/data/../etc", "model")
    (here.folder / "there").mkdir()
    assert "exists already" in here.refused("copy", "qa", "/data/output", "there")
    assert not (here.folder / "model").exists()
    assert not list(here.folder.glob(".model.*"))
    assert here.cluster.kinds("pods") == []


def test_an_archive_that_would_write_elsewhere_is_refused(here: Here) -> None:
    add_job(here.cluster)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("../escaped")
        tar.addfile(member, io.BytesIO())
    programs = here.folder / "server"
    programs.mkdir()
    (programs / "evil.tar").write_bytes(archive.getvalue())
    here.cluster.replies["tar"] = ["cat", str(programs / "evil.tar")]
    assert "can't be unpacked safely" in here.refused("copy", "qa", "/data/output", "model")
    assert not (here.folder / "escaped").exists()
    assert here.cluster.kinds("pods") == []


@pytest.mark.parametrize("within", [True, False])
def test_a_connection_that_drops_while_copying_leaves_nothing(here: Here, within: bool) -> None:
    """Also between two files, where what came looks like a whole archive, and kubectl itself may say nothing."""
    add_job(here.cluster)
    source = volume_of(here) / "output"
    packed = subprocess.run(["tar", "-C", source, "-cf", "-", "."], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        last = archive.getmembers()[-1]
    here.cluster.cut = last.offset + (700 if within else 0)
    here.refused("copy", "qa", "/data/output", "model")
    assert here.cluster.kinds("pods") == []
    assert not list(here.folder.glob("*model*")) + list(here.folder.glob(".model*"))


def test_ctrl_c_removes_the_reader(here: Here) -> None:
    add_job(here.cluster)
    here.cluster.replies["tar"] = ["sleep", "120"]  # longer than the test waits
    command = [sys.executable, "-m", "cputrain", "k8s", "copy", "qa", "/data/output", "model"]
    # A group of its own, so that kubectl gets the signal as a terminal's Ctrl-C would send it.
    process = subprocess.Popen(
        command, env=here.environ, cwd=here.folder, start_new_session=True, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not any(path.endswith("/exec") for _, path in list(here.cluster.requests)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert here.cluster.kinds("pods")
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert here.cluster.kinds("pods") == []
    assert not list(here.folder.glob("*model*"))
