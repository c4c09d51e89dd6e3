"""The reward that an agent prints. ``agent_process.py`` passes the lines of the program's stdout as they come. Pure."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from msgspec import json

from streamrl.base.errors import UNDECODABLE
from streamrl.base.printable import one_line

LARGEST_LINE = 16 << 20
"""Largest number of bytes of a line that is read."""
_SHOWN_CHARACTERS = 200
_LARGEST_NUMBER = 64
_TRUTH_VALUES = {"true": True, "false": False}


class PrintedReward:
    """The last reward among the lines of an agent.

    ``value``: reward; None: there is none;
    ``problem``: reason why the newest reward cannot be one; empty: it can;
    ``last_line``: end of the newest line."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.problem = ""
        self.last_line = ""
        self._object = bytearray()
        """Lines of an object that stands in several lines: inner lines are indented."""

    @property
    def remark(self) -> str:
        """Reason why there is no reward, with what was read; empty: there is one."""
        if self.value is not None:
            return ""
        remedy = f'print a number, or an object with "reward", in JSON and at most {LARGEST_LINE} bytes'
        return f'the agent {self.problem or "printed no reward"}; its last line is "{self.last_line}": {remedy}'

    def read(self, line: bytes) -> None:
        """Take the reward of ``line``, if it has one."""
        if self._object and line.startswith((b" ", b"\t")):
            self._object += line
            return
        text = line.strip()
        if not text:
            return
        self.last_line = one_line(text[-_SHOWN_CHARACTERS:].decode(errors="replace"))
        if text == b"}":
            text = bytes(self._object) + text
        self._object = bytearray(text[: text == b"{"])
        value: Any = ""
        if len(text) <= _LARGEST_NUMBER:  # Python's True and nan are no JSON
            value = text.decode(errors="replace")
        # Also where it is no JSON, such as {"reward": NaN}: its author meant it as the reward.
        is_reward = text.startswith(b"{") and (b'"reward"' in text or b"'reward'" in text)
        if len(line) <= LARGEST_LINE:
            with suppress(*UNDECODABLE):
                value = json.decode(text)
                is_reward = isinstance(value, dict) and "reward" in value
                value = value["reward"] if is_reward else value
        number = _number(value)
        if number is None and not is_reward:
            return
        self.problem = ""
        if value is not None and (number is None or not math.isfinite(number)):
            self.problem = "printed a reward that is no finite number"
            number = None
        self.value = number


def _number(value: Any) -> float | None:
    """Return a number or a truth value, also one in a text; None: ``value`` is neither."""
    if isinstance(value, str):
        value = _TRUTH_VALUES.get(value.strip().lower(), value)
    with suppress(ValueError, TypeError, OverflowError):
        return float(value)
    return None
