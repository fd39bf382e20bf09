"""Ranks that are started anew read nothing that dead ones wrote."""

from __future__ import annotations

from cputrain import settings
from tests.distributed.restarts import transports


def test_five_restarts_all_train_over_shared_memory() -> None:
    assert transports(5) == ["shm"] * 12


def test_a_name_is_of_one_start_of_one_run() -> None:
    def environ(run: str, start: str) -> dict[str, str]:
        kept = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        return {"TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_RESTART_COUNT": start, **kept}

    assert len({settings.attempt(environ(run, start)) for run in "ab" for start in "01"}) == 4
    assert settings.attempt({}) == settings.attempt({"TORCHELASTIC_RUN_ID": "", "TORCHELASTIC_RESTART_COUNT": ""})


def test_machines_that_have_restarted_less_often_share_the_name() -> None:
    """c10d's rendezvous makes a store for each start, and a pod that joins a restarted training counts from 0."""
    early, late = ({"TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RESTART_COUNT": start} for start in "10")
    assert settings.attempt(early) == settings.attempt(late)
