"""How far `cputrain plan` is off: its step time and peak memory against real runs of the same jobs, in turns.

    python benchmarks/plan_accuracy.py --report
    python benchmarks/plan_accuracy.py --job minilm bert-base --repeat 5
    python benchmarks/plan_accuracy.py --cgroup

Each repetition plans, and then trains the whole model for a few steps in a process of its own (two under `cputrain
launch`, with DistributedDataParallel over ccl); ratios are plan / run, medians over repetitions. Memory is ru_maxrss.
`--cgroup`, as root: the largest batch that plan names for a limit runs in a control group with that limit, and 1.5
times as many sequences are killed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cputrain.plan.answer import Plan
    from cputrain.trials.jobs import Job

# Model, rank of adapters, sequences × tokens, ranks.
CASES: dict[str, tuple[str, int | None, tuple[int, int], int]] = {
    "minilm": ("minilm", None, (12, 384), 1),
    "bert-base": ("bert-base", None, (4, 384), 1),
    "llama-135m": ("llama-135m", None, (4, 256), 1),
    "llama-135m-lora": ("llama-135m", 16, (4, 256), 1),
    "qwen3-0.6b-lora": ("qwen3-0.6b", 16, (2, 256), 1),
    "minilm-2": ("minilm", None, (6, 384), 2),
    "bert-base-2": ("bert-base", None, (2, 384), 2),
    "llama-135m-2": ("llama-135m", None, (2, 256), 2),
}
STEPS, WARMUP = 5, 2
CGROUPS = Path("/sys/fs/cgroup")


# ---- a real run ----------------------------------------------------------------------------------------------------


def train(given: dict[str, Any], sequences: int) -> None:
    """Prints the median of its steps, and its peak; one rank of those that the launcher started."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from cputrain.trials import models
    from cputrain.trials.jobs import from_answer

    job = from_answer(given)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        import cputrain.distributed

        distributed.init_process_group("ccl")
    import cputrain

    model = models.build(job, job.layers)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    cputrain.optimize(model, optimizer, dtype=job.dtype)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if ranks > 1 else model
    taken = []
    for number in range(WARMUP + STEPS):
        torch.manual_seed(number)
        batch = models.batch(job, model, sequences)
        begin = time.perf_counter()
        wrapped(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - begin)
    if os.environ.get("RANK", "0") == "0":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": statistics.median(taken[WARMUP:]), "peak": peak}))


def real(job: Job, ranks: int, group: Path | None = None, sequences: int | None = None) -> dict[str, float] | None:
    """None: the kernel killed it."""
    start = ["-m", "cputrain", "launch", "-n", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *start, __file__, "--train", json.dumps(asdict(job))]
    command += ["--sequences", str(sequences or job.sequences)]
    if group is not None:
        command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]
    environment = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)) // ranks)}
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode in (-9, 137):
        return None
    done.check_returncode()
    return json.loads(next(line[line.index("{") :] for line in done.stdout.splitlines() if '"peak"' in line))


# ---- plan against it -----------------------------------------------------------------------------------------------


def job_of(model: str, lora: int | None, sequences: int, length: int) -> tuple[Job, int]:
    from cputrain.trials import models
    from cputrain.trials.jobs import Job

    found = models.resolve(model, None)
    job = Job(model, found["config"], found["architecture"], found["layers"], sequences, length, lora=lora)
    return job, found["parameters"]


def planned(job: Job, parameters: int, ranks: int, limit: float | None = None) -> Plan:
    from cputrain.plan import answer, measure

    question = answer.Question(job, parameters, ranks=ranks, memory=limit, alternatives=False)
    with measure.workers(ranks) as pair:
        return answer.make(question, pair, lambda line: print(f"  {line}", file=sys.stderr))


def accuracy(name: str, repeat: int) -> dict[str, str]:
    model, lora, (sequences, length), ranks = CASES[name]
    job, parameters = job_of(model, lora, sequences, length)
    pairs = []
    for number in range(repeat):
        begun = time.perf_counter()
        plan = planned(job, parameters, ranks)
        took = time.perf_counter() - begun
        run = real(job, ranks)
        assert run is not None and plan.step is not None and plan.parts is not None
        pairs.append((plan.curve[0].seconds, run["seconds"], plan.parts.peak, run["peak"], took))
        print(f"{name} {number + 1}/{repeat}: {pairs[-1]}", file=sys.stderr)
    seconds, memory = ([plan / run for plan, run in pairs_of] for pairs_of in (_columns(pairs, 0), _columns(pairs, 2)))
    ratio, of_memory = statistics.median(seconds), statistics.median(memory)
    middle = [statistics.median(column) for column in zip(*pairs, strict=True)]
    return {
        "job": name,
        "plan s": f"{middle[0]:.3g}",
        "run s": f"{middle[1]:.3g}",
        "time: plan / run": f"**{ratio:.2f}** ({min(seconds):.2f} – {max(seconds):.2f})",
        "within 15%": "yes" if abs(ratio - 1) <= 0.15 else "**no**",
        "plan MB": f"{middle[2] / 1e6:.0f}",
        "run MB": f"{middle[3] / 1e6:.0f}",
        "memory: plan / run": f"**{of_memory:.2f}** ({min(memory):.2f} – {max(memory):.2f})",
        "within 10%": "yes" if abs(of_memory - 1) <= 0.10 else "**no**",
        "planning took s": f"{middle[4]:.0f}",
    }


def _columns(pairs: list[tuple[float, ...]], first: int) -> list[tuple[float, float]]:
    return [(pair[first], pair[first + 1]) for pair in pairs]


# ---- the largest batch, under a real limit --------------------------------------------------------------------------


@contextmanager
def control_group(limit: int) -> Iterator[Path]:
    """A memory cgroup of version 1 or 2 with this limit; OSError where none can be made."""
    first = (CGROUPS / "memory").is_dir()
    group = (CGROUPS / "memory" if first else CGROUPS) / f"cputrain-plan-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def largest(model: str, length: int, limit: int) -> dict[str, str]:
    job, parameters = job_of(model, None, 4, length)
    plan = planned(job, parameters, 1, float(limit))
    named = plan.asked.largest
    with control_group(limit) as group:
        fits = real(job, 1, group, named)
        more = real(job, 1, group, named * 3 // 2)
    return {
        "job": f"{model}, {length} tokens",
        "limit MB": f"{limit / 1e6:.0f}",
        "largest batch": str(named),
        "it runs": "yes" if fits else "**no**",
        "its peak MB": f"{fits['peak'] / 1e6:.0f}" if fits else "",
        "1.5 times it": "**runs**" if more else "is killed",
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cgroup", action="store_true", help="the largest batch under a real limit instead")
    parser.add_argument("--limit", type=int, default=2 << 30, help="of --cgroup, in bytes")
    parser.add_argument("--report", action="store_true", help="write benchmarks/results/plan_….md")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--sequences", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.train:
        train(json.loads(arguments.train), arguments.sequences)
        return
    if arguments.cgroup:
        try:
            with control_group(arguments.limit):
                pass
        except OSError as error:
            print(f"skipped: no control group can be made here ({error})")
            return
        rows = [largest("minilm", 128, arguments.limit)]
    else:
        rows = [accuracy(name, arguments.repeat) for name in arguments.job]
    print(machine.table(rows))
    if arguments.report:
        path = machine.report_path("plan_largest_batch" if arguments.cgroup else "plan_accuracy")
        title = (
            f"# `cputrain plan` against real runs\n\n    python benchmarks/plan_accuracy.py {' '.join(sys.argv[1:])}\n"
        )
        path.write_text("\n".join((title, machine.table(rows), machine.facts_table(machine.description()))))
        print(f"written to {path}")


if __name__ == "__main__":
    main()
