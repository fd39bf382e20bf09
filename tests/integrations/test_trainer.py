"""Trainer under cputrain trains, evaluates, saves and resumes as stock's does, to the last digits that fp32 has."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as stock
from safetensors.torch import load_file

import cputrain
from cputrain import api
from tests.integrations.tiny import bert, windows

DATA = windows(32)
SIDES = {"stock": (stock.Trainer, stock.TrainingArguments), "ours": (cputrain.Trainer, cputrain.TrainingArguments)}
OPTIONS: dict[str, dict] = {
    "plain": {},
    "accumulation and clipping": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5},
    "warm-up and cosine": {"warmup_steps": 3, "lr_scheduler_type": "cosine", "weight_decay": 0.1},
    "evaluation between": {"eval_strategy": "steps", "eval_steps": 3},
    "gradient checkpointing": {"gradient_checkpointing": True},
}


@pytest.fixture(autouse=True)
def keep_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's question-answering loss has padded positions in it: only with them can both be compared."""
    monkeypatch.setenv("CPUTRAIN_PADDING", "keep")


def trainer(side: str, folder: Path, options: dict | None = None, **others) -> stock.Trainer:
    kind, arguments_of = SIDES[side]
    settings = {
        "output_dir": str(folder / side),
        "use_cpu": True,
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    arguments = arguments_of(**settings | (options or {}))
    return kind(others.pop("model", None) or bert(), arguments, train_dataset=DATA, eval_dataset=DATA[:10], **others)


def history(of: stock.Trainer) -> list[dict[str, float]]:
    """What was logged at each step, without the clock and the summary, which after a resume is of the rest alone."""
    return [
        {name: float(value) for name, value in line.items() if "runtime" not in name and "per_second" not in name}
        for line in of.state.log_history
        if "train_loss" not in line
    ]


def assert_same_history(one: stock.Trainer, other: stock.Trainer) -> None:
    assert len(history(one)) == len(history(other)) > 1
    for line, expected in zip(history(one), history(other), strict=True):
        assert line == pytest.approx(expected, rel=1e-4, abs=1e-6)


def optimizer_is_ours(of: stock.Trainer) -> bool:
    return any(what == "optimizer" and "one pass" in why for what, _, why in api.explain(of.model).facts)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_step_is_stocks(options: dict, tmp_path: Path) -> None:
    sides = {side: trainer(side, tmp_path, options) for side in SIDES}
    for side in sides.values():
        side.train()
    assert_same_history(sides["ours"], sides["stock"])
    assert api.is_optimized(sides["ours"].model) and optimizer_is_ours(sides["ours"])
    assert not api.is_optimized(sides["stock"].model)


def test_a_callers_optimizer_and_schedule_are_used(tmp_path: Path) -> None:
    trained = {}
    for side in SIDES:
        model = bert()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.1)
        trained[side] = trainer(side, tmp_path, model=model, optimizers=(optimizer, schedule))
        trained[side].train()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.1**2)
    assert_same_history(trained["ours"], trained["stock"])
    assert optimizer_is_ours(trained["ours"])


def test_a_model_is_optimised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = api.optimize
    monkeypatch.setattr(api, "optimize", lambda *of, **how: (calls.append(of), real(*of, **how))[1])
    ours = trainer("ours", tmp_path)
    ours.train()
    ours.evaluate()
    ours.predict(DATA[:3])
    ours.train()
    assert len(calls) == 1


def test_evaluation_alone_is_optimised_too(tmp_path: Path) -> None:
    ours = trainer("ours", tmp_path)
    loss = ours.evaluate()["eval_loss"]
    assert api.is_optimized(ours.model)
    assert loss == pytest.approx(trainer("stock", tmp_path).evaluate()["eval_loss"], rel=1e-5)


def test_predictions_are_stocks(tmp_path: Path) -> None:
    ours, theirs = (trainer(side, tmp_path).predict(DATA[:7]) for side in ("ours", "stock"))
    for logits, expected in zip(ours.predictions, theirs.predictions, strict=True):
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_padding_costs_no_accuracy_where_it_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out is padding alone: the loss is stock's on the same windows without it, one at a time."""
    monkeypatch.setenv("CPUTRAIN_PADDING", "drop")
    ours = trainer("ours", tmp_path).evaluate()["eval_loss"]
    model = bert().eval()
    losses = []
    for window in DATA[:10]:
        real = int(window["attention_mask"].sum())
        batch = {name: (value[:real] if value.ndim else value)[None] for name, value in window.items()}
        losses.append(model(**batch).loss.item())
    assert ours == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize(("before", "after"), [("ours", "stock"), ("stock", "ours"), ("ours", "ours")])
def test_a_checkpoint_resumes_on_either_side(before: str, after: str, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 4}
    whole = trainer("stock", tmp_path / "whole", {**options})
    whole.train()
    trainer(before, tmp_path, options).train()
    resumed = trainer(after, tmp_path / "resumed", options)
    resumed.train(resume_from_checkpoint=str(tmp_path / before / "checkpoint-4"))
    assert_same_history(resumed, whole)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int16"])
def test_the_best_model_is_loaded_at_the_end(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights come back behind our back: the next forward computes with them."""
    monkeypatch.setenv("CPUTRAIN_DTYPE", dtype)
    every = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    # So fast that it gets worse: the last model isn't the best.
    options = {**every, "load_best_model_at_end": True, "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    ours = trainer("ours", tmp_path, options)
    ours.train()
    found = [line["eval_loss"] for line in ours.state.log_history if "eval_loss" in line]
    assert min(found) < found[-1]
    assert ours.evaluate()["eval_loss"] == min(found)


def test_what_is_saved_is_stocks(tmp_path: Path) -> None:
    saved = {}
    for side in SIDES:
        trainer(side, tmp_path, {"save_strategy": "steps", "save_steps": 8}).train()
        folder = tmp_path / side / "checkpoint-8"
        saved[side] = sorted(file.name for file in folder.iterdir()), json.loads((folder / "config.json").read_text())
        loaded = stock.BertForQuestionAnswering.from_pretrained(folder)
        assert loaded.state_dict().keys() == bert().state_dict().keys()
    (ours, config), (stocks, stock_config) = saved["ours"], saved["stock"]
    assert set(ours) - set(stocks) == {"cputrain_manifest.json", "cputrain_state.json"}
    assert set(stocks) <= set(ours) and config == stock_config


def test_saved_arguments_name_stocks_class(tmp_path: Path) -> None:
    arguments = cputrain.TrainingArguments(output_dir=str(tmp_path), use_ipex=True, bf16=True)
    torch.save(arguments, tmp_path / "training_args.bin")
    loaded = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert type(loaded) is stock.TrainingArguments
    assert loaded.bf16 and loaded.use_cpu and loaded.output_dir == str(tmp_path)


class Weighted(cputrain.Trainer):
    """A user's own loss."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs = model(**inputs)
        loss = 3 * outputs.loss + outputs.start_logits.float().pow(2).mean()
        return (loss, outputs) if return_outputs else loss


class StockWeighted(stock.Trainer):
    compute_loss = Weighted.compute_loss


class Counting(stock.TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_):
        self.seen.append(f"{type(model).__name__} {lr_scheduler.get_last_lr()[0]:.3e}")


def test_subclasses_with_their_own_loss_and_callbacks_see_what_they_expect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIDES, "ours", (Weighted, cputrain.TrainingArguments))
    monkeypatch.setitem(SIDES, "stock", (StockWeighted, stock.TrainingArguments))
    trained = {}
    for side in SIDES:
        callback = Counting()
        trained[side] = trainer(side, tmp_path, callbacks=[callback])
        trained[side].train()
        trained[side].seen = callback.seen
    assert_same_history(trained["ours"], trained["stock"])
    assert trained["ours"].seen == trained["stock"].seen
    assert len(trained["ours"].seen) == 8


def test_use_ipex_false_is_stock_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = trainer("ours", tmp_path, {"use_ipex": False})
    ours.train()
    ours.evaluate()
    assert not api.is_optimized(ours.model)
    assert [line for line in caplog.messages if "stays out" in line] == [
        "cputrain stays out: IPEX is off (use_ipex, or ipex in the configuration)"
    ]


def test_torch_compile_is_left_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = trainer("ours", tmp_path, {"torch_compile": True, "torch_compile_backend": "eager"})
    ours.evaluate()
    assert not api.is_optimized(ours.model)
    assert any("torch.compile was asked for" in line for line in caplog.messages)


def test_bf16_never_enters_autocast(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen = []
    ours = trainer("ours", tmp_path, {"bf16": True})
    ours.model.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    ours.train()
    ours.evaluate()
    assert set(seen) == {False}
    assert len([line for line in caplog.messages if line.startswith("the script asks for bf16, ")]) == 1


def test_a_model_loaded_in_bf16_is_saved_as_fp32_and_resumes_exactly(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 4}
    whole = trainer("ours", tmp_path, options, model=bert().to(torch.bfloat16))
    whole.train()
    weights = load_file(tmp_path / "ours" / "checkpoint-4" / "model.safetensors")
    is_served = int(stock.__version__.partition(".")[0]) >= 5  # earlier releases keep what was loaded
    dtype = torch.float32 if is_served else torch.bfloat16
    assert {weight.dtype for weight in weights.values()} == {dtype}
    again = trainer("ours", tmp_path, options, model=bert().to(torch.bfloat16))
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-4"))
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert one.dtype == dtype and torch.equal(one, other)
