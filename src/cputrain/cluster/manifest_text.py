"""A manifest as text: data in, commented YAML out, and never data that YAML would read as something else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

# Words that YAML 1.1, which kubectl reads, takes for truth values or nothing.
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
# Beginning with a letter, nothing here is a number, a date or a mark of YAML's; sizes are the one exception.
_PLAIN = re.compile(r"(?:--?)?[A-Za-z/](?:[A-Za-z0-9_./=,-]|:(?=[A-Za-z0-9_./-]))*|[1-9]\d*[KMGTPE]i", re.ASCII)
_BLOCK = re.compile(r"(?:[\x20-\x7e\u00a1-\u1fff]*\n)+")


@dataclass(frozen=True)
class Noted:
    """A value, and why it is there: a comment in the line above."""

    value: Any
    note: str


def plain(value: Any) -> Any:
    """The data without its notes."""
    if isinstance(value, Noted):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


def to_text(documents: Sequence[Mapping[str, Any]], heading: str = "") -> str:
    """One YAML stream. It is read again before it is handed out: what isn't the data is our fault, not the user's."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.width = 1 << 20  # never folded: a folded string is hard to read and to search for
    yaml.indent(mapping=2, sequence=4, offset=2)
    texts = []
    for document in documents:
        stream = StringIO()
        yaml.dump(_decorated(document, 0), stream)
        texts.append(stream.getvalue())
    text = "".join(f"# {line}\n" for line in heading.splitlines()) + "---\n".join(texts)
    assert _read(text) == [plain(document) for document in documents], "YAML changed the data"
    return text


def _read(text: str) -> list[Any]:
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)  # type: ignore[assignment]
    return list(yaml.load_all(text))


def _decorated(value: Any, indent: int) -> Any:
    """The same data in ruamel's types, with notes as comments and strings quoted where YAML could misread them."""
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    if isinstance(value, Mapping):
        made = CommentedMap()
        for key, item in value.items():
            made[_string(key)] = _decorated(item.value if isinstance(item, Noted) else item, indent + 2)
            if isinstance(item, Noted):
                made.yaml_set_comment_before_after_key(_string(key), before=item.note, indent=indent)
        return made
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = CommentedSeq()
        for number, item in enumerate(value):
            items.append(_decorated(item.value if isinstance(item, Noted) else item, indent + 2))
            if isinstance(item, Noted):
                items.yaml_set_comment_before_after_key(number, before=item.note, indent=indent)
        return items
    return _string(value) if isinstance(value, str) else value


def _string(value: str) -> str:
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    # A script is read line by line. Leading blanks would need an indentation mark, other characters escapes.
    if "\n" in value and not value[0].isspace() and _BLOCK.fullmatch(value) and not value.endswith("\n\n"):
        return LiteralScalarString(value)
    return DoubleQuotedScalarString(value)
