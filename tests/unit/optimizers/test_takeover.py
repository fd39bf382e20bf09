"""Taking over: the same object, beneath all that is put on an optimizer; stock's step where ours lacks something."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, NAdam, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from cputrain.optimizers import adam, give_back, take_over
from cputrain.optimizers.fused_step import FusedStep
from tests.unit.optimizers.runs import assert_alike, give_gradients, parameters, stock_and_ours


@pytest.fixture
def served(monkeypatch):
    """How many parameters each call of Adam's kernel served."""
    calls = []
    update = adam.FusedAdam.update

    def counted(self, group, columns):
        calls.append(len(columns[0]))
        update(self, group, columns)

    monkeypatch.setattr(adam.FusedAdam, "update", counted)
    return calls


def train(pair, steps=3, first=0):
    group, optimizer = pair
    for step in range(first, first + steps):
        give_gradients(step, group)
        optimizer.step()


def taken(optimizer) -> bool:
    return isinstance(optimizer.__dict__.get("_init_group"), FusedStep)


# What it is


def test_in_place_and_back(served):
    group = parameters()
    optimizer = AdamW(group)
    groups, state = optimizer.param_groups, optimizer.state
    record = take_over(optimizer)
    assert record.taken
    assert "parameters are updated in one pass" in record.reason
    assert take_over(optimizer) == record
    assert type(optimizer) is AdamW
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    train((group, optimizer), 1)
    assert len(served) == 1
    give_back(optimizer)
    give_back(optimizer)
    assert "_init_group" not in optimizer.__dict__
    train((group, optimizer), 1)
    assert len(served) == 1


@pytest.mark.parametrize("kind", [LBFGS, RMSprop, NAdam, type("MyAdamW", (AdamW,), {})])
def test_other_classes_keep_their_step(kind):
    optimizer = kind(parameters())
    record = take_over(optimizer)
    assert not record.taken
    assert kind.__name__ in record.reason
    assert "_init_group" not in optimizer.__dict__
    give_back(optimizer)


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (AdamW, {"amsgrad": True}, "amsgrad"),
        (AdamW, {"maximize": True}, "maximize"),
        (Adam, {"differentiable": True}, "differentiable"),
        (AdamW, {"lr": torch.tensor(0.01)}, "lr is a tensor"),
        (SGD, {"maximize": True, "lr": 0.1}, "maximize"),
        (SGD, {"lr": torch.tensor(0.01), "momentum": 0.9}, "lr is a tensor"),
    ],
)
def test_options_that_we_lack(kind, options, named):
    record = take_over(kind(parameters(), **options))
    assert not record.taken
    assert named in record.reason


def test_parameters_that_we_lack():
    record = take_over(AdamW([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]))
    assert not record.taken
    assert "bfloat16" in record.reason
    mixed = take_over(AdamW([nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Parameter(torch.ones(3))]))
    assert mixed.taken
    assert "float64" in mixed.reason
    assert "UninitializedParameter" in take_over(AdamW(nn.LazyLinear(3).parameters())).reason


# What changes while training


def test_an_option_set_later_goes_to_stock(served, caplog):
    (stock, _), (ours, _) = pairs = stock_and_ours(AdamW)
    caplog.set_level(logging.INFO, logger="cputrain")
    for pair in pairs:
        train(pair, 2)
        pair[1].param_groups[0]["maximize"] = True
        train(pair, 2, first=2)
        pair[1].param_groups[0]["maximize"] = False
        train(pair, 2, first=4)
    assert len(served) == 4
    assert [record.message for record in caplog.records].count(
        "AdamW: a parameter group keeps stock's step: maximize=True"
    ) == 1
    assert_alike(ours, stock)


def test_some_groups_and_some_parameters_are_stocks(served):
    def make():
        torch.manual_seed(0)
        plain, double = nn.Parameter(torch.randn(9)), nn.Parameter(torch.randn(4, dtype=torch.float64))
        transposed, other, frozen = (nn.Parameter(torch.randn(5, 3)) for _ in range(3))
        frozen.requires_grad_(False)
        return [plain, double, transposed, other, frozen]

    results = []
    for ours in (False, True):
        group = make()
        optimizer = AdamW(
            [{"params": group[:3], "weight_decay": 0.0}, {"params": group[3:], "amsgrad": True, "lr": 0.1}], lr=0.01
        )
        if ours:
            record = take_over(optimizer)
            assert "amsgrad" in record.reason
            assert "float64" in record.reason
        for _ in range(3):
            for parameter in group[:4]:
                parameter.grad = torch.randn_like(parameter)
            group[2].grad = torch.randn(3, 5).t()
            optimizer.step()
        results.append((group, optimizer.state_dict()))
        torch.manual_seed(0)
    assert served == [1, 1, 1]
    assert_alike(results[1], results[0])


def test_channels_last(served):
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        optimizer = AdamW(convolution.parameters(), lr=0.01)
        if ours:
            take_over(optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            convolution(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).square().sum().backward()
            optimizer.step()
        results.append((list(convolution.parameters()), optimizer.state_dict()))
    assert served == [2, 2]
    assert_alike(results[1], results[0])


def test_groups_added_in_mid_training(served):
    (stock, _), (ours, _) = pairs = stock_and_ours(AdamW)
    extra = []
    for pair in pairs:
        train(pair, 2)
        torch.manual_seed(4)
        extra.append(nn.Parameter(torch.randn(77)))
        pair[1].add_param_group({"params": [extra[-1]], "lr": 0.3, "betas": (0.5, 0.7)})
        for _ in range(2):
            extra[-1].grad = torch.randn(77)
            pair[1].step()
    assert served[-1] == 1
    assert_alike([*ours, extra[1]], [*stock, extra[0]])


def test_sparse_gradients_are_refused_before_anything_changes():
    table, plain = nn.Embedding(5, 3, sparse=True), nn.Parameter(torch.ones(4))
    optimizer = AdamW([plain, table.weight])
    take_over(optimizer)
    table(torch.tensor([1])).sum().backward()
    plain.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert torch.equal(plain, torch.ones(4))


def test_sgd_with_sparse_gradients():
    tables = [nn.Embedding(5, 3, sparse=True) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table, ours in zip(tables, (False, True), strict=True):
        optimizer = SGD(table.parameters(), lr=0.5)
        if ours:
            take_over(optimizer)
        table(torch.tensor([1, 3, 3])).sum().backward()
        optimizer.step()
    assert torch.equal(tables[0].weight, tables[1].weight)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_listed_twice_is_updated_as_stock_does():
    pair = [nn.Parameter(torch.ones(50)) for _ in range(2)]
    for parameter, ours in zip(pair, (False, True), strict=True):
        optimizer = SGD([parameter, parameter], lr=0.5)
        if ours:
            take_over(optimizer)
        parameter.grad = torch.ones(50)
        optimizer.step()
    assert torch.equal(pair[0], pair[1])


def test_a_parameter_that_changed_its_shape_is_stocks_error():
    """The state no longer fits: never a native write beyond its end."""
    parameter = nn.Parameter(torch.ones(10))
    optimizer = AdamW([parameter])
    take_over(optimizer)
    parameter.grad = torch.ones(10)
    optimizer.step()
    parameter.grad = None
    parameter.data = torch.ones(100000)
    parameter.grad = torch.ones(100000)
    with pytest.raises(RuntimeError, match="size"):
        optimizer.step()


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_rates_that_a_scheduler_computed_with_numpy(kind):
    rate = pytest.importorskip("numpy").float32(0.01)
    (stock, _), (ours, _) = pairs = stock_and_ours(kind)
    for pair in pairs:
        pair[1].param_groups[0]["lr"] = rate
        train(pair, 2)
    assert_alike(ours, stock)


# What stands above it


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: OneCycleLR(o, max_lr=0.1, total_steps=10),  # writes betas too
        lambda o: CosineAnnealingLR(o, 5),
    ],
)
def test_schedulers_made_before_and_after(schedule, before, served):
    results = []
    for ours in (False, True):
        group = parameters()
        optimizer = AdamW(group, lr=0.01)
        scheduler = schedule(optimizer) if before else None
        if ours:
            take_over(optimizer)
        scheduler = scheduler or schedule(optimizer)
        for step in range(4):
            give_gradients(step, group)
            optimizer.step()
            scheduler.step()
        results.append((group, optimizer.state_dict(), scheduler.get_last_lr()))
    assert len(served) == 4
    assert_alike(results[1], results[0])


def test_hooks_still_run():
    seen = []
    group = parameters()
    optimizer = AdamW(group)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    take_over(optimizer)
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("global"))
    train((group, optimizer), 1)
    handle.remove()
    assert seen == ["before", "after", "global"]


def test_closure():
    pair = [nn.Parameter(torch.full((5,), 3.0)) for _ in range(2)]
    losses = []
    for parameter, ours in zip(pair, (False, True), strict=True):
        optimizer = AdamW([parameter], lr=0.1)
        if ours:
            take_over(optimizer)

        def closure(parameter=parameter, optimizer=optimizer):
            optimizer.zero_grad()
            loss = parameter.square().sum()
            loss.backward()
            return loss

        losses.append([optimizer.step(closure).item() for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1])
    assert_alike(pair[1], pair[0])


def test_accelerate_wraps_it(served):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    before, after = AdamW([a := nn.Parameter(torch.ones(3))]), AdamW([b := nn.Parameter(torch.ones(3))])
    take_over(before)
    wrapped = [accelerator.prepare(before), accelerator.prepare(after)]
    assert take_over(wrapped[1]).taken
    assert taken(after)
    for parameter, optimizer in zip((a, b), wrapped, strict=True):
        parameter.grad = torch.ones(3)
        optimizer.step()
    assert served == [1, 1]
    assert torch.equal(a, b)
    give_back(wrapped[1])
    assert not taken(after)


def test_a_gradient_scaler_is_served_by_stock(served):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamW([parameter], fused=True, lr=0.5)
    take_over(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(parameter.sum()).backward()
    assert parameter.grad[0] == 4
    scaler.step(optimizer)
    scaler.update()
    assert not served
    assert (parameter < 0.6).all()


def test_gradient_accumulation_and_cleared_gradients():
    """step() neither clips nor clears; zeroed gradients still decay and follow the moments."""
    (stock, _), (ours, _) = pairs = stock_and_ours(AdamW, lr=0.1)
    for group, optimizer in pairs:
        give_gradients(0, group)
        first = [parameter.grad.clone() for parameter in group]
        for parameter, grad in zip(group, first, strict=True):
            parameter.grad += grad
        optimizer.step()
        assert all(torch.equal(parameter.grad, 2 * grad) for parameter, grad in zip(group, first, strict=True))
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    assert_alike(ours, stock)


def test_compiled_step_is_stocks(served):
    (stock, _), (ours, _) = pairs = stock_and_ours(AdamW)
    for group, optimizer in pairs:
        step = torch.compile(optimizer.step, backend="eager")
        for number in range(2):
            give_gradients(number, group)
            step()
    assert not served
    assert_alike(ours, stock)


# What autograd and checkpoints see


@pytest.mark.parametrize(("kind", "options"), [(AdamW, {}), (SGD, {"momentum": 0.9}), (SGD, {})])
def test_backward_through_old_parameters_is_refused(kind, options):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], lr=0.1, **options)
    take_over(optimizer)
    for _ in range(2):  # the second step is the kernel's whatever the first one was
        parameter.grad = torch.ones(3)
        versions = [parameter._version, *(value._version for value in optimizer.state[parameter].values())]
        loss = parameter.square().sum()
        optimizer.step()
        after = [parameter._version, *(value._version for value in optimizer.state[parameter].values())]
        assert all(new > old for new, old in zip(after, versions, strict=False))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize(
    ("kind", "options"), [(AdamW, {}), (Adam, {"fused": True}), (SGD, {"lr": 0.1, "momentum": 0.9})]
)
@pytest.mark.parametrize("first_is_ours", [True, False])
def test_either_side_resumes_the_other(kind, options, first_is_ours):
    """Half of the training here, half there, equals stock all the way."""
    whole = parameters()
    optimizer = kind(whole, **options)
    train((whole, optimizer), 6)

    group = parameters()
    first = kind(group, **options)
    if first_is_ours:
        take_over(first)
    train((group, first), 3)
    saved = copy.deepcopy(first.state_dict())

    second = kind(group, **options)
    if not first_is_ours:
        take_over(second)
    second.load_state_dict(saved)
    train((group, second), 3, first=3)
    assert_alike(group, whole)
    assert_alike(second.state_dict(), optimizer.state_dict())


def test_loading_into_a_running_optimizer(served):
    """load_state_dict replaces the state's tensors: the next step must use the new ones."""
    (stock, _), (ours, _) = pairs = stock_and_ours(AdamW)
    for pair in pairs:
        train(pair, 2)
        saved = copy.deepcopy(pair[1].state_dict())
        train(pair, 2, first=2)
        pair[1].load_state_dict(saved)
        train(pair, 2, first=4)
    assert len(served) == 6
    assert_alike(ours, stock)
    assert_alike(pairs[1][1].state_dict(), pairs[0][1].state_dict())


def test_deepcopy_is_a_stock_optimizer_of_its_own():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamW([parameter])
    take_over(optimizer)
    parameter.grad = torch.ones(3)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    assert not taken(twin)
    twin.step()
    assert float(optimizer.state[parameter]["step"]) == 1
    other = twin.param_groups[0]["params"][0]
    other.grad = torch.ones(3)
    twin.step()
    optimizer.step()
    assert_alike(parameter, other)
