"""The user's `kubectl`, with their context: found, called without a shell, and its complaints in one sentence."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any


class Refused(ValueError):
    """The cluster said no. `reason` is Kubernetes' word for it: NotFound, AlreadyExists, Forbidden …"""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True)
class Kubectl:
    """One context and namespace; None is what the user's configuration says."""

    context: str | None = None
    namespace: str | None = None

    def command(self, *words: str) -> list[str]:
        program = shutil.which("kubectl")
        if program is None:
            raise ValueError("kubectl isn't on the PATH: install it, or render the manifest and take it elsewhere.")
        chosen = [f"--context={self.context}"] if self.context else []
        chosen += [f"--namespace={self.namespace}"] if self.namespace else []
        return [program, *chosen, *words]

    def run(self, *words: str, given: str | None = None) -> str:
        """What kubectl printed. Refused with a sentence if it failed."""
        answer = subprocess.run(
            self.command(*words), input=given, capture_output=True, text=True, check=False, errors="replace"
        )
        if answer.returncode:
            raise refusal(answer.stderr or answer.stdout)
        return answer.stdout

    def json(self, *words: str, given: str | None = None) -> dict[str, Any]:
        found = json.loads(self.run(*words, "--output=json", given=given))
        assert isinstance(found, dict)
        return found

    def kinds(self) -> set[tuple[str, str]]:
        """(group/version, kind) of everything the cluster knows: users may ask this, but not list definitions."""
        lines = self.run("api-resources", "--no-headers", "--cached=false").splitlines()
        # NAME SHORTNAMES APIVERSION NAMESPACED KIND, where SHORTNAMES may be empty.
        return {(words[-3], words[-1]) for words in map(str.split, lines) if len(words) >= 4}


_SERVER = re.compile(r"Error from server(?: \((\w+)\))?: (.*)", re.DOTALL)


def refusal(stderr: str) -> Refused:
    """kubectl's complaint as one sentence."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    text = " ".join(line for line in lines if not re.match(r"[EWI]\d{4} ", line)) or " ".join(lines)
    found = _SERVER.search(text)
    if found:
        reason, said = found[1] or "Server", found[2].rstrip(".")
        remedy = {
            "Forbidden": ": ask for the right, or choose another --namespace or --context",
            "Unauthorized": ": log in anew",
        }.get(reason, "")
        return Refused(reason, f"the cluster refused: {said}{remedy}.")
    if re.search(r"invalid configuration: no configuration|current-context is not set|localhost:8080", text):
        return Refused("NoCluster", "kubectl has no cluster to talk to: set KUBECONFIG or --context.")
    said = text.removeprefix("error: ").rstrip(".")
    if re.search(r"context .* does not exist", text):
        return Refused("NoCluster", f"kubectl doesn't know that context: {said}.")
    if re.search(r"refused|Unable to connect|no such host|i/o timeout|EOF|reset by peer|unexpected end", text):
        return Refused("Unreachable", f"the cluster can't be reached: {text.rstrip('.')}.")
    return Refused("Kubectl", f"kubectl failed: {said or 'without a word'}.")
