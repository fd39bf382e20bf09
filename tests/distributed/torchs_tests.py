"""torch's own tests of a backend, run by unittest in this process; a line of JSON on standard output for each:

    WORLD_SIZE=2 BACKEND=ccl python -m tests.distributed.torchs_tests [test_all_reduce_sum …]

When torch's module is imported, it decides by the backend's name which tests there are. `ccl` is treated as `gloo`
there: its name compares equal to gloo's. Ranks are forked: spawned ones would each import torch anew.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
from typing import Any
from unittest import mock

import torch.multiprocessing
from torch.testing._internal import common_distributed


class AsGloo(str):
    """A backend's name, for comparisons gloo's, too."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


BACKEND = os.environ["BACKEND"]
if BACKEND == "ccl":
    import cputrain.distributed  # noqa: F401

    common_distributed.DistTestCases.backend_feature["plugin"].add(BACKEND)
    with mock.patch.object(os, "environ", {**os.environ, "BACKEND": AsGloo(BACKEND)}):
        from torch.testing._internal.distributed import distributed_test
    for supported in (
        distributed_test.PROFILING_SUPPORTED_BACKENDS,
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        supported.append(BACKEND)
else:
    from torch.testing._internal.distributed import distributed_test


class TorchsTests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class _Report(unittest.TestResult):
    """Prints how each test ended; torch's tests print too, so that the lines go to a file descriptor of their own."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self._lines = lines

    def _say(self, test: unittest.TestCase, outcome: str, words: str = "") -> None:
        line = json.dumps({"name": test.id().rpartition(".")[2], "outcome": outcome, "words": words})
        os.write(self._lines, f"{line}\n".encode())

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._say(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._say(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._say(test, "failed", str(err[1]))

    addError = addFailure


def main() -> None:
    lines = os.dup(1)
    os.dup2(2, 1)
    names = sys.argv[1:] or unittest.TestLoader().getTestCaseNames(TorchsTests)
    unittest.TestSuite(map(TorchsTests, names)).run(_Report(lines))


if __name__ == "__main__":
    main()
