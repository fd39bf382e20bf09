"""Makes the demo's data: invented paragraphs and questions in the format of SQuAD v1.1, and a tokenizer for them.

    python examples/demo/generate_data.py

A paragraph tells a few facts about a person, a company or a town and, as a distractor, often one about another of the
same kind; the questions ask for each fact. The names in the held-back file (`Ada Berg`, `Port Glen`) occur nowhere in
the training file, though their halves do, so that no answer can come from memory. One seed gives one file.
"""

# ruff: noqa: SIM905 - a line of names reads better than a list of quoted ones
from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
SEED = 20
PARAGRAPHS = {"train": 2400, "held-back": 200}
HELD_BACK_SHARE = 5  # one of so many names is kept for the held-back file

# subject | kind of answer | how texts state the fact | how questions ask for it; * is the subject, _ the answer.
FACTS = """
person | year | * was born in _. / * came into the world in _. | When was * born? / In which year was * born?
person | town | * grew up in _. / * spent a happy childhood in _. | Where did * grow up? / In which town did * grow up?
person | town | * bought a house in _. / * owned a house in _. | Where did * buy a house? / Where did * own a house?
person | person | * was taught by _. / * learned the trade from _. | Who taught *? / From whom did * learn the trade?
person | person | * married _. / * was the spouse of _. | Whom did * marry? / Who was the spouse of *?
person | job | * worked as a _. / * made a living as a _. | What did * work as? / What was the profession of *?
person | year | * died in _. / * passed away in _. | When did * die? / In which year did * pass away?
company | person | * was founded by _. / * was started by _. | Who founded *? / By whom was * started?
company | year | * opened its doors in _. / * has existed since _. | When did * open? / Since when has * existed?
company | town | * has its head office in _. / * is based in _. | Where is * based? / Where is the head office of *?
company | goods | * makes _. / * is known for its _. | What does * make? / What is * known for?
company | number | * employs _ people. / * pays wages to _ workers. | How many people does * employ?
company | person | * is led by _. / * is under the direction of _. | Who leads *? / Under whose direction is *?
town | number | * has _ inhabitants. / * is home to _ people. | How many people live in *? / How large is *?
town | person | * is governed by mayor _. / * elected _ as mayor. | Who is the mayor of *? / Who governs *?
town | town | * lies close to _. / * shares a border with _. | Which town is close to *? / Which town borders on *?
town | year | * was first mentioned in _. / * appears in records of _. | When was * first mentioned?
town | goods | * trades in _. / * became rich by selling _. | What does * trade in? / What does * sell?
"""
FILLERS = """
Few records of that time have survived. / The weather was mild for the season. / The archive was lost in a fire.
/ Many visitors still come every summer. / Historians do not agree about the rest. / Not much else is known.
"""
WOMEN = "Ada Clara Edda Greta Ines Karla Mira Olga Rosa Tilda".split()
MEN = "Bruno Dario Felix Hugo Jonas Leo Nils Paul Sven Viktor".split()
FAMILIES = (
    "Abend Berg Conti Dahl Ekman Falk Grimm Holst Ivanov Jansen "
    "Keller Lund Moreau Novak Olsen Petrov Rossi Stein Torres Weber"
).split()
TOWN_FIRST = "North South East West Upper Lower Old New Great Little Port Saint".split()
TOWN_LAST = "Alder Brook Cray Dorn Elm Ferry Glen Haven Kirk Loch Marsh Nash Oak Penn Rook Thorn Vale Wick".split()
COMPANY_FIRST = (
    "Atlas Boreal Castor Delta Eagle Fortuna Gamma Helios Icarus Juno Kosmos Lyra Meteor Nova Orion Phoenix"
).split()
COMPANY_LAST = "Works Brothers Mills Group Company Union Trading Partners Limited Holding".split()
JOBS = "painter baker lawyer sailor teacher printer carpenter doctor farmer tailor singer miller".split()
GOODS = "bicycles pianos clocks boats paper glass cheese salt wool tiles lamps furniture".split()


@dataclass(frozen=True)
class Relation:
    subject: str
    answer: str
    statements: list[str]
    questions: list[str]


@dataclass(frozen=True)
class Fact:
    subject: str
    relation: Relation
    answer: str


def alternatives(text: str) -> list[str]:
    return [part.strip() for part in text.split("/")]


def read_relation(line: str) -> Relation:
    subject, answer, statements, questions = (field.strip() for field in line.split("|"))
    return Relation(subject, answer, alternatives(statements), alternatives(questions))


RELATIONS = [read_relation(line) for line in FACTS.strip().splitlines()]


class Names:
    """Names and values of one split; the splits share no name."""

    def __init__(self, rng: random.Random, *, held_back: bool) -> None:
        self.rng, self.held_back = rng, held_back

    def pair(self, first: list[str], last: list[str]) -> str:
        while True:
            i, j = self.rng.randrange(len(first)), self.rng.randrange(len(last))
            if ((i + j) % HELD_BACK_SHARE == 0) == self.held_back:
                return f"{first[i]} {last[j]}"

    def value(self, kind: str) -> str:
        if kind == "year":
            return str(self.rng.randrange(1500, 2000))
        if kind == "number":
            return str(self.rng.randrange(20, 100) * 10)
        if kind in ("job", "goods"):
            return self.rng.choice({"job": JOBS, "goods": GOODS}[kind])
        halves = {
            "person": (WOMEN + MEN, FAMILIES),
            "town": (TOWN_FIRST, TOWN_LAST),
            "company": (COMPANY_FIRST, COMPANY_LAST),
        }
        return self.pair(*halves[kind])


def make_facts(names: Names, kind: str, count: int) -> list[Fact]:
    subject = names.value(kind)
    relations = names.rng.sample([relation for relation in RELATIONS if relation.subject == kind], count)
    return [Fact(subject, relation, names.value(relation.answer)) for relation in relations]


def short_form(fact: Fact) -> str:
    """How a text names a subject that it has introduced."""
    if fact.relation.subject == "person":
        return "She" if fact.subject.split()[0] in WOMEN else "He"
    return f"The {fact.relation.subject}"


def write_sentence(rng: random.Random, fact: Fact, *, introduced: bool) -> tuple[str, int]:
    """The sentence, and where in it the answer starts."""
    subject = short_form(fact) if introduced else fact.subject
    before, after = rng.choice(fact.relation.statements).replace("*", subject).split("_")
    return before + fact.answer + after, len(before)


def make_paragraph(names: Names, number: str) -> dict[str, Any]:
    """Facts about one subject, sometimes one about another, fillers anywhere; a question for each fact."""
    rng = names.rng
    kind = rng.choice(("person", "company", "town"))
    pieces: list[Fact | str] = []
    pieces += make_facts(names, kind, rng.randint(2, 4)) + make_facts(names, kind, rng.choice((0, 0, 1)))
    for _ in range(rng.choice((0, 1, 1, 2))):
        pieces.insert(rng.randint(0, len(pieces)), rng.choice(alternatives(FILLERS)))
    context, questions, introduced = "", [], set[str]()
    for piece in pieces:
        if isinstance(piece, str):
            context += piece + " "
            continue
        sentence, offset = write_sentence(rng, piece, introduced=piece.subject in introduced)
        introduced.add(piece.subject)
        question = rng.choice(piece.relation.questions).replace("*", piece.subject)
        answer = {"text": piece.answer, "answer_start": len(context) + offset}
        questions.append({"id": f"{number}-{len(questions)}", "question": question, "answers": [answer]})
        context += sentence + " "
    return {"context": context.strip(), "qas": questions}


def make_split(title: str) -> bytes:
    held_back = title == "held-back"
    names = Names(random.Random(SEED + held_back), held_back=held_back)
    paragraphs = [make_paragraph(names, f"{title}-{number}") for number in range(PARAGRAPHS[title])]
    dataset = {"version": "1.1", "data": [{"title": title, "paragraphs": paragraphs}]}
    return json.dumps(dataset, separators=(",", ":")).encode()


def main() -> None:
    from squad_data import build_tokenizer, load_examples

    DATA.mkdir(exist_ok=True)
    for title in PARAGRAPHS:
        (DATA / f"{title}.json.gz").write_bytes(gzip.compress(make_split(title), mtime=0))
    examples = load_examples(DATA / "train.json.gz")
    texts = [text for example in examples for text in (example.question, example.context)]
    build_tokenizer(texts).save(str(DATA / "tokenizer.json"))


if __name__ == "__main__":
    main()
