"""torch's store listens at the address that the ranks were told, also if another program than `launch` started them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cputrain.integrations import process_groups
from cputrain.launch import rendezvous

SCRIPT = """
import os, psutil, torch.distributed as dist
dist.init_process_group("gloo")
port = int(os.environ["MASTER_PORT"])
listening = [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN"]
print("AT", sorted({address.ip for address in listening if address.port == port}))
dist.destroy_process_group()
dist.init_process_group("gloo")  # the port is the same, and torch shares the store that is there
dist.destroy_process_group()
"""
OWN = rendezvous.own_addresses()[0]


@pytest.mark.parametrize(
    ("told", "expected"),
    [("127.0.0.1", ["127.0.0.1"]), (OWN, [OWN]), ("localhost", None)],
    ids=["loopback", "own address", "name"],
)
def test_the_store_listens_at_the_address_that_ranks_are_told(
    told: str, expected: list[str] | None, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    port = str(rendezvous._free_port())
    numbers = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": told, "MASTER_PORT": port}
    environ = {**os.environ, **numbers, "LOCAL_WORLD_SIZE": "1"}
    words = [sys.executable, "-m", "cputrain", "run", "script.py"]
    ended = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    found = ended.stdout.partition("AT ")[2].splitlines()[0]
    assert found == str(expected) if expected else found in ("['::']", "['0.0.0.0']")


@pytest.mark.parametrize("told", ["0.0.0.0", "192.0.2.1", "box1"], ids=["all", "another machine's", "name"])
def test_what_other_ranks_may_understand_otherwise_is_left_to_torch(told: str) -> None:
    assert process_groups._server_at(told, 0, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}) is None


@pytest.mark.parametrize(("ranks_here", "binds"), [("2", True), ("1", False), (None, False)])
def test_loopback_is_enough_only_if_all_ranks_are_here(ranks_here: str | None, binds: bool) -> None:
    environ = {"WORLD_SIZE": "2", **({"LOCAL_WORLD_SIZE": ranks_here} if ranks_here else {})}
    server = process_groups._server_at("127.0.0.1", 0, environ)
    assert (server is not None) == binds
    if server:
        server.close()
