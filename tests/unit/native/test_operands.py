"""No tensor reaches a kernel unless it has the type, the size and the layout that the kernel expects."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cputrain.formats import int16_matmul as matmul
from cputrain.native.operands import address, rows_of
from cputrain.ops.activation import activation_backward, bias_activation
from cputrain.ops.attention import Sequences, Settings, attention, attention_backward, attention_forward
from cputrain.ops.embeddings import embed, embedding_grad
from cputrain.ops.norm import layer_norm, norm_backward
from tests.unit.ops.wrong_operands import OPERATORS, trouble

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "cputrain"

# The only places that ask where a tensor's memory is; the last two compare it with another's.
TAKE_ADDRESSES = {
    "native/__init__.py": 1,
    "native/operands.py": 1,
    "optimizers/tensors.py": 1,
    "optimizers/fused_step.py": 1,
    "optimizers/clipping.py": 1,
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operand_that_does_not_fit_is_refused(operator: str) -> None:
    assert trouble(operator) == []


def test_the_same_where_assertions_are_off() -> None:
    command = [sys.executable, "-O", "-m", "tests.unit.ops.wrong_operands"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


def test_nobody_else_takes_an_address() -> None:
    found = {}
    for file in [file for part in ("native", "formats", "ops", "optimizers") for file in PACKAGE.glob(f"{part}/*.py")]:
        text = file.read_text()
        assert not re.search(r"kernels\(\)\.\w+\([^)]*data_ptr", text), file
        if count := len(re.findall(r"\bdata_ptr\(", text)):
            found[str(file.relative_to(PACKAGE))] = count
    assert found == {name: count or found[name] for name, count in TAKE_ADDRESSES.items()}


def freed(x: Tensor) -> Tensor:
    """As parameters are between their uses when they are sharded."""
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(6, dtype=torch.float64),
        torch.zeros(5),
        torch.zeros(7),
        torch.zeros(3, 4)[:, :2],
        torch.zeros(1).expand(6),
        torch.zeros(6, device="meta"),
        freed(torch.zeros(6)),
    ],
    ids=["float64", "short", "long", "gaps", "expanded", "meta", "freed"],
)
def test_an_address_is_given_only_for_what_is_expected(tensor: Tensor) -> None:
    with pytest.raises(ValueError, match="the bias"):
        address("the bias", tensor, 6)


def test_an_address_of_what_is_expected() -> None:
    x = torch.zeros(2, 3)
    assert address("x", x, 6) == x.data_ptr()
    assert address("x", None, 6) is None
    assert rows_of("x", x[:, :2], (2, 2)) == (x.data_ptr(), 3)
    for wrong in (x.t(), x.double(), x[:1], freed(torch.zeros(2, 3))):
        with pytest.raises(ValueError, match="x "):
            rows_of("x", wrong, (2, 3))


# ---- what comes back in a backward ---------------------------------------------------------------------------------


def wrong_gradients(shape: tuple[int, ...]) -> list[Tensor]:
    rows, *others = shape
    return [torch.zeros(shape).double(), torch.zeros(rows - 1, *others), torch.zeros(rows + 1, *others)]


def test_gradients_that_do_not_fit_are_refused() -> None:
    x, mean = torch.randn(4, 6), torch.zeros(4)
    q = torch.randn(4, 2, 8)
    settings = Settings(Sequences.from_lengths([4]), 1.0)
    out, lse = attention_forward(q, q, q, settings)
    into = tuple(torch.empty_like(q) for _ in range(3))
    for grad in wrong_gradients((4, 6)):
        with pytest.raises(ValueError, match="gradient"):
            activation_backward(grad, x, None, "gelu")
        with pytest.raises(ValueError, match="gradient"):
            norm_backward(grad, x, mean, mean, None)
        with pytest.raises(ValueError, match="gradient of the sum"):
            norm_backward(x, x, mean, mean, None, grad_sum=grad)
    for grad in wrong_gradients((4, 2, 8)):
        with pytest.raises(ValueError, match="gradient"):
            attention_backward(grad, q, q, q, out, lse, settings, into)
        with pytest.raises(ValueError, match="gradient of k"):
            attention_backward(q, q, q, q, out, lse, settings, (into[0], grad, into[2]))


def test_a_gradient_may_lie_anyhow() -> None:
    x = torch.randn(6, 4).t().requires_grad_()
    weight = torch.randn(6, requires_grad=True)
    for grad in (torch.randn(6, 4).t(), torch.randn(4, 1).expand(4, 6), torch.randn(4, 12)[:, ::2]):
        for operator in (lambda: bias_activation(x, weight, "silu"), lambda: layer_norm(x, weight, None, 1e-5)):
            found = torch.autograd.grad(operator(), (x, weight), grad)
            expected = torch.autograd.grad(operator(), (x, weight), grad.contiguous())
            assert all(map(torch.equal, found, expected))


def test_what_was_kept_is_checked_when_it_comes_back() -> None:
    """Whoever keeps tensors in our place (offloading, compression) may give others back."""
    x = torch.randn(8, 16, requires_grad=True)
    for unpack in (lambda kept: kept[:-1].contiguous(), lambda kept: kept.double()):
        with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, unpack):
            out = bias_activation(x, None, "gelu")
        with pytest.raises(ValueError, match="activation"):
            out.sum().backward()


def test_packed_memory_of_another_size_is_refused() -> None:
    left, _ = matmul.pack(torch.randn(5, 7), rows="left")
    right = matmul.by_rows(torch.randn(3, 7), "right")
    for wrong in (
        matmul.Operand(left.memory, 50, 7, "left"),
        matmul.Operand(left.memory.double(), 5, 7, "left"),
        matmul.Operand(left.memory, 5, 7, "left", source=torch.randn(4, 7)),
    ):
        with pytest.raises(ValueError, match="int16 operand"):
            matmul.product(wrong, right)


# ---- ids -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.uint8, torch.int16])
def test_ids_that_are_no_numbers_of_rows_are_refused_in_stocks_words(dtype: torch.dtype) -> None:
    table, ids = torch.randn(5, 4), torch.ones(3, dtype=dtype)
    with pytest.raises(RuntimeError) as stock:
        torch.nn.functional.embedding(ids, table)
    with pytest.raises(RuntimeError) as ours:
        embed(ids, None, None, table, None, None, table[0], table[1], 1e-5, 0.0)
    told = [str(error.value).split("; but got ")[0] for error in (ours, stock)]  # the type has two names
    assert told[0] == told[1]
    with pytest.raises(RuntimeError):
        embedding_grad(torch.randn(3, 4), ids, 5, None)


def test_ids_that_have_changed_since_the_forward_are_refused() -> None:
    """Memory that a loader shares with numpy changes without autograd's knowledge."""
    import numpy

    shared = numpy.zeros(3, dtype=numpy.int64)
    table = torch.randn(5, 4, requires_grad=True)
    out = embed(torch.from_numpy(shared), None, None, table, None, None, torch.ones(4), torch.zeros(4), 1e-5, 0.0)
    shared[1] = 10**6
    with pytest.raises(IndexError, match="has 1000000 at 1, but its table has 5 rows"):
        out.sum().backward()
    with pytest.raises(IndexError, match="has -1 at 0"):
        embedding_grad(torch.randn(1, 4), torch.tensor([-1]), 5, None)


# ---- when memory ends ----------------------------------------------------------------------------------------------

ATTENTION = """
q = torch.empty(100_000, 1, 128)
limit(64 << 20)
attention(q, q, q, Sequences.from_lengths([len(q)]), scale=1.0)
"""
PRODUCT = """
x, w = torch.zeros(1024).expand(40_000, 1024), torch.zeros(1024, 1024)
limit(64 << 20)
matmul.linear_forward(x, w)
"""
PRELUDE = """
import resource, torch
from cputrain.formats import int16_matmul as matmul
from cputrain.ops.attention import Sequences, attention
torch.set_num_threads(2)
torch.ones(512, 512) @ torch.ones(512, 512)
attention(torch.ones(64, 8, 64), torch.ones(64, 8, 64), torch.ones(64, 8, 64), Sequences.from_lengths([64]), scale=1.0)
matmul.linear_forward(torch.ones(64, 64), torch.ones(64, 64))
def limit(more):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))
def run():
    {code}
try:
    run()
except (RuntimeError, MemoryError) as error:
    print("refused:", "memory" in str(error))
"""


@pytest.mark.parametrize("code", [ATTENTION, PRODUCT], ids=["attention", "int16 product"])
def test_without_memory_there_is_an_exception(code: str) -> None:
    program = PRELUDE.format(code=code.strip().replace("\n", "\n    "))
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (answer.returncode, answer.stdout) == (0, "refused: True\n"), answer.stderr


def test_working_memory_that_is_large_is_given_back() -> None:
    from cputrain import native

    native.release_working_memory()  # which tests with more threads may have left
    x = torch.randn(4000, 1, 64)
    attention(x[:64], x[:64], x[:64], Sequences.from_lengths([64]), scale=1.0)
    kept = native._working_memory.scratch.bytes
    assert kept > 0
    attention(x, x, x, Sequences.from_lengths([len(x)]), scale=1.0)
    assert native._working_memory.scratch.bytes <= native.MOST_KEPT_PER_THREAD * torch.get_num_threads()
    native.release_working_memory()
    assert native._working_memory.scratch.bytes == 0
