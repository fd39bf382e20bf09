"""torch's own tests of a backend, by gloo and by ccl in gloo's place: what gloo passes, ccl must pass (`make soak`).

python -m tests.distributed.torchs_suite --ranks 2 3 4
python -m tests.distributed.torchs_suite --ranks 2 --only test_all_reduce_sum
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.hosts import ROOT

# Tests of gloo's wording, each with the words that it asks for. ccl raises, too: "rank 1 (host …) is late".
WORDING = {
    "test_barrier_timeout_full_group": "Timed out, closed or timeout, between two blanks",
    "test_barrier_timeout_global": "Timed out, closed or timeout, between two blanks",
    "test_monitored_barrier_gloo": "Rank 1 failed to pass monitoredBarrier",
    "test_monitored_barrier_gloo_rank_0_timeout": "Rank 0 timed out in monitoredBarrier",
    "test_monitored_barrier_gloo_subgroup": "Rank 1 failed to pass monitoredBarrier",
}
_SECONDS = "120"  # for one test


@dataclass(frozen=True)
class Outcome:
    outcome: str  # passed, skipped or failed
    words: str


def run(backend: str, ranks: int, names: list[str]) -> dict[str, Outcome]:
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "errors"), "w+") as errors:
        environ = {
            **os.environ,
            "BACKEND": backend,
            "WORLD_SIZE": str(ranks),
            "INIT_METHOD": f"file://{folder}/meeting",
            "OMP_NUM_THREADS": "1",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": _SECONDS,
        }
        words = [sys.executable, "-m", "tests.distributed.torchs_tests", *names]
        ended = subprocess.run(words, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True)
        errors.seek(0)
        assert ended.returncode == 0, errors.read()
    lines = map(json.loads, ended.stdout.splitlines())
    return {line["name"]: Outcome(line["outcome"], line["words"]) for line in lines}


def worse(gloo: dict[str, Outcome], ccl: dict[str, Outcome]) -> dict[str, Outcome]:
    """What gloo passes and ccl doesn't, but for tests of wording."""
    missing = Outcome("missing", "ccl never came to this test")
    return {
        name: ccl.get(name, missing)
        for name, one in gloo.items()
        if one.outcome == "passed" and name not in WORDING and ccl.get(name, missing).outcome != "passed"
    }


def counts(found: dict[str, Outcome]) -> str:
    outcomes = [one.outcome for one in found.values()]
    return ", ".join(f"{outcomes.count(word)} {word}" for word in ("passed", "failed", "skipped"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--only", action="append", default=[], help="this test, and no other but those given as well")
    arguments = parser.parse_args()
    bad = 0
    for ranks in arguments.ranks:
        gloo, ccl = (run(backend, ranks, arguments.only) for backend in ("gloo", "ccl"))
        problems = worse(gloo, ccl)
        bad += len(problems)
        print(
            f"{ranks} ranks: gloo {counts(gloo)}; ccl {counts(ccl)}; {len(problems)} that only gloo passes", flush=True
        )
        for name, one in problems.items():
            print(f"  {name}: {one.outcome}\n{one.words}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
