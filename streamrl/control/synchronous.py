"""One batch of groups under the live weights, wait for all of them, step, push, repeat. The baseline."""

from __future__ import annotations

from streamrl.base.types import DropReason
from streamrl.control.round_policy import Candidate, Launch, Remainder, RoundView, StatelessRounds
from streamrl.control.settings import ControlSettings


class SynchronousRounds(StatelessRounds):
    """Strictly on-policy. A dropped group is refilled inside of the round."""

    on_policy = True

    def __init__(self, settings: ControlSettings) -> None:
        self._batch = settings.batch_trajectories

    def launch(self, view: RoundView) -> Launch | None:
        if not view.at_barrier:
            return None
        # A queue is there when another policy ran before (``auto``): what waits longest goes first.
        groups, source = view.queue_first(view.seats // view.group_size - view.untrained)
        return Launch(groups=groups, source=source, size=view.group_size, round_kind="synchronous")

    def may_join(self, view: RoundView, candidate: Candidate) -> bool:
        return True

    def remainder(self, view: RoundView) -> Remainder:
        return Remainder.KEEP

    @property
    def losing(self) -> DropReason:
        return DropReason.CUT

    def slots(self) -> int:
        return self._batch
