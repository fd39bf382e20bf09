"""Every environment variable that cputrain reads: its name, meaning and values. Only `launch` reads some itself.

The functions read this process's environment, or another mapping if they are given one. A variable without a value
counts as one that isn't set. `docs/settings.md` lists `VARIABLES`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from cputrain.log import say_once

if TYPE_CHECKING:
    import torch

Environ = Mapping[str, str]

DTYPE, DTYPES = "CPUTRAIN_DTYPE", ("auto", "fp32", "bf16", "int16")
PADDING, PADDINGS = "CPUTRAIN_PADDING", ("drop", "keep")
GRADIENTS, COMPRESSIONS = "CPUTRAIN_GRAD_COMPRESSION", ("none", "bf16")
BALANCE, BALANCES = "CPUTRAIN_BALANCE", ("length", "off")
LOGITS, LOGITS_ARE = "CPUTRAIN_LOGITS", ("lazy", "computed")
IPEX, TRUTHS = "CPUTRAIN_IPEX", ("true", "false")
RESUME, RUN_ID = "CPUTRAIN_RESUME", "CPUTRAIN_RUN_ID"
SAVE_EVERY, GRACE = "CPUTRAIN_SAVE_EVERY", "CPUTRAIN_GRACE"
TRIAL_STEPS, TRIAL_OWN_LOOPS = "CPUTRAIN_TRIAL_STEPS", "CPUTRAIN_TRIAL_OWN_LOOPS"
ON_NAN, ON_NANS = "CPUTRAIN_ON_NAN", ("stock", "stop", "skip", "back")
RECORD, PROGRESS, PROGRESSES = "CPUTRAIN_RECORD", "CPUTRAIN_PROGRESS", ("auto", "live", "lines", "off")
ISA, ISAS = "CPUTRAIN_ISA", ("avx512", "avx2", "portable")
TRANSPORT, TRANSPORTS = "CPUTRAIN_CCL_TRANSPORT", ("auto", "shm", "gloo", "mpi", "oneccl")
COMMUNICATION_CORES, COMMUNICATION_CPUS = "CPUTRAIN_CORES_FOR_COMMUNICATION", "CPUTRAIN_COMMUNICATION_CPUS"
TOKEN, LIBRARY = "CPUTRAIN_TOKEN", "CPUTRAIN_LIBRARY"
BLAME_FOLDER, TEST_MACHINES = "CPUTRAIN_BLAME_FOLDER", "CPUTRAIN_CCL_TEST_MACHINES"
RANK, WORLD_SIZE, LOCAL_WORLD_SIZE = "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"
MASTER_ADDR, MASTER_PORT, PET_MASTER_ADDR = "MASTER_ADDR", "MASTER_PORT", "PET_MASTER_ADDR"
WORKERS, OFFLOAD, ATL_TRANSPORT = "CCL_WORKER_COUNT", "CCL_WORKER_OFFLOAD", "CCL_ATL_TRANSPORT"
THREADS, PRELOAD, MPI_LIBRARY = "OMP_NUM_THREADS", "LD_PRELOAD", "MPI4PY_LIBMPI"
HOME, CACHE, CCL_ROOT, MPI_ROOT = "HOME", "XDG_CACHE_HOME", "CCL_ROOT", "I_MPI_ROOT"
# What keeps torch's own products from instructions that the CPU has.
PRODUCT_LIMITS = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
PORT = 29500  # torchrun's default, too
GRACE_SECONDS = 30.0  # torchrun's and Kubernetes' own, too


class Variable(NamedTuple):
    """`default`: what holds if it isn't set, as a reader of the docs needs it."""

    meaning: str
    default: str = ""
    values: tuple[str, ...] = ()


# By who sets them. The user:
OF_THE_USER = {
    DTYPE: Variable("number format of matrix products; wins over the script", "what the script asks for", DTYPES),
    PADDING: Variable("`keep`: compute padded positions as stock does; wins over the script", "drop", PADDINGS),
    GRADIENTS: Variable("how gradients travel between ranks", "none", COMPRESSIONS),
    BALANCE: Variable("how the samples of a global batch are dealt to the ranks", "length", BALANCES),
    LOGITS: Variable("`computed`: vocabulary heads compute their logits in the forward, as stock", "lazy", LOGITS_ARE),
    # Not ACCELERATE_USE_IPEX: transformers before 4.57 sets that to false by itself.
    IPEX: Variable("`false`: everything runs as stock (`ipex: false` of a configuration)", "true", TRUTHS),
    RECORD: Variable("`off`: a run leaves no record; else the folder for it", "the script's output folder"),
    RESUME: Variable(
        "from which checkpoint a training goes on: `auto` (the newest that fits), `never`, or a folder",
        "a restart: the newest of this run",
    ),
    SAVE_EVERY: Variable(
        "how often a checkpoint is saved, as `10min`", "as the script says; with `auto` or restarts: 10min"
    ),
    ON_NAN: Variable("what Trainer does about a loss that isn't a number", "stock: it is named", ON_NANS),
    GRACE: Variable("seconds that ranks have to save and to end, once a launcher was asked to stop", "30"),
    PROGRESS: Variable("one live line, plain lines, or none", "auto: live on a terminal", PROGRESSES),
    ISA: Variable("instruction set of the kernels", "the best that the CPU has", ISAS),
    TRANSPORT: Variable("what carries data between ranks", "auto", TRANSPORTS),
    COMMUNICATION_CORES: Variable("cores of each rank that are kept free for communication", "0"),
    TOKEN: Variable("secret by which the processes of a run know each other", "drawn by `cputrain launch`"),
    "CPUTRAIN_MEETING_SECONDS": Variable("how long ranks wait for each other at the start", "600"),
    LIBRARY: Variable("file of the native library", "the one that was installed"),
}
OF_CPUTRAIN = {
    RUN_ID: Variable("name of this run in its checkpoints, where it may be started anew; the same after a restart"),
    TRIAL_STEPS: Variable("of `cputrain tune`: the training ends after so many steps, and keeps only its record"),
    TRIAL_OWN_LOOPS: Variable("of `cputrain tune`: the script may have a training loop of its own", "false", TRUTHS),
    COMMUNICATION_CPUS: Variable("CPUs that are kept free for a rank's communication, as `6,7`"),
    BLAME_FOLDER: Variable("where a rank that fails because of another one names it"),
    "CPUTRAIN_EXPECTED_RANKS": Variable("how many ranks there must be, or the least and the most: `2:4`"),
    "CPUTRAIN_EXPECTED_VERSION": Variable("version of cputrain that all machines must have"),
    "CPUTRAIN_LABEL_OUTPUT": Variable("a rank writes its own log: with progress bars or not, and the folder"),
    "CPUTRAIN_RANKS_HAVE_MET": Variable("the ranks have called each other once"),
    "CPUTRAIN_PARENT": Variable("process id of the agent that starts the ranks"),
    "CPUTRAIN_STARTED_BY": Variable("mark by which a rank's processes are found when it ends"),
    "CPUTRAIN_JOB": Variable("mark of all processes of one launch under mpirun"),
    TEST_MACHINES: Variable("in tests: `0,1;2` lets ranks 0 and 1 share memory with no other"),
}
OF_LAUNCHERS = {
    RANK: Variable("number of this process, or of this machine where LOCAL_RANK isn't set", "0"),
    WORLD_SIZE: Variable("number of processes, or of machines where LOCAL_RANK isn't set", "1"),
    "LOCAL_RANK": Variable("number of this process on its machine"),
    LOCAL_WORLD_SIZE: Variable("number of processes on this machine"),
    MASTER_ADDR: Variable("machine at which the ranks meet"),
    MASTER_PORT: Variable("port at which the ranks meet", str(PORT)),
    "TORCHELASTIC_RUN_ID": Variable("torchrun's name of the run"),
    "TORCHELASTIC_RESTART_COUNT": Variable("how often torchrun has started the ranks anew", "0"),
    "TORCHELASTIC_USE_AGENT_STORE": Variable("`True`: torchrun's agent keeps one store for all starts of its ranks"),
    "PET_NNODES": Variable("torchrun's --nnodes: machines, or the least and the most"),
    "PET_NODE_RANK": Variable("torchrun's --node-rank"),
    "PET_NPROC_PER_NODE": Variable("torchrun's --nproc-per-node"),
    PET_MASTER_ADDR: Variable("torchrun's --master-addr"),
    "PET_MASTER_PORT": Variable("torchrun's --master-port", str(PORT)),
    "PET_RDZV_ENDPOINT": Variable("torchrun's --rdzv-endpoint"),
    "PET_RDZV_BACKEND": Variable("torchrun's --rdzv-backend", "static"),
    "PET_RDZV_ID": Variable("torchrun's --rdzv-id"),
    "PET_RDZV_CONF": Variable("torchrun's --rdzv-conf"),
    "PET_MAX_RESTARTS": Variable("torchrun's --max-restarts", "0"),
    "PET_STANDALONE": Variable("torchrun's --standalone"),
    "OMPI_COMM_WORLD_RANK": Variable("rank under Open MPI"),
    "OMPI_COMM_WORLD_SIZE": Variable("number of ranks under Open MPI"),
    "OMPI_COMM_WORLD_LOCAL_RANK": Variable("number of this rank on its machine under Open MPI"),
    "OMPI_COMM_WORLD_LOCAL_SIZE": Variable("ranks of this machine under Open MPI"),
    "OMPI_MCA_ess_base_jobid": Variable("Open MPI's number of the run"),
    "PRTE_MCA_ess_base_jobid": Variable("the same of Open MPI 5"),
    "PMIX_NAMESPACE": Variable("name of the run for Open MPI's process manager"),
    "PMIX_RANK": Variable("rank for Open MPI's process manager"),
    "OPAL_PREFIX": Variable("where Open MPI is installed"),
    "PMI_RANK": Variable("rank under Intel MPI and MPICH"),
    "PMI_SIZE": Variable("number of ranks under Intel MPI and MPICH"),
    "PMI_FD": Variable("open file that leads to the process manager of Intel MPI and MPICH"),
    "MPI_LOCALRANKID": Variable("number of this rank on its machine under Intel MPI and MPICH"),
    "MPI_LOCALNRANKS": Variable("ranks of this machine under Intel MPI and MPICH"),
    "I_MPI_HYDRA_UUID": Variable("set by Intel MPI's mpirun, not by MPICH's"),
    "SLURM_PROCID": Variable("rank under srun"),
    "SLURM_LOCALID": Variable("number of this rank on its machine under srun"),
    "SLURM_NODEID": Variable("number of this machine under srun", "0"),
    "SLURM_STEP_NUM_TASKS": Variable("number of ranks under srun"),
    "SLURM_STEP_TASKS_PER_NODE": Variable("ranks of each machine under srun, as `2(x3),1`"),
    "SLURM_STEP_NODELIST": Variable("machines of an srun"),
    "SLURM_JOB_NODELIST": Variable("machines of a Slurm job"),
    "SLURM_NODELIST": Variable("the same in older releases of Slurm"),
    "SLURM_JOB_ID": Variable("number of a Slurm job, from which the ranks' port follows"),
    "SLURM_STEP_ID": Variable("number of an srun in its job, from which the ranks' port follows"),
}
OF_LIBRARIES = {
    THREADS: Variable("threads of each process", "the cores that are its own"),
    PRELOAD: Variable("libraries that are loaded first, such as an allocator"),
    WORKERS: Variable("oneCCL's worker threads; here, too, cores that are kept free for communication", "0"),
    OFFLOAD: Variable("`0`: oneCCL has no worker threads"),
    ATL_TRANSPORT: Variable("what oneCCL's messages travel by: ofi or mpi"),
    CCL_ROOT: Variable("where oneCCL is installed", "beside this Python"),
    MPI_ROOT: Variable("where Intel MPI is installed", "beside this Python"),
    MPI_LIBRARY: Variable("MPI library that mpi4py loads", "the one of the mpirun that started this process"),
    "GLOO_SOCKET_IFNAME": Variable("network interface of gloo", "the one that leads to the other machines"),
    **dict.fromkeys(PRODUCT_LIMITS, Variable("keeps torch's products from instructions that the CPU has")),
    HOME: Variable("the user's folder", "that of /etc/passwd"),
    CACHE: Variable("folder of caches", "~/.cache"),
    "XDG_CONFIG_HOME": Variable("folder of configurations", "~/.config"),
    "HF_HOME": Variable("folder of Hugging Face's libraries, with Accelerate's configuration", "~/.cache/huggingface"),
    "PATH": Variable("where mpirun is looked for"),
    "LD_LIBRARY_PATH": Variable("where MPI's libraries are looked for"),
    "LOGLEVEL": Variable("what torchrun's agent logs"),
    "TORCH_CPP_LOG_LEVEL": Variable("what torch logs", "ERROR under `cputrain launch`"),
}
VARIABLES: dict[str, Variable] = {**OF_THE_USER, **OF_CPUTRAIN, **OF_LAUNCHERS, **OF_LIBRARIES}


# --- Values of any variable ---------------------------------------------------------------------------------------


def value_of(name: str, environ: Environ | None = None) -> str:
    """Empty if it isn't set."""
    assert name in VARIABLES, f"{name} has no entry in VARIABLES"
    return (os.environ if environ is None else environ).get(name, "")


def is_set(name: str, environ: Environ | None = None) -> bool:
    """Also if its value is empty."""
    return name in (os.environ if environ is None else environ)


def one_of(name: str, environ: Environ | None = None) -> str | None:
    """One of the variable's known values; None if it isn't set."""
    return _checked(name, environ) or None


def number(name: str, default: int = 0, environ: Environ | None = None) -> int:
    text = value_of(name, environ)
    if text and not re.fullmatch(r"\d{1,9}", text.strip()):
        raise wrong(name, "a whole number", text)
    return int(text) if text else default


def duration(name: str, environ: Environ | None = None) -> float | None:
    """Seconds of a variable's value; None if it isn't set."""
    return seconds_of(_checked(name, environ))


def seconds_of(text: str) -> float | None:
    """Of a time like 90, 30s, 10min or 2h; None if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|)", text.strip())
    seconds = float(found[1]) * {"": 1, "s": 1, "min": 60, "h": 3600}[found[2]] if found else 0.0
    return seconds or None


def seconds_between_saves() -> float | None:
    """None: saved is when the script says. A run that has a name may be started anew."""
    found, resumed = duration(SAVE_EVERY), value_of(RESUME)
    may_go_on = resumed == "auto" or (resumed != "never" and value_of(RUN_ID))
    return 600.0 if found is None and may_go_on else found


def grace(levels: int = 0, environ: Environ | None = None) -> float:
    """Seconds that ranks have to save and to end. Those that wait for them have 5 more, level by level."""
    return (duration(GRACE, environ) or GRACE_SECONDS) + 5.0 * levels


def expected(name: str, value: str) -> str:
    """What the variable must be, in words, if the value isn't that; else nothing."""
    known = VARIABLES[name].values
    if known and value not in known:
        return f"one of {', '.join(known)}"
    if name in (SAVE_EVERY, GRACE) and seconds_of(value) is None:
        return "a time like 30s, 10min or 2h"
    return ""


def _checked(name: str, environ: Environ | None) -> str:
    value = value_of(name, environ)
    if value and (asked := expected(name, value)):
        raise wrong(name, asked, value)
    return value


def wrong(name: str, expected: str, found: str) -> ValueError:
    return ValueError(f"{name} must be {expected}, found {found!r}; change it, or unset it.")


# --- What they say together ---------------------------------------------------------------------------------------


def win_over(script_dtype: str | torch.dtype, script_padding: str) -> tuple[str | torch.dtype, str]:
    """dtype and padding of a call of `optimize`, or what the environment says instead."""
    dtype, padding = one_of(DTYPE), one_of(PADDING)
    for name, asked, given in ((DTYPE, dtype, script_dtype), (PADDING, padding, script_padding)):
        if asked not in (None, given):
            say_once(f"{name}={asked} holds, in place of the script's {given}")
    return dtype or script_dtype, padding or script_padding


def communication_cpus() -> set[int]:
    """Empty: none were kept free, and communication shares the cores that compute."""
    text = value_of(COMMUNICATION_CPUS)
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(map(str.isdecimal, words)):
        raise wrong(COMMUNICATION_CPUS, "a list of CPU numbers like 6,7", text)
    return set(map(int, words))


def machines_of_tests() -> list[set[int]]:
    """Which ranks share memory with each other only; empty: all that can."""
    return [set(map(int, part.split(","))) for part in value_of(TEST_MACHINES).split(";") if part]


def is_first_rank() -> bool:
    return (value_of(RANK) or "0") == "0"


def all_ranks_are_here(environ: Environ | None = None) -> bool:
    """Whether the launcher said that this machine has all ranks."""
    size = value_of(WORLD_SIZE, environ)
    return size != "" and size == value_of(LOCAL_WORLD_SIZE, environ)


def meeting_place() -> tuple[str, int]:
    """Address and port at which the ranks meet; without an address no launcher said it."""
    return value_of(MASTER_ADDR), number(MASTER_PORT, PORT)


def has_agents_store(environ: Environ | None = None) -> bool:
    """Whether torchrun's agent, or that of `cputrain launch`, keeps the store at which the ranks meet."""
    return value_of("TORCHELASTIC_USE_AGENT_STORE", environ) == "True"


def attempt(environ: Environ | None = None) -> str:
    """ "RUN/START", the same on all ranks: which start of which run this process belongs to; starts count from 0.

    An agent may keep one store for all starts of its ranks, so whatever ranks write there carries this name: a rank
    that was started anew would otherwise read what a dead one wrote. Agents count by themselves, and one that joined
    later has counted less. Where they make a store for each start, as c10d's rendezvous does on several machines,
    nothing needs to be told apart.
    """
    start = value_of("TORCHELASTIC_RESTART_COUNT", environ) if has_agents_store(environ) else ""
    return f"{value_of('TORCHELASTIC_RUN_ID', environ) or 'none'}/{start or '0'}"


def mpirun_of(environ: Environ | None = None) -> str | None:
    """Whose mpirun started this process: Open MPI, Intel, MPICH, or none."""
    if is_set("OMPI_COMM_WORLD_SIZE", environ):
        return "Open MPI"
    if not is_set("PMI_RANK", environ):
        return None
    return "Intel" if is_set("I_MPI_HYDRA_UUID", environ) else "MPICH"


def preloaded(environ: Environ | None = None) -> list[str]:
    """The libraries of LD_PRELOAD."""
    return [library for library in re.split(r"[: ]", value_of(PRELOAD, environ)) if library]
