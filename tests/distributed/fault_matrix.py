"""Every fault of a rank under DDP, on one machine and on two, however the ranks were started (hours: `make soak`).

python -m tests.distributed.fault_matrix --seed 1
python -m tests.distributed.fault_matrix --only kill --only two-mpi

Machines are made of namespaces (tests/hosts.py), so this needs root. A line per case; exit code 1 if one went wrong.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from cputrain.launch import mpi
from tests.distributed.fault_training import CODE, FAULTS, LINK
from tests.hosts import ROOT, Cluster, Host
from tests.launch.programs import LAUNCH

SCRIPT = str(ROOT / "tests" / "distributed" / "fault_training.py")
RANKS = 3  # on one machine, or one and two
PLACES, ENGINES = ("one", "two"), ("agent", "ssh", "mpi")
# A shell's: 128 and the signal's number. An early end and a rank that never comes have no code that could be passed on.
CODES = {"os-exit": CODE, "kill": 128 + 9}
SECONDS = {"kill": 5.0, LINK: 15.0}
# What a rank that goes on says of the one that doesn't.
SAID = {"stop": "PeerLate: rank {}", "other-collective": "CollectivesDiffer", "other-shape": "CollectivesDiffer"}


@dataclass(frozen=True)
class Case:
    fault: str
    place: str  # one, two: how many machines
    engine: str
    culprit: int

    def __str__(self) -> str:
        return f"{self.fault} of rank {self.culprit}, {self.place}-{self.engine}"


@dataclass(frozen=True)
class Ended:
    """How a launch ended: its exit code, all that it printed, and how long after the fault."""

    code: int
    text: str
    seconds: float


def cases(seed: int) -> list[Case]:
    draw = random.Random(seed)
    found = [Case(*one, draw.randrange(RANKS)) for one in itertools.product(FAULTS, PLACES, ENGINES)]
    return [*found, *(Case(LINK, "two", engine, 1) for engine in ENGINES)]


def commands(case: Case, cluster: Cluster, folder: Path) -> list[tuple[Host, list[str]]]:
    """What is typed, and where; the first one's exit code counts."""
    first, second = cluster.hosts
    program = [SCRIPT, case.fault, str(case.culprit)]
    hostfile = folder / f"{case.place}-{case.engine}"
    hostfile.write_text("box1:1\nbox2:2\n" if case.place == "two" else "box2:3\n")
    if case.engine == "ssh":
        return [(first, [*LAUNCH, "--hostfile", str(hostfile), "--engine", "torchrun", *program])]
    if case.engine == "mpi":
        found = mpi.find({"PATH": "/usr/bin"}, "mpirun.mpich")
        assert found, "needs mpich"
        options = ["--hostfile", str(hostfile)] if case.place == "two" else ["-n", str(RANKS)]
        return [(first, [*LAUNCH, *options, "--engine", "mpi", "--mpirun", found.command, *program])]
    if case.place == "one":
        return [(first, [*LAUNCH, "-n", str(RANKS), *program])]
    # By hand on each machine, which has the same number of ranks.
    common = ["--num_machines", "2", "--main_process_ip", first.address, "--main_process_port", "29544", "-n", "4"]
    each = [[*LAUNCH, *common, "--machine_rank", str(number), *program] for number in range(2)]
    return list(zip((first, second), each, strict=True))


def run(case: Case, cluster: Cluster, folder: Path, seconds: float = 120) -> Ended:
    started = [_Started(host, words, folder) for host, words in commands(case, cluster, folder)]
    limit, down = time.monotonic() + seconds, 0.0
    while any(one.process.poll() is None for one in started) and time.monotonic() < limit:
        if case.fault == LINK and not down and any(" fault\n" in one.text for one in started):
            cluster.take_down(cluster.hosts[1])
            down = time.time()
        time.sleep(0.02)
        if started[0].process.poll() is not None and not started[0].ended:
            started[0].ended = time.time()
    hangs = any(one.process.poll() is None for one in started)
    for host in cluster.hosts if hangs else []:
        host.end_all()
    text = "".join(one.all_text() for one in started) + ("\nHANGS\n" if hangs else "")
    if down:
        cluster.bring_up(cluster.hosts[1])
    fault = re.search(rf"FAULTS {case.culprit} (\S+) fault", text)
    began = down or float(fault[1] if fault else 0)
    return Ended(started[0].process.returncode, text, started[0].ended - began)


class _Started:
    """A launch on a host, and what it has printed so far."""

    def __init__(self, host: Host, words: list[str], folder: Path) -> None:
        self.text, self.ended = "", 0.0
        self.process = subprocess.Popen(
            host.words("env", "-C", str(folder), *words),
            env={"PATH": "/usr/bin:/bin:/usr/sbin", "HOME": "/root", "LANG": "C.UTF-8"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.text += line

    def all_text(self) -> str:
        self.process.wait()
        self._reader.join(10)
        return self.text


def wrong(case: Case, ended: Ended, timed: bool = False) -> list[str]:
    """What isn't as it should be, in words."""
    text = ended.text
    found = []
    if f"FAULTS {case.culprit}" not in text or " fault\n" not in text:
        return ["the fault never happened"]
    if ended.code != CODES.get(case.fault, 1):
        found.append(f"exit code {ended.code}, not {CODES.get(case.fault, 1)}")
    for crash in ("SIGSEGV", "SIGABRT", "Segmentation fault", "Aborted", "terminate called", "HANGS", "trained"):
        found += [f"says {crash}"] if crash in text else []
    if not _is_named(case, text):
        found.append(f"rank {case.culprit} is not named")
    if timed and ended.seconds > SECONDS.get(case.fault, 60):
        found.append(f"took {ended.seconds:.1f} s")
    return found


def _is_named(case: Case, text: str) -> bool:
    """By the launch, first of all, and by the ranks that went on."""
    launch = re.findall(r"^cputrain: rank \d+ .*", text, re.MULTILINE)
    survivors = SAID.get(case.fault, "PeerDied: rank {}").format(case.culprit) in text
    if case.fault == LINK:
        elsewhere = r"PeerDied: rank [123] \(host box2|box2 is lost|machine 1 "
        return any(re.search(elsewhere, line) for line in re.findall(r"^cputrain: .*", text, re.MULTILINE))
    if case.fault.startswith("other"):  # two ranks differ, and either may be wrong: both are named
        return any(f"rank {case.culprit} " in line for line in launch) and survivors
    return bool(launch) and launch[0].startswith(f"cputrain: rank {case.culprit} ") and survivors


def left(cluster: Cluster) -> list[str]:
    try:
        cluster.check_quiet()
    except AssertionError as error:
        return [f"left running: {error}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="which rank commits each fault")
    parser.add_argument("--only", action="append", default=[], help="cases whose name has all of these words")
    parser.add_argument("--show", action="store_true", help="all that the launches print")
    arguments = parser.parse_args()
    chosen = [case for case in cases(arguments.seed) if all(word in str(case) for word in arguments.only)]
    bad = 0
    with tempfile.TemporaryDirectory() as name, Cluster(2, Path(name, "cluster"), [name]) as cluster:
        for case in chosen:
            ended = run(case, cluster, Path(name))
            problems = [*wrong(case, ended, timed=True), *left(cluster)]
            bad += bool(problems)
            print(f"{case}: {'; '.join(problems) or 'right'} ({ended.seconds:.1f} s)", flush=True)
            if problems or arguments.show:
                print(ended.text, flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} faults ended as they should")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
