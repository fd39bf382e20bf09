"""One of two hosts loses its power at random moments; launched again with --resume auto, the training ends as if not.

python -m tests.checkpoints.lost_hosts --times 10
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from pathlib import Path

from tests.checkpoints.requeues import SCRIPT, undisturbed
from tests.hosts import Cluster


def result(cluster: Cluster, folder: Path, lost: tuple[int, float]) -> tuple[list[int], str]:
    """At which steps it began, and the weights at the end. `lost`: which host, so many seconds after the beginning."""
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    (folder / "hosts").write_text("box1\nbox2\n")
    options = ["-n", "2", "--ppn", "1", "--engine", "torchrun", "--hostfile", f"{folder}/hosts", "--resume", "auto"]
    words = [sys.executable, "-m", "cputrain", "launch", *options, f"{folder}/script.py", f"{folder}/out"]
    # By a machine that isn't one of the two, so that either of them can be lost.
    launcher, log, is_over = cluster.hosts[2], folder / "log", False
    while True:
        with log.open("a") as file:
            running = launcher.popen(
                "bash", "-c", '"$@" 2>&1', "bash", *words, "0.05", environ={"OMP_NUM_THREADS": "1"}
            )
            assert running.stdout
            for line in running.stdout:
                file.write(line)
                if not is_over and "BEGINS" in line:
                    host = cluster.hosts[lost[0]]
                    time.sleep(lost[1])
                    cluster.take_down(host)
                    host.end_all()
                    cluster.bring_up(host)
                    is_over = True
        text = log.read_text()
        if running.wait() == 0:
            break
        assert text.count("BEGINS") <= 4, text
    weights = set(re.findall(r"WEIGHTS (\w+)", text))
    assert len(weights) == 1 and "isn't used" not in text, text
    return sorted({int(step) for step in re.findall(r"BEGINS (\d+)", text)}), weights.pop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw, same = random.Random(asked.seed), 0
    with tempfile.TemporaryDirectory(prefix="lost-hosts-") as name:
        place = Path(name)
        with Cluster(3, place / "cluster", [place]) as cluster:
            expected = undisturbed(place)
            for number in range(asked.times):
                lost = draw.randrange(2), draw.uniform(0, 5)
                began, weights = result(cluster, place / str(number), lost)
                same += weights == expected
                verdict = "the same" if weights == expected else "OTHER"
                print(f"box{lost[0] + 1} after {lost[1]:.1f} s; began at {began}: {verdict} weights", flush=True)
    print(f"{same} of {asked.times} lost hosts left no trace")
    return 0 if same == asked.times else 1


if __name__ == "__main__":
    sys.exit(main())
