"""Trainer with language models: smoothed labels, Liger's flag, evaluation and prediction, as stock, and no logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.modeling_outputs import CausalLMOutput
from transformers.trainer_pt_utils import LabelSmoother

import cputrain
from cputrain.blocks import head
from cputrain.blocks.lazy_logits import LazyLogits, Source
from cputrain.formats import FP32
from cputrain.integrations import label_smoothing

SIZES = {"vocab_size": 99, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TRAINERS = {"stock": (hf.Trainer, hf.TrainingArguments), "ours": (cputrain.Trainer, cputrain.TrainingArguments)}


@pytest.fixture(autouse=True)
def computed(monkeypatch) -> list[torch.Size]:
    """The shapes of all logits whose values were asked for; even small logits are lazy."""
    seen: list[torch.Size] = []
    values = LazyLogits.computed
    monkeypatch.setattr(head, "FEWEST_BYTES", 0)
    monkeypatch.setattr(LazyLogits, "computed", lambda z: (seen.append(z.source.shape), values(z))[1])
    monkeypatch.setenv("CPUTRAIN_DTYPE", "fp32")
    return seen


def llama() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **TOKENS, hidden_size=32, intermediate_size=48))


def t5() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=99, **sizes, decoder_start_token_id=0, pad_token_id=0))


def samples(count: int = 24, length: int = 12) -> list[dict[str, torch.Tensor]]:
    chance = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(count):
        real = int(torch.randint(5, length + 1, (1,), generator=chance))
        ids = torch.randint(3, 99, (length,), generator=chance)
        mask = (torch.arange(length) < real).long()
        labels = ids.masked_fill((mask == 0) | (torch.arange(length) < 2), -100)
        rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})
    return rows


def for_decoders(rows: list) -> dict[str, torch.Tensor]:
    """As transformers' own collator for sequences does, which T5 needs where labels are taken away."""
    batch = torch.utils.data.default_collate(rows)
    return batch | {"decoder_input_ids": batch["labels"].clamp(min=0).roll(1, 1)}


def trainer(side: str, folder: Path, model=llama, **options) -> hf.Trainer:
    kind, arguments_of = TRAINERS[side]
    metrics = options.pop("compute_metrics", None)
    settings = {"max_steps": 5, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "logging_steps": 1}
    settings |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = arguments_of(output_dir=str(folder / side), **settings | options)
    collate = for_decoders if model is t5 else None
    data = {"train_dataset": samples(), "eval_dataset": samples(10), "data_collator": collate}
    return kind(model(), arguments, **data, compute_metrics=metrics)


def both(folder: Path, use, **options) -> list:
    return [use(trainer(side, folder, **options)) for side in ("ours", "stock")]


def train_and_evaluate(of: hf.Trainer) -> list[float]:
    of.train()
    losses = [line["loss"] for line in of.state.log_history if "loss" in line]
    return [*losses, of.evaluate()["eval_loss"]]


@pytest.mark.parametrize(("model", "options"), [(llama, {"gradient_accumulation_steps": 3}), (t5, {})])
def test_smoothed_labels(model, options, tmp_path, computed):
    ours, stock = both(tmp_path, train_and_evaluate, model=model, label_smoothing_factor=0.1, **options)
    assert ours == pytest.approx(stock, rel=1e-4) and len(ours) == 6
    assert not computed


ROWS = torch.Generator().manual_seed(5)
X, W = torch.randn(2, 6, 8, generator=ROWS), torch.randn(99, 8, generator=ROWS)
LABELS = torch.randint(99, (2, 6), generator=ROWS)
LABELS[0, 2:4], LABELS[1, 0] = -100, -1


@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)], ids=["mean", "int", "tensor"])
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("labels", [LABELS, torch.full_like(LABELS, -100), torch.zeros_like(LABELS)])
@pytest.mark.parametrize("as_tuple", [True, False])
def test_the_smoothers_number_is_stocks(items, shift, labels, as_tuple):
    found = []
    for kind in (label_smoothing.LabelSmoother, LabelSmoother):
        leaves = [X.clone().requires_grad_(), W.clone().requires_grad_()]
        lazy = kind is label_smoothing.LabelSmoother
        logits = LazyLogits.of(Source(*leaves, None, None, FP32)) if lazy else leaves[0] @ leaves[1].T
        output = (logits,) if as_tuple else CausalLMOutput(logits=logits)
        loss = kind(epsilon=0.3)(output, labels, shift_labels=shift, num_items_in_batch=items)
        loss.backward()
        found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_ligers_flag_means_the_loss_without_logits(tmp_path, computed, caplog):
    flags = {"use_liger_kernel": True, "prediction_loss_only": True}
    of = trainer("ours", tmp_path, **flags)
    assert train_and_evaluate(of) == pytest.approx(train_and_evaluate(trainer("stock", tmp_path)), rel=1e-4)
    assert not computed and "use_liger_kernel" in caplog.text
    with pytest.raises(ImportError, match="liger"):  # outside, the flag is stock's
        trainer("stock", tmp_path, **flags).train()


def test_skip_logits_is_consumed(computed):
    model = cputrain.optimize(t5())
    batch = torch.utils.data.default_collate(samples(2))
    assert torch.equal(model(**batch, skip_logits=True).loss, model(**batch).loss)
    assert not computed


def accuracy(prediction: hf.EvalPrediction) -> dict[str, float]:
    found, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float(np.mean((found == labels)[labels != -100]))}


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}], ids=["", "smoothed"])
def test_prediction_hands_out_stocks_logits(options, tmp_path):
    def predict(of):
        of.train()
        metrics = of.evaluate()
        return of.predict(samples(7)), metrics

    (ours, our_metrics), (stock, metrics) = both(tmp_path, predict, compute_metrics=accuracy, **options)
    real = np.array([[int(one) for one in row["attention_mask"]] for row in samples(7)]) == 1
    np.testing.assert_allclose(ours.predictions[real], stock.predictions[real], rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(ours.label_ids, stock.label_ids)
    for name in ("eval_loss", "eval_accuracy"):
        assert our_metrics[name] == pytest.approx(metrics[name], rel=1e-4)


def test_lazy_logits_survive_what_libraries_do_to_outputs(computed):
    from accelerate.utils import convert_to_fp32, pad_across_processes
    from transformers.trainer_pt_utils import nested_detach

    model = cputrain.optimize(llama().train())
    batch = torch.utils.data.default_collate(samples(2))
    output = model(**batch)
    assert isinstance(output.to_tuple()[1], LazyLogits)
    output = convert_to_fp32(output)
    detached = nested_detach(output.to_tuple()[:2])
    padded = pad_across_processes(detached[1], dim=1, pad_index=-100)
    assert isinstance(padded, LazyLogits) and not padded.requires_grad and not computed
    with torch.no_grad():
        real = batch["attention_mask"] == 1
        torch.testing.assert_close(padded.numpy()[real], llama()(**batch).logits.numpy()[real], rtol=1e-4, atol=1e-4)
    assert computed


def test_generation_is_stocks_before_while_and_after_training(tmp_path):
    said = {"ours": [], "stock": []}

    class Speaks(hf.TrainerCallback):
        def __init__(self, words: list) -> None:
            self.words = words

        def on_step_end(self, *args, model=None, **kwargs):
            ids = torch.tensor([[5, 6, 7], [8, 9, 3]])
            self.words.append(
                model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
            )

        on_train_begin = on_train_end = on_step_end

    for side, words in said.items():
        of = trainer(side, tmp_path)
        of.add_callback(Speaks(words))
        of.train()
    assert len(said["ours"]) == 7
    assert all(torch.equal(*pair) for pair in zip(said["ours"], said["stock"], strict=True))
