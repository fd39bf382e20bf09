"""Two ranks that print 10 MB each to where nothing can be written: both must end, and the exit code must say so.

python -m tests.launch.lost_output --times 20        # needs root, for small disks in a mount namespace of their own
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cputrain.launch import output
from tests.launch import programs
from tests.launch.programs import CLEAN, LAUNCH

# 10 MB on each stream, and a file that proves that the rank came to its end. An argument is its exit code.
PRINT = """
import os, sys
for _ in range(10_000):
    print("x" * 1000)
    print("y" * 1000, file=sys.stderr)
open(f"ended-{os.environ.get('RANK', 0)}", "w").close()
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 and os.environ.get("RANK") == "1" else 0)
"""
# Around the launch, in sh. `$disk` is a folder on a disk of 64 KB.
PLACES = {
    "stdout-full-disk": 'exec "$@" > $disk/train.log',
    "stdout-full-device": 'exec "$@" > /dev/full',
    "stdout-closed": 'exec "$@" >&-',
    "stdout-read-only": 'exec "$@" 1< /dev/null',
    "stdout-unread": '{ "$@"; echo $? > code; } | sleep 0; exit $(cat code)',
    "stderr-full-device": 'exec "$@" 2> /dev/full',
    "both-full-disk": 'exec "$@" > $disk/train.log 2>&1',
    "both-closed": 'exec "$@" >&- 2>&-',
    "log_dir-full-disk": 'exec "$@"',
    "log_dir-read-only": 'mount -o remount,ro tmpfs $disk; exec "$@"',
}
ENGINES = {
    "agent": [],
    "node": ["--engine", "torchrun", "--hostfile", "hosts"],
    "mpich": ["--engine", "mpi", "--mpirun", "mpirun.mpich"],
    "openmpi": ["--engine", "mpi", "--mpirun", "mpirun.openmpi"],
}
PROGRAMS = {"mpich": ("mpirun.mpich", "mpich"), "openmpi": ("mpirun.openmpi", "openmpi-bin")}
_DISK = 'disk=$1; shift; mount -t tmpfs -o size=64k tmpfs "$disk"; '


@dataclass(frozen=True)
class Ended:
    code: int
    ranks: list[str]
    stderr: bytes

    @property
    def sentences(self) -> int:
        """Counted wherever they stand: an mpirun joins the ranks' streams byte by byte, also within a line."""
        return self.stderr.count(b"cputrain: output is lost: ")

    def is_right(self, place: str, code: int) -> bool:
        """All ranks came to their end, and where stderr can be read, it says for each output once that it is lost."""
        number = 2 if place.startswith("log_dir") else 1  # a file for each rank
        said = place.startswith(("stderr", "both")) or self.sentences == number
        return self.code == code and self.ranks == ["ended-0", "ended-1"] and said and b"Traceback" not in self.stderr


def run(place: str, engine: str, folder: Path, code: int = 0, seconds: float = 120) -> Ended:
    programs.write(folder, show=PRINT)
    (folder / "hosts").write_text("localhost:2\n")
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    options = ["--log_dir", str(disk)] if place.startswith("log_dir") else []
    words = [*LAUNCH, "-n", "2", *ENGINES[engine], *options, "show.py", str(code)]
    answer = subprocess.run(
        ["unshare", "--mount", "sh", "-c", _DISK + PLACES[place], "sh", str(disk), *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={**CLEAN, "HOME": str(folder)},
        timeout=seconds,
        check=False,
    )
    return Ended(answer.returncode, sorted(path.name for path in folder.glob("ended-*")), answer.stderr)


def sample(seed: int, number: int = 5) -> list[tuple[str, str]]:
    """Some places, each with an engine that is drawn, too."""
    drawn = random.Random(seed)
    return [(place, drawn.choice(list(ENGINES))) for place in drawn.sample(list(PLACES), number)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="of each place with each engine")
    parser.add_argument("--place", choices=PLACES, action="append")
    parser.add_argument("--engine", choices=ENGINES, action="append")
    arguments = parser.parse_args()
    failed = False
    for place in arguments.place or PLACES:
        for engine in arguments.engine or ENGINES:
            if shutil.which(PROGRAMS.get(engine, ("sh",))[0]) is None:
                print(f"{place}, {engine}: not tried, {PROGRAMS[engine][0]} is missing", flush=True)
                continue
            right = sum(_once(place, engine) for _ in range(arguments.times))
            print(f"{place}, {engine}: {right} of {arguments.times}", flush=True)
            failed |= right < arguments.times
    raise SystemExit(failed)


def _once(place: str, engine: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            ended = run(place, engine, Path(folder))
        except subprocess.TimeoutExpired:
            print(f"{place}, {engine}: hangs", flush=True)
            return False
    right = ended.is_right(place, output.LOST)
    if not right:
        print(f"{place}, {engine}: {ended.code}, {ended.ranks}, {ended.stderr[-2000:].decode()}", flush=True)
    return right


if __name__ == "__main__":
    main()
