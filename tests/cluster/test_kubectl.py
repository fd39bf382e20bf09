"""submit, status, logs and delete through the real kubectl, against an API server of our own."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from typing import Any

import pytest
from cluster.kubectl_shell import QA, Here, add_job, kubectls, pod

from cputrain.cluster import render
from cputrain.cluster.job import Job
from cputrain.cluster.manifest import plain

pytestmark = pytest.mark.needs_program("kubectl", "kubernetes-client")


# --- submit ------------------------------------------------------------------------------------------------------


def test_submit_creates_exactly_the_data(here: Here) -> None:
    (here.folder / "job.yaml").write_text(render.job_text(QA))
    (here.folder / "volume.yaml").write_text(render.volume_text(QA))
    answer = here.cputrain("submit", "job.yaml", "volume.yaml")
    assert answer.returncode == 0, answer.stderr
    assert (
        answer.stdout.splitlines()[0] == "To be created: PersistentVolumeClaim data, ConfigMap qa-script, PyTorchJob qa"
    )
    wanted = list(map(plain, render.of_job(QA)))
    for resource, value in (("configmaps", wanted[0]), ("pytorchjobs", wanted[1])):
        [found] = here.cluster.kinds(resource)
        found["metadata"] = {key: found["metadata"][key] for key in ("name", "labels")}
        assert found == value


def test_kubectl_reads_our_yaml_as_the_same_data(here: Here) -> None:
    command = ["kubectl", "create", "--filename=-"]
    text = render.job_text(QA)
    subprocess.run(command, env=here.environ, input=text, text=True, check=True, capture_output=True)
    [found] = here.cluster.kinds("pytorchjobs")
    assert found["spec"] == plain(render.of_job(QA)[1])["spec"]


def test_the_same_name_twice_is_refused_and_the_volume_kept(here: Here) -> None:
    (here.folder / "volume.yaml").write_text(render.volume_text(QA))
    assert here.cputrain("submit", "volume.yaml").returncode == 0
    again = here.cputrain("submit", "volume.yaml")
    assert "exists already, and is used" in again.stdout
    fresh = Job("other", "x:1", "run.py")
    assert here.submit(fresh).returncode == 0
    before = dict(here.cluster.objects)
    assert "PyTorchJob other exists already" in here.refused("submit", "-", given=render.job_text(fresh))
    assert here.cluster.objects == before


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ((403, "Forbidden", "you may not create pytorchjobs"), "you may not create pytorchjobs"),
        ((422, "Invalid", "spec.nprocPerNode: wrong"), "spec.nprocPerNode: wrong"),
        ("drop", "can't be reached"),
    ],
)
def test_a_refusal_leaves_nothing_behind(here: Here, fault: Any, said: str) -> None:
    here.cluster.fault = lambda method, path: fault if method == "POST" and path.endswith("pytorchjobs") else None
    assert said in here.refused("submit", "-", given=render.job_text(QA))
    assert here.cluster.objects == {}


def test_a_manifest_with_findings_never_reaches_the_cluster(here: Here) -> None:
    text = render.job_text(QA).replace('nprocPerNode: "1"', "nprocPerNode: 1")
    assert 'write it in quotes: "1"' in here.refused("submit", "-", given=text)
    assert here.cluster.requests == []


def test_a_warning_is_shown_and_doesnt_stop(here: Here) -> None:
    text = render.job_text(QA).replace("sizeLimit: 2Gi", "sizeLimit: 64Gi")
    answer = here.cputrain("submit", "-", given=text)
    assert answer.returncode == 0, answer.stderr
    assert "warning: /dev/shm may grow to 64Gi" in answer.stderr
    assert len(here.cluster.kinds("pytorchjobs")) == 1


def test_submit_waits_for_the_end(here: Here) -> None:
    def fault(method: str, path: str) -> None:
        """Plays the operator: the job succeeds once it has been looked at."""
        if method == "GET" and path.endswith("/pytorchjobs/qa") and here.cluster.kinds("pytorchjobs"):
            done = {"conditions": [{"type": "Succeeded", "status": "True"}]}
            here.cluster.kinds("pytorchjobs")[0]["status"] = done

    here.cluster.fault = fault
    answer = here.submit(QA, "--wait")
    assert answer.returncode == 0, answer.stderr
    assert "state: Succeeded" in answer.stdout


def test_submit_of_a_script(here: Here) -> None:
    """What `render` would write, checked, shown and created; the same name twice is refused."""
    (here.folder / "run.py").write_text("print(1)\n")
    options = ["--image", "x:1", "--workers", "2", "--embed-script", "--pvc", "data", "--create-pvc", "1Gi"]
    words = ["submit", *options, "--", "run.py", "--wait", "$(HOME)", "it's"]
    answer = here.cputrain(*words)
    assert answer.returncode == 0, answer.stderr
    shown = "To be created: PersistentVolumeClaim data, ConfigMap run-script, Secret run-token, PyTorchJob run"
    assert answer.stdout.splitlines()[0] == shown
    [found] = here.cluster.kinds("pytorchjobs")
    [container] = found["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["args"][-3:] == ["--wait", "$$(HOME)", "it's"]
    [secret] = here.cluster.kinds("secrets")
    assert len(secret["stringData"]["token"]) == 64 and secret["stringData"]["token"] not in answer.stdout
    before = dict(here.cluster.objects)
    assert "ConfigMap run-script exists already: delete it" in here.refused(*words)
    assert here.cluster.objects == before


@pytest.mark.parametrize("here", kubectls()[-1:], indirect=True, ids=lambda path: path.name)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "run.py"], "--image is missing"),
        (["--image", "x:1", "run.py"], "--image is for a job that is made here: give -- SCRIPT"),
        (["--image", "x:1", "--memory", "128GB", "--", "run.py"], "128GB"),
        (["--image", "x:1", "--name", "A_b", "--", "run.py"], "'A_b'"),
        (["--image", "x:1", "--env", "HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyzabcdef", "--", "run.py"], "HF_TOKEN"),
        (["run.py"], "run.py can't be read"),
    ],
)
def test_a_wrong_submit_never_reaches_the_cluster(here: Here, words: list[str], said: str) -> None:
    assert said in here.refused("submit", *words)
    assert here.cluster.requests == []


# --- no cluster --------------------------------------------------------------------------------------------------


def test_no_kubectl_no_configuration_no_server(here: Here) -> None:
    here.environ["KUBECONFIG"] = str(here.folder / "none")
    assert "no cluster to talk to" in here.refused("status", "qa")
    text = (here.folder / "kubeconfig").read_text().replace("127.0.0.1:", "127.0.0.1:1#")
    (here.folder / "none").write_text(text)
    assert "can't be reached" in here.refused("status", "qa")
    here.environ["PATH"] = str(here.folder)
    assert "kubectl isn't on the PATH" in here.refused("status", "qa")


def test_a_context_that_isnt_there(here: Here) -> None:
    assert "context" in here.refused("status", "qa", "--context", "nowhere")


def test_auto_takes_what_the_cluster_has(here: Here) -> None:
    words = ("render", "--kind", "auto", "--image", "x:1")
    assert "kind: TrainJob" in here.cputrain(*words, "--", "a.py").stdout
    assert "kind: PyTorchJob" in here.cputrain(*words, "--elastic", "1:2", "--", "a.py").stdout
    here.cluster.resources = {"v1": [("pods", "Pod")], "kubeflow.org/v2beta1": [("mpijobs", "MPIJob")]}
    assert "kind: MPIJob" in here.cputrain(*words, "--", "a.py").stdout
    here.cluster.resources = {"v1": [("pods", "Pod"), ("configmaps", "ConfigMap")]}
    assert "knows no TrainJob or PyTorchJob or MPIJob" in here.refused(*words, "--", "a.py")
    assert "operator isn't installed" in here.refused("status", "qa")
    assert "doesn't know PyTorchJob" in here.refused("submit", "-", given=render.job_text(QA))


# --- status ------------------------------------------------------------------------------------------------------


def waiting(reason: str, message: str = "", **more: Any) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"name": "pytorch", "image": "x:1", "state": state, "restartCount": 4, **more}]}


def unscheduled(message: str) -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]}


KILLED = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
TROUBLES: dict[str, tuple[str, dict[str, Any], str]] = {
    "short": ("Pending", unscheduled("0/3 nodes are available: 3 Insufficient cpu."), "no node has enough cpu left"),
    "volume": ("Pending", unscheduled("pod has unbound immediate PersistentVolumeClaims"), "its volume isn't there"),
    "taint": ("Pending", unscheduled("1 node(s) had untolerated taint {a: b}"), "give --toleration"),
    "image": ("Pending", waiting("ImagePullBackOff", "no such image"), "can't be pulled (no such image)"),
    "memory": ("Running", waiting("CrashLoopBackOff", lastState=KILLED), "more memory than its limit of 16Gi"),
    "crash": ("Running", waiting("CrashLoopBackOff", lastState={"terminated": {"exitCode": 3}}), "exit code 3"),
    "secret": ("Pending", waiting("CreateContainerConfigError", 'secret "hub" not found'), 'secret "hub" not found'),
}  # fmt: skip


@pytest.mark.parametrize("here", kubectls()[-1:], indirect=True, ids=lambda path: path.name)
@pytest.mark.parametrize("name", TROUBLES)
def test_status_says_what_is_wrong(here: Here, name: str) -> None:
    phase, status, said = TROUBLES[name]
    add_job(here.cluster, pod(0), pod(1, phase, **status))
    answer = here.cputrain("status", "qa")
    assert answer.returncode == 0, answer.stderr
    # The table wraps long sentences: words are compared, not lines.
    words = " ".join(answer.stdout.replace("│", " ").split())
    row = " ".join(word for word in words.split() if word not in ("qa-worker-1", phase, "0", "4", "node-a"))
    assert said.split()[0] in row
    assert all(word in row for word in said.split())


def test_status_of_the_whole(here: Here) -> None:
    assert "no TrainJob, PyTorchJob, MPIJob called 'qa'" in here.refused("status", "qa")
    add_job(here.cluster, pod(0), pod(1, "Pending"), bound=False)
    text = here.cputrain("status", "qa").stdout
    assert "state: Created" in text
    assert "– Created: said so" in text
    assert "the volume claim data is Pending, not Bound" in text
    assert "the rendezvous isn't formed: 1 of 2 pods run" in text
    here.cluster.objects.clear()
    add_job(here.cluster, conditions=())
    assert "no operator has looked at this PyTorchJob yet" in here.cputrain("status", "qa").stdout


def test_watch_survives_a_dropped_connection_and_ends_with_the_job(here: Here) -> None:
    drops = iter([True] * 3)
    add_job(here.cluster, pod(0), pod(1), conditions=("Running", "Failed"))

    def fault(method: str, path: str) -> str | None:
        return "drop" if path.endswith("/pytorchjobs/qa") and next(drops, False) else None

    here.cluster.fault = fault
    answer = here.cputrain("status", "qa", "--watch")
    assert answer.returncode == 1, answer.stderr
    assert "state: Failed" in answer.stdout
    assert "failed: said so" in answer.stdout


# --- logs, delete ------------------------------------------------------------------------------------------------


def test_logs_of_a_rank(here: Here) -> None:
    """torch numbers machines by their addresses, as text."""
    pods = [pod(number, podIP=f"10.0.0.{9 + number}") for number in (0, 1, 10)]
    add_job(here.cluster, *pods)
    here.cluster.logs = {"qa-worker-0": "nine\n", "qa-worker-1": "ten\n", "qa-worker-10": "nineteen\n"}
    assert here.process("logs", "qa").stdout == "ten\n"
    assert here.process("logs", "qa", "--rank", "2", "-f").stdout == "nine\n"
    assert "the ranks end at 2" in here.refused("logs", "qa", "--rank", "3")
    here.cluster.objects.clear()
    add_job(here.cluster)
    assert "there are no pods yet" in here.refused("logs", "qa")


def test_logs_of_one_rank_of_several_in_a_pod(here: Here) -> None:
    job = plain(render.of_job(Job("qa", "x:1", "run.py", kind="trainjob", workers=11, processes=2))[1])
    here.cluster.put("trainjobs", job)
    for number in (10, 2, 0):
        labels = {"jobset.sigs.k8s.io/jobset-name": "qa"}
        here.cluster.put("pods", {**pod(0), "metadata": {"name": f"qa-node-0-{number}-x", "labels": labels}})
    here.cluster.logs = {"qa-node-0-10-x": "[4] four\nall\n[5] five\n[4] again\n"}
    assert here.cputrain("logs", "qa", "--rank", "5").stdout == "all\n[5] five\n"
    assert here.cputrain("logs", "qa", "--rank", "4", "-f").stdout == "[4] four\nall\n[4] again\n"
    here.cluster.fault = lambda method, path: (403, "Forbidden", "not yours") if path.endswith("/log") else None
    assert here.cputrain("logs", "qa", "--rank", "4").returncode != 0


def test_logs_of_an_mpijobs_rank(here: Here) -> None:
    here.cluster.put("mpijobs", plain(render.of_job(Job("qa", "x:1", "run.py", kind="mpijob", workers=2))[0]))
    for name, made in (("qa-worker-0", "1"), ("qa-launcher-zz", "1"), ("qa-launcher-aa", "2")):
        labels = {"training.kubeflow.org/job-name": "qa"}
        metadata = {"name": name, "labels": labels, "creationTimestamp": f"2026-11-16T08:0{made}:00Z"}
        here.cluster.put("pods", {**pod(0), "metadata": metadata})
    here.cluster.logs = {"qa-launcher-aa": "[0] zero\n[1] one\n", "qa-launcher-zz": "failed\n"}
    assert here.cputrain("logs", "qa", "--rank", "1").stdout == "[1] one\n"
    assert "the ranks end at 1" in here.refused("logs", "qa", "--rank", "2")


@pytest.mark.parametrize("with_data", [False, True])
def test_delete_keeps_the_volume_unless_told(here: Here, with_data: bool) -> None:
    add_job(here.cluster)
    here.cluster.put("configmaps", plain(render.of_job(QA)[0]))
    here.cluster.put("configmaps", {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "somebody-elses"}})
    _, secret, policy = map(plain, render.objects_beside(replace(QA, workers=2, token="0f" * 32, network_policy=True)))
    here.cluster.put("secrets", secret)
    here.cluster.put("networkpolicies", policy)
    answer = here.cputrain("delete", "qa", *(["--with-data"] if with_data else []))
    assert answer.returncode == 0, answer.stderr
    assert here.cluster.kinds("pytorchjobs") == here.cluster.kinds("secrets") == []
    assert here.cluster.kinds("networkpolicies") == []
    assert [value["metadata"]["name"] for value in here.cluster.kinds("configmaps")] == ["somebody-elses"]
    assert len(here.cluster.kinds("persistentvolumeclaims")) == (0 if with_data else 1)
    said = "deleted the volume claim data with its data" if with_data else "the volume claim data stays with its data"
    assert said in answer.stdout


@pytest.mark.parametrize("words", [[], ["--with-data"]])
def test_delete_says_nothing_of_a_claim_that_never_was(here: Here, words: list[str]) -> None:
    """The job named one, and waited for it in vain."""
    add_job(here.cluster)
    del here.cluster.objects["persistentvolumeclaims", "default", "data"]
    answer = here.cputrain("delete", "qa", *words)
    assert (answer.returncode, answer.stdout) == (0, "deleted PyTorchJob qa\n"), answer.stderr


def test_delete_by_one_who_may_not_see_secrets(here: Here) -> None:
    add_job(here.cluster)
    here.cluster.fault = lambda _, path: (403, "Forbidden", "not yours") if path.endswith("/secrets") else None
    answer = here.cputrain("delete", "qa")
    assert answer.returncode == 0 and "secrets were not looked for: the cluster refused: not yours" in answer.stderr
    assert here.cluster.kinds("pytorchjobs") == []


def test_delete_without_permission(here: Here) -> None:
    add_job(here.cluster)
    here.cluster.fault = lambda method, path: (403, "Forbidden", "not yours") if method == "DELETE" else None
    assert "not yours" in here.refused("delete", "qa", "--with-data")
    assert len(here.cluster.kinds("persistentvolumeclaims")) == 1


def test_check_with_the_clusters_own_schemas(here: Here) -> None:
    schema = {"type": "object", "properties": {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}}
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "pytorchjobs.kubeflow.org"},
        "spec": {
            "group": "kubeflow.org",
            "names": {"kind": "PyTorchJob"},
            "versions": [{"name": "v1", "schema": {"openAPIV3Schema": schema}}],
        },
    }
    assert "none of Kubeflow's definitions" in here.refused("check", "--cluster", "-", given="a: b")
    here.cluster.put("customresourcedefinitions", json.loads(json.dumps(definition)), "")
    answer = here.cputrain("check", "--cluster", "-", given=render.job_text(Job("qa", "x:1", "a.py")))
    assert answer.returncode == 1
    assert "spec is not a field that exists here" in answer.stdout
