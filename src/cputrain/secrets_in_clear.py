"""Tells a password that stands in the open by its name or its looks, and shows text without it."""

from __future__ import annotations

import re
from collections.abc import Iterable

_HIDDEN = "***"
# A word of the name, as HF_TOKEN, api-key, hubToken and wandb.api_key have them; PGPASSWORD and hftoken end like one.
_WORD = re.compile(
    r"KEY|AUTH|AUTHORIZATION|PAT|JWT|COOKIE|SECRETS|CREDENTIALS"
    r"|.*(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|OAUTH|(?:API|ACCESS|SECRET|PRIVATE|AUTH)KEY)"
)
# Tokens of a vocabulary and keys of attention: pad_token_id, token_type_ids, num_key_value_heads.
_OF_MODELS = re.compile(
    r"(?:PAD|EOS|BOS|UNK|SEP|CLS|MASK|START|END|SPECIAL|IMAGE|AUDIO|VIDEO|PER)_TOKEN(?:_ID)?(?=_|$)"
    r"|TOKEN_(?:TYPE|CLASSIFICATION|LEVEL|DROPOUT)(?=_|$)|KEY_(?:VALUE|PADDING)(?=_|$)"
)
# HF_TOKEN_PATH says where a secret is.
_ABOUT_IT = ("PATH", "FILE", "FILENAME", "DIR", "FOLDER", "NAME", "TYPE", "LENGTH", "SOCK")
# Hugging Face, GitHub, GitLab, Amazon, Slack, OpenAI, a header of HTTP, a private key's first line.
_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bglpat-[\w-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bxox[abpr]-[\w-]{10,}"
    r"|\bsk-[\w-]{20,}|\b(?:Bearer|Basic) [\w.~+/=-]{16,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_LOGIN = re.compile(r"://[^/@\s]+@")  # http://user:password@proxy
_QUERY = re.compile(r"([?&])([\w.-]+)=([^?&#\s]*)")  # https://host/?token=x&user=y


def is_secret_name(name: str) -> bool:
    """TOKENIZERS_PARALLELISM, max_new_tokens and pad_token are none; HF_AUTH, hub_token and apiKey are."""
    spelt = re.sub(r"[^A-Z]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()).strip("_")
    words = _OF_MODELS.sub("", spelt).split("_")
    return words[-1] not in _ABOUT_IT and any(_WORD.fullmatch(word) for word in words)


def looks_secret(value: str) -> bool:
    return bool(_VALUE.search(value))


def shown(name: str, value: str) -> str:
    """NAME=value, without the value of a secret, or the password of an address."""
    return f"{name}={_HIDDEN if is_secret_name(name) else shown_value(value)}"


def shown_value(value: str) -> str:
    """Without what looks secret, and without the secrets of addresses."""
    if looks_secret(value):
        return _HIDDEN
    return _QUERY.sub(lambda found: found[1] + shown(found[2], found[3]), _LOGIN.sub(f"://{_HIDDEN}@", value))


def shown_words(words: Iterable[str]) -> list[str]:
    """A command line without secrets: --hub_token x, --api-key=x, wandb.api_key=x and http://user:password@proxy."""
    found: list[str] = []
    hide = False
    for word in words:
        name, equals, value = word.partition("=")
        is_option = word.startswith("-")
        if equals and re.fullmatch(r"[\w.-]+", name):
            found.append(shown(name, value))
        else:
            found.append(_HIDDEN if hide and not is_option else shown_value(word))
        hide = is_option and not equals and is_secret_name(name)
    return found
