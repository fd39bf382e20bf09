"""The MPI that is found on this machine, the command by which it starts ranks, and a run of that command."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cputrain import settings, text_files
from cputrain.keep_alive import LAST_WORDS_SECONDS, MPIRUN_SSH_INTERVAL
from cputrain.launch import liveness, output, processes, ssh
from cputrain.launch.hostfile import Machine
from cputrain.launch.ssh import Session

# What --version says, and the variable by which mpirun's launcher reads the arguments of its own ssh.
_KINDS = {
    "Intel": (r"Intel\(R\) MPI Library.*?Version ([\d.]+)", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"),
    "Open MPI": (r"\((?:Open MPI|OpenRTE)\) (\S+)", "OMPI_MCA_plm_rsh_args"),
    "MPICH": (r"HYDRA build details:\s*Version:\s*(\S+)", "HYDRA_LAUNCHER_EXTRA_ARGS"),
}
# For what was printed last to be read.
_GRACE_SECONDS = 1.0
# An mpirun that is asked to end does so at once, unless it waits for a machine that is gone.
_END_SECONDS = 2.0


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
        added = self.environment_for(" ".join(ssh.options(MPIRUN_SSH_INTERVAL)), os.environ)
        return {**added, "OMPI_MCA_hwloc_base_binding_policy": "none"} if self.kind == "Open MPI" else added

    def environment_for(self, ssh_arguments: str, inherited: Mapping[str, str]) -> dict[str, str]:
        """How its own ssh is called, and for Intel's, which pip installs without such a script, where it is."""
        added = {_KINDS[self.kind][1]: ssh_arguments}
        if self.kind != "Intel":
            return added
        added["I_MPI_PIN"] = "0"
        if os.sep not in self.command:  # the PATH's, which knows where it is
            return added
        root = Path(self.command).absolute().parents[1]
        libraries = ":".join(filter(None, [f"{root}/lib", inherited.get("LD_LIBRARY_PATH")]))
        return {**added, "I_MPI_ROOT": str(root), "LD_LIBRARY_PATH": libraries}

    def words(
        self, first: list[str], size: int, others: list[str], names: Iterable[str], program: Iterable[str]
    ) -> list[str]:
        """A command line, with options before and behind the number of ranks.

        Variables are named, not written: their values would show in `ps`.
        """
        number, named = "-n", ["-genvlist", ",".join(names)]
        if self.kind == "Open MPI":
            number, named = "-np", [word for name in names for word in ("-x", name)]
        return [self.command, *first, number, str(size), *others, *named, *program]


def find(environ: Mapping[str, str], asked: str | None = None) -> Mpi | None:
    """The one asked for, else I_MPI_ROOT's, else the one beside this Python (from pip), else the PATH's."""
    beside = [f"{folder}/bin/mpirun" for folder in (environ.get("I_MPI_ROOT"), sys.prefix) if folder]
    for name in [asked] if asked else [*beside, "mpirun", "mpiexec"]:
        found = shutil.which(name, path=environ.get("PATH"))
        if found and (mpi := identify(found)):
            return mpi
    if asked:
        raise ValueError(f"--mpirun {asked} is not an mpirun of Intel MPI, MPICH or Open MPI.")
    return None


def identify(program: str) -> Mpi | None:
    """The kind and the version that an mpirun says it has."""
    folder = Path(program).absolute().parent
    # Intel's mpirun is a script that calls whichever mpiexec.hydra stands first on the PATH, perhaps MPICH's.
    environ = {**os.environ, "I_MPI_ROOT": str(folder.parent), "PATH": f"{folder}:{os.environ.get('PATH', '')}"}
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, env=environ, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    hydra = folder / "mpiexec.hydra"
    for kind, (pattern, _) in _KINDS.items():
        if found := re.search(pattern, answer.stdout, re.DOTALL):
            exact = str(hydra) if kind == "Intel" and hydra.exists() else program
            return Mpi(kind, found[1].rstrip("."), exact)
    return None


def hosts_text(mpi: Mpi, machines: Iterable[Machine]) -> str:
    """The hostfile in this MPI's own format, whatever the user's was."""
    if mpi.kind == "Open MPI":  # a line for each rank: by slots, its own machine would come first
        return "".join(f"{machine.name}\n" * machine.processes for machine in machines)
    return "".join(f"{machine.name}:{machine.processes}\n" for machine in machines)


def command(
    mpi: Mpi, machines: list[Machine], hostfile: str, names: Iterable[str], folder: str, program: Iterable[str]
) -> list[str]:
    """Without a hostfile where this machine is the only one: then mpirun needs no ssh."""
    size = sum(machine.processes for machine in machines)
    is_alone = all(machine.name == "localhost" for machine in machines)
    if mpi.kind == "Open MPI":
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        hosts = ["--oversubscribe"] if is_alone else ["--hostfile", hostfile, "--map-by", "seq"]
        return mpi.words(root, size, [*hosts, "--wdir", folder], sorted(names), program)
    # Intel's -f ignores the numbers behind the hosts.
    hosts = ["-bootstrap", "ssh", "-machinefile", hostfile] if mpi.kind == "Intel" else ["-f", hostfile]
    return mpi.words([] if is_alone else hosts, size, ["-wdir", folder], sorted(names), program)


def run(mpi: Mpi, machines: list[Machine], environment: Mapping[str, str], folder: str, program: list[str]) -> int:
    """The exit code is mpirun's, which is the one of the rank that failed. Ranks label their output themselves.

    If none failed, it may say that output was lost.
    """
    with tempfile.TemporaryDirectory(prefix="cputrain-") as place:
        hostfile = Path(place) / "hosts"
        text_files.write(hostfile, hosts_text(mpi, machines))
        words = command(mpi, machines, str(hostfile), environment, folder, program)
        variables = {**os.environ, **environment}
        # MPICH 4.0 doesn't pass the last variable on to other machines; as from a shell, that is this one.
        variables.pop("_", None)
        elsewhere = [machine.name for machine in machines if not ssh.is_here(machine.name)]
        sessions = liveness.watched(elsewhere, environment[processes.JOB])
        try:
            return output.exit_code(_supervised(words, {**variables, "_": words[0]}, sessions))
        finally:
            ssh.end(sessions)


def _supervised(words: list[str], environ: dict[str, str], sessions: list[Session]) -> int:
    processes.adopt_orphans()
    with processes.sigterm_interrupts():
        # Its own session: Ctrl-C reaches us alone, and mpirun gets one SIGTERM from us.
        # Through us: when its own output fails, Hydra ends the ranks, and Open MPI drops it without a word.
        process = subprocess.Popen(
            words,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout and process.stderr
        readers = [output.pass_on(process.stdout, sys.stdout.buffer), output.pass_on(process.stderr, sys.stderr.buffer)]
        try:
            with liveness.beating(sessions):
                return _wait(process, sessions)
        except KeyboardInterrupt as interrupt:
            let_save(process)
            return processes.interrupted_code(interrupt)
        finally:
            _end(process)
            for reader in readers:
                reader.join(_GRACE_SECONDS)


def _wait(process: subprocess.Popen[bytes], sessions: list[Session]) -> int:
    """mpirun waits for ever for a machine that is gone without a word: the sessions on the machines tell."""
    watched = list(sessions)
    while (code := process.poll()) is None:
        for one in watched:
            ended = one.process.poll()
            if ended is not None and _is_lost(one, ended):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_WORDS_SECONDS)
                return 1
        watched = [one for one in watched if one.process.returncode is None]
        time.sleep(0.1)
    return processes.exit_code(code)


def _is_lost(one: Session, code: int) -> bool:
    """Says so. A watch that was ended from outside is no reason to end a training."""
    sentence = one.ending(code)
    lost = one.is_lost()
    what = "all machines are ended" if lost else "it is no longer watched"
    print(f"cputrain: {sentence}; {what}.", file=sys.stderr)
    return lost


def let_save(process: subprocess.Popen[bytes]) -> None:
    """mpirun ends its ranks at once when it is told to end, but hands SIGUSR1 on to them."""
    if process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(settings.grace())


def _end(process: subprocess.Popen[bytes]) -> None:
    """mpirun ends its ranks, here and elsewhere, when it is asked to; what it leaves here is ended by us."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    processes.end_descendants()
