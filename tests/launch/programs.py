"""Small scripts for ranks, and how tests launch them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

LAUNCH = [sys.executable, "-m", "cputrain", "launch"]
# What torchrun, mpirun or a user's shell left in the tests' own environment must not reach the launch.
_PREFIXES = ("OMP_", "ACCELERATE_", "CPUTRAIN_", "XDG_", "HF_", "PMI_", "OMPI_", "PET_", "SLURM_", "MASTER_")
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(_PREFIXES) and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
}

SHOW = """
import json, os, socket, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "SPECIAL")
found = {name: os.environ.get(name) for name in names}
found.update(cpus=sorted(os.sched_getaffinity(0)), argv=sys.argv[1:], host=socket.gethostname())
sys.stdout.write(f"SHOWN {json.dumps(found)}\\n")  # in one piece: mpirun mixes what isn't
"""
SUM = """
import sys, torch, torch.distributed as dist
import cputrain.distributed
dist.init_process_group("ccl")
numbers = torch.full((1000,), 2.0 ** dist.get_rank())
dist.all_reduce(numbers)
sys.stdout.write(f"SUM {numbers.min().item()} {numbers.max().item()} {dist.group.WORLD.transport.name}\\n")
dist.destroy_process_group()
"""
# Rank 1 fails as its argument says; rank 0 would wait, and has a child that would outlive it.
FAIL = """
import os, subprocess, sys, time
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    if sys.argv[1] == "raise":
        raise KeyError("rank 1's trouble")
    sys.stderr.write("rank 1's last words\\n")
    os.kill(os.getpid(), 9) if sys.argv[1] == "kill" else sys.exit(int(sys.argv[1]))
subprocess.Popen(["sleep", "4321"], start_new_session=True)
time.sleep(300)  # longer than `launch` below waits
"""
WAIT = """
import os, subprocess, time
subprocess.Popen(["sleep", "4322"], start_new_session=True)
print("WAITING", flush=True)
time.sleep(60)
"""


def write(folder: Path, **programs: str) -> None:
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)


def launch(
    *arguments: str | Path, folder: Path, seconds: float = 100, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCH, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**CLEAN, "HOME": str(folder), **environ},
        timeout=seconds,
        check=False,
    )


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def shown(output: str) -> list[dict]:
    """What each rank saw, by rank."""
    found = [json.loads(text) for text in re.findall(r"(\{\"RANK\"[^{}]*\})", output)]
    return sorted(found, key=lambda one: int(one["RANK"] or 0))
