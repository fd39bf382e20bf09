"""`make demo`: its data are what its generator makes, its scores are SQuAD's, and all of it runs, end to end."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

DEMO = Path(__file__).parent.parent.parent / "examples" / "demo"
sys.path.insert(0, str(DEMO))

import generate_data  # noqa: E402
import squad_data  # noqa: E402


def paragraphs(split: str) -> list[dict]:
    return json.loads(generate_data.make_split(split))["data"][0]["paragraphs"]


def names_in(text: str) -> set[str]:
    halves = [(generate_data.WOMEN + generate_data.MEN, generate_data.FAMILIES)]
    halves += [(generate_data.TOWN_FIRST, generate_data.TOWN_LAST)]
    halves += [(generate_data.COMPANY_FIRST, generate_data.COMPANY_LAST)]
    names = {f"{first} {last}" for firsts, lasts in halves for first in firsts for last in lasts}
    return {name for name in names if name in text}


@pytest.mark.parametrize("split", ["train", "held-back"])
def test_shipped_data_are_what_the_generator_makes(split: str) -> None:
    with gzip.open(generate_data.DATA / f"{split}.json.gz") as file:
        assert file.read() == generate_data.make_split(split)


def test_shipped_tokenizer_is_what_the_training_text_gives() -> None:
    examples = squad_data.load_examples(generate_data.DATA / "train.json.gz")
    built = squad_data.build_tokenizer(text for e in examples for text in (e.question, e.context))
    shipped = squad_data.Tokenizer.from_file(str(generate_data.DATA / "tokenizer.json"))
    assert json.loads(built.to_str()) == json.loads(shipped.to_str())


@pytest.mark.parametrize("split", ["train", "held-back"])
def test_every_answer_stands_where_the_data_say(split: str) -> None:
    for paragraph in paragraphs(split):
        for question in paragraph["qas"]:
            (answer,) = question["answers"]
            assert paragraph["context"][answer["answer_start"] :].startswith(answer["text"])


def test_no_held_back_name_occurs_in_the_training_data() -> None:
    train, held_back = (generate_data.make_split(split).decode() for split in ("train", "held-back"))
    assert len(names_in(held_back)) > 100
    assert not names_in(held_back) & names_in(train)


def test_features_point_at_their_answers_and_fit_in_less_than_half_of_the_padding() -> None:
    import training_side

    tokenizer = squad_data.Tokenizer.from_file(str(generate_data.DATA / "tokenizer.json"))
    examples = squad_data.load_examples(generate_data.DATA / "held-back.json.gz")
    features = [squad_data.make_feature(tokenizer, example, training_side.PADDED_LENGTH) for example in examples]
    for example, feature in zip(examples, features, strict=True):
        assert squad_data.span_text(example, feature, (feature.start, feature.end)) == example.answer
    assert sum(len(feature.ids) for feature in features) < len(features) * training_side.PADDED_LENGTH / 2


def test_a_text_that_does_not_fit_is_refused() -> None:
    tokenizer = squad_data.Tokenizer.from_file(str(generate_data.DATA / "tokenizer.json"))
    example = squad_data.load_examples(generate_data.DATA / "held-back.json.gz")[0]
    with pytest.raises(ValueError, match="tokens do not fit into 9"):
        squad_data.make_feature(tokenizer, example, 9)


@pytest.mark.parametrize(
    ("prediction", "truth", "score"),
    [
        ("Ada Berg", "ada berg.", 1.0),
        ("the Ada Berg", "Ada Berg", 1.0),  # articles don't count
        ("Berg", "Ada Berg", 2 / 3),
        ("Olga Lund", "Ada Berg", 0.0),
        ("Berg Berg", "Ada Berg", 0.5),  # a word is found as often as it occurs
    ],
)
def test_f1_is_that_of_squad(prediction: str, truth: str, score: float) -> None:
    assert squad_data.f1_score(prediction, truth) == pytest.approx(score)


def test_best_span_stays_inside_the_context_and_in_order() -> None:
    context = torch.tensor([[False, True, True, True]])
    start, end = torch.tensor([[9.0, 1.0, 2.0, 5.0]]), torch.tensor([[9.0, 6.0, 4.0, 0.0]])
    # (0, 0) is not in the context and (3, 1) ends before it starts, though both have higher sums.
    assert squad_data.best_spans(start, end, context) == [(1, 1)]


def test_loss_over_real_positions_ignores_what_stands_at_padded_ones() -> None:
    import training_side
    from transformers.modeling_outputs import QuestionAnsweringModelOutput

    torch.manual_seed(0)
    logits = torch.randn(2, 3, 6)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]] * 3)
    place = torch.tensor([0, 3, 2])
    batch = {"attention_mask": mask, "start_positions": place, "end_positions": place}
    unpadded = [torch.nn.functional.cross_entropy(part[:, :4], place).item() for part in logits]
    logits[:, :, 4:] = 50.0
    outputs = QuestionAnsweringModelOutput(start_logits=logits[0], end_logits=logits[1])
    assert training_side.real_loss(outputs, batch) == pytest.approx(sum(unpadded) / 2)


def test_quick_demo_runs_both_sides_and_reports_them(tmp_path: Path) -> None:
    report = tmp_path / "demo.json"
    command = [sys.executable, str(DEMO / "run_demo.py"), "--quick", "--threads", "1", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(report.read_text())
    for side in ("stock", "cputrain"):
        assert 0 < results[side]["loss"] < 6
        assert 0 <= results[side]["exact_match"] <= results[side]["f1"] <= 100
        assert results[side]["peak_mb"] > 100
        assert results[side]["steps_per_second"] > 0
    assert results["ratio"] > 0
    for line in ("steps per second", "F1 on held-back questions", "peak memory, MB", "cputrain.explain(model)"):
        assert line in done.stdout


def test_a_number_of_steps_that_makes_no_whole_turns_is_refused() -> None:
    command = [sys.executable, str(DEMO / "run_demo.py"), "--steps", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--steps is 7; choose a multiple of 5" in done.stderr
