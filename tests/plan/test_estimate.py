"""What follows from trials: exact where things grow evenly, and the largest batch is the largest."""

from __future__ import annotations

import dataclasses

import pytest

from cputrain.plan.estimate import Estimate
from tests.plan.made import LAYERS, MB, job, measured, point


@pytest.mark.parametrize("layers", [(1, 4), (1, 2), (1, LAYERS)])
@pytest.mark.parametrize("sequences", [1, 4, 50])
def test_what_grows_evenly_is_found_exactly(layers: tuple[int, ...], sequences: int) -> None:
    estimate, whole = Estimate(measured(layers)), point(LAYERS, sequences)
    step, parts = estimate.step(sequences), estimate.parts(sequences)
    assert step.seconds == pytest.approx(whole["forward"] + whole["backward"] + whole["optimizer"])
    assert (parts.weights, parts.gradients, parts.moments) == pytest.approx((60 * MB, 60 * MB, 120 * MB))
    assert (parts.activations, parts.head) == pytest.approx((2 * LAYERS * sequences * MB, sequences * MB))


def test_the_peak_is_at_the_end_of_the_forward_or_of_the_backward() -> None:
    """With few sequences gradients are more than activations, with many less: trials saw the first only."""
    estimate = Estimate(measured((1, 4), (2, 4)))
    assert point(4, 2)["after_backward"] > point(4, 2)["after_forward"]
    assert point(LAYERS, 50)["after_backward"] < point(LAYERS, 50)["after_forward"]
    for sequences in (2, 4, 50):
        assert estimate.peak(sequences) == pytest.approx(400 * MB + point(LAYERS, sequences)["peak"])


def test_a_trial_with_many_sequences_says_how_working_memory_grows() -> None:
    wide = {**point(4, 40), "sequences": 40.0, "layers": 4.0}
    wide["peak"] += 36 * MB  # a megabyte more for each beyond the four of the other trials
    assert Estimate(measured(wide=wide)).peak(104) == pytest.approx(400 * MB + point(LAYERS, 104)["peak"] + 100 * MB)


def test_noise_makes_nothing_negative() -> None:
    noisy = measured()
    noisy.points[1][1]["peak"] = noisy.points[0][0]["peak"]
    noisy.points[1][1]["backward"] = 0.0
    estimate = Estimate(noisy)
    assert min(dataclasses.astuple(estimate.parts(64))) >= 0
    assert min(dataclasses.astuple(estimate.step(64))) >= 0
    assert estimate.peak(64) >= 400 * MB + 240 * MB


@pytest.mark.parametrize("limit", [700 * MB, 2e9, 64e9])
def test_the_largest_batch_fits_and_one_more_does_not(limit: float) -> None:
    estimate = Estimate(measured())
    named = estimate.largest(limit)
    assert estimate.peak(named) <= 0.95 * limit < estimate.peak(named + 1)


def test_no_batch_fits_where_weights_alone_do_not() -> None:
    assert Estimate(measured()).largest(500 * MB) == 0


def test_ranks_and_accumulation_keep_gradients() -> None:
    alone, shares = Estimate(measured()), Estimate(measured(), shares=True)
    assert shares.peak(50) == pytest.approx(alone.peak(50) + 60 * MB)
    accumulating = Estimate(measured(), accumulation=3)
    assert accumulating.peak(50) == pytest.approx(shares.peak(50))
    one = alone.step(4)
    assert accumulating.step(4).seconds == pytest.approx(3 * (one.forward + one.backward) + one.optimizer)


def test_a_script_has_its_own_process_and_uneven_batches() -> None:
    usual = Estimate(measured())
    assert Estimate(measured(), base=900 * MB).peak(4) == pytest.approx(usual.peak(4) + 500 * MB)
    assert Estimate(measured(), unevenness=2.0).peak(50) == pytest.approx(usual.peak(100))


def test_a_model_that_was_tried_as_a_whole() -> None:
    found = measured((LAYERS,), job=job())
    assert Estimate(found).peak(50) == pytest.approx(400 * MB + point(LAYERS, 50)["peak"])
    assert Estimate(found).parts(4).head == 0  # not told apart


def test_working_memory_grows_at_most_as_what_is_in_use() -> None:
    """Two depths that are close to each other say little: noise times the other layers would be most of the answer."""
    noisy = measured((2, 3))
    noisy.points[1][1]["peak"] += 50 * MB  # 74 MB beside what is in use, where the other depth has 24
    beside = Estimate(noisy).peak(4) - 400 * MB - point(LAYERS, 4)["after_forward"]
    assert beside == pytest.approx(74 * MB * point(LAYERS, 4)["after_forward"] / point(3, 4)["after_backward"])
