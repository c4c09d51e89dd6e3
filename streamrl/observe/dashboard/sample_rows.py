"""Completions of a run that pass a filter: completions that its steps trained on, and completions of its evaluations.
The server of ``streamrl dashboard`` and ``streamrl report`` call ``sample_rows`` in their process."""

from __future__ import annotations

import math
from contextlib import ExitStack, suppress

from msgspec import Struct, json

from streamrl.base.errors import UNDECODABLE
from streamrl.base.line_file import bounded_lines, decoded_lines, open_regular, open_rotated
from streamrl.base.types import JsonObject
from streamrl.observe.run_files.run_reader import RunFiles

MOST_ROWS = 200
"""Rows of one answer."""


class _Key(Struct, gc=False):
    """The fields of a line that a filter needs."""

    prompt_id: str = ""
    step: int = 0
    reward: float | None = None
    prompt: str = ""


class SampleFilter(Struct, frozen=True, kw_only=True):
    """A filter of completions, from the parameters of a request. ``step``: None for any step. ``least`` and ``most``:
    range of rewards. ``prompt``: id of a prompt, or a part of its text."""

    step: int | None = None
    least: float = -math.inf
    most: float = math.inf
    prompt: str = ""

    def takes(self, key: _Key) -> bool:
        """Return whether a line passes. A line without a reward passes only where the rewards have no bounds."""
        bounded = self.least > -math.inf or self.most < math.inf
        if self.step not in (None, key.step) or (key.reward is None and bounded):
            return False
        return (key.reward is None or self.least <= key.reward <= self.most) and (
            not self.prompt or self.prompt == key.prompt_id or self.prompt in key.prompt
        )


def sample_rows(files: RunFiles, sample_filter: SampleFilter, offset: int, limit: int) -> JsonObject:
    """Return up to ``limit`` completions from ``offset`` on, the last step first, with the fields of their lines but
    for token ids, and the number of all completions that pass the filter (``total``)."""
    decode = json.Decoder(_Key).decode
    matches = []  # negative step, index of the source, offset in its file, bytes
    with ExitStack() as stack:
        sources = [("training", stack.enter_context(file)) for file in open_rotated(files.samples)]
        for step, path in files.evaluations().items():
            if sample_filter.step in (None, step):
                with suppress(OSError):
                    sources.append(("evaluation", stack.enter_context(open_regular(path))))
        for index, (_, file) in enumerate(sources):
            for line in bounded_lines(file):
                with suppress(*UNDECODABLE):
                    key = decode(line)
                    if sample_filter.takes(key):
                        matches.append((-key.step, index, file.tell() - len(line), len(line)))
        matches.sort()
        rows = []
        for negative_step, index, place, length in matches[max(offset, 0) :][: min(max(limit, 0), MOST_ROWS)]:
            source, file = sources[index]
            file.seek(place)
            # A field that the filter does not need may hold what is no text.
            for line_fields in decoded_lines([file.read(length)], JsonObject):
                fields = {name: value for name, value in line_fields.items() if not name.endswith("token_ids")}
                rows.append({"id": f"{source}-{-negative_step}-{place}", "source": source} | fields)
    return {"total": len(matches), "rows": rows}
