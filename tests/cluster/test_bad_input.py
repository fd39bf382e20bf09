"""Ten thousand generated inputs: each is refused in one sentence, or arrives in the pod exactly as it was given."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
from cluster import kubelet
from cluster.test_render import TRICKS

from cputrain import cli
from cputrain.cli import job_options
from cputrain.cluster import check, manifest, render, schema
from cputrain.cluster.job import EFFECTS, KINDS, MPI, Job, SecretVariable, Toleration, Volume
from cputrain.cluster.manifest import plain
from cputrain.cluster.slurm import SlurmJob

VALUES, COMMANDS = 9_800, 200
LETTERS = "aZ09-_./:=,@$(){}[]'\"`\\|&;<>!#%*?~^ \t\n\r\x00\x07\x1b\x7f\x85\u2028é😀\ud800"
NUMBERS = (
    "8",
    "1.5",
    "1500m",
    "0",
    "-1",
    "128GB",
    "16 Gi",
    "1e3",
    "1e99",
    "0x10",
    "٣",
    "∞",
    "1_000",
    "",
    "1e-3",
    "100m",
)
SIZES = ("16Gi", "1G", "128GB", "64Mi", "0", "-1Gi", "1Ki", "1.5Gi", "16gi", "1e12", "9999999999999999999Ei", "10m", "")
GOOD_NAMES = ("qa", "run-qa-2", "a" * 40)


class Maker:
    """Inputs out of a seeded generator: valid ones, wrong ones, and noise."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def noise(self) -> str:
        if self.random.random() < 0.4:
            return self.random.choice(TRICKS)
        return "".join(self.random.choices(LETTERS, k=self.random.randrange(0, 12)))

    def word(self, *good: str, bad: float = 0.15) -> str:
        return self.noise() if self.random.random() < bad else self.random.choice(good)

    def maybe(self, value: Any) -> Any:
        return value if self.random.random() < 0.3 else None

    def count(self, *good: int) -> int:
        return self.random.choice((0, -1, 10**12)) if self.random.random() < 0.1 else self.random.choice(good)

    def several(self, make: Any) -> tuple[Any, ...]:
        return tuple(make() for _ in range(self.random.choice((0, 0, 0, 1, 2))))

    def job(self) -> dict[str, Any]:
        return {
            "name": self.word(*GOOD_NAMES, bad=0.08),
            "image": self.word("x:1", "r.example:5000/a/b@sha256:" + "0" * 64, bad=0.08),
            "script": self.word("run.py", "/w/a b.py", bad=0.08),
            "arguments": tuple(self.noise().replace("\0", "").replace("\ud800", "") for _ in range(3))
            if self.random.random() < 0.9
            else (self.noise(),),
            "kind": self.word(*KINDS, bad=0.04),
            "mpi": self.word(*MPI, bad=0.04),
            "namespace": self.maybe(self.word("default", "team-1")),
            "workers": self.count(1, 2, 4),
            "elastic": self.maybe(self.maybe((self.count(1, 2), self.count(2, 4)))),
            "cpus": self.random.choice(NUMBERS) if self.random.random() < 0.15 else "8",
            "memory": self.random.choice(SIZES) if self.random.random() < 0.15 else "16Gi",
            "shared_memory": self.maybe(self.random.choice(SIZES)),
            "processes": self.maybe(self.count(1, 2, 8)),
            "threads": self.maybe(self.count(1, 3)),
            "volume": self.maybe(Volume(self.word("data"), self.word("/data", "/mnt/x"), self.maybe("1Gi"))),
            "environment": self.several(lambda: (self.word("A", "B_2", "PET_X", "HF_TOKEN"), self.noise())),
            "secrets": self.several(lambda: SecretVariable(self.word("S", "T"), self.word("hub"), self.word("key"))),
            "preload": self.several(lambda: self.word("libtcmalloc.so.4")),
            "node_selector": self.several(lambda: (self.word("a", "b/c"), self.word("d", ""))),
            "tolerations": self.several(
                lambda: Toleration(self.word("a"), self.maybe(self.word("b")), self.maybe(self.word(*EFFECTS)))
            ),
            "user": self.count(1000, 1),
            "script_text": self.maybe(self.noise()),
        }


def assert_sentence(error: ValueError) -> None:
    text = str(error)
    assert text.endswith((".", "?")), text
    assert "\n" not in text, text
    assert text.isprintable(), text


def assert_arrives(job: Job) -> None:
    """What the container would be given is what the user gave."""
    document = plain(render.of_job(job)[-1])
    spec = document["spec"]
    if job.kind == "trainjob":
        container = spec["trainer"]
    else:
        replicas = spec.get("pytorchReplicaSpecs") or spec["mpiReplicaSpecs"]
        container = replicas.get("Launcher", replicas["Worker"])["template"]["spec"]["containers"][0]
    secrets = {f"{secret.secret}/{secret.key}": "value" for secret in job.secrets}
    environment = kubelet.environment(container, {}, secrets)
    words = kubelet.command(container, environment)
    assert words[len(words) - len(job.arguments) - 1 :] == [job.script_path, *job.arguments]
    assert dict(job.environment).items() <= environment.items()


def test_values() -> None:
    maker, accepted = Maker(1), 0
    for _ in range(VALUES):
        given = maker.job()
        try:
            job = Job(**given)
        except ValueError as error:
            assert_sentence(error)
            continue
        accepted += 1
        assert_arrives(job)
        if accepted % 20 == 0:
            documents = manifest.parse(render.job_text(job))
            assert [document.value for document in documents] == list(map(plain, render.of_job(job)))
            for document in documents:
                assert list(schema.of_operators().problems(document.value) or ()) == []
    # Neither all refused nor all accepted: both sides were tried.
    assert VALUES * 0.05 < accepted < VALUES * 0.8


def command_line(maker: Maker) -> list[str]:
    def text(*good: str) -> str:
        return maker.word(*good, bad=0.4).replace("\0", "")

    pairs = [
        ("--name", text("qa")),
        ("--workers", text("2")),
        ("--elastic", text("1:4", "4:1", "1")),
        ("--cpus", text("8", "x")),
        ("--memory", text(*SIZES)),
        ("--env", text("A=b", "=b", "A")),
        ("--secret-env", text("A=b/c", "A=b")),
        ("--toleration", text("a=b:NoSchedule", "a:Never")),
        ("--node-selector", text("a=b", "a")),
        ("--kind", text(*KINDS)),
        ("--create-pvc", text("1Gi")),
        ("--pvc", text("data")),
        ("--mount", text("/x", "x")),
        ("--user", text("0", "5")),
        ("--pull-policy", text("Always", "always")),
        ("--config-file", text("/none.yaml")),
    ]
    chosen = [word for pair in maker.random.sample(pairs, 3) for word in pair]
    return ["--image", text("x:1"), *chosen, "--", text("a.py"), maker.noise().replace("\0", "")]


@pytest.mark.filterwarnings("ignore")
def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    maker, refused = Maker(2), 0
    for _ in range(COMMANDS):
        monkeypatch.setattr(sys, "argv", ["cputrain", "k8s", "render", *command_line(maker)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        if ended.value.code == 0:
            assert check.findings(out) == [], out
        else:
            refused += 1
            assert ended.value.code == 2
            assert "Traceback" not in err
            assert out == ""
    assert COMMANDS * 0.3 < refused < COMMANDS
    assert list(tmp_path.iterdir()) == []  # nothing half-written


@pytest.mark.parametrize("seed", range(3))
def test_slurm(seed: int) -> None:
    maker = Maker(seed)
    for _ in range(300):
        try:
            SlurmJob(maker.word("qa"), maker.word("a.py"), (maker.noise(),), maker.count(1), maker.count(4),
                     memory=maker.word("4G"), time=maker.word("1:00"), partition=maker.word("cpu"))  # fmt: skip
        except ValueError as error:
            assert_sentence(error)


def test_a_library_of_one_release() -> None:
    with pytest.raises(ValueError, match=r"images don't have: give --preload libtcmalloc\.so\.4\.$"):
        Job("qa", "x:1", "a.py", preload=("/usr/lib/libtcmalloc.so.4.5.9",))


@pytest.mark.parametrize("text", ["", "4", "a:b", "4:1", "1:4:8", "-1:4", "1:٤"])
def test_elastic(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be LEAST:MOST"):
        job_options.least_and_most(text)


@pytest.mark.parametrize("script", ["run_qa.py", "/a/B c.py", "3.py", "ß.py", "-.py", "", "a" * 300])
def test_a_name_after_the_script_is_one(script: str) -> None:
    Job(job_options.name_of(script), "x:1", "a.py", kind="trainjob")


def test_yaml_noise_is_read_or_refused() -> None:
    """check never fails itself: whatever a file holds is a finding."""
    maker = Maker(3)
    good = render.job_text(Job("qa", "x:1", "a.py"))
    for _ in range(60):
        start = maker.random.randrange(len(good))
        text = good[:start] + maker.noise().replace("\ud800", "") + good[start + maker.random.randrange(9) :]
        for finding in check.findings(text):
            assert finding.sentence
