"""When a judge beside the actor is awake: the policy by itself, and the gate with callers that wait at it."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from streamrl.base.errors import EngineError
from streamrl.recipe.served_models import Judge, YieldKind
from streamrl.rewards.served.gate import QuestionBatcher, admits, next_check_s

JUDGE = Judge(batch=4, batch_wait_s=1.0, actor_share=0.5, max_wait_s=10.0)
AT_ONCE = Judge(batch=1, batch_wait_s=0.0, actor_share=1.0, max_wait_s=3600.0)


@pytest.mark.parametrize(
    ("waiting", "oldest_s", "actor", "awake", "goes"),
    [
        (0, 0.0, 0.0, False, False),
        (3, 0.0, 0.0, False, False),  # not a batch, and nobody has lost patience
        (4, 0.0, 0.0, False, True),
        (1, 1.0, 0.0, False, True),
        (1, 0.0, 0.0, True, True),  # it joins those that are being answered
        (4, 0.0, 0.5, False, True),
        (4, 0.0, 0.51, False, False),  # the actor needs the machine
        (1, 0.0, 0.51, True, False),
        (9, 9.9, 1.0, False, False),
        (1, 10.0, 1.0, False, True),  # but not for ever
    ],
)
def test_who_is_let_in(waiting: int, oldest_s: float, actor: float, awake: bool, goes: bool) -> None:
    assert admits(JUDGE, waiting, oldest_s, actor=actor, awake=awake) == goes


def test_time_alone_changes_the_answer_twice() -> None:
    assert next_check_s(JUDGE, 0, 0.0) is None
    assert next_check_s(JUDGE, 1, 0.25) == 0.75
    assert next_check_s(JUDGE, 1, 1.0) == 9.0


def test_a_judge_that_never_yields_waits_for_the_actor_only() -> None:
    judge = Judge(model="m", when_idle=YieldKind.NEVER, batch=32, actor_share=0.25)
    assert admits(judge, 1, 0.0, actor=0.25, awake=False)
    assert not admits(judge, 1, 0.0, actor=0.3, awake=False)


class Engine:
    """Notes what is done to it, and whether it was asked at rest."""

    def __init__(self, judge: Judge) -> None:
        self.moves: list[str] = []
        self.gate = QuestionBatcher(judge, self.wake, self.rest)
        self.resting = anyio.Event()
        self.answering = 0
        self.answers = anyio.Event()

    async def wake(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.moves.append("wake")

    async def rest(self) -> None:
        assert not self.answering
        self.moves.append("rest")
        self.resting.set()
        self.resting = anyio.Event()

    async def ask(self) -> None:
        async with self.gate.question():
            assert self.moves[-1] == "wake"
            self.answering += 1
            try:
                await self.answers.wait()
            finally:
                self.answering -= 1

    async def until(self, answering: int) -> None:
        while self.answering != answering:
            await anyio.lowlevel.checkpoint()


async def test_it_wakes_for_a_batch_and_rests_after_it() -> None:
    engine = Engine(Judge(batch=3, batch_wait_s=3600.0, actor_share=0.5, max_wait_s=3600.0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.gate.run)
        for _ in range(2):
            tasks.start_soon(engine.ask)
        await anyio.wait_all_tasks_blocked()
        assert engine.moves == ["rest"] and engine.gate.report().waiting == 2
        engine.gate.actor_runs(0.9)
        tasks.start_soon(engine.ask)
        await anyio.wait_all_tasks_blocked()
        assert engine.moves == ["rest"]  # a batch, but the actor needs the machine
        engine.gate.actor_runs(0.5)
        await engine.until(3)
        tasks.start_soon(engine.ask)
        await engine.until(4)  # who comes while it is awake joins
        engine.gate.actor_runs(1.0)
        tasks.start_soon(engine.ask)
        await anyio.wait_all_tasks_blocked()
        assert engine.answering == 4
        resting = engine.resting
        engine.answers.set()
        await resting.wait()
        report = engine.gate.report()
        assert (report.questions, report.batches, report.waiting, report.inside) == (4, 1, 1, 0)
        assert report.awake_s > 0 and report.waited_s > 0
        tasks.cancel_scope.cancel()
    assert engine.moves == ["rest", "wake", "rest"]


async def test_a_question_that_is_given_up_leaves_no_trace() -> None:
    """Past its time limit: one that waits at the gate, and one that is being answered."""
    engine = Engine(Judge(batch=2, batch_wait_s=3600.0, actor_share=1.0, max_wait_s=3600.0))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.gate.run)
        with anyio.move_on_after(0):
            await engine.ask()
        assert engine.gate.report().waiting == 0
        scopes = [anyio.CancelScope(), anyio.CancelScope()]

        async def ask(scope: anyio.CancelScope) -> None:
            with scope:
                await engine.ask()

        for scope in scopes:
            tasks.start_soon(ask, scope)
        await engine.until(2)
        resting = engine.resting
        for scope in scopes:
            scope.cancel()
        await resting.wait()
        assert engine.gate.report().inside == 0
        tasks.cancel_scope.cancel()
    assert engine.moves == ["rest", "wake", "rest"]


async def test_patience_and_the_longest_wait_end_by_the_clock() -> None:
    """Fewer than a batch, and an actor that never leaves room: both are asked in the end."""
    for judge in (
        Judge(batch=9, batch_wait_s=0.01, actor_share=1.0, max_wait_s=3600.0),
        Judge(batch=1, batch_wait_s=0.0, actor_share=0.1, max_wait_s=0.01),
    ):
        engine = Engine(judge)
        engine.gate.actor_runs(1.0)
        engine.answers.set()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.gate.run)
            await engine.ask()
            tasks.cancel_scope.cancel()


async def test_an_engine_that_cannot_be_woken_ends_the_judge() -> None:
    engine = Engine(AT_ONCE)

    async def broken() -> None:
        raise EngineError("judge-0: its process VLLM::EngineCore died")

    gate = QuestionBatcher(AT_ONCE, broken, engine.rest)
    with pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(gate.run)
            async with gate.question():
                raise AssertionError("it was let in")
    assert caught.group_contains(EngineError)
