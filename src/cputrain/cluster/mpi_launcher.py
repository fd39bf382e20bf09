"""What an MPIJob's Launcher runs: `python3 -m cputrain.cluster.mpi_launcher --mpi=openmpi --forward=A,B -- COMMAND …`

It writes an ssh configuration that knows the workers by the job's own key, and starts mpirun. Variables are forwarded
by name, so that no value shows in `ps`. Rank 0 runs on the first host of the operator's hostfile. When the pod is told
to end, the ranks may save first.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from cputrain import user_folders
from cputrain.cluster.mpijob import SSH_FOLDER, SSH_PORT
from cputrain.launch import hostfile, processes
from cputrain.launch.config import PORT
from cputrain.launch.hostfile import Host
from cputrain.launch.mpi import Mpi, let_save

HOSTFILE = "/etc/mpi/hostfile"
# What programs on the workers need to be found, where the image sets it.
_IMAGES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "LANG", "I_MPI_ROOT")
# Intel MPI as pip installs it, beside this Python. Its mpirun is a script that takes any mpiexec.hydra of the PATH.
_INTEL = Path(sys.prefix, "bin", "mpiexec.hydra")


def found(mpi: str) -> Mpi:
    """Debian names them so that both can be installed."""
    program = (str(_INTEL) if mpi == "intel" and _INTEL.exists() else shutil.which(f"mpirun.{mpi}")) or "mpirun"
    return Mpi({"openmpi": "Open MPI", "intel": "Intel", "mpich": "MPICH"}[mpi], "", program)


def mpirun(mpi: Mpi, path: str, workers: list[Host], forward: list[str], command: list[str]) -> list[str]:
    ranks = sum(host.slots or 1 for host in workers)
    if mpi.kind == "Open MPI":
        # Open MPI binds each of one or two ranks to a single core by itself; `cputrain launch` places them better.
        return mpi.words(["--hostfile", path], ranks, ["--bind-to", "none"], forward, command)
    more = ["-bootstrap", "ssh"] if mpi.kind == "Intel" else ["-bind-to", "none"]
    return mpi.words(["-f", path], ranks, ["-ppn", str(workers[0].slots or 1), *more], forward, command)


def environment(mpi: Mpi, inherited: Mapping[str, str], configuration: str, master: str) -> dict[str, str]:
    """What mpirun itself needs, and where the ranks meet."""
    ssh = f"-F {configuration}"
    added = mpi.environment_for(ssh, inherited)
    if mpi.kind == "Open MPI":
        added["PRTE_MCA_plm_ssh_args"] = ssh
    others = {"MASTER_PORT": str(PORT), **inherited, "MASTER_ADDR": master}
    # Last what no rank needs: MPICH 4.0's hydra doesn't forward the last variable of its environment.
    return {**{name: value for name, value in others.items() if name not in added}, **added}


def _write_ssh_configuration(home: Path, folder: str) -> str:
    """Every worker's sshd shows the job's own key, so one line knows them all and nothing is taken on trust."""
    known_hosts, configuration = home / "known_hosts", home / "ssh_config"
    known_hosts.write_text(f"* {Path(folder, 'id_rsa.pub').read_text()}")
    configuration.write_text(
        f"Host *\n  Port {SSH_PORT}\n  IdentityFile {folder}/id_rsa\n  UserKnownHostsFile {known_hosts}\n"
        "  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n  BatchMode yes\n  ConnectTimeout 30\n"
    )
    return str(configuration)


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="cputrain.cluster.mpi_launcher")
    parser.add_argument("--mpi", choices=("openmpi", "intel", "mpich"), required=True)
    parser.add_argument("--forward", default="")
    parser.add_argument("--hostfile", default=HOSTFILE)
    parser.add_argument("--ssh-folder", default=SSH_FOLDER)
    parser.add_argument("command", nargs="+")
    chosen = parser.parse_args(words)
    workers = hostfile.read(chosen.hostfile)
    configuration = _write_ssh_configuration(user_folders.home() or Path(), chosen.ssh_folder)
    mpi = found(chosen.mpi)
    given = environment(mpi, os.environ, configuration, workers[0].name)
    wanted = [*chosen.forward.split(","), *_IMAGES, "MASTER_ADDR", "MASTER_PORT"]
    forward = [name for name in dict.fromkeys(wanted) if name in given]
    command = mpirun(mpi, chosen.hostfile, workers, forward, chosen.command)
    print("starting:", " ".join(command), flush=True)
    sys.exit(_until_it_ends(subprocess.Popen(command, env=given)))


def _until_it_ends(running: subprocess.Popen[bytes]) -> int:
    with processes.sigterm_interrupts():
        try:
            return processes.exit_code(running.wait())
        except KeyboardInterrupt as interrupt:
            let_save(running)
            return processes.interrupted_code(interrupt)
        finally:
            running.terminate()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"cputrain: {error}")
