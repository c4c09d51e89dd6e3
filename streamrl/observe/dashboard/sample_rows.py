"""Completions of a run that a filter takes: those that its steps trained on, and those of its evaluations."""

from __future__ import annotations

import math
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from streamrl.base.errors import UNDECODABLE
from streamrl.base.line_file import open_rotated
from streamrl.observe.follow.run_files import RunFiles

MOST_ROWS = 200
"""Of one answer."""


class _Key(msgspec.Struct, gc=False):
    """The part of a line that filters look at."""

    prompt_id: str = ""
    step: int = 0
    reward: float | None = None
    prompt: str = ""


class SampleFilter(msgspec.Struct, frozen=True, kw_only=True):
    """``step`` None: any; rewards from ``least`` to ``most``; ``prompt``: the id of a prompt, or a part of its text."""

    step: int | None = None
    least: float = -math.inf
    most: float = math.inf
    prompt: str = ""

    def takes(self, key: _Key) -> bool:
        """Return whether a line is asked for. Without a reward it is, unless rewards are asked for."""
        bounded = self.least > -math.inf or self.most < math.inf
        if self.step not in (None, key.step) or (key.reward is None and bounded):
            return False
        return (key.reward is None or self.least <= key.reward <= self.most) and (
            not self.prompt or self.prompt == key.prompt_id or self.prompt in key.prompt
        )


def sample_rows(files: RunFiles, wanted: SampleFilter, offset: int, limit: int) -> dict[str, Any]:
    """Completions from ``offset`` on, at most ``limit``, those of the last step first, each with what its line
    has beside token ids; ``total``: of all there are."""
    decode = msgspec.json.Decoder(_Key).decode
    found: list[tuple[int, int, int, int]] = []  # negative step, file, place in the file, bytes
    with ExitStack() as stack:
        opened = [("training", stack.enter_context(file)) for file in open_rotated(files.samples)]
        for step, path in files.evaluations().items():
            if wanted.step in (None, step):
                with suppress(OSError):
                    opened.append(("evaluation", stack.enter_context(path.open("rb"))))
        for number, (_, file) in enumerate(opened):
            place = 0
            for line in file:
                with suppress(*UNDECODABLE):
                    key = decode(line)
                    if wanted.takes(key):
                        found.append((-key.step, number, place, len(line)))
                place += len(line)
        found.sort()
        rows = []
        for negative, number, place, length in found[max(offset, 0) :][: min(max(limit, 0), MOST_ROWS)]:
            source, file = opened[number]
            file.seek(place)
            whole = msgspec.json.decode(file.read(length), type=dict[str, Any])
            kept = {name: value for name, value in whole.items() if not name.endswith("token_ids")}
            rows.append({"id": f"{source}-{-negative}-{place}", "source": source} | kept)
    return {"total": len(found), "rows": rows}
