"""What the processes of a launch find in their environment."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cputrain import __version__, authentication
from cputrain.launch import allocator, join
from cputrain.launch.config import Config
from cputrain.settings import BALANCE, COMMUNICATION_CORES, GRADIENTS

# What of the launcher's own environment reaches ranks on other machines, where nothing is inherited.
_FORWARDED = re.compile(
    r"(OMP|KMP|GOMP|MKL|DNNL|ONEDNN|CCL|FI|UCX|I_MPI|GLOO|TORCH|PYTORCH|CPUTRAIN|ACCELERATE|HF|TRANSFORMERS|TOKENIZERS|"
    r"WANDB|MLFLOW|COMET|MALLOC)_.*|PYTHON(PATH|UNBUFFERED|HASHSEED|WARNINGS)|LD_(PRELOAD|LIBRARY_PATH)|TQDM_DISABLE|"
    r"(HTTPS?|NO|ALL)_PROXY|(https?|no|all)_proxy|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|"
    r"XDG_CACHE_HOME|TMPDIR|MASTER_(ADDR|PORT)"
)
# Set for one process by its launcher: another's rank would be wrong.
_OF_ONE_PROCESS = ("CPUTRAIN_PARENT", "CPUTRAIN_STARTED_BY", "TORCHELASTIC_RUN_ID", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


def of_training(
    config: Config, inherited: Mapping[str, str], threads: int | None = None
) -> tuple[dict[str, str], list[str]]:
    """The variables to add, and warnings. Cores and threads are each rank's own to find, on its machine."""
    added = {
        "ACCELERATE_USE_CPU": _word(config.use_cpu),
        "CPUTRAIN_IPEX": _word(config.ipex),
        "ACCELERATE_MIXED_PRECISION": config.mixed_precision,
    }
    if threads is not None:
        added["OMP_NUM_THREADS"] = str(threads)
    if config.cores_for_communication:
        added[COMMUNICATION_CORES] = str(config.cores_for_communication)
    if config.grad_compression != "none":
        added[GRADIENTS] = config.grad_compression
    if config.balance != "length":
        added[BALANCE] = config.balance
    added |= {name: value for name, _, value in (entry.partition("=") for entry in config.env)}
    preloaded, warnings = allocator.preload(config.allocator, {**inherited, **added})
    if preloaded != {**inherited, **added}.get("LD_PRELOAD", ""):
        added["LD_PRELOAD"] = preloaded
    return added, warnings


def of_several(size: int, most: int | None = None) -> dict[str, str]:
    """What tells a rank that it is not alone: with another number, or another cputrain, it ends at once."""
    return {join.EXPECTED: f"{size}:{most}" if most and most != size else str(size), join.VERSION: __version__}


def of_one_launch(inherited: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """The token by which the processes of a launch know each other: the user's own, or one that is made for it.

    Not for machines that are launched each by itself: there every launch would make another one.
    """
    token = added.get(authentication.TOKEN) or inherited.get(authentication.TOKEN) or authentication.new_token()
    return {authentication.TOKEN: token}


def forwarded(inherited: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """What ranks on other machines are given."""
    kept = {name: value for name, value in inherited.items() if _FORWARDED.fullmatch(name)}
    return {name: value for name, value in {**kept, **added}.items() if name not in _OF_ONE_PROCESS}


def _word(truth: bool) -> str:
    return "true" if truth else "false"
