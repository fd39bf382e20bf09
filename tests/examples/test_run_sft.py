"""run_sft.py: its docstring's command up to the merged model, its three methods, and one sentence for what is wrong."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("trl", reason="TRL isn't installed")
from tests.integrations import trl_training

SCRIPT = Path(__file__).parents[2] / "examples" / "language_modeling" / "run_sft.py"
COMMAND = next(
    part for part in ast.get_docstring(ast.parse(SCRIPT.read_text())).split("\n\n") if "cputrain run" in part
)
TEMPLATE = """
{%- for m in messages %}{{ m.role + ' : ' + m.content + ' </s> ' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"""
# As Qwen3's: once the conversation goes on, an answer is written without what it began with.
FORGETFUL = TEMPLATE.replace("m.content", "(m.content if m.role == 'user' or loop.last else 'w1')")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("chats")
    trl_training.llama().bfloat16().save_pretrained(place / "model")
    tokenizer = trl_training.tokenizer()
    for template, folder in ((TEMPLATE, "model"), (None, "base")):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(place / folder)
    chats = [{"messages": talk["asked"] + talk["good"]} for talk in trl_training.talks(48)]
    (place / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)) + "\n\n")
    (place / "empty.jsonl").write_text("\n")
    (place / "latin.jsonl").write_bytes(b"caf\xe9")
    (place / "prose.jsonl").write_text('{"messages": []}\nonce upon a time\n')
    for name, role, content in (("role", "robot", "hi"), ("content", "assistant", 3), ("silent", "user", "hi")):
        (place / f"{name}.jsonl").write_text(json.dumps({"messages": [{"role": role, "content": content}]}))
    return place


@pytest.fixture
def script(monkeypatch, place):
    spec = importlib.util.spec_from_file_location("run_sft", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_sft", module)
    monkeypatch.chdir(place)
    spec.loader.exec_module(module)

    def run(words: str) -> None:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *shlex.split(words)])
        module.main()

    module.run = run
    return module


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


def test_the_docstrings_command_learns_and_merges(place: Path) -> None:
    words = shlex.split(COMMAND.replace("\\\n", " "))[3:]
    small = {"--model": "model", "--epochs": "5", "--output_dir": "out"}
    for option, value in small.items():
        words[words.index(option) + 1] = value
    command = [sys.executable, "-m", "cputrain", "run", str(SCRIPT), *words, "--learning_rate", "1e-2"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(place / "c")}
    answer = subprocess.run(command, cwd=place, capture_output=True, text=True, env=environment, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert "PeftModelForCausalLM is optimised" in answer.stderr and "TRL computes" not in answer.stderr
    assert "tokens a second, at most" in answer.stderr and "which fits into" in answer.stderr
    assert "convert_hf_to_gguf.py out/merged --outfile out/merged.gguf" in answer.stdout
    history = json.loads((place / "out" / "trainer_state.json").read_text())["log_history"]
    losses = [line["loss"] for line in history if "loss" in line]
    assert losses[-1] < losses[0] - 0.25
    before, after = weights(place / "model"), weights(place / "out" / "merged")
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert (place / "out" / "merged" / "chat_template.jinja").exists()


QUICK = "--model model --train_file chats.jsonl --max_steps 2 --seed 1 --dropout 0"


def losses(folder: Path) -> list[float]:
    return [json.loads((folder / "train_results.json").read_text())["train_loss"]]


def test_trainer_computes_trls_losses(script, place: Path) -> None:
    for loop in ("", " --no_trl"):
        script.run(f"{QUICK} --accumulate 3 --no_merge --eval_file chats.jsonl --output_dir loop{loop[-3:]}{loop}")
    assert losses(place / "looptrl") == pytest.approx(losses(place / "loop"), rel=1e-3)
    assert (place / "loop" / "adapter_model.safetensors").exists() and not (place / "loop" / "merged").exists()


@pytest.mark.parametrize("method", ["--full", "--qlora", "--qlora --checkpointing"])
def test_other_methods(method: str, script, place: Path, capsys) -> None:
    pytest.importorskip("bitsandbytes")
    folder = f"with{method.replace(' ', '')}"
    script.run(f"{QUICK} {method} --learning_rate 1e-3 --output_dir {folder}")
    trained = place / folder / ("" if method == "--full" else "merged")
    assert f"is in {trained.relative_to(place)}" in capsys.readouterr().out
    before, after = weights(place / "model"), weights(trained)
    assert before.keys() == after.keys()
    name = "model.layers.1.mlp.up_proj.weight"
    assert 0 < (after[name].float() - before[name].float()).norm() < 0.5 * before[name].norm()


@pytest.mark.parametrize(("template", "learned"), [(TEMPLATE, ["w2", "w3"]), (FORGETFUL, ["w3"])])
def test_what_the_assistant_says_is_learned(template: str, learned: list[str], script) -> None:
    """An earlier answer only if the template writes it as it was when it was given."""
    tokenizer = trl_training.tokenizer()
    tokenizer.chat_template = template
    said = [("user", "w1"), ("assistant", "w2"), ("user", "w1"), ("assistant", "w3")]
    row = script.labelled([{"role": role, "content": content} for role, content in said], tokenizer)
    assert [label for label in row["labels"] if label != -100] == [
        number for word in learned for number in tokenizer(f"{word} </s>")["input_ids"]
    ]
    assert all(label in (-100, number) for label, number in zip(row["labels"], row["input_ids"], strict=True))


def test_what_is_cut_is_told(script, capsys) -> None:
    tokenizer = trl_training.tokenizer()
    tokenizer.chat_template = TEMPLATE
    chats = [talk["asked"] + talk["good"] for talk in trl_training.talks(8)]
    lengths = [len(script.labelled(chat, tokenizer)["input_ids"]) for chat in chats]
    rows = script.tokenized(chats, tokenizer, min(lengths))
    assert max(map(len, rows["input_ids"])) == min(lengths)
    said = capsys.readouterr().err
    assert f"{sum(n > min(lengths) for n in lengths)} of 8 conversations are cut" in said


TRAIN = "--model model --output_dir nothing --train_file"
WRONG = {
    f"{TRAIN} absent.jsonl": "absent.jsonl can't be read: No such file or directory",
    f"{TRAIN} empty.jsonl": "empty.jsonl has no conversation",
    f"{TRAIN} latin.jsonl": "latin.jsonl is no text in UTF-8",
    f"{TRAIN} prose.jsonl": "prose.jsonl, line 1: the assistant says nothing",
    f"{TRAIN} role.jsonl": "role.jsonl, line 1: a message needs a role of system, user, assistant, tool and a text",
    f"{TRAIN} content.jsonl": "found 'assistant': 3",
    f"{TRAIN} silent.jsonl": "silent.jsonl, line 1: the assistant says nothing",
    f"{TRAIN} chats.jsonl --max_length 2": "no conversation has an answer within --max_length",
    f"{TRAIN} chats.jsonl --max_length 1": "--max_length must be at least 2, found 1",
    f"{TRAIN} chats.jsonl --dropout 1": "--dropout must be at least 0 and less than 1, found 1.0",
    f"{TRAIN} chats.jsonl --rank 0": "argument --rank: must be a whole number of at least 1, found 0",
    f"{TRAIN} chats.jsonl --full --qlora": "not allowed with argument",
    f"{TRAIN} chats.jsonl --model base": "the tokenizer of base has no chat template",
    f"{TRAIN} chats.jsonl --model ./absent": "./absent can't be loaded",
}


@pytest.mark.parametrize("words", WRONG)
def test_one_sentence_says_what_is_wrong(words: str, script, place: Path, capsys) -> None:
    with pytest.raises(SystemExit) as exit:
        script.run(words)
    said = capsys.readouterr().err
    assert exit.value.code == 2 and WRONG[words] in said
    assert "Traceback" not in said and not (place / "nothing").exists()


def test_bitsandbytes_is_asked_for(script, monkeypatch, capsys) -> None:
    def absent(_: str) -> str:
        raise metadata.PackageNotFoundError

    for version, why in ((lambda _: "0.45.5", "bitsandbytes is 0.45.5"), (absent, "bitsandbytes isn't installed")):
        monkeypatch.setattr(metadata, "version", version)
        with pytest.raises(SystemExit) as exit:
            script.run(f"{TRAIN} chats.jsonl --qlora")
        assert exit.value.code == 2
        assert f"{why}, and --qlora needs 0.46 or later: pip install" in capsys.readouterr().err
