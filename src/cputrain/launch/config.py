"""What a launch is told: Accelerate's configuration for CPUs, as a value that can't contradict itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from cputrain.launch import cores
from cputrain.launch.hostfile import check_name
from cputrain.secrets_in_clear import shown_value
from cputrain.settings import BALANCE, BALANCES, COMMUNICATION_CORES, COMPRESSIONS, GRADIENTS

DISTRIBUTED_TYPES = ("NO", "MULTI_CPU")
PRECISIONS = ("no", "bf16")
ENGINES = ("auto", "local", "mpi", "torchrun")
PORT = 29500


class ConfigError(ValueError):
    """A setting that can't be used; `key` names it, so that a file's line can be found."""

    def __init__(self, key: str, sentence: str) -> None:
        super().__init__(sentence)
        self.key = key


@dataclass(frozen=True)
class Config:
    """The keys of the Accelerate guide's file, in its order (`ipex` is `ipex_config: ipex:` there); then ours.

    Ours are written only where they say something, so that the guide's files come out as they went in.
    """

    compute_environment: str = "LOCAL_MACHINE"
    distributed_type: str = "NO"
    downcast_bf16: str = "no"
    ipex: bool = True
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    main_training_function: str = "main"
    mixed_precision: str = "no"
    num_machines: int = 1
    num_processes: int = 1
    rdzv_backend: str = "static"
    same_network: bool = True
    tpu_env: tuple[str, ...] = ()
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    use_cpu: bool = True
    engine: str = "auto"
    hostfile: str | None = None
    ppn: int | None = None
    env: tuple[str, ...] = ()
    cores_for_communication: int = 0
    allocator: str = "default"
    log_dir: str | None = None
    max_restarts: int = 0
    grad_compression: str = "none"
    balance: str = "length"

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_numbers(self)
        _check_together(self)

    def to_mapping(self) -> dict[str, object]:
        """As the file has it, key for key; an address and keys of ours are written only where there are some."""
        values: dict[str, object] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "ipex":
                values["ipex_config"] = {"ipex": value}
            elif value is not None and (item.name not in OURS or value != item.default):
                values[item.name] = list(value) if isinstance(value, tuple) else value
        return values


_NAMES = tuple(item.name for item in fields(Config))
OURS = _NAMES[_NAMES.index("engine") :]
_CHOICES = {
    "engine": ENGINES,
    "allocator": cores.ALLOCATORS,
    "grad_compression": COMPRESSIONS,
    "balance": BALANCES,
    "compute_environment": ("LOCAL_MACHINE",),
    "distributed_type": DISTRIBUTED_TYPES,
    "mixed_precision": PRECISIONS,
}


def _check_choices(config: Config) -> None:
    if config.mixed_precision == "fp16":
        raise ConfigError("mixed_precision", "fp16 doesn't train on CPUs: write bf16 or no.")
    for key, known in _CHOICES.items():
        if (found := getattr(config, key)) not in known:
            raise ConfigError(key, f"{key} must be {' or '.join(known)}, found {found!r}.")


_LEAST = {"num_machines": 1, "num_processes": 1, "ppn": 1}
_LEAST |= {"machine_rank": 0, "cores_for_communication": 0, "max_restarts": 0}


def _check_numbers(config: Config) -> None:
    for key, least in _LEAST.items():
        if getattr(config, key) is not None and getattr(config, key) < least:
            raise ConfigError(key, f"{key} must be at least {least}, found {getattr(config, key)}.")
    if config.main_process_port is not None and not 0 < config.main_process_port < 65536:
        raise ConfigError(
            "main_process_port", f"main_process_port must be 1 to 65535, found {config.main_process_port}."
        )


def _check_together(config: Config) -> None:
    machines, processes = config.num_machines, config.num_processes
    if config.distributed_type == "NO" and max(machines, processes) > 1:
        key = "num_machines" if machines > 1 else "num_processes"
        raise ConfigError(key, f"{key} is {max(machines, processes)}, but distributed_type is NO: write MULTI_CPU.")
    for entry in config.env:
        name, equals, _ = entry.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ConfigError("env", f"env holds NAME=VALUE, found {shown_value(name)!r}.")
    if config.main_process_ip:
        try:
            check_name(config.main_process_ip)
        except ValueError as error:
            raise ConfigError("main_process_ip", f"main_process_ip: {error}") from None
    if not config.hostfile:  # which says how many machines there are
        _check_machines(config, machines, processes)


def _check_machines(config: Config, machines: int, processes: int) -> None:
    if processes % machines:
        several = "es" if processes > 1 else ""
        raise ConfigError("num_processes", f"{machines} machines can't share {processes} process{several} evenly.")
    if config.ppn and machines > 1 and config.ppn * machines != processes:
        has = f"{machines} machines of {config.ppn} processes have {config.ppn * machines}"
        raise ConfigError("ppn", f"{has}, found {processes}.")
    if config.machine_rank >= machines:
        end = f"the ranks of {machines} machines end at {machines - 1}"
        raise ConfigError("machine_rank", f"machine_rank is {config.machine_rank}, but {end}.")
    if machines > 1 and not config.main_process_ip:
        raise ConfigError("num_machines", f"{machines} machines need a main_process_ip: the address of rank 0.")


_TOLD_IF_CHANGED = {"cores_for_communication": COMMUNICATION_CORES, "grad_compression": GRADIENTS, "balance": BALANCE}


def environment_of(
    config: Config, inherited: Mapping[str, str], threads: int | None = None
) -> tuple[dict[str, str], list[str]]:
    """The variables that tell ranks of it, and warnings. Each rank finds cores and threads itself, on its machine."""
    added = {
        "ACCELERATE_USE_CPU": str(config.use_cpu).lower(),
        "CPUTRAIN_IPEX": str(config.ipex).lower(),
        "ACCELERATE_MIXED_PRECISION": config.mixed_precision,
    }
    if threads is not None:
        added["OMP_NUM_THREADS"] = str(threads)
    for key, name in _TOLD_IF_CHANGED.items():
        if getattr(config, key) != getattr(Config, key):
            added[name] = str(getattr(config, key))
    added |= {name: value for name, _, value in (entry.partition("=") for entry in config.env)}
    preloaded, warnings = cores.preload(config.allocator, {**inherited, **added})
    if preloaded != {**inherited, **added}.get("LD_PRELOAD", ""):
        added["LD_PRELOAD"] = preloaded
    return added, warnings
