"""What was measured so far, in a file beside the configuration: a search that was cut short goes on from there."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cputrain import __version__, text_files
from cputrain.hardware import Hardware
from cputrain.record.lines import parsed
from cputrain.secrets_in_clear import shown_words
from cputrain.tune.candidates import Candidate


def fingerprint(words: Sequence[str], machine: Hardware, **asked: Any) -> dict[str, Any]:
    """What measurements of another training, machine or version would differ in."""
    script = next((Path(word) for word in words if word.endswith(".py") and os.path.isfile(word)), None)
    told = json.dumps([list(words), os.getcwd()])
    return {
        "command": shown_words(words),
        "training": hashlib.sha256(told.encode() + (script.read_bytes() if script else b"")).hexdigest(),
        "cpu": machine.model.value,
        "cores": machine.usable_cores.value,
        "asked": asked,
        "version": __version__,
    }


class Tried:
    """`facts`: what the first trial told of the training; `left`: measurements that a search hasn't asked for again."""

    def __init__(self, path: Path, mark: Mapping[str, Any], anew: bool = False) -> None:
        self.path, self._mark = path, {"kind": "tune", **mark}
        self.facts: dict[str, Any] = {}
        self.left: dict[str, list[float | None]] = defaultdict(list)
        self.problems: dict[str, str] = {}
        self.times: dict[str, list[float]] = defaultdict(list)
        self.goes_on = self._has_file = not anew and self._read()

    def _read(self) -> bool:
        if not self.path.exists():
            return False
        entries = [
            entry for entry in map(parsed, text_files.read(self.path).encode().splitlines()) if entry is not None
        ]
        if not entries or entries[0] != self._mark:
            return False
        for entry in entries[1:]:
            if entry["kind"] == "facts" and isinstance(entry.get("facts"), dict):
                self.facts = entry["facts"]
            elif entry["kind"] == "trial" and isinstance(entry.get("candidate"), dict):
                self._keep(_key(entry["candidate"]), entry.get("seconds"), str(entry.get("problem", "")))
        return True

    def _keep(self, key: str, seconds: Any, problem: str) -> None:
        is_measured = isinstance(seconds, float) and seconds > 0
        self.left[key].append(seconds if is_measured else None)
        if is_measured:
            self.times[key].append(seconds)
        else:
            self.problems[key] = problem

    def next_of(self, candidate: Candidate) -> list[float | None]:
        """The next measurement of earlier, in a list, or an empty list."""
        left = self.left[_key(asdict(candidate))]
        return [left.pop(0)] if left else []

    def times_of(self, candidate: Candidate) -> list[float]:
        return self.times[_key(asdict(candidate))]

    def problem_of(self, candidate: Candidate) -> str:
        return self.problems.get(_key(asdict(candidate)), "")

    def note_facts(self, facts: Mapping[str, Any]) -> None:
        self.facts = dict(facts)
        self._append({"kind": "facts", "facts": self.facts})

    def note(self, candidate: Candidate, seconds: float | None, problem: str) -> None:
        key = _key(asdict(candidate))
        self._keep(key, seconds, problem)
        self.left[key].pop()
        self._append({"kind": "trial", "candidate": asdict(candidate), "seconds": seconds, "problem": problem})

    def _append(self, entry: Mapping[str, Any]) -> None:
        if not self._has_file:  # what measured another training is replaced when this one has told something
            text_files.make_folder(self.path.parent)
            text_files.write(self.path, f"{json.dumps(self._mark)}\n")
            self._has_file = True
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(entry)}\n")
        except OSError as error:
            raise ValueError(f"{self.path} can't be written: {error.strerror}.") from None


def _key(candidate: Mapping[str, Any]) -> str:
    return json.dumps(candidate, sort_keys=True)
