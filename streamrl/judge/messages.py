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

    def after(self, past: JudgeReport) -> JudgeReport:
        """The report with the counters of a judge before this one added."""
        return JudgeReport(
            questions=self.questions + past.questions,
            batches=self.batches + past.batches,
            waited_s=self.waited_s + past.waited_s,
            awake_s=self.awake_s + past.awake_s,
            waiting=self.waiting,
            inside=self.inside,
        )


JudgeOrder = ActorLoad
JudgeEvent = JudgeReady | JudgeReport
