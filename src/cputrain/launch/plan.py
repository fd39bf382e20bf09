"""What a launch will do: which engine starts which ranks on which machine, and why. Nothing is started here."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cputrain.launch import environment, hostfile, join, kubeflow, mpi, mpirun, node, processes, ssh
from cputrain.launch.config import PORT, Config
from cputrain.launch.hostfile import Machine
from cputrain.launch.ranks import Node


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
    _check_ppn(config, machines)
    if config.engine == "mpi":
        return _by_mpi(config, machines, task, _needed_mpi(task, mpirun_asked), "--engine mpi")
    number = machines[0].processes
    reason = f"all {number} ranks are on this machine" if number > 1 else "one rank, on this machine"
    return _by_agent(config, task, machines[0], reason, "local" if config.engine == "auto" else config.engine)


def _check_ppn(config: Config, machines: list[Machine]) -> None:
    if config.ppn and config.ppn < machines[0].processes:
        raise ValueError(
            f"{machines[0].processes} processes with --ppn {config.ppn} need several machines: give a --hostfile."
        )


# --- This machine ------------------------------------------------------------------------------------------------


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
    variables = {**task.added, **environment.of_several(*(sizes or (here.processes,)))}
    if max((differing or {}).get(name) or 1 for name in ("machines", "most")) == 1:
        variables |= environment.of_one_launch(task.inherited, task.added)
    fixed = {"backend": "static", "endpoint": f"127.0.0.1:{config.main_process_port}"}
    order = node.Order(
        program=task.program,
        folder=task.folder,
        environment=variables,
        processes=here.processes,
        log_dir=config.log_dir,
        bars=task.bars,
        **{"max_restarts": config.max_restarts, **(fixed if config.main_process_port else {}), **(differing or {})},
    )
    words = [sys.executable, *node.rank_arguments(task.program)]
    commands = ((here.name, words),)
    return Plan(engine, reason, (here,), commands, variables, False, order.meeting_words, lambda: node.run(order))


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
    return _by_agent(
        config,
        task,
        machine,
        f"machine {config.machine_rank} of {config.num_machines}; they meet at main_process_ip",
        "torchrun",
        (config.num_processes, config.num_processes),
        {
            "machines": config.num_machines,
            "machine": config.machine_rank,
            "backend": "static",
            "endpoint": f"{address}:{config.main_process_port or PORT}",
        },
    )


def _as_node(config: Config, size: int | None, task: Task, place: Node) -> Plan:
    """Kubeflow says which machine this is, or where the machines meet and number themselves."""
    here = kubeflow.processes_here(place, config.ppn, size)
    machine = Machine("this machine", here, (place.rank or 0) * here)
    sizes = (here * place.machines, here * place.most)
    differing = kubeflow.order_fields(place, task.inherited, config)
    return _by_agent(config, task, machine, place.reason, "torchrun", sizes, differing)


# --- Machines of a hostfile --------------------------------------------------------------------------------------


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
    found = None if config.engine == "torchrun" else mpi.find(task.inherited, mpirun_asked)
    if config.engine == "mpi" and found is None:
        found = _needed_mpi(task, mpirun_asked)
    if found:
        return _by_mpi(config, machines, task, found, f"a hostfile, and {found} was found")
    why = "--engine torchrun" if config.engine == "torchrun" else "a hostfile, and no mpirun was found"
    return _by_ssh(config, machines, task, why)


def _needed_mpi(task: Task, asked: str | None) -> mpi.Mpi:
    found = mpi.find(task.inherited, asked)
    if found is None:
        raise ValueError(
            "--engine mpi: there is no mpirun; pip install impi-rt==2021.18.1, or apt install openmpi-bin."
        )
    return found


def _by_mpi(config: Config, machines: list[Machine], task: Task, found: mpi.Mpi, reason: str) -> Plan:
    size = sum(machine.processes for machine in machines)
    added = {**task.added, **found.environment, **environment.of_several(size), **_mpi_meeting(config, machines, found)}
    added |= environment.of_one_launch(task.inherited, task.added)
    added[join.LABEL] = f"{int(task.bars)}:{config.log_dir or ''}"
    added[processes.JOB] = secrets.token_hex(8)
    variables = environment.forwarded(task.inherited, added)
    program = [sys.executable, *node.rank_arguments(task.program)]
    shown = mpirun.command(found, machines, "HOSTFILE", variables, task.folder, program)
    told = f"rank 0 at {variables['MASTER_ADDR']}" if "MASTER_ADDR" in variables else "rank 0 is asked through MPI"
    start = partial(mpirun.run, found, machines, variables, task.folder, program)
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
    added = {**task.added, **environment.of_several(size), **environment.of_one_launch(task.inherited, task.added)}
    variables = environment.forwarded(task.inherited, added)
    address = config.main_process_ip or ssh.meeting_address(machines)
    order = node.Order(
        program=task.program,
        folder=task.folder,
        environment=variables,
        processes=0,
        backend="static",
        endpoint=f"{address}:{config.main_process_port or _some_port()}",
        max_restarts=config.max_restarts,
        log_dir=config.log_dir,
        bars=task.bars,
    )
    commands = tuple((machine.name, ssh.command(machine.name)) for machine in machines)
    why, told = f"{reason}: by ssh", replace(order, machines=len(machines)).meeting_words
    return Plan("torchrun", why, tuple(machines), commands, variables, True, told, lambda: ssh.run(order, machines))


def _some_port() -> int:
    """Below the ports that kernels give to outgoing connections, so that it is free most likely."""
    return 20_000 + secrets.randbelow(10_000)
