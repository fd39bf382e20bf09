"""Tells a password that stands in the open by its name or its looks."""

from __future__ import annotations

import re

# TOKENIZERS_PARALLELISM is no token: the word must stand alone between underscores.
_NAME = re.compile(
    r"(?:^|[_-])(?:TOKEN|KEY|APIKEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(?:$|[_-])", re.IGNORECASE
)
# Hugging Face, GitHub, GitLab, Amazon, Slack, a private key's first line.
_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bglpat-[\w-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bxox[abpr]-[\w-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)


def is_secret_name(name: str) -> bool:
    return bool(_NAME.search(name))


def looks_secret(value: str) -> bool:
    return bool(_VALUE.search(value))
