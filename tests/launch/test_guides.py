"""The guides' mpirun commands with `python3` → `cputrain run` as their edit, on machines made of namespaces.

A tiny model in place of BERT, as many threads as there are cores, and fewer ranks; losses are the one-process run's.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cputrain.launch import config_file
from cputrain.launch.config import Config
from tests.hosts import Cluster, needs_hosts
from tests.integrations.tiny import NAMES, PLACES, save_checkpoint, save_squad
from tests.launch.test_several import INTEL

ROOT = Path(__file__).parents[2]
pytestmark = [*needs_hosts, pytest.mark.needs_program(INTEL, "impi-rt, which pip installs")]
BACKEND = "ccl" if importlib.util.find_spec("cputrain.distributed") else "gloo"
FP32 = {"CPUTRAIN_DTYPE": "fp32"}  # else it is what this CPU is fastest at, which may round more
CPUTRAIN = [sys.executable, "-m", "cputrain"]
RUN_QA = [*CPUTRAIN, "run", str(ROOT / "examples" / "question_answering" / "run_qa.py")]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("guides")
    save_checkpoint(place / "model")
    save_squad(place / "train.json", 24)
    save_squad(place / "dev.json", 5)
    chance = random.Random(0)
    with open(place / "pairs.json", "w") as file:
        for _ in range(48):
            who, other = chance.choice(NAMES), chance.choice(NAMES)
            town = chance.choice(PLACES)
            pair = {"sentence1": f"{who} lives in {town} .", "sentence2": f"in {town} lives {other} ."}
            file.write(json.dumps({**pair, "label": int(who == other)}) + "\n")
    (place / "hostfile").write_text("box1\nbox2\n")
    return place


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Cluster]:
    with Cluster(2, place / "cluster", [place]) as cluster:
        yield cluster


def ran(cluster: Cluster, place: Path, *words: str, **environment: str) -> tuple[str, str]:
    environ = {"I_MPI_ROOT": sys.prefix, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(place / "cache")}
    answer = cluster.hosts[0].run(*words, folder=place, environ={**environ, **environment}, seconds=280)
    assert answer.returncode == 0, answer.stderr[-4000:]
    return answer.stdout, answer.stderr


def questions(place: Path, name: str, batch: int, *flags: str) -> list[str]:
    """run_qa.py's arguments: three steps of a global batch of 8, then the evaluation."""
    return [
        *("--model_name_or_path", str(place / "model"), "--train_file", str(place / "train.json")),
        *("--validation_file", str(place / "dev.json"), "--output_dir", str(place / name), "--do_train", "--do_eval"),
        *("--per_device_train_batch_size", str(batch), "--learning_rate", "1e-3", "--max_steps", "3"),
        *("--max_seq_length", "64", "--doc_stride", "16", "--logging_steps", "1", "--disable_tqdm", "True"),
        *("--report_to", "none", "--save_strategy", "no", *flags),
    ]


def losses(place: Path, name: str) -> list[float]:
    history = json.loads((place / name / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.fixture(scope="module")
def alone(cluster: Cluster, place: Path) -> list[float]:
    """What one process with the whole batch loses."""
    ran(cluster, place, *RUN_QA, *questions(place, "alone", 8, "--use_cpu"), **FP32)
    return losses(place, "alone")


@pytest.mark.timeout(300)
def test_one_machine(cluster: Cluster, place: Path, alone: list[float]) -> None:
    flags = ["--no_cuda", "--ddp_backend", BACKEND, "--use_ipex"]
    start = [INTEL, "-n", "2", "-genv", "OMP_NUM_THREADS=1", *RUN_QA]
    _, said = ran(cluster, place, *start, *questions(place, "one", 4, *flags), **FP32)
    assert "rank 0 of 2: PMI_RANK=0" in said and "is optimised" in said
    assert "ccl, group 0 of 2: shm (" in said
    assert losses(place, "one") == pytest.approx(alone, rel=1e-5)


@pytest.mark.timeout(300)
def test_several_machines(cluster: Cluster, place: Path, alone: list[float]) -> None:
    flags = ["--no_cuda", "--ddp_backend", BACKEND, "--use_ipex", "--bf16"]
    start = [INTEL, "-f", "hostfile", "-n", "4", "-ppn", "2", "-genv", "OMP_NUM_THREADS=1", *RUN_QA]
    _, said = ran(cluster, place, *start, *questions(place, "four", 2, *flags))
    assert "rank 0 of 4: PMI_RANK=0" in said and "rank 0 was asked through MPI" in said
    assert "ccl, group 0 of 4: shm+gloo (2 machines)" in said
    assert losses(place, "four") == pytest.approx(alone, rel=2e-2), "bf16 was asked for"


@pytest.mark.timeout(300)
def test_accelerates_configuration(cluster: Cluster, place: Path) -> None:
    """Each of the started processes is a rank; the configuration's address and size are theirs."""
    config = Config(
        distributed_type="MULTI_CPU",
        main_process_ip="10.77.0.1",
        main_process_port=29500,
        num_machines=2,
        num_processes=4,
    )
    config_file.write(config, place / "two.yaml")
    start = [INTEL, "-f", "hostfile", "-n", "4", "-ppn", "2", *CPUTRAIN, "launch", "--config_file", "two.yaml"]
    files = ["--train_file", str(place / "pairs.json"), "--validation_file", str(place / "pairs.json")]
    small = ["--model_name_or_path", str(place / "model"), "--num_epochs", "1", "--batch_size", "4"]
    out, said = ran(cluster, place, *start, str(ROOT / "examples" / "nlp_example.py"), *files, *small)
    printed = re.findall(r"epoch 0: loss \S+, (accuracy \S+, F1 \S+)", out)
    assert len(printed) == 2 and len(set(printed)) == 1, "each machine's first process prints scores of all"
    assert "they meet at 10.77.0.1, port 29500: MASTER_ADDR" in said
    assert "ccl, group 0 of 4: shm+gloo (2 machines)" in said
