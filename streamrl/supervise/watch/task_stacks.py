"""Where every coroutine of an event loop stands, and every thread of a process: text for people."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterable
from types import FrameType

LONGEST_TEXT = 1 << 20
"""Characters: a run has thousands of tasks, most of them alike."""


def task_stacks() -> str:
    """Of all tasks of the running loop; tasks that stand at the same place are told once, with their number."""
    places: dict[str, list[str]] = {}
    for task in asyncio.all_tasks():
        places.setdefault(_stack_of(task), []).append(task.get_name())
    parts = []
    for stack, names in sorted(places.items(), key=lambda item: -len(item[1])):
        shown = ", ".join(sorted(names)[:3])
        parts.append(f"{len(names)} x {shown}{', ...' if len(names) > 3 else ''}\n{stack}")
    return _cut(parts)


def thread_stacks(frames: dict[int, FrameType] | None = None) -> str:
    """Of all threads of this process. Safe in any thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames() if frames is None else frames
    parts = [f"thread {names.get(n, n)}\n{''.join(traceback.format_stack(frame))}" for n, frame in frames.items()]
    return _cut(parts)


def _stack_of(task: asyncio.Task[object]) -> str:
    """Along the chain of awaits, the outermost first. ``Task.get_stack`` ends at the first frame of an agen or of C."""
    lines: list[str] = []
    waiting: object = task.get_coro()
    while waiting is not None:
        frame = _attribute(waiting, "frame")
        if isinstance(frame, FrameType):
            lines += traceback.format_stack(frame, limit=1)
        deeper = _attribute(waiting, "await")
        if deeper is None and frame is None:
            lines.append(f"  waits in {type(waiting).__name__}\n")
        waiting = deeper
    return "".join(lines)


def _attribute(awaited: object, name: str) -> object:
    """``cr_frame``, ``gi_frame``, ``ag_frame``: coroutines, generators and async generators name theirs differently."""
    for prefix in ("cr", "gi", "ag"):
        found = getattr(awaited, f"{prefix}_{name}", None)
        if found is not None:
            return found
    return getattr(awaited, "gi_yieldfrom", None) if name == "await" else None


def _cut(parts: Iterable[str]) -> str:
    text = "\n".join(parts)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}\n... cut: {len(text)} characters"
