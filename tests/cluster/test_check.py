"""`cputrain k8s check`: the guide's own manifest, every finding by itself, and silence for what we render."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.command_line import cputrain
from cluster.test_render import GRID

from cputrain.cluster import check, render
from cputrain.cluster.job import Job, Volume
from cputrain.cluster.manifest import plain, to_text

# As "Efficient Training on Multiple CPUs" of transformers 4.37 prints it, letter by letter (Apache-2.0).
GUIDE = (Path(__file__).parent / "data" / "guide_pytorchjob.yaml").read_text()
MENDED = GUIDE.replace('\n-                value: "56"', '\n                value: "56"').replace(
    "<image name>:<tag>", "qa:1"
)


def test_the_guides_manifest_is_not_yaml() -> None:
    [found] = check.findings(GUIDE)
    assert found.line == GUIDE.splitlines().index('-                value: "56"') + 1
    assert "line of a diff" in found.sentence


def test_the_guides_manifest_once_mended() -> None:
    findings = check.findings(MENDED)
    found = {finding.sentence.split()[0]: finding.line for finding in findings if finding.severity != "error"}
    lines = MENDED.splitlines()
    assert found == {
        "nprocPerNode": 6,
        "backoffLimit": 6,
        "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4.5.9": lines.index("              - name: LD_PRELOAD") + 1,
        "TRANSFORMERS_CACHE": lines.index("              - name: TRANSFORMERS_CACHE") + 1,
        "restartPolicy": lines.index("          restartPolicy: Never") + 1,
        "/dev/shm": lines.index("          - name: dshm") + 1,
    }
    refused = {finding.line: finding.sentence for finding in findings if finding.severity == "error"}
    wanted = {
        lines.index(f"                - {flag}") + 1: flag for flag in ("--no_cuda", "--ddp_backend", "--use_ipex")
    }
    assert refused.keys() == wanted.keys()
    assert all(f"transformers refuses {wanted[line]}" in sentence for line, sentence in refused.items())
    started_by_us = MENDED.replace("- torchrun\n", "- cputrain\n                - launch\n")
    assert [finding for finding in check.findings(started_by_us) if finding.severity == "error"] == []


def test_render_with_the_guides_values_is_the_guides_job_without_its_faults(tmp_path: Path) -> None:
    from ruamel.yaml import YAML

    wanted = YAML(typ="safe").load(MENDED)
    worker = wanted["spec"]["pytorchReplicaSpecs"]["Worker"]
    container = worker["template"]["spec"]["containers"][0]
    script, *arguments = container["command"][1:]
    answer = cputrain(
        "k8s", "render", "--name", "transformers-pytorchjob", "-n", "kubeflow", "--elastic", "1:4",
        "--max-restarts", "10", "--image", "qa:1", "--cpus", "200", "--memory", "128Gi", "--processes", "2",
        "--threads", "56", "--cores-for-communication", "1", "--pvc", "transformers-pvc", "--mount", "/tmp/pvc-mount",
        "--node-selector", "node-type=spr", "--preload", "libtcmalloc.so.4", "--preload", "/usr/local/lib/libiomp5.so",
        "--env", "HF_DATASETS_CACHE=/tmp/pvc-mount/hf_datasets_cache", "--", script, *arguments,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert check.findings(answer.stdout) == []
    made = list(YAML(typ="safe").load_all(answer.stdout))[-1]  # after the Secret
    ours = made["spec"]["pytorchReplicaSpecs"]["Worker"]
    own = ours["template"]["spec"]["containers"][0]
    assert made["metadata"].items() >= wanted["metadata"].items()
    assert made["spec"]["elasticPolicy"].items() >= wanted["spec"]["elasticPolicy"].items()
    assert (ours["replicas"], ours["restartPolicy"]) == (worker["replicas"], "ExitCode")  # own failures end a job
    assert own["args"] == [script, *arguments]
    assert own["imagePullPolicy"] == container["imagePullPolicy"]
    for side in ("limits", "requests"):
        assert {key: str(value) for key, value in container["resources"][side].items()} == own["resources"][side]
    theirs = {row["name"]: row["value"] for row in container["env"]}
    variables = {row["name"]: row["value"] for row in own["env"] if "value" in row}
    for name in ("HF_DATASETS_CACHE", "LOGLEVEL", "CCL_WORKER_COUNT", "OMP_NUM_THREADS"):
        assert variables[name] == theirs[name]
    mounts = {mount["mountPath"] for mount in own["volumeMounts"]}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} <= mounts
    assert ours["template"]["spec"]["nodeSelector"] == worker["template"]["spec"]["nodeSelector"]
    assert (variables["HF_HOME"], made["spec"]["nprocPerNode"]) == ("/tmp/pvc-mount/huggingface", "2")


@pytest.mark.parametrize("job", GRID[::7], ids=lambda job: f"{job.kind}-{job.workers}-{job.cpus}")
def test_what_we_render_has_no_findings(job: Job) -> None:
    assert check.findings(render.job_text(job)) == []
    if job.volume:
        assert check.findings(render.volume_text(job)) == []


# --- Every finding by itself -------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]
GOOD = plain(render.of_job(Job("qa", "x:1", "run.py", ("--lr", "1"), workers=2, cpus="8"))[0])
TRAIN = plain(render.of_job(Job("qa", "x:1", "run.py", kind="trainjob", workers=2))[1])
RUNTIME = plain(render.of_job(Job("qa", "x:1", "run.py", kind="trainjob", workers=2))[0])
MPI = plain(render.of_job(Job("qa", "x:1", "run.py", kind="mpijob", workers=2))[0])


def worker(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]


def pod(job: dict[str, Any]) -> dict[str, Any]:
    return worker(job)["template"]["spec"]


def container(job: dict[str, Any]) -> dict[str, Any]:
    return pod(job)["containers"][0]


def with_env(name: str, value: Any) -> Change:
    return lambda job: container(job)["env"].append({"name": name, "value": value})


def with_words(*words: str) -> Change:
    return lambda job: container(job).update(command=list(words), args=[])


def with_amounts(limit: Any, request: Any, name: str = "cpu") -> Change:
    def change(job: dict[str, Any]) -> None:
        container(job)["resources"]["limits"][name] = limit
        container(job)["resources"]["requests"][name] = request

    return change


def with_processes(count: str | None, *words: str) -> Change:
    def change(job: dict[str, Any]) -> None:
        with_words(*words)(job)
        job["spec"]["nprocPerNode"] = count

    return change


CASES: dict[str, tuple[Change, str]] = {
    "no process count": (with_processes(None, "torchrun", "run.py"), "nprocPerNode is missing"),
    "auto": (with_processes("auto", "torchrun", "run.py"), "nprocPerNode is missing"),
    "a number": (lambda job: job["spec"].update(nprocPerNode=2), 'must be a string, found 2; write it in quotes: "2"'),
    "dead restart policy": (lambda job: pod(job).update(restartPolicy="Never"), "overwritten by that of the replica"),
    "no backoff": (lambda job: job["spec"]["runPolicy"].pop("backoffLimit"), "starts again for ever"),
    "least over most": (lambda job: job["spec"]["elasticPolicy"].update(minReplicas=5), "is more than maxReplicas 2"),
    "lower case": (
        lambda job: job["spec"].update(pytorchReplicaSpecs={"worker": worker(job)}),
        "worker is no kind of replica: write Worker",
    ),
    "other container": (lambda job: container(job).update(name="main"), "a container called pytorch"),
    "too many threads": (lambda job: job["spec"].update(nprocPerNode="2"), "2 processes of 7 threads need 14 CPUs"),
    "limits and requests": (with_amounts("8", "4"), "cpu has limit 8 and request 4"),
    "memory": (with_amounts("8Gi", "4Gi", "memory"), "memory has limit 8Gi and request 4Gi"),
    "fraction": (with_amounts("7500m", "7500m"), "only whole CPUs are pinned"),
    "unquoted fraction": (with_amounts(7.5, 7.5), 'write it in quotes: "7.5"'),
    "128GB": (with_amounts("128GB", "128GB", "memory"), "write 128Gi"),
    "no limits": (lambda job: container(job).pop("resources"), "cpu and memory have no limit"),
    "no CPU limit": (lambda job: container(job)["resources"]["limits"].pop("cpu"), "cpu has no limit"),
    "no shm": (lambda job: container(job)["volumeMounts"].pop(1), "/dev/shm has 64 MiB"),
    "shm without size": (lambda job: pod(job)["volumes"][1]["emptyDir"].pop("sizeLimit"), "/dev/shm has no sizeLimit"),
    "preload": (with_env("LD_PRELOAD", "/usr/lib/libjemalloc.so.2.1.0"), "write libjemalloc.so.2"),
    "bf16": (with_words("torchrun", "run.py", "--bf16"), "13 times slower"),
    "alone": (with_words("python", "run.py"), "trains alone in every pod"),
    "standalone": (with_words("torchrun", "--standalone", "run.py"), "--standalone makes every pod train alone"),
    "one node": (with_words("torchrun", "--nnodes", "1", "run.py"), "--nnodes 1 makes every pod train alone"),
    "localhost": (with_env("MASTER_ADDR", "localhost"), "every pod meets only itself"),
    "no policy": (lambda job: job["spec"].pop("elasticPolicy"), "given no address to meet at"),
    "a backend": (lambda job: job["spec"]["elasticPolicy"].update(rdzvBackend="zk"), "knows no rendezvous backend"),
    "a master": (lambda job: job["spec"]["pytorchReplicaSpecs"].update(Master=worker(job)), "restricted standard"),
    "a master, too": (lambda job: job["spec"]["pytorchReplicaSpecs"].update(Master=worker(job)), "never Guaranteed"),
    "dead cache": (with_env("TRANSFORMERS_CACHE", "/x"), "set HF_HOME"),
    "a token by name": (with_env("HF_TOKEN", "abc"), "HF_TOKEN stands here in clear"),
    "a token by looks": (with_env("X", "hf_" + "a" * 30), "X stands here in clear"),
    "a token in words": (with_words("torchrun", "run.py", "--hub_token", "abc"), "a token stands here in clear"),
    "twice": (with_env("HOME", "/x"), "each may stand once"),
    "not a string": (with_env("X", 5), 'must be a string, found 5; write it in quotes: "5"'),
    "unknown field": (lambda job: job["spec"].update(nprocPernode="1"), "did you mean nprocPerNode?"),
    "bad name": (lambda job: job["metadata"].update(name="Q_A"), "found 'Q_A': write q-a"),
    "bad policy": (lambda job: worker(job).update(restartPolicy="Sometimes"), "restartPolicy must be one of"),
    "no replicas": (lambda job: worker(job).update(replicas=0), "replicas must be at least 1"),
    "image": (lambda job: container(job).update(image="<image>"), "is not an image's name"),
    "version": (lambda job: job.update(apiVersion="kubeflow.org/v2"), "PyTorchJob is served as kubeflow.org/v1"),
}  # fmt: skip
OTHERS: dict[str, tuple[dict[str, Any], Change, str]] = {
    "trainer absent": (TRAIN, lambda job: job["spec"].pop("trainer"), "ranks can't find each other"),
    "train processes": (TRAIN, lambda job: job["spec"]["trainer"].pop("numProcPerNode"), "numProcPerNode is missing"),
    "PET": (
        TRAIN,
        lambda job: job["spec"]["trainer"]["env"].append({"name": "PET_NNODES", "value": "1"}),
        "the operator's",
    ),
    "label": (
        RUNTIME,
        lambda job: job["spec"]["template"]["spec"]["replicatedJobs"][0]["template"].pop("metadata"),
        "finds none to run",
    ),
    "two policies": (RUNTIME, lambda job: job["spec"]["mlPolicy"].update(mpi={}), "only one of torch and mpi"),
    "launcher": (MPI, lambda job: job["spec"]["mpiReplicaSpecs"].pop("Launcher"), "needs a Launcher"),
    "mpi": (MPI, lambda job: job["spec"].update(mpiImplementation="LAM"), "one of OpenMPI, Intel, MPICH"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_finding(name: str) -> None:
    change, fragment = CASES[name]
    _assert_found(GOOD, change, fragment)


@pytest.mark.parametrize("name", OTHERS)
def test_a_finding_of_the_other_kinds(name: str) -> None:
    _assert_found(*OTHERS[name])


def _assert_found(good: dict[str, Any], change: Change, fragment: str) -> None:
    assert check.findings(to_text([good])) == []
    job = copy.deepcopy(good)
    change(job)
    text = to_text([job])
    found = [finding for finding in check.findings(text) if fragment in finding.sentence]
    assert found, check.findings(text)
    assert all(1 <= finding.line <= len(text.splitlines()) for finding in found)


def test_a_volume_in_the_jobs_file_would_be_deleted_with_it() -> None:
    job = Job("qa", "x:1", "a.py", volume=Volume("data", size="1Gi"), workers=2)
    [claim] = plain(render.of_volume(job))
    claim["spec"]["accessModes"] = ["ReadWriteOnce"]
    found = [finding.sentence for finding in check.findings(to_text([*plain(render.of_job(job)), claim]))]
    assert "deletes the volume" in found[0]
    assert "ReadWriteMany" in found[1]
    assert ["deletes" in finding.sentence for finding in check.findings(to_text([GOOD, claim]))] == [True]


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [*a]",
        "a: [" * 3000,
        "x\ty: \x01",
        "- 1",
        "5",
        "{a: b}",
        "a: 1\na: 2",
        "<<: [*x]",
        "",
        "\n---\n---\n",
        "a: b: c",
    ],
)
def test_what_is_no_manifest_is_a_finding(text: str) -> None:
    assert len(check.findings(text)) == 1


def test_a_few_lines_of_aliases_dont_become_billions() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    [found] = check.findings("\n".join(lines))
    assert "more than 200,000 values" in found.sentence


def test_exit_codes(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(json.dumps(GOOD))
    bad.write_text(MENDED)
    assert cputrain("k8s", "check", str(good)).returncode == 0
    answer = cputrain("k8s", "check", str(good), str(bad))
    assert answer.returncode == 1
    assert answer.stdout.startswith(f"{bad}:6: ")
    assert cputrain("k8s", "check", "-", given=MENDED).returncode == 1
    missing = cputrain("k8s", "check", str(tmp_path / "none.yaml"))
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
    bad.write_bytes(b"\xff\xfe")
    assert cputrain("k8s", "check", str(bad)).returncode == 2


def test_a_file_with_the_runs_token_is_its_owners_alone(tmp_path: Path) -> None:
    for workers, mode in (("1", 0o666), ("2", 0o600)):
        file = tmp_path / f"{workers}.yaml"
        answer = cputrain("k8s", "render", "--image", "x:1", "--workers", workers, "--out", str(file), "--", "a.py")
        assert answer.returncode == 0, answer.stderr
        text, made = file.read_text(), file.stat().st_mode & 0o777
        assert ("kind: Secret" in text) is (workers == "2") and made & ~mode == 0 and made & 0o600 == 0o600
        assert check.findings(text) == [] and check.unknown_kinds(text) == []
