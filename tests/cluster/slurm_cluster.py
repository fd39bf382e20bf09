"""A real Slurm on machines made of namespaces: a controller and two nodes."""

from __future__ import annotations

import contextlib
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.hosts import Cluster


def configuration(folder: Path, cluster: Cluster) -> str:
    nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs=1 State=UNKNOWN" for host in cluster.hosts]
    head = cluster.hosts[0]
    return "\n".join(
        [
            f"ClusterName=test\nSlurmctldHost={head.name}({head.address})\nSlurmUser=root\nAuthType=auth/munge",
            # A job that is queued again waits until its first credential has expired: else two minutes.
            "AuthInfo=cred_expire=5",
            "CredType=cred/munge\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSwitchType=switch/none",
            "SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\nMpiDefault=none\nReturnToService=2",
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool-%n\nSlurmdPidFile={folder}/slurmd-%n.pid",
            f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmctldLogFile={folder}/slurmctld.log",
            f"SlurmdLogFile={folder}/slurmd-%n.log\nSlurmctldTimeout=60\nSlurmdTimeout=60",
            *nodes,
            "PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
            "",
        ]
    )


@dataclass(frozen=True)
class Slurm:
    cluster: Cluster
    folder: Path
    environ: dict[str, str]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """On the head node."""
        return self.cluster.hosts[0].run(*words, environ=self.environ, folder=self.folder)

    def until(self, done: Callable[[], bool], log: Path | None = None, seconds: float = 240) -> None:
        limit = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < limit, (log or self.folder / "slurmctld.log").read_text()[-3000:]
            time.sleep(0.3)

    def submitted(self, script: str) -> str:
        """The job's number: the batch script, by `cputrain slurm submit`, once both nodes are there."""
        (self.folder / "job.sh").write_text(script)
        self.until(lambda: "2idle" in self.run("sinfo", "--noheader", "--format=%D%t").stdout)
        answer = self.run(sys.executable, "-m", "cputrain", "slurm", "submit", str(self.folder / "job.sh"))
        assert answer.returncode == 0, answer.stderr
        number = re.search(r"number (\d+)", answer.stdout)
        assert number
        return number[1]

    def until_over(self, number: str) -> str:
        """The job's last state."""
        state = ""

        def over() -> bool:
            nonlocal state
            found = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", number).stdout)
            state = found[1] if found else ""
            return state not in ("", "PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")

        self.until(over)
        return state


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Slurm]:
    (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge.key").chmod(0o400)
    programs = folder / "programs"
    programs.mkdir()
    (programs / "cputrain").write_text(f'#!/bin/sh\nexec {sys.executable} -m cputrain "$@"\n')
    (programs / "cputrain").chmod(0o755)
    path = f"{programs}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    environ = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
    with Cluster(2, folder / "keys", shared=[folder]) as cluster:
        (folder / "slurm.conf").write_text(configuration(folder, cluster))
        (folder / "state").mkdir()
        daemons = []
        for number, host in enumerate(cluster.hosts):
            (folder / f"spool-{host.name}").mkdir()
            munged = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key"]
            files = ["--socket=/run/munge/munge.socket.2", "--pid-file=/run/munged.pid", "--seed-file=/run/munge.seed"]
            host.run("mkdir", "-p", "/run/munge")
            daemons.append(host.popen(*munged, *files, "--log-file=/run/munged.log", environ=environ))
            if number == 0:
                daemons.append(host.popen("slurmctld", "-D", environ=environ))
            daemons.append(host.popen("slurmd", "-D", "-N", host.name, environ=environ))
        try:
            yield Slurm(cluster, folder, environ)
        finally:
            for daemon in daemons:
                daemon.kill()
