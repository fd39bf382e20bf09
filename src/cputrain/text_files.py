"""Text files of users: whatever keeps one from being read or written is a sentence that names it."""

from __future__ import annotations

from pathlib import Path


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
