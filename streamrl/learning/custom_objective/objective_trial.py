"""Trial of ``objective.function`` in a process of its own, ``promises``. The dry run and ``streamrl objective test``
call ``try_objective``, which imports neither torch nor the user's code."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from streamrl.base.types import Texts
from streamrl.recipe.objective import Objective, OffPolicy
from streamrl.recipe.throwaway_process import run_throwaway

TRIAL_TIMEOUT_S = 120.0


class Promise(Struct, frozen=True, kw_only=True):
    """Promise of a run that a loss may break.

    ``holds``: whether the loss keeps it;
    ``text``: meaning of the promise, or the reason why it is broken and the remedy;
    ``error``: largest relative difference (None: the promise is yes or no);
    ``needed``: whether a run is refused without it."""

    name: str
    holds: bool
    text: str
    error: float | None = None
    needed: bool = True


class ObjectiveTrial(Struct, frozen=True, kw_only=True):
    """Result of a trial.

    ``parts``: parts of an objective that the object is taken for, in words;
    ``problems``: reasons why no run can use the object;
    ``promises``: promises that were checked; empty where there are problems."""

    parts: Texts = ()
    problems: Texts = ()
    promises: tuple[Promise, ...] = ()

    @property
    def refusals(self) -> Texts:
        """Problems, and promises that a run needs and the object breaks."""
        broken = [promise for promise in self.promises if promise.needed and not promise.holds]
        return self.problems + tuple(f'"{promise.name}" does not hold: {promise.text}' for promise in broken)


def try_objective(
    objective: Objective, off_policy: OffPolicy, timeout_s: float = TRIAL_TIMEOUT_S, *, sizes_vary: bool = False
) -> ObjectiveTrial:
    """Load the object of ``objective.function`` in a child process, and compare its gradients over random batches.
    Blocking, a few seconds. ``sizes_vary``: whether groups differ in size, which must not scale advantages then."""
    argument = msgspec.json.encode((objective, off_policy, sizes_vary)).decode()
    child = run_throwaway("streamrl.learning.custom_objective.promises", [argument], timeout_s)
    if child.written and not child.failure:
        return msgspec.msgpack.decode(child.written, type=ObjectiveTrial)
    problem = f'"{objective.function}" ended its process ({child.failure or "exit code 0"}): import it by hand'
    if child.late:
        problem = f'"{objective.function}" gave no answer within {timeout_s:g} s: move slow work out of it'
    return ObjectiveTrial(problems=(problem,))
