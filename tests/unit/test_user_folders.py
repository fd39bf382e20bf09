"""The cache of a user with a home, and of a process that has none."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from cputrain import user_folders
from cputrain.launch import config_file

OWN = f"cputrain-{os.getuid()}"
# A user that /etc/passwd doesn't know, in a process without HOME: as some containers start them.
NO_HOME = (
    "import os, pwd\nos.environ.pop('HOME', None)\ndef unknown(uid): raise KeyError(uid)\npwd.getpwuid = unknown\n"
)
OPTIMIZE = (
    NO_HOME
    + """
import torch, transformers, cputrain
from cputrain import measurements
from cputrain.formats import speed
config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
cputrain.optimize(transformers.BertModel(config))
assert speed.ratio("int16") == speed.ratio("int16")
print(measurements.path('product_speed'))
"""
)


@pytest.fixture
def without_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_the_cache_of_a_user() -> None:
    assert user_folders.cache({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x")
    assert user_folders.cache({"HOME": "/h"}) == Path("/h/.cache")
    assert user_folders.cache({"HOME": ""}) == Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache"


def test_without_a_home_it_is_a_folder_of_our_own(without_home: Path) -> None:
    assert user_folders.home({}) is None
    assert user_folders.cache({}) == without_home / OWN
    assert (without_home / OWN).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("fault", ["writable", "link", "file"])
def test_what_another_user_put_there_is_not_used(fault: str, without_home: Path) -> None:
    own = without_home / OWN
    if fault == "writable":
        own.mkdir()
        own.chmod(0o777)
    elif fault == "link":
        own.symlink_to(without_home)
    else:
        own.touch()
    assert user_folders.cache({}) is None


def test_a_launch_without_a_home_has_the_defaults_and_config_says_what_to_do(without_home: Path) -> None:
    assert config_file.read_default({})[1] == "no configuration file: defaults"
    with pytest.raises(ValueError, match="there is no home folder to write to: set HOME or XDG_CONFIG_HOME"):
        config_file.default_path({})


def test_optimize_works_without_a_home(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    answer = subprocess.run(
        [sys.executable, "-c", OPTIMIZE],
        env={**environ, "TMPDIR": str(tmp_path), "HF_HOME": str(tmp_path), "CPUTRAIN_DTYPE": "auto"},
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[-1] == str(tmp_path / OWN / "cputrain" / "product_speed.json")
