"""Pods of a rendered PyTorchJob are killed or preempted at random moments: the training ends as if nothing had been.

python -m tests.checkpoints.lost_pods --times 10

Each pod is a machine made of namespaces (tests/cluster/pods.py). What the operator does is done here: a pod that ends
with 128 or more is started anew, with 1 to 127 the job has failed.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from cputrain.cluster.job import Job, Volume
from tests.checkpoints.requeues import SCRIPT, undisturbed
from tests.cluster.pods import Pod, Pods
from tests.cluster.test_rendered_job_trains import NAMES, pytorchjob_pods


class Loss:
    """What happens to one pod, so long after the training has begun there."""

    def __init__(self, pod: int, number: signal.Signals, seconds: float) -> None:
        self.pod, self.number, self.seconds = pod, number, seconds

    def __str__(self) -> str:
        return f"{list(NAMES)[self.pod]} gets {self.number.name} after {self.seconds:.1f} s"

    def happens(self, pod: Pod, process: subprocess.Popen[str]) -> None:
        time.sleep(self.seconds)
        if self.number == signal.SIGKILL:
            pod.kill()
        else:
            [container] = psutil.Process(process.pid).children()  # of nsenter; the kubelet tells process 1
            container.send_signal(self.number)


def result(folder: Path, loss: Loss) -> tuple[list[int], str]:
    """At which steps rank 0 began, and the weights at the end."""
    job = Job(
        "qa", "x:1", "train.py", ("/srv/data/out", "0.05"), workers=2, cpus="1", memory="2Gi",
        volume=Volume("data", "/srv/data"), script_text=SCRIPT, rendezvous="1f",
    )  # fmt: skip
    worker, environment = pytorchjob_pods(folder, job)
    assert worker["restartPolicy"] == "ExitCode"
    container = worker["template"]["spec"]["containers"][0]
    log = folder / "all.log"
    log.touch()
    with Pods(folder) as pods:
        made = [pods.add(NAMES, name, worker["template"], container, {}) for name in NAMES]
        files = [folder / f"{pod.name}.log" for pod in made]
        running = [pod.start(environment, pods.programs, file) for pod, file in zip(made, files, strict=True)]
        limit = time.monotonic() + 240
        codes: list[int | None] = [None, None]
        is_over = False
        while codes != [0, 0]:
            assert time.monotonic() < limit, _text([log, *files])
            if not is_over and "BEGINS" in files[loss.pod].read_text():
                loss.happens(made[loss.pod], running[loss.pod])
                is_over = True
            codes = [process.poll() for process in running]
            for number, code in enumerate(codes):
                if code:
                    with log.open("a") as file:
                        file.write(files[number].read_text())
                    assert code < 0 or code > 127, _text([log, *files])
                    running[number] = made[number].start(environment, pods.programs, files[number])
            time.sleep(0.1)
    text = _text([log, *files])
    weights = set(re.findall(r"WEIGHTS (\w+)", text))
    assert len(weights) == 1 and "isn't used" not in text, text
    return sorted({int(step) for step in re.findall(r"BEGINS (\d+)", text)}), weights.pop()


def _text(files: list[Path]) -> str:
    return "\n".join(file.read_text() for file in files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw, same = random.Random(asked.seed), 0
    with tempfile.TemporaryDirectory(prefix="lost-pods-") as place:
        expected = undisturbed(Path(place))
        for number in range(asked.times):
            folder = Path(place, str(number))
            folder.mkdir()
            loss = Loss(draw.randrange(2), draw.choice([signal.SIGKILL, signal.SIGTERM]), draw.uniform(0, 5))
            began, weights = result(folder, loss)
            same += weights == expected
            print(f"{loss}; began at {began}: {'the same' if weights == expected else 'OTHER'} weights", flush=True)
    print(f"{same} of {asked.times} lost pods left no trace")
    return 0 if same == asked.times else 1


if __name__ == "__main__":
    sys.exit(main())
