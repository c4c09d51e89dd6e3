"""The reward worker: a process that runs trusted functions itself and owns the call processes of all others.

====================================  ===========================================================================
a trusted function that               gets
====================================  ===========================================================================
raises, exits, returns nonsense       a recorded failure
runs too long                         ``timed_out``; it is cancelled, or left behind when it does not stop
blocks the loop or the interpreter    the process ends with code 75 at the largest time limit + 2 s (``ExitTimer``)
is imported while others score        what importing may take, ``LOAD_LIMIT_S``; then the process ends with code 75
leaves too much behind                the process ends with code 75 when it is idle (or at once, at four times as much)
====================================  ===========================================================================

After code 75 the supervisor starts another worker. The streams break, they do not end, so the controller knows that
what had no answer has to be sent again. Functions that are not trusted cannot do that: see ``calls.pool``."""

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
_LEAVE_GRACE_S = 1.0  # for what was left behind, when the worker ends
_LEAVE_LOOKS = 50
_MANY_STUCK_CALLS = 8  # coroutines that never end; each keeps memory and takes time from the others
_TOO_MANY_STUCK_CALLS = 32
_TURN_S = 0.005  # plain functions run one after the other for so long; then others have their turn
_FLUSH_S = 0.5  # for answers on their way, before the process ends

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
    """Answer every ``ScoreGroup`` with a ``GroupScored``, until ``orders`` ends; nothing that it started is left then.

    Orders call the recipe's rewards version 0. ``owns_process`` False (tests): nothing ends the process, so a trusted
    function that never stops makes this hang. Otherwise the process ends by ``os._exit`` when trusted code cannot be
    stopped: with code 75 while orders may come, with code 0 when they ended and all are answered (``results`` is
    closed, hence flushed, before). Raises ``RecipeError`` when a function cannot be loaded, ``StreamBroken`` when the
    controller is gone, and ``StreamRLError`` when call processes cannot be started any more (exit code 1: the
    supervisor restarts the worker)."""
    timer = open_timer() if owns_process else None
    user_calls = asyncio.TaskGroup()
    serving = _Serving(recipe, tokenizer, user_calls, orders, results, timer, owns_process=owns_process)
    try:
        async with user_calls:
            await serving.load(0, recipe.rewards)
            async with asyncio.TaskGroup() as life:
                beating = life.create_task(serving.beat())
                try:
                    await serving.run(worker)
                    if owns_process:
                        await _leave(serving, results)
                finally:
                    beating.cancel()
                    if timer is not None:  # from here on only user code can keep this process
                        timer.rearm(_STALL_GRACE_S)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    finally:
        if timer is not None and not serving.stuck:
            timer.disarm()


class _Serving:
    """Receives orders and answers them. Each message has all that was scored since the one before."""

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
        self._loading = 0
        self._sets: dict[int, RewardSet] = {}
        self._open_orders: Counter[int] = Counter()
        self._closing: set[int] = set()
        self._closed: list[RewardSet] = []  # those of which something still runs
        self._scored: list[reward_messages.GroupScored] = []
        self._ended = False
        self._changed = Notifier()

    @property
    def stuck(self) -> int:
        """Trusted coroutines past their limit that still run."""
        return sum(rewards.stuck for rewards in (*self._sets.values(), *self._closed))

    async def beat(self) -> None:
        """Show that the loop runs. Not shown for longer than any call may take means that user code holds it."""
        while self._timer is not None:
            self._rearm()
            await asyncio.sleep(_HEARTBEAT_S)

    def _rearm(self) -> None:
        if self._timer is not None:
            longest_s = max([rewards.longest_s for rewards in self._sets.values()], default=0.0)
            if self._loading:  # a module may import torch, and no call has a limit for that
                longest_s = max(longest_s, LOAD_LIMIT_S)
            self._timer.rearm(longest_s + _STALL_GRACE_S + _HEARTBEAT_S)

    async def run(self, worker: int) -> None:
        """Serve until orders end; every order is answered before it returns, and no call process is left."""
        try:
            await send_hello(self._results, self._orders, reward_messages.RewardWorkerReady(worker=worker))
            async with asyncio.TaskGroup() as serving:
                # Of the two streams one may break alone: a controller would open both again and wait for a hello.
                watching = serving.create_task(self._results.watch())
                answering = serving.create_task(self._answer())
                await self._receive(serving)
                self._ended = True
                self._changed.notify()
                await asyncio.wait([answering])
                watching.cancel()
        finally:
            for rewards in list(self._sets.values()):
                await asyncio.shield(asyncio.wait_for(rewards.aclose(), _CLOSE_LIMIT_S))

    async def _receive(self, serving: asyncio.TaskGroup) -> None:
        loading: set[asyncio.Task[None]] = set()
        while True:
            try:
                order = await self._orders.receive()
            except StreamEnded:
                break
            match order:
                case reward_messages.ScoreGroups():
                    await self._begin(order, serving)
                case reward_messages.LoadRewardSet():
                    # In turn with the orders: an order of this version is sent only when it is known to be loaded.
                    task = serving.create_task(self._load_another(order))
                    loading.add(task)
                    task.add_done_callback(loading.discard)
                case reward_messages.CloseRewardSet():
                    self._closing.add(order.reward_version)
                    await self._close_unused()
                case reward_messages.RememberLimits():
                    if (rewards := self._sets.get(order.reward_version)) is not None:
                        rewards.remember_limits(order.slowest_s)
        while loading:
            await asyncio.wait(loading)

    async def _begin(self, orders: reward_messages.ScoreGroups, serving: asyncio.TaskGroup) -> None:
        """Begin to score what came. Plain trusted functions run here, so between them the loop has its turn."""
        turn_ends = time.perf_counter() + _TURN_S
        for order in orders.groups:
            version = order.reward_version
            self._open_orders[version] += 1
            scoring = self._sets[version].begin(order, orders.prompts)
            if scoring.scored is not None:
                self._answer_one(order, scoring.scored)
            else:
                serving.create_task(self._finish(order, scoring))
            if time.perf_counter() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = time.perf_counter() + _TURN_S

    async def _finish(self, order: reward_messages.ScoreGroup, scoring: Scoring) -> None:
        self._answer_one(order, await scoring.finish())

    def _answer_one(self, order: reward_messages.ScoreGroup, rewards: tuple[reward_messages.SampleReward, ...]) -> None:
        self._open_orders[order.reward_version] -= 1
        self._scored.append(reward_messages.GroupScored(order_id=order.order_id, rewards=rewards))
        self._changed.notify()

    async def load(self, version: int, rewards: Sequence[Reward]) -> RewardSet:
        """Load functions as ``version``. Raises ``RecipeError``; nothing is left then."""
        loaded = RewardSet(rewards, self._recipe.reward_limits, self._tokenizer, self._user_calls)
        try:
            await loaded.open()
        except BaseException:
            await asyncio.shield(loaded.aclose())
            raise
        self._sets[version] = loaded
        return loaded

    async def _load_another(self, order: reward_messages.LoadRewardSet) -> None:
        version = order.reward_version
        self._loading += 1
        self._rearm()  # now: trusted functions are imported here, and the loop is blocked until that is done
        try:
            rewards = await self.load(version, order.rewards)
        except RecipeError as error:
            await self._results.send(
                reward_messages.RewardSetLoaded(reward_version=version, problems=tuple(error.problems))
            )
            return
        finally:
            self._loading -= 1
            self._rearm()
        await self._results.send(reward_messages.RewardSetLoaded(reward_version=version, per_group=rewards.per_group))

    async def _answer(self) -> None:
        """Send what was scored, until orders have ended and all are answered. While one message is on its way, more
        comes together for the next."""
        while self._scored or self._open_orders.total() or not self._ended:
            if not self._scored:
                await self._changed.wait()
                continue
            groups = tuple(self._scored)
            self._scored = []
            # Before the answers that taught it: a worker that dies in between is asked again and learns it again.
            for version, rewards in list(self._sets.items()):
                if learnt := rewards.take_learnt_limits():
                    await self._results.send(reward_messages.LimitsLearnt(reward_version=version, slowest_s=learnt))
            notice = "; ".join(filter(None, [rewards.take_notice() for rewards in self._sets.values()]))
            await self._results.send(reward_messages.GroupsScored(groups=groups, notice=notice))
            if self._closing:
                await self._close_unused()
            await self._end_if_stuck()

    async def _end_if_stuck(self) -> None:
        stuck = self.stuck
        if not stuck or not self._owns_process:
            return
        idle = stuck >= _MANY_STUCK_CALLS and not self._open_orders.total()
        if idle or stuck >= _TOO_MANY_STUCK_CALLS:
            _log.warning("%d reward calls do not end: this worker ends, to be started again", stuck)
            # Without closing the results: an end would mean that nothing is left, and orders may be on the way.
            await asyncio.sleep(_FLUSH_S)
            os._exit(REWARD_RESTART_EXIT_CODE)

    async def _close_unused(self) -> None:
        for version in list(self._closing):
            if not self._open_orders[version]:
                self._closing.discard(version)
                self._open_orders.pop(version, None)
                rewards = self._sets.pop(version, None)
                if rewards is not None:
                    self._rearm()  # what comes next may have less time
                    await rewards.aclose()
                    if rewards.stuck:
                        self._closed.append(rewards)


async def _leave(serving: _Serving, results: SendStream[reward_messages.RewardResult]) -> None:
    """All orders are answered: end the process when user code would keep it; return when nothing is stuck."""
    for _ in range(_LEAVE_LOOKS):
        if not serving.stuck:
            return
        await asyncio.sleep(_LEAVE_GRACE_S / _LEAVE_LOOKS)
    if serving.stuck:
        # They swallow their cancellation, and the loop would wait for them; all work is done.
        await results.aclose()
        os._exit(0)
