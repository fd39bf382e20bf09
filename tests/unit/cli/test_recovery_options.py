"""--resume, --save-every, --on-nan and --grace: one meaning for every command that starts a training."""

from __future__ import annotations

import pytest
import typer

from cputrain import settings
from cputrain.cli import k8s, launch, run_options, slurm
from cputrain.cli.job_options import JobOptions
from cputrain.cli.recovery_options import RecoveryOptions
from cputrain.cli.slurm import SlurmOptions
from cputrain.cluster import render
from cputrain.cluster import slurm as batch
from cputrain.cluster.job import Job
from cputrain.cluster.manifest import plain
from cputrain.cluster.slurm import SlurmJob

ASKED = {"--resume": "auto", "--save-every": "5min", "--on-nan": "skip", "--grace": "90"}
VARIABLES = dict(
    zip((settings.RESUME, settings.SAVE_EVERY, settings.ON_NAN, settings.GRACE), ASKED.values(), strict=True)
)
OPTIONS = RecoveryOptions("auto", "5min", "skip", "90")


@pytest.mark.parametrize(
    ("app", "command"), [(launch.app, "launch"), (k8s.app, "render"), (k8s.app, "submit"), (slurm.app, "render")]
)
def test_every_command_has_them_with_the_same_words(app: typer.Typer, command: str) -> None:
    found = typer.main.get_command(app)
    parameters = getattr(found, "commands", {command: found})[command].params
    helps = {name: one.help for one in parameters for name in one.opts}
    for name in ASKED:
        assert helps[name] == run_options.MEANINGS.get(name, helps[name])


def test_they_become_what_ranks_read() -> None:
    assert OPTIONS.variables() == VARIABLES
    assert RecoveryOptions().variables() == {}
    job = JobOptions(**vars(OPTIONS), image="x:1").job("train.py", [])
    assert dict(job.recovery) == VARIABLES
    assert all(issubclass(one, RecoveryOptions) for one in (launch.Options, JobOptions, SlurmOptions))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"save_every": "1x"}, "--save-every must be a time like"), ({"on_nan": "go"}, "--on-nan must be one of stock, "),
     ({"grace": "long"}, "--grace must be a time like 30s")],
)  # fmt: skip
def test_what_is_misspelt_is_a_sentence(wrong: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RecoveryOptions(**wrong).variables()


def test_a_rendered_job_has_a_name_and_time_to_save() -> None:
    recovery = tuple(VARIABLES.items())
    for kind in ("pytorchjob", "trainjob", "mpijob"):
        job = Job("qa", "x:1", "a.py", kind=kind, workers=2, recovery=recovery, rendezvous="1f")
        text = render.job_text(job)
        assert "terminationGracePeriodSeconds: 105" in text  # 90, and 15 for those that wait for the ranks
        assert "name: CPUTRAIN_RUN_ID" in text and "value: qa-1f" in text
        assert all(f"name: {name}" in text for name in VARIABLES)
    text = batch.to_text(SlurmJob("qa", "a.py", recovery=recovery))
    assert "--signal=B:USR1@105" in text and "export CPUTRAIN_SAVE_EVERY=5min" in text


def test_what_comes_from_outside_is_started_anew_and_not_counted() -> None:
    jobs = {
        kind: list(map(plain, render.of_job(Job("qa", "x:1", "a.py", kind=kind))))
        for kind in ("pytorchjob", "trainjob")
    }
    assert jobs["pytorchjob"][-1]["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "ExitCode"
    spec = jobs["trainjob"][0]["spec"]["template"]["spec"]
    [rule] = spec["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts" and rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    rules = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[1]["onExitCodes"]["values"] == [143]


def test_saving_by_time_is_on_where_a_run_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for resume, run, every, expected in (
        ("", "", "", None), ("auto", "", "", 600.0), ("", "launch-1", "", 600.0), ("never", "launch-1", "", None),
        ("never", "", "30s", 30.0), ("auto", "launch-1", "2h", 7200.0),
    ):  # fmt: skip
        monkeypatch.setenv(settings.RESUME, resume)
        monkeypatch.setenv(settings.RUN_ID, run)
        monkeypatch.setenv(settings.SAVE_EVERY, every)
        assert settings.seconds_between_saves() == expected
