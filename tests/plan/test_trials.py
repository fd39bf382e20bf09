"""Trials: models of fewer layers, and that what they need grows evenly, so that the whole follows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from cputrain import process_memory
from cputrain.kernel_files import Tree
from cputrain.trials import models
from cputrain.trials.jobs import KNOWN, Job, depth, with_layers
from cputrain.trials.worker import Training, Worker, _answering


def small(model: str = "bert", **changes) -> Job:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 200}
    config = transformers.CONFIG_MAPPING[model](**sizes, num_hidden_layers=8)
    architecture = models._architecture(model, None)
    fields = {"name": model, "config": models.plain(config), "architecture": architecture, "layers": 8}
    return Job(**{**fields, "sequences": 2, "length": 16, "dtype": "fp32", **changes})


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_can_be_tried_with_few_layers(name: str) -> None:
    found = models.resolve(name, None)
    assert found["layers"] == depth(found["config"]) > 2
    assert hasattr(transformers, found["architecture"])
    json.dumps(found)


@pytest.mark.parametrize(
    ("name", "millions"),
    {
        "minilm": 22.6,
        "bert-base": 108.9,
        "gpt2": 124.4,
        "llama-135m": 134.5,
        "gemma3-270m": 268.1,
        "qwen3-0.6b": 596.0,
        "llama-1b": 1235.8,
        "llama-8b": 8030.3,
    }.items(),
)
def test_known_models_are_what_their_names_say(name: str, millions: float) -> None:
    assert models.resolve(name, None)["parameters"] / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize("kind", ["bert", "llama", "gpt2", "t5", "bart", "gemma3_text", "modernbert"])
def test_a_model_type_with_fewer_layers_is_the_same_model(kind: str) -> None:
    config = models.plain(transformers.CONFIG_MAPPING[kind]())
    assert depth(with_layers(config, 2)) == 2 and depth(with_layers(config, depth(config))) == depth(config)


def test_depth_of_a_model_whose_layers_differ_is_not_varied() -> None:
    config = models.plain(transformers.CONFIG_MAPPING["modernbert"]())
    assert models.layers_to_vary(config, "ModernBertForMaskedLM") in (1, depth(config))
    assert models.layers_to_vary(models.plain(transformers.ResNetConfig()), "ResNetForImageClassification") == 1


@pytest.mark.parametrize("changes", [{"lora": 4}, {"checkpointing": True, "dtype": "stock"}, {}])
def test_memory_in_use_grows_evenly_with_layers_and_sequences(changes: dict) -> None:
    job = small("llama", **{"length": 256, **changes})
    found = {}
    for layers, sequences in ((1, 2), (1, 4), (2, 4), (4, 4), (4, 8)):
        training = Training(job, layers)
        training.step(sequences)
        found[layers, sequences] = training.step(sequences)["saved"]
    assert found[1, 4] + 3 * (found[2, 4] - found[1, 4]) == pytest.approx(found[4, 4], rel=0.1)
    assert found[1, 4] == pytest.approx(2 * found[1, 2], rel=0.1)
    assert found[4, 8] == pytest.approx(2 * found[4, 4], rel=0.1)


def test_a_step_trains_what_the_job_says() -> None:
    training = Training(small(lora=4), 2)
    before = {name: value.clone() for name, value in training.model.named_parameters()}
    training.step(2)
    changed = {name for name, value in training.model.named_parameters() if not torch.equal(value, before[name])}
    assert changed and all("lora" in name for name in changed)
    described = training.described()
    assert 0 < described["trained"] < described["parameters"] == sum(value.numel() for value in before.values())
    assert described["weights"] >= 4 * described["parameters"]


@pytest.mark.parametrize("task", models.TASKS)
def test_every_task_has_batches_with_a_loss(task: str) -> None:
    kind = {"seq2seq": "t5", "causal-lm": "llama"}.get(task, "bert")
    config = transformers.CONFIG_MAPPING[kind](vocab_size=100)
    fields = with_layers(models.plain(config), 1) | {"hidden_size": 32, "d_model": 32, "num_attention_heads": 4}
    job = small(kind, config={**fields, "intermediate_size": 64, "num_key_value_heads": 4, "head_dim": 8})
    job = job.but(architecture=models._architecture(kind, task), layers=1, dtype="stock", real=0.5)
    training = Training(job, 1)
    batch = models.batch(job, training.model, 3)
    assert batch["input_ids"].shape == (3, 16) and batch["attention_mask"].sum() == 24
    assert training.step(3)["seconds"] > 0


def test_a_real_batch_is_cut_and_repeated(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"input_ids": torch.arange(8).reshape(4, 2), "scale": torch.ones(3)}, tmp_path / "batch.safetensors")
    job = small(sequences=4, batch_file=str(tmp_path / "batch.safetensors"))
    few, many = (models.batch(job, None, sequences) for sequences in (2, 6))
    assert few["input_ids"].tolist() == [[0, 1], [2, 3]] and few["scale"].shape == (3,)
    assert many["input_ids"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3]]


def test_a_folder(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=4, hidden_size=32, num_attention_heads=4, vocab_size=50)
    config.save_pretrained(tmp_path)
    found = models.resolve(str(tmp_path), None)
    assert (found["architecture"], found["layers"]) == ("LlamaForCausalLM", 4)
    (tmp_path / "config.json").write_text('{"model_type": "no_such"}')
    with pytest.raises(ValueError, match=r"config.json can't be used"):
        models.resolve(str(tmp_path), None)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config.json: give the folder"):
        models.resolve(str(tmp_path), None)


def test_unknown_models_and_tasks_get_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"there is no model 'bert-bas'.* did you mean bert-base"):
        models.resolve("bert-bas", None)
    with pytest.raises(ValueError, match=r"no class of the model type 'gpt2' for the task masked-lm"):
        models.resolve("gpt2", "masked-lm")
    with pytest.raises(ValueError, match=r"'resnet' for a task on text"):
        models.resolve("resnet", None)


def test_memory_that_runs_out_is_an_answer() -> None:
    def fail(error: BaseException):
        def handler() -> dict:
            raise error

        return _answering(handler)

    assert fail(RuntimeError("DefaultCPUAllocator: can't allocate memory: 7 bytes"))() == {"no_memory": True}
    assert fail(MemoryError())() == {"no_memory": True}
    assert fail(ValueError("a sentence."))() == {"error": "a sentence."}
    with pytest.raises(RuntimeError, match="a bug"):
        fail(RuntimeError("a bug"))()
    assert Worker().drop() == {}


def tree_of(root: Path, files: dict[str, str]) -> Tree:
    for name, content in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return Tree(root)


MEMINFO = {"/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"}


def test_what_a_trial_may_take_is_what_the_machine_has_left(tmp_path: Path) -> None:
    assert process_memory.available(tree_of(tmp_path, MEMINFO)) == process_memory.free(Tree(tmp_path)) == 8000 * 1024


@pytest.mark.parametrize(
    ("folder", "limit", "used", "cache"),
    [
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_or_what_its_control_group_has_left(tmp_path: Path, folder: str, limit: str, used: str, cache: str) -> None:
    files = {
        f"{folder}/{limit}": "5000000",
        f"{folder}/{used}": "2000000",
        f"{folder}/memory.stat": f"x 1\n{cache} 500",
    }
    tree = tree_of(tmp_path, MEMINFO | files)
    assert process_memory.available(tree) == 3_000_500 and process_memory.free(tree) == 8000 * 1024
    tree_of(tmp_path, {f"{folder}/{used}": "9000000"})
    assert process_memory.available(tree) == 0


def test_an_allocation_beyond_what_is_allowed_fails_by_itself() -> None:
    """In a process of its own: the limit stays."""
    code = (
        "import torch\nfrom cputrain import process_memory\nprocess_memory.allow(50 << 20)\n"
        "torch.empty(5 << 20)\ntorch.empty(50 << 20)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "can't allocate memory" in done.stderr
