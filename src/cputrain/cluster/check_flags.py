"""Options of a training script that today's transformers refuses, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator

from cputrain.cluster.command_words import is_ours, option, place, words
from cputrain.cluster.job_containers import Container
from cputrain.cluster.manifest import Problem

# Gone from transformers' TrainingArguments (5.23), and accepted again where cputrain starts the script.
_TAKEN_BY_US = {
    "--no_cuda": "write --use_cpu",
    "--use_ipex": "leave it out",
    "--jit_mode_eval": "leave it out",
}
_GONE = {
    "--evaluation_strategy": "write --eval_strategy",
    "--per_gpu_train_batch_size": "write --per_device_train_batch_size",
    "--per_gpu_eval_batch_size": "write --per_device_eval_batch_size",
    "--overwrite_output_dir": "leave it out",
    "--use_mps_device": "leave it out",
    "--fp16_opt_level": "leave it out",
    "--half_precision_backend": "leave it out",
    "--push_to_hub_token": "set HF_TOKEN from a Secret",
    "--push_to_hub_model_id": "write --hub_model_id",
}
# Two of these, and the script reads its options with transformers: other scripts have a --no_cuda of their own.
_OF_TRAINER = (
    "--model_name_or_path", "--do_train", "--do_eval", "--output_dir", "--num_train_epochs", "--learning_rate",
    "--per_device_train_batch_size", "--per_device_eval_batch_size", "--max_seq_length", "--ddp_backend", "--use_ipex",
)  # fmt: skip


def problems(container: Container) -> Iterator[Problem]:
    command = words(container)
    if not container.trains or sum(option(command, name) is not None for name in _OF_TRAINER) < 2:
        return
    ours = is_ours(container)
    for name, remedy in {**_GONE, **({} if ours else _TAKEN_BY_US)}.items():
        found = option(command, name)
        if found:
            other = ", or start the script with cputrain launch, which takes it" if name in _TAKEN_BY_US else ""
            said = f"today's transformers refuses {found[1].text.partition('=')[0]}"
            yield Problem(place(container, found[1]), f"{said}, and the script ends at once: {remedy}{other}")
    backend = option(command, "--ddp_backend")
    if backend and backend[0] == "ccl" and not ours:
        said = "today's transformers refuses --ddp_backend ccl, and the script ends at once"
        yield Problem(place(container, backend[1]), f"{said}: write gloo, or start the script with cputrain launch")
