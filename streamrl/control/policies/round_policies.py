"""Control of a recipe: the round policies by name, and the core with the policies that it asks. A new round policy is a
file of its own, or a class of the user's (``rollout.policy``)."""

from __future__ import annotations

from collections.abc import Callable

from streamrl.base.errors import RecipeError
from streamrl.control.continuous import ContinuousRounds
from streamrl.control.machine import Control
from streamrl.control.model import Snapshot
from streamrl.control.policies.auto import AutoRounds
from streamrl.control.policies.deterministic import DeterministicControl
from streamrl.control.policies.group_sizing import make_group_sizer
from streamrl.control.policies.length_sorted import LengthSortedRounds
from streamrl.control.policies.tail_batching import TailBatchingRounds
from streamrl.control.round_policy import GroupSizer, RoundPolicy
from streamrl.control.settings import ControlSettings
from streamrl.control.steering.changes import steering_with
from streamrl.control.steering.live_keys import with_values
from streamrl.control.synchronous import SynchronousRounds
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.user_code import load_user_object

ROUND_POLICIES: dict[RoundKind, Callable[[ControlSettings], RoundPolicy]] = {
    RoundKind.SYNCHRONOUS: SynchronousRounds,
    RoundKind.TAIL_BATCHING: TailBatchingRounds,
    RoundKind.LENGTH_SORTED: LengthSortedRounds,
    RoundKind.CONTINUOUS: ContinuousRounds,
    RoundKind.AUTO: AutoRounds,
}

_ASKED = tuple(sorted(name for name in {*vars(RoundPolicy), *RoundPolicy.__annotations__} if not name.startswith("_")))
"""What control asks of a policy: a run without one of them would fail hours later, when a checkpoint is written."""


def make_round_policy(settings: ControlSettings) -> RoundPolicy:
    """The policy of ``settings.rounds``. Raises ``RecipeError`` where ``settings.policy`` does not make one."""
    if settings.rounds is not RoundKind.CUSTOM:
        return ROUND_POLICIES[settings.rounds](settings)
    made = load_user_object(settings.policy)
    if not isinstance(made, type):
        raise RecipeError(f'rollout.policy: "{settings.policy}" is a {type(made).__name__}: name a class')
    policy: RoundPolicy = made(settings)
    missing = [name for name in _ASKED if not hasattr(policy, name)]
    if missing:
        raise RecipeError(
            f'rollout.policy: "{settings.policy}" has no {", ".join(missing)}: see streamrl/control/round_policy.py'
        )
    return policy


def make_control(settings: ControlSettings, snapshot: Snapshot | None = None) -> Control:
    """Control that decides as ``settings`` say, or, from ``snapshot`` on, as they were changed since. Raises
    ``ValueError`` or ``StreamRLError`` where the settings, or they and the snapshot, do not fit together."""
    made = DeterministicControl if settings.deterministic else Control
    if snapshot is not None:
        settings = with_values(settings, snapshot.state.steering.changed)
    return made(settings, *_policies(settings), snapshot, steering_with(_policies))


def _policies(settings: ControlSettings) -> tuple[RoundPolicy, GroupSizer]:
    sizer = make_group_sizer(settings.group_sizing, settings.group_size, settings.seed, settings.steps)
    return make_round_policy(settings), sizer
