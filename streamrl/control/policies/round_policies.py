"""Factories of control: round policies by name, and ``Control`` with the policies of its settings.

The controller, the simulator and commands that replay a journal make control here. A new round policy is a file of its
own here, or a class of the user (``rollout.policy``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from streamrl.base.errors import RecipeError
from streamrl.control.machine import Control
from streamrl.control.plain_rounds import ContinuousRounds, SynchronousRounds
from streamrl.control.policies.auto import AutoRounds
from streamrl.control.policies.deterministic import DeterministicControl
from streamrl.control.policies.group_sizing import make_group_sizer
from streamrl.control.policies.length_sorted import LengthSortedRounds
from streamrl.control.policies.tail_batching import TailBatchingRounds
from streamrl.control.round_policy import GroupSizer, RoundPolicy
from streamrl.control.run_state import Snapshot
from streamrl.control.settings import ControlSettings
from streamrl.control.steering.changes import steer
from streamrl.control.steering.live_keys import with_values
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.user_code import load_user_object

ROUND_POLICIES: dict[RoundKind, Callable[[ControlSettings], RoundPolicy]] = {
    RoundKind.SYNCHRONOUS: SynchronousRounds,
    RoundKind.TAIL_BATCHING: TailBatchingRounds,
    RoundKind.LENGTH_SORTED: LengthSortedRounds,
    RoundKind.CONTINUOUS: ContinuousRounds,
    RoundKind.AUTO: AutoRounds,
}

_MEMBERS = tuple(
    sorted(name for name in {*vars(RoundPolicy), *RoundPolicy.__annotations__} if not name.startswith("_"))
)
"""Members that a round policy must have. A run whose policy lacks one would fail hours later, when it writes a
checkpoint."""


def make_round_policy(settings: ControlSettings) -> RoundPolicy:
    """Make the policy of ``settings.rounds``. Raises ``RecipeError`` where ``settings.policy`` is no class of one."""
    if settings.rounds is not RoundKind.CUSTOM:
        return ROUND_POLICIES[settings.rounds](settings)
    user_class = load_user_object(settings.policy)
    if not isinstance(user_class, type):
        raise RecipeError(f'rollout.policy: "{settings.policy}" is a {type(user_class).__name__}: name a class')
    policy: RoundPolicy = user_class(settings)
    missing = [name for name in _MEMBERS if not hasattr(policy, name)]
    if missing:
        raise RecipeError(
            f'rollout.policy: "{settings.policy}" has no {", ".join(missing)}: see streamrl/control/round_policy.py'
        )
    return policy


def make_control(settings: ControlSettings, snapshot: Snapshot | None = None) -> Control:
    """Make control with ``settings``; where it continues from ``snapshot``, with the values that users have changed.
    Raises ``ValueError`` or ``StreamRLError`` for settings that do not fit together, or do not fit the snapshot."""
    control_class = DeterministicControl if settings.deterministic else Control
    if snapshot is not None:
        settings = with_values(settings, snapshot.state.steering.changed)
    policy, sizer = _make_policies(settings)
    return control_class(settings, policy, sizer, snapshot, partial(steer, _make_policies))


def _make_policies(settings: ControlSettings) -> tuple[RoundPolicy, GroupSizer]:
    sizer = make_group_sizer(settings.group_sizing, settings.group_size, settings.seed, settings.steps)
    return make_round_policy(settings), sizer
