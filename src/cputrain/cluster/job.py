"""A training on a Kubernetes cluster, as a value that is checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil
from posixpath import basename, join

from cputrain import secrets_in_clear, settings
from cputrain.authentication import TOKEN
from cputrain.cluster import syntax

KINDS = ("pytorchjob", "trainjob", "mpijob")
PULL_POLICIES = ("Always", "IfNotPresent", "Never")
MPI = {"openmpi": "OpenMPI", "intel": "Intel", "mpich": "MPICH"}
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
HOME = "/home/job"
SCRIPTS = "/opt/job"
# The operators set these; a value of one's own would send the ranks elsewhere, and TrainJob's webhook refuses it.
_OPERATORS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OPERATORS_PREFIXES = ("PET_", "OMPI_", "PMI_", "KUBERNETES_")
_LARGEST_SCRIPT = 900 * 1024  # etcd refuses objects beyond 1 MiB, and YAML needs some of it
# Beyond this a process would span sockets: 64 logical CPUs are half of today's usual two-socket node.
_CPUS_PER_PROCESS = 64
# A core for communication is a core less for arithmetic: worth it from this many.
_SPARE_FROM = 8


@dataclass(frozen=True)
class Sizing:
    """Per pod: processes, threads of each for arithmetic, cores of each for communication."""

    processes: int
    threads: int
    communication: int


@dataclass(frozen=True)
class Volume:
    """The claim that holds data, caches and the trained model. With `size` it is made, too."""

    claim: str
    mount: str = "/data"
    size: str | None = None
    storage_class: str | None = None


@dataclass(frozen=True)
class SecretVariable:
    """An environment variable whose value stays in a Secret."""

    name: str
    secret: str
    key: str


@dataclass(frozen=True)
class Toleration:
    """`dedicated=training:NoSchedule`; without a value any is tolerated, without an effect all are."""

    key: str
    value: str | None = None
    effect: str | None = None


@dataclass(frozen=True)
class Job:
    """What to train and how much of the cluster to take. Every field is checked; None follows from the others."""

    name: str
    image: str
    script: str
    arguments: tuple[str, ...] = ()
    kind: str = "pytorchjob"
    namespace: str | None = None
    workers: int = 1
    elastic: tuple[int, int] | None = None
    max_restarts: int = 3
    backoff_limit: int = 3
    cpus: str = "4"
    memory: str = "16Gi"
    shared_memory: str | None = None
    processes: int | None = None
    threads: int | None = None
    communication: int | None = None
    mpi: str = "openmpi"
    volume: Volume | None = None
    environment: tuple[tuple[str, str], ...] = ()
    secrets: tuple[SecretVariable, ...] = ()
    preload: tuple[str, ...] = ()
    log_level: str = "INFO"
    launch_options: tuple[str, ...] = ()
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    priority_class: str | None = None
    service_account: str | None = None
    user: int = 1000
    script_text: str | None = None
    network_policy: bool = False
    recovery: tuple[tuple[str, str], ...] = ()  # variables of settings.py
    rendezvous: str = field(default="0", compare=False)
    token: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_kind(self)
        _check_names(self)
        _check_workers(self)
        _check_resources(self)
        _check_environment(self)
        _check_placement(self)
        _check_script(self)

    @property
    def most_pods(self) -> int:
        return max(self.workers, self.elastic[1] if self.elastic else 1)

    @property
    def sizing(self) -> Sizing:
        return size_of_cpus(self.cpu_count, self.most_pods, self.processes, self.threads, self.communication)

    @property
    def makes_token(self) -> bool:
        """Whether the job brings a Secret: ranks in several pods need one, unless the user has given another."""
        return bool(self.token) and self.most_pods > 1 and all(secret.name != TOKEN for secret in self.secrets)

    @property
    def grace(self) -> int:
        """Seconds that a pod has from SIGTERM to SIGKILL: for the ranks to save and end, and for those above them."""
        return ceil(settings.grace(3, dict(self.recovery)))

    @property
    def cpu_count(self) -> int:
        return syntax.whole_cpus(self.cpus, "CPUs per pod")

    @property
    def shared_memory_size(self) -> str:
        """An eighth of the memory, at most 8 Gi: data loaders pass batches through it, and it counts as memory."""
        eighth = syntax.bytes_of(self.memory, "memory") // 8
        return self.shared_memory or syntax.in_mebibytes(min(8 * 2**30, eighth))

    @property
    def script_path(self) -> str:
        return join(SCRIPTS, basename(self.script)) if self.script_text is not None else self.script


def _check_kind(job: Job) -> None:
    if job.kind not in KINDS:
        raise ValueError(f"the kind must be {', '.join(KINDS)} or auto, found {job.kind!r}.")
    if job.elastic and job.kind != "pytorchjob":
        raise ValueError(f"{job.kind}s can't change their size: --elastic needs --kind pytorchjob.")
    _check_choice(job.mpi, "the MPI", MPI)
    _check_choice(job.pull_policy, "the pull policy", PULL_POLICIES)


def _check_choice(value: str, what: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(choices)}, found {value!r}.")


def _check_names(job: Job) -> None:
    # Pods are called <name>-worker-12, <name>-launcher-x7k2p or <name>-node-0-12-x7k2p, and that is a DNS label.
    numbers = len(str(job.most_pods))
    room = {"pytorchjob": 8 + numbers, "mpijob": max(8 + numbers, 15), "trainjob": 14 + numbers}[job.kind]
    syntax.label_1035(job.name, "the job's name", 63 - room)
    syntax.image(job.image, "the image")
    for check, name, what in (
        (syntax.label_1123, job.namespace, "the namespace"),
        (syntax.subdomain, job.priority_class, "the priority class"),
        (syntax.subdomain, job.service_account, "the service account"),
        *((syntax.subdomain, secret, "an image pull secret") for secret in job.pull_secrets),
    ):
        if name is not None:
            check(name, what)


def _check_workers(job: Job) -> None:
    for what, value, least, most in (
        ("workers", job.workers, 1, 10_000),
        ("max restarts", job.max_restarts, 0, 1_000_000),
        ("the backoff limit", job.backoff_limit, 0, 1_000_000),
        ("the user's number", job.user, 1, 2**31 - 1),
    ):
        if not least <= value <= most:
            raise ValueError(f"{what} must be {least} to {most}, found {value}.")
    if job.elastic:
        least, most = job.elastic
        if not 1 <= least <= job.workers <= most <= 10_000:
            said = "the least must be at least 1, and the workers at the start between least and most"
            raise ValueError(f"--elastic {least}:{most} with {job.workers} workers: {said}.")


def _check_resources(job: Job) -> None:
    if job.cpu_count > 10_000:
        raise ValueError(f"CPUs per pod must be at most 10000, found {job.cpus}.")
    memory = syntax.bytes_of(job.memory, "memory")
    if memory < 64 * 2**20:
        raise ValueError(f"memory must be at least 64Mi, found {job.memory!r}: importing torch takes more.")
    if syntax.bytes_of(job.shared_memory_size, "shared memory") >= memory:
        said = f"shared memory of {job.shared_memory} counts against the pod's memory of {job.memory}"
        raise ValueError(f"{said}: it must be less.")
    if job.volume:
        _check_volume(job.volume)
    _ = job.sizing


def _check_volume(volume: Volume) -> None:
    syntax.subdomain(volume.claim, "the volume claim's name")
    mount = syntax.folder(syntax.text(volume.mount, "the mount path"), "the mount path")
    if any(taken == mount or taken.startswith(f"{mount}/") for taken in (HOME, SCRIPTS, "/dev/shm", "/etc/mpi")):
        raise ValueError(f"the volume can't be mounted at {mount}, where the job has files of its own.")
    if volume.size:
        syntax.bytes_of(volume.size, "the volume's size")
    if volume.storage_class is not None:
        syntax.subdomain(volume.storage_class, "the storage class")


def _check_environment(job: Job) -> None:
    seen = set()
    for name in [*(name for name, _ in job.environment), *(secret.name for secret in job.secrets)]:
        syntax.environment(name, "a variable's name")
        if name in seen:
            raise ValueError(f"the variable {name} is set twice.")
        if name in _OPERATORS or name.startswith(_OPERATORS_PREFIXES):
            raise ValueError(f"the variable {name} is set by the operator: leave it out.")
        seen.add(name)
    for name, value in job.environment:
        syntax.text(value, f"the variable {name}")
        if value and (secrets_in_clear.is_secret_name(name) or secrets_in_clear.looks_secret(value)):
            raise ValueError(f"the variable {name} holds a secret in clear: give --secret-env {name}=SECRET/KEY.")
    for _, value in job.recovery:
        syntax.text(value, "an option")
    if "OMP_NUM_THREADS" in seen:
        raise ValueError("threads per process are set with --threads, not with the variable OMP_NUM_THREADS.")
    for secret in job.secrets:
        syntax.subdomain(secret.secret, f"the secret of {secret.name}")
        syntax.key(secret.key, f"the secret's key of {secret.name}")
    _check_preload(job)
    if not job.log_level.isascii() or not job.log_level.isalpha():
        raise ValueError(f"the log level must be a word such as INFO, found {job.log_level!r}.")


def _check_preload(job: Job) -> None:
    for library in job.preload:
        syntax.text(library, "a library to preload")
        if not library or any(letter in library for letter in ": \t\n"):
            raise ValueError(f"a library to preload must be one name or path without blanks or colons: {library!r}.")
        if general := syntax.without_release(library):
            said = f"{library!r} is one release's file name, which images don't have"
            raise ValueError(f"{said}: give --preload {general}.")


def _check_placement(job: Job) -> None:
    seen = set()
    for key, value in job.node_selector:
        syntax.label_key(key, "a node selector's key")
        syntax.label_value(value, f"the node selector's value of {key}")
        if key in seen:
            raise ValueError(f"the node selector {key} is given twice.")
        seen.add(key)
    for toleration in job.tolerations:
        syntax.label_key(toleration.key, "a toleration's key")
        syntax.label_value(toleration.value or "", f"the toleration's value of {toleration.key}")
        if toleration.effect is not None:
            _check_choice(toleration.effect, "a toleration's effect", EFFECTS)


def _check_script(job: Job) -> None:
    if not syntax.text(job.script, "the script") or job.script.startswith("-"):
        raise ValueError(f"the script must be a path, found {job.script!r}: `-- SCRIPT ARGS…` stands last.")
    for argument in (*job.launch_options, *job.arguments):
        syntax.text(argument, "an argument")
        if secrets_in_clear.looks_secret(argument):
            raise ValueError("an argument holds a token in clear: give it as a variable with --secret-env.")
    if job.kind == "trainjob" and 1 + len(job.launch_options) + len(job.arguments) > 128:
        raise ValueError(f"a TrainJob takes at most 128 arguments, found {len(job.arguments)}: put them into a file.")
    if job.script_text is not None:
        syntax.key(basename(job.script), "the script's file name")
        syntax.text(job.script_text, "the script")
        if len(job.script_text.encode()) > _LARGEST_SCRIPT:
            raise ValueError("the script is larger than 900 KiB, more than a ConfigMap holds: put it into the image.")


def size_of_cpus(
    cpus: int, machines: int, processes: int | None, threads: int | None, communication: int | None
) -> Sizing:
    """What the user left open follows from the CPUs; what doesn't fit into them is refused."""
    for what, value, least in (
        ("processes per pod", processes, 1),
        ("threads per process", threads, 1),
        ("cores for communication", communication, 0),
    ):
        if value is not None and value < least:
            raise ValueError(f"{what} must be at least {least}, found {value}.")
    here = processes or -(-cpus // _CPUS_PER_PROCESS)
    if here > cpus:
        raise ValueError(f"{here} processes don't fit into {cpus} CPUs: each needs one of its own.")
    each = cpus // here
    if communication is None:
        is_spare = threads is None or each > threads
        communication = int(machines > 1 and each >= _SPARE_FROM and is_spare)
    chosen = threads or each - communication
    if chosen < 1 or here * (chosen + communication) > cpus:
        said = f"{here} processes of {max(chosen, 1)} threads and {communication} cores for communication"
        needed = here * (max(chosen, 1) + communication)
        raise ValueError(f"{said} need {needed} CPUs, and the pod has {cpus}.")
    return Sizing(here, chosen, communication)
