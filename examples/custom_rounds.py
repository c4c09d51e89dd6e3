"""A round policy of one's own, in one file: rounds that begin wide and end narrow.

In a recipe:

    [rollout]
    rounds = "custom"
    policy = "examples/custom_rounds.py:EarlyRace"

The first ``RACED_STEPS`` steps launch a quarter more prompts than a batch takes and keep the first that finish; what
lost is sampled in the rounds after them, which race nothing. Everything that a policy sees and may answer is in
``streamrl/control/round_policy.py``."""

import math

from streamrl.base.types import DropReason
from streamrl.control.round_policy import Candidate, Launch, Remainder, RoundView, Source, StatelessRounds
from streamrl.control.settings import ControlSettings

RACED_STEPS = 20
WIDTH = 1.25


class EarlyRace(StatelessRounds):
    """On-policy: what is not in a full batch is sampled again under later weights."""

    on_policy = True
    drop_reason = DropReason.LOST_RACE

    def __init__(self, settings: ControlSettings) -> None:
        self._batch = settings.batch_trajectories

    def launch(self, view: RoundView) -> Launch | None:
        """A race while the run is young; afterwards the prompts that lost, and then fresh ones."""
        if not view.at_barrier:
            return None
        prompts = view.target // view.group_size
        racing = view.trainer_version < RACED_STEPS and not view.exhausted
        wanted = (math.ceil(WIDTH * prompts) if racing else prompts) - view.joined - view.untrained
        source = Source.QUEUE if view.queued and not racing else Source.FRESH
        if source is Source.QUEUE:
            wanted = min(wanted, view.queued)
        if wanted <= 0:
            return None
        kind = "raced" if racing else "plain"
        return Launch(groups=wanted, source=source, size=view.group_size, round_kind=kind)

    def may_join(self, view: RoundView, candidate: Candidate) -> bool:
        """The groups that are ready first."""
        return True

    def remainder(self, view: RoundView) -> Remainder:
        """Unfinished groups are requeued."""
        return Remainder.REQUEUE

    def slots(self) -> int:
        """A race, and the one group by which it is rounded up."""
        return math.ceil(WIDTH * self._batch) + self._batch
