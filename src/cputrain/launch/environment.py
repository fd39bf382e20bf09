"""What the processes of a launch find in their environment: Accelerate's variables, and a number of threads."""

from __future__ import annotations

from collections.abc import Mapping

from cputrain import hardware
from cputrain.launch.config import Config


def of_training(
    config: Config, machine: hardware.Hardware, inherited: Mapping[str, str], threads: int | None = None
) -> dict[str, str]:
    """The variables to add; threads that the user chose, by flag or by OMP_NUM_THREADS, are left to them."""
    here = config.num_processes // config.num_machines
    added = {
        "ACCELERATE_USE_CPU": _word(config.use_cpu),
        "CPUTRAIN_IPEX": _word(config.ipex),
        "ACCELERATE_MIXED_PRECISION": config.mixed_precision,
    }
    if threads is not None:
        added["OMP_NUM_THREADS"] = str(threads)
    elif not inherited.get("OMP_NUM_THREADS"):
        # Affinity and cgroup quota count, which OpenMP itself doesn't look at.
        added["OMP_NUM_THREADS"] = str(max(1, machine.usable_cores.value // here))
    return added


def _word(truth: bool) -> str:
    return "true" if truth else "false"
