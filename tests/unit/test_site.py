"""The documentation's pages: what they quote is in the code, what they say to type exists, and the site is built."""

from __future__ import annotations

import functools
import http.server
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cputrain.cli import SUMMARIES, completion

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = "".join(" ".join(file.read_text().split()) for file in (ROOT / "src" / "cputrain").rglob("*.py"))
# Sentences that are put together of two lines of source: "… a {thing} " "that …".
JOINED = re.sub(r'" f?"|" \) f?"', "", SOURCE)
OPTIONS = {one.path: one.options for one in completion.entries()}
PAGES = [
    "guides.md",
    "troubleshooting.md",
    "index.md",
    *(f"tasks/{page.name}" for page in (DOCS / "tasks").glob("*.md")),
]


def rows(page: str) -> list[list[str]]:
    """Cells of all tables, without their heads."""
    found = re.findall(r"^\|.*\|\n\|[-|]+\|\n((?:\|.*\|\n?)+)", (DOCS / page).read_text(), re.MULTILINE)
    lines = [line for table in found for line in table.splitlines()]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


# --- Trouble-shooting: by messages that the code really prints ------------------------------------------------------

MESSAGES = [
    quoted
    for cells in rows("troubleshooting.md")
    for quoted in re.findall(r"`([^`]+)`", cells[0])
    if " " in quoted.strip() and "(" not in quoted
]


def test_there_are_messages_to_look_for() -> None:
    assert len(MESSAGES) > 20


@pytest.mark.parametrize("message", sorted(set(MESSAGES)))
def test_a_message_is_in_the_code(message: str) -> None:
    assert message in JOINED, "no such text in src/cputrain"


# --- The guides: all that they say has a row -----------------------------------------------------------------------

GUIDES = {
    "commands": """
        pip list | pip install intel_extension_for_pytorch | pip install oneccl_bind_pt | python run_qa.py
        python3 run_qa.py | accelerate config | accelerate launch my_script.py --args_to_my_script
        accelerate launch examples/nlp_example.py | mpirun -n 2 -genv OMP_NUM_THREADS=23
        mpirun -f hostfile -n 4 -ppn 2 | mpirun -f hostfile -n 16 -ppn 4 accelerate launch | cat hostfile
        python -c "from oneccl_bindings_for_pytorch import cwd; print(cwd)" | python -c "import torch; import torch_ccl;
        source $oneccl_bindings_for_pytorch_path/env/setvars.sh | source $torch_ccl_path/env/setvars.sh
        export CCL_WORKER_COUNT=1 | torchrun | FROM intel/ai-workflows: | kubectl create -f pytorchjob.yaml
        kubectl get pods -n kubeflow | kubectl logs -n kubeflow | kubectl delete -f pytorchjob.yaml
    """,
    "flags": """
        --use_ipex --bf16 --no_cuda --use_cpu --ddp_backend --model_name_or_path --dataset_name --do_train --do_eval
        --per_device_train_batch_size --learning_rate --num_train_epochs --max_seq_length --doc_stride --output_dir
        -n -f -ppn -genv
    """,
    "variables": """
        OMP_NUM_THREADS CCL_WORKER_COUNT CCL_ATL_TRANSPORT MASTER_ADDR LD_PRELOAD TRANSFORMERS_CACHE HF_DATASETS_CACHE
        LOGLEVEL HF_TRANSFORMERS_VER
    """,
    "keys": """
        compute_environment distributed_type downcast_bf16 ipex_config ipex machine_rank main_process_ip
        main_process_port main_training_function mixed_precision num_machines num_processes rdzv_backend same_network
        tpu_env tpu_use_cluster tpu_use_sudo use_cpu
        apiVersion kind metadata name namespace spec elasticPolicy rdzvBackend minReplicas maxReplicas maxRestarts
        pytorchReplicaSpecs Worker replicas restartPolicy template containers image imagePullPolicy command env value
        resources limits requests cpu memory volumeMounts mountPath nodeSelector node-type volumes
        persistentVolumeClaim claimName emptyDir medium
    """,
}
LEFT = "\n".join(cells[0].replace("\\|", "|") for cells in rows("guides.md"))


def said(kind: str) -> list[str]:
    text = GUIDES[kind]
    return re.split(r" \| |\n\s+", text.strip()) if kind == "commands" else text.split()


@pytest.mark.parametrize("word", [word for kind in GUIDES for word in said(kind)])
def test_what_the_guides_say_has_a_row(word: str) -> None:
    assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", LEFT)


# --- What is to be typed exists ------------------------------------------------------------------------------------


def typed(page: str) -> Iterator[str]:
    text = (DOCS / page).read_text()
    yield from re.findall(r"`((?:\w+=\S+ )*cputrain [^`\n]*)`", text)
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from (line for line in block.replace("\\\n", " ").splitlines() if "cputrain " in line)


@pytest.mark.parametrize(("page", "command"), [(page, command) for page in PAGES for command in typed(page)])
def test_commands_and_their_options_exist(page: str, command: str) -> None:
    words = shlex.split(command.replace("…", "")[command.index("cputrain ") :])[1:]
    assert words[0] in SUMMARIES
    path = " ".join(words[:2]) if " ".join(words[:2]) in OPTIONS else words[0]
    known = {name.replace("_", "-") for name in OPTIONS[path]}
    for word in words[len(path.split()) :]:
        if word == "--" or word.endswith(".py"):
            break
        if word.startswith("-") and word not in ("-c", "-m"):
            assert word.partition("=")[0].replace("_", "-") in known


# --- The site ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert answer.returncode == 0, answer.stderr
    return folder


def test_every_page_is_in_the_site_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")}
    built = {page.relative_to(site) for page in site.rglob("*.html")}
    assert pages <= built
    loaded = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*?(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)")
    for page in built:
        fetched = [one for one in loaded.findall((site / page).read_text()) if "rel=canonical" not in one]
        assert fetched == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?:|@import", sheet.read_text()), sheet


@pytest.mark.needs_program("chromium", "chromium")
def test_chromium_shows_it_without_a_word_and_loads_it_all_from_here(site: Path, tmp_path: Path) -> None:
    asked: list[str] = []

    class Here(http.server.SimpleHTTPRequestHandler):
        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            asked.append(f"{self.path} {int(code)}")

    handler = functools.partial(Here, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
        command += [f"--user-data-dir={tmp_path}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        page = f"http://127.0.0.1:{server.server_address[1]}/tasks/seeing_a_run.html"
        answer = subprocess.run([*command, page], capture_output=True, text=True, check=True, timeout=120)
        server.shutdown()
    assert "CONSOLE" not in answer.stderr, "a load that was refused would be named there"
    assert any("/pictures/report.png" in one for one in asked) and any("/assets/javascripts" in one for one in asked)
    assert [one for one in asked if not one.endswith(("200", "304"))] == []


def test_the_reference_has_every_public_name(site: Path) -> None:
    import cputrain

    text = (site / "api.html").read_text()
    for name in set(cputrain.__all__) - {"__version__"}:
        assert re.search(rf'id="?cputrain\.[\w.]*{name}"?', text), name
    assert "dropout has stock's rate" in text, "docstrings"
    assert "<blockquote>" not in text, "examples are code"
