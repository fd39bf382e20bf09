"""Variables of the backend: which transport, where its threads run, and which of oneCCL's have no effect."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from cputrain import log, settings
from cputrain.distributed import backend, work
from cputrain.distributed.engines import compiled, oneccl_library


def test_an_unknown_transport_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("CPUTRAIN_CCL_TRANSPORT", "nccl")
    with pytest.raises(ValueError, match="one of auto, shm, gloo, mpi, oneccl, found 'nccl'"):
        settings.one_of(settings.TRANSPORT)
    assert ("auto", "shm", *backend.ENGINES) == settings.TRANSPORTS


def test_own_threads_run_on_the_cores_kept_for_communication(monkeypatch) -> None:
    mine = os.sched_getaffinity(0)
    kept = max(mine)
    monkeypatch.setenv("CPUTRAIN_COMMUNICATION_CPUS", str(kept))
    lane, seen = work.Lane("test"), []
    lane.run(lambda _: seen.append(os.sched_getaffinity(0)), [torch.ones(1)], asynchronous=True).wait()
    lane.close()
    assert seen == [{kept}] and os.sched_getaffinity(0) == mine
    with work.on_communication_cpus():
        assert os.sched_getaffinity(0) == {kept}
    assert os.sched_getaffinity(0) == mine


def test_cores_that_are_not_there_are_said_and_change_nothing(monkeypatch, caplog) -> None:
    mine = os.sched_getaffinity(0)
    monkeypatch.setenv("CPUTRAIN_COMMUNICATION_CPUS", "1000")
    work.move_to_communication_cpus()
    assert os.sched_getaffinity(0) == mine and "CPUTRAIN_COMMUNICATION_CPUS=1000 has no effect" in caplog.text


def test_variables_without_effect_are_said_once(caplog) -> None:
    log.mention_once.cache_clear()
    environ = {"CCL_ATL_TRANSPORT": "ofi", "CCL_WORKER_COUNT": "1"}
    with caplog.at_level(logging.INFO, "cputrain"):
        backend.say_what_has_no_effect("shm+oneccl", environ)
        assert not caplog.messages
        for _ in range(2):
            backend.say_what_has_no_effect("shm", environ)
        assert [text.split(":")[0] for text in caplog.messages] == [
            "CCL_ATL_TRANSPORT has no effect",
            "CCL_WORKER_COUNT has no effect",
        ]
        caplog.clear()
        log.mention_once.cache_clear()
        backend.say_what_has_no_effect("shm", {"CCL_WORKER_COUNT": "1", "CPUTRAIN_COMMUNICATION_CPUS": "3"})
        backend.say_what_has_no_effect("shm", {"CCL_WORKER_COUNT": "1", "CPUTRAIN_CORES_FOR_COMMUNICATION": "1"})
        assert not caplog.messages, "launch has kept the cores, and ccl's threads run there, or wherever is room"


@pytest.mark.parametrize(
    "starter, environ",
    [
        ("Open MPI", {"OMPI_COMM_WORLD_SIZE": "2", "PMI_RANK": "0"}),
        ("Intel", {"PMI_RANK": "0", "I_MPI_HYDRA_UUID": "x"}),
        ("MPICH", {"PMI_RANK": "0", "I_MPI_ROOT": "/opt"}),
        (None, {"RANK": "0"}),
    ],
)
def test_whose_mpirun_it_was(starter, environ) -> None:
    assert settings.mpirun_of(environ) == starter


def test_what_is_compiled_once_is_kept_and_errors_are_shown(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = compiled.library("libone.so", 'extern "C" int one() { return 1; }\n', [], "a test")
    written = made.stat().st_mtime_ns
    assert compiled.library("libone.so", 'extern "C" int one() { return 1; }\n', [], "a test") == made
    assert made.stat().st_mtime_ns == written and os.listdir(made.parent) == ["libone.so"]
    with pytest.raises(ValueError, match=r"a test could not be compiled:\n(.|\n)*nonsense"):
        compiled.library("libtwo.so", "nonsense;", [], "a test")
    (tmp_path / "cputrain/compiled").chmod(0o777)
    with pytest.raises(ValueError, match="can be written by others"):
        compiled.library("libone.so", "int x;", [], "a test")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="a test needs a C\\+\\+ compiler once"):
        compiled.library("libone.so", "int x;", [], "a test")


def test_another_oneccl_in_the_same_place_is_compiled_for_anew(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(oneccl_library, "_prefix", lambda: tmp_path)
    monkeypatch.setattr(oneccl_library, "variables", lambda address: {})
    for name in ("include/oneapi/ccl.hpp", "lib/pkgconfig/ccl.pc"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("Version: 2021.13.1\n")
    asked = []

    def library(*words: str) -> None:
        asked.append(compiled_library("libone.so", "int x;", [], *words[3:]))
        raise InterruptedError

    compiled_library = compiled.library
    monkeypatch.setattr(compiled, "library", library)
    for name in ("", "", "lib/pkgconfig/ccl.pc", "include/oneapi/ccl.hpp"):
        if name:
            (tmp_path / name).write_text("Version: 2022.0\n")
        with pytest.raises(InterruptedError):
            oneccl_library.Library("127.0.0.1")
    assert asked[0] == asked[1] and len(set(asked)) == 3
