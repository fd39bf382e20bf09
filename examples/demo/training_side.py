"""One side of the demo, stock or optimised: a process that trains when it is asked to, and then answers questions.

Started by `run_demo.py` and `benchmarks/loss_curves.py`; the two sides differ in one line, the call of
`cputrain.optimize`. Requests and answers go through pipes: see `benchmarks/interleaved.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))  # how processes take turns

import torch
from interleaved import Answer, peak_memory_mb, serve
from squad_data import best_spans, collate, f1_score, load_examples, make_feature, span_text, words
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import BertConfig, BertForQuestionAnswering, get_linear_schedule_with_warmup

DATA = Path(__file__).parent / "data"
BATCH = 32
PADDED_LENGTH = 112  # real text fills 0.41 of it; SQuAD fills 0.44 of its usual 384
LEARNING_RATE = 2e-3
BETAS = (0.9, 0.98)  # a short training needs a short memory
WARMUP_SHARE = 0.1
STEPS_PER_TURN = 5  # a turn long enough that switching between the processes costs nothing


def make_model(vocabulary: int) -> BertForQuestionAnswering:
    """A BERT small enough to learn from nothing in minutes, for which its usual 0.02 would be too small a start."""
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=PADDED_LENGTH,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        initializer_range=0.08,
    )
    return BertForQuestionAnswering(config)


def real_loss(outputs: Any, batch: dict[str, Tensor]) -> float:
    """The loss without padded positions, which stock's own counts and cputrain's doesn't: comparable for both."""
    padded = batch["attention_mask"] == 0
    start, end = (
        logits.detach().masked_fill(padded, -torch.inf) for logits in (outputs.start_logits, outputs.end_logits)
    )
    both = F.cross_entropy(start, batch["start_positions"]) + F.cross_entropy(end, batch["end_positions"])
    return both.item() / 2


class Side:
    def __init__(self, name: str, steps: int, seed: int, threads: int, questions: int | None) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        tokenizer = Tokenizer.from_file(str(DATA / "tokenizer.json"))
        self.train_set = load_examples(DATA / "train.json.gz")
        self.held_back = load_examples(DATA / "held-back.json.gz")[:questions]
        self.train_features = [make_feature(tokenizer, example, PADDED_LENGTH) for example in self.train_set]
        self.held_back_features = [make_feature(tokenizer, example, PADDED_LENGTH) for example in self.held_back]
        self.order = random.Random(seed)
        self.waiting: list[int] = []  # questions that this epoch has not yet asked
        self.model = make_model(tokenizer.get_vocab_size()).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=BETAS)
        self.schedule = get_linear_schedule_with_warmup(self.optimizer, int(WARMUP_SHARE * steps), steps)
        if name == "cputrain":
            import cputrain

            cputrain.optimize(self.model, self.optimizer)

    def next_batch(self) -> dict[str, Tensor]:
        if len(self.waiting) < BATCH:
            self.waiting = self.order.sample(range(len(self.train_features)), len(self.train_features))
        chosen, self.waiting = self.waiting[:BATCH], self.waiting[BATCH:]
        return collate([self.train_features[index] for index in chosen], PADDED_LENGTH)

    def turn(self, number: int) -> Answer:
        results = [self.step() for _ in range(STEPS_PER_TURN)]
        return {"seconds": sum(seconds for seconds, _ in results), "losses": [loss for _, loss in results]}

    def step(self) -> tuple[float, float]:
        """One step of any training loop: its seconds, and its loss over real positions."""
        batch = self.next_batch()
        begin = time.perf_counter()
        outputs = self.model(**batch)
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin, real_loss(outputs, batch)

    @torch.no_grad()
    def evaluate(self) -> Answer:
        """F1 and exact match over the held-back questions, as percentages."""
        self.model.eval()
        f1 = exact = 0.0
        for first in range(0, len(self.held_back), 64):
            examples, features = self.held_back[first : first + 64], self.held_back_features[first : first + 64]
            batch = collate(features, PADDED_LENGTH)
            inputs = {key: batch[key] for key in ("input_ids", "token_type_ids", "attention_mask")}
            outputs = self.model(**inputs)
            spans = best_spans(outputs.start_logits, outputs.end_logits, batch["token_type_ids"] == 1)
            for example, feature, span in zip(examples, features, spans, strict=True):
                text = span_text(example, feature, span)
                f1 += f1_score(text, example.answer)
                exact += words(text) == words(example.answer)
        self.model.train()
        return {"f1": 100 * f1 / len(self.held_back), "exact_match": 100 * exact / len(self.held_back)}

    def explain(self) -> Answer:
        import cputrain

        return {"text": str(cputrain.explain(self.model))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", required=True, choices=["stock", "cputrain"])
    parser.add_argument("--settings", required=True, type=json.loads)
    arguments = parser.parse_args()
    side = Side(arguments.side, **arguments.settings)
    serve(
        {
            "turn": side.turn,
            "evaluate": side.evaluate,
            "explain": side.explain,
            "memory": lambda: {"peak_mb": peak_memory_mb()},
        }
    )


if __name__ == "__main__":
    main()
