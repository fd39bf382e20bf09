"""torch's own ways to train on several ranks, each compared with one process and the same global batch."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 4, 24  # of all ranks together: 1, 2, 3, 4 and 8 get the same number each


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 5))


def _data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 20, generator=generator), torch.randn(BATCH, 5, generator=generator)


def _alone(**options) -> nn.Module:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    for step in range(STEPS):
        x, y = _data(step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _train(model, optimizer, rank, size, context=nullcontext):
    share = BATCH // size
    for step in range(STEPS):
        x, y = (tensor[rank * share : (rank + 1) * share] for tensor in _data(step))
        with context():
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def _compare(found: dict[str, Tensor], expected: nn.Module, tolerance: float = 1e-5) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


def case_ddp(rank, size):
    model = _model()
    _train(DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=1e-2), rank, size)
    _compare(model.state_dict(), _alone())


def case_ddp_with_many_buckets_and_static_graph(rank, size):
    model = _model()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001, static_graph=True, gradient_as_bucket_view=True)
    _train(wrapped, torch.optim.AdamW(model.parameters(), lr=1e-2), rank, size)
    _compare(model.state_dict(), _alone())


def case_ddp_with_bf16_gradients(rank, size):
    from cputrain.distributed import gradient_hooks

    model = _model()
    wrapped = DistributedDataParallel(model)
    gradient_hooks.register(wrapped, "bf16")
    _train(wrapped, torch.optim.SGD(model.parameters(), lr=1e-2), rank, size)
    expected = _model()
    _train(DistributedDataParallel(expected), torch.optim.SGD(expected.parameters(), lr=1e-2), rank, size)
    _compare(model.state_dict(), expected, tolerance=1e-3)
    if size > 1:
        assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def case_a_hook_of_ours_waits_for_the_scripts_own(rank, size):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from cputrain.distributed import gradient_hooks

    for own in (False, True):
        wrapped = DistributedDataParallel(_model())
        gradient_hooks.register_later(wrapped, "bf16")
        if own:
            wrapped.register_comm_hook(None, allreduce_hook)
        for _ in range(2):
            wrapped(torch.ones(1, 20)).sum().backward()
        found = [hook for hook, _ in wrapped._comm_hooks]
        assert found == ([allreduce_hook] if own else [gradient_hooks.bf16] if size > 1 else [])


def case_fully_shard(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model()
    mesh = init_device_mesh("cpu", (size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rank, size)
    _compare({name: value.full_tensor() for name, value in model.state_dict().items()}, _alone())


def case_zero_redundancy_optimizer(rank, size):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = _model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    _train(DistributedDataParallel(model), optimizer, rank, size)
    _compare(model.state_dict(), _alone())
