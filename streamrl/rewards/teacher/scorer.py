"""Scorer that asks a teacher for the logprob of each sampled token, while the rewards are computed.

``launch.sampling`` puts it before the reward stage, in the controller. A teacher without an answer is a failure as one
of a reward is: the sample is not trained, and nothing is guessed."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import anyio
from msgspec.structs import replace

from streamrl.base.stage_messages import Scored
from streamrl.base.types import (
    FloatArray,
    RewardFailure,
    RewardFailureKind,
    ScoredTrajectory,
    TokenArray,
    Trajectory,
    TrajectoryId,
    float_array,
    paths_of,
)
from streamrl.contracts import Scorer
from streamrl.recipe.objectives.teacher import TEACHER, Teacher
from streamrl.rewards.served.client import ModelError
from streamrl.rewards.teacher.clients import TeacherClients, TeacherFailed, TeacherSilent

_IMPOSSIBLE = -9999.0
"""What vLLM answers in place of minus infinity. As a reward it would outweigh all other tokens of a batch."""


class TeacherScorer(Scorer):
    """Scores by ``rewards`` and by the teacher of a row. Raises ``RecipeError`` without the key of the endpoints."""

    def __init__(self, rewards: Scorer, teacher: Teacher, own_socket: Path | None = None) -> None:
        """``own_socket``: socket of the teacher that the run serves; None: it serves none."""
        self._rewards = rewards
        self._teacher = teacher
        self._clients = TeacherClients(teacher, own_socket)

    async def score(self, trajectory: Trajectory, group_size: int) -> Scored:
        """Return the outcome of the rewards, with the teacher's logprobs; a failure where one of both failed."""
        if trajectory.evaluation:
            return await self._rewards.score(trajectory, group_size)
        began_s = anyio.current_time()
        answers: list[FloatArray | RewardFailure] = []

        async def ask() -> None:
            answers.append(await self._answer(trajectory))

        async with anyio.create_task_group() as questions:
            questions.start_soon(ask)
            scored = await self._rewards.score(trajectory, group_size)
            if not isinstance(scored.outcome, ScoredTrajectory):
                questions.cancel_scope.cancel()
        if not isinstance(scored.outcome, ScoredTrajectory):
            return scored
        (answer,) = answers
        outcome: ScoredTrajectory | RewardFailure
        if isinstance(answer, RewardFailure):
            outcome = replace(answer, calls=scored.outcome.calls, reward_version=scored.outcome.reward_version)
        else:
            outcome = replace(scored.outcome, token_values=scored.outcome.token_values | {TEACHER: answer})
        return replace(scored, outcome=outcome, reward_s=anyio.current_time() - began_s)

    async def lost(self, trajectory: TrajectoryId, group_size: int) -> None:
        """Note that a trajectory will not be scored."""
        await self._rewards.lost(trajectory, group_size)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._clients.aclose()

    async def _answer(self, trajectory: Trajectory) -> FloatArray | RewardFailure:
        failure = partial(RewardFailure, trajectory=trajectory, function=TEACHER, policy=self._teacher.on_failure.value)
        try:
            return await self.logprobs(trajectory)
        except TeacherSilent as error:
            message = f"{error}: is it up? teacher.advanced.timeout_s is the limit"
            return failure(kind=RewardFailureKind.TIMED_OUT, message=message, reward_seconds=self._teacher.timeout_s)
        except (ModelError, TeacherFailed) as error:
            return failure(kind=RewardFailureKind.RAISED, message=str(error))

    async def logprobs(self, trajectory: Trajectory) -> FloatArray:
        """The teacher's logprob of each sampled token, float32, in the order of sampling. One question for each
        sequence of the trajectory. Raises as ``TeacherClients.ask``."""
        name = self._teacher_of(trajectory)
        if name not in self._teacher.addresses:
            names = ", ".join(f'"{other}"' for other in self._teacher.addresses if other)
            raise TeacherFailed(
                f'the row names the teacher "{name}" in column {self._teacher.column}, and there are '
                f"{names or 'none'}: name one of [[teacher.advanced.further]]"
            )
        by_segment: dict[int, FloatArray] = {}
        prompt = trajectory.prompt.token_ids
        for path, trained in paths_of(trajectory):
            token_ids = prompt[:]
            for index in path:
                token_ids.extend(trajectory.segments[index].token_ids)
            if not trained:
                continue
            logprobs = await self._ask(name, token_ids)
            place = len(prompt)
            for index in path:
                count = len(trajectory.segments[index].token_ids)
                if index in trained:
                    by_segment[index] = logprobs[place : place + count]
                place += count
        return float_array([value for index in sorted(by_segment) for value in by_segment[index]])

    def _teacher_of(self, trajectory: Trajectory) -> str:
        return str(trajectory.prompt.columns.get(self._teacher.column) or "")

    async def _ask(self, name: str, token_ids: TokenArray) -> FloatArray:
        """Logprob of each token after those before it, float32; the first one has none, and is 0."""
        logprobs = [answer.logprob for answer in await self._clients.ask(name, token_ids)]
        if not all(_IMPOSSIBLE < logprob < math.inf for logprob in logprobs):
            model = self._teacher.addresses[name].model
            raise TeacherFailed(
                f"the teacher {model} gave a logprob that is no number, or the probability 0: look into its log"
            )
        return float_array([0.0, *logprobs])
