"""A few of each fault; `python -m tests.checkpoints.faults --times 1000` has more."""

from __future__ import annotations

from collections import Counter

from tests.checkpoints import faults


def test_no_fault_loses_the_last_good_checkpoint_or_loads_a_bad_one() -> None:
    done = Counter(faults.inject(seed) for seed in range(5 * len(faults.FAULTS)))
    assert done == Counter({fault.__name__: 5 for fault in faults.FAULTS})
