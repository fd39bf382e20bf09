"""A job on a real Slurm is told that its time is up, at random moments: queued again, it ends as if nothing had been.

python -m tests.checkpoints.requeues --times 10

Two nodes of one rank each, with `cputrain.Checkpoints`; Slurm's signal before the time limit is sent by hand, since
Slurm counts limits in minutes (`--time-limit`: one run with a real one).
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from pathlib import Path

from cputrain.cluster import slurm
from cputrain.cluster.slurm import SlurmJob
from tests.cluster.slurm_cluster import Slurm, running
from tests.launch.programs import launch

STEPS = 120  # 240 samples, 2 ranks, batches of 2, 2 epochs
SCRIPT = """
import hashlib, sys, time
import torch
import torch.distributed as dist
import cputrain, cputrain.distributed
from torch.utils.data import DataLoader, DistributedSampler

folder, pause = sys.argv[1], float(sys.argv[2])
dist.init_process_group("ccl")
torch.manual_seed(dist.get_rank())
layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 8))
model = torch.nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.randn(240, 8, generator=torch.Generator().manual_seed(3))
sampler = DistributedSampler(data)
checkpoints = cputrain.Checkpoints(folder, model=model, optimizer=optimizer, every=10)
print("BEGINS", checkpoints.steps, flush=True)
for epoch in checkpoints.epochs(2):
    sampler.set_epoch(epoch)
    for batch in checkpoints.batches(DataLoader(data, 2, sampler=sampler)):
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause)
        checkpoints.step()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("WEIGHTS", hashlib.sha256(weights).hexdigest(), flush=True)
"""


def undisturbed(folder: Path) -> str:
    """The weights at the end of two ranks on this machine."""
    (folder / "script.py").write_text(SCRIPT)
    ended = launch("-n", "2", "script.py", "undisturbed", "0", folder=folder, OMP_NUM_THREADS="1")
    assert ended.returncode == 0, ended.stderr
    return re.findall(r"WEIGHTS (\w+)", ended.stdout)[0]


def result(cluster: Slurm, name: str, signals: list[float], limit: str = "10:00") -> tuple[list[int], str]:
    """At which steps the job began each time, and the weights at the end. `signals`: seconds after each beginning."""
    pause = "0.1" if signals else "0" if limit == "10:00" else "1"
    words = (str(cluster.folder / f"{name}-out"), pause)
    (cluster.folder / f"{name}.py").write_text(SCRIPT)
    job = SlurmJob(name, str(cluster.folder / f"{name}.py"), words, nodes=2, cpus=1, time=limit)
    number = cluster.submitted(slurm.to_text(job))
    log = cluster.folder / f"{name}-{number}.log"
    for start, seconds in enumerate(signals):
        cluster.until(lambda start=start: log.exists() and log.read_text().count("BEGINS") >= 2 * (start + 1), log)  # type: ignore[misc]
        time.sleep(seconds)
        cluster.run("scancel", "--batch", "--signal=USR1", number)
        cluster.until(lambda start=start: log.read_text().count("queued again") > start, log)  # type: ignore[misc]
    state = cluster.until_over(number)
    text = log.read_text()
    assert state == "COMPLETED", text
    assert "isn't used" not in text and len(set(re.findall(r"WEIGHTS (\w+)", text))) == 1, text
    return [int(step) for step in re.findall(r"BEGINS (\d+)", text)][::2], re.findall(r"WEIGHTS (\w+)", text)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-limit", action="store_true", help="one more, which runs into a limit of two minutes")
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    with tempfile.TemporaryDirectory(prefix="requeues-") as folder, running(Path(folder)) as cluster:
        expected, same = undisturbed(Path(folder)), 0
        for number in range(asked.times):
            began, weights = result(cluster, f"again-{number}", [draw.uniform(0, 8)])
            same += weights == expected and began[1] > 0
            print(f"began at {began}: {'the same' if weights == expected else 'OTHER'} weights", flush=True)
        if asked.time_limit:
            began, weights = result(cluster, "limit", [], "2:00")
            print(f"with a real limit it began at {began}: {'the same' if weights == expected else 'OTHER'} weights")
            same -= not (weights == expected and len(began) > 1)
    print(f"{same} of {asked.times} jobs that were queued again ended with the undisturbed one's weights")
    return 0 if same == asked.times else 1


if __name__ == "__main__":
    sys.exit(main())
