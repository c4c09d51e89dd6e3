"""The reward worker: a process that owns the user's reward functions, and ends rather than hang with them.

====================================  ===========================================================================
a function that                       gets
====================================  ===========================================================================
raises, exits, returns nonsense       a recorded failure
runs too long                         ``timed_out``; it is cancelled, or left behind when it does not stop
blocks the loop or the interpreter    the process ends with code 75 at the largest time limit + 2 s (``ExitTimer``)
leaves too much behind                the process ends with code 75 when it is idle (or at once, at four times as much)
====================================  ===========================================================================

After code 75 the supervisor starts another worker. The streams break, they do not end, so the controller knows that
what had no answer has to be sent again.
"""

from __future__ import annotations

import asyncio
import logging
import os

from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.config.recipe import Recipe
from streamrl.errors import StreamEnded
from streamrl.messages import GroupScored, RewardOrder, RewardResult, RewardWorkerReady, ScoreGroup
from streamrl.rewards.calls import CallRunner
from streamrl.rewards.exit_codes import REWARD_RESTART_EXIT_CODE
from streamrl.rewards.exit_timer import ExitTimer
from streamrl.rewards.scoring import GroupScorer, WeightedReward
from streamrl.rewards.signature import load_reward
from streamrl.tokenizer import load_tokenizer

_HEARTBEAT_S = 0.5
_STALL_GRACE_S = 2.0
_LEAVE_GRACE_S = 1.0  # for what was left behind, when the worker ends
_LEAVE_LOOKS = 50
_MANY_STUCK_CALLS = 8  # threads that never end; each keeps memory and takes time from the others
_TOO_MANY_STUCK_CALLS = 32
_FLUSH_S = 0.5  # for answers on their way, before the process ends

_log = logging.getLogger(__name__)


async def run_reward_worker(
    recipe: Recipe,
    worker: int,
    orders: ReceiveStream[RewardOrder],
    results: SendStream[RewardResult],
    *,
    owns_process: bool = True,
) -> None:
    """Answer every ``ScoreGroup`` with a ``GroupScored``, until ``orders`` ends.

    ``owns_process`` False (tests): nothing ends the process, so a function that never stops makes this hang.
    Otherwise the process ends by ``os._exit`` when user code cannot be stopped: with code 75 while orders may come,
    with code 0 when they ended and all are answered (``results`` is closed, hence flushed, before). Raises
    ``RecipeError`` when a function or the tokenizer cannot be loaded, and ``StreamBroken`` when the controller is gone.
    """
    rewards = [WeightedReward(function=load_reward(reward.function), recipe=reward) for reward in recipe.rewards]
    tokenizer = load_tokenizer(recipe.model.path)
    longest_s = max(reward.time_limit_s for reward in recipe.rewards) + _STALL_GRACE_S
    timer = _open_timer() if owns_process else None
    user_calls = asyncio.TaskGroup()
    runner = CallRunner(user_calls, recipe.reward_limits.concurrency)
    serving = _Serving(GroupScorer(rewards, tokenizer, runner), runner, orders, results, owns_process=owns_process)
    try:
        async with user_calls, asyncio.TaskGroup() as life:
            beating = life.create_task(_beat(timer, longest_s))
            try:
                await serving.run(worker)
                if owns_process:
                    await _leave(runner, results)
            finally:
                beating.cancel()
                if timer is not None:  # from here on only user code can keep this process
                    timer.rearm(_STALL_GRACE_S)
    finally:
        if timer is not None and not runner.busy:
            timer.disarm()


class _Serving:
    """Receives orders and answers them, each in its own task (the slots of the run bound how many)."""

    def __init__(
        self,
        scorer: GroupScorer,
        runner: CallRunner,
        orders: ReceiveStream[RewardOrder],
        results: SendStream[RewardResult],
        *,
        owns_process: bool,
    ) -> None:
        self._scorer = scorer
        self._runner = runner
        self._orders = orders
        self._results = results
        self._owns_process = owns_process
        self._open_orders = 0

    async def run(self, worker: int) -> None:
        """Until orders end; every order is answered before it returns."""
        await self._results.send(RewardWorkerReady(worker=worker))
        async with asyncio.TaskGroup() as answers:
            while True:
                try:
                    order = await self._orders.receive()
                except StreamEnded:
                    return
                self._open_orders += 1
                answers.create_task(self._answer(order))

    async def _answer(self, order: ScoreGroup) -> None:
        outcomes = await self._scorer.score(order.trajectories)
        await self._results.send(GroupScored(order_id=order.order_id, outcomes=outcomes))
        self._open_orders -= 1
        stuck = self._runner.stuck
        idle = stuck >= _MANY_STUCK_CALLS and not self._open_orders
        if self._owns_process and (idle or stuck >= _TOO_MANY_STUCK_CALLS):
            _log.warning("%d reward calls do not end: this worker ends, to be started again", stuck)
            # Without closing the results: an end would mean that nothing is left, and orders may be on the way.
            await asyncio.sleep(_FLUSH_S)
            os._exit(REWARD_RESTART_EXIT_CODE)


async def _beat(timer: ExitTimer | None, stall_s: float) -> None:
    """Show that the loop runs. Not rearmed for ``stall_s`` means that user code holds it."""
    while timer is not None:
        timer.rearm(stall_s + _HEARTBEAT_S)
        await asyncio.sleep(_HEARTBEAT_S)


async def _leave(runner: CallRunner, results: SendStream[RewardResult]) -> None:
    """All orders are answered: end the process when user code would keep it; return when nothing is stuck."""
    for _ in range(_LEAVE_LOOKS):  # the end of a thread sets no event that the loop could wait for
        if not runner.stuck:
            return
        await asyncio.sleep(_LEAVE_GRACE_S / _LEAVE_LOOKS)
    if runner.stuck:
        # Threads cannot be stopped and the interpreter would wait for them; all work is done.
        await results.aclose()
        os._exit(0)


def _open_timer() -> ExitTimer | None:
    try:
        return ExitTimer(REWARD_RESTART_EXIT_CODE)
    except OSError as error:
        _log.warning("no exit timer (%s): a reward function that blocks the loop cannot be stopped", error)
        return None
