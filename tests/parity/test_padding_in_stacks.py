"""Padding dropped in stacks that make their own mask: GPT-2, OPT, Mistral and their kin, ModernBERT, T5's encoder."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import transformers as hf

import cputrain
from cputrain.blocks.stack import RaggedStates
from cputrain.padding import PaddingMask
from cputrain.patching.bind import parameter_names
from tests.model_zoo import TINY, tiny
from tests.parity import releases
from tests.parity.gradients import assert_as_exact_as_stock, exact_and_stock, gradients
from tests.parity.small import (
    EMPTY_ROW,
    HOLES,
    LEFT,
    RIGHT,
    assert_close,
    gradients_of,
    ids,
    pair,
    what_runs,
)
from tests.parity.test_other_models import make

CAUSAL = ["gpt2", "opt", "mistral"]
STACKS = {"gpt2": "transformer", "opt": "model.decoder", "mistral": "model", "modernbert": "model"}
MASKS = {
    "right": RIGHT,
    "left": LEFT,
    "holes": HOLES,
    "empty row": EMPTY_ROW,
    "one row": RIGHT[1:2],
    "one column": torch.tensor([[1], [0], [1]]),
}


@pytest.fixture(autouse=True)
def no_size_limit(monkeypatch):
    monkeypatch.setattr("cputrain.blocks.leaves.WORTHWHILE", 0)


def base(name, **options):
    """The model of the zoo without its head."""
    return tiny(name, **options)[0].base_model.train()


def weights(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def loss_of_batch(mask):
    def loss(model):
        out = model(ids(mask), attention_mask=mask).last_hidden_state
        return (out * weights(out.shape) * mask[..., None]).sum()

    return loss


def loss_alone(name, mask, dtype=torch.float32):
    """The same, each sequence by itself, with the positions that stock gives it in the padded batch."""

    def loss(model):
        factors, total = weights((*mask.shape, TINY.hidden)).to(dtype), 0.0
        for row, real in enumerate(mask.bool()):
            if real.any():
                positions = torch.arange(int(real.sum())) if name == "opt" else torch.arange(mask.shape[1])[real]
                out = model(ids(mask)[row][real][None], position_ids=positions[None]).last_hidden_state[0]
                total = total + (out * factors[row][real]).sum()
        return total

    return loss


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", CAUSAL)
def test_gradients_are_those_of_each_sequence_alone(name, mask):
    model, mask = base(name), MASKS[mask]
    exact, stock = exact_and_stock(model, loss_alone(name, mask), loss_alone(name, mask, torch.float64))
    ours = cputrain.optimize(copy.deepcopy(model))
    assert_as_exact_as_stock(gradients(ours, loss_of_batch(mask)), stock, exact)
    releases.assert_padding_dropped(ours, "(the model)" if name != "opt" else "decoder", name)


@pytest.mark.parametrize("name", STACKS)
def test_results_are_stocks_at_real_tokens_and_0_at_padding(name):
    """Stock's real tokens don't see padding either, so that its padded batch is an oracle for every mask."""
    stock, ours = pair(tiny(name)[0])
    for mask in (RIGHT, LEFT, HOLES, EMPTY_ROW):
        given = {"input_ids": ids(mask), "attention_mask": mask}
        expected, found = stock(**given).logits, ours(**given).logits
        torch.testing.assert_close(found[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-4)
        releases.assert_at_padding(name, found, expected, mask)
        hidden, expected = (m.base_model(**given).last_hidden_state for m in (ours, stock))
        releases.assert_at_padding(name, hidden, expected, mask)
    releases.assert_padding_dropped(ours, STACKS[name], name)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi", "gpt_neox", "mixtral", "gemma2", "gpt_oss"])
def test_other_stacks_drop_their_padding(name):
    stock, ours = pair(make(name))
    expected, found = (m(ids(HOLES), attention_mask=HOLES).last_hidden_state for m in (stock, ours))
    torch.testing.assert_close(found[HOLES == 1], expected[HOLES == 1], rtol=1e-3, atol=1e-4)
    if name in releases.EXPERTS_ONE_BY_ONE:
        assert "padding stays" in str(cputrain.explain(ours))
        return
    releases.assert_at_padding(name, found, expected, HOLES)
    releases.assert_padding_dropped(ours, "(the model)", name)
    assert "its attention, on padded rows" not in str(cputrain.explain(ours))


def test_a_batch_of_nothing_but_padding():
    stock, ours = pair(base("gpt2"))
    nothing = torch.zeros_like(RIGHT)
    hidden, expected = (m(ids(RIGHT), attention_mask=nothing).last_hidden_state for m in (ours, stock))
    hidden.sum().backward()
    releases.assert_at_padding("gpt2", hidden, expected, nothing)
    if releases.drops_padding("gpt2"):
        assert all(p.grad is None or (p.grad == 0).all() for p in ours.parameters())


@pytest.mark.parametrize("mask", [name for name in MASKS if name != "one column"])
def test_biases_by_distance_are_those_of_the_padded_batch(mask):
    """T5's encoder: with padding behind the tokens our attention adds the bias, otherwise stock's does."""
    mask, encoder = MASKS[mask], tiny("t5")[0].encoder
    loss = loss_of_batch(mask)
    ours = cputrain.optimize(copy.deepcopy(encoder))
    if releases.drops_padding("t5"):
        exact, stock = exact_and_stock(encoder, loss, lambda m: loss_in_float64(m, mask))
        assert_as_exact_as_stock(gradients(ours, loss), stock, exact)
    else:  # stock's float64 is NaN where a row is nothing but padding
        assert_close(gradients_of(ours, loss), gradients_of(encoder, loss))
    releases.assert_padding_dropped(ours, "(the model)", "t5")
    before_tokens = bool((mask[:, :-1] < mask[:, 1:]).any())
    noted = "padding stands before tokens" in str(cputrain.explain(ours))
    assert noted == (before_tokens and releases.drops_padding("t5"))


def test_a_bias_and_sequences_of_one():
    """Queries and keys have no gradient then but rounding errors, which the yardstick above would compare."""
    mask = MASKS["one column"]
    stock, ours = pair(tiny("t5")[0].encoder)
    assert_close(gradients_of(ours, loss_of_batch(mask)), gradients_of(stock, loss_of_batch(mask)))


def loss_in_float64(model, mask):
    out = model(ids(mask), attention_mask=mask).last_hidden_state
    return (out * weights(out.shape).double() * mask[..., None]).sum()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_t5_with_dropout_and_checkpoints(reentrant):
    """The bias goes from layer to layer, past the layers' real tokens."""
    torch.manual_seed(0)
    model, batch = tiny("t5", padding="right", dropout=0.1)
    cputrain.optimize(model, dtype="fp32")
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()  # without which a reentrant checkpoint has no gradients
    torch.manual_seed(3)
    found = gradients_of(model, lambda m: m(**batch).loss)
    plain = cputrain.optimize(tiny("t5", padding="right", dropout=0.1)[0], dtype="fp32")
    torch.manual_seed(3)
    expected = gradients_of(plain, lambda m: m(**batch).loss)
    assert_close(found, expected)  # MKL's last digits depend on where in memory a matrix lies, on some CPUs


# ---- windows -------------------------------------------------------------------------------------------------------


def windowed(window):
    model = tiny("mistral")[0]
    config = copy.deepcopy(model.config)
    config.sliding_window = window
    other = hf.MistralModel(config)
    other.load_state_dict(model.model.state_dict())
    return other.train()


@pytest.mark.parametrize(("window", "plain"), [(3, False), (7, True), (100, True)])
def test_a_window_as_long_as_the_sequence_is_none(window, plain):
    stock, ours = pair(windowed(window))
    for mask in (LEFT, HOLES):
        assert_close(gradients_of(ours, loss_of_batch(mask)), gradients_of(stock, loss_of_batch(mask)))
    releases.assert_padding_dropped(ours, "(the model)", "mistral")
    if not releases.drops_padding("mistral"):
        plain = True  # its layers get stock's mask
    elif not releases.ASKS_MASKS_AT_ONCE:
        return  # these masks are put together in other ways
    assert ("rows have holes" not in str(cputrain.explain(ours))) == plain


# ---- caches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CAUSAL)
def test_an_empty_cache_is_filled_as_stock_fills_it(name):
    """Models make one by default, in training too; whoever goes on with it finds stock's."""
    stock, ours = pair(tiny(name)[0].eval())
    given, more = {"input_ids": ids(LEFT), "attention_mask": LEFT}, torch.ones(3, 1, dtype=torch.long)
    caches = [m(**given, use_cache=True).past_key_values for m in (stock, ours)]
    for expected, found in zip(*map(releases.keys_and_values, caches), strict=True):
        real = (LEFT == 1)[:, None, :, None].expand(expected[0].shape)
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(b[real], a[real], rtol=1e-4, atol=1e-5)
    then = {"input_ids": more + 5, "attention_mask": torch.cat([LEFT, more], 1)}
    expected, found = (m(**then, past_key_values=c).logits for m, c in zip((stock, ours), caches, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", CAUSAL)
def test_generate_on_left_padded_input(name, use_cache):
    model, batch = tiny(name, padding="left")
    stock, ours = pair(model.eval())
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    for settings in ({"do_sample": False}, {"num_beams": 2, "do_sample": False}):
        settings |= {"max_new_tokens": 6, "min_new_tokens": 6, "use_cache": use_cache}
        assert torch.equal(ours.generate(**given, **settings), stock.generate(**given, **settings))


def test_a_static_cache():
    model, batch = tiny("mistral", padding="left")
    stock, ours = pair(model.eval())
    given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    settings = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    settings |= {"disable_compile": True} if releases.HAS_DISABLE_COMPILE else {}
    assert torch.equal(ours.generate(**given, **settings), stock.generate(**given, **settings))


# ---- together with -------------------------------------------------------------------------------------------------


def labelled_loss(mask=RIGHT):
    labels = ids(mask).masked_fill(mask == 0, -100)
    return lambda model: model(ids(mask), attention_mask=mask, labels=labels).loss


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CAUSAL)
def test_checkpointed_gradients_equal_plain_ones_bit_for_bit(name, reentrant):
    def found(checkpointing):
        model = cputrain.optimize(tiny(name, dropout=0.1)[0])
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(3)
        return gradients_of(model, labelled_loss()), model

    (plain, _), (checkpointed, model) = found(False), found(True)
    assert all(torch.equal(checkpointed[key], plain[key]) for key in plain)
    releases.assert_padding_dropped(model, STACKS[name], name)


@pytest.mark.parametrize("name", CAUSAL)
def test_output_hidden_states_and_attentions_are_stocks(name):
    stock, ours = pair(releases.in_eager(tiny(name)[0]))
    for asked in ("hidden_states", "attentions"):
        expected, found = (m(ids(LEFT), attention_mask=LEFT, **{f"output_{asked}": True})[asked] for m in (stock, ours))
        assert len(expected) == len(found) > 0
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert (f"output_{asked}" in what_runs(ours, STACKS[name])) == releases.drops_padding(name)
    ours(ids(LEFT), attention_mask=LEFT)
    releases.assert_padding_dropped(ours, STACKS[name], name)


@pytest.mark.parametrize("name", STACKS)
def test_inputs_embeds(name):
    stock, ours = pair(base(name))
    x = torch.randn(3, 7, TINY.hidden)
    expected, found = (m(inputs_embeds=x, attention_mask=HOLES).last_hidden_state for m in (stock, ours))
    torch.testing.assert_close(found[HOLES == 1], expected[HOLES == 1], rtol=1e-4, atol=1e-4)
    releases.assert_at_padding(name, found, expected, HOLES)


@pytest.mark.parametrize("name", CAUSAL)
def test_masks_of_four_dimensions_and_packed_sequences_are_stocks(name):
    stock, ours = pair(base(name))
    allowed = torch.ones(3, 1, 7, 7).tril().bool() & HOLES.bool()[:, None, None, :]
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2]]).expand(3, -1)
    four = {"position_ids": torch.arange(7)[None]} if name == "opt" else {}  # which counts along a mask of two
    masked = [{"attention_mask": allowed, **four}] if releases.takes_mask_of_four_dimensions(name) else []
    for given in (*masked, {"position_ids": packed}):
        expected, found = (m(ids(torch.ones(3, 7)).long(), **given).last_hidden_state for m in (stock, ours))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if releases.drops_padding(name):
        ours(ids(HOLES), attention_mask=allowed, **four)
        assert "not a plain one" in what_runs(ours, "(the model)" if name != "opt" else "decoder")


@pytest.mark.parametrize("place", ["h.1", "h.0.mlp.c_fc", "h.1.attn.c_proj", "ln_f", "wte", ""])
@pytest.mark.parametrize("before", [True, False], ids=["pre-hook", "hook"])
def test_hooks_see_and_change_what_they_would_in_stock(place, before):
    stock, ours = pair(base("gpt2"))
    gradients_of(ours, loss_of_batch(LEFT))
    seen = {}
    for model in (stock, ours):
        record = seen.setdefault(id(model), [])

        def doubled(x, record=record):
            first = x[0] if isinstance(x, tuple) else x
            if not isinstance(first, torch.Tensor) or not first.is_floating_point():
                return None
            record.append(first.shape)
            return (2 * first, *x[1:]) if isinstance(x, tuple) else 2 * first

        part = model.get_submodule(place)
        if before:
            part.register_forward_pre_hook(lambda m, args, change=doubled: change(args))
        else:
            part.register_forward_hook(lambda m, args, out, change=doubled: change(out))
    assert_close(gradients_of(ours, loss_of_batch(LEFT)), gradients_of(stock, loss_of_batch(LEFT)))
    assert seen[id(ours)] == seen[id(stock)]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_keeps_dropping_padding(when, checkpointing):
    settings = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    models = [tiny("mistral")[0] for _ in range(2)]
    for number, ours in enumerate((False, True)):
        if ours and when == "after":
            cputrain.optimize(models[number])
        torch.manual_seed(0)
        models[number] = peft.get_peft_model(models[number], settings)
        if ours and when == "before":
            cputrain.optimize(models[number])
        if checkpointing:
            models[number].gradient_checkpointing_enable({"use_reentrant": False})
            models[number].enable_input_require_grads()
    found, expected = (gradients_of(m, labelled_loss()) for m in reversed(models))
    assert_close(found, expected)
    found, expected = (m(ids(RIGHT), attention_mask=RIGHT).logits for m in reversed(models))
    releases.assert_at_padding("mistral", found, expected, RIGHT)


def test_layers_that_are_skipped_at_random():
    model = base("opt")
    model.decoder.layerdrop = 0.5
    stock, ours = pair(model)
    for seed in range(6):
        torch.manual_seed(seed)
        expected = stock(ids(LEFT), attention_mask=LEFT).last_hidden_state
        torch.manual_seed(seed)
        found = ours(ids(LEFT), attention_mask=LEFT).last_hidden_state
        torch.testing.assert_close(found[LEFT == 1], expected[LEFT == 1], rtol=1e-4, atol=1e-4)


def test_layers_replaced_or_wrapped_after_optimize():
    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, hidden_states, past_key_values=None, attention_mask=None, *args, **kwargs):
            assert type(hidden_states) is torch.Tensor
            names = parameter_names(type(self.inner).forward)
            given = dict(zip(names, (hidden_states, past_key_values, attention_mask, *args), strict=False))
            return self.inner(**(given | kwargs))

    stock, ours = pair(base("gpt2"))
    for model in (stock, ours):
        model.h[1] = Wrapped(model.h[1])
    expected, found = (gradients_of(m, loss_of_batch(LEFT)) for m in (stock, ours))
    assert_close(found, expected)
    assert ("layers have changed" in what_runs(ours, "(the model)")) == releases.drops_padding("gpt2")


@pytest.mark.parametrize("kind", [hf.GPT2ForSequenceClassification, hf.GPT2ForQuestionAnswering])
def test_heads_on_a_causal_stack(kind):
    config = tiny("gpt2")[0].config
    config.num_labels = 2
    torch.manual_seed(0)
    stock, ours = pair(kind(config))
    expected, found = (m(ids(RIGHT), attention_mask=RIGHT) for m in (stock, ours))
    if kind is hf.GPT2ForSequenceClassification:
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(found.start_logits[RIGHT == 1], expected.start_logits[RIGHT == 1])
        assert (found.start_logits[RIGHT == 0] == -1e4).all()


def test_under_autocast_and_compile():
    """Autocast is off inside on a CPU that would emulate it, and on in stock; the compiler gets stock's forward."""
    stock, ours = pair(base("gpt2"))
    given = {"input_ids": ids(LEFT), "attention_mask": LEFT}
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (m(**given).last_hidden_state.float()[LEFT == 1] for m in (ours, stock))
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
    compiled = torch.compile(ours, backend="eager")(**given).last_hidden_state
    torch.testing.assert_close(compiled, stock(**given).last_hidden_state, rtol=1e-4, atol=1e-4)


def test_copies_and_restored_models():
    stock, ours = pair(base("gpt2"))
    expected = gradients_of(ours, loss_of_batch(LEFT))
    found = gradients_of(copy.deepcopy(ours), loss_of_batch(LEFT))
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    cputrain.restore(ours)
    a, b = (m(ids(LEFT), attention_mask=LEFT).last_hidden_state for m in (ours, stock))
    assert torch.equal(a, b)


# ---- what travels between the layers -------------------------------------------------------------------------------


def test_hidden_states_between_layers_behave_as_their_padded_tensor():
    padding = PaddingMask(3, 7, HOLES.bool(), True, lambda: None)
    rows = torch.randn(1, int(HOLES.sum()), 4)
    states = RaggedStates(rows, padding.ragged)
    assert states.shape == (3, 7, 4) and states.dtype is torch.float32 and states.dense is None
    assert states.of(padding.ragged) is rows
    dense = torch.zeros(3, 7, 4)
    dense[HOLES.bool()] = rows[0]
    assert torch.equal(states + 1, dense + 1) and torch.equal(1 - states, 1 - dense)
    assert torch.equal(torch.relu(states), torch.relu(dense)) and torch.equal(states[:, 0], dense[:, 0])
    states[0, 0] = 5.0
    assert (states.of(padding.ragged)[0, 0] == 5).all(), "a change between the layers reaches the next one"
