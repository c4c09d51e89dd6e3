"""Completions of a run that a filter takes: those that its steps trained on, and those of its evaluations."""

from __future__ import annotations

import math
from contextlib import ExitStack, suppress
from typing import IO, Any

import msgspec

from streamrl.base.errors import UNDECODABLE
from streamrl.base.line_file import open_rotated
from streamrl.observe.follow.run_files import RunFiles

MOST_ROWS = 200
"""Of one answer."""


class _Key(msgspec.Struct, gc=False):
    """The part of a line that filters look at: of ``samples.jsonl``, or of an evaluation, whose step is its file's."""

    prompt_id: str = ""
    step: int = 0
    reward: float | None = None
    prompt: str | int = ""
    prompt_text: str = ""


class SampleFilter(msgspec.Struct, frozen=True, kw_only=True):
    """``step`` None: any; rewards from ``least`` to ``most``; ``prompt``: the id of a prompt, or a part of its text."""

    step: int | None = None
    least: float = -math.inf
    most: float = math.inf
    prompt: str = ""

    def takes(self, key: _Key, step: int) -> bool:
        """Return whether a line of ``step`` is asked for. Without a reward it is, unless rewards are asked for."""
        bounded = self.least > -math.inf or self.most < math.inf
        if self.step not in (None, step) or (key.reward is None and bounded):
            return False
        text = key.prompt if isinstance(key.prompt, str) else key.prompt_text
        return (key.reward is None or self.least <= key.reward <= self.most) and (
            not self.prompt or self.prompt == key.prompt_id or self.prompt in text
        )


def sample_rows(files: RunFiles, wanted: SampleFilter, offset: int, limit: int) -> dict[str, Any]:
    """Completions from ``offset`` on, at most ``limit``, those of the last step first; ``total``: of all there are."""
    decode = msgspec.json.Decoder(_Key).decode
    found: list[tuple[int, int, int, int]] = []  # negative step, file, place in the file, bytes
    with ExitStack() as stack:
        opened: list[tuple[IO[bytes], int | None]] = [
            (stack.enter_context(file), None) for file in open_rotated(files.samples)
        ]
        for step, path in files.evaluations().items():
            if wanted.step in (None, step):
                with suppress(OSError):
                    opened.append((stack.enter_context(path.open("rb")), step))
        for number, (file, of_step) in enumerate(opened):
            place = 0
            for line in file:
                with suppress(*UNDECODABLE):
                    key = decode(line)
                    step = key.step if of_step is None else of_step
                    if wanted.takes(key, step):
                        found.append((-step, number, place, len(line)))
                place += len(line)
        found.sort()
        rows = []
        for negative, number, place, length in found[max(offset, 0) :][: min(max(limit, 0), MOST_ROWS)]:
            file, of_step = opened[number]
            file.seek(place)
            line = msgspec.json.decode(file.read(length))
            source = "training" if of_step is None else "evaluation"
            rows.append({"id": f"{source}-{-negative}-{place}", "source": source} | _row(line, -negative))
    return {"total": len(found), "rows": rows}


def _row(line: dict[str, Any], step: int) -> dict[str, Any]:
    """A line of either file in one form, with what else it has of tokens."""
    evaluation = "policy_version" in line
    row = {
        "step": step,
        "prompt_id": line.get("prompt_id", ""),
        "prompt": line.get("prompt_text", "") if evaluation else line.get("prompt", ""),
        "completion": line.get("text", ""),
        "reward": line.get("reward"),
        "parts": line.get("reward_parts" if evaluation else "rewards", {}),
        "finish_reason": line.get("finish_reason", ""),
        "tokens": line.get("tokens", len(line.get("token_ids", ()))),
        "versions": line.get("versions", [line["policy_version"]] if "policy_version" in line else []),
        "chosen": line.get("chosen", line.get("set", "")),
        "failure": line.get("failure", ""),
    }
    return row | {name: line[name] for name in ("token_texts", "logprobs") if name in line}
