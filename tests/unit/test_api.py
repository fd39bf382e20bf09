"""What users get wrong is one clear sentence, and leaves their model as it was."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import cputrain
from cputrain import native


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.1))


def snapshot(model: nn.Module) -> list:
    return [(name, dict(part.__dict__)) for name, part in model.named_modules()]


def assert_one_sentence(message: str) -> None:
    assert "\n" not in message and message.endswith(".") and len(re.findall(r"[.!?](\s|$)", message)) == 1, message


def rejected(model, *args, **kwargs) -> str:
    before = snapshot(model) if isinstance(model, nn.Module) else None
    with pytest.raises(ValueError) as caught:
        cputrain.optimize(model, *args, **kwargs)
    assert_one_sentence(str(caught.value))
    if before is not None:
        assert snapshot(model) == before
    return str(caught.value)


def test_an_optimizer_of_other_parameters():
    message = rejected(small(), torch.optim.AdamW(small().parameters()))
    assert "none of the optimizer's 4 parameters" in message and "Sequential" in message


def test_what_is_no_optimizer():
    assert "found float" in rejected(small(), 1e-3)


@pytest.mark.parametrize("dtype", ["fp8", "float32", torch.complex64, torch.float64, 32, None])
def test_a_dtype_that_does_not_exist(dtype):
    message = rejected(small(), dtype=dtype)
    assert "fp32" in message and (str(dtype) in message or repr(dtype) in message)


def test_a_padding_that_does_not_exist():
    assert "found 'x'" in rejected(small(), padding="x")


def test_a_model_on_another_device():
    message = rejected(small().to("meta"))
    assert "meta" in message and "0.weight" in message and "to('cpu')" in message


def test_a_buffer_on_another_device():
    model = small()
    model.register_buffer("table", torch.empty(3, device="meta"))
    assert "table" in rejected(model)


def test_what_is_no_module():
    assert "found str" in rejected("bert-base-uncased")


@pytest.mark.parametrize("function", [cputrain.explain, cputrain.restore])
def test_explain_and_restore_want_a_module(function):
    with pytest.raises(ValueError, match="found str") as caught:
        function("bert-base-uncased")
    assert_one_sentence(str(caught.value))


def test_a_library_that_does_not_load(monkeypatch):
    def fail():
        raise native.LibraryError("cputrain's native library /x could not be loaded: it is broken; reinstall cputrain.")

    monkeypatch.setattr(native, "kernels", fail)
    assert "reinstall" in rejected(small())


def test_bad_input_leaves_an_optimised_model_optimised():
    model = cputrain.optimize(small())
    rejected(model, dtype="fp8")
    assert "GELU" not in str(cputrain.explain(model)) and "linear + activation" in str(cputrain.explain(model))


def test_a_failure_inside_leaves_the_model_as_it_was(monkeypatch):
    model = small()
    before = snapshot(model)

    def fail(*_):
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr("cputrain.blocks.leaves.take_over", fail)
    with pytest.raises(RuntimeError, match="a bug of ours"):
        cputrain.optimize(model)
    assert snapshot(model) == before


def test_returns_what_it_was_given():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert cputrain.optimize(model) is model
    assert cputrain.optimize(model, optimizer) == (model, optimizer)


def test_explain_names_the_optimizer_and_restore_gives_it_back():
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    step = type(optimizer)._init_group
    cputrain.optimize(model, optimizer)
    assert "AdamW" in str(cputrain.explain(model))
    cputrain.restore(model)
    assert optimizer._init_group.__func__ is step
    assert "AdamW" not in str(cputrain.explain(model))


@pytest.mark.parametrize(("make", "said"), [
    (small, "none: this model takes no mask"),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), "stays inside the model"),
    (lambda: nn.Sequential(torch.jit.script(small())), "none: this model takes no mask"),
])  # fmt: skip
def test_explain_says_what_becomes_of_padding(make, said):
    (padding,) = [why for what, _, why in cputrain.explain(cputrain.optimize(make())).facts if what == "padding"]
    assert padding.startswith(said)


def test_another_optimizer_replaces_the_first():
    model = small()
    first, second = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    cputrain.optimize(model, first)
    cputrain.optimize(model, second)
    assert "_init_group" not in first.__dict__ and "_init_group" in second.__dict__


def test_an_optimizer_of_two_models_is_given_back_with_the_last():
    one, other = small(), small()
    optimizer = torch.optim.AdamW([*one.parameters(), *other.parameters()])
    for model in (one, other):
        cputrain.optimize(model, optimizer)
    cputrain.restore(one)
    assert "_init_group" in optimizer.__dict__
    cputrain.restore(other)
    assert "_init_group" not in optimizer.__dict__


def test_an_optimizer_of_two_models_stays_when_one_of_them_gets_another():
    one, other = small(), small()
    shared = torch.optim.AdamW([*one.parameters(), *other.parameters()])
    for model in (one, other):
        cputrain.optimize(model, shared)
    cputrain.optimize(one, torch.optim.AdamW(one.parameters()))
    assert "_init_group" in shared.__dict__


def test_explain_only_looks_at_the_optimizer():
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    cputrain.optimize(model, optimizer)
    optimizer.param_groups[0]["amsgrad"] = False
    assert "call cputrain.optimize again" in str(cputrain.explain(model))
    assert "_init_group" not in optimizer.__dict__


@pytest.mark.parametrize("make", [lambda compiled: compiled, nn.Sequential])
@pytest.mark.parametrize("dtype", ["fp32", "int16"])
def test_what_torch_jit_has_compiled_runs_as_it_did(make, dtype):
    model = make(torch.jit.script(small().eval()))
    x = torch.randn(4, 8)
    expected = model(x)
    cputrain.optimize(model, dtype=dtype)
    assert torch.equal(model(x), expected)
    assert "torch.jit has compiled it" in str(cputrain.explain(model))
    assert torch.equal(cputrain.restore(model)(x), expected)


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_importing_cputrain_imports_neither_torch_nor_transformers():
    program = "import sys, cputrain; print([n for n in ('torch', 'transformers', 'accelerate') if n in sys.modules])"
    assert run(program) == "[]"


def test_a_torch_model_needs_no_transformers():
    program = """
import sys, torch, cputrain
layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
model = cputrain.optimize(torch.nn.TransformerEncoder(layer, 1))
model(torch.randn(2, 3, 16)).sum().backward()
cputrain.explain(model)
print("transformers" in sys.modules)
"""
    assert run(program) == "False"
