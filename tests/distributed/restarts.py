"""Two ranks that are started anew again and again after a failure: every start trains over shared memory.

python -m tests.distributed.restarts --restarts 100

As a script of ranks (`cputrain launch -n 2 --max_restarts N tests/distributed/restarts.py FOLDER N`) it is what fails:
in start k rank k % 2 ends by itself or is killed, and the last start trains to its end.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cputrain import blame
from cputrain.formats import choose
from tests.launch.programs import launch


def train(folder: Path, restarts: int) -> None:
    start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    dist.init_process_group("ccl", timeout=timedelta(seconds=60))
    choose.choose("auto")  # what rank 0 chose in this start, through the same store
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
    for _ in range(3):
        model(torch.ones(2, 10)).sum().backward()
    numbers = torch.full((10,), float(start))
    dist.all_reduce(numbers)
    assert (numbers == 2 * start).all(), numbers
    blame.note_step(start + 1)  # each start gets further, so that none has to wait
    (folder / f"start-{start}-rank-{rank}").write_text(dist.group.WORLD.transport.name)
    if start < restarts and rank == start % 2:
        os.kill(os.getpid(), signal.SIGKILL) if start % 4 < 2 else os._exit(3)
    model(torch.ones(2, 10)).sum().backward()
    dist.destroy_process_group()


def transports(restarts: int) -> list[str]:
    """What each rank of each start used, "nothing" where it didn't come up."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ("-n", "2", "--max_restarts", str(restarts), str(Path(__file__)), name, str(restarts))
        answer = launch(*words, folder=folder, seconds=60 + 60 * restarts, PYTHONPATH=str(Path(__file__).parents[2]))
        assert answer.returncode == 0, answer.stdout + answer.stderr
        files = [folder / f"start-{start}-rank-{rank}" for start in range(restarts + 1) for rank in range(2)]
        return [file.read_text() if file.exists() else "nothing" for file in files]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--restarts", type=int, default=100)
    restarts = parser.parse_args().restarts
    found = transports(restarts)
    good = sum(found[2 * start : 2 * start + 2] == ["shm", "shm"] for start in range(1, restarts + 1))
    print(f"{good} of {restarts} restarts on shared memory")
    return 0 if good == restarts else 1


if __name__ == "__main__":
    if "TORCHELASTIC_RESTART_COUNT" in os.environ:
        train(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        sys.exit(main())
