"""The folder that records and checkpoints share."""

from __future__ import annotations

from pathlib import Path

import pytest

from cputrain import output_folder


def test_it_is_made_where_it_is_looked_for(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    assert not output_folder.path(out).exists()
    assert output_folder.make(out) == output_folder.path(str(out)) == output_folder.make(out)
    assert output_folder.path(out).is_dir()


def test_a_file_in_its_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / output_folder.NAME).touch()
    with pytest.raises(FileExistsError):
        output_folder.make(tmp_path)
