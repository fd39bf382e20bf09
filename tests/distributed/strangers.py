"""Two ranks train while a scanner comes to every port of theirs, from start to end; rank 1 is a second late.

    python -m tests.distributed.strangers --runs 50

Each run is of one of the ways below, in turn. Ends with code 1 if a run fails, and says which.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.launch.programs import CLEAN, LAUNCH, free_port

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, time
import torch, torch.distributed as dist
import cputrain.distributed
from cputrain.distributed import monitor

rank, report = int(os.environ["RANK"]), monitor._report
def report_late(*arguments):
    time.sleep(1)
    return report(*arguments)
monitor._report = report_late  # the port of the ranks' monitor is open only until all have come
time.sleep(rank)
dist.init_process_group("ccl")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(40):
    loss = model(torch.full((4, 256), 1.0 + rank)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    time.sleep(0.05)
assert losses[-1] < losses[0]
total = torch.stack([parameter.sum() for parameter in model.parameters()]).double().sum()
print(f"TRAINED {rank} {total.item()} {dist.group.WORLD.transport.name}", flush=True)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Way:
    """How two ranks are started, and by what their data travels."""

    launches: tuple[tuple[str, ...], ...]
    transport: str
    token: str | None = None
    least_ports: int = 2


# By hand on "two machines", which are both this one: a roll call, links between the agents, and torch's own store.
_MACHINES = tuple(
    ("-n", "2", "--num_machines", "2", "--machine_rank", str(number), "--main_process_ip", "127.0.0.1")
    for number in range(2)
)
WAYS = {
    "shared memory": Way((("-n", "2"),), "auto"),
    "gloo": Way((("-n", "2"),), "gloo", least_ports=3),
    "machines": Way(_MACHINES, "gloo", "a token by hand", least_ports=4),
}


@dataclass(frozen=True)
class Outcome:
    codes: list[int]
    text: str
    came: dict[str, int]

    @property
    def sums(self) -> list[str]:
        return [line.split("TRAINED ")[1].split()[1] for line in self.text.splitlines() if "TRAINED " in line]

    def faults(self, way: Way) -> list[str]:
        found = [f"exit codes {self.codes}"] if any(self.codes) else []
        if len(self.sums) != 2 or len(set(self.sums)) != 1:
            found.append(f"the ranks' sums of weights are {self.sums}")
        if "Traceback" in self.text:
            found.append("there is a traceback")
        if len(self.came) < way.least_ports:
            found.append(f"the scanner saw {len(self.came)} ports only: {sorted(self.came)}")
        elsewhere = [name for name in self.came if name.startswith("tcp") and not name.startswith("tcp 127.0.0.1:")]
        if elsewhere:
            found.append(f"not bound to loopback: {elsewhere}")
        return found


def run(way: Way, folder: Path, seconds: float = 120) -> Outcome:
    (folder / "train.py").write_text(SCRIPT)
    environ = {**CLEAN, "HOME": str(folder), "CPUTRAIN_CCL_TRANSPORT": way.transport}
    if way.token:
        environ["CPUTRAIN_TOKEN"] = way.token
    port = ("--main_process_port", str(free_port())) if len(way.launches) > 1 else ()
    with ExitStack() as stack:
        output = stack.enter_context(open(folder / "output", "w+"))
        launches: list[subprocess.Popen[bytes]] = []
        for words in way.launches:
            command = [*LAUNCH, *words, *port, "train.py"]
            launches.append(subprocess.Popen(command, cwd=folder, env=environ, stdout=output, stderr=output))
            if words is way.launches[0]:
                scanner = _scanner(launches[0].pid if len(way.launches) == 1 else os.getpid())
                time.sleep(1 if len(way.launches) > 1 else 0)
        codes = [_ended(one, seconds) for one in launches]
        scanner.terminate()
        came = json.loads(scanner.communicate()[0])
        output.seek(0)
        return Outcome(codes, output.read(), came)


def _scanner(root: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.distributed.scanner", str(root)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def _ended(launch: subprocess.Popen[bytes], seconds: float) -> int:
    try:
        return launch.wait(seconds)
    except subprocess.TimeoutExpired:
        launch.terminate()
        launch.wait()
        return -1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--way", choices=WAYS, help="only this one")
    arguments = parser.parse_args()
    names = [arguments.way] if arguments.way else list(WAYS)
    failed = 0
    for number in range(arguments.runs):
        name = names[number % len(names)]
        with tempfile.TemporaryDirectory() as place:
            outcome = run(WAYS[name], Path(place))
        wrong = outcome.faults(WAYS[name])
        failed += bool(wrong)
        visits = f"{sum(outcome.came.values())} visits to {len(outcome.came)} ports"
        print(f"run {number}, {name}, {visits}: {'; '.join(wrong) or 'trained on'}", flush=True)
        if wrong:
            print(outcome.text, flush=True)
    print(f"{arguments.runs - failed} of {arguments.runs} trained on")
    sys.exit(1 if failed else 0)
