"""`cputrain k8s check`: what hurts is found in all three kinds of job, at its line, also in a TrainJob's parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from cputrain.cluster import check, render
from cputrain.cluster.job import KINDS, Job
from cputrain.cluster.manifest import plain, to_text

Documents = list[dict[str, Any]]
JOBS: dict[str, Documents] = {
    kind: [plain(document) for document in render.of_job(Job("qa", "x:1", "run.py", kind=kind, workers=2))]
    for kind in KINDS
}


def started(documents: Documents) -> dict[str, Any]:
    """What holds the command and the variables of the ranks."""
    spec = documents[-1]["spec"]
    if "trainer" in spec:
        return spec["trainer"]
    name = "pytorchReplicaSpecs" if "pytorchReplicaSpecs" in spec else "mpiReplicaSpecs"
    return next(iter(spec[name].values()))["template"]["spec"]["containers"][0]


def pod(documents: Documents) -> dict[str, Any]:
    """The pod in which ranks run."""
    spec = documents[0]["spec"]
    if "template" in spec:
        return spec["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return (spec.get("pytorchReplicaSpecs") or spec["mpiReplicaSpecs"])["Worker"]["template"]["spec"]


def amounts(documents: Documents) -> dict[str, Any]:
    spec = documents[-1]["spec"]
    return spec["trainer"]["resourcesPerNode"] if "trainer" in spec else pod(documents)["containers"][0]["resources"]


def found(documents: Documents) -> list[tuple[str, str]]:
    """(the line's text, the sentence) of every finding."""
    text = to_text(documents)
    lines = text.splitlines()
    return [(lines[finding.line - 1].strip(), finding.sentence) for finding in check.findings(text)]


def changed(kind: str, change: Callable[[Documents], Any]) -> Documents:
    documents = copy.deepcopy(JOBS[kind])
    change(documents)
    return documents


def with_env(name: str, value: str) -> Callable[[Documents], Any]:
    return lambda documents: started(documents)["env"].append({"name": name, "value": value})


def with_words(*words: str) -> Callable[[Documents], Any]:
    return lambda documents: started(documents).update(command=[words[0]], args=list(words[1:]))


def with_amounts(limit: str, request: str) -> Callable[[Documents], Any]:
    def change(documents: Documents) -> None:
        amounts(documents)["limits"]["cpu"], amounts(documents)["requests"]["cpu"] = limit, request

    return change


def without_shared_memory(documents: Documents) -> None:
    [container] = pod(documents)["containers"]
    container["volumeMounts"] = [row for row in container["volumeMounts"] if row["mountPath"] != "/dev/shm"]


def shared_memory(documents: Documents) -> dict[str, Any]:
    return next(volume for volume in pod(documents)["volumes"] if volume["name"] == "shared-memory")


# What is changed, what the line reads, and a part of the sentence.
CASES: dict[str, tuple[Callable[[Documents], Any], str, str]] = {
    "bf16": (with_words("mpirun", "torchrun", "run.py", "--bf16"), "--bf16", "--bf16 on a node without bf16"),
    "bf16 with a value": (with_words("mpirun", "torchrun", "a.py", "--bf16=True"), "--bf16=True", "13 times slower"),
    "bf16 of a shell": (
        with_words("bash", "-c", "cd /x && mpirun torchrun run.py --bf16 True"), "mpirun torchrun", "13 times slower"
    ),
    "bf16 of accelerate": (
        with_words("mpirun", "accelerate", "launch", "--num_machines=2", "--mixed_precision", "bf16", "run.py"),
        "--mixed_precision", "13 times slower",
    ),
    "threads": (with_env("OMP_NUM_THREADS", "99"), "name: OMP_NUM_THREADS", "1 process of 99 threads need 99 CPUs"),
    "dead cache": (with_env("TRANSFORMERS_CACHE", "/x"), "name: TRANSFORMERS_CACHE", "set HF_HOME"),
    "preload": (with_env("LD_PRELOAD", "/x/libtcmalloc.so.4.5.9"), "name: LD_PRELOAD", "write libtcmalloc.so.4"),
    "token": (with_env("HF_TOKEN", "abc"), "name: HF_TOKEN", "HF_TOKEN stands here in clear"),
    "token in words": (with_words("mpirun", "torchrun", "a.py", "--hub_token", "abc"), "--hub_token", "in clear"),
    "token of a shell": (
        with_words("sh", "-c", "mpirun torchrun a.py --hub_token=abc"), "--hub_token=abc", "a token stands here"
    ),
    "own address": (with_env("MASTER_ADDR", "localhost"), "name: MASTER_ADDR", "every pod meets only itself"),
    "alone": (with_words("python", "run.py"), "python", "alone"),
    "alone in a shell": (with_words("bash", "-c", "python3 run.py"), "", "alone"),
    "not Guaranteed": (with_amounts("4", "2"), "cpu:", "cpu has limit 4 and request 2"),
    "fraction": (with_amounts("3500m", "3500m"), 'cpu: "3500m"', "only whole CPUs are pinned"),
    "no limit": (lambda documents: amounts(documents).pop("limits"), "", "cpu and memory have no limit"),
    "no /dev/shm": (without_shared_memory, "", "/dev/shm has 64 MiB"),
    "/dev/shm without size": (
        lambda documents: shared_memory(documents)["emptyDir"].pop("sizeLimit"), "shared-memory", "has no sizeLimit"
    ),
    "/dev/shm on disk": (
        lambda documents: shared_memory(documents)["emptyDir"].pop("medium"), "shared-memory", "on the node's disk"
    ),
    "unknown field": (lambda documents: documents[-1]["spec"].update(other=1), "other: 1", "not a field that exists"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_we_render_has_none(kind: str) -> None:
    assert found(JOBS[kind]) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_a_finding_in_every_kind(name: str, kind: str) -> None:
    change, line, fragment = CASES[name]
    rows = found(changed(kind, change))
    assert [row for row in rows if line in row[0] and fragment in row[1]], rows


WORDS = ("mpirun", "torchrun", "run.py", "--bf16")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        lambda documents: pod(documents).update(nodeSelector={"cpu": "spr"}),
        lambda documents: started(documents).update(command=["mpirun", "cputrain"], args=["launch", "a.py", "--bf16"]),
        lambda documents: started(documents).update(args=["torchrun", "run.py", "--bf16", "False"]),
        lambda documents: started(documents).update(args=["torchrun", "run.py", "--prompt", "what is --bf16"]),
    ],
    ids=["nodes are chosen", "cputrain", "false", "another's value"],
)
def test_bf16_that_does_no_harm(kind: str, change: Callable[[Documents], Any]) -> None:
    documents = changed(kind, with_words(*WORDS))
    assert "slower" in str(found(documents))
    change(documents)
    assert "slower" not in str(found(documents))


# --- What only one kind has --------------------------------------------------------------------------------------


def patch(spec: dict[str, Any]) -> dict[str, Any]:
    job = {"name": "node", "template": {"spec": {"template": {"spec": spec}}}}
    return {"manager": "x/y", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}


def test_a_trainjobs_patches() -> None:
    """They are laid over the runtime: what hurts in them is said, what they mend is not."""
    documents = copy.deepcopy(JOBS["trainjob"])
    job = documents[1]["spec"]
    with_words("torchrun", "run.py", "--bf16")(documents)
    job["runtimePatches"] = [patch({"nodeSelector": {"cpu": "spr"}})]
    assert found(documents) == []
    without_shared_memory(documents)
    mount = {"name": "node", "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}
    volume = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
    job["runtimePatches"] = [patch({"nodeSelector": {"a": "b"}, "containers": [mount], "volumes": [volume]})]
    assert found(documents) == []
    volume["emptyDir"].pop("sizeLimit")
    [(line, said)] = found(documents)
    assert "name: shm" in line
    assert "/dev/shm has no sizeLimit" in said
    mount["env"] = [{"name": "HF_TOKEN", "value": "abc"}]
    said = str(found(documents))
    assert "the operator refuses variables of node here: move them to trainer.env" in said
    assert "HF_TOKEN stands here in clear" in said


def test_what_older_trainers_call_patches() -> None:
    documents = copy.deepcopy(JOBS["trainjob"])
    with_words("torchrun", "run.py", "--bf16")(documents)
    override = {"targetJobs": [{"name": "node"}], "spec": {"nodeSelector": {"cpu": "spr"}}}
    documents[1]["spec"]["podTemplateOverrides"] = [override]
    [(line, said)] = found(documents)
    assert line == "podTemplateOverrides:"
    assert "it is called runtimePatches now" in said


def test_a_trainjob_whose_runtime_is_elsewhere() -> None:
    """The runtime's nodes and pods can't be seen; what stands in the job can."""
    documents = [copy.deepcopy(JOBS["trainjob"][1])]
    with_words("torchrun", "run.py", "--bf16")(documents)
    [(line, said)] = found(documents)
    assert line == "- --bf16"
    assert "in runtimePatches or in the runtime" in said
    documents[0]["spec"]["initializer"] = {"model": {"env": [{"name": "HF_TOKEN", "value": "abc"}]}}
    assert "HF_TOKEN stands here in clear" in str(found(documents))


def test_a_command_that_the_runtime_has() -> None:
    """A TrainJob may leave command, size and resources to its runtime, and then they are looked for there."""
    documents = copy.deepcopy(JOBS["trainjob"])
    trainer, [node] = documents[1]["spec"]["trainer"], pod(documents)["containers"]
    for key in ("command", "args", "numNodes", "resourcesPerNode"):
        trainer.pop(key)
    node["command"] = ["cputrain", "launch", "run.py", "--bf16"]
    assert found(documents) == []
    node["command"] = ["python", "run.py", "--bf16"]
    assert [line for line, _ in found(documents)] == ["- python", "- --bf16"]
    node["command"], trainer["args"] = ["torchrun"], ["run.py", "--bf16"]
    assert [line for line, _ in found(documents)] == ["- --bf16"]
    node.pop("resources")
    assert "cpu and memory have no limit" in str(found(documents))


def test_a_runtimes_restarts_and_names() -> None:
    documents = copy.deepcopy(JOBS["trainjob"])
    [job] = documents[0]["spec"]["template"]["spec"]["replicatedJobs"]
    job["template"]["spec"].pop("backoffLimit")
    assert "started 6 times again alone" in str(found(documents))
    job["name"] = "training"
    assert "must be named node" in str(found(documents))


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda spec: spec["runPolicy"].pop("backoffLimit"), "a launcher that fails starts again 6 times"),
        (lambda spec: spec["mpiReplicaSpecs"].update(worker=spec["mpiReplicaSpecs"].pop("Worker")), "write Worker"),
        (
            lambda spec: spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"].update(restartPolicy="Always"),
            "overwritten by that of the replica (OnFailure)",
        ),
        (
            lambda spec: spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0].update(
                env=[{"name": "OMP_NUM_THREADS", "value": "4"}]
            ),
            "OMP_NUM_THREADS doesn't reach the ranks",
        ),
        (lambda spec: spec.update(slotsPerWorker=8), "8 processes of 4 threads need 32 CPUs"),
    ],
)
def test_an_mpijob(change: Callable[[dict[str, Any]], Any], fragment: str) -> None:
    assert fragment in str(found(changed("mpijob", lambda documents: change(documents[0]["spec"]))))


def test_a_process_count_that_torchrun_is_given() -> None:
    """It wins over the operator's variable: nothing is missing then, and threads are multiplied by it."""
    documents = changed("pytorchjob", with_words("torchrun", "--nproc_per_node=3", "run.py"))
    documents[0]["spec"].pop("nprocPerNode")
    [(line, said)] = found(documents)
    assert "OMP_NUM_THREADS" in line
    assert "3 processes of 4 threads need 12 CPUs" in said


def test_a_masters_pods_are_told_their_ranks() -> None:
    """As the operator's own examples do it: the Master is a finding, that python starts the script isn't."""
    documents = changed("pytorchjob", with_words("python3", "run.py"))
    assert "trains alone" in str(found(documents))
    replicas = documents[0]["spec"]["pytorchReplicaSpecs"]
    replicas["Master"] = {**copy.deepcopy(replicas["Worker"]), "replicas": 1}
    assert [said[:8] for _, said in found(documents)] == ["a Master"]


def test_accelerate_trains_alone_in_every_pod() -> None:
    said = found(changed("pytorchjob", with_words("accelerate", "launch", "run.py")))
    assert "reads nothing of what the operator says" in str(said)
    said = found(changed("pytorchjob", with_words("accelerate", "launch", "--num_machines", "2", "run.py")))
    assert said == []


def test_a_script_in_a_configmap_with_a_token() -> None:
    script = f"login('hf_{'a' * 30}')\n"
    documents = [plain(document) for document in render.of_job(Job("qa", "x:1", "run.py", script_text=script))]
    [(line, said)] = found(documents)
    assert line.startswith("run.py:")
    assert "read it from a variable" in said


def parts(value: Any) -> list[tuple[Any, Any]]:
    """(mapping or list, key) of everything within."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [pair for key in keys for pair in [(value, key), *parts(value[key])]]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_another_type_stops_it(kind: str) -> None:
    """Each part of a job in turn is something else than it should be: that is the schema's to say."""
    patched = {"spec": {"nodeSelector": {}, "containers": [{"name": "node", "env": [{"name": "A", "value": "b"}]}]}}
    whole = copy.deepcopy(JOBS[kind])
    if kind == "trainjob":
        whole[1]["spec"] |= {"runtimePatches": [patch(patched["spec"])], "podTemplateOverrides": [patched]}
    for number in range(len(parts(whole))):
        for other in (None, 5, True, "x", [], {}, [[]], [{}], {"name": []}, [{"name": {}, "value": []}]):
            documents = copy.deepcopy(whole)
            holder, key = parts(documents)[number]
            holder[key] = other
            values = [value for value in documents if isinstance(value, dict)]
            for value in (value for value in values if isinstance(value.get("kind"), str)):
                assert all(problem.sentence for problem in check.problems(value, values))
