"""What will hurt in a container's command: ranks that train alone, bf16 where there is none, tokens in clear."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from cputrain.cluster import secrets_in_clear
from cputrain.cluster.job_containers import Container
from cputrain.cluster.loose_values import items, mapping
from cputrain.cluster.schema import Problem, Where

_FEATURE = "feature.node.kubernetes.io/cpu-cpuid.AMXBF16"
_SHELLS = ("sh", "bash", "dash", "ash", "zsh")
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_MPIRUN = ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.openmpi", "mpirun.mpich", "orterun", "prterun", "horovodrun")
_LAUNCHERS = (
    *_TORCHRUN, *_MPIRUN, "cputrain", "accelerate", "accelerate.commands.launch", "deepspeed",
    "deepspeed.launcher.runner",
)  # fmt: skip
# Among them those that start ranks in other pods by ssh, as a Launcher must.
_REMOTE = (*_MPIRUN, "cputrain", "deepspeed", "deepspeed.launcher.runner")


@dataclass(frozen=True)
class Word:
    """One word of a command as its process will see it, and the item of the manifest that holds it."""

    text: str
    key: str
    row: int

    @property
    def name(self) -> str:
        return self.text.rsplit("/", 1)[-1]


def problems(container: Container) -> Iterator[Problem]:
    yield from _tokens(container)
    if not container.trains:
        return
    command = words(container)
    if "Launcher" in container.where:
        yield from _launcher(container, command)
    elif container.ranks.pods > 1 and "mpiReplicaSpecs" not in container.where:
        yield from _alone(container, command)
    yield from _bf16(container, command)


def words(container: Container) -> list[Word]:
    """The words of command and args; the line that a shell is given with -c is taken apart."""
    made: list[Word] = []
    for key in ("command", "args"):
        for row, text in enumerate(items(container.value.get(key))):
            if isinstance(text, str):
                parts = _parts(text) if _is_for_a_shell(made) else [text]
                made += [Word(part, key, row) for part in parts]
    return made


def _is_for_a_shell(before: list[Word]) -> bool:
    if not before or not re.fullmatch(r"-[a-z]*c", before[-1].text):
        return False
    return any(word.name in _SHELLS for word in before[:-1])


def _parts(line: str) -> list[str]:
    splitter = shlex.shlex(line, posix=True, punctuation_chars=True)
    splitter.whitespace_split = True
    try:
        return list(splitter)
    except ValueError:  # a quote that is never closed
        return line.split()


def option(command: list[Word], *names: str) -> tuple[str, Word] | None:
    """The value of an option, after `=` or as the next word, and the word that it begins with."""
    for number, word in enumerate(command):
        name, equals, value = word.text.partition("=")
        if name.replace("-", "_") in {known.replace("-", "_") for known in names}:
            following = command[number + 1].text if number + 1 < len(command) else ""
            return (value if equals else following), word
    return None


def processes_of_torchrun(container: Container) -> str | None:
    """`--nproc_per_node`, which torchrun heeds before the operator's variable."""
    command = words(container)
    found = option(command, "--nproc_per_node") if any(word.name in _TORCHRUN for word in command) else None
    return found[0] if found else None


def _place(container: Container, word: Word) -> Where:
    return (*container.where, word.key, word.row)


def _alone(container: Container, command: list[Word]) -> Iterator[Problem]:
    """A command that makes a world of its own pod."""
    started = [word for word in command if word.name in _LAUNCHERS]
    lonely = next((word for word in command if word.name.startswith("python")), None)
    if command and not started and command[0].name not in _SHELLS:
        lonely = command[0] if container.value.get("command") else None
    if lonely and not started and not container.ranks.rank_is_told:
        yield Problem(
            _place(container, lonely),
            f"{lonely.name} starts one process that trains alone in every pod: start it with cputrain launch",
        )
    for number, word in enumerate(command):
        following = command[number + 1].text if number + 1 < len(command) else ""
        if word.text in ("--standalone", "--nnodes=1") or (word.text == "--nnodes" and following == "1"):
            said = f"{word.text} makes every pod train alone, whatever the operator says: remove it"
            yield Problem(_place(container, word), said)
    if started and started[0].name.startswith("accelerate") and not option(command, "--num_machines", "--config_file"):
        yield Problem(
            _place(container, started[0]),
            "accelerate launch reads nothing of what the operator says, so every pod trains alone: start the script "
            "with cputrain launch",
        )
    yield from _own_address(container)


def _own_address(container: Container) -> Iterator[Problem]:
    for row, variable in enumerate(items(container.value.get("env"))):
        name, value = mapping(variable).get("name"), mapping(variable).get("value")
        if name == "MASTER_ADDR" and value in ("localhost", "127.0.0.1", "::1"):
            said = f"MASTER_ADDR is {value}, so every pod meets only itself: remove it"
            yield Problem((*container.where, "env", row), said)


def _launcher(container: Container, command: list[Word]) -> Iterator[Problem]:
    """An MPIJob's Launcher trains nothing itself: it has to start ranks in the Workers."""
    in_file = command and command[0].name in _SHELLS and len({(word.key, word.row) for word in command}) == len(command)
    if command and not in_file and not any(word.name in _REMOTE or _is_ours(word) for word in command):
        yield Problem(
            _place(container, command[0]),
            f"{command[0].name} runs in the Launcher alone, and no Worker trains: start it with mpirun, or write the "
            "job with cputrain k8s render --kind mpijob",
        )
    yield from _own_address(container)


def _is_ours(word: Word) -> bool:
    return word.name == "cputrain" or word.text.startswith("cputrain.")


def _bf16(container: Container, command: list[Word]) -> Iterator[Problem]:
    """Stock PyTorch emulates bf16 where the CPU has none; cputrain never does."""
    ours = any(name.rsplit("/", 1)[-1] == "cputrain" for name in container.ranks.command)
    if ours or container.ranks.nodes_are_chosen:
        return
    asked = [(f"{word.text}", _place(container, word)) for word in _asking_for_bf16(command)]
    for row, variable in enumerate(items(container.value.get("env"))):
        if mapping(variable).get("name") == "ACCELERATE_MIXED_PRECISION" and mapping(variable).get("value") == "bf16":
            asked.append(("ACCELERATE_MIXED_PRECISION=bf16", (*container.where, "env", row)))
    for text, where in asked:
        yield Problem(
            where,
            f"{text} on a node without bf16 instructions is emulated, some 13 times slower: choose nodes with "
            f'nodeSelector {_FEATURE}: "true"{_selector_of(container)}, or start the script with cputrain launch',
        )


def _asking_for_bf16(command: list[Word]) -> Iterator[Word]:
    for names in (("--bf16",), ("--bf16_full_eval",)):
        found = option(command, *names)
        if found and found[0].lower() not in ("false", "no", "0", "f", "n"):
            yield found[1]
    found = option(command, "--mixed_precision")
    if found and found[0] == "bf16":
        yield found[1]


def _selector_of(container: Container) -> str:
    """Where a nodeSelector stands that decides for these ranks."""
    if container.where == ("spec", "trainer"):
        return " in runtimePatches or in the runtime"
    return " on the Worker" if "Launcher" in container.where else ""


def _tokens(container: Container) -> Iterator[Problem]:
    command = words(container)
    for number, word in enumerate(command):
        name, equals, value = word.text.partition("=")
        named = word.text.startswith("--") and secrets_in_clear.is_secret_name(name.removeprefix("--"))
        following = command[number + 1].text if number + 1 < len(command) else "-"
        given = value if equals else following
        hidden = not given or given.startswith("$") or (not equals and given.startswith("-"))
        if secrets_in_clear.looks_secret(word.text) or (named and not hidden):
            yield Problem(
                _place(container, word),
                "a token stands here in clear: put it into a Secret, and into env by secretKeyRef",
            )
