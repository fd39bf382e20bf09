"""A container's command as its process will see it, word by word, and what will hurt in it.

Ranks that train alone, wrong counts, options that are refused, tokens.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cputrain import secrets_in_clear
from cputrain.cluster.containers import Container
from cputrain.cluster.manifest import Problem, Where, items, warning
from cputrain.launch.ranks import count

_SHELLS = ("sh", "bash", "dash", "ash", "zsh")
COUNT = re.compile(r"[1-9]\d{0,5}", re.ASCII)
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
MPIRUN = ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.openmpi", "mpirun.mpich", "orterun", "prterun", "horovodrun")
# All that start ranks; torchtune's `tune run` is torchrun with other words.
_LAUNCHERS = (
    *TORCHRUN, *MPIRUN, "cputrain", "accelerate", "accelerate.commands.launch", "deepspeed",
    "deepspeed.launcher.runner", "tune",
)  # fmt: skip
# Words that end a command within a shell's line.
_SEPARATORS = (";", "&", "&&", "|", "||", "(", ")")
_PYTHON = re.compile(
    r"(?:^|[\s/;&|])(?:python[\d.]*|torchrun|accelerate|deepspeed|cputrain|tune)(?=\s|$)|\.py(?=[\s;'\"]|$)"
)
_FEATURE = "feature.node.kubernetes.io/cpu-cpuid.AMXBF16"
_LOCAL = ("localhost", "127.0.0.1", "::1", "[::1]")
# Launchers that start ranks in other pods by ssh, as a Launcher must.
_REMOTE = (*MPIRUN, "cputrain", "deepspeed", "deepspeed.launcher.runner")
# Gone from transformers' TrainingArguments (5.23), and accepted again where cputrain starts the script.
_TAKEN_BY_US = {"--no_cuda": "write --use_cpu", "--use_ipex": "leave it out", "--jit_mode_eval": "leave it out"}
_GONE = {
    "--evaluation_strategy": "write --eval_strategy",
    "--per_gpu_train_batch_size": "write --per_device_train_batch_size",
    "--per_gpu_eval_batch_size": "write --per_device_eval_batch_size",
    "--overwrite_output_dir": "leave it out",
    "--use_mps_device": "leave it out",
    "--fp16_opt_level": "leave it out",
    "--half_precision_backend": "leave it out",
    "--push_to_hub_token": "set HF_TOKEN from a Secret",
    "--push_to_hub_model_id": "write --hub_model_id",
}
# Two of these, and the script reads its options with transformers: other scripts have a --no_cuda of their own.
_OF_TRAINER = (
    "--model_name_or_path", "--do_train", "--do_eval", "--output_dir", "--num_train_epochs", "--learning_rate",
    "--per_device_train_batch_size", "--per_device_eval_batch_size", "--max_seq_length", "--ddp_backend", "--use_ipex",
)  # fmt: skip


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


def _is_ours(container: Container) -> bool:
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
                if other.text in (*_SEPARATORS, "--", "-m") or other.is_python or other.name in _LAUNCHERS:
                    break
                own.append(other)
            yield own


def processes_of_torchrun(container: Container) -> tuple[str, Word] | None:
    """`--nproc_per_node`, which torchrun heeds before the operator's variable."""
    return option(next(calls(words(container), TORCHRUN), []), "--nproc_per_node")


def counts_by_torchrun(container: Container) -> bool:
    """Whether torchrun starts the ranks, and takes their number from the operator's variable."""
    said = processes_of_torchrun(container)
    # A TrainJob may leave the command to its runtime.
    programs = container.ranks.programs.union(word.name for word in words(container))
    return not programs.isdisjoint(TORCHRUN) and not (said and COUNT.fullmatch(said[0]))


def _is_for_a_shell(before: list[Word]) -> bool:
    if not before or not re.fullmatch(r"-[a-z]*c", before[-1].text):
        return False
    return any(word.name in _SHELLS for word in before[:-1])


def _parts(line: str) -> list[str]:
    splitter = shlex.shlex(line.replace("\\\n", " "), posix=True, punctuation_chars=True)
    splitter.whitespace_split = True
    try:
        return list(splitter)
    except ValueError:  # a quote that is never closed
        return line.split()


# --- What will hurt ------------------------------------------------------------------------------------------------


def problems(container: Container) -> Iterator[Problem]:
    yield from _tokens(container)
    if not container.trains:
        return
    command, started_by = words(container), container.ranks.started_by
    if "Launcher" in container.where or (started_by == "mpi" and container.where == ("spec", "trainer")):
        yield from _launcher(container, command)
    elif container.ranks.pods > 1 and started_by == "torch":
        yield from _alone(container, command)
    yield from _bf16(container, command)
    yield from _flags(container, command)
    if started_by == "torch":
        yield from _torchrun(container)
        yield from _launch(container, *(container.ranks.elastic or (container.ranks.pods, container.ranks.pods)))


def _alone(container: Container, command: list[Word]) -> Iterator[Problem]:
    """A command that makes a world of its own pod."""
    started = [word for word in command if word.name in _LAUNCHERS]
    lonely = _python(command)
    # Code within the manifest may read its number itself.
    told = container.ranks.rank_is_told or any("PET_" in word.text for word in command)
    if lonely and not started and not told and container.ranks.programs.isdisjoint(_LAUNCHERS):
        said = f"{lonely.name} starts one process that trains alone in every pod: start it with cputrain launch"
        yield warning(place(container, lonely), said)
    if any(word.name in TORCHRUN for word in started):
        yield from _torchrun_alone(container, command)
    if started and started[0].name.startswith("accelerate") and not option(command, "--num_machines", "--config_file"):
        said = "accelerate launch reads nothing of what the operator says, so every pod trains alone"
        yield warning(place(container, started[0]), f"{said}: start the script with cputrain launch")
    yield from _own_address(container)


def _python(command: list[Word]) -> Word | None:
    """The word that starts Python: the interpreter, or a script that is the command itself."""
    if command and command[0].key == "command" and command[0].is_python:
        return command[0]
    return next((word for word in command if word.is_interpreter), None)


def _torchrun_alone(container: Container, command: list[Word]) -> Iterator[Problem]:
    """torchrun's own options win over the operator's variables."""
    for word in command:
        if word.text == "--standalone":
            said = "--standalone makes every pod train alone, whatever the operator says: remove it"
            yield Problem(place(container, word), said)
    for name in ("--rdzv_endpoint", "--master_addr"):
        found = option(command, name)
        if found and found[0].rsplit(":", 1)[0] in _LOCAL:
            said = f"{found[1].text.partition('=')[0]} {found[0]} makes every pod meet only itself: remove it"
            yield Problem(place(container, found[1]), said)


def _own_address(container: Container) -> Iterator[Problem]:
    for where, row in container.variables:
        if row.get("name") == "MASTER_ADDR" and row.get("value") in _LOCAL:
            yield warning(where, f"MASTER_ADDR is {row['value']}, so every pod meets only itself: remove it")


def _launcher(container: Container, command: list[Word]) -> Iterator[Problem]:
    """An MPIJob's Launcher trains nothing itself: it has to start ranks in the Workers."""
    in_file = command and command[0].name in _SHELLS and len({(word.key, word.row) for word in command}) == len(command)
    lonely = _python(command) or next((word for word in command if word.name in _LAUNCHERS), None)
    if lonely and not in_file and not any(word.name in _REMOTE or word.is_ours for word in command):
        said = f"{lonely.name} runs in the Launcher alone, and no Worker trains: start it with mpirun"
        yield warning(place(container, lonely), f"{said}, or write the job with cputrain k8s render --kind mpijob")
    yield from _own_address(container)


def _bf16(container: Container, command: list[Word]) -> Iterator[Problem]:
    """Stock PyTorch emulates bf16 where the CPU has none; cputrain never does."""
    if _is_ours(container) or container.ranks.nodes_are_chosen or container.ranks.has_gpus:
        return
    flags = [option(command, name) for name in ("--bf16", "--bf16_full_eval")]
    found = [flag for flag in flags if flag and flag[0].lower() not in ("false", "no", "0", "f", "n")]
    precision = option(command, "--mixed_precision")
    found += [precision] if precision and precision[0] == "bf16" else []
    asked = [(word.text, place(container, word)) for _, word in found]
    for where, row in container.variables:
        if row.get("name") == "ACCELERATE_MIXED_PRECISION" and row.get("value") == "bf16":
            asked.append(("ACCELERATE_MIXED_PRECISION=bf16", where))
    for text, where in asked:
        said = f"{text} on a node without bf16 instructions is emulated, some 13 times slower"
        selector = f'nodeSelector {_FEATURE}: "true"{_selector_of(container)}'
        yield warning(where, f"{said}: choose nodes with {selector}, or start the script with cputrain launch")


def _selector_of(container: Container) -> str:
    """Where a nodeSelector stands that decides for these ranks."""
    if container.where == ("spec", "trainer"):
        return " in runtimePatches or in the runtime"
    return " on the Worker" if "Launcher" in container.where else ""


def _tokens(container: Container) -> Iterator[Problem]:
    command = words(container)
    sentence = "a token stands here in clear: put it into a Secret, and into env by secretKeyRef"
    for number, word in enumerate(command):
        name, equals, value = word.text.partition("=")
        named = word.text.startswith("--") and secrets_in_clear.is_secret_name(name.removeprefix("--"))
        following = command[number + 1].text if number + 1 < len(command) else "-"
        given = value if equals else following
        hidden = not given or given.startswith("$") or (not equals and given.startswith("-"))
        if secrets_in_clear.looks_secret(word.text):
            yield Problem(place(container, word), sentence)
        elif named and not hidden:
            yield warning(place(container, word), sentence)


def _flags(container: Container, command: list[Word]) -> Iterator[Problem]:
    """Options of a training script that today's transformers refuses, before anything is trained."""
    if sum(option(command, name) is not None for name in _OF_TRAINER) < 2:
        return
    ours = _is_ours(container)
    for name, remedy in {**_GONE, **({} if ours else _TAKEN_BY_US)}.items():
        if found := option(command, name):
            other = ", or start the script with cputrain launch, which takes it" if name in _TAKEN_BY_US else ""
            said = f"today's transformers refuses {found[1].text.partition('=')[0]}"
            yield Problem(place(container, found[1]), f"{said}, and the script ends at once: {remedy}{other}")
    backend = option(command, "--ddp_backend")
    if backend and backend[0] == "ccl" and not ours:
        said = "today's transformers refuses --ddp_backend ccl, and the script ends at once"
        yield Problem(place(container, backend[1]), f"{said}: write gloo, or start the script with cputrain launch")


def _torchrun(container: Container) -> Iterator[Problem]:
    said, processes = processes_of_torchrun(container), container.ranks.processes
    if said and processes and COUNT.fullmatch(said[0]) and int(said[0]) != processes:
        sentence = f"torchrun starts {said[0]} processes, and the job says {processes}"
        yield warning(place(container, said[1]), f"{sentence}: torchrun's option wins, remove one")
    for own in calls(words(container), TORCHRUN):
        found = option(own, "--nnodes")
        least = found[0].partition(":")[0] if found else ""
        if found and COUNT.fullmatch(least) and int(least) != container.ranks.pods > 1:
            yield from _other_nodes(container, place(container, found[1]), found[0], int(least))


def _other_nodes(container: Container, where: Where, text: str, least: int) -> Iterator[Problem]:
    pods = container.ranks.pods
    if text == "1":
        yield Problem(where, "--nnodes 1 makes every pod train alone, whatever the operator says: remove it")
    elif least > pods:
        yield Problem(where, f"--nnodes {text} waits for {least} pods, and the job has {pods}: remove it")
    elif ":" not in text:
        yield warning(where, f"--nnodes {text} leaves out some of the {pods} pods of the job: remove it")


def _launch(container: Container, least: int, most: int) -> Iterator[Problem]:
    """`cputrain launch -n` counts all processes, and refuses what the operator's numbers can't give."""
    for own in calls(words(container), ("cputrain",)):
        asked, ppn = option(own, "-n", "--num_processes"), option(own, "--ppn")
        if not own or own[0].text != "launch" or not asked or not COUNT.fullmatch(asked[0]):
            continue
        each = int(ppn[0]) if ppn and COUNT.fullmatch(ppn[0]) else container.ranks.processes
        size = int(asked[0])
        found = count(size, each, least, most)
        if not found.fits:
            said = f"launch {asked[1].text.partition('=')[0]} {size} is the number of processes in all"
            sizes = f"{found.machines} pods of {found.here} are {found.total}"
            yield Problem(place(container, asked[1]), f"{said}, and {sizes}: leave it out")
