"""The models that cputrain promises to train correctly and never slower than stock, at two sizes.

`tiny(name)` is for parity tests, `speed(name)` for `benchmarks/models_speed.py`; both give `(model, batch)`, and
`model(**batch).loss` works for every one of them. Nothing is downloaded: weights are random, from `seed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int
    batch: int
    length: int
    image: int  # side of a picture, in pixels
    patch: int  # side of a ViT patch

    @property
    def positions(self) -> int:
        """Room for RoBERTa's offset of two and for longer inputs that a test may make."""
        return self.length + 16


TINY = Size(hidden=32, layers=2, heads=4, intermediate=48, vocabulary=61, batch=4, length=12, image=16, patch=4)
# 8 x 128 tokens of hidden size 384, as the speed floor is stated; 176 / 16 gives ViT 121 patches and one class token.
SPEED = Size(
    hidden=384, layers=2, heads=12, intermediate=1536, vocabulary=1000, batch=8, length=128, image=176, patch=16
)

FIRST_TOKEN = 4  # ids below are kept for padding, begin, end and unknown
CLASSES = 5
IGNORED = -100  # the label that no loss counts


class TransformerEncoderClassifier(nn.Module):
    """`torch.nn.TransformerEncoder` between an embedding and a token classifier."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            size.hidden, size.heads, size.intermediate, dropout=dropout, activation="gelu", batch_first=True
        )
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.encoder = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(size.hidden, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> SimpleNamespace:
        padded = attention_mask == 0
        states = self.encoder(self.embedding(input_ids), src_key_padding_mask=padded if padded.any() else None)
        return classified(self.classifier(states), labels)


class Perceptron(nn.Module):
    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        widths = [size.hidden, *[size.intermediate] * size.layers]
        blocks = [(nn.Linear(a, b), nn.GELU(), nn.Dropout(dropout)) for a, b in pairwise(widths)]
        self.layers = nn.Sequential(*[part for block in blocks for part in block], nn.Linear(widths[-1], CLASSES))

    def forward(self, inputs: Tensor, labels: Tensor) -> SimpleNamespace:
        return classified(self.layers(inputs), labels)


class SmallConvNet(nn.Module):
    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        channels = size.hidden // 8
        self.features = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1),
            nn.GroupNorm(2, channels),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(2 * channels, CLASSES))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SimpleNamespace:
        return classified(self.classifier(self.features(pixel_values)), labels)


def classified(logits: Tensor, labels: Tensor) -> SimpleNamespace:
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
    return SimpleNamespace(loss=loss, logits=logits)


def bert_like(size: Size, dropout: float) -> dict[str, Any]:
    """What BERT and its descendants call these settings."""
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.intermediate,
        "max_position_embeddings": size.positions,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "num_labels": CLASSES,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def bert(size: Size, dropout: float) -> nn.Module:
    return hf.BertForQuestionAnswering(hf.BertConfig(**bert_like(size, dropout) | {"num_labels": 2}))


def roberta(size: Size, dropout: float) -> nn.Module:
    return hf.RobertaForTokenClassification(hf.RobertaConfig(**bert_like(size, dropout)))


def xlm_roberta(size: Size, dropout: float) -> nn.Module:
    return hf.XLMRobertaForSequenceClassification(hf.XLMRobertaConfig(**bert_like(size, dropout)))


def electra(size: Size, dropout: float) -> nn.Module:
    config = hf.ElectraConfig(**bert_like(size, dropout), embedding_size=size.hidden // 2)
    return hf.ElectraForTokenClassification(config)


def albert(size: Size, dropout: float) -> nn.Module:
    settings = bert_like(size, dropout) | {"embedding_size": size.hidden // 2, "classifier_dropout_prob": dropout}
    return hf.AlbertForSequenceClassification(hf.AlbertConfig(**settings))


def mpnet(size: Size, dropout: float) -> nn.Module:
    return hf.MPNetForQuestionAnswering(hf.MPNetConfig(**bert_like(size, dropout) | {"num_labels": 2}))


def deberta_v2(size: Size, dropout: float) -> nn.Module:
    """With the settings of the published deberta-v3 models."""
    config = hf.DebertaV2Config(
        **bert_like(size, dropout),
        relative_attention=True,
        position_buckets=size.length // 2,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
        type_vocab_size=0,
    )
    return hf.DebertaV2ForTokenClassification(config)


def distilbert(size: Size, dropout: float) -> nn.Module:
    config = hf.DistilBertConfig(
        vocab_size=size.vocabulary,
        dim=size.hidden,
        n_layers=size.layers,
        n_heads=size.heads,
        hidden_dim=size.intermediate,
        max_position_embeddings=size.positions,
        dropout=dropout,
        attention_dropout=dropout,
        qa_dropout=dropout,
    )
    return hf.DistilBertForQuestionAnswering(config)


def gpt2(size: Size, dropout: float) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=size.vocabulary,
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        n_inner=size.intermediate,
        n_positions=size.positions,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.GPT2LMHeadModel(config)


def opt(size: Size, dropout: float) -> nn.Module:
    config = hf.OPTConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        word_embed_proj_dim=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        ffn_dim=size.intermediate,
        max_position_embeddings=size.positions,
        dropout=dropout,
        attention_dropout=dropout,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.OPTForCausalLM(config)


def mistral(size: Size, dropout: float) -> nn.Module:
    """Grouped key/value heads, and no sliding window, as in Mistral 7B v0.3."""
    config = hf.MistralConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        intermediate_size=size.intermediate,
        max_position_embeddings=size.positions,
        attention_dropout=dropout,
        sliding_window=None,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.MistralForCausalLM(config)


def modernbert(size: Size, dropout: float) -> nn.Module:
    """Every other layer sees a sliding window, as in the published models."""
    config = hf.ModernBertConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.intermediate,
        max_position_embeddings=size.positions,
        embedding_dropout=dropout,
        attention_dropout=dropout,
        mlp_dropout=dropout,
        classifier_dropout=dropout,
        global_attn_every_n_layers=2,
        local_attention=size.length // 2,
        num_labels=CLASSES,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    return hf.ModernBertForTokenClassification(config)


def vit(size: Size, dropout: float) -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.intermediate,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        image_size=size.image,
        patch_size=size.patch,
        num_labels=CLASSES,
    )
    return hf.ViTForImageClassification(config)


def t5(size: Size, dropout: float) -> nn.Module:
    config = hf.T5Config(
        vocab_size=size.vocabulary,
        d_model=size.hidden,
        d_kv=size.hidden // size.heads,
        d_ff=size.intermediate,
        num_layers=size.layers,
        num_heads=size.heads,
        dropout_rate=dropout,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


@dataclass(frozen=True)
class Entry:
    build: Callable[[Size, float], nn.Module]
    task: str  # what the batch holds: see `make_batch`


MODELS: dict[str, Entry] = {
    "bert": Entry(bert, "span"),
    "roberta": Entry(roberta, "token"),
    "distilbert": Entry(distilbert, "span"),
    "electra": Entry(electra, "token"),
    "albert": Entry(albert, "sequence"),
    "xlm_roberta": Entry(xlm_roberta, "sequence"),
    "mpnet": Entry(mpnet, "span"),
    "deberta_v2": Entry(deberta_v2, "token"),
    "gpt2": Entry(gpt2, "causal"),
    "opt": Entry(opt, "causal"),
    "mistral": Entry(mistral, "causal"),
    "modernbert": Entry(modernbert, "token"),
    "vit": Entry(vit, "image"),
    "t5": Entry(t5, "seq2seq"),
    "transformer_encoder": Entry(TransformerEncoderClassifier, "token"),
    "mlp": Entry(Perceptron, "vector"),
    "conv": Entry(SmallConvNet, "image"),
}
NAMES = tuple(MODELS)
TEXT_NAMES = tuple(name for name, entry in MODELS.items() if entry.task not in ("image", "vector"))


def tiny(name: str, *, padding: str = "none", dropout: float = 0.0, seed: int = 0) -> tuple[nn.Module, Batch]:
    """A model small enough for float64 parity tests, and a batch of it; `padding` is "none", "right" or "left"."""
    return make(name, TINY, padding, dropout, seed, stir=True)


def speed(name: str, *, padding: str = "none", dropout: float = 0.1, seed: int = 0) -> tuple[nn.Module, Batch]:
    """The same model at the size at which its speed is compared: hidden size 384, two layers, 8 x 128 tokens."""
    return make(name, SPEED, padding, dropout, seed, stir=False)


def make(name: str, size: Size, padding: str, dropout: float, seed: int, *, stir: bool) -> tuple[nn.Module, Batch]:
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; choose one of {', '.join(NAMES)}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODELS[name].build(size, dropout)
        if stir:
            stir_parameters(model)
        return model.train(), make_batch(MODELS[name].task, size, padding)


def stir_parameters(model: nn.Module) -> None:
    """Biases start at 0 and LayerNorm weights at 1, so that a test could not see one being forgotten."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def make_batch(task: str, size: Size, padding: str) -> Batch:
    if task == "vector":
        return {
            "inputs": torch.randn(size.batch, size.length, size.hidden),
            "labels": torch.randint(CLASSES, (size.batch, size.length)),
        }
    if task == "image":
        return {
            "pixel_values": torch.randn(size.batch, 3, size.image, size.image),
            "labels": torch.randint(CLASSES, (size.batch,)),
        }
    mask = make_mask(size, padding)
    ids = torch.randint(FIRST_TOKEN, size.vocabulary, mask.shape) * mask  # 0 is the padding token
    return {"input_ids": ids, "attention_mask": mask} | make_targets(task, ids, mask)


def make_mask(size: Size, padding: str) -> Tensor:
    """One full row, and others down to a quarter of it; "squad": none is full, 44% are real, as in SQuAD at 384."""
    if padding not in ("none", "right", "left", "squad"):
        raise ValueError(f"padding is {padding!r}; choose none, right, left or squad")
    if padding == "none":
        return torch.ones(size.batch, size.length, dtype=torch.long)
    longest, shortest = (0.72, 0.16) if padding == "squad" else (1, 0.25)
    lengths = (size.length * torch.linspace(longest, shortest, size.batch)).round().long()
    mask = (torch.arange(size.length) < lengths[:, None]).long()
    return mask.flip(1) if padding == "left" else mask


def make_targets(task: str, ids: Tensor, mask: Tensor) -> Batch:
    rows = len(ids)
    if task == "sequence":
        return {"labels": torch.randint(CLASSES, (rows,))}
    if task == "span":
        first, count = mask.argmax(1), mask.sum(1)
        start = first + (torch.rand(rows) * count).long()
        end = torch.minimum(start + 2, first + count - 1)
        return {"start_positions": start, "end_positions": end}
    if task == "seq2seq":
        return {"labels": torch.randint(FIRST_TOKEN, int(ids.max()) + 1, (rows, ids.shape[1] // 2))}
    labels = ids if task == "causal" else torch.randint(CLASSES, ids.shape)
    return {"labels": labels.masked_fill(mask == 0, IGNORED)}


def alone(name: str, batch: Batch) -> Iterator[tuple[Batch, float]]:
    """Each sequence without its padding, and its weight: the weighted sum of the losses is the loss of the batch.

    So with right padding; with left padding stock numbers positions and shifts labels across the padded columns.
    """
    counts = counted_labels(MODELS[name].task, batch)
    mask = batch.get("attention_mask")
    for row, count in enumerate(counts.tolist()):
        single = {key: value[row : row + 1] for key, value in batch.items()}
        if mask is not None:
            single = strip_padding(single, mask[row].bool())
        yield single, count / counts.sum().item()


def strip_padding(single: Batch, real: Tensor) -> Batch:
    first = int(real.long().argmax())
    stripped = {}
    for key, value in single.items():
        if key in ("start_positions", "end_positions"):
            stripped[key] = value - first
        else:
            stripped[key] = value[:, real] if value.shape[1:] == real.shape else value
    return stripped


def counted_labels(task: str, batch: Batch) -> Tensor:
    """How many positions of each row the mean of the loss counts."""
    if task in ("span", "sequence", "seq2seq", "image", "vector"):
        return torch.ones(len(next(iter(batch.values()))))
    labels = batch["labels"][:, 1:] if task == "causal" else batch["labels"]
    return (labels != IGNORED).sum(1)
