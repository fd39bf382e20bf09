"""The batch script: what Slurm is told, and that what users give reaches the ranks as data."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cluster.test_render import TRICKS

from cputrain.cluster import slurm
from cputrain.cluster.slurm import SlurmJob

STANDINS = {
    # They stand in for Slurm's programs, and write down what they were called with.
    "scontrol": 'import sys; print("\\n".join(["node7", "node8"]) if sys.argv[1:3] == ["show", "hostnames"] else "")',
    "srun": (
        "import json, os, sys\n"
        'keys = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CCL_WORKER_COUNT", "GREETING", "CPUTRAIN_TOKEN", '
        '"CPUTRAIN_RUN_ID", "CPUTRAIN_RESUME", "CPUTRAIN_GRACE")\n'
        'print(json.dumps([sys.argv[1:], {key: os.environ.get(key) for key in keys}]))'
    ),
}  # fmt: skip


def run(job: SlurmJob, folder: Path, **environ: str) -> tuple[list[str], dict[str, str]]:
    for name, source in STANDINS.items():
        (folder / name).write_text(f"#!/usr/bin/env python3\n{source}\n")
        (folder / name).chmod(0o755)
    script = folder / "job.sh"
    script.write_text(slurm.to_text(job))
    found = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "123",
        **environ,
    }
    answer = subprocess.run(["bash", str(script)], env=found, capture_output=True, text=True, check=False, cwd=folder)
    assert answer.returncode == 0, answer.stderr
    words, variables = json.loads(answer.stdout)
    return words, variables


def test_ranks_get_words_and_variables_as_given(tmp_path: Path) -> None:
    job = SlurmJob("qa", "a $(b).py", TRICKS, nodes=2, cpus=16, tasks=2, environment=(("GREETING", "it's $(id)\n"),))
    words, variables = run(job, tmp_path)
    assert re.fullmatch("[0-9a-f]{64}", variables.pop("CPUTRAIN_TOKEN"))
    assert words == ["--cpus-per-task=8", "--kill-on-bad-exit=1", "cputrain", "launch", "a $(b).py", *TRICKS]
    assert variables == {
        "MASTER_ADDR": "node7",
        "MASTER_PORT": "20123",
        "OMP_NUM_THREADS": "7",
        "CCL_WORKER_COUNT": "1",
        "GREETING": "it's $(id)\n",
        "CPUTRAIN_RUN_ID": "slurm-123",
        "CPUTRAIN_RESUME": None,
        "CPUTRAIN_GRACE": None,
    }


def test_every_run_draws_a_token_unless_the_user_has_one(tmp_path: Path) -> None:
    job = SlurmJob("qa", "a.py")
    drawn = {run(job, tmp_path)[1]["CPUTRAIN_TOKEN"] for _ in range(3)}
    assert len(drawn) == 3 and not any(token in slurm.to_text(job) for token in drawn)
    assert run(job, tmp_path, CPUTRAIN_TOKEN="the user's")[1]["CPUTRAIN_TOKEN"] == "the user's"


def test_ranks_get_what_was_asked_for_and_the_run_has_the_jobs_name(tmp_path: Path) -> None:
    recovery = (("CPUTRAIN_RESUME", "auto"), ("CPUTRAIN_GRACE", "45"))
    _, variables = run(SlurmJob("qa", "a.py", recovery=recovery), tmp_path)
    assert {**dict(recovery), "CPUTRAIN_RUN_ID": "slurm-123"}.items() <= variables.items()
    job = SlurmJob("qa", "a.py", requeue=False)
    assert run(job, tmp_path)[1]["CPUTRAIN_RUN_ID"] is None and "trap" not in slurm.to_text(job)


@pytest.mark.parametrize(("code", "queued_again"), [(143, True), (0, False)])
def test_before_the_time_is_up_the_ranks_are_told_to_end_and_waited_for(
    tmp_path: Path, code: int, queued_again: bool
) -> None:
    """srun takes its time after scancel's signal; then the job is queued again, unless the training was done."""
    programs = {
        "srun": f"trap 'sleep 1; echo saved; exit {code}' TERM\necho $$ >ready; while :; do sleep 0.05; done",
        "scancel": 'echo "scancel $*"; kill -TERM "$(cat ready)"',
        "scontrol": '[ "$1" = show ] && echo node7 || echo "scontrol $*"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(slurm.to_text(SlurmJob("qa", "a.py", recovery=(("CPUTRAIN_GRACE", "45"),))))
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node7", "SLURM_JOB_ID": "123"}
    job = subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "ready").exists() or not (tmp_path / "ready").read_text():
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    said = job.communicate(timeout=30)[0].splitlines()
    assert said[:2] == ["scancel --signal=TERM 123", "saved"] and job.returncode == code
    assert said[2:] == (["time is up: queued again", "scontrol requeue 123"] if queued_again else [])
    assert "#SBATCH --signal=B:USR1@60" in (tmp_path / "job.sh").read_text()


def test_a_step_that_ends_at_once_has_its_exit_code(tmp_path: Path) -> None:
    for name, text in {"srun": "exit 3", "scontrol": "echo node7"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(slurm.to_text(SlurmJob("qa", "a.py")))
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node7", "SLURM_JOB_ID": "123"}
    codes = {subprocess.run(["bash", tmp_path / "job.sh"], env=environ, check=False).returncode for _ in range(20)}
    assert codes == {3}


def test_no_host_is_an_error_and_never_localhost(tmp_path: Path) -> None:
    job = SlurmJob("qa", "a.py")
    (tmp_path / "job.sh").write_text(slurm.to_text(job))
    (tmp_path / "scontrol").write_text("#!/bin/sh\n")
    (tmp_path / "scontrol").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "x", "SLURM_JOB_ID": "1"}
    answer = subprocess.run(["bash", tmp_path / "job.sh"], env=environ, capture_output=True, text=True, check=False)
    assert answer.returncode != 0
    assert "names no host" in answer.stderr


def test_directives_say_what_was_asked_for() -> None:
    job = SlurmJob("qa", "a.py", nodes=2, cpus=16, tasks=2, memory="64G", time="2-00", partition="cpu", account="me")
    found = {line.removeprefix("#SBATCH --") for line in slurm.to_text(job).splitlines() if line.startswith("#SBATCH")}
    assert found >= {"nodes=2", "ntasks-per-node=2", "cpus-per-task=8", "mem=64G", "time=2-00", "partition=cpu"}
    assert found >= {"account=me", "requeue", "job-name=qa"}


@pytest.mark.parametrize(
    "wrong",
    [{"name": "a\n#SBATCH --uid=0"}, {"name": ""}, {"nodes": 0}, {"cpus": -1}, {"memory": "64GB"}, {"time": "soon"},
     {"partition": "a b"}, {"script": ""}, {"script": "-x"}, {"arguments": ("\0",)}, {"tasks": 9}, {"threads": 5},
     {"environment": (("1A", "x"),)}, {"environment": (("HF_TOKEN", "x"),)}, {"environment": (("A", ""), ("A", ""))}],
)  # fmt: skip
def test_bad_input_is_a_sentence(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+\.$"):
        SlurmJob(**{"name": "qa", "script": "a.py", **wrong})
