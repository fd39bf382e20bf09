"""What the guides' flags mean: from the command line and from Python, in subclasses too."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
import transformers as stock

from cputrain import TrainingArguments
from cputrain.integrations import settings
from cputrain.integrations.notices import Refused


@dataclass
class UsersArguments(TrainingArguments):
    """As users and libraries extend it."""

    temperature: float = field(default=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.run_name = self.run_name or "mine"


def parse(*flags: str, kind: type = TrainingArguments) -> TrainingArguments:
    return stock.HfArgumentParser(kind).parse_args_into_dataclasses([*flags, "--report_to", "none"])[0]


@pytest.mark.parametrize("kind", [TrainingArguments, UsersArguments])
def test_the_guides_flags_are_accepted(kind: type, tmp_path) -> None:
    flags = ["--use_ipex", "--bf16", "--no_cuda", "--jit_mode_eval", "--ddp_backend", "ccl"]
    arguments = parse("--output_dir", str(tmp_path), *flags, kind=kind)
    assert arguments.use_ipex and arguments.bf16 and arguments.no_cuda and arguments.jit_mode_eval
    assert arguments.use_cpu and arguments.ddp_backend == "ccl"
    assert arguments.device == torch.device("cpu") and arguments.n_gpu == 0


def test_they_are_accepted_from_python(tmp_path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), bf16=True, use_ipex=True, use_cpu=True)
    assert (arguments.bf16, arguments.use_ipex, arguments.use_cpu) == (True, True, True)


def test_everything_that_stock_has_is_still_there() -> None:
    theirs = stock.TrainingArguments.__dataclass_fields__
    ours = TrainingArguments.__dataclass_fields__
    assert list(ours)[: len(theirs)] == list(theirs)
    assert set(ours) - set(theirs) <= {"use_ipex", "no_cuda", "jit_mode_eval"}
    for name in set(theirs) - {"ddp_backend", "use_ipex"}:
        assert ours[name].default == theirs[name].default, name
    assert {*theirs["ddp_backend"].metadata["choices"], "ccl"} == set(ours["ddp_backend"].metadata["choices"])


@pytest.mark.parametrize(
    ("flags", "meant"),
    [
        ([], None),
        (["--use_ipex"], True),
        (["--use_ipex", "True"], True),
        (["--use_ipex", "False"], False),
        (["--use-ipex", "no"], False),
    ],
)
def test_use_ipex_may_be_unsaid_yes_or_no(flags: list[str], meant: bool | None, tmp_path) -> None:
    assert parse("--output_dir", str(tmp_path), *flags).use_ipex is meant


@pytest.mark.parametrize("flag", ["no_cuda", "use_ipex"])
def test_it_implies_the_cpu_beside_a_gpu(flag: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert TrainingArguments(output_dir=str(tmp_path), **{flag: True}).use_cpu


def test_beside_a_gpu_the_cpu_is_not_forced(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert not TrainingArguments(output_dir=str(tmp_path)).use_cpu
    assert not TrainingArguments(output_dir=str(tmp_path), use_ipex=False).use_cpu


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--no_cuda"], "--no_cuda is deprecated: write --use_cpu"),
        (["--use_ipex"], "--use_ipex is deprecated: leave it out"),
        (["--jit_mode_eval"], "--jit_mode_eval has no effect"),
        (["--bf16_full_eval"], "--bf16_full_eval has no effect"),
    ],
)
def test_deprecated_flags_say_once_what_to_write(flags, said, tmp_path, caplog) -> None:
    for _ in range(2):
        parse("--output_dir", str(tmp_path), *flags)
    assert len([line for line in caplog.messages if line.startswith(said)]) == 1


def test_todays_flags_say_nothing(tmp_path, caplog) -> None:
    parse("--output_dir", str(tmp_path), "--use_cpu", "--bf16")
    assert caplog.messages == []


@pytest.mark.parametrize("flag", ["--fp16", "--fp16_full_eval"])
def test_fp16_is_refused_in_one_sentence(flag: str, tmp_path) -> None:
    with pytest.raises(Refused, match="fp16 doesn't train on CPUs: write --bf16"):
        parse("--output_dir", str(tmp_path), flag)


def test_an_unknown_backend_is_still_refused(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse("--output_dir", str(tmp_path), "--ddp_backend", "smoke")
    assert "invalid choice: 'smoke'" in capsys.readouterr().err


@pytest.mark.parametrize("copied_by", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", [TrainingArguments, UsersArguments])
def test_copies_keep_class_and_values(kind: type, copied_by, tmp_path) -> None:
    arguments = kind(output_dir=str(tmp_path), use_ipex=True, learning_rate=0.5)
    copied = copied_by(arguments)
    assert type(copied) is kind and copied is not arguments
    assert copied.to_dict() == arguments.to_dict()


# --- The precision that they select ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "bf16", "said"),
    [
        (None, False, []),
        (None, True, ["the script asks for bf16, fp32 runs"]),
        ("fp32", True, ["fp32 runs: CPUTRAIN_DTYPE=fp32"]),
        ("auto", False, ["fp32 runs: CPUTRAIN_DTYPE=auto"]),
    ],
)
def test_the_environment_wins_over_the_script(environment, bf16, said, monkeypatch, caplog) -> None:
    """With a choice that knows fp32 alone, which its own tests are about."""
    from cputrain.formats import choose

    monkeypatch.setattr(choose, "choose", lambda asked: choose.Choice("fp32", "fp32", f"{asked} was asked for"))
    if environment:
        monkeypatch.setenv("CPUTRAIN_DTYPE", environment)
    assert settings.precision(script_asks_for_bf16=bf16) == (environment or ("auto" if bf16 else "fp32"))
    assert [line.partition(" (")[0] for line in caplog.messages] == said


@pytest.mark.parametrize(
    ("environment", "bf16", "asked"), [(None, False, "fp32"), (None, True, "auto"), ("int16", True, "int16")]
)
def test_precision_is_asked_once_with_what_is_meant(environment, bf16, asked, monkeypatch) -> None:
    from cputrain.formats import choose

    calls = []
    monkeypatch.setattr(choose, "choose", lambda dtype: calls.append(dtype) or choose.Choice("x", "fp32", "why"))
    if environment:
        monkeypatch.setenv("CPUTRAIN_DTYPE", environment)
    assert settings.precision(script_asks_for_bf16=bf16) == asked
    assert calls == [asked]


def test_a_precision_that_does_not_exist_here_is_refused(monkeypatch) -> None:
    from cputrain.formats import choose

    def refuse(_: str) -> tuple[str, str]:
        raise ValueError("not on this CPU.")

    monkeypatch.setattr(choose, "choose", refuse)
    monkeypatch.setenv("CPUTRAIN_DTYPE", "bf16")
    with pytest.raises(Refused, match="CPUTRAIN_DTYPE=bf16: not on this CPU"):
        settings.precision(script_asks_for_bf16=False)


@pytest.mark.parametrize(("value", "meant"), [(None, "drop"), ("drop", "drop"), ("keep", "keep"), ("", "drop")])
def test_padding_comes_from_the_environment(value, meant, monkeypatch) -> None:
    if value is not None:
        monkeypatch.setenv("CPUTRAIN_PADDING", value)
    assert settings.padding() == meant
