"""Trainings on two ranks, each compared with one process and the same global batch. Each case runs on both ranks."""

from __future__ import annotations

import copy
import os
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.integrations import tiny

STEPS, BATCH = 4, 4  # of all ranks together


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


def _as_launched(rank: int, size: int) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in ranks.items()})


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
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


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


def case_accelerate(rank, size):
    import cputrain

    _as_launched(rank, size)
    model = _model()
    accelerator = cputrain.Accelerator(cpu=True)
    assert accelerator.state.backend == "ccl" and accelerator.num_processes == size
    wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    share = BATCH // size
    for step in range(STEPS):
        x, y = (tensor[rank * share : (rank + 1) * share] for tensor in _data(step))
        accelerator.backward(nn.functional.mse_loss(wrapped(x), y))
        optimizer.step()
        optimizer.zero_grad()
    _compare(accelerator.unwrap_model(wrapped).state_dict(), _alone())
    assert accelerator.gather(torch.tensor([rank])).tolist() == list(range(size))


def case_trainer(rank, size):
    from cputrain import Trainer, TrainingArguments

    def trained(batch: int) -> dict[str, Tensor]:
        model = copy.deepcopy(tiny.bert())
        arguments = TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=batch,
            max_steps=STEPS,
            learning_rate=1e-1,
            optim="sgd",
            ddp_backend="ccl",
            ddp_timeout=77,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        assert arguments.world_size == size and dist.get_backend() == "ccl"
        assert dist.group.WORLD._timeout == 77
        Trainer(model, arguments, train_dataset=tiny.windows(16)).train()
        return model.state_dict()

    _as_launched(rank, size)
    found = trained(BATCH // size)
    torch.save(found, os.path.join(os.environ["TRAINED_IN"], f"{rank}.pt"))
