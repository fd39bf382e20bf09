"""A rendered manifest trains: its pods' commands, with what the operator would set, on machines of namespaces."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import kubelet
from cluster.pods import CGROUP, ROOT, Pods
from safetensors.torch import load_file

from cputrain.cluster import render
from cputrain.cluster.job import Job, Volume
from cputrain.cluster.manifest import plain

pytestmark = [
    pytest.mark.needs_program("ip", "iproute2"),
    pytest.mark.skipif(os.geteuid() != 0 or not CGROUP.is_dir(), reason="needs root and a cgroup v1 CPU controller"),
]

STEPS = 40
# The demo's model and data, under DDP. A user's script: it knows nothing of clusters.
SCRIPT = """
import json, os, random, sys
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
from tokenizers import Tokenizer
from safetensors.torch import load_file, save_file
import cputrain
from cputrain import hardware
from squad_data import collate, load_examples, make_feature
from training_side import DATA, PADDED_LENGTH, make_model

steps, output = int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo")
torch.manual_seed(0)
tokenizer = Tokenizer.from_file(str(DATA / "tokenizer.json"))
features = [make_feature(tokenizer, example, PADDED_LENGTH) for example in load_examples(DATA / "train.json.gz")[:400]]
model = make_model(tokenizer.get_vocab_size())
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer = cputrain.optimize(model, optimizer)
replica = torch.nn.parallel.DistributedDataParallel(model)
order, losses = random.Random(dist.get_rank()), []
os.makedirs(output, exist_ok=True)
saved, resumed = f"{output}/model.safetensors", 0
if os.path.exists(saved):
    model.load_state_dict(load_file(saved))
    resumed = int(open(f"{output}/step").read())
dist.barrier()
for step in range(resumed, steps):
    batch = collate(order.sample(features, 16), PADDED_LENGTH)
    loss = replica(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if dist.get_rank() == 0 and (step + 1) % 20 == 0:
        save_file({name: value.clone() for name, value in model.state_dict().items()}, f"{saved}.new")
        os.replace(f"{saved}.new", saved)
        with open(f"{output}/step", "w") as file:
            file.write(str(step + 1))
total = torch.tensor([sum(p.double().sum() for p in model.parameters())])
machine = hardware.this_machine()
print("RESULT", json.dumps({
    "rank": dist.get_rank(), "size": dist.get_world_size(), "first": sum(losses[:5]) / 5, "last": sum(losses[-5:]) / 5,
    "sum": total.item(), "threads": torch.get_num_threads(), "quota": machine.cpu_quota.value,
    "quota_file": machine.cpu_quota.source, "uid": os.getuid(),
    "host": os.uname().nodename, "home": os.environ["HOME"], "trick": sys.argv[4], "caches": os.environ["HF_HOME"],
    "resumed": resumed,
}), flush=True)
dist.destroy_process_group()
"""


def job_of(kind: str, steps: int = STEPS, **more: Any) -> Job:
    arguments = (str(ROOT / "examples" / "demo"), str(steps), "/srv/data/output", "$(HOME) 'x'")
    return Job(
        "qa", "x:1", "train.py", arguments, kind, workers=2, cpus="1", memory="2Gi",
        volume=Volume("data", "/srv/data"), script_text=SCRIPT, **more,
    )  # fmt: skip


def write_maps(folder: Path, documents: list[dict[str, Any]]) -> None:
    for document in documents:
        if document["kind"] == "ConfigMap":
            place = folder / document["metadata"]["name"]
            place.mkdir()
            for name, text in document["data"].items():
                (place / name).write_text(text)


def results(folder: Path, pods: Pods) -> list[dict[str, Any]]:
    logs = {pod.name: (folder / f"{pod.name}.log").read_text() for pod in pods.pods}
    found = [json.loads(text) for log in logs.values() for text in re.findall(r"RESULT (\{.*\})", log)]
    assert len(found) == 2, "\n".join(f"--- {name}\n{log}" for name, log in logs.items())
    return sorted(found, key=lambda result: result["rank"])


def assert_trained(folder: Path, pods: Pods, hosts: list[str]) -> None:
    """Two ranks on two pods, one model: smaller loss, and the weights in the volume's folder."""
    found = results(folder, pods)
    assert [(result["rank"], result["size"]) for result in found] == [(0, 2), (1, 2)]
    assert sorted(result["host"] for result in found) == hosts
    assert found[0]["sum"] == found[1]["sum"]
    for result in found:
        assert result["last"] < (0.75 * result["first"] if not result["resumed"] else 2.5)
        assert (result["threads"], result["quota"], result["uid"]) == (1, 1.0, 1000)
        assert (result["home"], result["trick"]) == ("/home/job", "$(HOME) 'x'")
        assert result["caches"] == "/srv/data/huggingface"
        wanted = "/sys/fs/cgroup/cpu.max" if pods.cgroup == 2 else r"/sys/fs/cgroup/cpu/cputrain-\w+/cpu.cfs_quota_us"
        assert re.fullmatch(wanted, result["quota_file"])
    saved = load_file(pods.volume / "output" / "model.safetensors")
    assert sum(value.double().sum() for value in saved.values()).item() == pytest.approx(found[0]["sum"], rel=1e-6)


def wait_for(condition: Callable[[], bool], seconds: float = 240) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.1)


def wait(processes: list[subprocess.Popen[str]], seconds: float = 240) -> list[int]:
    return [process.wait(timeout=seconds) for process in processes]


def pytorchjob_pods(folder: Path, job: Job) -> tuple[dict[str, Any], dict[str, str]]:
    """The Worker's replica, and its container's environment with what the operator adds."""
    documents = list(map(plain, render.of_job(job)))
    write_maps(folder, documents)
    spec = documents[-1]["spec"]
    policy, worker = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]
    operators = {
        "PYTHONUNBUFFERED": "1",
        "PET_RDZV_ENDPOINT": "qa-worker-0:23456",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_RDZV_CONF": ",".join(f"{row['key']}={row['value']}" for row in policy["rdzvConf"]),
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_NPROC_PER_NODE": spec["nprocPerNode"],
    }
    return worker, kubelet.environment(worker["template"]["spec"]["containers"][0], operators, {})


NAMES: dict[str, list[str]] = {"qa-worker-0": [], "qa-worker-1": []}


def test_a_pytorchjob_of_fixed_size(tmp_path: Path) -> None:
    worker, environment = pytorchjob_pods(tmp_path, job_of("pytorchjob", rendezvous="1f"))
    container = worker["template"]["spec"]["containers"][0]
    with Pods(tmp_path) as pods:
        made = [pods.add(NAMES, name, worker["template"], container, {}) for name in NAMES]
        started = [pod.start(environment, pods.programs, tmp_path / f"{pod.name}.log") for pod in made]
        codes = wait(started)
        assert_trained(tmp_path, pods, list(NAMES))
        assert codes == [0, 0]


def test_an_elastic_pytorchjob_loses_a_worker_and_gets_it_back(tmp_path: Path) -> None:
    worker, environment = pytorchjob_pods(tmp_path, job_of("pytorchjob", elastic=(1, 2), rendezvous="1f", steps=120))
    container = worker["template"]["spec"]["containers"][0]
    with Pods(tmp_path) as pods:
        first, second = (pods.add(NAMES, name, worker["template"], container, {}) for name in NAMES)
        started = [pod.start(environment, pods.programs, tmp_path / f"{pod.name}.log") for pod in (first, second)]
        checkpoint = pods.volume / "output" / "step"
        wait_for(lambda: checkpoint.exists() and int(checkpoint.read_text() or 0) >= 20)
        second.kill()
        started[1].wait(timeout=30)
        lost_at = int(checkpoint.read_text())
        # The kubelet restarts the container, as restartPolicy says.
        started[1] = second.start(environment, pods.programs, tmp_path / f"{second.name}.log")
        codes = wait(started)
        assert_trained(tmp_path, pods, list(NAMES))
        assert codes == [0, 0]
        assert 20 <= lost_at < 120
        assert all(result["resumed"] >= 20 for result in results(tmp_path, pods))


def test_a_trainjob_in_cgroups_of_version_2(tmp_path: Path) -> None:
    documents = list(map(plain, render.of_job(job_of("trainjob"))))
    write_maps(tmp_path, documents)
    trainer = documents[-1]["spec"]["trainer"]
    template = kubelet.pods(documents)["node"]
    # The operator puts the trainer's command, variables and resources into the container called node.
    container = {
        **template["spec"]["containers"][0],
        **{key: trainer[key] for key in ("command", "args", "env")},
        "resources": trainer["resourcesPerNode"],
    }
    names = {f"qa-node-0-{number}": [f"qa-node-0-{number}.qa"] for number in range(trainer["numNodes"])}
    with Pods(tmp_path, cgroup=2) as pods:
        started = []
        for number, name in enumerate(names):
            operators = {
                "PET_NNODES": str(trainer["numNodes"]),
                "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
                "PET_NODE_RANK": str(number),
                "PET_MASTER_ADDR": "qa-node-0-0.qa",
                "PET_MASTER_PORT": "29500",
            }
            pod = pods.add(names, name, template, container, {})
            environment = kubelet.environment(container, operators, {})
            started.append(pod.start(environment, pods.programs, tmp_path / f"{name}.log"))
        codes = wait(started)
        assert_trained(tmp_path, pods, list(names))
        assert codes == [0, 0]


# What the operator puts into the Launcher's environment, and how it writes the number of ranks in the hostfile.
MPIS = {
    "openmpi": ({"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"}, " slots="),
    "intel": ({"I_MPI_HYDRA_HOST_FILE": "/etc/mpi/hostfile", "I_MPI_PERHOST": "1"}, ":"),
    "mpich": ({"HYDRA_HOST_FILE": "/etc/mpi/hostfile"}, ":"),
}


@pytest.mark.needs_program("sshd", "openssh-server")
@pytest.mark.needs_program("mpirun.openmpi", "openmpi-bin")
@pytest.mark.needs_program("mpirun.mpich", "mpich")
@pytest.mark.parametrize("mpi", MPIS)
def test_an_mpijob(tmp_path: Path, mpi: str) -> None:
    documents = list(map(plain, render.of_job(job_of("mpijob", mpi=mpi))))
    write_maps(tmp_path, documents)
    spec = documents[-1]["spec"]
    templates = kubelet.pods(documents)
    key = tmp_path / "key"
    words = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-C", "", "-f", str(key)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    public = key.with_suffix(".pub").read_text()
    secret = {"id_rsa": key.read_text(), "id_rsa.pub": public, "authorized_keys": public}
    workers = {f"qa-worker-{number}": [f"qa-worker-{number}.qa.default.svc"] for number in range(2)}
    variables, ranks = MPIS[mpi]
    lines = [f"{names[0]}{ranks}{spec['slotsPerWorker']}" for names in workers.values()]
    names = {**workers, "qa-launcher": []}
    with Pods(tmp_path) as pods:
        for name in workers:
            container = templates["Worker"]["spec"]["containers"][0]
            pod = pods.add(names, name, templates["Worker"], container, {spec["sshAuthMountPath"]: secret})
            environment = kubelet.environment(container, {"K_MPI_JOB_ROLE": "worker"}, {})
            pod.start(environment, pods.programs, tmp_path / f"{name}.log")
        container = templates["Launcher"]["spec"]["containers"][0]
        files = {spec["sshAuthMountPath"]: secret, "/etc/mpi": {"hostfile": "\n".join(lines) + "\n"}}
        launcher = pods.add(names, "qa-launcher", templates["Launcher"], container, files)
        environment = kubelet.environment(container, {"K_MPI_JOB_ROLE": "launcher", **variables}, {})
        code = launcher.start(environment, pods.programs, tmp_path / "qa-launcher.log").wait(timeout=240)
        assert_trained(tmp_path, pods, list(workers))
        assert code == 0
        log = (tmp_path / "qa-launcher.log").read_text()
        assert "they meet at qa-worker-0.qa.default.svc, port 29500: MASTER_ADDR" in log
