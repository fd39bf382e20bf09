"""Files of hosts."""

from __future__ import annotations

from cputrain.launch import hostfile, mpi
from tests.fuzz import sentences

SEEDS = [
    b"node1\nnode2:4\nnode3 slots=2 max_slots=4 # the third\n",
    b"[fe80::1]:4\n10.0.0.1 slots = 3\n::1\n\n# nothing\n",
    b"node1:0\nnode1:-1\nnode1 slots=x\n",
]
WORDS = [*b"node1 : 4 slots= slots=2 max-slots=9 # [ ] fe80::1 %eth0 -o".split(), b" ", b" = ", b"\n"]
_MPIS = [mpi.Mpi(kind, "1", "mpirun") for kind in ("Intel", "MPICH", "Open MPI")]


def check(data: bytes) -> None:
    with sentences.refused_in_one():
        hosts = hostfile.parse(data, "hosts")
        for host in hosts:
            assert hostfile.check_name(host.name) == host.name and (host.slots is None or host.slots > 0)
        if sum(host.slots or 1 for host in hosts) > 10_000:  # more than are dealt in no time
            return
        machines = hostfile.deal(hosts, None, None)
        ranks = [rank for machine in machines for rank in machine.ranks]
        assert ranks == list(range(len(ranks)))
        for one in _MPIS:
            assert all(line.strip() for line in mpi.hosts_text(one, machines).splitlines())
