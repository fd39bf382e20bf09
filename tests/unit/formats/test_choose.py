"""Which precision runs, and why: from the instruction sets, a veto by measurement, and rank 0's word."""

from __future__ import annotations

import itertools
import json
import os
import time
import types

import pytest
import torch
import torch.multiprocessing

import cputrain
from cputrain import hardware, log, user_folders
from cputrain.formats import choose, speed
from cputrain.hardware import Fact

pytestmark = pytest.mark.chooses_precision


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choose.automatic.cache_clear()
    log.say_once.cache_clear()
    choose._told.clear()
    monkeypatch.setattr(speed, "_found", {})
    yield tmp_path / "cputrain" / "product_speed.json"
    choose.automatic.cache_clear()
    hardware.has_bf16.cache_clear()


def _machine(monkeypatch, sets, **speeds):
    """A CPU of these instruction sets, on which products are as fast as said."""
    import dataclasses

    machine = dataclasses.replace(
        hardware.detect(), instruction_sets=Fact(tuple(sets), "made up"), model=Fact("Made Up 9000", "made up")
    )
    monkeypatch.setattr(hardware, "this_machine", lambda: machine)
    hardware.has_bf16.cache_clear()
    monkeypatch.setattr(speed, "ratio", lambda kind: speeds[kind])


@pytest.mark.parametrize(("sets", "speeds", "dtype", "kind", "said"), [
    (["avx2"], {"int16": 1.42}, "int16", "int16", "(Made Up 9000) has AVX2 but no bf16; measured 1.42 × fp32"),
    (["avx2", "avx512bw"], {"int16": 1.6}, "int16", "int16", "has AVX-512 but no bf16"),
    (["avx2"], {"int16": 0.9}, "fp32", "fp32", "measured int16 only 0.90 × fp32"),
    (["sse4_2"], {}, "fp32", "fp32", "neither bf16 nor AVX2"),
    (["avx2", "avx512bw", "avx512_bf16"], {"int16": 1.9}, "int16", "int16", "and bf16, which would be less exact"),
    (["avx2", "avx512_bf16"], {"int16": 0.9, "bf16": 1.9}, "bf16", "bf16", "(int16 only 0.90 × fp32)"),
    (["avx2", "amx_bf16"], {"bf16": 6.0}, "bf16", "bf16", "multiplies bf16 itself; measured 6.00 × fp32"),
    (["avx2", "amx_bf16"], {"bf16": 0.5, "int16": 1.5}, "int16", "int16", "measured 1.50 × fp32 (bf16 only"),
    (["avx2", "amx_bf16"], {"bf16": 0.5, "int16": 0.7}, "fp32", "fp32", "bf16 only 0.50 × fp32 and int16 only"),
])  # fmt: skip
def test_auto(monkeypatch, sets, speeds, dtype, kind, said):
    _machine(monkeypatch, sets, **speeds)
    choice = choose.choose("auto")
    assert (choice.dtype, choice.format) == (dtype, kind) and said in choice.reason


def test_bf16_without_hardware_says_what_runs_and_what_is_better(monkeypatch, caplog):
    _machine(monkeypatch, ["avx2"], int16=1.5)
    choice = choose.choose(torch.bfloat16)
    assert (choice.dtype, choice.format) == ("bf16", "bf16_saved")
    assert "products run in fp32" in caplog.text and "int16' is more exact" in caplog.text and "1.50 ×" in caplog.text
    choose.choose("bf16")
    assert len(caplog.records) == 1


def test_bf16_with_hardware(monkeypatch):
    _machine(monkeypatch, ["avx2", "avx512_bf16"], bf16=1.9)
    assert choose.choose("bf16").format == "bf16"


@pytest.mark.parametrize(("set_", "dtype"), [("amx_bf16", "bf16"), ("avx512_bf16", "int16")])
def test_bf16_that_may_be_slow_is_not_chosen_unmeasured(monkeypatch, set_, dtype):
    _machine(monkeypatch, ["avx2", "avx512bw", set_])
    choice = choose.automatic(measured=False)
    assert choice.dtype == dtype and "not measured" in choice.reason


def test_bf16_with_hardware_that_is_slower_than_fp32_is_stored_only(monkeypatch, caplog):
    """AVX512_BF16 without AMX."""
    _machine(monkeypatch, ["avx2", "avx512_bf16"], bf16=0.52, int16=1.6)
    choice = choose.choose("bf16")
    assert (choice.dtype, choice.format) == ("bf16", "bf16_saved") and "at only 0.52 × fp32's speed" in caplog.text
    model = cputrain.optimize(torch.nn.Linear(300, 300), dtype="bf16")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(300, 300)).dtype is torch.float32
    assert "this CPU is slower at it than at fp32" in caplog.text


@pytest.mark.parametrize("dtype", ["fp16", "float32", "", torch.float16, torch.int8, 3])
def test_what_does_not_exist_is_refused(dtype):
    with pytest.raises(ValueError, match="dtype must be 'auto'"):
        choose.choose(dtype)


def test_speed_is_measured_once_and_remembered(own_cache, monkeypatch):
    measured = []
    monkeypatch.setattr(speed, "measure", lambda kind: measured.append(kind) or 1.23456)
    assert [speed.ratio("int16") for _ in range(3)] == [1.235] * 3
    speed._found.clear()  # as in another process
    assert speed.ratio("int16") == 1.235
    assert measured == ["int16"]
    (name,) = json.loads(own_cache.read_text())
    assert hardware.this_machine().model.value in name and "int16" in name and torch.__version__ in name
    assert list(own_cache.parent.iterdir()) == [own_cache]  # no temporary file is left
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    speed.ratio("int16")
    assert measured == ["int16"] * 2  # under another limit of torch's libraries


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": "b"}', "\0"])
def test_a_broken_cache_is_no_cache(own_cache, content, monkeypatch):
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text(content)
    monkeypatch.setattr(speed, "measure", lambda kind: 2.0)
    assert speed.ratio("int16") == 2.0
    assert 2.0 in json.loads(own_cache.read_text()).values()


def test_without_a_place_to_remember_it_is_measured_once_in_a_process(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    measured = []
    monkeypatch.setattr(speed, "measure", lambda kind: measured.append(kind) or 2.0)
    assert [speed.ratio("int16") for _ in range(2)] == [2.0] * 2
    assert measured == ["int16"]


def test_auto_says_once_what_it_chose_and_why(monkeypatch, caplog):
    _machine(monkeypatch, ["avx2"], int16=1.42)
    for _ in range(2):
        cputrain.optimize(torch.nn.Linear(3, 3))
    said = "the model computes in int16: this CPU (Made Up 9000) has AVX2 but no bf16; measured 1.42 × fp32"
    assert caplog.messages == [f"{said} (dtype='fp32' keeps stock's arithmetic)"]
    assert caplog.records[0].levelname == "WARNING"  # so that a script that sets up no logging shows it


def test_auto_that_chose_fp32_is_no_warning(monkeypatch, caplog):
    _machine(monkeypatch, ["avx2"], int16=0.9)
    with caplog.at_level("INFO"):
        cputrain.optimize(torch.nn.Linear(3, 3))
    assert [(record.levelname, "int16 only 0.90" in record.message) for record in caplog.records] == [("INFO", True)]


@pytest.fixture
def rounds(monkeypatch):
    """The ratios of all rounds that are measured."""
    found = []
    one = speed._round

    def noted(*of):
        found.append(one(*of))
        return found[-1]

    monkeypatch.setattr(speed, "_round", noted)
    return found


@pytest.mark.parametrize("kind", ["int16", "bf16"])
def test_measurement_is_real_and_ends(kind, rounds):
    begin = time.perf_counter()
    speed.measure(kind)
    assert rounds and all(ratio is None or 0.02 < ratio < 50 for ratio in rounds)
    assert time.perf_counter() - begin < 20  # ten seconds, on a machine that does anything else


def test_measurement_ends_on_a_machine_that_is_too_busy(rounds, monkeypatch):
    monkeypatch.setattr(speed, "_MOST_SECONDS", 0.0)
    assert speed.measure("int16") is None and rounds == [None]


@pytest.mark.parametrize(
    ("each", "count"), [([1.3], 5), ([1.3, 0.6, 1.3, 1.3], 5), ([0.6, 0.9], None), ([1.3, 0.6], None)]
)
def test_measurement_ends_early_only_for_what_is_faster(each, count, monkeypatch):
    found = []

    def made_up(*_):
        begin = time.thread_time()
        while time.thread_time() < begin + speed._SECONDS / 20:
            pass
        found.append(each[len(found) % len(each)])
        return found[-1]

    monkeypatch.setattr(speed, "_round", made_up)
    speed.measure("int16")
    assert len(found) == count or (count is None and len(found) > 15)


@pytest.mark.parametrize(("rounds", "clear"), [
    ([1.3, 1.2, 1.4, 1.3, 1.3], 1.3),
    ([1.3, 1.2, 0.6, 1.3, 1.3], 1.3),  # one was disturbed
    ([1.3, 0.6, 0.6, 1.3, 1.3], None),
    ([1.3, 0.6, 0.6, 0.6, 0.6], None),  # a veto takes all of them
    ([0.9, 0.6, 0.6, 0.6, 0.6], 0.6),
    ([0.99, 0.98, 0.97, 0.98, 0.97], None),  # no more than noise
    ([1.3, 1.3, 1.3, 1.3], None),  # there was no time for a fifth
    ([], None),
])  # fmt: skip
def test_rounds_must_agree(rounds, clear):
    assert speed.clear_ratio(rounds, whole=True) == clear


def test_a_veto_takes_the_whole_measurement():
    assert speed.clear_ratio([0.6] * 9, whole=False) is None
    assert speed.clear_ratio([1.3] * 9, whole=False) == 1.3


def test_only_cpu_time_counts(rounds, monkeypatch):
    """A clock of CPU time by which every product takes one tick."""
    ticks = itertools.count()
    clocks = types.SimpleNamespace(thread_time=lambda: next(ticks) / 64, perf_counter=time.perf_counter)
    monkeypatch.setattr(speed, "time", clocks)
    speed.measure("int16")
    assert set(rounds) == {1.0}


@pytest.mark.parametrize(("sets", "speeds", "dtype", "kind"), [
    (["avx2"], {"int16": None}, "int16", "int16"),
    (["avx2", "amx_bf16"], {"bf16": None}, "bf16", "bf16"),
    (["avx2", "avx512_bf16"], {"int16": None}, "int16", "int16"),
    (["avx2", "avx512_bf16"], {"int16": 0.9, "bf16": None}, "fp32", "fp32"),  # which may take twice as long
])  # fmt: skip
def test_what_is_not_clear_is_no_veto(monkeypatch, sets, speeds, dtype, kind):
    _machine(monkeypatch, sets, **speeds)
    choice = choose.choose("auto")
    assert (choice.dtype, choice.format) == (dtype, kind) and "clear" in choice.reason


def test_bf16_asked_for_on_a_cpu_whose_speed_is_not_clear(monkeypatch, caplog):
    _machine(monkeypatch, ["avx2", "avx512_bf16"], bf16=None, int16=None)
    assert choose.choose("bf16").format == "bf16_saved" and "at a speed that wasn't clear" in caplog.text


def test_what_is_not_clear_is_not_remembered(own_cache, monkeypatch):
    measured = []
    monkeypatch.setattr(speed, "measure", lambda kind: measured.append(kind))
    assert [speed.ratio("int16") for _ in range(2)] == [None] * 2
    assert measured == ["int16"] and not own_cache.exists()  # once in a process, …
    speed._found.clear()
    assert speed.ratio("int16") is None and len(measured) == 2  # … and again in the next


def test_what_earlier_versions_measured_is_not_read(own_cache, monkeypatch):
    monkeypatch.setattr(speed, "measure", lambda kind: 1.3)
    speed.ratio("int16")
    (name,) = json.loads(own_cache.read_text())
    speed._found.clear()
    own_cache.write_text(json.dumps({name.replace(" | by CPU time", ""): 0.62}))
    assert speed.ratio("int16") == 1.3


def test_two_kinds_are_remembered_side_by_side(own_cache, monkeypatch):
    monkeypatch.setattr(speed, "measure", lambda kind: 1.3 if kind == "int16" else 0.5)
    speed.ratio("int16"), speed.ratio("bf16")
    assert sorted(json.loads(own_cache.read_text()).values()) == [0.5, 1.3]


def test_without_a_folder_for_it_the_speed_is_measured(monkeypatch):
    monkeypatch.setattr(user_folders, "cache", lambda *_: None)
    monkeypatch.setattr(speed, "measure", lambda kind: 2.0)
    assert speed.ratio("int16") == 2.0


def _rank(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    choose.automatic = lambda: choose.Choice(f"choice of {rank}", "int16", "because")  # type: ignore[assignment]
    (folder / f"{rank}").write_text(choose.choose("auto").dtype)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_all_ranks_take_the_first_ones_answer(tmp_path):
    torch.multiprocessing.spawn(_rank, (tmp_path,), nprocs=2)
    assert [(tmp_path / name).read_text() for name in "01"] == ["choice of 0"] * 2


def _rank_without_a_group(rank, folder, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="1")
    choose.automatic = lambda: choose.Choice(f"choice of {rank}", "int16", "because")  # type: ignore[assignment]
    (folder / f"{rank}").write_text(choose.choose("auto").dtype)


def test_ranks_that_have_no_group_yet_ask_the_launchers_store(tmp_path):
    agent = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(_rank_without_a_group, (tmp_path, agent.port), nprocs=2)
    assert [(tmp_path / name).read_text() for name in "01"] == ["choice of 0"] * 2


def test_ranks_that_cannot_agree_go_by_the_instruction_sets(monkeypatch):
    """Under an mpirun, before init_process_group: a measurement could differ between equal machines."""
    _machine(monkeypatch, ["avx2"], int16=0.9)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    choice = choose.choose("auto")
    assert choice.dtype == "int16" and "not measured" in choice.reason
