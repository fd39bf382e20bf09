"""The oldest transformers that is served, and one between: flags, training, parity, checkpoints, `cputrain run`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from tests.integrations import earlier
from tests.integrations.test_trainer import SIDES, assert_same_history, history, keep_padding, trainer

__all__ = ["keep_padding"]  # a fixture, for all tests here too
OLDEST = "4.48"
PARITY_SAMPLE = 60
MOST_SKIPS = 7  # in the whole suite, on the oldest: six models that it doesn't have, and one thing that it can't do
SUITES = ("test_flags.py", "test_trainer.py", "test_accelerator.py", "test_balance.py")
SAVE = """
import sys
from pathlib import Path
from tests.integrations.test_trainer import trainer

side, folder, extra = sys.argv[1:]
options = {"save_strategy": "steps", "save_steps": 4, **({"use_ipex": True} if extra else {})}
trainer(side, Path(folder), options).train()
"""


def test_the_oldest_release_is_the_one_that_is_promised() -> None:
    assert f'"transformers>={OLDEST}"' in (earlier.ROOT / "pyproject.toml").read_text()
    assert next(iter(earlier.RELEASES)) == OLDEST
    for release in earlier.RELEASES:
        found = earlier.run(release, "-c", "import transformers; print(transformers.__version__)").stdout
        assert found.startswith(f"{release}.")
        assert not transformers.__version__.startswith(release), "this process has today's"


@pytest.fixture(scope="module", autouse=True)
def suites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[str], Path]]]:
    """Each release's run of the suites, beside the other tests here: a run is one thread."""
    folder, running = tmp_path_factory.mktemp("suites"), {}
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/integrations/{name}" for name in SUITES)]
    for release in earlier.RELEASES:
        said = folder / release
        with said.open("w") as file:
            running[release] = earlier.start(release, *command, stdout=file, stderr=subprocess.STDOUT), said
    yield running
    for process, _ in running.values():
        process.kill()
        process.wait()


def test_the_guides_commands_run_on_the_oldest() -> None:
    chosen = "tests/examples/test_run_qa.py::test_the_guides_commands_run[train_cpu.ja]"
    launched = "tests/examples/test_nlp_example.py::test_the_guides_launch"
    answer = earlier.run(OLDEST, "-m", "pytest", "-q", "-p", "no:cacheprovider", chosen, launched)
    assert answer.returncode == 0, answer.stdout[-5000:]
    assert "2 passed" in answer.stdout


TWO_RANKS = """
import torch.distributed as dist
from transformers import TrainingArguments
arguments = TrainingArguments("/tmp", no_cuda=True, use_ipex=True, ddp_backend="ccl", report_to="none")
print(arguments.world_size, dist.get_backend())
"""


def test_the_guides_exports_do_not_make_it_look_for_the_real_bindings(tmp_path: Path) -> None:
    """The accelerate of that time asks the package for its version as soon as CCL_WORKER_COUNT is set."""
    (tmp_path / "script.py").write_text(TWO_RANKS)
    launch = ["-m", "cputrain", "launch", "-n", "2", str(tmp_path / "script.py")]
    answer = earlier.run(OLDEST, *launch, CCL_WORKER_COUNT="1", CCL_ATL_TRANSPORT="ofi")
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.count("2 ccl") == 2


EXPLAIN = """
import sys
import cputrain
from tests.model_zoo import tiny
print(cputrain.explain(cputrain.optimize(tiny(sys.argv[1])[0])))
"""
STAYS = "attention and padding are stock's: transformers 4.48.3 has no registry of masks"


@pytest.mark.parametrize(
    ("model", "found", "missing"),
    [
        ("bert", "padding dropped between embeddings and head", STAYS),
        ("gpt2", STAYS, "padding dropped"),
    ],
)
def test_what_is_done_without_a_registry_of_masks(model: str, found: str, missing: str) -> None:
    """4.48 has no AttentionMaskInterface: encoders are served without it, decoders keep their padding."""
    answer = earlier.run(OLDEST, "-c", EXPLAIN, model, CPUTRAIN_PADDING="")
    assert answer.returncode == 0, answer.stderr
    assert found in answer.stdout and missing not in answer.stdout


HALF_PRECISION = """
import sys, torch, cputrain
from tests.model_zoo import tiny
model, batch = tiny(sys.argv[1])
cputrain.optimize(model.to(torch.bfloat16).train())
sum(found.float().sum() for found in model(**batch).values() if torch.is_tensor(found)).backward()
print({p.dtype for p in model.parameters()}, cputrain.explain(model))
"""


@pytest.mark.parametrize("release", earlier.RELEASES)
def test_models_in_half_precision_stay_as_they_are(release: str) -> None:
    answer = earlier.run(release, "-c", HALF_PRECISION, "gpt2", CPUTRAIN_PADDING="")
    assert answer.returncode == 0, answer.stderr
    assert "{torch.bfloat16}" in answer.stdout and "5.0 or later is needed" in answer.stdout


@pytest.mark.parametrize("release", earlier.RELEASES)
def test_a_part_of_the_parity_suite_passes(release: str) -> None:
    """CPUTRAIN_TEST_SEED chooses it; `python -m tests.integrations.earlier 4.48 -m pytest tests/parity` runs it all."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/parity"]
    answer = earlier.run(release, *command, CPUTRAIN_TEST_SAMPLE=str(PARITY_SAMPLE), CPUTRAIN_PADDING="")
    assert answer.returncode == 0, answer.stdout[-5000:]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped)", answer.stdout)}
    # Modules that are skipped whole, for want of a library, aren't of the sample.
    assert counts["passed"] + counts.get("skipped", 0) >= PARITY_SAMPLE
    assert counts.get("skipped", 0) <= MOST_SKIPS


# --- Checkpoint folders ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that stock and cputrain wrote under the oldest transformers."""
    folder = tmp_path_factory.mktemp("old")
    for side in SIDES:
        ipex = "use_ipex" if side == "ours" else ""
        answer = earlier.run(OLDEST, "-c", SAVE, side, str(folder), ipex, CPUTRAIN_PADDING="keep")
        assert answer.returncode == 0, answer.stderr[-3000:]
    return folder


@pytest.mark.parametrize("writer", SIDES)
def test_a_checkpoint_of_the_oldest_resumes_today(writer: str, saved: Path, tmp_path: Path) -> None:
    resumed = {}
    for side in SIDES:
        resumed[side] = trainer(side, tmp_path)
        resumed[side].train(resume_from_checkpoint=str(saved / writer / "checkpoint-4"))
    assert [line["step"] for line in history(resumed["ours"])][-1] == 8
    assert_same_history(resumed["ours"], resumed["stock"])


def test_what_the_oldest_wrote_is_the_same_under_cputrain(saved: Path) -> None:
    theirs, ours = (
        torch.load(saved / side / "checkpoint-8" / "optimizer.pt", weights_only=True) for side in ("stock", "ours")
    )
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        torch.testing.assert_close(ours["state"][number]["exp_avg"], state["exp_avg"], rtol=1e-3, atol=1e-6)


def test_arguments_of_the_oldest_can_be_read_today(saved: Path) -> None:
    arguments = torch.load(saved / "ours" / "checkpoint-8" / "training_args.bin", weights_only=False)
    assert type(arguments) is transformers.TrainingArguments
    assert arguments.use_ipex is True and arguments.max_steps == 8


# --- At the end, for they have been running since the beginning ---------------------------------------------------


@pytest.mark.parametrize("release", earlier.RELEASES)
def test_flags_trainer_and_accelerator_pass_their_tests(release: str, suites) -> None:
    """The same tests as today's transformers must pass."""
    process, file = suites[release]
    code = process.wait(570)
    said = file.read_text()
    assert code == 0, said[-5000:]
    assert int(re.search(r"(\d+) passed", said)[1]) >= 70
    assert "skipped" not in said
