"""Between the controller and the run's own judge: ``ActorLoad`` there, ``JudgeReady`` and ``JudgeReport`` back."""

from __future__ import annotations

from streamrl.base.messages import Message


class ActorLoad(Message, frozen=True):
    """``share``: of what the actor's engines can run at once, how much they run or have waiting (0 to 1)."""

    share: float


class JudgeReady(Message, frozen=True):
    """First message of a judge to a controller (again after a restart of either): it answers questions."""

    max_model_len: int


class JudgeReport(Message, frozen=True):
    """What a judge did since it said that it is ready, and what it does now. ``batches``: times it was woken, or began
    again with nobody inside. ``waited_s``: seconds that questions waited to be let in, together; ``awake_s``: that it
    was not at rest. ``waiting``, ``inside``: questions that wait, and that it is answering."""

    questions: int = 0
    batches: int = 0
    waited_s: float = 0.0
    awake_s: float = 0.0
    waiting: int = 0
    inside: int = 0


def with_counters(now: JudgeReport, of: JudgeReport, *, sign: int = 1) -> JudgeReport:
    """``now`` with the counters of another report added, or with ``sign`` -1 taken off."""
    return JudgeReport(
        questions=now.questions + sign * of.questions,
        batches=now.batches + sign * of.batches,
        waited_s=now.waited_s + sign * of.waited_s,
        awake_s=now.awake_s + sign * of.awake_s,
        waiting=now.waiting,
        inside=now.inside,
    )


JudgeOrder = ActorLoad
JudgeEvent = JudgeReady | JudgeReport
