"""`k8s check`: where a rule ends. What stands just beyond it is in order, and no rule may say otherwise."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from cputrain.cluster import check, render
from cputrain.cluster.job import Job, Volume
from cputrain.cluster.manifest import plain, to_text

Documents = list[dict[str, Any]]


def rendered(**options: Any) -> Documents:
    job = Job("qa", "x:1", "run.py", **{"workers": 2, "volume": Volume("data"), **options})
    return [plain(document) for document in render.of_job(job)]


PYTORCH, TRAIN, MPI = (rendered(kind=kind) for kind in ("pytorchjob", "trainjob", "mpijob"))


def main(documents: Documents) -> dict[str, Any]:
    return documents[0]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]


def said(documents: Documents) -> list[str]:
    return [f"{finding.severity}: {finding.sentence}" for finding in check.findings(to_text(documents))]


def with_words(*words: str, **others: Any) -> Documents:
    documents = copy.deepcopy(PYTORCH)
    main(documents).update(command=[words[0]], args=list(words[1:]), **others)
    return documents


@pytest.mark.parametrize(
    ("words", "working", "severity"),
    [
        (("--output_dir", "/data"), None, None),
        (("--output_dir=/data/a/../b",), None, None),
        (("--output_dir", "/data/../b"), None, "warning"),
        (("--output_dir", "/database"), None, "warning"),
        (("--output-dir", "/out"), None, "warning"),
        (("--output_dir", "out"), None, "hint"),
        (("--output_dir", "out"), "/data/work", None),
        (("--output_dir", "out"), "/work", "warning"),
        (("--output_dir", "$OUT"), None, None),
        (("--output_dir", "s3://bucket/out"), None, None),
        (("--output_dir", "/out", "--push_to_hub"), None, None),
    ],
)
def test_output_and_the_volume(words: tuple[str, ...], working: str | None, severity: str | None) -> None:
    documents = with_words("torchrun", "run.py", *words, **({"workingDir": working} if working else {}))
    assert [each.partition(":")[0] for each in said(documents)] == ([severity] if severity else [])


def test_output_of_a_launcher_is_written_by_workers() -> None:
    documents = copy.deepcopy(MPI)
    replicas = documents[0]["spec"]["mpiReplicaSpecs"]
    [launcher] = replicas["Launcher"]["template"]["spec"]["containers"]
    launcher["args"] = [*launcher["args"], "--output_dir", "/data/out"]
    assert said(documents) == []
    mounts = replicas["Worker"]["template"]["spec"]["containers"][0]["volumeMounts"]
    next(mount for mount in mounts if mount["mountPath"] == "/data")["mountPath"] = "/elsewhere"
    assert "on no volume" in str(said(documents))


@pytest.mark.parametrize(
    ("sizes", "words", "found"),
    [
        ((2, 2), ("launch", "-n", "2", "run.py"), False),
        ((2, 2), ("launch", "-n", "4", "--ppn", "2", "run.py"), False),
        ((1, 4), ("launch", "-n", "3", "run.py"), False),
        ((1, 4), ("launch", "-n", "5", "run.py"), True),
        ((2, 2), ("launch", "run.py", "-n", "9"), False),  # the script's own
        ((2, 2), ("launch", "-m", "package.train", "-n", "9"), False),
        ((2, 2), ("launch", "-n", "$(N)", "run.py"), False),
    ],
)
def test_launch_and_the_number_of_pods(sizes: tuple[int, int], words: tuple[str, ...], found: bool) -> None:
    documents = with_words("cputrain", *words)
    documents[0]["spec"]["elasticPolicy"].update(minReplicas=sizes[0], maxReplicas=sizes[1])
    assert ["in all" in each for each in said(documents)] == ([True] if found else [])


@pytest.mark.parametrize(
    ("words", "count", "found"),
    [
        (("torchrun", "run.py"), None, True),
        (("torchrun", "--nproc_per_node=1", "run.py"), None, False),
        (("python", "-m", "torch.distributed.run", "run.py"), "auto", True),
        (("cputrain", "launch", "run.py"), None, False),  # reads `auto` as one
        (("bash", "-c", "torchrun run.py"), None, True),
    ],
)
def test_who_counts_the_processes(words: tuple[str, ...], count: str | None, found: bool) -> None:
    documents = with_words(*words)
    documents[0]["spec"]["nprocPerNode"] = count
    assert ["nprocPerNode is missing" in each for each in said(documents)] == ([True] if found else [])
    main(documents)["resources"]["limits"]["nvidia.com/gpu"] = 1
    assert said(documents) == []


def test_a_trainjob_whose_runtime_has_the_command() -> None:
    documents = copy.deepcopy(TRAIN)
    trainer = documents[1]["spec"]["trainer"]
    [job] = documents[0]["spec"]["template"]["spec"]["replicatedJobs"]
    job["template"]["spec"]["template"]["spec"]["containers"][0]["command"] = ["torchrun", "run.py"]
    for key in ("command", "args", "numProcPerNode"):
        trainer.pop(key)
    assert ["numProcPerNode is missing" in each for each in said(documents)] == [True]
    documents[0]["spec"]["mlPolicy"] = {"numNodes": 2, "flux": {"numProcPerNode": 1}}
    assert said(documents) == []


@pytest.mark.parametrize("words", [("--no_cuda",), ("--no-cuda", "--output_dir", "/data/x"), ("--use_ipex",)])
def test_a_script_with_options_of_its_own(words: tuple[str, ...]) -> None:
    """One word that transformers once had doesn't make it transformers' script."""
    assert said(with_words("torchrun", "train.py", "--epochs", "3", *words)) == []
    assert "refuses" in str(said(with_words("torchrun", "run_qa.py", "--do_train", "--do_eval", *words)))


def test_shared_memory_and_the_memory_that_a_trainjob_gives() -> None:
    documents = copy.deepcopy(TRAIN)
    pod = documents[0]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    next(volume for volume in pod["volumes"] if volume["name"] == "shared-memory")["emptyDir"]["sizeLimit"] = "20Gi"
    amounts = documents[1]["spec"]["trainer"]["resourcesPerNode"]
    amounts["limits"]["memory"] = amounts["requests"]["memory"] = "64Gi"
    assert said(documents) == []
    amounts["limits"]["memory"] = amounts["requests"]["memory"] = "19Gi"
    assert ["write sizeLimit: 2432Mi" in each for each in said(documents)] == [True]


@pytest.mark.parametrize(("kind", "most"), [("pytorchjob", 54), ("mpijob", 54), ("trainjob", 48)])
def test_the_longest_name(kind: str, most: int) -> None:
    """Pods have the job's name and a number behind it, and at most 63 characters."""
    documents = rendered(kind=kind)
    for length in (most, most + 1):
        documents[-1]["metadata"]["name"] = "q" * length
        wanted = [f"error: the name is too long: it has {length} characters"] if length > most else []
        assert [each.partition(" (")[0] for each in said(documents)] == wanted
    documents[-1]["metadata"]["name"] = "q" * 70
    assert all("lower-case" not in each for each in said(documents))


def test_a_runtimes_name_is_longer_and_has_dots() -> None:
    documents = copy.deepcopy(TRAIN)
    name = "torchtune-llama3.2-1b." + "q" * 60
    documents[0]["metadata"]["name"] = documents[1]["spec"]["runtimeRef"]["name"] = name
    assert said(documents) == []


def test_pods_that_never_restart() -> None:
    documents = copy.deepcopy(PYTORCH)
    documents[0]["spec"]["runPolicy"].pop("backoffLimit")
    assert ["starts again for ever" in each for each in said(documents)] == [True]
    documents[0]["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = "Never"
    assert said(documents) == []


@pytest.mark.parametrize(
    ("words", "severity"),
    [
        (("mpirun", "-np", "2", "./pi"), None),
        (("mpirun", "-np", "3", "./pi"), "error"),
        (("mpirun", "-np", "3", "--oversubscribe", "./pi"), None),
        (("mpirun", "-np", "3", "--map-by", "ppr:2:node", "./pi"), None),
        (("mpirun", "./pi", "-n", "3"), None),  # the program's own
        (("mpirun", "--allow-run-as-root", "pi", "-n", "3"), None),
        (("mpirun", "--bind-to", "none", "pi", "-n", "3"), None),
        (("mpirun", "-mca", "btl", "^openib", "-x", "PATH", "-np", "3", "pi"), "error"),
        (("bash", "-c", "cd /x && mpirun -np 3 ./pi"), "error"),
        (("mpirun", "python", "a.py", "-n", "3"), None),
    ],
)
def test_mpirun_and_the_slots(words: tuple[str, ...], severity: str | None) -> None:
    documents = copy.deepcopy(MPI)
    [launcher] = documents[0]["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    launcher.update(command=[words[0]], args=list(words[1:]))
    assert [each.partition(":")[0] for each in said(documents)] == ([severity] if severity else [])
    documents[0]["spec"]["mpiImplementation"] = "Intel"  # its mpirun shares the rest out among the hosts
    assert [each.partition(":")[0] for each in said(documents)] == (["warning"] if severity else [])
