"""What is read from transformers' mask functions, against the functions themselves, asked for every pair of tokens."""

from __future__ import annotations

import pytest
import torch

from tests.parity import releases

if not releases.HAS_MASK_REGISTRY:
    pytest.skip("this transformers has no mask functions", allow_module_level=True)

from transformers import masking_utils

from cputrain.blocks import attention_registry, masks
from cputrain.ops.attention import plain

NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 0, 1]])
BATCH, LENGTH = NUMBERS.shape


def given(name):
    return getattr(masking_utils, name, None) or pytest.skip(f"this transformers has no {name}")


def made(name, *arguments):
    return given(name)(*arguments)


def causal():
    return masking_utils.causal_mask_function


FUNCTIONS = {
    "causal": causal,
    "all": lambda: given("bidirectional_mask_function"),
    "window": lambda: made("sliding_window_causal_mask_function", 3),
    "window of one": lambda: made("sliding_window_causal_mask_function", 1),
    "long window": lambda: made("sliding_window_causal_mask_function", 50),
    "both sides": lambda: made("sliding_window_bidirectional_mask_function", 2),
    "packed": lambda: made("and_masks", causal(), made("packed_sequence_mask_function", NUMBERS)),
    "packed, of their positions": lambda: made("packed_sequence_compatibility_function", causal(), POSITIONS, NUMBERS),
    "packed windows": lambda: made(
        "packed_sequence_compatibility_function", made("sliding_window_causal_mask_function", 2), POSITIONS, NUMBERS
    ),
}
UNKNOWN = {
    "chunks": lambda: made("chunked_causal_mask_function", 3, torch.zeros(BATCH, dtype=torch.long)),
    "or": lambda: made("or_masks", causal(), made("packed_sequence_mask_function", NUMBERS)),
    "a window behind each token": lambda: made(
        "and_masks", made("sliding_window_overlay", 3), made("sliding_window_bidirectional_overlay", 4)
    ),
    "numbers that come again": lambda: made(
        "and_masks", causal(), made("packed_sequence_mask_function", torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2, 2]]))
    ),
    "positions that jump": lambda: made("packed_sequence_compatibility_function", causal(), POSITIONS.flip(1), NUMBERS),
    "a user's": lambda: lambda batch, head, query, key: key <= query + 1,
    "a window that is no number": lambda: made("and_masks", made("sliding_window_overlay", torch.tensor(3)), causal()),
}


def shown(function):
    """(batch, queries, keys): what stock's function says."""
    index = torch.arange(LENGTH)
    pairs = ((b, q, k) for b in range(BATCH) for q in index for k in index)
    return torch.stack([torch.as_tensor(function(b, 0, q, k)) for b, q, k in pairs]).view(BATCH, LENGTH, LENGTH)


def mask_of(function):
    factory = masks.make_ragged_mask("sdpa")
    options = {"batch_size": BATCH, "kv_length": LENGTH, "mask_function": function, "kv_offset": 0, "use_vmap": False}
    lengths = {"q_length": LENGTH, "q_offset": 0} if releases.RELEASE >= (5, 0) else {
        "cache_position": torch.arange(LENGTH)
    }  # fmt: skip
    return factory(**options, **lengths, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_token_attends_to(name):
    """Probabilities of our attention's twin, by values that are rows of the identity."""
    function = FUNCTIONS[name]()
    scope = attention_registry.scope_of(mask_of(function), torch.nn.Module(), BATCH, LENGTH, None, "sdpa")
    assert scope is not None
    zeros, values = torch.zeros(BATCH * LENGTH, 1, LENGTH), torch.eye(LENGTH).repeat(BATCH, 1)[:, None]
    seen = plain(zeros, zeros, values, scope.sequences, scale=1.0, causal=scope.causal, window=scope.window)
    assert torch.equal(seen.view(BATCH, LENGTH, LENGTH) > 0, shown(function))


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_masks_are_stocks(name):
    assert not isinstance(mask_of(UNKNOWN[name]()), masks.PaddingMask)
