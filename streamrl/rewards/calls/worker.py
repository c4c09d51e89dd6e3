"""The reward worker: a process that runs trusted functions itself and owns the call processes of all others.

``launch.roles`` runs ``run_reward_worker`` in each reward worker; its orders come from the reward stage (controller).

====================================  ===========================================================================
a trusted function that               has this effect
====================================  ===========================================================================
raises, exits, returns nonsense       a failure is recorded
runs too long                         the call timed out; its coroutine is cancelled, and stays if it does not stop
blocks the loop or the interpreter    the process ends with code 75 at the largest time limit + 2 s (``ExitTimer``)
is imported while others score        the process ends with code 75 where the import takes more than ``LOAD_LIMIT_S``
leaves many stuck coroutines          the process ends with code 75 when it is idle (at four times as many, at once)
====================================  ===========================================================================

After code 75 the supervisor starts another worker. The streams break instead of ending, so the controller sends all
unanswered orders again. Functions that are not trusted cannot end the worker: see ``calls.pool``."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence

from streamrl.base.concurrent_calls import first_error
from streamrl.base.errors import RecipeError, StreamEnded
from streamrl.base.notifier import Notifier
from streamrl.base.run_process import REWARD_RESTART_EXIT_CODE
from streamrl.comm.stream import ReceiveStream, SendStream, send_hello
from streamrl.recipe.rewards import Reward
from streamrl.recipe.sections import Recipe
from streamrl.rewards import reward_messages
from streamrl.rewards.calls.pool import LOAD_LIMIT_S
from streamrl.rewards.calls.reward_set import RewardSet, Scoring
from streamrl.rewards.calls.trusted import ExitTimer, open_timer
from streamrl.rewards.scoring import Detokenizer

_HEARTBEAT_S = 0.5
_STALL_GRACE_S = 2.0
_CLOSE_LIMIT_S = 4.0
_LEAVE_GRACE_S = 1.0  # wait for stuck coroutines, when the worker ends
_LEAVE_CHECKS = 50
_MANY_STUCK_CALLS = 8  # coroutines that never end; each keeps memory and takes time from the others
_TOO_MANY_STUCK_CALLS = 32
_TURN_S = 0.005  # plain functions run for so long before other tasks of the loop run
_FLUSH_S = 0.5  # wait for answers that are being sent, before the process ends

_log = logging.getLogger(__name__)


async def run_reward_worker(
    recipe: Recipe,
    tokenizer: Detokenizer,
    worker: int,
    orders: ReceiveStream[reward_messages.RewardOrder],
    results: SendStream[reward_messages.RewardResult],
    *,
    owns_process: bool = True,
) -> None:
    """Answer every ``ScoreGroup`` with a ``GroupScored``, until ``orders`` ends. No process that it started is left
    when it returns.

    The recipe's rewards are version 0. ``owns_process``: the process may end by ``os._exit`` when trusted code cannot
    be stopped: with code 75 while more orders may come, with code 0 when orders have ended and all are answered
    (``results`` is closed, hence flushed, before). Without it (tests) a trusted function that never stops makes this
    function hang. Raises ``RecipeError`` when a function cannot be loaded, ``StreamBroken`` when the controller is
    gone, and ``StreamRLError`` when call processes cannot be started any more (exit code 1: the supervisor restarts the
    worker)."""
    timer = open_timer() if owns_process else None
    user_calls = asyncio.TaskGroup()
    serving = _Serving(recipe, tokenizer, user_calls, orders, results, timer, owns_process=owns_process)
    try:
        async with user_calls:
            await serving.load(0, recipe.rewards)
            async with asyncio.TaskGroup() as life:
                heartbeat = life.create_task(serving.beat())
                try:
                    await serving.run(worker)
                    if owns_process:
                        await _leave(serving, results)
                finally:
                    heartbeat.cancel()
                    if timer is not None:  # from here on only user code can keep this process from ending
                        timer.rearm(_STALL_GRACE_S)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    finally:
        if timer is not None and not serving.stuck:
            timer.disarm()


class _Serving:
    """Receives orders and answers them. Each message has all groups that were scored since the message before."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Detokenizer,
        user_calls: asyncio.TaskGroup,
        orders: ReceiveStream[reward_messages.RewardOrder],
        results: SendStream[reward_messages.RewardResult],
        timer: ExitTimer | None,
        *,
        owns_process: bool,
    ) -> None:
        self._recipe = recipe
        self._tokenizer = tokenizer
        self._user_calls = user_calls
        self._orders = orders
        self._results = results
        self._timer = timer
        self._owns_process = owns_process
        self._sets_loading = 0
        self._sets: dict[int, RewardSet] = {}  # by reward version
        self._open_orders: Counter[int] = Counter()  # by reward version
        self._versions_to_close: set[int] = set()
        self._closed_sets: list[RewardSet] = []  # closed sets with a coroutine that still runs
        self._scored_groups: list[reward_messages.GroupScored] = []  # groups whose answers are to be sent
        self._orders_ended = False
        self._changed = Notifier()

    @property
    def stuck(self) -> int:
        """Trusted coroutines past their limit that still run."""
        return sum(rewards.stuck for rewards in (*self._sets.values(), *self._closed_sets))

    async def beat(self) -> None:
        """Rearm the timer while the loop runs. User code that holds the loop for longer than any call may take stops
        this, and then the timer ends the process."""
        while self._timer is not None:
            self._rearm()
            await asyncio.sleep(_HEARTBEAT_S)

    def _rearm(self) -> None:
        if self._timer is not None:
            longest_s = max([rewards.longest_s for rewards in self._sets.values()], default=0.0)
            if self._sets_loading:  # a module may import torch, which may take longer than a call
                longest_s = max(longest_s, LOAD_LIMIT_S)
            self._timer.rearm(longest_s + _STALL_GRACE_S + _HEARTBEAT_S)

    async def run(self, worker: int) -> None:
        """Serve until orders end. Every order is answered before it returns, and no call process is left."""
        try:
            await send_hello(self._results, self._orders, reward_messages.RewardWorkerReady(worker=worker))
            async with asyncio.TaskGroup() as serving:
                # The stream of results may break alone: then this worker must end, too, because the controller opens
                # both streams again and waits for a hello.
                watch_task = serving.create_task(self._results.watch())
                answer_task = serving.create_task(self._answer())
                await self._receive(serving)
                self._orders_ended = True
                self._changed.notify()
                await asyncio.wait([answer_task])
                watch_task.cancel()
        finally:
            for rewards in list(self._sets.values()):
                await asyncio.shield(asyncio.wait_for(rewards.aclose(), _CLOSE_LIMIT_S))

    async def _receive(self, serving: asyncio.TaskGroup) -> None:
        load_tasks = set()
        while True:
            try:
                order = await self._orders.receive()
            except StreamEnded:
                break
            match order:
                case reward_messages.ScoreGroups():
                    await self._begin(order, serving)
                case reward_messages.LoadRewardSet():
                    # Orders need not wait for it: the stage sends an order of this version only once it is loaded.
                    task = serving.create_task(self._load_another(order))
                    load_tasks.add(task)
                    task.add_done_callback(load_tasks.discard)
                case reward_messages.CloseRewardSet():
                    self._versions_to_close.add(order.reward_version)
                    await self._close_unused()
                case reward_messages.RememberLimits():
                    rewards = self._sets.get(order.reward_version)
                    if rewards is not None:
                        rewards.remember_limits(order.slowest_s)
        while load_tasks:
            await asyncio.wait(load_tasks)

    async def _begin(self, orders: reward_messages.ScoreGroups, serving: asyncio.TaskGroup) -> None:
        """Begin to score the groups of a message. Plain trusted functions run here, so other tasks of the loop run
        every ``_TURN_S`` seconds."""
        turn_ends = time.perf_counter() + _TURN_S
        for order in orders.groups:
            version = order.reward_version
            self._open_orders[version] += 1
            scoring = self._sets[version].begin(order, orders.prompts)
            if scoring.scored is not None:
                self._add_answer(order, scoring.scored)
            else:
                serving.create_task(self._finish(order, scoring))
            if time.perf_counter() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = time.perf_counter() + _TURN_S

    async def _finish(self, order: reward_messages.ScoreGroup, scoring: Scoring) -> None:
        self._add_answer(order, await scoring.finish())

    def _add_answer(self, order: reward_messages.ScoreGroup, rewards: tuple[reward_messages.SampleReward, ...]) -> None:
        self._open_orders[order.reward_version] -= 1
        self._scored_groups.append(reward_messages.GroupScored(order_id=order.order_id, rewards=rewards))
        self._changed.notify()

    async def load(self, version: int, rewards: Sequence[Reward]) -> RewardSet:
        """Load functions as ``version``. Raises ``RecipeError``; then nothing of them is loaded."""
        attached = {reward.label for reward in rewards} - {reward.label for reward in self._recipe.rewards}
        reward_set = RewardSet(rewards, self._recipe.reward_limits, self._tokenizer, self._user_calls, attached)
        try:
            await reward_set.open()
        except BaseException:
            await asyncio.shield(reward_set.aclose())
            raise
        self._sets[version] = reward_set
        return reward_set

    async def _load_another(self, order: reward_messages.LoadRewardSet) -> None:
        version = order.reward_version
        self._sets_loading += 1
        self._rearm()  # before the import of trusted functions, which blocks the loop
        try:
            rewards = await self.load(version, order.rewards)
        except RecipeError as error:
            await self._results.send(
                reward_messages.RewardSetLoaded(reward_version=version, problems=tuple(error.problems))
            )
            return
        finally:
            self._sets_loading -= 1
            self._rearm()
        await self._results.send(reward_messages.RewardSetLoaded(reward_version=version, per_group=rewards.per_group))

    async def _answer(self) -> None:
        """Send the scored groups, until orders have ended and all are answered. Groups that are scored while a message
        is being sent are gathered for the next message."""
        while self._scored_groups or self._open_orders.total() or not self._orders_ended:
            if not self._scored_groups:
                await self._changed.wait()
                continue
            groups = tuple(self._scored_groups)
            self._scored_groups = []
            # Limits are sent before the answers: when the worker dies in between, its successor scores the same orders
            # and observes the limits again.
            for version, rewards in list(self._sets.items()):
                slowest_s = rewards.take_learnt_limits()
                if slowest_s:
                    await self._results.send(reward_messages.LimitsLearnt(reward_version=version, slowest_s=slowest_s))
            notice = "; ".join(filter(None, [rewards.take_notice() for rewards in self._sets.values()]))
            await self._results.send(reward_messages.GroupsScored(groups=groups, notice=notice))
            if self._versions_to_close:
                await self._close_unused()
            await self._end_if_stuck()

    async def _end_if_stuck(self) -> None:
        stuck = self.stuck
        if not stuck or not self._owns_process:
            return
        idle = stuck >= _MANY_STUCK_CALLS and not self._open_orders.total()
        if idle or stuck >= _TOO_MANY_STUCK_CALLS:
            _log.warning("%d reward calls do not end: this worker ends, to be started again", stuck)
            # ``results`` is not closed: the end of the stream would mean that all orders are answered, and more orders
            # may be on the way.
            await asyncio.sleep(_FLUSH_S)
            os._exit(REWARD_RESTART_EXIT_CODE)

    async def _close_unused(self) -> None:
        for version in list(self._versions_to_close):
            if not self._open_orders[version]:
                self._versions_to_close.discard(version)
                self._open_orders.pop(version, None)
                rewards = self._sets.pop(version, None)
                if rewards is not None:
                    self._rearm()  # the remaining functions may have shorter time limits
                    await rewards.aclose()
                    if rewards.stuck:
                        self._closed_sets.append(rewards)


async def _leave(serving: _Serving, results: SendStream[reward_messages.RewardResult]) -> None:
    """After all orders are answered, end the process where stuck user code would keep it; return where no call is
    stuck."""
    for _ in range(_LEAVE_CHECKS):
        if not serving.stuck:
            return
        await asyncio.sleep(_LEAVE_GRACE_S / _LEAVE_CHECKS)
    if serving.stuck:
        # Stuck coroutines swallow their cancellation, and the loop would wait for them. All orders are answered.
        await results.aclose()
        os._exit(0)
