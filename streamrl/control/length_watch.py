"""Who learns from lengths: the round policy, the group sizing and the prediction of a prompt's length. Pure."""

from __future__ import annotations

from streamrl.base.types import FinishReason, Record
from streamrl.buffers.rollout_buffer import Group
from streamrl.control.actions import Explain
from streamrl.control.round_policy import GroupObserved, RoundPolicy
from streamrl.policies.group_sizing import GroupLengths, GroupSizer
from streamrl.policies.length_prediction import PromptLengthPredictor


class KeptLengths(Record, frozen=True):
    """A ``LengthWatch`` as a record. ``complete``: groups that ended since the last step."""

    complete: tuple[GroupLengths, ...] = ()
    sizing_figures: dict[str, float] = {}


class LengthWatch:
    """Tells each of them what ended, before any filter: what is measured on trained groups alone would miss those that
    all fail or all succeed. ``sizing_figures``: metrics of the group sizing as of the last step."""

    def __init__(self, policy: RoundPolicy, sizer: GroupSizer, predictor: PromptLengthPredictor | None) -> None:
        self._policy = policy
        self._sizer = sizer
        self._predictor = predictor
        self._complete: list[GroupLengths] = []
        self.sizing_figures: dict[str, float] = {}

    def keep(self) -> KeptLengths:
        """All of it."""
        return KeptLengths(complete=tuple(self._complete), sizing_figures=dict(self.sizing_figures))

    def restore(self, kept: KeptLengths) -> None:
        """The inverse."""
        self._complete = list(kept.complete)
        self.sizing_figures = dict(kept.sizing_figures)

    def complete(self, group: Group) -> None:
        """Every member of ``group`` ended."""
        members = sorted(group.members.values(), key=lambda m: m.id.sample)
        lengths = tuple(m.tokens for m in members)
        truncated = tuple(m.finish_reason is FinishReason.LENGTH for m in members)
        self._complete.append(GroupLengths(lengths=lengths, truncated=truncated))
        self._tell(group, lengths, sum(truncated), cut_at=0)
        if self._predictor is not None:
            self._predictor.observe(group.ticket.prompt_id, group.ticket.tokens, max(lengths))

    def lost(self, group: Group, longest: int) -> None:
        """``group`` was stopped; ``longest``: the longest completion of its round by then."""
        ended = [m for m in group.members.values() if m.finish_reason is not None]
        truncated = sum(m.finish_reason is FinishReason.LENGTH for m in ended)
        self._tell(group, tuple(m.tokens for m in ended), truncated, cut_at=longest)
        if self._predictor is not None:
            self._predictor.observe(group.ticket.prompt_id, group.ticket.tokens, longest, cut=True)

    def step(self, batches: int = 1) -> Explain | None:
        """Let the group sizing decide after ``batches`` were trained. Returns why, where the user is to read it."""
        before = self._sizer.size
        decision = self._sizer.observe(self._complete, batches)
        self.sizing_figures = decision.figures
        self._complete = []
        if decision.size == before and not decision.notify:
            return None
        return Explain(subject="group_size", reason=decision.reason, figures=decision.figures)

    def _tell(self, group: Group, lengths: tuple[int, ...], truncated: int, *, cut_at: int) -> None:
        self._policy.observe(
            GroupObserved(
                round_kind=group.round_kind,
                size=group.keep,
                lengths=lengths,
                truncated=truncated,
                prompt_tokens=group.ticket.tokens,
                cut=cut_at > 0,
                cut_at=cut_at,
            )
        )
