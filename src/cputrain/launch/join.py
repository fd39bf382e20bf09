"""Makes this process the rank that its starter meant: variables, cores and threads, before the script begins."""

from __future__ import annotations

import atexit
import logging
import os
import signal
from collections.abc import Callable, Mapping, MutableMapping

from cputrain import __version__, authentication, hardware
from cputrain.launch import cores, output, pmi, processes, ranks, rendezvous, roll_call
from cputrain.log import logger
from cputrain.settings import COMMUNICATION_CORES, COMMUNICATION_CPUS

# What `cputrain launch` tells the ranks that it starts.
EXPECTED, VERSION = "CPUTRAIN_EXPECTED_RANKS", "CPUTRAIN_EXPECTED_VERSION"
LABEL = "CPUTRAIN_LABEL_OUTPUT"
# What ranks that were started by hand tell what they start: the roll call is over.
MET = "CPUTRAIN_RANKS_HAVE_MET"
_script_failed = False
_LAUNCHERS = (*pmi.PROXIES, "mpirun", "mpiexec", "slurmstepd")


def join(environ: MutableMapping[str, str]) -> pmi.Exchange | None:
    """Sets the variables that torch.distributed reads; the answer is MPI's connection, if it had to be asked."""
    parent = environ.get("CPUTRAIN_PARENT", "")
    if parent == str(os.getppid()):  # a rank that `launch` started, not a script's child
        processes.die_with(os.getppid())
    elif parent.isdigit() and processes.is_gone(int(parent)):  # killed before this rank could ask to die with it
        os._exit(128 + signal.SIGKILL)
    place = _as_place(ranks.find(environ))
    if environ.get(EXPECTED):
        if place and environ.get(processes.JOB) and not processes.is_guarded(environ):
            processes.stay_behind(place.rank, environ)
        processes.guard(environ)
    labels = environ.pop(LABEL, None)  # children of the script have nothing to do with it
    bars, _, folder = (labels or "").partition(":")
    unlabel = None
    try:
        unlabel = output.label(place.rank if place else 0, folder or None, bars == "1") if labels else None
        _check_size(place, environ)
        exchange = _meet(place, environ) if place else None
    except ValueError:
        if place and environ.get("PMI_FD"):  # MPICH would leave the other ranks waiting
            pmi.Pmi(environ).exit_code = 2
        raise
    finally:
        if unlabel:
            # Before mpirun hears of the end, which may be the end of all.
            atexit.register(_end_labels, unlabel, is_alone=place is None)
    _settle(place, environ)
    return exchange


def keep_exit_code() -> None:
    """The script failed: its own exit code tells more than the one for lost output."""
    global _script_failed
    _script_failed = True


def _end_labels(unlabel: Callable[[], bool], is_alone: bool) -> None:
    """A rank only says that output is lost: with an exit code of its own, its launcher would end the other ranks."""
    if unlabel() and is_alone and not _script_failed:
        logging.shutdown()  # what would be called after this function
        os._exit(output.LOST)


def _as_place(found: ranks.Place | ranks.Node | None) -> ranks.Place | None:
    """A node with one process is a rank; one with several needs `launch`."""
    if not isinstance(found, ranks.Node):
        return found
    if (found.processes_here or 1) > 1:
        raise ValueError(
            f"this is a machine for {found.processes_here} processes ({found.reason}), and `run` is one: "
            "write cputrain launch in place of cputrain run."
        )
    if found.rank is None:
        raise ValueError(
            f"this is one of {found.most} machines, but the environment doesn't say which ({found.reason}): "
            "write cputrain launch in place of cputrain run."
        )
    return ranks.Place(found.rank, found.machines, 0, 1, "environment", found.reason)


def _check_size(place: ranks.Place | None, environ: MutableMapping[str, str]) -> None:
    roll_call.check_version(environ.get(VERSION, __version__))
    expected = environ.get(EXPECTED)
    if not expected:
        return
    least, _, most = expected.partition(":")
    if not int(least) <= (place.size if place else 1) <= int(most or least):
        found = f"{place.size} ({place.reason})" if place else "none: no launcher numbered this process"
        asked = f"{least} to {most}" if most else least
        raise ValueError(f"{asked} ranks were asked for, found {found}; is it another MPI's mpirun?")


def _meet(place: ranks.Place, environ: MutableMapping[str, str]) -> pmi.Exchange | None:
    meeting, exchange = rendezvous.meet(place, environ)
    if meeting.token and not environ.get(authentication.TOKEN):
        environ[authentication.TOKEN] = meeting.token
    if _has_no_launcher(place, environ):
        roll_call.hold(f"{meeting.address}:{meeting.port}", place.rank, place.size, environ, roll_call.RANKS)
        environ[MET] = "1"
    environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.size),
        LOCAL_RANK=str(place.local_rank),
        MASTER_ADDR=meeting.address,
        MASTER_PORT=str(meeting.port),
    )
    if place.local_size:
        environ["LOCAL_WORLD_SIZE"] = str(place.local_size)
    if place.rank > 0:
        environ.setdefault("TQDM_DISABLE", "1")  # one progress bar, rank 0's
    is_told = place.is_local or environ.get("GLOO_SOCKET_IFNAME")
    if not is_told and (interface := rendezvous.interface_towards(meeting.address)):
        environ["GLOO_SOCKET_IFNAME"] = interface
    logger.log(
        logging.INFO if place.rank == 0 else logging.DEBUG,
        f"rank {place.rank} of {place.size}: {place.reason}; they meet at {meeting.address}, port {meeting.port}: "
        f"{meeting.reason}",
    )
    return exchange


def _has_no_launcher(place: ranks.Place, environ: Mapping[str, str]) -> bool:
    """Ranks that were numbered by hand: no launcher would end them if one is missing, and torch waits half an hour."""
    numbered = place.by == "environment" and place.size > 1
    return numbered and not any(environ.get(name) for name in ("TORCHELASTIC_RUN_ID", EXPECTED, MET))


def shares(place: ranks.Place | None, environ: Mapping[str, str]) -> tuple[cores.Share, tuple[str, ...]]:
    """What this process gets of its machine, and what the division costs."""
    machine = hardware.detect()
    kept = communication(environ) if place else 0
    if place and place.local_size and place.local_size > 1 and _mask_is_shared(machine, place.local_size):
        division = cores.divide(machine, place.local_size, kept)
        return division.shares[place.local_rank % place.local_size], division.warnings
    division = cores.alone(machine, kept)
    return division.shares[0], division.warnings


def _settle(place: ranks.Place | None, environ: MutableMapping[str, str]) -> None:
    """Binds this process to its cores, and sets its threads. Warnings are said once on each machine."""
    share, costs = shares(place, environ)
    warnings = [*costs, *_set_threads(share, environ)]
    if share.cpus:
        os.sched_setaffinity(0, share.cpus)
        _take_memory_there(share.cpus)
    if share.communication:
        environ[COMMUNICATION_CPUS] = ",".join(map(str, share.communication))
    if place is None or place.local_rank == 0:
        for warning in warnings:
            logger.warning(warning)
    if place is None:
        for name in ("CCL_WORKER_COUNT", "CCL_ATL_TRANSPORT"):
            if environ.get(name):
                logger.info(f"{name} has no effect: this is one process, which has no other to communicate with")
        return
    if communication(environ):  # the backend then knows that threads were left out for it, bound or not
        environ[COMMUNICATION_CORES] = str(communication(environ))
    if place.rank == 0:
        threads = environ["OMP_NUM_THREADS"]
        logger.info(f"each rank computes with {threads} thread{'s' if threads != '1' else ''} ({share.reason})")


def _take_memory_there(cpus: hardware.Cpus) -> None:
    node = cores.numa_node(cpus, hardware.detect())
    if reason := cores.prefer_memory_of(node) if node is not None else None:
        logger.debug(f"memory comes from where it is touched first, not always from NUMA node {node}: {reason}")


def communication(environ: Mapping[str, str]) -> int:
    """How many cores of each rank don't compute."""
    return ranks.first_number(environ, COMMUNICATION_CORES, "CCL_WORKER_COUNT") or 0


def _set_threads(share: cores.Share, environ: MutableMapping[str, str]) -> list[str]:
    """OMP_NUM_THREADS is always set: accelerate would count cores by itself otherwise, and torchrun say 1."""
    for name, value in cores.openmp_settings(cores.openmp_runtime(environ)[0], share.takes_turns).items():
        environ.setdefault(name, value)
    asked = environ.get("OMP_NUM_THREADS")
    number, warning = cores.threads(None if _only_torchrun_says(asked, environ) else asked, share)
    environ["OMP_NUM_THREADS"] = str(number)
    return [warning] if warning else []


def _only_torchrun_says(asked: str | None, environ: MutableMapping[str, str]) -> bool:
    """torchrun sets 1 where nothing was set, so the environment that it was started with tells them apart."""
    if asked != "1" or "TORCHELASTIC_RUN_ID" not in environ:
        return False
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            return not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in file.read().split(b"\0"))
    except OSError:
        return False


def _mask_is_shared(machine: hardware.Hardware, others: int) -> bool:
    """Whether the ranks of this machine were left on the same CPUs, rather than each bound to its own."""
    own = set(machine.affinity.value)
    if len(own) * others > len(machine.logical_cpus.value):
        return True
    import psutil

    try:
        parents = psutil.Process().parents()
        launcher = next((parent for parent in parents if parent.name() in _LAUNCHERS), parents[0] if parents else None)
        return launcher is None or set(launcher.cpu_affinity()) == own
    except psutil.Error:
        return False
