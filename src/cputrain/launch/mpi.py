"""The MPI that is found on this machine, and the command by which it starts ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cputrain.keep_alive import MPIRUN_SSH_INTERVAL, SSH_INTERVAL, SSH_QUESTIONS
from cputrain.launch.hostfile import Machine


def _ssh_options(interval: int) -> tuple[str, ...]:
    """No questions, only hosts whose keys are known, and an end if one is gone."""
    return (
        *("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=15"),
        *("-o", f"ServerAliveInterval={interval}", "-o", f"ServerAliveCountMax={SSH_QUESTIONS}"),
    )


SSH_OPTIONS, _MPIRUNS_SSH_OPTIONS = _ssh_options(SSH_INTERVAL), _ssh_options(MPIRUN_SSH_INTERVAL)
_KINDS = (
    ("Intel", r"Intel\(R\) MPI Library.*?Version ([\d.]+)"),
    ("Open MPI", r"\((?:Open MPI|OpenRTE)\) (\S+)"),
    ("MPICH", r"HYDRA build details:\s*Version:\s*(\S+)"),
)


@dataclass(frozen=True)
class Mpi:
    """kind: Intel, MPICH or Open MPI."""

    kind: str
    version: str
    command: str

    def __str__(self) -> str:
        name = self.kind if self.kind in ("MPICH", "Open MPI") else f"{self.kind} MPI"
        return f"{name} {self.version}, {self.command}"

    @property
    def environment(self) -> dict[str, str]:
        """What mpirun and its ranks need. Ranks bind themselves, so MPI is told not to."""
        if self.kind == "Open MPI":
            return {
                "OMPI_MCA_plm_rsh_args": " ".join(_MPIRUNS_SSH_OPTIONS),
                "OMPI_MCA_hwloc_base_binding_policy": "none",
            }
        if self.kind == "MPICH":
            return {"HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(_MPIRUNS_SSH_OPTIONS)}
        root = Path(self.command).absolute().parents[1]
        return {
            "I_MPI_ROOT": str(root),
            "I_MPI_PIN": "0",
            "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": " ".join(_MPIRUNS_SSH_OPTIONS),
            "LD_LIBRARY_PATH": ":".join(filter(None, [f"{root}/lib", os.environ.get("LD_LIBRARY_PATH")])),
        }


def find(environ: Mapping[str, str], asked: str | None = None) -> Mpi | None:
    """The one asked for, else I_MPI_ROOT's, else the one beside this Python (from pip), else the PATH's."""
    beside = [f"{folder}/bin/mpirun" for folder in (environ.get("I_MPI_ROOT"), sys.prefix) if folder]
    path = environ.get("PATH")
    names = [asked] if asked else [*beside, "mpirun", "mpiexec"]
    for name in names:
        command = shutil.which(name, path=path)
        mpi = identify(command) if command else None
        if mpi:
            return mpi
    if asked:
        raise ValueError(f"--mpirun {asked} is not an mpirun of Intel MPI, MPICH or Open MPI.")
    return None


def identify(command: str) -> Mpi | None:
    """By what it says of itself."""
    folder = Path(command).absolute().parent
    # Intel's mpirun is a script that calls whichever mpiexec.hydra stands first on the PATH, perhaps MPICH's.
    environ = {**os.environ, "I_MPI_ROOT": str(folder.parent), "PATH": f"{folder}:{os.environ.get('PATH', '')}"}
    try:
        answer = subprocess.run([command, "--version"], capture_output=True, text=True, env=environ, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    hydra = folder / "mpiexec.hydra"
    for kind, pattern in _KINDS:
        found = re.search(pattern, answer.stdout, re.DOTALL)
        if found:
            exact = str(hydra) if kind == "Intel" and hydra.exists() else command
            return Mpi(kind, found[1].rstrip("."), exact)
    return None


def hosts_text(mpi: Mpi, machines: Iterable[Machine]) -> str:
    """The hostfile in this MPI's own format, whatever the user's was."""
    if mpi.kind == "Open MPI":  # a line for each rank: by slots, its own machine would come first
        return "".join(f"{machine.name}\n" * machine.processes for machine in machines)
    return "".join(f"{machine.name}:{machine.processes}\n" for machine in machines)


def command(
    mpi: Mpi, size: int, hostfile: str | None, names: Iterable[str], folder: str, program: Iterable[str]
) -> list[str]:
    """Variables are named, not written: their values would show in `ps`."""
    listed = sorted(names)
    if mpi.kind == "Open MPI":
        hosts = ["--hostfile", hostfile, "--map-by", "seq"] if hostfile else ["--oversubscribe"]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        named = [word for name in listed for word in ("-x", name)]
        return [mpi.command, *root, "-np", str(size), *hosts, "--wdir", folder, *named, *program]
    # Intel's -f ignores the numbers behind the hosts.
    hosts = ["-machinefile" if mpi.kind == "Intel" else "-f", hostfile] if hostfile else []
    named = ["-genvlist", ",".join(listed)]
    bootstrap = ["-bootstrap", "ssh"] if hostfile and mpi.kind == "Intel" else []
    return [mpi.command, *bootstrap, *hosts, "-n", str(size), "-wdir", folder, *named, *program]
