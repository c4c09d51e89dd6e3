"""A taskset of verifiers 0.4: the questions of examples/calculator, answered in one turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf

QUESTIONS = Path(__file__).parent.parent / "calculator" / "train.jsonl"


class Question(vf.TaskData):
    """A question, as ``prompt``, and its answer."""

    answer: str


class Sum(vf.Task[Question]):
    """One question. The reward is 1 for the right answer."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the last reply is the answer."""
        return float((trace.last_reply or "").strip() == self.data.answer)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    """All questions of the file."""

    def load(self) -> Iterator[Sum]:
        """The tasks in the order of the file, which a row names by their place."""
        for line in QUESTIONS.read_text().splitlines():
            yield Sum(Question(**json.loads(line)), self.config.task)


__all__ = ["Sums"]
