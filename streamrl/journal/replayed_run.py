"""A run rebuilt from its event log, for people: what control knew, what was in flight, and what it waited for."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import msgspec

from streamrl.buffers.rollout_buffer import Group
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.actions import ControlAction
from streamrl.control.state import ControlState
from streamrl.journal.event_log import LogEntry, read_log
from streamrl.observe.report.wait_reason import ShellView, WaitReason, wait_reason

SHOWN_GROUPS = 10


class Replayed(msgspec.Struct, kw_only=True):
    """``events``: how many were replayed; ``launched_s``: when each group was launched; ``decisions``: the newest, with
    their time."""

    state: ControlState
    run_id: str
    events: int = 0
    time_s: float = 0.0
    launched_s: dict[int, float] = {}
    decisions: deque[tuple[float, do.Explain]] = msgspec.field(default_factory=lambda: deque(maxlen=5))
    waits: WaitReason = WaitReason.ENGINE_START
    waits_since: tuple[int, float] = (0, 0.0)


def replay_run(log: Path) -> Replayed:
    """Replay ``log``. Raises ``StreamRLError`` for a log that cannot be read."""
    header, entries = read_log(log)
    run = Replayed(state=ControlState(header.settings), run_id=header.run_id)
    for entry in entries:
        _note(run, entry, tuple(run.state.handle(entry.event)))
    return run


def _note(run: Replayed, entry: LogEntry, actions: tuple[ControlAction, ...]) -> None:
    run.events, run.time_s = entry.n + 1, entry.time_s
    for action in actions:
        if isinstance(action, do.LaunchGroup):
            run.launched_s[action.group_id] = entry.time_s
        elif isinstance(action, do.Explain):
            run.decisions.append((entry.time_s, action))
    if isinstance(entry.event, on.BatchTrained):
        run.launched_s = {g: run.launched_s.get(g, entry.time_s) for g in run.state.buffer.groups}
    # The log does not say how many run and how many are scored: of what is open, all may be sampled.
    open_members = sum(g.open for g in run.state.buffer.untrained.values()) if _is_rare(entry) else 1
    reason = wait_reason(run.state, ShellView(sampling=open_members))
    if reason is not run.waits:
        run.waits, run.waits_since = reason, (entry.n, entry.time_s)


def _is_rare(entry: LogEntry) -> bool:
    return not isinstance(entry.event, on.TrajectoryScored | on.TrajectoryFailed | on.TrajectoryCut)


def describe(run: Replayed) -> list[str]:
    """The state after the last event, a line each."""
    batch, supply = run.state.batch, run.state.supply
    told = {
        "accounting": _accounting(run.state),
        "versions": _versions(run.state),
        "open batch": f"number {batch.batch_id}: {batch.samples} of {batch.target} trajectories in {batch.groups} "
        f"groups, {run.state.round_kind} round, {'closed: the trainer steps' if batch.closed else 'open'}",
        "prompts": f"{supply.drawn_prompts:,} drawn, {len(supply.waiting)} wait, {len(supply.queue)} lost and queued"
        + (f", {supply.asked} asked for" if supply.asked else "")
        + (", the source is exhausted" if supply.exhausted else ""),
        "waits for": f"{run.waits}, since event {run.waits_since[0]} ({run.time_s - run.waits_since[1]:.1f} s)",
    }
    if run.state.stopping is not None or run.state.finished:
        told["ending"] = run.state.stopping or "finished"
    lines = [f"run {run.run_id}: {run.events:,} events, {run.time_s:,.1f} s after its start"]
    lines += [f"{name:<13} {text}" for name, text in told.items()]
    lines += _in_flight(run)
    lines += [f"{'decided':<13} {time_s:,.1f} s  {d.subject}: {d.reason}" for time_s, d in run.decisions]
    return lines


def _accounting(state: ControlState) -> str:
    counts = state.accounting()
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts.dropped.items())
    dropped = f"dropped {sum(counts.dropped.values()):,}" + (f" ({reasons})" if reasons else "")
    text = f"issued {counts.issued:,} = trained {counts.trained:,} + {dropped} + in flight {counts.in_flight:,}"
    return text if counts.balanced else f"{text}   NOT BALANCED: a bug of streamrl"


def _versions(state: ControlState) -> str:
    parts = [f"trainer {state.trainer_version}", f"live {'none yet' if state.live_version < 0 else state.live_version}"]
    under_way = {
        "pushing": state.publishing,
        "evaluating": state.due.evaluating,
        "writing a checkpoint of": state.due.checkpointing,
    }
    return ", ".join(parts + [f"{what} {version}" for what, version in under_way.items() if version is not None])


def _in_flight(run: Replayed) -> list[str]:
    groups = sorted(run.state.buffer.groups.values(), key=lambda g: run.launched_s.get(g.group_id, 0.0))
    if not groups:
        return [f"{'in flight':<13} nothing"]
    lines = [f"{'in flight':<13} {len(groups)} groups, the oldest first"]
    for group in groups[:SHOWN_GROUPS]:
        age_s = run.time_s - run.launched_s.get(group.group_id, run.time_s)
        lines.append(
            f"  group {group.group_id} of prompt {group.prompt_id!r}, attempt {group.attempt}: {_stage(group)}; "
            f"launched {age_s:.1f} s ago at version {group.launch_version}, oldest token {group.oldest_version}"
        )
    if len(groups) > SHOWN_GROUPS:
        lines.append(f"  and {len(groups) - SHOWN_GROUPS} more")
    return lines


def _stage(group: Group) -> str:
    if group.batch_id is not None:
        return f"in batch {group.batch_id}"
    if group.open:
        return f"{group.open} of {len(group.members)} {'held' if group.held else 'not scored'}"
    return "ready"
