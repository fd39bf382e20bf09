"""The benchmarks' own arithmetic, and that a comparison runs and fails as it should."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import decoder_models  # noqa: E402
import decoders  # noqa: E402
import interleaved  # noqa: E402
import language_model_curves  # noqa: E402
import loss_curves  # noqa: E402
import training  # noqa: E402

CHILD = """
import sys
sys.path.insert(0, {benchmarks!r})
from interleaved import serve

def step(number):
    print("a library's chatter")
    if number == 3:
        raise SystemExit(7)
    return {{"seconds": number + 1}}

serve({{"step": step}})
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "child.py"
    path.write_text(CHILD.format(benchmarks=str(BENCHMARKS)))
    return str(path)


def test_sides_answer_in_the_order_of_the_list_whoever_went_first(script: str) -> None:
    sides = [interleaved.Side(name, script, {}, {}) for name in ("a", "b")]
    try:
        assert list(interleaved.in_turns(sides, 2)) == [[{"seconds": 1}] * 2, [{"seconds": 2}] * 2]
    finally:
        for side in sides:
            side.close()


def test_a_side_that_dies_is_named_with_its_code(script: str) -> None:
    side = interleaved.Side("stock", script, {}, {})
    try:
        with pytest.raises(RuntimeError, match="the stock side ended with code 7"):
            side.ask("step", number=3)
    finally:
        side.close()
    assert side.process.returncode == 7


def test_squad_lengths_have_the_published_distribution() -> None:
    lengths = training.sample_lengths("squad", 20_000, seed=1)
    assert statistics.mean(lengths) == pytest.approx(169, abs=2)
    assert statistics.median(lengths) == pytest.approx(158, abs=3)
    assert sorted(lengths)[19_000] == pytest.approx(290, abs=8)
    assert min(lengths) >= 36 and max(lengths) <= training.PADDED_LENGTH
    assert lengths[:5] == training.sample_lengths("squad", 20_000, seed=1)[:5]


def test_arithmetic_of_a_step_counts_real_tokens_once_forward_and_twice_backward() -> None:
    shape = training.Shape(layers=1, hidden=2, heads=1, batch=1)
    # Per token 4 products of 2 x 2 and 2 of 2 x 8: 48 multiply-adds; attention 2 products of 3 x 3 x 2: 36.
    assert shape.step_flops([3]) == 3 * 2 * (3 * 48 + 36)


def test_the_ratio_is_the_median_of_pairs_not_a_ratio_of_medians() -> None:
    assert interleaved.median_ratio([10, 2, 30], [5, 4, 10]) == 2


def test_isa_limits_stock_and_ours_alike() -> None:
    stock, ours = (interleaved.environment("avx2", 2, ours=side) for side in (False, True))
    assert ours == stock | {"CPUTRAIN_ISA": "avx2"}
    assert stock["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    with pytest.raises(ValueError, match="isa is 'sse9'; choose native or avx2"):
        interleaved.environment("sse9", 2, ours=True)


def test_windows_of_curves_outside_the_spread_are_seen() -> None:
    curves = {"stock": [[4.0, 4.0, 2.0, 2.0], [4.2, 4.2, 2.4, 2.4]], "cputrain": [[4.1] * 2 + [3.0] * 2] * 2}
    first, second = loss_curves.compare(curves, width=2)
    assert first["apart"] == pytest.approx(0.0) and first["spread"] == pytest.approx(0.2)
    assert second["apart"] == pytest.approx(0.8) and second["spread"] == pytest.approx(0.4)
    arguments = SimpleNamespace(dtype="fp32", window=2, seeds=[1, 2], steps=4, threads=1)
    assert "1 of 2 windows" in loss_curves.report([first, second], arguments, "curves.svg")
    assert loss_curves.picture(curves, 2).count("<polyline") == 4


@pytest.mark.parametrize("benchmark", ["training", "models_speed"])
def test_a_small_comparison_runs_end_to_end(benchmark: str) -> None:
    small = {"training": ["--batch", "1", "--lengths", "squad"], "models_speed": ["--model", "mlp", "conv"]}[benchmark]
    command = [sys.executable, str(BENCHMARKS / f"{benchmark}.py"), *small, "--steps", "2", "--warmup", "1", "--json"]
    done = subprocess.run([*command, "--threads", "1"], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    for result in json.loads(done.stdout):
        assert result["ratio"] > 0
        assert all(0 < loss < 20 for loss in result["first_losses"])


MODES = {
    "llama-135m": {},
    "bert-mlm": {},
    "head-half": {},
    "head-trained": {},
    "qwen3-0.6b": {"train": "lora", "load": "bf16", "accumulate": 2, "tokens": (1, 8), "checkpointing": True},
    "llama-3.1-8b": {"train": "qlora", "checkpointing": True},
}


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("model", MODES)
def test_steps_of_language_models(monkeypatch, model: str, ours: bool) -> None:
    if model in decoder_models.MODELS:
        kind, fields, _ = decoder_models.MODELS[model]
        small = {"vocab_size": 2000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
        small |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        if kind == "Bert":
            small = {name: small[name] for name in small if name not in ("head_dim", "num_key_value_heads")}
        monkeypatch.setitem(decoder_models.MODELS, model, (kind, fields | small, (2, 24)))
    for name, size in (("TOKENS", 16), ("FEATURES", 32), ("VOCABULARY", 999)):
        monkeypatch.setattr(decoders, name, size)
    make = decoders.head_step if model in decoders.HEADS else decoders.model_step
    usual = {"train": "full", "load": "fp32", "accumulate": 1, "tokens": None, "checkpointing": False}
    settings = usual | {"model": model, "lengths": "chat", "dtype": "fp32"} | MODES[model]
    step, products = make(settings, ours)
    assert step(0) == step(1) > 0
    assert products is None or not ours or 0 < products(8) < 1
    if products and ours:  # attention, feed-forward, head: each layer counts
        monkeypatch.setattr(decoders, "layer_seconds", lambda *_: 1.0)
        assert products(8) == 8


def test_options_of_language_models_name_their_report(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["decoders.py", "--model", "qwen3-0.6b", "--train", "lora", "--tokens", "1x128"])
    arguments = decoders.parse_arguments()
    assert arguments.tokens == (1, 128) and decoders.described_tokens(arguments, "qwen3-0.6b") == "1×128 full"
    assert decoders.name_of_report(arguments) == ["decoders", "full", "lora", "qwen3-0.6b"]
    answers = [[{"seconds": 4.0, "cpu": 8.0}, {"seconds": 2.0, "cpu": 5.0}]] * 2
    found = decoders.row(arguments, "qwen3-0.6b", answers, [1000.0, 500.0], 128.0, 1.5)
    assert (found["times faster"], found["memory"], found["real tokens/s"], found["of products"]) == (
        *("**2.00**", "0.50", "64", "0.75"),
    )  # fmt: skip


def test_curves_of_language_models_are_held_against_their_own_reference() -> None:
    near, far = [[2.0, 2.0, 1.0], [2.2, 2.2, 1.2]], [[3.0, 3.0, 3.0]] * 2
    references = {"stock": "stock", "ours": "stock", "NF4 stock": "NF4 stock", "NF4 ours": "NF4 stock"}
    shifted = [[value + 0.15 for value in curve] for curve in far]
    curves = {"stock": near, "ours": near[::-1], "NF4 stock": far, "NF4 ours": shifted}
    rows = language_model_curves.compare(curves, 2, references)
    assert [row["within"] for row in rows] == ["**no**", "**no**"]  # the seeds of NF4 stock don't differ at all
    assert rows[0]["NF4 ours apart"] == "0.1500" and rows[0]["ours apart"] == "0.0000"
    wide = [[value + 0.2 * seed for value in curve] for seed, curve in enumerate(far)]
    rows = language_model_curves.compare(curves | {"NF4 stock": wide}, 2, references)
    assert [(row["up to step"], row["within"]) for row in rows] == [("2", "yes"), ("held-back text", "yes")]
