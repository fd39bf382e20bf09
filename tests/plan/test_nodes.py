"""Buckets of gradients that travel while the backward goes on."""

from __future__ import annotations

import itertools

import pytest

from cputrain.plan import nodes
from cputrain.plan.estimate import Step

PIECES = [(0.5, 0.0), *[(0.1, 10e6)] * 12, (0.0, 47e6)]  # head, layers, embedding
STEP = Step(1.0, 1.7, 0.1)
SHARES = [(seconds / 1.7, size) for seconds, size in PIECES]


def test_buckets_carry_every_byte_once_and_in_order() -> None:
    found = nodes.buckets(PIECES)
    assert sum(size for _, size in found) == pytest.approx(167e6)
    assert found[0][1] == nodes.FIRST_BUCKET and {size for _, size in found[1:-1]} == {nodes.BUCKET}
    times = [moment for moment, _ in found]
    assert times == sorted(times) and times[-1] == pytest.approx(1.7)
    assert 0.5 < times[0] < 0.6  # the head fills none, the first layer the first


def test_a_ring() -> None:
    assert nodes.summed(1e9, 1, 1e9) == 0
    size, rate = 25e6, 1.25e9
    assert nodes.summed(size, 2, rate) == pytest.approx(2 * (50e-6 + size / 2 / (0.9 * rate)))
    assert nodes.summed(size, 1024, rate) == pytest.approx(2046 * 50e-6 + 2 * size * 1023 / 1024 / (0.9 * rate))


def test_what_is_full_before_the_end_travels_beside_the_backward_if_the_network_keeps_up() -> None:
    late = [nodes.summed(size, 4, 1e10) for full, size in nodes.buckets(PIECES) if full > 1.69]
    assert nodes.exposed(PIECES, 4, 1e10) == pytest.approx(sum(late))
    slow = nodes.exposed(PIECES, 4, 1e7)
    first, *others = nodes.buckets(PIECES)  # the first is through before the second is full, all others wait
    everything = sum(nodes.summed(size, 4, 1e7) for _, size in others)
    assert slow == pytest.approx(everything - (1.7 - others[0][0]))
    assert first[0] + nodes.summed(first[1], 4, 1e7) < others[0][0]


def test_the_curve() -> None:
    points = nodes.curve(STEP, SHARES, 12, [1, 2, 16, 1024], 1.25e9, 120_000, 2.0)
    assert [point.nodes for point in points] == [1, 2, 16, 1024]
    one = points[0]
    assert (one.seconds, one.exposed, one.efficiency) == pytest.approx((2.8, 0.0, 1.0))
    assert (one.epoch_hours, one.cost) == pytest.approx((120_000 / 12 * 2.8 / 3600, 2 * 120_000 / 12 * 2.8 / 3600))
    assert all(a.efficiency > b.efficiency and a.cost < b.cost for a, b in itertools.pairwise(points))
    assert nodes.curve(STEP, SHARES, 12, [1], 1e9, 1, None)[0].cost is None


def test_where_it_stops_paying() -> None:
    points = nodes.curve(STEP, SHARES, 12, [1, 2, 4, 1024], 0.2e9, 1000, None)
    pays = nodes.last_that_pays(points)
    assert all((point.efficiency >= nodes.PAYS) == (point.nodes <= pays) for point in points)
    assert 1 <= pays < 1024


def test_nothing_is_trained() -> None:
    assert nodes.exposed([(1.0, 0.0)], 8, 1e9) == 0
