"""A batch script for Slurm: a checked value, written with every word quoted."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from cputrain import secrets_in_clear, settings
from cputrain.cluster import syntax
from cputrain.cluster.job import Sizing, size_of_cpus

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,:+-]*", re.ASCII)
_TIME = re.compile(r"(?:\d{1,4}-)?\d{1,3}(?::\d{1,2}){0,2}", re.ASCII)
_MEMORY = re.compile(r"[1-9]\d{0,12}[KMGT]?", re.ASCII)


@dataclass(frozen=True)
class SlurmJob:
    """What to train, and how much of the cluster to take."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    nodes: int = 1
    cpus: int = 4
    tasks: int | None = None
    threads: int | None = None
    communication: int | None = None
    memory: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    activate: str | None = None
    requeue: bool = True
    recovery: tuple[tuple[str, str], ...] = ()  # variables of settings.py

    def __post_init__(self) -> None:
        for what, word in (("name", self.name), ("partition", self.partition), ("account", self.account)):
            if word is not None and (not _WORD.fullmatch(word) or len(word) > 200):
                raise ValueError(f"the {what} must be letters, digits, hyphens and dots, found {word!r}.")
        if not 1 <= self.nodes <= 100_000 or not 1 <= self.cpus <= 10_000:
            raise ValueError(f"nodes and CPUs must be at least 1, found {self.nodes} nodes of {self.cpus} CPUs.")
        if self.memory is not None and not _MEMORY.fullmatch(self.memory):
            raise ValueError(f"memory must be as Slurm writes it, such as 64G, found {self.memory!r}.")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise ValueError(f"the time must be as Slurm writes it, such as 12:00:00 or 2-00, found {self.time!r}.")
        _check_words(self)
        _ = self.sizing

    @property
    def sizing(self) -> Sizing:
        return size_of_cpus(self.cpus, self.nodes, self.tasks, self.threads, self.communication)

    @property
    def notice(self) -> int:
        """Seconds before the time is up: for the ranks to save and end, and for the job to be queued again."""
        return ceil(settings.grace(3, dict(self.recovery)))

    @property
    def cpus_per_task(self) -> int:
        return self.cpus // self.sizing.processes


def _check_words(job: SlurmJob) -> None:
    if not job.script or job.script.startswith("-"):
        raise ValueError(f"the script must be a path, found {job.script!r}: `-- SCRIPT ARGS…` stands last.")
    for word in (job.script, *job.arguments, job.activate or ""):
        syntax.text(word, "an argument")
        if secrets_in_clear.looks_secret(word):
            raise ValueError("an argument holds a token in clear, for everyone who can read the script: leave it out.")
    seen = set()
    for _, value in job.recovery:
        syntax.text(value, "an option")
    for name, value in job.environment:
        syntax.environment(name, "a variable's name")
        syntax.text(value, f"the variable {name}")
        if name in seen:
            raise ValueError(f"the variable {name} is set twice.")
        if value and (secrets_in_clear.is_secret_name(name) or secrets_in_clear.looks_secret(value)):
            raise ValueError(f"the variable {name} holds a secret: export it before `sbatch`, which passes it on.")
        seen.add(name)


def to_text(job: SlurmJob) -> str:
    """The batch script. What users gave stands in single quotes, so that the shell reads it as data."""
    return "\n".join([*_directives(job), "", *_preparation(job), "", *_step(job), ""])


def _directives(job: SlurmJob) -> list[str]:
    wanted = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.sizing.processes),
        "cpus-per-task": str(job.cpus_per_task),
        "mem": job.memory,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "output": "%x-%j.log",
        # Queued again, a job has the same number, and its log goes on.
        "open-mode": "append",
        "signal": f"B:USR1@{job.notice}" if job.requeue else None,
    }
    rows = [f"#SBATCH --{name}={value}" for name, value in wanted.items() if value is not None]
    return ["#!/bin/bash", *rows, "#SBATCH --requeue" if job.requeue else "#SBATCH --no-requeue"]


def _preparation(job: SlurmJob) -> list[str]:
    lines = ["set -euo pipefail"]
    if job.activate:
        lines.append(f"source {shlex.quote(str(Path(job.activate) / 'bin' / 'activate'))}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in (*job.recovery, *job.environment)]
    lines += [
        f"export OMP_NUM_THREADS={job.sizing.threads}",
        *([f"export CCL_WORKER_COUNT={job.sizing.communication}"] if job.sizing.communication else []),
        "# Rank 0 runs on the first of the job's nodes; localhost would make each node train alone.",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        'export MASTER_ADDR="${hosts[0]:?scontrol names no host of this job}"',
        "# By this the ranks know each other; srun hands it on, and it stands in no file and in no command line.",
        """export CPUTRAIN_TOKEN="${CPUTRAIN_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}\"""",
        "# A port of this job's own: two jobs may share a node.",
        "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
    ]
    if job.requeue:
        lines += [
            "# Queued again, the job has the same number, and goes on from its own checkpoints.",
            'export CPUTRAIN_RUN_ID="${CPUTRAIN_RUN_ID:-slurm-$SLURM_JOB_ID}"',
        ]
    return lines


def _step(job: SlurmJob) -> list[str]:
    words = " ".join(map(shlex.quote, (job.script, *job.arguments)))
    # srun stopped inheriting the CPUs of a task with Slurm 22.05: without the option each rank gets one.
    command = f"srun --cpus-per-task={job.cpus_per_task} --kill-on-bad-exit=1 cputrain launch {words}"
    note = "# --cpus-per-task again: srun doesn't inherit it. A rank that fails ends the others."
    return [note, *(_until_time_is_up(command) if job.requeue else [command])]


def _until_time_is_up(command: str) -> list[str]:
    return [
        "# In the background: bash runs a trap only while it waits.",
        f"{command} &",
        "step=$!",
        "time_is_up=",
        """trap 'time_is_up=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1  # the ranks save, and end""",
        "trap : TERM  # of scancel, or a preemption: Slurm tells the ranks itself",
        'code=0; wait "$step" || code=$?',
        'while kill -0 "$step" 2>/dev/null; do code=0; wait "$step" || code=$?; done  # a trap had ended the wait',
        'if [ -n "$time_is_up" ] && [ "$code" != 0 ]; then',
        '  echo "time is up: queued again"',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]


def submit(file: Path) -> str:
    """The number that Slurm gave the job."""
    program = shutil.which("sbatch")
    if program is None:
        raise ValueError("sbatch isn't on the PATH: submit from a login node of the cluster.")
    if not file.is_file():
        raise ValueError(f"{file} can't be read: there is no such file.")
    answer = subprocess.run(
        [program, "--parsable", str(file)], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if answer.returncode:
        said = " ".join(answer.stderr.split()).removeprefix("sbatch: error: ") or "without a word"
        raise ValueError(f"Slurm refused the job: {said.rstrip('.')}.")
    return answer.stdout.strip().partition(";")[0]
