"""DDP, fully_shard, ZeroRedundancyOptimizer, Trainer and Accelerate on two ranks: the parameters of one process."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.ranks import Outcome, cases_of
from tests.integrations import tiny

MODULE = "tests.distributed.trainings"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> Outcome:
    folder = tmp_path_factory.mktemp("trainings")
    outcome = Outcome(folder, 2, MODULE, TRAINED_IN=str(folder))
    outcome.folder = folder
    return outcome


@pytest.mark.parametrize("case", cases_of(MODULE))
def test_training(case: str, outcome: Outcome) -> None:
    outcome.check(case)


def test_trainer_trains_as_one_process_does(outcome: Outcome, tmp_path) -> None:
    from cputrain import Trainer, TrainingArguments

    outcome.check("trainer")
    model = tiny.bert()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=4,
        learning_rate=1e-1,
        optim="sgd",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=tiny.windows(16)).train()
    for rank in range(2):
        found = torch.load(outcome.folder / f"{rank}.pt", weights_only=True)
        for name, value in model.state_dict().items():
            if "key.bias" not in name:  # whose gradient is zero in exact arithmetic
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
