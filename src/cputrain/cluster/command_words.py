"""A container's command as its process will see it, word by word, and the programs that it may begin with."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cputrain.cluster.containers import Container
from cputrain.cluster.manifest import Where, items

SHELLS = ("sh", "bash", "dash", "ash", "zsh")
COUNT = re.compile(r"[1-9]\d{0,5}", re.ASCII)
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
MPIRUN = ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.openmpi", "mpirun.mpich", "orterun", "prterun", "horovodrun")
# All that start ranks; torchtune's `tune run` is torchrun with other words.
LAUNCHERS = (
    *TORCHRUN, *MPIRUN, "cputrain", "accelerate", "accelerate.commands.launch", "deepspeed",
    "deepspeed.launcher.runner", "tune",
)  # fmt: skip
# Words that end a command within a shell's line.
SEPARATORS = (";", "&", "&&", "|", "||", "(", ")")
_PYTHON = re.compile(
    r"(?:^|[\s/;&|])(?:python[\d.]*|torchrun|accelerate|deepspeed|cputrain|tune)(?=\s|$)|\.py(?=[\s;'\"]|$)"
)


@dataclass(frozen=True)
class Word:
    """One word of a command, and the item of the manifest that holds it."""

    text: str
    key: str
    row: int

    @property
    def name(self) -> str:
        return self.text.rsplit("/", 1)[-1]

    @property
    def is_ours(self) -> bool:
        return self.name == "cputrain" or self.text.startswith("cputrain.")

    @property
    def is_interpreter(self) -> bool:
        return bool(re.fullmatch(r"python[\d.]*", self.name))

    @property
    def is_python(self) -> bool:
        return self.is_interpreter or self.name.endswith(".py")


def words(container: Container) -> list[Word]:
    """The words of command and args; the line that a shell is given with -c is taken apart."""
    made: list[Word] = []
    for key in ("command", "args"):
        for row, text in enumerate(items(container.value.get(key))):
            if isinstance(text, str):
                parts = _parts(text) if _is_for_a_shell(made) else [text]
                made += [Word(part, key, row) for part in parts]
    return made


def place(container: Container, word: Word) -> Where:
    return (*container.where, word.key, word.row)


def runs_python(command: Sequence[str]) -> bool:
    """Whether a Python program is among the words, also within the line of a shell."""
    return any(_PYTHON.search(text) for text in command)


def is_ours(container: Container) -> bool:
    """Whether cputrain starts the script, here or in the runtime that this is laid over."""
    return any(Word(text, "", 0).is_ours for text in container.ranks.command) or any(
        word.is_ours for word in words(container)
    )


def option(command: Sequence[Word], *names: str) -> tuple[str, Word] | None:
    """The value of an option, after `=` or as the next word, and the word that it begins with."""
    known = {name.replace("-", "_") for name in names}
    for number, word in enumerate(command):
        name, equals, value = word.text.partition("=")
        if name.replace("-", "_") in known:
            following = command[number + 1].text if number + 1 < len(command) else ""
            return (value if equals else following), word
    return None


def calls(command: Sequence[Word], programs: Sequence[str]) -> Iterator[list[Word]]:
    """For each time that one of the programs is called: the words after it that are its own options and their values.

    What follows the script, or another program, is theirs.
    """
    for number, word in enumerate(command):
        if word.name in programs:
            own: list[Word] = []
            for other in command[number + 1 :]:
                if other.text in (*SEPARATORS, "--", "-m") or other.is_python or other.name in LAUNCHERS:
                    break
                own.append(other)
            yield own


def processes_of_torchrun(container: Container) -> tuple[str, Word] | None:
    """`--nproc_per_node`, which torchrun heeds before the operator's variable."""
    for own in calls(words(container), TORCHRUN):
        return option(own, "--nproc_per_node")
    return None


def counts_by_torchrun(container: Container) -> bool:
    """Whether torchrun starts the ranks, and takes their number from the operator's variable."""
    said = processes_of_torchrun(container)
    # A TrainJob may leave the command to its runtime.
    programs = {word.name for word in words(container)} | {text.rsplit("/", 1)[-1] for text in container.ranks.command}
    return not programs.isdisjoint(TORCHRUN) and not (said and COUNT.fullmatch(said[0]))


def _is_for_a_shell(before: list[Word]) -> bool:
    if not before or not re.fullmatch(r"-[a-z]*c", before[-1].text):
        return False
    return any(word.name in SHELLS for word in before[:-1])


def _parts(line: str) -> list[str]:
    splitter = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars=True)
    splitter.whitespace_split = True
    try:
        return list(splitter)
    except ValueError:  # a quote that is never closed
        return line.split()
