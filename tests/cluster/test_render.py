"""Every rendered kind against the real schemas, the core's and the operators' own rules, over a grid of options."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from cluster import kubelet

from cputrain.cluster import kinds, manifest, mpi_launcher, render, schema
from cputrain.cluster.job import Job, SecretVariable, Toleration, Volume
from cputrain.cluster.manifest import plain
from cputrain.cluster.pod import escape
from cputrain.launch import hostfile

CRDS = Path(__file__).parents[3] / "shared" / "crds"
TRICKS = (
    "$(HOME)", "$$(HOME)", "$", "$$", "$$$(X", "$é(", "yes", "~", "null", "0x1F", "1e3", "12:30:45", "2026-11-16", "=",
    "<<", "- a", "a: b", "#no", "'", '"', "a\nb\n", "\n", " x ", "\t", "&a", "*a", "!!python/object:os.system", "{{x}}",
    "%YAML 1.1", "---", "...", "`id`", "$(id)", ";rm -rf /", "\u2028", "\x85", "\ufeff", "😀", "\x7f", "", "|", ">-",
)  # fmt: skip
EXTRAS: dict[str, Any] = {
    "namespace": "kubeflow",
    "environment": (("LOGLEVEL", "DEBUG"), ("GREETING", "a $(HOME) b"), ("EMPTY", "")),
    "secrets": (SecretVariable("HF_TOKEN", "hub", "token"),),
    "preload": ("libtcmalloc.so.4", "/usr/local/lib/libiomp5.so"),
    "arguments": ("--do_train", *TRICKS),
    "pull_secrets": ("registry",),
    "node_selector": (("node-type", "spr"), ("example.org/pool", "")),
    "tolerations": (Toleration("a"), Toleration("b", "c", "NoSchedule"), Toleration("d", effect="NoExecute")),
    "priority_class": "high",
    "service_account": "trainer",
    "launch_options": ("--mixed_precision", "bf16"),
    "token": "0f" * 32,
    "network_policy": True,
}
VOLUMES = (None, Volume("data", "/tmp/pvc-mount", "100Gi", "nfs"))
KINDS: dict[str, dict[str, Any]] = {
    "fixed": {"kind": "pytorchjob"},
    "elastic": {"kind": "pytorchjob", "elastic": (1, 4)},
    "trainjob": {"kind": "trainjob"},
    "openmpi": {"kind": "mpijob"},
    "intel": {"kind": "mpijob", "mpi": "intel"},
    "mpich": {"kind": "mpijob", "mpi": "mpich"},
}


def grid() -> Iterator[Job]:
    scripts = ("run_qa.py", None), ("run_qa.py", "import os\n\nif os:\n    pass\n")
    for kind, workers, cpus, volume, script, extras in itertools.product(
        KINDS.values(), (1, 4), ("1", "8", "200"), VOLUMES, scripts, ({}, EXTRAS)
    ):
        yield Job("qa", "r.example/qa:1", script[0], workers=workers, cpus=cpus, volume=volume, script_text=script[1],
                  **{**extras, **kind})  # fmt: skip


GRID = list(grid())


@cache
def strict_schema(kind: str) -> Any:
    """A kind's compact schema as JSON schema that forbids what it doesn't name: read by jsonschema, not by us."""
    shipped = schema.of_operators()

    @cache
    def part(number: int) -> dict[str, Any]:
        own = shipped.schemas[number]
        made = {key: value for key, value in own.items() if key in schema.KEPT}
        if own.get("intOrString"):
            made["type"] = ["integer", "string"]
        if "properties" in own:
            made["properties"] = {name: part(inner) for name, inner in own["properties"].items()}
            made["additionalProperties"] = bool(own.get("anyFields"))
        if "items" in own:
            made["items"] = part(own["items"])
        if "additionalProperties" in own:
            made["additionalProperties"] = part(own["additionalProperties"])
        return made

    made = part(shipped.kinds[kind])
    made = {**made, "properties": {**made["properties"], "metadata": {"type": "object"}}}
    return jsonschema.Draft202012Validator(made)


def test_the_grid_is_large() -> None:
    assert len(GRID) >= 200


@pytest.mark.parametrize("kind", KINDS)
def test_everything_rendered_is_valid(kind: str) -> None:
    wanted = KINDS[kind]
    jobs = [job for job in GRID if all(getattr(job, key) == value for key, value in wanted.items())]
    jobs = [job for job in jobs if job.elastic == wanted.get("elastic") and job.mpi == wanted.get("mpi", "openmpi")]
    assert len(jobs) == len(GRID) / len(KINDS)
    for job in jobs:
        for document in map(plain, render.of_job(job)):
            if document["apiVersion"] in ("v1", "networking.k8s.io/v1"):
                kubernetes_validate.validate(document, "1.37", strict=True)
                continue
            strict_schema(f"{document['apiVersion']}/{document['kind']}").validate(document)
            found = schema.of_operators().problems(document)
            assert found is not None
            assert list(found) == []
            assert list(kinds.problems(document)) == []


@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_the_core_parts_are_valid_for_the_oldest_and_the_newest_kubernetes(version: str) -> None:
    """Of the whole grid; a pod or claim that two combinations share is looked at once."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    distinct = set()
    for job in GRID:
        templates = kubelet.pods(list(map(plain, render.of_job(job)))).values()
        distinct |= {json.dumps({**pod, "spec": template["spec"]}, sort_keys=True) for template in templates}
        distinct |= {json.dumps(plain(document), sort_keys=True) for document in render.of_volume(job)}
    assert len(distinct) > 200
    for text in distinct:
        kubernetes_validate.validate(json.loads(text), version, strict=True)


def test_every_pod_is_restricted_and_guaranteed() -> None:
    for job in GRID:
        templates = kubelet.pods(list(map(plain, render.of_job(job))))
        assert templates
        for template in templates.values():
            assert kubelet.restricted_faults(template) == []
            assert kubelet.is_guaranteed(template)
            assert template["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
            shared = [volume for volume in template["spec"]["volumes"] if volume["name"] == "shared-memory"]
            assert all(volume["emptyDir"]["sizeLimit"] for volume in shared)


def test_text_is_the_data_for_every_reader() -> None:
    """PyYAML reads YAML 1.1 as kubectl does; our own reader must agree with it."""
    for job in GRID[::3]:
        wanted = list(map(plain, render.of_job(job)))
        text = render.job_text(job)
        assert list(yaml.safe_load_all(text)) == wanted
        assert [document.value for document in manifest.parse(text)] == wanted


@pytest.mark.parametrize("value", TRICKS)
def test_kubernetes_expansion_gives_back_the_value(value: str) -> None:
    assert kubelet.expand(escape(value), {"HOME": "/root", "id": "0"}) == value


def container_of(job: Job) -> dict[str, Any]:
    document = list(map(plain, render.of_job(job)))[-1]
    if job.kind == "trainjob":
        return document["spec"]["trainer"]
    replica = "Worker" if job.kind == "pytorchjob" else "Launcher"
    return kubelet.pods([document])[replica]["spec"]["containers"][0]


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob", "mpijob"])
def test_arguments_and_variables_arrive_as_given(kind: str) -> None:
    given = tuple((f"V{number}", value) for number, value in enumerate(TRICKS))
    job = Job("qa", "x:1", "a $(b).py", TRICKS, kind, environment=given)
    container = container_of(job)
    environment = kubelet.environment(container, {}, {})
    assert [environment[name] for name, _ in given] == list(TRICKS)
    assert kubelet.command(container, environment)[-len(TRICKS) - 1 :] == ["a $(b).py", *TRICKS]


def test_a_fixed_size_starts_with_all_workers() -> None:
    spec = plain(render.of_job(Job("qa", "x:1", "a.py", workers=3, rendezvous="1f"))[0])["spec"]
    assert spec["elasticPolicy"].items() >= {"minReplicas": 3, "maxReplicas": 3, "rdzvId": "qa-1f"}.items()
    assert spec["runPolicy"] == {"cleanPodPolicy": "None", "backoffLimit": 3}
    assert list(spec["pytorchReplicaSpecs"]) == ["Worker"]
    assert spec["nprocPerNode"] == "1"


def of_kind(job: Job, kind: str) -> list[dict[str, Any]]:
    return [document for document in map(plain, render.of_job(job)) if document["kind"] == kind]


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob", "mpijob"])
def test_several_pods_get_the_runs_token_from_a_secret(kind: str) -> None:
    job = Job("qa", "x:1", "a.py", kind=kind, workers=2, token="0f" * 32)
    (secret,) = of_kind(job, "Secret")
    values = {f"{secret['metadata']['name']}/{key}": value for key, value in secret["stringData"].items()}
    assert kubelet.environment(container_of(job), {}, values)["CPUTRAIN_TOKEN"] == "0f" * 32
    assert render.job_text(job).count(job.token) == 1 and job.token not in repr(job)
    if kind == "mpijob":  # sshd passes nothing on, so mpirun must be told the name
        assert "CPUTRAIN_TOKEN" in container_of(job)["args"][1].removeprefix("--forward=").split(",")


def test_a_token_is_made_only_where_it_is_needed() -> None:
    own = (SecretVariable("CPUTRAIN_TOKEN", "mine", "key"),)
    for more in ({"workers": 1}, {"workers": 2, "secrets": own}):
        job = Job("qa", "x:1", "a.py", token="0f" * 32, **more)
        assert not of_kind(job, "Secret")
        rows = [row for row in container_of(job)["env"] if row["name"] == "CPUTRAIN_TOKEN"]
        assert [row["valueFrom"]["secretKeyRef"]["name"] for row in rows] == (["mine"] if "secrets" in more else [])


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob", "mpijob"])
def test_a_network_policy_lets_the_jobs_own_pods_in_and_no_others(kind: str) -> None:
    job = Job("qa", "x:1", "a.py", kind=kind, workers=2, namespace="team", network_policy=True)
    (policy,) = of_kind(job, "NetworkPolicy")
    own = policy["spec"]["podSelector"]["matchLabels"]
    assert policy["metadata"]["namespace"] == "team" and policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": own}}]}]
    for template in kubelet.pods(list(map(plain, render.of_job(job)))).values():
        assert template["metadata"]["labels"].items() >= own.items()
    other = Job("qa2", "x:1", "a.py", kind=kind, workers=2, namespace="team")
    for template in kubelet.pods(list(map(plain, render.of_job(other)))).values():
        assert not template["metadata"]["labels"].items() >= own.items()


@pytest.mark.parametrize(("workers", "mode"), [(1, "ReadWriteOnce"), (2, "ReadWriteMany")])
def test_the_volume_is_no_part_of_the_jobs_file(workers: int, mode: str) -> None:
    job = Job("qa", "x:1", "a.py", workers=workers, volume=Volume("data", size="1Gi"))
    assert [document["kind"] for document in render.of_job(job)] == ["PyTorchJob"]
    assert plain(render.of_volume(job))[0]["spec"]["accessModes"] == [mode]


@pytest.mark.parametrize(
    ("cpus", "workers", "expected"),
    [("1", 1, (1, 1, 0)), ("4", 4, (1, 4, 0)), ("8", 1, (1, 8, 0)), ("8", 2, (1, 7, 1)), ("200", 4, (4, 49, 1))],
)
def test_processes_and_threads_follow_from_the_cpus(cpus: str, workers: int, expected: tuple[int, int, int]) -> None:
    found = Job("qa", "x:1", "a.py", cpus=cpus, workers=workers).sizing
    assert (found.processes, found.threads, found.communication) == expected


@pytest.mark.skipif(not CRDS.is_dir(), reason="the operators' definitions are not beside the repository")
def test_the_shipped_schemas_are_the_definitions(tmp_path: Path) -> None:
    schema.main(CRDS, tmp_path / "schemas.json")
    shipped = Path(schema.__file__).with_name("schemas.json")
    assert shipped.read_text() == (tmp_path / "schemas.json").read_text()


@pytest.mark.parametrize(
    ("mpi", "text", "words"),
    [
        ("openmpi", "qa-worker-0.qa slots=2\nqa-worker-1.qa slots=2\n", ["-np", "4"]),
        ("intel", "qa-worker-0.qa:2\nqa-worker-1.qa:2\n", ["-n", "4", "-ppn", "2"]),
        ("mpich", "qa-worker-0.qa:3\n", ["-n", "3", "-ppn", "3"]),
    ],
)
def test_the_launcher_starts_a_rank_for_each_slot(tmp_path: Path, mpi: str, text: str, words: list[str]) -> None:
    """The operator writes the hostfile, in the format of the job's MPI."""
    (tmp_path / "hosts").write_text(text)
    workers = hostfile.read(tmp_path / "hosts")
    command = mpi_launcher.mpirun(
        mpi_launcher.found(mpi), str(tmp_path / "hosts"), workers, ["A"], ["cputrain", "launch"]
    )
    start = command.index(words[0])
    assert command[start : start + len(words)] == words
