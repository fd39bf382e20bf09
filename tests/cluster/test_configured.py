"""A file of `cputrain config` as the input of `k8s render`: what it says about a cluster arrives, and options win."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster.command_line import cputrain
from ruamel.yaml import YAML

FILE = """
distributed_type: MULTI_CPU
main_process_ip: 10.0.0.1
mixed_precision: bf16
num_machines: 4
num_processes: 8
cores_for_communication: 2
max_restarts: 5
allocator: tcmalloc
grad_compression: bf16
balance: 'off'
env: [GREETING=a=b, LOGLEVEL=DEBUG]
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "config.yaml").write_text(FILE)
    return str(tmp_path / "config.yaml")


def rendered(*words: str) -> dict[str, Any]:
    answer = cputrain("k8s", "render", "--image", "x:1", "--cpus", "16", *words, "--", "run.py", "--lr", "1")
    assert answer.returncode == 0, answer.stderr
    return list(YAML(typ="safe").load_all(answer.stdout))[-1]["spec"]


def container(spec: dict[str, Any]) -> dict[str, Any]:
    return spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]


def variables(spec: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["value"] for row in container(spec)["env"] if "value" in row}


def test_what_the_file_says_arrives(file: str) -> None:
    spec = rendered("--config-file", file)
    assert (spec["pytorchReplicaSpecs"]["Worker"]["replicas"], spec["nprocPerNode"]) == (4, "2")
    assert spec["elasticPolicy"]["maxRestarts"] == 5
    assert variables(spec).items() >= {"CCL_WORKER_COUNT": "2", "OMP_NUM_THREADS": "6", "LOGLEVEL": "DEBUG"}.items()
    assert variables(spec)["GREETING"] == "a=b"
    words = container(spec)["args"]
    assert words[-3:] == ["run.py", "--lr", "1"]
    assert words[:-3] == [
        "--mixed_precision", "bf16", "--allocator", "tcmalloc", "--grad_compression", "bf16", "--balance", "off"
    ]  # fmt: skip


def test_options_win(file: str) -> None:
    options = ["--workers", "2", "--processes", "1", "--max-restarts", "0", "--cores-for-communication", "1"]
    spec = rendered("--config-file", file, *options, "--env", "GREETING=c")
    assert (spec["pytorchReplicaSpecs"]["Worker"]["replicas"], spec["nprocPerNode"]) == (2, "1")
    assert spec["elasticPolicy"]["maxRestarts"] == 0
    assert variables(spec).items() >= {"CCL_WORKER_COUNT": "1", "OMP_NUM_THREADS": "15", "GREETING": "c"}.items()


def test_launch_understands_the_words(file: str) -> None:
    words = container(rendered("--config-file", file))["args"][:-3]
    words[words.index("tcmalloc")] = "default"  # this machine may not have it
    answer = cputrain("launch", "--dry-run", *words, "--num_processes", "1", "run.py", environ={"HOME": "/nowhere"})
    assert answer.returncode == 0, answer.stderr


def test_a_hostfile_is_not_a_clusters(file: str) -> None:
    Path(file).write_text("distributed_type: MULTI_CPU\nhostfile: hosts\nppn: 2\n")
    answer = cputrain("k8s", "render", "--image", "x:1", "--config-file", file, "--", "run.py")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "a cluster has none: give --workers" in answer.stderr
    assert rendered("--config-file", file, "--workers", "3")["nprocPerNode"] == "2"
