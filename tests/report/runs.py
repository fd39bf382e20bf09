"""Records that tests make up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HOSTILE = '<script>document.title="run"</script><img src=x onerror=alert(1)>"\'&\x1b[2J\u202e'


def head(rank: int, size: int, **more: Any) -> dict[str, Any]:
    found = {"kind": "run", "format": 1, "rank": rank, "size": size, "total": 50, "threads": 2, "dtype": "int16"}
    found |= {"command": ["cputrain", "run", "my script.py", "--x", "1"], "folder": "/home/me", "peak_gflops": 200.0}
    found |= {"machine": {"cpu": "A CPU", "cores": 4}, "versions": {"torch": "2.13"}, "arguments": {"lr": 3e-5}}
    return found | {"model": {"class": "Bert", "parameters": 22_000_000, "trained": 22_000_000}} | more


def steps(step: int, seconds: float = 0.5, **more: Any) -> dict[str, Any]:
    phases = {"data": 0.01, "forward": 0.4 * seconds, "backward": 0.5 * seconds, "communication": 0.02}
    found = {"kind": "steps", "t": step * seconds, "step": step, "n": 1, "s": seconds, "loss": 5 / step, "lr": 3e-5}
    return found | {"real": 100, "padded": 250, "gflop": 20.0, "rss": 1_000_000_000, "phases": phases} | more


def make(folder: Path, ranks: int = 1, number: int = 50, seconds: float = 0.5, **of_head: Any) -> Path:
    for rank in range(ranks):
        metrics = {"kind": "metrics", "t": 9, "step": number, "values": {"eval_f1": 81.5}}
        end = {"kind": "end", "t": 30, "step": number, "how": "ended", "peak": 1_500_000_000}
        lines = [head(rank, ranks, **of_head), *(steps(i, seconds) for i in range(1, number + 1)), metrics, end]
        write(folder, rank, lines)
    return folder


def write(folder: Path, rank: int, lines: list[dict[str, Any]]) -> None:
    file = folder / "_cputrain" / f"run-{rank}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def hostile(folder: Path) -> Path:
    """Script tags, control characters and nonsense wherever a record has words, names or numbers."""
    odd = {"command": [HOSTILE, 3, None], "folder": HOSTILE, "dtype": HOSTILE, "threads": HOSTILE, "total": -1}
    odd |= {"machine": {"cpu": HOSTILE, "cores": [HOSTILE]}, "versions": {HOSTILE: HOSTILE}, "peak_gflops": HOSTILE}
    odd |= {"arguments": {HOSTILE: {HOSTILE: [HOSTILE]}}, "environment": HOSTILE}
    odd |= {
        "explain": {"facts": [[HOSTILE] * 3, HOSTILE, [1]], "modules": HOSTILE},
        "size": "many",
        "model": {"class": HOSTILE},
    }
    lines = [head(0, 1) | odd, *(steps(i) for i in range(1, 9))]
    lines += [steps(9, phases={HOSTILE: 1, "data": HOSTILE}), steps(10, loss=HOSTILE, rss=-5, real=1e30)]
    lines += [{"kind": "event", "t": HOSTILE, "text": HOSTILE, "what": HOSTILE}, {"kind": HOSTILE, "t": 1}]
    lines += [{"kind": "metrics", "t": 1, "step": HOSTILE, "values": {HOSTILE: 1.5, "a": HOSTILE}}]
    lines += [{"kind": "metrics", "values": [HOSTILE]}, {"kind": "end", "how": HOSTILE, "peak": HOSTILE}]
    write(folder, 0, lines)
    return folder
