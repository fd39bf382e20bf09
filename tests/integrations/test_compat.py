"""Scripts that import IPEX or the oneCCL bindings get ours: under `cputrain run` or after `import cputrain.compat`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cputrain import api
from cputrain.integrations import ipex, oneccl
from cputrain.integrations.notices import Refused
from tests.integrations.tiny import bert, windows

BATCH = {name: torch.stack([window[name] for window in windows(4)]) for name in windows(1)[0]}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


RESOLVES = """
for name in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch", "torch_ccl"):
    try:
        __import__(name)
        print(name, "yes")
    except ModuleNotFoundError:
        print(name, "no")
"""


@pytest.mark.parametrize(("before", "options", "resolve"), [
    ("", [], "no"), ("import cputrain", [], "no"), ("import cputrain.compat", [], "yes"),
    ("", ["-m", "cputrain", "run"], "yes"),
])  # fmt: skip
def test_the_names_resolve_only_when_asked(before: str, options: list[str], resolve: str) -> None:
    answer = python(*options, "-c", f"{before}\n{RESOLVES}")
    assert answer.stdout.split()[1::2] == [resolve] * 3, answer.stderr


@pytest.mark.parametrize("name", ["oneccl_bindings_for_pytorch", "torch_ccl"])
def test_the_bindings_bring_their_backend(name: str) -> None:
    """As scripts on torch-ccl use it: the import is all that they do for it."""
    code = (
        f"import torch.distributed as dist, {name}\n"
        "dist.init_process_group('ccl', init_method='tcp://127.0.0.1:0', rank=0, world_size=1)\n"
        "assert dist.get_backend() == 'ccl'\n"
    )
    answer = python("-m", "cputrain", "run", "-c", code)
    assert answer.returncode == 0, answer.stderr


def test_a_real_package_wins(tmp_path: Path) -> None:
    (tmp_path / "torch_ccl.py").write_text("real = True\n")
    (tmp_path / "script.py").write_text("import torch_ccl\nassert torch_ccl.real\n")
    assert python("-m", "cputrain", "run", str(tmp_path / "script.py")).returncode == 0


def test_optimize_copies_unless_told_otherwise() -> None:
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    copied, copied_optimizer = ipex.optimize(model, optimizer=optimizer)
    assert copied is not model and copied_optimizer is not optimizer
    assert api.is_optimized(copied) and not api.is_optimized(model)
    before = model.qa_outputs.weight.clone()
    copied(**BATCH).loss.backward()
    copied_optimizer.step()
    assert torch.equal(model.qa_outputs.weight, before) and not torch.equal(copied.qa_outputs.weight, before)


def test_optimize_in_place_returns_what_it_was_given() -> None:
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters())
    assert ipex.optimize(model, optimizer=optimizer, inplace=True) == (model, optimizer)
    assert ipex.optimize(bert(), dtype=torch.float32).qa_outputs.weight.dtype == torch.float32


def test_bf16_and_unknown_keywords_are_accepted_and_named_once(caplog) -> None:
    for _ in range(2):
        ipex.optimize(bert(), dtype=torch.bfloat16, weights_prepack=False, auto_kernel_selection=True)
    assert sum("auto_kernel_selection, weights_prepack has no effect" in line for line in caplog.messages) == 1
    assert sum("the script asks for bf16" in line for line in caplog.messages) == 1


def test_level_O0_changes_nothing() -> None:
    assert not api.is_optimized(ipex.optimize(bert(), level="O0", inplace=True))


def test_ipex_off_in_the_configuration_is_stock_and_said_once(monkeypatch, caplog) -> None:
    monkeypatch.setenv("CPUTRAIN_IPEX", "false")
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        assert ipex.optimize(model, optimizer=optimizer, inplace=True) == (model, optimizer)
    assert not api.is_optimized(model)
    assert sum("stays out: IPEX is off" in line for line in caplog.messages) == 1


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(Refused, match=r"found dtype=torch\.float16"):
        ipex.optimize(bert(), dtype=torch.float16)


@pytest.mark.parametrize(
    "code",
    [
        "from oneccl_bindings_for_pytorch import cwd; print(cwd)",
        "import torch; import torch_ccl; import os;  print(os.path.abspath(os.path.dirname(torch_ccl.__file__)))",
    ],
)
def test_the_guides_source_lines_work(code: str) -> None:
    folder = python("-m", "cputrain", "run", "-c", code).stdout.strip()
    assert folder == oneccl.cwd
    script = f'source "{folder}/env/setvars.sh" && echo "$I_MPI_ROOT" && echo "$PATH" && echo "$LD_LIBRARY_PATH"'
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "LD_LIBRARY_PATH": "/x"}
    answer = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=True)
    root, path, libraries = answer.stdout.splitlines()
    assert root == sys.prefix
    assert path.startswith(f"{root}/bin:")
    assert libraries.split(":")[0] == f"{root}/lib" and libraries.endswith(":/x")
