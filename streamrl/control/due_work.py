"""What falls due with a version that goes live: evaluations and checkpoints. One evaluation at a time, each once.

An evaluation shares the engines with the rollout of the next batch, and the batch may be trained meanwhile: only the
push waits. So an evaluation falls due with a version that goes live, begins at once, and there is never a second one.
"""

from __future__ import annotations

from streamrl.base.types import Record
from streamrl.control import actions as do
from streamrl.control.actions import ControlAction
from streamrl.control.settings import ControlSettings


class KeptDueWork(Record, frozen=True):
    """A ``DueWork`` as a record. ``evaluated``: the last version and limit that were ordered; ``saved_version``: the
    last version that was ordered to be written."""

    evaluating: int | None = None
    checkpointing: int | None = None
    evaluated: tuple[int, int] | None = None
    saved_version: int = -1
    final_ordered: bool = False


class DueWork:
    """``evaluating``, ``checkpointing``: the version that is evaluated or written now."""

    def __init__(self, settings: ControlSettings) -> None:
        self._settings = settings
        self.evaluating: int | None = None
        self.checkpointing: int | None = None
        self._evaluated: tuple[int, int] | None = None
        self._saved_version = -1
        self._final_ordered = False

    @property
    def busy(self) -> bool:
        """Something that fell due is not done."""
        return self.evaluating is not None or self.checkpointing is not None

    @property
    def limit(self) -> int:
        """Held-out prompts of the evaluation that runs, or of the last one (0: all)."""
        return 0 if self._evaluated is None else self._evaluated[1]

    def evaluation_done(self, version: int) -> bool:
        """The answer to ``Evaluate``. False, and nothing changes, where it was taken before."""
        if self.evaluating != version:
            return False
        self.evaluating = None
        return True

    def checkpoint_done(self, version: int) -> bool:
        """The answer to ``WriteCheckpoint``. False, and nothing changes, where it was taken before."""
        if self.checkpointing != version:
            return False
        self.checkpointing = None
        return True

    def keep(self) -> KeptDueWork:
        """All of it."""
        return KeptDueWork(
            evaluating=self.evaluating,
            checkpointing=self.checkpointing,
            evaluated=self._evaluated,
            saved_version=self._saved_version,
            final_ordered=self._final_ordered,
        )

    def restore(self, kept: KeptDueWork) -> None:
        """The inverse."""
        self.evaluating, self.checkpointing = kept.evaluating, kept.checkpointing
        self._evaluated, self._saved_version = kept.evaluated, kept.saved_version
        self._final_ordered = kept.final_ordered

    def version_live(self, version: int, *, last: bool, draining: bool, actions: list[ControlAction]) -> None:
        """Order what falls due with ``version``; what is due at the end, so with the ``last`` one, is left to
        ``at_end``."""
        settings = self._settings
        due = settings.evaluate_every and version % settings.evaluate_every == 0
        if due and not (last and settings.evaluate_at_end):
            self.evaluate(version, settings.evaluate_limit, draining=draining, actions=actions)
        if settings.checkpoint_every and version % settings.checkpoint_every == 0 and not last:
            self._checkpoint(version, actions)

    def at_end(self, version: int, *, draining: bool, actions: list[ControlAction]) -> None:
        """Order what is due when nothing more will be trained; once."""
        if self._final_ordered:
            return
        self._final_ordered = True
        if self._settings.evaluate_at_end:
            self.evaluate(version, 0, draining=draining, actions=actions)
        if self._settings.checkpoint_at_end:
            self._checkpoint(version, actions)

    def continued(self) -> None:
        """The run goes on after an end."""
        self._final_ordered = False

    def evaluate(self, version: int, limit: int, *, draining: bool, actions: list[ControlAction]) -> None:
        """``version``, on the first ``limit`` held-out prompts (0: all); not in a drain, and not a second time."""
        if draining or self._evaluated == (version, limit):
            return
        self.evaluating = version
        self._evaluated = (version, limit)
        actions.append(do.Evaluate(policy_version=version, limit=limit))

    def _checkpoint(self, version: int, actions: list[ControlAction]) -> None:
        if self._saved_version == version:
            return
        self.checkpointing = self._saved_version = version
        actions.append(do.WriteCheckpoint(policy_version=version))
