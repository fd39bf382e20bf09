"""Accelerator.prepare optimises what it is given, in any order, and everything else is stock's."""

from __future__ import annotations

import itertools

import accelerate
import pytest
import torch
from torch.utils.data import DataLoader

from cputrain import Accelerator, api
from cputrain.integrations.notices import Refused
from cputrain.optimizers import takeover
from tests.integrations.tiny import bert, windows

DATA = windows(16)


@pytest.fixture(autouse=True)
def keep_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPUTRAIN_PADDING", "keep")


def parts():
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": DataLoader(DATA, batch_size=4)}


def is_taken_over(optimizer: torch.optim.Optimizer) -> bool:
    inner = takeover.unwrapped(optimizer)
    return "_init_group" in inner.__dict__


def losses(accelerator: accelerate.Accelerator) -> list[tuple[float, float]]:
    """Loss and rate of each step of a loop as Accelerate's guides write it."""
    made = parts()
    ready = dict(zip(made, accelerator.prepare(*made.values()), strict=True))
    found = []
    for batch in ready["loader"]:
        with accelerator.accumulate(ready["model"]):
            loss = ready["model"](**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(ready["model"].parameters(), 0.5)
            ready["optimizer"].step()
            ready["schedule"].step()
            ready["optimizer"].zero_grad()
        found.append((loss.item(), made["optimizer"].param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize("order", list(itertools.permutations(["model", "optimizer", "schedule", "loader"]))[::5])
def test_the_order_of_arguments_does_not_matter(order) -> None:
    made = parts()
    ready = dict(zip(order, Accelerator(cpu=True).prepare(*(made[name] for name in order)), strict=True))
    assert ready["model"] is made["model"] and api.is_optimized(made["model"])
    assert is_taken_over(made["optimizer"])
    assert ready["optimizer"].optimizer is made["optimizer"]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_step_and_rate_are_stocks(accumulate: int) -> None:
    """The scheduler was made before `prepare`, as everybody does, and still moves the rate."""
    expected = losses(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    found = losses(Accelerator(cpu=True, gradient_accumulation_steps=accumulate))
    assert [rate for _, rate in found] == [rate for _, rate in expected]
    assert len({rate for _, rate in found}) > 1
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-4)


def test_several_models_get_their_own_optimizers() -> None:
    one, other = bert(seed=1), bert(seed=2)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (one, other)]
    Accelerator(cpu=True).prepare(optimizers[1], one, optimizers[0], other)
    assert api.is_optimized(one) and api.is_optimized(other)
    assert all(map(is_taken_over, optimizers))
    api.restore(one)
    assert not is_taken_over(optimizers[0]) and is_taken_over(optimizers[1])


def test_model_and_optimizer_may_come_one_after_the_other() -> None:
    accelerator, made = Accelerator(cpu=True), parts()
    accelerator.prepare(made["model"])
    accelerator.prepare(made["optimizer"])
    assert api.is_optimized(made["model"]) and is_taken_over(made["optimizer"])


def test_a_model_that_the_script_optimised_stays_as_it_is(monkeypatch) -> None:
    monkeypatch.delenv("CPUTRAIN_PADDING")
    made = parts()
    api.optimize(made["model"], padding="drop")
    monkeypatch.setenv("CPUTRAIN_PADDING", "keep")
    Accelerator(cpu=True).prepare(made["model"], made["optimizer"])
    assert ("padding", "drop") in [(what, value) for what, value, _ in api.explain(made["model"]).facts]
    assert is_taken_over(made["optimizer"])


def test_bf16_is_named_but_autocast_is_not_entered(caplog) -> None:
    accelerator, made = Accelerator(cpu=True, mixed_precision="bf16"), parts()
    assert accelerator.mixed_precision == "bf16"
    model = accelerator.prepare(made["model"])
    with accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
    assert "_original_forward" not in model.__dict__
    assert len([line for line in caplog.messages if "the script asks for bf16" in line]) == 1


def test_fp16_is_refused() -> None:
    with pytest.raises(Refused, match="fp16 doesn't train on CPUs"):
        Accelerator(cpu=True, mixed_precision="fp16")


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_ipex_false_in_the_configuration_is_stock(mixed_precision: str, monkeypatch, caplog) -> None:
    monkeypatch.setenv("CPUTRAIN_IPEX", "false")
    accelerator, made = Accelerator(cpu=True, mixed_precision=mixed_precision), parts()
    accelerator.prepare(*made.values())
    assert not api.is_optimized(made["model"]) and not is_taken_over(made["optimizer"])
    assert accelerator.native_amp == (mixed_precision == "bf16")
    assert sum("stays out: IPEX is off" in line for line in caplog.messages) == 1


def test_beside_a_gpu_it_stays_out_and_says_so(monkeypatch, caplog) -> None:
    accelerator, made = Accelerator(cpu=True), parts()
    monkeypatch.setattr(type(accelerator), "device", torch.device("cuda:0"))
    accelerator._decide(use_ipex=None)
    monkeypatch.setattr(accelerate.Accelerator, "prepare_model", lambda self, model, **_: model)
    accelerator.prepare(made["model"])
    accelerator.prepare(made["model"])
    assert not api.is_optimized(made["model"])
    assert [line for line in caplog.messages if "stays out" in line] == [
        "cputrain stays out: it runs on cuda:0; --use_cpu or Accelerator(cpu=True) chooses the CPU"
    ]


def test_what_is_not_recognised_trains_as_stock_with_one_line(caplog) -> None:
    model = torch.nn.Conv1d(1, 1, 3)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.prepare(torch.nn.Conv1d(1, 1, 3))
    assert caplog.messages.count("Conv1d trains as stock: it has no part that cputrain knows") == 1


def test_an_optimizer_that_keeps_its_own_step_is_named_once(caplog) -> None:
    accelerator, made = Accelerator(cpu=True), parts()
    for _ in range(2):
        accelerator.prepare(made["model"], torch.optim.RMSprop(made["model"].parameters()))
    assert [line for line in caplog.messages if "keeps its own step" in line] == [
        "RMSprop keeps its own step: only torch.optim's Adam, AdamW, SGD have a fused one"
    ]


def test_loaders_alone_say_nothing(caplog) -> None:
    Accelerator(cpu=True).prepare(DataLoader(DATA))
    assert caplog.messages == []


def test_state_is_saved_and_loaded_as_stock(tmp_path) -> None:
    accelerator, made = Accelerator(cpu=True), parts()
    model, optimizer, loader = accelerator.prepare(made["model"], made["optimizer"], made["loader"])
    for batch in itertools.islice(loader, 2):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(tmp_path))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)

    plain, fresh = accelerate.Accelerator(cpu=True), parts()
    model, optimizer, loader = plain.prepare(fresh["model"], fresh["optimizer"], fresh["loader"])
    plain.load_state(str(tmp_path))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    steps = {state["step"].item() for state in fresh["optimizer"].state_dict()["state"].values()}
    assert steps == {2.0}


def test_unwrapping_gives_the_model(tmp_path) -> None:
    accelerator, made = Accelerator(cpu=True), parts()
    model = accelerator.prepare(made["model"])
    assert accelerator.unwrap_model(model) is made["model"]
    accelerator.save_model(model, str(tmp_path))
    assert (tmp_path / "model.safetensors").stat().st_size > 0
