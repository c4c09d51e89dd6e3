"""The task: questions of arithmetic. Four in ten add two digits, which a small model knows by heart; the others have
numbers of two digits, which it cannot work out alone.

``python questions.py`` writes the prompt files. No training question is a held-out question."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from calculator import calculate

EASY = 0.4
FORMS = ("What is {}?", "Work out {}.", "How much is {}?")
WORDS = {"+": "plus", "-": "minus", "*": "times"}

HELD_OUT_SEED, HELD_OUT_PROMPTS = 512, 512
TRAINING_SEED, TRAINING_PROMPTS = 1, 4096


class Question(NamedTuple):
    """``text``: for the model; ``expression``: for the tool."""

    text: str
    expression: str
    easy: bool

    @property
    def answer(self) -> str:
        return calculate(self.expression)


def random_questions(seed: int, *, excluded: Collection[str] = (), share: float = EASY) -> Iterator[Question]:
    """Endless random questions, of which ``share`` are easy; equal for equal seeds."""
    rng = random.Random(seed)
    while True:
        easy = rng.random() < share
        sign = "+" if easy else rng.choice("+-*")
        first, second = (rng.randint(1, 9) if easy else rng.randint(12, 99) for _ in range(2))
        text = rng.choice(FORMS).format(f"{first} {rng.choice((sign, WORDS[sign]))} {second}")
        if text not in excluded:
            yield Question(text, f"{first} {sign} {second}", easy)


def held_out_questions() -> list[Question]:
    """The distinct questions that are never trained on."""
    distinct = {question.text: question for question in islice(random_questions(HELD_OUT_SEED), 2 * HELD_OUT_PROMPTS)}
    return list(distinct.values())[:HELD_OUT_PROMPTS]


def write_prompts(name: str, questions: Iterable[Question]) -> None:
    """Write a file beside this one: a JSON object a line, the question and its answer."""
    rows = ({"prompt": question.text, "answer": question.answer} for question in questions)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    Path(__file__).with_name(f"{name}.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    """Write ``train.jsonl``, ``held_out_easy.jsonl`` and ``held_out_hard.jsonl``."""
    held_out = held_out_questions()
    excluded = frozenset(question.text for question in held_out)
    write_prompts("train", islice(random_questions(TRAINING_SEED, excluded=excluded), TRAINING_PROMPTS))
    write_prompts("held_out_easy", (question for question in held_out if question.easy))
    write_prompts("held_out_hard", (question for question in held_out if not question.easy))


if __name__ == "__main__":
    main()
