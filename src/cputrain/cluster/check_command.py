"""What will hurt in a container's command: ranks that train alone, bf16 where there is none, tokens in clear."""

from __future__ import annotations

from collections.abc import Iterator

from cputrain import secrets_in_clear
from cputrain.cluster.command_words import LAUNCHERS, MPIRUN, SHELLS, TORCHRUN, Word, is_ours, option, place, words
from cputrain.cluster.job_containers import Container
from cputrain.cluster.manifest import Problem, items, mapping, warning

_FEATURE = "feature.node.kubernetes.io/cpu-cpuid.AMXBF16"
_LOCAL = ("localhost", "127.0.0.1", "::1", "[::1]")
# Launchers that start ranks in other pods by ssh, as a Launcher must.
_REMOTE = (*MPIRUN, "cputrain", "deepspeed", "deepspeed.launcher.runner")


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


def _alone(container: Container, command: list[Word]) -> Iterator[Problem]:
    """A command that makes a world of its own pod."""
    started = [word for word in command if word.name in LAUNCHERS]
    in_runtime = any(text.rsplit("/", 1)[-1] in LAUNCHERS for text in container.ranks.command)
    lonely = _python(command)
    # Code within the manifest may read its number itself.
    told = container.ranks.rank_is_told or any("PET_" in word.text for word in command)
    if lonely and not started and not in_runtime and not told:
        yield warning(
            place(container, lonely),
            f"{lonely.name} starts one process that trains alone in every pod: start it with cputrain launch",
        )
    if any(word.name in TORCHRUN for word in started):
        yield from _torchrun_alone(container, command)
    if started and started[0].name.startswith("accelerate") and not option(command, "--num_machines", "--config_file"):
        yield warning(
            place(container, started[0]),
            "accelerate launch reads nothing of what the operator says, so every pod trains alone: start the script "
            "with cputrain launch",
        )
    yield from _own_address(container)


def _python(command: list[Word]) -> Word | None:
    """The word that starts Python: the interpreter, or a script that is the command itself."""
    for number, word in enumerate(command):
        if word.is_interpreter or (number == 0 and word.key == "command" and word.is_python):
            return word
    return None


def _torchrun_alone(container: Container, command: list[Word]) -> Iterator[Problem]:
    """torchrun's own options win over the operator's variables."""
    for word in command:
        if word.text == "--standalone":
            said = f"{word.text} makes every pod train alone, whatever the operator says: remove it"
            yield Problem(place(container, word), said)
    for name in ("--rdzv_endpoint", "--master_addr"):
        found = option(command, name)
        if found and found[0].rsplit(":", 1)[0] in _LOCAL:
            said = f"{found[1].text.partition('=')[0]} {found[0]} makes every pod meet only itself: remove it"
            yield Problem(place(container, found[1]), said)


def _own_address(container: Container) -> Iterator[Problem]:
    for row, variable in enumerate(items(container.value.get("env"))):
        name, value = mapping(variable).get("name"), mapping(variable).get("value")
        if name == "MASTER_ADDR" and value in _LOCAL:
            said = f"MASTER_ADDR is {value}, so every pod meets only itself: remove it"
            yield warning((*container.where, "env", row), said)


def _launcher(container: Container, command: list[Word]) -> Iterator[Problem]:
    """An MPIJob's Launcher trains nothing itself: it has to start ranks in the Workers."""
    in_file = command and command[0].name in SHELLS and len({(word.key, word.row) for word in command}) == len(command)
    lonely = _python(command) or next((word for word in command if word.name in LAUNCHERS), None)
    if lonely and not in_file and not any(word.name in _REMOTE or word.is_ours for word in command):
        yield warning(
            place(container, lonely),
            f"{lonely.name} runs in the Launcher alone, and no Worker trains: start it with mpirun, or write the "
            "job with cputrain k8s render --kind mpijob",
        )
    yield from _own_address(container)


def _bf16(container: Container, command: list[Word]) -> Iterator[Problem]:
    """Stock PyTorch emulates bf16 where the CPU has none; cputrain never does."""
    if is_ours(container) or container.ranks.nodes_are_chosen or container.ranks.has_gpus:
        return
    asked = [(word.text, place(container, word)) for word in _asking_for_bf16(command)]
    for row, variable in enumerate(items(container.value.get("env"))):
        if mapping(variable).get("name") == "ACCELERATE_MIXED_PRECISION" and mapping(variable).get("value") == "bf16":
            asked.append(("ACCELERATE_MIXED_PRECISION=bf16", (*container.where, "env", row)))
    for text, where in asked:
        yield warning(
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
