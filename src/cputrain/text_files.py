"""Text files of users: whatever keeps one from being read or written is a sentence that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class YamlError(ValueError):
    """What isn't YAML, and in which line."""

    def __init__(self, line: int, sentence: str) -> None:
        super().__init__(sentence)
        self.line = line


def read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: this is not UTF-8 text.") from None


def quoted(sentence: str, most: int = 1000) -> str:
    """A sentence that quotes a file: what isn't printable could move a terminal's cursor, and is shown as its code."""
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in sentence)
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


@contextmanager
def yaml_errors(text: str, remedy: Callable[[str, int], str] = lambda text, line: "") -> Iterator[None]:
    """What ruamel raises over `text` becomes a YamlError; `remedy` adds to what a line's syntax error says."""
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        yield
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise YamlError(line, f"{error.problem or error.context}{remedy(text, line)}") from None
    except YAMLError as error:  # a character that YAML doesn't allow
        line = text[: getattr(error, "position", 0)].count("\n") + 1
        raise YamlError(line, str(getattr(error, "reason", "not YAML"))) from None
    except RecursionError:
        raise YamlError(1, "it is nested too deeply") from None


def write(path: Path, text: str, private: bool = False) -> None:
    """`private`: a new file is readable for its owner only."""
    try:
        if private:
            path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")  # whatever the locale is, as `read` expects it
    except OSError as error:
        raise ValueError(f"{path} can't be written: {error.strerror}.") from None


def make_folder(path: Path) -> None:
    """With those around it, as far as they are missing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"the folder {path} can't be made: {error.strerror}.") from None
