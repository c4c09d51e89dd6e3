"""What the control socket of a run can do: the one place that carries out its operations."""

from __future__ import annotations

from streamrl.remote.control_protocol import ControlAnswer, ControlOperation
from streamrl.remote.reward_changes import AttachReward, DetachReward, ListRewards, ReplaceReward
from streamrl.rewards.attachments import RewardAttachments


class ControlOperations:
    """On behalf of whoever holds the run, in its process."""

    def __init__(self, rewards: RewardAttachments) -> None:
        self._rewards = rewards

    async def carry_out(self, operation: ControlOperation) -> ControlAnswer:
        """Raises ``StreamRLError`` (``RecipeError`` where what is asked for is wrong): then nothing was done."""
        match operation:
            case ListRewards():
                return await self._rewards.attached()
            case AttachReward() | ReplaceReward() | DetachReward():
                return await self._rewards.change(operation)
