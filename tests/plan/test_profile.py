"""Measurements of another machine, and runs that were recorded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from cputrain.plan import profile, seen
from cputrain.plan.estimate import Estimate
from cputrain.plan.profile import Profile
from tests.plan.made import LAYERS, MB, job, measured

MACHINE = {"cpu": "another CPU", "cores": 2, "memory": 8e9}


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "server.json"
    wide = {"after_forward": 1.0, "after_backward": 2.0, "peak": 3.0, "sequences": 9.0, "trained": 1.0, "layers": 1.0}
    first, second = measured(wide=wide), measured(job=job(lora=16, targets=("q", "v")))
    kept = Profile(MACHINE, [])
    for one in (first, second, first):
        kept.add(one)
    profile.save(path, kept)
    loaded = profile.load(path)
    assert loaded.machine == MACHINE and loaded.found == [second, first]
    assert loaded.of(job(sequences=99), 1) == first  # any number of sequences
    assert loaded.of(job(lora=16, targets=("q", "v")), 1) == second
    assert loaded.of(job(length=64), 1) is None and loaded.of(job(), 2) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"cputrain_profile": 2}',
        '{"cputrain_profile": 1, "machine": {}, "measured": []}',
        '{"cputrain_profile": 1, "machine": {}, "measured": [{"job": {"evil": 1}}]}',
        "[" * 100_000,
    ],
)
def test_what_is_no_profile_gets_a_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"file.json is no profile of this release: write one with --save-profile"):
        profile.load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"can't be read: No such file"):
        profile.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"can't be written"):
        profile.save(tmp_path / "none" / "server.json", Profile(MACHINE, [measured()]))


def test_what_the_profile_lacks_is_scaled_by_the_speed_of_products() -> None:
    there = Profile(MACHINE, [measured(gflops=50.0)])
    found = profile.scaled(measured(job=job(length=64)), there)
    assert Estimate(found).step(4).seconds == pytest.approx(2 * Estimate(measured()).step(4).seconds)
    assert Estimate(found).peak(4) == pytest.approx(Estimate(measured()).peak(4))


# --- Runs --------------------------------------------------------------------------------------------------------


def record(folder: Path, **head: object) -> Path:
    """A run of 4 × 128 tokens, half of them padding; each step took 1.5 s."""
    facts = {
        "kind": "run",
        "model": {"parameters": 15e6, "trained": 15e6},
        "dtype": "int16",
        "threads": 2,
        "machine": {"cpu": "a CPU"},
        "arguments": {"gradient_accumulation_steps": 1},
    }
    step = {"kind": "steps", "s": 1.5, "n": 1, "real": 256, "padded": 512}
    lines = [facts | head, *({**step, "step": number, "t": 1.5 * number} for number in range(1, 6))]
    lines.append({"kind": "end", "t": 8, "step": 5, "how": "ended", "peak": 700 * MB})
    path = folder / "_cputrain" / "run-0.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_a_plan_says_how_far_it_is_off(tmp_path: Path) -> None:
    """256 real tokens are as much work as two of the plan's sequences without padding."""
    estimate = Estimate(measured())
    found = seen.compare(record(tmp_path), estimate)
    assert found.why_not is None
    assert (found.seconds, found.planned_seconds) == pytest.approx((1.5, estimate.step(2).seconds))
    assert (found.memory, found.planned_memory) == pytest.approx((700 * MB, estimate.peak(2)))


def test_accumulated_gradients_are_several_forwards(tmp_path: Path) -> None:
    record(tmp_path, arguments={"gradient_accumulation_steps": 2})
    step = Estimate(measured()).step(1)
    found = seen.compare(tmp_path, Estimate(measured(), accumulation=2))
    assert found.planned_seconds == pytest.approx(2 * (step.forward + step.backward) + step.optimizer)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        ({"model": {"parameters": 7, "trained": 7}}, "it had 7 parameters, the plan 15,000,000"),
        ({"model": "none"}, "it had 0 parameters"),
        ({"dtype": "fp32"}, "it ran in fp32, the plan is for int16"),
        ({"threads": 8}, "it had 8 threads, the plan has 2"),
        ({"machine": {}}, "it ran on another CPU"),
    ],
)
def test_runs_that_say_nothing(tmp_path: Path, head: dict, why: str) -> None:
    found = seen.compare(record(tmp_path, **head), Estimate(measured()))
    assert found.why_not is not None and why in found.why_not and found.seconds is None


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no record of a run"):
        seen.compare(tmp_path, Estimate(measured()))


def test_a_job_keeps_all_of_itself_as_json() -> None:
    from cputrain.trials.jobs import from_answer

    one = job(lora=8, targets=("a", "b"), quantised=True, checkpointing=True)
    assert from_answer(json.loads(json.dumps(dataclasses.asdict(one)))) == one
    assert one.layers == LAYERS
