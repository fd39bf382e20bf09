"""Faults injected into saving and into what was saved: none loses the last good checkpoint, none loads a bad one.

python -m tests.checkpoints.faults --times 1000 --seed 0
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from cputrain.checkpoints import folder, manifest, resume
from cputrain.checkpoints.lock import Superseded
from cputrain.checkpoints.writing import Output, Writing
from cputrain.log import logger

FILES = ("model.safetensors", "optimizer.pt", "trainer_state.json")
SIZE, KEEP = 5000, 2
OPERATIONS = 45  # of one save, on files; a few fewer, so that one isn't interrupted


def content(step: int, file: str) -> bytes:
    return random.Random(f"{step} {file}").randbytes(SIZE)


def save(output: Output, step: int, between: Callable[[], object] = lambda: None) -> bool:
    """In halves, so that a file can be cut short by what happens `between`; a thread finishes every second one."""
    with Writing(output, f"checkpoint-{step}", step, later=step % 2 == 0) as writing:
        for file in FILES:
            writing.write(lambda file=file: _write(writing.folder / file, content(step, file), between))
    writing.wait()
    return writing.saved


def _write(path: Path, data: bytes, between: Callable[[], object]) -> None:
    with open(path, "wb") as opened:
        opened.write(data[: SIZE // 2])
        opened.flush()
        between()
        opened.write(data[SIZE // 2 :])


class Case:
    """A folder with some checkpoints; `good` are the steps that were saved, and not damaged since."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.seed, self.draw = path, seed, random.Random(seed)
        self.output = Output.take(path, "run", KEEP)
        self.good: set[int] = set()
        self.steps = 0
        for _ in range(self.draw.randint(1, 3)):
            self.save()

    def save(self) -> None:
        self.steps += 1
        assert save(self.output, self.steps), "a save without a fault failed"
        self.good.add(self.steps)

    def newest(self) -> Path:
        return self.path / f"checkpoint-{self.steps}"

    def any_file(self) -> Path:
        """Of the newest checkpoint, its manifest included."""
        self.good.discard(self.steps)
        return self.newest() / self.draw.choice((*FILES, manifest.NAME))

    def in_child(self, work: Callable[[], object]) -> int:
        """The child's exit code; like a process that is killed, it cleans nothing up."""
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = int(bool(work()))
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def check(self) -> None:
        """As a restart does: what is chosen is what was written, and nothing good is newer. Then it can save again."""
        self.output = Output.take(self.path, "run", KEEP)
        last = max(self.good & {found.step for found in folder.listed(self.path)}, default=0)
        assert last == max(self.good, default=0), f"checkpoint-{max(self.good)} is gone"
        found = resume.newest(self.path, "run", lambda _: "")
        step = int(found.name.rpartition("-")[2]) if found is not None else 0
        assert step >= last, f"checkpoint-{last} is good, and checkpoint-{step} was chosen"
        if found is not None:
            assert all((found / file).read_bytes() == content(step, file) for file in FILES), f"{found} is bad"
        self.steps = max(step, self.steps) + 1
        assert save(self.output, self.steps), "after the fault nothing can be saved"
        chosen = resume.newest(self.path, "run", lambda _: "")
        assert chosen == self.newest(), f"{chosen} was chosen"


# --- What was saved --------------------------------------------------------------------------------------------------


def truncated(case: Case) -> None:
    path = case.any_file()
    os.truncate(path, case.draw.randrange(path.stat().st_size))


def flipped(case: Case) -> None:
    path = case.any_file()
    data = bytearray(path.read_bytes())
    data[case.draw.randrange(len(data))] ^= 1 << case.draw.randrange(8)
    path.write_bytes(data)


def missing(case: Case) -> None:
    case.any_file().unlink()


def clock_set_back(case: Case) -> None:
    """Whatever sorts by time takes the newest for the oldest."""
    for path in (case.newest(), *case.newest().iterdir()):
        os.utime(path, (10**8, 10**8))
    case.save()
    for path in (case.newest(), *case.newest().iterdir()):
        os.utime(path, (0, 0))


# --- Saving ----------------------------------------------------------------------------------------------------------


def killed(case: Case, again: bool = False) -> None:
    """Before one of its operations on files, or in a file; each in turn. `again`: of a step that is there already."""
    step = case.steps if again else case.steps + 1
    moment = 7 * (case.seed // len(FAULTS)) % OPERATIONS

    def work() -> bool:
        left = [moment]

        def count(*_: object) -> None:
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)

        sys.addaudithook(lambda event, _: count() if event.startswith(("open", "os.", "shutil.")) else None)
        return save(case.output, step, count)

    if case.in_child(work) == 1:
        case.steps = max(step, case.steps)
        case.good.add(step)


def killed_again(case: Case) -> None:
    killed(case, again=True)


def disk_full(case: Case) -> None:
    """At a random place, by what the kernel allows a file to have."""
    limit = case.draw.randrange(SIZE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        assert not save(case.output, case.steps + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(case.path.glob(f"_cputrain/{folder.STAGING}/*")), "what couldn't be saved lies there"


def small_disk(case: Case) -> None:
    """A tmpfs of its own, filled up until a save doesn't fit."""
    if os.path.ismount(case.path):
        ballast = case.path / "ballast"
        ballast.write_bytes(bytes(shutil.disk_usage(case.path).free - case.draw.randrange(2 * SIZE)))
        assert not save(case.output, case.steps + 1)
        ballast.unlink()


def read_only(case: Case) -> None:
    """As root a read-only folder can be written: the calls fail in its place."""
    stock = {name: getattr(os, name) for name in ("mkdir", "rename", "replace")}

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    refused = case.draw.choice(list(stock))
    setattr(os, refused, fails)
    try:
        assert refused == "replace" or not save(case.output, case.steps + 1)
    finally:
        setattr(os, refused, stock[refused])


def two_writers(case: Case) -> None:
    """The second begins in the middle of the first one's save, or between two of them."""
    files, moment, others = [0], case.draw.randrange(len(FILES) + 1), []

    def second() -> None:
        files[0] += 1
        if files[0] == moment:
            others.append(Output.take(case.path, "run", KEEP))

    if moment == 0:
        others.append(Output.take(case.path, "run", KEEP))
    try:
        save(case.output, case.steps + 1, second)
    except Superseded:
        case.output = others[0]
        case.save()
    else:
        raise AssertionError("the older writer went on")


FAULTS = (
    truncated,
    flipped,
    missing,
    clock_set_back,
    killed,
    killed_again,
    disk_full,
    small_disk,
    read_only,
    two_writers,
)


def inject(seed: int) -> str:
    """One case in a folder of its own; returns the fault's name."""
    fault = FAULTS[seed % len(FAULTS)]
    path = Path(tempfile.mkdtemp(prefix="faults."))
    mounted = fault is small_disk and os.geteuid() == 0 and shutil.which("mount")
    if mounted:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", path], check=True)
    try:
        case = Case(path, seed)
        fault(case)
        case.check()
    except AssertionError as error:
        raise AssertionError(f"{fault.__name__}, seed {seed}: {error}") from error
    finally:
        if mounted:
            subprocess.run(["umount", path], check=True)
        shutil.rmtree(path)
    return fault.__name__


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logger.setLevel("CRITICAL")
    done = Counter(inject(seed) for seed in range(arguments.seed, arguments.seed + arguments.times))
    for name, times in done.items():
        print(f"{times:6,} {name.replace('_', ' ')}")
    print(f"{done.total():6,} faults: none lost the last good checkpoint, none loaded a bad one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
