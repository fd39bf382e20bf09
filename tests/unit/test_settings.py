"""The environment wins over what a script asks of `optimize`, and misspelt settings are refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import cputrain
from cputrain import log, settings
from tests.integrations.tiny import bert


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (settings.DTYPE, settings.PADDING):
        monkeypatch.delenv(name, raising=False)
    log.say_once.cache_clear()


def facts(**asked: str) -> dict[str, str]:
    return {what: value for what, value, _ in cputrain.explain(cputrain.optimize(bert(), **asked)).facts}


def test_without_settings_the_script_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    assert settings.win_over(torch.bfloat16, "keep") == (torch.bfloat16, "keep")
    assert facts(dtype="int16", padding="keep").items() >= {"precision": "int16", "padding": "keep"}.items()
    assert caplog.messages == []


def test_settings_win_over_a_scripts_own_call(monkeypatch, caplog) -> None:
    monkeypatch.setenv("CPUTRAIN_DTYPE", "fp32")
    monkeypatch.setenv("CPUTRAIN_PADDING", "keep")
    for _ in range(2):
        assert facts(dtype="int16", padding="drop").items() >= {"precision": "fp32", "padding": "keep"}.items()
    assert caplog.messages == [
        "CPUTRAIN_DTYPE=fp32 holds, in place of the script's int16",
        "CPUTRAIN_PADDING=keep holds, in place of the script's drop",
    ]


def test_run_says_it_for_a_script_that_optimises_by_itself() -> None:
    code = (
        "import cputrain\nfrom tests.integrations.tiny import bert\n"
        "print(cputrain.explain(cputrain.optimize(bert(), dtype='fp32')).facts[0][:2])"
    )
    command = [sys.executable, "-m", "cputrain", "run", "--dtype", "int16", "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout == "('precision', 'int16')\n"
    assert "cputrain: CPUTRAIN_DTYPE=int16 holds, in place of the script's fp32\n" in answer.stderr


@pytest.mark.parametrize("name", [settings.DTYPE, settings.PADDING])
def test_misspelt_settings_are_refused(name: str, monkeypatch) -> None:
    monkeypatch.setenv(name, "perhaps")
    with pytest.raises(ValueError, match=rf"{name} must be one of .*, found 'perhaps'"):
        settings.win_over("fp32", "drop")


def test_an_empty_setting_is_none(monkeypatch) -> None:
    monkeypatch.setenv("CPUTRAIN_DTYPE", "")
    assert settings.win_over("int16", "drop") == ("int16", "drop")


@pytest.mark.parametrize("value", ["6;7", "6 7", "all"])
def test_what_is_no_list_of_cpus_is_refused(value: str, monkeypatch) -> None:
    monkeypatch.setenv(settings.COMMUNICATION_CPUS, " 6, 7,")
    assert settings.communication_cpus() == {6, 7}
    monkeypatch.setenv(settings.COMMUNICATION_CPUS, value)
    with pytest.raises(
        ValueError, match=f"must be a list of CPU numbers like 6,7, found '{value}'; change it, or unset"
    ):
        settings.communication_cpus()


def test_what_is_no_number_is_refused() -> None:
    assert settings.number(settings.RANK, environ={}) == 0
    with pytest.raises(ValueError, match="RANK must be a whole number, found 'one'; change it, or unset it"):
        settings.number(settings.RANK, environ={"RANK": "one"})
