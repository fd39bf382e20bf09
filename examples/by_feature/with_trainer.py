"""The same training on transformers' Trainer, which has the loop, the accumulation and the precision as arguments.

cputrain run examples/by_feature/with_trainer.py
"""

from __future__ import annotations

from task import Sentences, make_model
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    output_dir="/tmp/with_trainer",
    num_train_epochs=4,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    bf16=True,
    use_cpu=True,
    save_strategy="no",
    logging_strategy="epoch",
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(make_model(), arguments, train_dataset=Sentences())
trainer.train()

losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
for epoch, loss in enumerate(losses):
    print(f"epoch {epoch}: loss {loss:.4f}")
