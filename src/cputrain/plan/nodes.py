"""How a training scales over machines: the backward and the buckets of gradients that travel meanwhile, simulated.

As DistributedDataParallel does it: the backward fills buckets from the head to the embedding, and each full one is
summed over the ranks while the backward goes on. A bucket waits for the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cputrain.plan.estimate import Step

FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # DistributedDataParallel's
LATENCY = 50e-6  # seconds from one machine to the next, TCP within a data centre
USABLE = 0.9  # of a network's rate: what TCP leaves
PAYS = 0.7  # of ideal: below it, twice the machines bring less than 1.4 times the speed
ASSUMPTIONS = (
    "each machine gets as many sequences as one does alone, so the global batch grows with them",
    f"a ring over {USABLE:.0%} of the network's rate, {LATENCY * 1e6:.0f} µs from machine to machine",
    "gradients travel as fp32 while the backward goes on; no machine is slower than another, and no other traffic",
)


@dataclass(frozen=True)
class Point:
    """With so many machines. `efficiency`: speed over that of as many machines that needn't talk."""

    nodes: int
    seconds: float
    exposed: float  # seconds a step in which all wait for gradients
    sequences_per_second: float
    efficiency: float
    epoch_hours: float
    cost: float | None


def buckets(pieces: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """When each bucket is full, and its bytes. `pieces`: seconds of the backward, and bytes that each of them fills."""
    found, clock, filled, room = [], 0.0, 0.0, float(FIRST_BUCKET)
    for seconds, size in pieces:
        begun, left = clock, size
        clock += seconds
        while filled + left >= room:
            left -= room - filled
            found.append((begun + seconds * (1 - left / size), room))
            filled, room = 0.0, float(BUCKET)
        filled += left
    return [*found, (clock, filled)] if filled else found


def exposed(pieces: Sequence[tuple[float, float]], nodes: int, bytes_per_second: float) -> float:
    """Seconds from the backward's end to that of the last sum."""
    done = 0.0
    for full, size in buckets(pieces):
        done = max(done, full) + summed(size, nodes, bytes_per_second)
    return max(0.0, done - sum(seconds for seconds, _ in pieces))


def summed(size: float, nodes: int, bytes_per_second: float) -> float:
    """Seconds of a sum by a ring: each machine sends its parts twice around."""
    if nodes == 1:
        return 0.0
    return 2 * (nodes - 1) * (LATENCY + size / nodes / (USABLE * bytes_per_second))


def curve(
    step: Step,
    shares: Sequence[tuple[float, float]],
    sequences: int,
    numbers: Sequence[int],
    bytes_per_second: float,
    samples: int,
    price: float | None,
) -> list[Point]:
    """`shares`: of the last backward of a step, in its order: share of its time, bytes of gradients.

    `sequences`: of a step of one machine. `price`: of a machine for an hour.
    """
    pieces = [(share * step.backward, size) for share, size in shares]
    points = []
    for number in numbers:
        waits = exposed(pieces, number, bytes_per_second)
        seconds = step.seconds + waits
        speed = number * sequences / seconds
        hours = samples / speed / 3600
        cost = None if price is None else hours * number * price
        points.append(Point(number, seconds, waits, speed, step.seconds / seconds, hours, cost))
    return points


def last_that_pays(points: Sequence[Point]) -> int:
    """The most machines of these that each reach PAYS of what they would alone."""
    return max((point.nodes for point in points if point.efficiency >= PAYS), default=1)
