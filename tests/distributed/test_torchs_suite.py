"""A few of torch's own tests of a backend on ccl; `make soak` runs them all, and compares with gloo."""

from __future__ import annotations

import pytest

from tests.distributed import torchs_suite
from tests.distributed.torchs_suite import Outcome

QUICK = [
    "test_all_gather_coalesced_simple",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_sum_async",
    "test_ddp_logging_data_cpu",
    "test_isend_torch_profiler",
    "test_reduce_sum_twice",
    "test_scatter_object_list",
    "test_send_recv_any_source",
]


@pytest.mark.timeout(300)
def test_some_of_torchs_own_tests_pass():
    found = torchs_suite.run("ccl", 2, QUICK)
    assert {name: found[name].outcome for name in QUICK} == dict.fromkeys(QUICK, "passed"), found


def test_what_only_gloo_passes_is_found():
    passed, failed, skipped = Outcome("passed", ""), Outcome("failed", "why"), Outcome("skipped", "")
    wording = next(iter(torchs_suite.WORDING))
    gloo = {"same": passed, "failed": passed, "left": passed, "gone": passed, wording: passed, "other": failed}
    ccl = {"same": passed, "failed": failed, "left": skipped, wording: failed, "other": failed}
    assert list(torchs_suite.worse(gloo, ccl)) == ["failed", "left", "gone"]
