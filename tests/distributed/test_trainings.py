"""DDP, fully_shard, ZeroRedundancyOptimizer, Trainer and Accelerate on several ranks: the parameters of one process."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.ranks import Outcome, cases_of
from tests.integrations import tiny

MODULE, LIBRARIES = "tests.distributed.trainings", "tests.distributed.library_trainings"


@pytest.fixture(scope="module", params=[1, 2, 3, 4, 8])
def outcome(request, tmp_path_factory) -> Outcome:
    return Outcome(tmp_path_factory.mktemp("trainings"), request.param, MODULE)


@pytest.mark.parametrize("case", cases_of(MODULE))
def test_training(case: str, outcome: Outcome) -> None:
    outcome.check(case)


@pytest.fixture(scope="module", params=[2, 3])
def libraries(request, tmp_path_factory) -> Outcome:
    folder = tmp_path_factory.mktemp("libraries")
    outcome = Outcome(folder, request.param, LIBRARIES, TRAINED_IN=str(folder))
    outcome.folder, outcome.ranks = folder, request.param
    return outcome


@pytest.mark.parametrize("case", cases_of(LIBRARIES))
def test_training_with_libraries(case: str, libraries: Outcome) -> None:
    libraries.check(case)


def test_trainer_trains_as_one_process_does(libraries: Outcome, tmp_path) -> None:
    from cputrain import Trainer
    from tests.distributed.library_trainings import BATCH, WINDOWS, arguments

    libraries.check("trainer")
    model = tiny.bert()
    Trainer(model, arguments(str(tmp_path), BATCH), train_dataset=WINDOWS).train()
    for rank in range(libraries.ranks):
        found = torch.load(libraries.folder / f"{rank}.pt", weights_only=True)
        for name, value in model.state_dict().items():
            if "key.bias" not in name:  # whose gradient is zero in exact arithmetic
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
