"""What a launch will do: which engine starts which ranks on which machine, with what, and why; nothing starts here.

`text` is what `--dry-run` prints: exactly what would run, machine by machine. Secrets stay secret.
"""

from __future__ import annotations

import re
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cputrain import __version__, authentication, hardware, secrets_in_clear, settings
from cputrain.launch import cores, hostfile, join, mpi, node, processes, ranks, ssh
from cputrain.launch.config import PORT, Config
from cputrain.launch.hostfile import Machine
from cputrain.launch.ranks import Node, Place


@dataclass(frozen=True)
class Task:
    """The program of every rank: `run`'s arguments, and where it begins."""

    program: tuple[str, ...]
    folder: str
    added: Mapping[str, str]  # variables that we set
    inherited: Mapping[str, str]
    bars: bool


@dataclass(frozen=True)
class Plan:
    """`commands` are the exact words, machine by machine; `start` runs them and answers with the exit code."""

    engine: str
    reason: str
    machines: tuple[Machine, ...]
    commands: tuple[tuple[str, list[str]], ...]
    environment: Mapping[str, str]
    forwarded: bool
    meeting: str
    start: Callable[[], int]
    hosts: str = ""  # what the file that `commands` call HOSTFILE will hold

    @property
    def size(self) -> int:
        return sum(machine.processes for machine in self.machines)


def make(
    config: Config, size: int | None, task: Task, place: Node | None = None, mpirun_asked: str | None = None
) -> Plan:
    """`size` is the number of processes that was asked for, if one was."""
    if place is not None:
        return _as_node(config, size, task, place)
    if config.hostfile:
        return _on_hosts(config, size, task, mpirun_asked)
    if config.num_machines > 1:
        return _one_of_several(config, task)
    machines = [Machine("localhost", config.ppn if config.ppn and size is None else config.num_processes, 0)]
    if config.ppn and config.ppn < machines[0].processes:
        raise ValueError(
            f"{machines[0].processes} processes with --ppn {config.ppn} need several machines: give a --hostfile."
        )
    if config.engine == "mpi":
        return _by_mpi(config, machines, task, _needed_mpi(task, mpirun_asked), "--engine mpi")
    number = machines[0].processes
    reason = f"all {number} ranks are on this machine" if number > 1 else "one rank, on this machine"
    return _by_agent(config, task, machines[0], reason, "local" if config.engine == "auto" else config.engine)


def _by_agent(
    config: Config,
    task: Task,
    here: Machine,
    reason: str,
    engine: str,
    sizes: tuple[int, int] | None = None,
    differing: Mapping[str, Any] | None = None,
) -> Plan:
    """torchrun's agent, in this process. `sizes`: the least and the most ranks; `differing`: fields of the order."""
    variables = {**task.added, **size_variables(*(sizes or (here.processes,)))}
    if max((differing or {}).get(name) or 1 for name in ("machines", "most")) == 1:
        variables |= token_variable(task.inherited, task.added)
    fixed = {"backend": "static", "endpoint": f"127.0.0.1:{config.main_process_port}"}
    fields = {"processes": here.processes, **(fixed if config.main_process_port else {}), **(differing or {})}
    order = _order(config, task, variables, fields)
    commands = ((here.name, [sys.executable, *node.rank_arguments(task.program)]),)
    start = partial(node.run, order)
    return Plan(engine, reason, (here,), commands, order.environment, False, order.meeting_words, start)


def _order(config: Config, task: Task, variables: Mapping[str, str], fields: Mapping[str, Any]) -> node.Order:
    told = {"max_restarts": config.max_restarts, "log_dir": config.log_dir, "bars": task.bars, **fields}
    named = run_variable({**task.inherited, **variables}) if told["max_restarts"] else {}
    return node.Order(task.program, task.folder, {**variables, **named}, **told)


def _one_of_several(config: Config, task: Task) -> Plan:
    """As accelerate does it: the command is given on every machine, with its number."""
    if config.engine in ("local", "mpi"):
        raise ValueError(
            f"--engine {config.engine} can't start {config.num_machines} machines without a --hostfile: "
            "name the hosts, or use --engine torchrun on each machine."
        )
    here = config.num_processes // config.num_machines
    machine = Machine("this machine", here, config.machine_rank * here)
    address = hostfile.check_name(config.main_process_ip or "")
    endpoint = f"{address}:{config.main_process_port or PORT}"
    differing = {"machines": config.num_machines, "machine": config.machine_rank, "backend": "static"}
    reason = f"machine {config.machine_rank} of {config.num_machines}; they meet at main_process_ip"
    sizes = (config.num_processes, config.num_processes)
    return _by_agent(config, task, machine, reason, "torchrun", sizes, {**differing, "endpoint": endpoint})


def _as_node(config: Config, size: int | None, task: Task, place: Node) -> Plan:
    """Kubeflow says which machine this is, or where the machines meet and number themselves."""
    here = ranks.processes_here(place, config.ppn, size)
    machine = Machine("this machine", here, (place.rank or 0) * here)
    sizes = (here * place.machines, here * place.most)
    differing = {**ranks.order_fields(place, task.inherited, config), "in_pod": True}
    return _by_agent(config, task, machine, place.reason, "torchrun", sizes, differing)


def _on_hosts(config: Config, size: int | None, task: Task, mpirun_asked: str | None) -> Plan:
    assert config.hostfile
    hosts = hostfile.read(config.hostfile)
    machines = hostfile.deal(hosts, size, config.ppn)
    for machine in machines:
        ssh.addresses(machine.name)  # every name must mean something before anything is started
    if config.engine == "local":
        if len(machines) > 1 or not ssh.is_here(machines[0].name):
            raise ValueError("--engine local starts ranks on this machine only: leave it out, or the --hostfile.")
        return _by_agent(config, task, machines[0], "--engine local", "local")
    if config.engine == "torchrun":
        return _by_ssh(config, machines, task, "--engine torchrun")
    found = _needed_mpi(task, mpirun_asked) if config.engine == "mpi" else mpi.find(task.inherited, mpirun_asked)
    if found:
        return _by_mpi(config, machines, task, found, f"a hostfile, and {found} was found")
    return _by_ssh(config, machines, task, "a hostfile, and no mpirun was found")


def _needed_mpi(task: Task, asked: str | None) -> mpi.Mpi:
    found = mpi.find(task.inherited, asked)
    if found is None:
        raise ValueError(
            "--engine mpi: there is no mpirun; pip install impi-rt==2021.18.1, or apt install openmpi-bin."
        )
    return found


def _by_mpi(config: Config, machines: list[Machine], task: Task, found: mpi.Mpi, reason: str) -> Plan:
    size = sum(machine.processes for machine in machines)
    added = {**task.added, **found.environment, **size_variables(size), **_mpi_meeting(config, machines, found)}
    added |= token_variable(task.inherited, task.added)
    added[join.LABEL] = f"{int(task.bars)}:{config.log_dir or ''}"
    added[processes.JOB] = secrets.token_hex(8)
    variables = forwarded(task.inherited, added)
    program = [sys.executable, *node.rank_arguments(task.program)]
    shown = mpi.command(found, machines, "HOSTFILE", variables, task.folder, program)
    told = f"rank 0 at {variables['MASTER_ADDR']}" if "MASTER_ADDR" in variables else "rank 0 is asked through MPI"
    start = partial(mpi.run, found, machines, variables, task.folder, program)
    hosts = mpi.hosts_text(found, machines) if "HOSTFILE" in shown else ""
    return Plan("mpi", reason, tuple(machines), (("this machine", shown),), variables, True, told, start, hosts)


def _mpi_meeting(config: Config, machines: list[Machine], found: mpi.Mpi) -> dict[str, str]:
    """Intel's and MPICH's ranks ask for the address; Open MPI's can't ask, so they are told."""
    if config.main_process_ip:
        return {"MASTER_ADDR": config.main_process_ip, "MASTER_PORT": str(config.main_process_port or PORT)}
    if found.kind != "Open MPI":
        return {}
    address = ssh.meeting_address(machines)
    return {"MASTER_ADDR": address, "MASTER_PORT": str(config.main_process_port or _some_port())}


def _by_ssh(config: Config, machines: list[Machine], task: Task, reason: str) -> Plan:
    size = sum(machine.processes for machine in machines)
    added = {**task.added, **size_variables(size), **token_variable(task.inherited, task.added)}
    variables = forwarded(task.inherited, added)
    address = config.main_process_ip or ssh.meeting_address(machines)
    endpoint = f"{address}:{config.main_process_port or _some_port()}"
    order = _order(config, task, variables, {"processes": 0, "backend": "static", "endpoint": endpoint})
    commands = tuple((machine.name, ssh.command(machine.name)) for machine in machines)
    why, told = f"{reason}: by ssh", replace(order, machines=len(machines)).meeting_words
    start = partial(node.run_on, machines, order)
    return Plan("torchrun", why, tuple(machines), commands, order.environment, True, told, start)


def _some_port() -> int:
    """Below the ports that kernels give to outgoing connections, so that it is free most likely."""
    return 20_000 + secrets.randbelow(10_000)


# --- The environment of ranks ------------------------------------------------------------------------------------

# What of the launcher's own environment reaches ranks on other machines, where nothing is inherited.
_FORWARDED = re.compile(
    r"(OMP|KMP|GOMP|MKL|DNNL|ONEDNN|CCL|FI|UCX|I_MPI|GLOO|TORCH|PYTORCH|CPUTRAIN|ACCELERATE|HF|TRANSFORMERS|TOKENIZERS|"
    r"WANDB|MLFLOW|COMET|MALLOC)_.*|PYTHON(PATH|UNBUFFERED|HASHSEED|WARNINGS)|LD_(PRELOAD|LIBRARY_PATH)|TQDM_DISABLE|"
    r"(HTTPS?|NO|ALL)_PROXY|(https?|no|all)_proxy|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|"
    r"XDG_CACHE_HOME|TMPDIR|MASTER_(ADDR|PORT)"
)
# Set for one process by its launcher: another's rank would be wrong.
_OF_ONE_PROCESS = ("CPUTRAIN_PARENT", "CPUTRAIN_STARTED_BY", "TORCHELASTIC_RUN_ID", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


def size_variables(size: int, most: int | None = None) -> dict[str, str]:
    """What tells a rank that it is not alone: with another number, or another cputrain, it ends at once."""
    return {join.EXPECTED: f"{size}:{most}" if most and most != size else str(size), join.VERSION: __version__}


def token_variable(inherited: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """The token by which the processes of a launch know each other: the user's own, or one that is made for it.

    Not for machines that are launched each by itself: there every launch would make another one.
    """
    token = added.get(authentication.TOKEN) or inherited.get(authentication.TOKEN) or authentication.new_token()
    return {authentication.TOKEN: token}


def run_variable(environ: Mapping[str, str]) -> dict[str, str]:
    """The run's name in its checkpoints, by which a restart finds them: its job's, or one made for this launch."""
    return {settings.RUN_ID: environ.get(settings.RUN_ID) or f"launch-{secrets.token_hex(4)}"}


def forwarded(inherited: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in inherited.items() if _FORWARDED.fullmatch(name)}
    return {name: value for name, value in {**kept, **added}.items() if name not in _OF_ONE_PROCESS}


# --- A dry run ---------------------------------------------------------------------------------------------------


def text(plan: Plan, task: Task) -> str:
    return "\n".join(_lines(plan, task)) + "\n"


def text_of_one(place: Place | None, command: list[str], added: Mapping[str, str], inherited: Mapping[str, str]) -> str:
    """Nothing is started: this process becomes the script's, alone or as the rank that another launcher started."""
    found = {**inherited, **added}
    share, costs = join.shares(place, found)
    number, warning = cores.threads(found.get("OMP_NUM_THREADS"), share)
    who = f"rank {place.rank} of {place.size}: {place.reason}" if place else "one process, in place of this one"
    lines = [f"engine: none ({who})", f"command: {_shown(command)}", "environment added:", *_variables(added)]
    lines += [f"{_bound(share)}, OMP_NUM_THREADS={number} ({share.reason})"]
    lines += [f"  warning: {text}" for text in (*costs, warning) if text]
    return "\n".join([*lines, _openmp(found)]) + "\n"


def _lines(plan: Plan, task: Task) -> Iterator[str]:
    yield f"engine: {plan.engine} ({plan.reason})"
    asked = plan.environment[join.EXPECTED].replace(":", " to ")  # other machines may have some, too
    some = f"{plan.size} of {asked}" if asked != str(plan.size) else asked
    yield f"ranks: {some} on {len(plan.machines)} machine{'s' if len(plan.machines) > 1 else ''}"
    yield f"meeting: {plan.meeting}"
    yield f"folder: {task.folder}"
    for name, words in plan.commands:
        yield f"command on {name}: {_shown(words)}"
    if plan.hosts:
        yield f"  HOSTFILE, line by line: {' | '.join(plan.hosts.splitlines())}"
    if plan.engine == "torchrun" and plan.forwarded:
        yield "  its standard input is the order, as JSON: folder, environment, and the program"
        yield f"  program: {_shown(['cputrain', 'run', *task.program])}"
    yield f"environment {'sent by name' if plan.engine == 'mpi' else 'added'}:"
    yield from _variables(plan.environment)
    found = {**({} if plan.forwarded else task.inherited), **plan.environment}
    for machine in plan.machines:
        yield f"{machine.name}: {_span(machine.ranks)}"
        yield from _binding(machine, found)
    yield _openmp(found)


def _binding(machine: Machine, found: Mapping[str, str]) -> Iterator[str]:
    if machine.name not in ("localhost", "this machine") and not ssh.is_here(machine.name):
        yield "  each rank takes its own cores there, by that machine's topology, affinity and quota"
        return
    division = cores.divide(hardware.this_machine(), machine.processes, join.communication(found))
    for rank, share in zip(machine.ranks, division.shares, strict=True):
        number, _ = cores.threads(found.get("OMP_NUM_THREADS"), share)
        yield f"  rank {rank}: {_bound(share)}, OMP_NUM_THREADS={number} ({share.reason})"
    _, warning = cores.threads(found.get("OMP_NUM_THREADS"), division.shares[0])
    yield from (f"  warning: {text}" for text in (*division.warnings, warning) if text)


def _bound(share: cores.Share) -> str:
    if share.cpus is None:
        return "not bound"
    spare = f", {_joined(share.communication)} of them for communication" if share.communication else ""
    return f"CPUs {_joined(share.cpus)}{spare}"


def _openmp(found: Mapping[str, str]) -> str:
    kind, why = cores.openmp_runtime(found)
    return f"OpenMP here: {kind} ({why})"


def _variables(variables: Mapping[str, str]) -> list[str]:
    return [f"  {secrets_in_clear.shown(name, value)}" for name, value in sorted(variables.items())]


def _shown(words: list[str]) -> str:
    return shlex.join(secrets_in_clear.shown_words(words))


def _joined(cpus: hardware.Cpus) -> str:
    return ",".join(map(str, cpus))


def _span(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
