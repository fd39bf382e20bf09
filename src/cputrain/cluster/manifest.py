"""A manifest: read as kubectl reads it, with lines; places in it and problems there; written with comments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from cputrain.text_files import YamlError, yaml_errors

Where = tuple["str | int", ...]
# error: it is refused, or can't work as written. warning: it starts, but will probably not do what is meant.
# hint: it works, and could be faster or safer.
ERROR, WARNING, HINT = SEVERITIES = ("error", "warning", "hint")
_MOST_VALUES = 200_000  # a few lines of aliases can mean billions

# As kubectl's YAML library resolves plain scalars: YAML 1.1, without its base 60.
_TRUE = {"y", "Y", "yes", "Yes", "YES", "on", "On", "ON", "true", "True", "TRUE"}
_FALSE = {"n", "N", "no", "No", "NO", "off", "Off", "OFF", "false", "False", "FALSE"}
_NULL = {"", "~", "null", "Null", "NULL"}
_WHOLE = re.compile(r"[-+]?(?:0b_*[01][01_]*|0o?_*[0-7][0-7_]*|0x_*[0-9a-fA-F][0-9a-fA-F_]*|0|[1-9][0-9_]{0,300})")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def within(value: Any, *keys: str) -> Any:
    """The part at a path of keys, or None."""
    for key in keys:
        value = mapping(value).get(key)
    return value


def mappings(value: Any, *keys: str) -> list[dict[str, Any]]:
    """The items of the list at a path of keys; one that is no mapping counts as empty."""
    return [mapping(item) for item in items(within(value, *keys))]


@dataclass(frozen=True)
class Problem:
    """What is wrong, and the path of where."""

    where: Where
    sentence: str
    severity: str = ERROR


def warning(where: Where, sentence: str) -> Problem:
    return Problem(where, sentence, WARNING)


def hint(where: Where, sentence: str) -> Problem:
    return Problem(where, sentence, HINT)


@dataclass(frozen=True)
class Document:
    """One document of a file: its data, and by their paths the line of each key and item.

    `spelt` has the numbers and truth values as they are written, because `3e-5` and `yes` can't be told from the data.
    """

    value: Any
    lines: dict[Where, int]
    spelt: dict[Where, str] = field(default_factory=dict)

    def line(self, where: Where) -> int:
        """The line of a path, or of the nearest thing around it that exists."""
        while where not in self.lines and where:
            where = where[:-1]
        return self.lines.get(where, 1)


def parse(text: str) -> list[Document]:
    """All documents, with the items of a List for the List; empty ones are skipped, as kubectl does."""
    from ruamel.yaml import YAML

    documents = []
    with yaml_errors(text, _remedy):
        for node in YAML(typ="safe", pure=True).compose_all(StringIO(text)):
            reader = _Reader()
            value = reader.value(node, ())
            if value is not None:
                documents += _items_of_list(Document(value, reader.lines, reader.spelt))
    return documents


def _items_of_list(document: Document) -> list[Document]:
    """What `kubectl get --output=yaml` writes for several objects."""
    value = document.value
    if not isinstance(value, dict) or value.get("kind") != "List" or not isinstance(value.get("items"), list):
        return [document]
    found = []
    for number, item in enumerate(value["items"]):
        here: Where = ("items", number)
        lines = {where[2:]: line for where, line in document.lines.items() if where[:2] == here}
        spelt = {where[2:]: text for where, text in document.spelt.items() if where[:2] == here}
        found.append(Document(item, lines, spelt))
    return found


def _remedy(text: str, line: int) -> str:
    """The usual reasons for a line that doesn't parse."""
    lines = text.splitlines()
    for number in range(line, max(0, line - 3), -1):
        found = lines[number - 1] if number <= len(lines) else ""
        if re.match(r"[-+] {2,}\S", found):
            return f": line {number} begins with `{found[0]}` like a line of a diff; put a blank in its place"
        if re.match(r" *\t", found):
            return f": line {number} is indented with a tab; use blanks"
    return ""


class _Reader:
    """Turns ruamel's nodes, which know their lines, into plain data."""

    def __init__(self) -> None:
        self.lines: dict[Where, int] = {}
        self.spelt: dict[Where, str] = {}
        self._open: set[int] = set()

    def value(self, node: Any, where: Where) -> Any:
        from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

        self.lines.setdefault(where, node.start_mark.line + 1)
        if len(self.lines) > _MOST_VALUES:
            raise YamlError(node.start_mark.line + 1, f"it means more than {_MOST_VALUES:,} values")
        if isinstance(node, ScalarNode):
            value = _scalar(node)
            if not isinstance(value, str):
                self.spelt[where] = str(node.value)
            return value
        if id(node) in self._open:
            raise YamlError(node.start_mark.line + 1, "an alias refers to what it is part of")
        self._open.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                return [self.value(item, (*where, number)) for number, item in enumerate(node.value)]
            assert isinstance(node, MappingNode)
            return dict(self._pairs(node, where))
        finally:
            self._open.discard(id(node))

    def _pairs(self, node: Any, where: Where) -> Iterator[tuple[str, Any]]:
        from ruamel.yaml.nodes import MappingNode, ScalarNode

        seen: dict[str, int] = {}
        merged: list[Any] = []
        for key_node, item in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, ScalarNode):
                raise YamlError(line, "a key must be a word")
            key = str(key_node.value)
            if key == "<<" and not key_node.style:
                merged += [item] if isinstance(item, MappingNode) else list(item.value)
                continue
            if key in seen:
                raise YamlError(line, f"the key {key} stands in line {seen[key]} already")
            seen[key] = line
            here = (*where, key)
            self.lines[here] = line
            yield key, self.value(item, here)
        for other in merged:
            if isinstance(other, MappingNode):
                yield from ((key, item) for key, item in self._pairs(other, where) if key not in seen)


def _scalar(node: Any) -> Any:
    text = str(node.value)
    if node.style:  # quoted or a block: text, whatever it looks like
        return text
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _WHOLE.fullmatch(text):
        digits = text.replace("_", "")
        sign = -1 if digits.startswith("-") else 1
        digits = digits.lstrip("+-")
        octal = len(digits) > 1 and digits[0] == "0" and digits[1] not in "box"
        return sign * int(f"0o{digits[1:]}" if octal else digits, 0)
    return float(text) if _FLOAT.fullmatch(text) else text


# Words that YAML 1.1, which kubectl reads, takes for truth values or nothing.
_WORDS = {word.lower() for word in (*_TRUE, *_FALSE, "null")}
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

    made: Any
    rows: Iterable[tuple[Any, Any]]
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        made, rows = CommentedMap(), [(_string(key), item) for key, item in value.items()]
    elif isinstance(value, Sequence):
        made, rows = CommentedSeq([None] * len(value)), enumerate(value)
    else:
        return value
    for key, item in rows:
        made[key] = _decorated(item.value if isinstance(item, Noted) else item, indent + 2)
        if isinstance(item, Noted):
            made.yaml_set_comment_before_after_key(key, before=item.note, indent=indent)
    return made


def _string(value: str) -> str:
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    # A script is read line by line. Leading blanks would need an indentation mark, other characters escapes.
    if "\n" in value and not value[0].isspace() and _BLOCK.fullmatch(value) and not value.endswith("\n\n"):
        return LiteralScalarString(value)
    return DoubleQuotedScalarString(value)
