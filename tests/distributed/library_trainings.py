"""Accelerate and Trainer on several ranks, compared with one process and the same global batch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import peft
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import cputrain
from cputrain import Accelerator, Trainer, TrainingArguments
from cputrain.distributed import gradient_hooks
from tests.distributed import trainings
from tests.distributed.trainings import BATCH, STEPS
from tests.integrations import tiny

WINDOWS = tiny.windows(5 * BATCH)  # a step more than is trained: the last of an epoch isn't balanced
TRAINED = "TRAINED_IN"  # the variable with the folder that the parameters go to


def arguments(folder: str, batch: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch,
        max_steps=STEPS,
        learning_rate=1e-1,
        optim="sgd",
        ddp_timeout=77,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def _as_launched(rank: int, size: int) -> None:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in ranks.items()})


def case_accelerate(rank, size):
    _as_launched(rank, size)
    model = trainings._model()
    accelerator = Accelerator(cpu=True)
    assert accelerator.state.backend == "ccl" and accelerator.num_processes == size
    wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    share = BATCH // size
    for step in range(STEPS):
        x, y = (tensor[rank * share : (rank + 1) * share] for tensor in trainings._data(step))
        accelerator.backward(nn.functional.mse_loss(wrapped(x), y))
        optimizer.step()
        optimizer.zero_grad()
    trainings._compare(accelerator.unwrap_model(wrapped).state_dict(), trainings._alone())
    assert accelerator.gather(torch.tensor([rank])).tolist() == list(range(size))


def _with_two_adapters() -> nn.Module:
    """Of a model in bf16; both are to be trained, and one is never used."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=4)).bfloat16()
    settings = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    model.add_adapter("unused", peft.LoraConfig(**settings))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return cputrain.optimize(model.train(), dtype="fp32")


def case_lora_with_an_adapter_that_is_not_used(rank, size):
    ids = torch.arange(BATCH * 16).view(BATCH, 16) * 7 % 99
    alone, model = _with_two_adapters(), _with_two_adapters()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    share = ids[rank * (BATCH // size) : (rank + 1) * (BATCH // size)]
    for _ in range(2):
        model.zero_grad(), alone.zero_grad()
        wrapped(input_ids=share, labels=share).loss.backward()
        alone(input_ids=ids, labels=ids).loss.backward()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    for name, parameter in model.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None or not parameter.grad.any()
        else:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)
    assert sum(grad is not None for grad in expected.values()) == 28


def _steps(size: int, balance: str) -> Iterator[tuple[list[tuple], list[int], Tensor]]:
    """Of two steps of all ranks: the samples, each rank's tokens, and the gradient."""
    os.environ["CPUTRAIN_BALANCE"] = balance
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    shuffled = DataLoader(WINDOWS, batch_size=BATCH // size, shuffle=True)
    model, loader, evaluated = accelerator.prepare(tiny.bert(), shuffled, DataLoader(WINDOWS, batch_size=2))
    first = next(iter(evaluated))["input_ids"]
    assert torch.equal(first, torch.stack([WINDOWS[2 * accelerator.process_index + i]["input_ids"] for i in range(2)]))
    for batch, _ in zip(loader, range(2), strict=False):
        model.zero_grad()
        accelerator.backward(model(**batch).loss)
        samples = [tuple(row) for row in accelerator.gather(batch["input_ids"]).tolist()]
        tokens = accelerator.gather(batch["attention_mask"].sum()).tolist()
        yield samples, tokens, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def case_balanced_ranks_have_the_gradients_of_stocks_deal(rank, size):
    _as_launched(rank, size)
    stock, ours = list(_steps(size, "off")), list(_steps(size, "length"))
    os.environ.pop("CPUTRAIN_BALANCE")
    for (expected, _, gradient), (found, _, same) in zip(stock, ours, strict=True):
        assert sorted(found) == sorted(expected) and found != expected
        assert (gradient - same).norm() <= 1e-6 * gradient.norm()
    waits = [sum(max(tokens) - min(tokens) for _, tokens, _ in steps) for steps in (stock, ours)]
    assert waits[1] < waits[0] / 2, waits


def case_grad_compression(rank, size):
    """The environment's word reaches the models that Accelerate wraps, but not those with a hook of the script."""
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    _as_launched(rank, size)
    os.environ["CPUTRAIN_GRAD_COMPRESSION"] = "bf16"
    own = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    for handlers in ([], [own]):
        model = Accelerator(cpu=True, kwargs_handlers=handlers).prepare(trainings._model())
        model(torch.ones(1, 20)).sum().backward()
        found = [hook for hook, _ in model._comm_hooks]
        assert len(found) == 1 and (found[0] is gradient_hooks.bf16) == (not handlers)
    os.environ.pop("CPUTRAIN_GRAD_COMPRESSION")


def case_trainer(rank, size):
    _as_launched(rank, size)
    asked = arguments(tempfile.mkdtemp(), BATCH // size)
    assert asked.world_size == size and dist.get_backend() == "ccl"
    assert dist.group.WORLD._timeout == 77
    trainer = Trainer(tiny.bert(), asked, train_dataset=WINDOWS, eval_dataset=WINDOWS)
    trainer.train()
    wrapped = trainer.model_wrapped
    assert isinstance(wrapped, DistributedDataParallel) and not wrapped._comm_hooks and wrapped.gradient_as_bucket_view
    assert type(trainer.get_train_dataloader().batch_sampler).__name__ == "BalancedShard"
    assert type(trainer.get_eval_dataloader().batch_sampler).__name__ == "BatchSamplerShard"
    torch.save(trainer.model.state_dict(), os.path.join(os.environ[TRAINED], f"{rank}.pt"))
