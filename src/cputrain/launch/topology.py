"""Which cores each rank of this machine computes on: its own physical cores, within one NUMA node where that goes."""

from __future__ import annotations

from dataclasses import dataclass

from cputrain.hardware import Cpus, Hardware


@dataclass(frozen=True)
class Share:
    """What one rank gets. `cpus` is None where binding would do harm; memory comes from where the cores are."""

    cpus: Cpus | None
    threads: int
    communication: Cpus
    reason: str
    takes_turns: bool = False  # with another rank, on the same cores


@dataclass(frozen=True)
class Division:
    """The shares of all ranks of a machine, and what the division costs."""

    shares: tuple[Share, ...]
    warnings: tuple[str, ...]


def divide(machine: Hardware, ranks: int, communication: int = 0) -> Division:
    """Equal shares: ranks wait for each other at every step, so a larger share would only wait longer.

    One logical CPU of each core is used: two threads of one core share its vector units.
    """
    nodes = _cores_by_node(machine)
    available = sum(map(len, nodes))
    if machine.usable_cores.value < available:
        return _by_quota(machine, ranks, communication)
    if ranks > available:
        return _crowded(nodes, ranks, communication)
    if ranks < len(nodes):
        places, reason = _whole_nodes(nodes, ranks), f"whole NUMA nodes ({len(nodes)} for {_ranks(ranks)})"
        spread = [
            f"{_ranks(ranks)} on {len(nodes)} NUMA nodes: memory of other nodes is slower to reach, start {len(nodes)}."
        ]
    else:
        places, reason, spread = _within_nodes(nodes, ranks), "cores within one NUMA node", []
    each = len(places[0])
    shares = tuple(_share(cpus, communication, f"{_cores(each)}: {reason}") for cpus in places)
    return Division(shares, (*spread, *_idle(available, each, ranks), *_cramped(each, communication)))


def alone(machine: Hardware, communication: int = 0) -> Division:
    """All of it for one rank: no other rank shares the mask, so the mask stays as it is."""
    cores = machine.usable_cores.value
    threads = _computing(cores, communication)
    share = Share(None, threads, (), f"{_cores(cores)}: {machine.usable_cores.source}")
    return Division((share,), tuple(_cramped(cores, communication)))


def _cores_by_node(machine: Hardware) -> list[Cpus]:
    """The first usable CPU of each physical core, node by node. A core that no node names joins the first."""
    usable = set(machine.usable_cpus.value)
    firsts = [min(usable.intersection(core)) for core in machine.cores.value if usable.intersection(core)]
    nodes = [tuple(cpu for cpu in firsts if cpu in node.cpus) for node in machine.numa_nodes.value]
    stray = tuple(set(firsts).difference(*nodes))
    nodes = [node for node in nodes if node]
    return [tuple(sorted((*nodes[0], *stray))), *nodes[1:]] if nodes else [tuple(sorted(firsts)) or (0,)]


def _within_nodes(nodes: list[Cpus], ranks: int) -> list[Cpus]:
    """The most cores per rank for which every rank still fits into a node; ranks spread over the nodes evenly."""
    each = next(k for k in range(max(map(len, nodes)), 0, -1) if sum(len(node) // k for node in nodes) >= ranks)
    rooms = [[node[start : start + each] for start in range(0, len(node) - each + 1, each)] for node in nodes]
    taken: list[list[Cpus]] = [[] for _ in nodes]
    for _ in range(ranks):
        emptiest = max(range(len(nodes)), key=lambda n: (len(rooms[n]) - len(taken[n]), -n))
        taken[emptiest].append(rooms[emptiest][len(taken[emptiest])])
    return [cpus for node in taken for cpus in node]


def _whole_nodes(nodes: list[Cpus], ranks: int) -> list[Cpus]:
    """Fewer ranks than nodes: each gets several, and what doesn't divide stays idle."""
    per_rank = len(nodes) // ranks
    groups = [sum(nodes[rank * per_rank : (rank + 1) * per_rank], ()) for rank in range(ranks)]
    each = min(map(len, groups))
    return [tuple(sorted(group[:each])) for group in groups]


def _by_quota(machine: Hardware, ranks: int, communication: int) -> Division:
    """A quota gives time, not cores: pods that all bind to the first cores of their host would collide there."""
    cores = machine.usable_cores.value
    each = max(1, cores // ranks)
    threads = _computing(each, communication)
    reason = f"{machine.usable_cores.source}; a quota gives no cores of one's own to bind to"
    share = Share(None, threads, (), reason, takes_turns=ranks > cores)
    crowded = [_too_many(ranks, cores)] if ranks > cores else list(_idle(cores, each, ranks))
    return Division((share,) * ranks, (*crowded, *_cramped(each, communication)))


def _crowded(nodes: list[Cpus], ranks: int, communication: int) -> Division:
    cpus = [cpu for node in nodes for cpu in node]
    shares = tuple(
        Share((cpus[rank % len(cpus)],), 1, (), "more ranks than cores: they take turns", takes_turns=True)
        for rank in range(ranks)
    )
    return Division(shares, (_too_many(ranks, len(cpus)), *_cramped(1, communication)))


def _share(cpus: Cpus, communication: int, reason: str) -> Share:
    threads = _computing(len(cpus), communication)
    return Share(cpus, threads, cpus[threads:], reason)


def _computing(cores: int, communication: int) -> int:
    return max(1, cores - communication)


def _too_many(ranks: int, cores: int) -> str:
    return f"{_ranks(ranks)} on {_cores(cores)} take turns, and every step waits for the last: start at most {cores}."


def _idle(available: int, each: int, ranks: int) -> list[str]:
    idle = available - each * ranks
    if not idle:
        return []
    return [f"{idle} of {_cores(available)} stay idle: {_ranks(ranks)} get {each} each, because steps are in step."]


def _cramped(each: int, communication: int) -> list[str]:
    if communication < each or not communication:
        return []
    return [
        f"--cores-for-communication {communication} would leave nothing of {_cores(each)} to compute with: "
        "one thread computes, and both share the core."
    ]


def threads(asked: str | None, share: Share) -> tuple[int, str | None]:
    """How many threads a rank computes with, and what a user's own OMP_NUM_THREADS costs, which is kept."""
    first = (asked or "").split(",")[0].strip()
    if not first.isdecimal() or int(first) == 0:
        return share.threads, None
    number = int(first)
    if number > share.threads:
        return number, (
            f"OMP_NUM_THREADS={number} is kept, but this rank has {_cores(share.threads)} to compute with: "
            f"threads wait for each other, {share.threads} would be faster."
        )
    idle = share.threads - number
    return number, f"OMP_NUM_THREADS={number} is kept; {idle} of {_cores(share.threads)} stay idle." if idle else None


def _cores(number: int) -> str:
    return "1 core" if number == 1 else f"{number} cores"


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
