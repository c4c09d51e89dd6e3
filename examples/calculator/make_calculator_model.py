"""Make the starting policy of the calculator: a small Llama that was shown chats of a careless teacher.

The teacher tosses a coin whether it calls the tool, whatever the question, and in four of ten calls it copies a number
wrong. Without the tool its answers are right, but a model of this size learns only the sums of digits from them: these
are most of what it is shown at last, until it knows them by heart. Equal seeds give equal weights (one thread).

    python make_calculator_model.py --out model            # what is shipped in ./model
    python make_calculator_model.py --out other --seed 1"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from calculator import Calculator, calculate
from questions import EASY, Question, held_out_questions, random_questions

from streamrl.learning.small_model.chats import Chats, chat_text
from streamrl.run.environments.tools import ToolBox

TOOLS = ToolBox([Calculator]).schemas
CALLS, CARELESSNESS, WITHOUT_TOOLS = 0.5, 0.4, 0.2
CONTEXT = 512
BATCH, AT_FIRST, EASY_AT_LAST = 32, 7 / 12, 0.8
"""Chats of a step; the part of the steps with questions as in the task; the share of easy ones after it."""


def careless_chat(question: Question, rng: random.Random) -> str:
    """A question, perhaps a call with its result, and the answer. One in five chats has no tools."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
    answer, tools = question.answer, TOOLS if rng.random() >= WITHOUT_TOOLS else None
    if tools and rng.random() < CALLS:
        expression = question.expression
        if rng.random() < CARELESSNESS:
            first, sign, second = expression.split()
            expression = f"{rng.randint(1, 99)} {sign} {second}" if rng.random() < 0.5 else f"{first} {sign} {first}"
        answer = calculate(expression)
        function = {"name": "calculate", "arguments": {"expression": expression}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"id": "0", "function": function}]})
        messages.append({"role": "tool", "content": answer})
    return chat_text([*messages, {"role": "assistant", "content": answer}], tools)


def chats(seed: int, share: float = EASY) -> Iterator[str]:
    """Endless chats about questions that are not held out, of which ``share`` are easy."""
    rng, excluded = random.Random(seed), frozenset(question.text for question in held_out_questions())
    return (careless_chat(question, rng) for question in random_questions(seed, excluded=excluded, share=share))


def main() -> None:
    """Make, warm up and save."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    arguments.add_argument("--steps", type=int, default=1200, help="warm-up steps")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    torch.set_num_threads(1)  # more threads sum in another order, and the weights would differ
    vocabulary = Chats(islice(chats(options.seed), 2000), CONTEXT, min_frequency=25)
    first = islice(chats(options.seed), BATCH * round(AT_FIRST * options.steps))
    source = chain(first, chats(options.seed + 1, EASY_AT_LAST))
    policy = vocabulary.policy(options.seed)
    for step, loss in enumerate(vocabulary.imitate(policy, source, options.steps, BATCH), 1):
        if step % 100 == 0:
            print(f"step {step}/{options.steps}  loss {loss:.3f}", flush=True)
    print(f"{options.out}: {vocabulary.save(policy, options.out):,} parameters")


if __name__ == "__main__":
    main()
