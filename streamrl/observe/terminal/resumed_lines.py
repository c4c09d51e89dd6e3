"""What a run that goes on from its journal tells its user: what it has, and what it did to be where it was."""

from __future__ import annotations

from streamrl.base.run_events import RunResumed


def resumed_lines(event: RunResumed) -> list[str]:
    """For the terminal, a line each."""
    has = {name: f"{count:,}" for name, count in event.restored.items()}
    step = f"step {event.policy_version}"
    events = f"{has['events']} events, {has['replayed']} of them replayed"
    waits = f"{has['unscored']} that wait for their reward, {has['partial']} in part, {has['queued']} prompts queued"
    lines = [
        f"resumed at {step}: {events}; {has['trained']} trajectories trained, {has['drawn']} prompts drawn so far",
        f"  kept     {has['scored']} trajectories scored, {waits}; sampled again: {has['again']}",
    ]
    if event.trained_again:
        again = f"{event.trained_again} batches of the journal trained again"
        lines.append(f"  trainer  began with step {event.held_version}; {again}")
    if event.same_weights is True:
        lines.append(f"  weights  of {step} are bit for bit those that were published before")
    elif event.same_weights is False:
        why = "streaming adds up in the order of arrival"
        lines.append(f"  weights  of {step} differ from those published before ({why}); engines get the new ones")
    return lines
