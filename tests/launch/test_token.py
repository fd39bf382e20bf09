"""The token by which the processes of a launch know each other: who makes it, who gets it, where it never stands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cputrain.authentication import TOKEN
from cputrain.launch import mpi, plan, ssh
from cputrain.launch.config import Config
from tests.launch.programs import launch


def made(monkeypatch, inherited: dict[str, str] | None = None, **config: Any) -> plan.Plan:
    monkeypatch.setattr(ssh, "addresses", lambda machine: ["192.0.2.1" if machine == "one" else "192.0.2.2"])
    monkeypatch.setattr(mpi, "find", lambda *_: mpi.Mpi("MPICH", "4.0", "/usr/bin/mpirun"))
    task = plan.Task(("train.py",), "/", {}, inherited or {}, False)
    return plan.make(Config(distributed_type="MULTI_CPU", num_processes=2, **config), 2, task)


@pytest.fixture
def hosts(tmp_path: Path) -> str:
    (tmp_path / "hosts").write_text("one\ntwo\n")
    return str(tmp_path / "hosts")


@pytest.mark.parametrize("engine", ["local", "torchrun", "mpi"])
def test_each_launch_makes_one_that_stands_in_no_command_line(engine: str, hosts: str, monkeypatch) -> None:
    where = {} if engine == "local" else {"hostfile": hosts}
    first, second = (made(monkeypatch, engine=engine, **where) for _ in range(2))
    tokens = [one.environment[TOKEN] for one in (first, second)]
    assert len(tokens[0]) == 64 and tokens[0] != tokens[1]
    assert tokens[0] not in repr(first.commands)
    task = plan.Task(("train.py",), "/", {}, {}, False)
    text = plan.text(first, task)
    assert f"{TOKEN}=***" in text and tokens[0] not in text


@pytest.mark.parametrize("engine", ["local", "torchrun", "mpi"])
def test_the_users_own_wins(engine: str, hosts: str, monkeypatch) -> None:
    where = {} if engine == "local" else {"hostfile": hosts}
    assert made(monkeypatch, {TOKEN: "mine"}, engine=engine, **where).environment[TOKEN] == "mine"
    assert plan.token_variable({TOKEN: "mine"}, {TOKEN: "by --env"}) == {TOKEN: "by --env"}


def test_machines_that_are_launched_each_by_itself_get_none(monkeypatch) -> None:
    """Each would make another one, and they would refuse each other."""
    several = {"num_machines": 2, "main_process_ip": "192.0.2.1"}
    assert TOKEN not in made(monkeypatch, **several).environment


def test_ranks_have_it_in_their_environment_and_ps_shows_it_nowhere(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(
        "import os, psutil\n"
        f"token = os.environ['{TOKEN}']\n"
        "words = [word for process in psutil.process_iter(['cmdline']) for word in process.info['cmdline'] or []]\n"
        "print('LOOKED', len(token), any(token in word for word in words), flush=True)\n"
    )
    answer = launch("-n", "2", "look.py", folder=tmp_path)
    assert answer.stdout.count("LOOKED 64 False") == 2, answer.stderr


def test_by_hand_without_a_token_rank_0_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text("")
    words = ("-n", "1", "--num_machines", "1", "nothing.py")
    assert TOKEN not in launch(*words, folder=tmp_path).stderr
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871"}
    told = launch("nothing.py", folder=tmp_path, CPUTRAIN_MEETING_SECONDS="1", **environ).stderr
    assert told.count(f"{TOKEN} isn't set") == 1, told
    told = launch("nothing.py", folder=tmp_path, CPUTRAIN_MEETING_SECONDS="1", **environ, **{TOKEN: "mine"}).stderr
    assert f"{TOKEN} isn't set" not in told and "mine" not in told and os.environ.get(TOKEN) is None
