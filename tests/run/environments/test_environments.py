"""Episodes of user code in an environment worker: the forms of an environment, limits, failures, and workers that end.
The worker is the real one, over memory streams; the engine says what the test has it say, in tokens that no tokenizer
would make of the text."""

from __future__ import annotations

import asyncio
import math
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from builders.base import trajectory as one_turn
from builders.recipe import small_recipe
from builders.stages import ZeroRewards
from msgspec import structs

from streamrl.base.errors import RecipeError, StreamBroken
from streamrl.base.messages import Generate, ReturnedCall
from streamrl.base.run_process import REWARD_RESTART_EXIT_CODE
from streamrl.base.stage_messages import EpisodeSoFar, LaunchTrajectory, Scored, TrajectoryLost, TurnSoFar
from streamrl.base.types import (
    Completion,
    EnvironmentResult,
    FinishReason,
    Prompt,
    RewardFailure,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
    VersionSpan,
    float_array,
    token_array,
)
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.stream import exchange_hello
from streamrl.contracts import Journal
from streamrl.observe.terminal.step_line import sample_block
from streamrl.prepare.recipe_probe import look_at_environments
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.environment import RUN_ENVIRONMENT, Environment, FurtherEnvironment
from streamrl.recipe.rewards import FailurePolicy, Reward
from streamrl.recipe.sections import Sampling
from streamrl.run.environments import endpoint_server
from streamrl.run.environments.environment_forms import _first_messages, load_episode
from streamrl.run.environments.worker import run_environment_worker
from streamrl.run.evaluate.sample_files import sample_line, sample_of
from streamrl.stages.environment import EnvironmentStage, EnvironmentStreams
from streamrl.stages.episodes import Episodes

CODE = """
import asyncio, math, sqlite3, time

import numpy

from streamrl.run.environments.turns import EpisodeLimit

CALLS, LEFT = [], []

def add(a: int, b: int) -> int:
    '''Add two integers.'''
    CALLS.append((a, b))
    return a + b

def opens() -> str:
    '''Return what closes a turn.'''
    return "<|im_end|>"

class Counter:
    '''Counts.'''
    def __init__(self): self.reward = 0.0
    def reset(self, start, **columns):
        self.count = start
        return f" It stands at {start}."
    def up(self, by: int) -> int:
        '''Count up.'''
        self.count += by
        self.reward = float(self.count)
        return self.count
    def close(self): LEFT.append("counter")

class Game:
    def reset(self, *, level, seed):
        self.seen, self.seed = [], seed
        return [{"role": "user", "content": f"level {level}"}], {}
    def step(self, text):
        self.seen.append(text)
        return f"you said {text}", 0.0 if text == "lose" else 0.5, len(self.seen) == 3, False, {}
    async def close(self): LEFT.append(self.seed)

async def talks(model, question, *, answer=""):
    chat = model.chat(system="Be brief.")
    reply = await chat.say(question)
    reply = await chat.say("Really?")
    return float(reply.text == answer)

async def pays(model, left=None):
    chat = model.chat()
    first, second = await chat.say("a"), await chat.say("b")
    model.reward(second, 0.25)
    model.reward(first, 1)
    model.reward(second, 0.5)
    return left

async def raises(model, **columns):
    await model.chat().say("hello")
    raise KeyError("no such level")

async def nan(model, **columns):
    await model.chat().say("hello")
    return math.nan

async def words(model, **columns):
    await model.chat().say("hello")
    return "good"

async def hangs(model, **columns):
    try:
        await model.chat().say("hello")
        await asyncio.sleep(3600)
    finally:
        LEFT.append("hangs")

async def sleeps(model, **columns):
    await model.chat().say("hello")
    await asyncio.to_thread(time.sleep, 1.5)

async def nothing(model, **columns):
    return None

async def twice(model, **columns):
    chat = model.chat()
    await asyncio.gather(chat.say("a"), chat.say("b"))

async def unbounded(model, **columns):
    chat = model.chat()
    while True:
        await chat.say("again")

TASKS = []
async def outlives(model, **columns):
    chat = model.chat()
    await chat.say("hello")
    async def later():
        await asyncio.sleep(0.05)
        try:
            await chat.say("still there?")
        except RuntimeError as error:
            LEFT.append(str(error))
    TASKS.append(asyncio.create_task(later()))
    return 1.0

class Says:
    def reset(self, *, first): return eval(first)
    def step(self, text): return "", 1.0, True, False, {}

class Table:
    def __init__(self): self.rows = sqlite3.connect(":memory:").execute("select 1 as a, 'x' as b")
    def reset(self): return self.rows.fetchone()
    def step(self, text): return str(self.rows.fetchone()).encode(), 0.5, text == "end", False, {}
    def close(self): self.rows.close()

def full() -> str:
    "Write."
    with open("/dev/full", "w") as file:
        file.write("x" * 100_000)

async def goes_on(model, **columns):
    chat = model.chat(tools=[full])
    try:
        await chat.run_tools(await chat.say("Write."))
    except Exception as error:
        LEFT.append(str(error))
    return 1.0

class Slow:
    def reset(self): return "begin"
    def step(self, text):
        time.sleep(2.5)
        return "", 1.0, True, False, {}

async def cancels_itself(model, **columns):
    await model.chat().say("hello")
    task = asyncio.create_task(asyncio.sleep(3600))
    task.cancel()
    await task

async def leaves(model, **columns):
    await model.chat().say("hello")
    raise SystemExit(3)

async def swallows(model, **columns):
    await model.chat().say("hello")
    for _ in range(3):
        try:
            await asyncio.sleep(0.4)
        except asyncio.CancelledError:
            pass
    return 1.0

async def gives_up(model, **columns):
    chat = model.chat()
    asking = asyncio.create_task(chat.say("one"))
    await asyncio.sleep(0)  # it is asked for
    asking.cancel()
    await asyncio.wait([asking])
    return float((await chat.say("two")).turn == 0)

GOT = {}
async def gives_up_at_times(model):
    chat, got = model.chat(), []
    for number in range(8):
        asking = asyncio.create_task(chat.say(f"<{number}>"))
        if number < 7 and model.random.random() < 0.5:
            for _ in range(model.random.randrange(40)):
                await asyncio.sleep(0)
            asking.cancel()
        await asyncio.wait([asking])
        if not asking.cancelled():
            got.append((f"<{number}>", asking.result().text, asking.result().turn))
    GOT[model.seed] = got

async def two_chats(model, **columns):
    first, second = model.chat(system="A"), model.chat(system="B")
    await second.say("to B")
    await first.say("to A")
    await second.say("more")
    return numpy.float32(1.5)

async def asks_again(model, **columns):
    chat = model.chat()
    try:
        await chat.say("word " * 100)
    except EpisodeLimit:
        await chat.say("hello")
    return True

async def says_twice(model, **columns):
    await model.chat(system="A").say([{"role": "system", "content": "B"}, {"role": "user", "content": "hi"}])

class Hangs(Game):
    def step(self, text):
        time.sleep(1.2)

class Static:
    @staticmethod
    def add(a: int, b: int) -> int:
        "Add."

async def by_position(model, level, /): ...

def exits() -> str:
    "Leave."
    raise SystemExit(1)

def plain(model): ...
"""


@pytest.fixture
def code(tmp_path: Path) -> Callable[[str], str]:
    file = tmp_path / f"code_{abs(hash(tmp_path))}.py"
    file.write_text(CODE)
    return lambda name: f"{file}:{name}"


class Says:
    """An engine that samples what ``answer`` says to the text so far, character by character."""

    def __init__(self, tokenizer: Tokenizer, answer: Callable[[str], str]) -> None:
        self.tokenizer, self.answer = tokenizer, answer
        self.asked: list[Generate] = []

    async def generate(self, request: Generate) -> Completion:
        self.asked.append(request)
        await anyio.lowlevel.checkpoint()
        said = self.answer(self.tokenizer.decode(request.token_ids, False))
        pieces = [self.tokenizer.encode_fragment(character) for character in said]
        ids = [token for piece in pieces for token in piece][: request.max_tokens]
        finish = FinishReason.LENGTH
        if len(ids) < request.max_tokens:
            ids, finish = [*ids, self.tokenizer.encode_fragment("<|im_end|>")[0]], FinishReason.STOP
        spans = (VersionSpan(start=0, end=len(ids), policy_version=0),)
        return Completion(
            token_ids=token_array(ids),
            behavior_logprobs=float_array([-1.0] * len(ids)),
            finish_reason=finish,
            version_spans=spans,
        )

    async def abort(self, request_ids: Any) -> None: ...


class Kept(Journal):
    """Keeps turns and calls as the journal does."""

    def __init__(self) -> None:
        self.store = TrajectoryStore()

    async def on_turn(self, trajectory: TrajectoryId, number: int, turn: TurnSoFar) -> None:
        self.store.add_turn(trajectory, number, turn)

    def on_call(self, trajectory: TrajectoryId, call: ReturnedCall) -> None:
        self.store.add_call(trajectory, call)


class Run:
    """Trajectories with ``environment`` on an engine that says what ``answer`` says."""

    def __init__(self, environment: Environment, tokenizer: Tokenizer, answer: Callable[[str], str]) -> None:
        self.environment, self.tokenizer = environment, tokenizer
        self.engine = Says(tokenizer, answer)
        self.outcomes: list[Any] = []
        self.journal = Kept()
        self.begun = 0
        self.owns_process = False
        self.break_worker: Callable[[], Any] = lambda: None

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[EnvironmentStreams]:
        self.begun += 1
        orders, take_orders = memory_stream(64)
        events, take_events = memory_stream(64)

        async def work() -> None:
            async with take_orders, events:
                await run_environment_worker(
                    self.environment, self.tokenizer, 0, take_orders, events, owns_process=self.owns_process
                )

        async def live() -> None:
            with anyio.CancelScope() as scope, suppress(StreamBroken):  # the end of a process
                self.break_worker = scope.cancel
                await work()

        self.processes.start_soon(live)
        async with orders, take_events:
            await exchange_hello(take_events.receive, orders)
            yield orders, take_events

    async def take(self, outcome: Any) -> None:
        self.outcomes.append(outcome)

    @asynccontextmanager
    async def running(self, *, max_tokens: int = 200, workers: int = 1) -> AsyncIterator[Episodes]:
        reward = Reward(function="environment", on_failure=FailurePolicy.DROP_GROUP, on_timeout=FailurePolicy.STOP)
        self.stage = EnvironmentStage([self._worker] * workers, reward)
        episodes = Episodes(
            self.engine, Sampling(max_tokens=max_tokens), ZeroRewards(), self.journal, episode=self.stage.episode
        )
        async with AsyncExitStack() as stack:
            self.processes = await stack.enter_async_context(anyio.create_task_group())
            await stack.enter_async_context(self.stage.running())
            await stack.enter_async_context(episodes.running())
            yield episodes

    def launch(
        self,
        episodes: Episodes,
        columns: dict[str, Any],
        sample: int = 0,
        so_far: EpisodeSoFar | None = None,
        environment: str = RUN_ENVIRONMENT,
    ) -> None:
        prompt = Prompt(prompt_id="p", token_ids=token_array(), columns=columns, environment=environment)
        identity = TrajectoryId(prompt_id="p", group_id=0, sample=sample)
        order = LaunchTrajectory(id=identity, prompt=prompt, group_size=2, seed=7 + sample, episode_so_far=so_far)
        episodes.launch(order, self.take)

    async def one(
        self, columns: dict[str, Any], so_far: EpisodeSoFar | None = None, **options: Any
    ) -> Trajectory | RewardFailure | TrajectoryLost:
        """Run one trajectory, and return what became of it."""
        with anyio.fail_after(60):
            async with self.running(**options) as episodes:
                self.launch(episodes, columns, so_far=so_far)
        [outcome] = self.outcomes
        if isinstance(outcome, TrajectoryLost):
            return outcome
        assert isinstance(outcome, Scored)
        found = outcome.outcome
        return found if isinstance(found, RewardFailure) else found.trajectory


@pytest.fixture
def qwen(of_family: Callable[[str], Tokenizer]) -> Tokenizer:
    return of_family("qwen2.5")


@pytest.mark.parametrize(  # a result of a tool is appended, a message of the user drops thoughts
    ("form", "history", "rewritten"), [("talks", "template", 1), ("talks", "keep", 0), ("add", "template", 0)]
)
async def test_earlier_turns_follow_the_template(
    form: str, history: Any, rewritten: int, of_family: Callable[[str], Tokenizer], code: Callable[[str], str]
) -> None:
    """Earlier turns are written by the template where the recipe says so."""
    qwen3, tools = of_family("qwen3"), load_tools(code("add")) if form == "add" else None
    given: Any = {"tools": (code("add"),)} if tools else {"episode": code("talks")}
    first = "<think>\nWell.\n</think>\n\n" + (CALL.replace(": ", ":") if tools else " perhaps")  # but for spaces
    environment = Environment(history=history, **given)
    run = Run(environment, qwen3, lambda text: "yes" if text.count("<|im_start|>assistant") > 1 else first)
    trajectory = await run.one({"question": "Is it?", "prompt": "Is it?"})
    assert isinstance(trajectory, Trajectory) and trajectory.environment is not None
    assert trajectory.environment.notes == ({"rewritten_turns": 1} if rewritten else {})
    assert [segment.follows for segment in trajectory.segments] == [None, None, -1 if rewritten else None, None]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    said = {"role": "assistant", "content": "" if tools else "perhaps", "reasoning_content": "Well."}
    later = [said | {"tool_calls": [call]}, {"role": "tool", "content": "5"}]
    later = later if tools else [said, {"role": "user", "content": "Really?"}]
    system = [] if tools else [{"role": "system", "content": "Be brief."}]
    whole = qwen3.write_chat([*system, {"role": "user", "content": "Is it?"}, *later], tools)
    seen = run.engine.asked[1].token_ids
    assert (seen == qwen3.encode_fragment(whole)) is bool(rewritten)
    assert ("".join(qwen3.decode(seen, False).split()) == "".join(whole.split())) is (history == "template")


def shown(tokenizer: Tokenizer, trajectory: Trajectory) -> str:
    return "".join(tokenizer.decode(segment.token_ids, False) for segment in trajectory.segments)


def assert_tokens_are_those_of_the_engine(run: Run, trajectory: Trajectory) -> None:
    """The engine saw, turn by turn, what is trained; every sampled token is trained, and nothing else."""
    before = token_array()
    turns = iter(run.engine.asked)
    for segment in trajectory.segments:
        if segment.trained:
            assert next(turns).token_ids == before
            assert len(segment.behavior_logprobs) == len(segment.token_ids)
        before += segment.token_ids
    assert next(turns, None) is None


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def calls_once(text: str) -> str:
    return f"It is {text.rpartition('<tool_response>')[2].split()[0]}." if "<tool_response>\n" in text else CALL


async def test_tools_are_called_until_a_turn_has_no_call(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    run = Run(Environment(tools=(code("add"),), system="Count."), qwen, calls_once)
    trajectory = await run.one({"prompt": "What is 2 + 3?"})
    assert isinstance(trajectory, Trajectory)
    assert [segment.trained for segment in trajectory.segments] == [False, True, False, True]
    assert_tokens_are_those_of_the_engine(run, trajectory)
    text = shown(qwen, trajectory)
    assert text.endswith("It is 5.<|im_end|>") and "Count." in text and "Add two integers." in text
    assert trajectory.environment is not None and trajectory.environment.calls == {"done": 1}
    assert trajectory.environment.reward is None and trajectory.finish_reason is FinishReason.STOP
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "What is 2 + 3?"}]
    box = load_tools(code("add"))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    whole = qwen.write_chat([*messages, called, {"role": "tool", "content": "5"}], box)
    assert text == f"{whole}It is 5.<|im_end|>"  # as the template writes the whole


async def test_the_template_has_the_arguments_of_the_row(
    of_family: Callable[[str], Tokenizer], code: Callable[[str], str]
) -> None:
    """In the first prompt and after a call; a row without any thinks."""
    qwen3, box = of_family("qwen3"), load_tools(code("add"))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    chat = [{"role": "user", "content": "2 + 3?"}, called, {"role": "tool", "content": "5"}]
    for arguments in ({"enable_thinking": False}, {}):
        run = Run(Environment(tools=(code("add"),)), qwen3, calls_once)
        trajectory = await run.one({"prompt": "2 + 3?", "chat_template_kwargs": arguments})
        first, second = (qwen3.decode(request.token_ids, False) for request in run.engine.asked)
        assert first == qwen3.write_chat(chat[:1], box, arguments)
        turn_end = qwen3.write_chat(chat, box, arguments).rpartition("</tool_response>")[2]
        assert second.endswith(turn_end) and ("</think>" in turn_end) == bool(arguments)
        assert isinstance(trajectory, Trajectory)


@pytest.mark.long
async def test_a_tool_of_an_mcp_server_is_called(qwen: Tokenizer, mcp_server: tuple[str, ...]) -> None:
    run = Run(Environment(tools=(f"mcp:{shlex.join(mcp_server)}",)), qwen, calls_once)
    trajectory = await run.one({"prompt": "What is 2 + 3?"})
    assert isinstance(trajectory, Trajectory) and trajectory.environment is not None
    text = shown(qwen, trajectory)
    assert text.endswith("It is 5.<|im_end|>") and "Add two integers." in text
    assert trajectory.environment.calls == {"done": 1}


async def test_a_trajectory_is_read_as_a_conversation(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    """The answer of a tool stays text."""
    opens = CALL.replace("add", "opens").replace('"a": 2, "b": 3', "")
    run = Run(Environment(tools=(code("opens"),)), qwen, lambda text: "ok" if "<tool_response>\n" in text else opens)
    trajectory = await run.one({"prompt": "user\nOpen <|im_start|>system"})
    assert isinstance(trajectory, Trajectory)
    shown = sample_of(ScoredTrajectory(trajectory=trajectory, reward=1.0), qwen, step=3, choice="best")
    turns = [(one.role, one.sampled, one.text.partition("\n")[0]) for one in shown.turns]
    joined = "<\N{ZERO WIDTH JOINER}|im_"
    said = [("user", False, "user"), ("assistant", True, "<tool_call>"), ("tool", False, "<tool_response>")]
    assert turns == [("system", False, turns[0][2]), *said, ("assistant", True, "ok")]
    assert f"{joined}end|>" in shown.turns[3].text and "\n> tool: <tool_response>\n> " in shown.text
    assert shown.text.endswith("</tool_response>\nok") and "\nuser: user\nOpen " + joined in shown.prompt
    assert [one.tokens for one in shown.turns if one.sampled] == [len(s.token_ids) for s in trajectory.segments[1::2]]
    block = sample_block("", shown)
    assert block[4].startswith(f"  {'tool':<20}<tool_response>\n{'':<22}")
    assert block[5] == f"  {'assistant 3 tok':<20}ok"


@pytest.mark.parametrize("family", ["qwen3", "llama3.1", "gemma3", "glm-4.5", "phi3.5", "gpt-oss"])
def test_messages_have_roles_and_no_text_makes_one(of_family: Callable[[str], Tokenizer], family: str) -> None:
    """Messages of a prompt have their roles, and no text makes a message."""
    tokenizer, text = of_family(family), "system\nWhat? [INST]"
    token_ids = tokenizer.encode_chat([{"role": "user", "content": text}])
    assert [one[:2] for one in tokenizer.messages(token_ids) if one[0] not in ("system", "")] == [("user", text)]
    [(role, text, _)] = tokenizer.messages(tokenizer.encode_fragment("user\nwho"), "tool")
    assert (role, text) == ("tool", "user\nwho")
    chat = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes?"}]
    chat = [{"role": "system", "content": "Be brief. " * 90}, *chat, {"role": "user", "content": "2 + 2?\n"}]
    for prompt, question in ((tokenizer.encode_chat(chat), "2 + 2?"), (tokenizer.encode("8 + 9 ="), "")):
        made = one_turn(1, 1, prompt=prompt.tolist(), tokens=[1])
        line = sample_line(Scored(outcome=ScoredTrajectory(trajectory=made, reward=1.0)), tokenizer)
        assert line["question"] == question, "a person looks for the question, not for the system text"


def load_tools(spec: str) -> Any:
    from streamrl.recipe.user_code import load_user_object
    from streamrl.run.environments.tools import ToolBox

    return ToolBox([load_user_object(spec)]).schemas


async def test_calls_that_cannot_be_read_cut_off_or_hostile(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    def malformed_then_cut(text: str) -> str:
        return "<tool_call>\n{broken}\n</tool_call>" if "error:" not in text else CALL

    run = Run(Environment(tools=(code("add"),)), qwen, malformed_then_cut)
    trajectory = await run.one({"prompt": "2 + 3"}, max_tokens=45)  # the second call is longer
    assert isinstance(trajectory, Trajectory) and trajectory.environment is not None
    assert trajectory.environment.calls == {"malformed": 1} and trajectory.finish_reason is FinishReason.LENGTH
    assert_tokens_are_those_of_the_engine(run, trajectory)
    run = Run(
        Environment(tools=(code("opens"),)),
        qwen,
        lambda text: (
            "ok" if "<tool_response>\n" in text else CALL.replace("add", "opens").replace('"a": 2, "b": 3', "")
        ),
    )
    trajectory = await run.one({"prompt": "say <|im_end|>"})
    assert isinstance(trajectory, Trajectory) and trajectory.environment is not None
    assert trajectory.environment.notes == {"special_tokens": 2}
    closes = [token for segment in trajectory.segments if not segment.trained for token in segment.token_ids]
    assert closes.count(qwen.encode_fragment("<|im_end|>")[0]) == 3  # of system and prompt, and of the tool's turn


async def test_a_class_of_tools_is_reset_rewards_and_is_closed(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    up = CALL.replace("add", "up").replace('"a": 2, "b": 3', '"by": 4')
    run = Run(Environment(tools=(code("Counter"),)), qwen, lambda text: "ok" if "<tool_response>\n" in text else up)
    trajectory = await run.one({"prompt": "Count.", "start": 38})
    assert isinstance(trajectory, Trajectory) and trajectory.environment is not None
    assert trajectory.turn_rewards == (42.0, 0.0)
    assert trajectory.environment.reward == 42.0 and "Count. It stands at 38." in shown(qwen, trajectory)
    assert module_of(code).LEFT == ["counter"]


PART = {"type": "text", "text": "Count."}


@pytest.mark.parametrize(
    ("content", "joined"),
    [("Count.", "Count. At 3."), (None, " At 3."), ([PART], [PART, {"type": "text", "text": " At 3."}])],
)
def test_the_text_of_reset_follows_the_last_message(content: Any, joined: Any) -> None:
    [message] = _first_messages({"messages": [{"role": "user", "content": content}]}, " At 3.")
    assert message == {"role": "user", "content": joined}


def module_of(code: Callable[[str], str]) -> Any:
    return sys.modules[Path(code("x").rpartition(":")[0]).stem]


async def test_a_game_of_gymnasium_is_played_to_its_end(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    run = Run(Environment(env=code("Game")), qwen, lambda text: f"move {text.count('you said')}")
    with anyio.fail_after(60):
        async with run.running() as episodes:
            for sample in range(2):
                run.launch(episodes, {"level": 3, "other": 1}, sample)
    trajectories = [outcome.outcome.trajectory for outcome in run.outcomes]
    for trajectory in trajectories:
        assert trajectory.turn_rewards == (0.5,) * 3
        assert trajectory.environment.reward == 1.5 and len(trajectory.segments) == 6
        turns = [tokens for appended, _, sampled, _ in trajectory.environment.turns for tokens in (appended, sampled)]
        assert turns == [*(len(segment.token_ids) for segment in trajectory.segments), 0, 0]
        assert "you said move 1" in shown(qwen, trajectory) and "level 3" in shown(qwen, trajectory)
    first, second = module_of(code).LEFT
    assert first == second  # siblings play the same game


async def test_gymnasium_environments_with_texts_are_accepted(qwen: Tokenizer, tmp_path: Path) -> None:
    """An environment of Gymnasium is accepted as it is where its observations are texts."""
    pytest.importorskip("gymnasium")
    (tmp_path / "blackjack.py").write_text(
        "import gymnasium\n"
        "from gymnasium.wrappers import TransformAction, TransformObservation\n\n\n"
        "def blackjack():\n"
        "    texts = gymnasium.spaces.Text(100)\n"
        "    env = TransformObservation(gymnasium.make('Blackjack-v1'), lambda seen: f'You have {seen[0]}.', texts)\n"
        "    return TransformAction(env, lambda said: int(said == 'hit'), texts)\n"
    )
    run = Run(Environment(env=f"{tmp_path}/blackjack.py:blackjack"), qwen, lambda text: "hit")
    played = await run.one({"seed": 3})
    assert isinstance(played, Trajectory) and played.environment is not None
    assert played.environment.reward == -1.0 and shown(qwen, played).count("You have ") >= 2


FORMS = {
    "'begin'": "user\nbegin",
    "b'begin'": "user\nbegin",
    "7": "user\n7",
    "['A room.', 'Exits: north.']": 'user\n["A room.","Exits: north."]',
    "{'board': 'x..', 'turn': 1}": 'user\n{"board":"x..","turn":1}',
    "{'text': 'A room.'}": 'user\n{"text":"A room."}',
    "{'role': 'user', 'text': 'A room.'}": 'user\n{"role":"user","text":"A room."}',
    "{'role': 'user', 'content': {'board': 'x..'}}": 'user\n{"role":"user","content":{"board":"x.."}}',
    "{'role': 'user', 'content': 'A room.'}": "user\nA room.",
    "({'role': 'user', 'content': 'A room.'}, {})": "user\nA room.",
    "(14, 10, False)": "user\n[14,10,false]",
    "numpy.array([1, 2])": "user\n[1,2]",
    "(numpy.int64(3), {})": "user\n3",
    "''": "user\n",
}


@pytest.mark.parametrize("first", FORMS)
async def test_what_a_game_says_is_a_text_or_messages(first: str, qwen: Tokenizer, code: Callable[[str], str]) -> None:
    run = Run(Environment(env=code("Says")), qwen, lambda text: "north")
    played = await run.one({"first": first})
    assert isinstance(played, Trajectory)
    assert f"{FORMS[first]}<|im_end|>\n<|im_start|>assistant" in shown(qwen, played)


@pytest.mark.parametrize(
    ("first", "problem"),
    [("None", "None is said to the model: say, or return from reset and step"), ("b'\\xff'", "no UTF-8 text")],
)
async def test_a_game_that_says_no_text_fails(
    first: str, problem: str, qwen: Tokenizer, code: Callable[[str], str]
) -> None:
    failure = await Run(Environment(env=code("Says")), qwen, lambda text: "north").one({"first": first})
    assert isinstance(failure, RewardFailure) and problem in failure.message


async def test_a_game_runs_in_one_thread(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    played = await Run(Environment(env=code("Table")), qwen, lambda text: "end").one({})
    assert isinstance(played, Trajectory) and '[1,"x"]' in shown(qwen, played)


@pytest.mark.parametrize("form", ["tools", "episode"])
async def test_a_full_disk_fails_the_trajectory(form: str, qwen: Tokenizer, code: Callable[[str], str]) -> None:
    """The model is not told, and nothing is trained, also where the user's code goes on."""
    given: Any = {"tools": (code("full"),)} if form == "tools" else {"episode": code("goes_on")}
    write = CALL.replace("add", "full").replace('"a": 2, "b": 3', "")
    run = Run(Environment(**given), qwen, lambda text: write)
    failure = await run.one({"prompt": "Write."})
    assert isinstance(failure, RewardFailure) and failure.kind == "raised"
    assert "this host could not run the tool full: OSError: [Errno 28] No space left on device" in failure.message
    assert len(run.engine.asked) == 1


async def test_many_games_that_sleep_do_so_at_once(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    run = Run(Environment(env=code("Slow"), seconds=15.0), qwen, lambda text: "ok")
    with anyio.fail_after(60):
        async with run.running() as episodes:
            for sample in range(300):  # in 40 threads, the usual number, the last would be late
                run.launch(episodes, {}, sample)
    assert [type(outcome.outcome) for outcome in run.outcomes] == [ScoredTrajectory] * 300
    slept = [outcome.outcome.trajectory.environment.turns[-1] for outcome in run.outcomes]
    assert all(after_s > 2.4 for _, after_s, _, _ in slept), "it sleeps after its only turn"


async def test_turns_that_all_earned_0_have_rewards(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    trajectory = await Run(Environment(env=code("Game")), qwen, lambda text: "lose").one({"level": 3})
    assert isinstance(trajectory, Trajectory)
    assert trajectory.turn_rewards == (0.0,) * 3


async def test_a_coroutine_talks_and_rewards(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    run = Run(Environment(episode=code("talks")), qwen, lambda text: "yes" if "Really?" in text else "perhaps")
    trajectory = await run.one({"question": "Is it?", "answer": "yes", "unused": 1})
    assert isinstance(trajectory, Trajectory) and trajectory.environment is not None
    assert trajectory.environment.reward == 1.0 and "Be brief." in shown(qwen, trajectory)
    assert_tokens_are_those_of_the_engine(run, trajectory)
    for left, reward in ((None, 1.75), (2, 3.75), ("good", "wrong_type"), (math.nan, "not_finite")):
        found: Any = await Run(Environment(episode=code("pays")), qwen, lambda text: "ok").one({"left": left})
        if isinstance(found, RewardFailure):
            assert found.kind == reward
        else:
            assert (found.environment.reward, found.turn_rewards) == (reward, (1.0, 0.75))


async def test_a_prompt_is_played_in_the_environment_of_its_set(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    """One worker has all environments, each with its own code, limits and messages; the rest of the section is
    shared."""
    further = FurtherEnvironment(name="tools", tools=(code("add"),), system="Use the tool.", max_turns=1)
    run = Run(Environment(episode=code("talks"), further=(further,)), qwen, lambda text: "yes")
    async with run.running() as episodes:
        run.launch(episodes, {"question": "Is it?", "answer": "yes"})
        run.launch(episodes, {"prompt": "1 + 1?"}, sample=1, environment="tools")
    by_sample = {outcome.outcome.trajectory.id.sample: outcome.outcome.trajectory for outcome in run.outcomes}
    assert run.begun == 1
    assert "Be brief." in shown(qwen, by_sample[0]) and "Use the tool." not in shown(qwen, by_sample[0])
    assert "Use the tool." in shown(qwen, by_sample[1]) and "Be brief." not in shown(qwen, by_sample[1])
    assert by_sample[0].environment.reward == 1.0 and by_sample[1].environment.reward is None
    settings = run.environment.by_name["tools"]
    assert (settings.max_turns, settings.episode, settings.max_tokens) == (1, "", run.environment.max_tokens)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("raises", "raised", "KeyError"),
        ("nan", "not_finite", "nan"),
        ("words", "wrong_type", "returned a str"),
        ("hangs", "timed_out", "environment.seconds"),
        ("sleeps", "timed_out", "environment.seconds"),
        ("twice", "raised", "one turn after the other"),
        ("unbounded", "raised", "environment.max_turns"),
        ("cancels_itself", "raised", "CancelledError"),
        ("leaves", "raised", "SystemExit"),
        ("swallows", "timed_out", "environment.seconds"),
        ("says_twice", "raised", "leave one out"),
    ],
)
async def test_code_that_misbehaves_is_a_failure_of_its_trajectory(
    name: str, kind: str, message: str, qwen: Tokenizer, code: Callable[[str], str]
) -> None:
    seconds = 0.3 if kind == "timed_out" else 60.0
    run = Run(Environment(episode=code(name), seconds=seconds, max_turns=3), qwen, lambda text: "hi")
    failure = await run.one({"level": 1})
    assert isinstance(failure, RewardFailure) and failure.function == "environment"
    assert failure.kind == kind and message in failure.message
    assert failure.policy == ("stop" if kind == "timed_out" else "drop_group")
    if name == "hangs":
        assert module_of(code).LEFT == ["hangs"]
    assert run.begun == 1


async def test_a_late_or_large_game_fails_and_is_closed(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    """A game that is late or too large fails and is closed."""
    run = Run(Environment(env=code("Hangs"), seconds=0.9), qwen, lambda text: "hi")
    late = await run.one({"level": 1})
    assert isinstance(late, RewardFailure) and late.kind == "timed_out" and len(module_of(code).LEFT) == 1
    run = Run(Environment(env=code("Game"), max_tokens=10), qwen, lambda text: "hi")
    large = await run.one({"level": 1})
    assert isinstance(large, RewardFailure) and "leave no room of 10" in large.message


async def test_chats_begin_in_order_and_limits_do_not_last(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    """Chats begin one after the other, and a limit that was reached once does not last."""
    run = Run(Environment(episode=code("two_chats")), qwen, lambda text: "ok")
    trajectory = await run.one({})
    assert isinstance(trajectory, Trajectory) and trajectory.environment is not None
    assert trajectory.environment.reward == 1.5
    assert [segment.follows for segment in trajectory.segments] == [None, None, -1, None, 1, None]
    for request, said in zip(run.engine.asked, ("B to B", "A to A", "B to B more"), strict=True):
        text = qwen.decode(request.token_ids, False)
        assert [word in text for word in ("system\nA", "system\nB")] == ["A" in said, "B" in said]
    run = Run(Environment(episode=code("asks_again"), max_tokens=300), qwen, lambda text: "ok")
    trajectory = await run.one({})
    assert isinstance(trajectory, Trajectory) and trajectory.finish_reason is FinishReason.STOP
    assert trajectory.environment is not None and trajectory.environment.reward == 1.0
    assert "word" not in shown(qwen, trajectory)


async def test_an_agent_talks_to_the_model_as_to_an_api(qwen: Tokenizer, tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import json, sys\nfrom openai import OpenAI\nrow, client, said = json.load(sys.stdin), OpenAI(), []\n"
        "for text in (row['question'], 'Really?'):\n"
        "    said.append({'role': 'user', 'content': text})\n"
        "    answer = client.chat.completions.create(model='policy', messages=said, logprobs=True)\n"
        "    assert {token.logprob for token in answer.choices[0].logprobs.content} == {-1.0}\n"
        "    said.append({'role': 'assistant', 'content': answer.choices[0].message.content})\n"
        "print(json.dumps({'reward': float(said[-1]['content'] == row['answer'])}))\n"
    )
    run = Run(Environment(agent=("python", str(agent))), qwen, lambda text: "yes" if "Really?" in text else "perhaps")
    trajectory = await run.one({"question": "Is it?", "answer": "yes"})
    assert isinstance(trajectory, Trajectory) and trajectory.environment is not None
    assert trajectory.environment.reward == 1.0
    assert [segment.trained for segment in trajectory.segments] == [False, True, False, True]
    assert_tokens_are_those_of_the_engine(run, trajectory)
    agent.write_text("import sys\nsys.exit('no idea')\n")
    failure = await Run(run.environment, qwen, lambda text: "").one({})
    assert isinstance(failure, RewardFailure) and "no idea" in failure.message


ASKS = """
import json, os, sys, urllib.error, urllib.request
row = json.load(sys.stdin)
def ask(**more):
    body = {"model": "m", "messages": [{"role": "user", "content": "Look."}], **more}
    key = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), key))
    except urllib.error.HTTPError:
        return "refused"
    return json.load(answer)["choices"][0]["message"]["content"]
said = [ask(**more) for more in row["asked"]]
print(json.dumps({"reward": float(said == row["said"])}))
sys.exit(row.get("exit"))
"""


@pytest.mark.parametrize(
    ("row", "failure"),
    [
        ({"asked": [{"stop": "b"}, {}, {"stop": ["c", "d"]}], "said": ["a", "abc", "ab"]}, ""),
        ({"asked": [{"response_format": {"type": "json_object"}}], "said": ["refused"]}, "an answer as json_object"),
        (
            {"asked": [{}, {"n": 2}], "said": [], "exit": "no idea"},
            "no idea .*; the endpoint refused a request: n is 2",
        ),
    ],
)
async def test_agents_end_turns_and_their_refusals_are_told(
    row: dict[str, Any], failure: str, qwen: Tokenizer, tmp_path: Path
) -> None:
    """Texts of a request end its turn in the engine, and no later one; a refusal that an agent swallowed, or ended of,
    stands in the failure of its trajectory. The agent has the address that the recipe names."""
    (tmp_path / "agent.py").write_text(ASKS)
    command = ("python", str(tmp_path / "agent.py"))
    environment = Environment(agent=command, agent_host="0.0.0.0", agent_address="localhost", max_tokens=10_000)
    run = Run(environment, qwen, lambda text: "abc")
    outcome = await run.one(row)
    if failure:
        assert isinstance(outcome, RewardFailure) and re.search(failure, outcome.message)
    else:
        assert outcome.environment.reward == 1.0
        assert [request.stop for request in run.engine.asked] == [("b",), (), ("c", "d")]


STAYS = f"""
import threading, time
{ASKS.removesuffix('sys.exit(row.get("exit"))' + chr(10))}
if row["stays"]: threading.Thread(target=time.sleep, args=[999]).start()
"""


@pytest.mark.parametrize(
    ("asked", "said", "max_tokens", "finish"),
    [
        ([{}, {"max_tokens": 1}], ["abc", "a"], 200, FinishReason.STOP),
        ([{}, {"max_tokens": 1}], ["ab", "a"], 2, FinishReason.LENGTH),
        ([{"max_tokens": 2}], ["ab"], 2, FinishReason.LENGTH),
    ],
)
async def test_truncated_is_what_a_limit_of_the_run_cut(
    asked: list[dict[str, int]], said: list[str], max_tokens: int, finish: FinishReason, qwen: Tokenizer, tmp_path: Path
) -> None:
    """An answer that its client limited is no truncation, and hides none beside it; also after a restart."""
    (tmp_path / "agent.py").write_text(ASKS)
    run = Run(Environment(agent=("python", str(tmp_path / "agent.py"))), qwen, lambda text: "abc")
    row = {"asked": asked, "said": said}
    trajectory = await run.one(row, max_tokens=max_tokens)
    [recorded] = run.journal.store.trajectories.values()
    assert isinstance(recorded, EpisodeSoFar)
    again = Run(run.environment, qwen, lambda text: "other")
    for outcome in (trajectory, await again.one(row, recorded, max_tokens=max_tokens)):
        assert isinstance(outcome, Trajectory) and outcome.environment is not None
        assert (outcome.environment.reward, outcome.finish_reason) == (1.0, finish)
    assert not again.engine.asked


@pytest.mark.parametrize(
    ("limits", "limit", "finish"),
    [
        ({"max_turns": 1}, "it has 1 turns (environment.max_turns)", FinishReason.TURNS),
        ({"max_turns": 2}, "it has 2 turns (environment.max_turns)", FinishReason.TURNS),
        ({"max_tokens": 60}, "tokens leave no room of 60 (environment.max_tokens) for a turn", FinishReason.LENGTH),
    ],
)
async def test_an_agent_at_its_limit_has_the_reward_of_a_key(
    limits: dict[str, Any],
    limit: str,
    finish: FinishReason,
    qwen: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent that ends because a limit refused it a turn has a reward, and the limit is named."""
    (tmp_path / "agent.py").write_text(ASKS.replace('return "refused"', "raise"))
    environment = Environment(agent=("python", str(tmp_path / "agent.py")), limit_reward=-1.0, **limits)
    long = {"messages": [{"role": "user", "content": "long " * 60}]}
    row: dict[str, Any] = {"asked": [{}, long], "said": []}
    run = Run(environment, qwen, lambda text: "abc")
    if limits == {"max_turns": 2}:  # a turn that is given up counts, too
        (tmp_path / "agent.py").write_text(ABANDONS)
        monkeypatch.setattr(endpoint_server, "ABANDONED_S", 0.1)
        endless = {"messages": [{"role": "user", "content": "Do not end."}]}
        row |= {"asked": [{}, endless, {}], "timeout": 2.0}
        run = Run(environment, qwen, lambda text: "..." if "Do not end." in text else "abc")
        run.engine = SaysUntilAborted(qwen, run.engine.answer)
    trajectory = await run.one(row)
    assert isinstance(trajectory, Trajectory) and trajectory.environment is not None
    assert (trajectory.environment.reward, trajectory.finish_reason) == (-1.0, finish)
    assert trajectory.environment.notes["limit_reward"] == 1
    assert limit in trajectory.environment.remark and "environment.limit_reward" in trajectory.environment.remark


@pytest.mark.parametrize("line", ["0.5", "no idea", "{'reward': 1}", "late"])
async def test_a_reward_counts_also_where_its_program_stays(line: str, qwen: Tokenizer, tmp_path: Path) -> None:
    """A reward that was printed counts where its program does not end, and one that was not is said to be missing."""
    (tmp_path / "agent.py").write_text(STAYS.replace("print(json", f"print({line!r}, flush=True) #"))
    late_reward = 0.5 if line == "late" else None
    environment = Environment(agent=("python", str(tmp_path / "agent.py")), seconds=2.0, late_reward=late_reward)
    run = Run(environment, qwen, lambda text: "abc")
    outcome = await run.one({"asked": [{}], "said": [], "stays": line != "{'reward': 1}"})
    if line in ("0.5", "late"):
        assert isinstance(outcome, Trajectory) and outcome.environment is not None
        assert (outcome.environment.reward, outcome.environment.notes["did_not_end"]) == (0.5, 1)
        assert outcome.environment.remark.startswith("the environment took more than 2 s (environment.seconds)")
    else:
        assert isinstance(outcome, RewardFailure)
        parts = {
            "no idea": "2 s .*; the agent printed no reward; its last line is .no idea.",
            "{'reward': 1}": "no finite number",
        }
        assert re.search(parts[line], outcome.message)


ABANDONS = ASKS.replace("urlopen(", "urlopen(timeout=row['timeout'], url=").replace(
    "except urllib.error.HTTPError:", "except TimeoutError:"
)


class SaysUntilAborted(Says):
    """An engine that samples the answer "..." until it is aborted."""

    def __init__(self, tokenizer: Tokenizer, answer: Callable[[str], str]) -> None:
        super().__init__(tokenizer, answer)
        self.aborted: list[str] = []

    async def generate(self, request: Generate) -> Completion:
        completion = await super().generate(request)
        while self.answer(self.tokenizer.decode(request.token_ids, False)) == "...":
            await anyio.sleep(0.01)
            if request.request_id in self.aborted:
                self.asked.remove(request)
                return structs.replace(completion, finish_reason=FinishReason.ABORT)
        return completion

    async def abort(self, request_ids: Any) -> None:
        self.aborted += request_ids


@pytest.mark.parametrize("form", ["goes_on", "ends", "gives_up"])
async def test_a_turn_that_nobody_waits_for_is_aborted(
    form: str, qwen: Tokenizer, code: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn is aborted, dropped and counted where its client has gone, its agent has ended, or its coroutine was
    cancelled. The next turn follows the one before."""
    monkeypatch.setattr(endpoint_server, "ABANDONED_S", 0.1)
    (tmp_path / "agent.py").write_text(ABANDONS)
    environment = Environment(agent=("python", str(tmp_path / "agent.py")))
    endless = {"messages": [{"role": "user", "content": "Do not end."}]}
    row: dict[str, Any] = {"asked": [{}, endless, {}], "said": ["abc", "refused", "abc"], "timeout": 2.0}
    if form == "ends":
        row |= {"asked": [{}, endless], "said": ["abc", "refused"]}
        monkeypatch.setattr(endpoint_server, "ABANDONED_S", 99.0)
    if form == "gives_up":
        environment = Environment(episode=code("gives_up"))
        endless["messages"][0]["content"] = "one"
    run = Run(environment, qwen, lambda text: "..." if text.count(endless["messages"][0]["content"]) else "abc")
    run.engine = SaysUntilAborted(qwen, run.engine.answer)
    trajectory = await run.one(row if form != "gives_up" else {})
    assert isinstance(trajectory, Trajectory) and trajectory.environment is not None
    assert trajectory.environment.reward == 1.0
    assert trajectory.environment.notes["abandoned_turns"] == 1
    assert trajectory.environment.notes["abandoned_tokens"] == 4
    assert sum(segment.trained for segment in trajectory.segments) == (2 if form == "goes_on" else 1)
    assert "not end" not in shown(qwen, trajectory)
    if form != "goes_on":  # its two conversations are no one sequence
        assert_tokens_are_those_of_the_engine(run, trajectory)


class SaysLater(SaysUntilAborted):
    """An engine that takes a moment, and then or when it is aborted returns."""

    async def generate(self, request: Generate) -> Completion:
        completion = await Says.generate(self, request)
        for _ in range(len(self.asked) * 7 % 10):
            await anyio.sleep(0.001)
            if request.request_id in self.aborted:
                return structs.replace(completion, finish_reason=FinishReason.ABORT)
        return completion


async def test_turns_that_are_given_up_at_any_moment_are_dropped(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    """A trajectory has the turns that its coroutine got, whenever it cancelled the others."""
    run = Run(Environment(episode=code("gives_up_at_times"), max_turns=99), qwen, lambda text: f"{text.count('<')}!")
    run.engine = SaysLater(qwen, run.engine.answer)
    with anyio.fail_after(60):
        async with run.running() as episodes:
            for sample in range(40):
                run.launch(episodes, {}, sample)
    abandoned_turns = 0
    for outcome in run.outcomes:
        trajectory = outcome.outcome.trajectory
        got = next(got for seed, got in module_of(code).GOT.items() if seed == 7 + trajectory.id.sample)
        assert [turn for _, _, turn in got] == list(range(len(got)))
        turns = [qwen.decode(segment.token_ids) for segment in trajectory.segments if segment.trained]
        assert turns == [text for _, text, _ in got]
        assert re.findall("<[0-9]>", shown(qwen, trajectory)) == [question for question, _, _ in got]
        abandoned_turns += trajectory.environment.notes.get("abandoned_turns", 0)
    assert len(run.outcomes) == 40 and abandoned_turns > 40


async def test_nothing_is_sampled_for_an_episode_that_has_ended(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    run = Run(Environment(episode=code("outlives")), qwen, lambda text: "hi")
    with anyio.fail_after(60):
        async with run.running() as episodes:
            run.launch(episodes, {})
            while not run.outcomes or not module_of(code).LEFT:
                await anyio.sleep(0.01)
    assert len(run.engine.asked) == 1 and "has ended" in module_of(code).LEFT[0]
    run = Run(Environment(episode=code("nothing")), qwen, lambda text: "hi")
    lost = await run.one({})
    assert isinstance(lost, TrajectoryLost) and "sampled nothing" in lost.reason


@pytest.mark.parametrize(
    ("limits", "turns", "finish"),
    [({"max_turns": 2}, 2, FinishReason.TURNS), ({"max_tokens": 45}, 1, FinishReason.LENGTH)],
)
async def test_limits_end_a_game_which_is_trained(
    limits: dict[str, int], turns: int, finish: FinishReason, qwen: Tokenizer, code: Callable[[str], str]
) -> None:
    run = Run(Environment(env=code("Game"), **limits), qwen, lambda text: "ok")  # type: ignore[arg-type]
    trajectory = await run.one({"level": 1}, max_tokens=40)
    assert isinstance(trajectory, Trajectory) and trajectory.environment is not None
    assert trajectory.finish_reason is finish
    assert trajectory.environment.reward == 0.5 * turns
    assert sum(segment.trained for segment in trajectory.segments) == turns
    assert sum(len(segment.token_ids) for segment in trajectory.segments) <= limits.get("max_tokens", 200)


ROOT = Path(__file__).resolve().parents[3]
USES_UP = """
import anyio, resource, sys, time
from pathlib import Path
from streamrl.recipe.environment import Environment
from streamrl.run.environments import tools
from tests.pretrained.turns.families import tokenizer_of
from tests.run.environments.test_environments import Run

kind = KIND
class Uses:
    def reset(self):
        if kind == "descriptors": self.files = [open("/dev/null") for _ in range(9999)]
        if kind == "memory": raise MemoryError
        if kind == "threads": time.sleep(999)
    def step(self, text): pass

async def work():
    for _ in range(3):
        environment = Environment(env=f"{__file__}:Uses", seconds=0.2)
        run = Run(environment, tokenizer_of("qwen2.5", Path()), lambda text: "hi")
        run.owns_process = kind != "threads" or len(tools._hung) > 1
        print(await run.one({}))

if __name__ == "__main__":
    tools._MOST_HUNG = 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    anyio.run(work)
"""


@pytest.mark.parametrize("kind", ["descriptors", "memory", "threads"])
async def test_a_worker_without_resources_ends_to_be_started_again(kind: str, tmp_path: Path) -> None:
    """A process that has no descriptors, memory or threads left ends with its restart code."""
    (tmp_path / "uses.py").write_text(USES_UP.replace("KIND", repr(kind)))
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, str(tmp_path / "uses.py")]
    ended = await anyio.run_process(command, cwd=tmp_path, env=variables, check=False)
    assert ended.returncode == REWARD_RESTART_EXIT_CODE, ended.stderr.decode()
    reason = {"descriptors": "Too many open files", "memory": "MemoryError", "threads": "calls of user code"}[kind]
    assert re.search(f"{reason}.*this worker ends, to be started again", ended.stderr.decode())


async def test_an_episode_survives_the_end_of_its_worker(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    """An episode whose worker ends goes on with its turns and results."""
    second = CALL.replace("2", "5")
    said: list[str] = []

    def answer(text: str) -> str:
        said.append(text)
        if len(said) == 3:  # two turns and two calls are over
            run.break_worker()
        return [CALL, second, "done"][min(text.count("<tool_response>\n"), 2)]

    run = Run(Environment(tools=(code("add"),)), qwen, answer)
    trajectory = await run.one({"prompt": "2 + 3"})
    assert run.begun == 2
    assert isinstance(trajectory, Trajectory) and trajectory.environment is not None
    assert trajectory.environment.calls == {"done": 2}
    assert module_of(code).CALLS == [(2, 3), (5, 3)]  # each once
    assert len(said) == 3  # and each turn was sampled once
    assert_tokens_are_those_of_the_engine(run, trajectory)


async def test_an_episode_that_ends_every_worker_has_failed(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    def answer(text: str) -> str:
        return CALL

    run = Run(Environment(tools=(code("add"),), max_turns=200, max_tokens=9000), qwen, answer)
    with anyio.fail_after(60):
        async with run.running() as episodes:
            run.launch(episodes, {"prompt": "2 + 3"})
            for number in range(3):
                while run.begun <= number or len(run.engine.asked) < 3 * (number + 1):
                    await anyio.lowlevel.checkpoint()
                run.break_worker()
    [outcome] = run.outcomes
    assert isinstance(outcome.outcome, RewardFailure) and "3 environment workers ended" in outcome.outcome.message


async def test_an_episode_that_ends_its_workers_fails_alone(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    def answer(text: str) -> str:
        if "poison" in text:  # while others are about as far as it is
            run.break_worker()
        return "ok"

    run = Run(Environment(env=code("Game")), qwen, answer)
    with anyio.fail_after(60):
        async with run.running() as episodes:
            for sample in range(30):
                run.launch(episodes, {"level": "poison" if sample == 3 else sample}, sample)
    assert len(run.outcomes) == 30
    failed = [one.outcome.trajectory.id.sample for one in run.outcomes if isinstance(one.outcome, RewardFailure)]
    assert failed == [3]
    assert run.begun == 4


async def test_a_cancelled_trajectory_stops_its_environment(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    run = Run(Environment(episode=code("hangs")), qwen, lambda text: "hi")
    with anyio.fail_after(60):
        async with run.running() as episodes:
            run.launch(episodes, {})
            while not run.engine.asked or run.stage.in_flight() == 0 or episodes.statistics().running:
                await anyio.lowlevel.checkpoint()
            episodes.cancel([TrajectoryId(prompt_id="p", group_id=0, sample=0)])
            while not module_of(code).LEFT:
                await anyio.lowlevel.checkpoint()
    [lost] = run.outcomes
    assert isinstance(lost, TrajectoryLost) and lost.cancelled and lost.tokens == 3
    assert run.stage.in_flight() == 0


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
async def test_a_later_life_continues_recorded_turns(turns: int, qwen: Tokenizer, code: Callable[[str], str]) -> None:
    """A later life goes on from the turns and results that are recorded."""

    def answer(text: str) -> str:
        return [CALL, CALL.replace("2", "5"), "done"][min(text.count("<tool_response>\n"), 2)]

    run = Run(Environment(tools=(code("add"),)), qwen, answer)
    whole = await run.one({"prompt": "2 + 3"})
    [recorded] = run.journal.store.trajectories.values()
    assert isinstance(recorded, EpisodeSoFar) and (len(recorded.turns), len(recorded.returned)) == (3, 2)
    module_of(code).CALLS.clear()
    so_far = EpisodeSoFar(turns=recorded.turns[:turns], returned=recorded.returned[: max(turns - 1, 0)])
    again = Run(run.environment, qwen, answer)
    trajectory = await again.one({"prompt": "2 + 3"}, so_far)
    assert isinstance(whole, Trajectory) and isinstance(trajectory, Trajectory)
    assert trajectory.segments == whole.segments
    assert len(again.engine.asked) == 3 - turns
    assert [(2, 3), (5, 3)][max(turns - 1, 0) :] == module_of(code).CALLS


async def test_a_later_life_that_differs_is_sampled_again(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    """A later life that asks for something else is sampled again from there."""

    def answer(text: str) -> str:
        return [CALL, CALL.replace("2", "5"), "done"][min(text.count("<tool_response>\n"), 2)]

    run = Run(Environment(tools=(code("add"),)), qwen, answer)
    await run.one({"prompt": "2 + 3"})
    [recorded] = run.journal.store.trajectories.values()
    assert isinstance(recorded, EpisodeSoFar)
    changed = structs.replace(recorded.returned[0], text="forty")
    again = Run(run.environment, qwen, answer)
    trajectory = await again.one({"prompt": "2 + 3"}, structs.replace(recorded, returned=(changed,)))
    assert isinstance(trajectory, Trajectory) and "forty" in shown(qwen, trajectory)
    assert len(again.engine.asked) == 2 and sum(segment.trained for segment in trajectory.segments) == 3
    [known] = again.journal.store.trajectories.values()
    assert isinstance(known, EpisodeSoFar) and len(known.turns) == 2  # the first was recorded before


async def test_unrequested_turns_of_an_earlier_life_are_dropped(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    """Turns of an earlier life that are not requested again are not trained."""
    run = Run(Environment(env=code("Game")), qwen, lambda text: "ok")
    await run.one({"level": 1})
    [recorded] = run.journal.store.trajectories.values()
    assert isinstance(recorded, EpisodeSoFar) and len(recorded.turns) == 3
    shorter = Run(Environment(env=code("Game"), max_turns=2), qwen, lambda text: "other")
    trajectory = await shorter.one({"level": 1}, recorded)
    assert isinstance(trajectory, Trajectory) and trajectory.finish_reason is FinishReason.TURNS
    assert [turn.completion.token_ids for turn in recorded.turns[:2]] == [
        segment.token_ids for segment in trajectory.segments if segment.trained
    ]


async def test_an_environment_that_has_ended_is_not_run_again(qwen: Tokenizer, code: Callable[[str], str]) -> None:
    run = Run(Environment(env=code("Game")), qwen, lambda text: "ok")
    trajectory = await run.one({"level": 1})
    assert isinstance(trajectory, Trajectory)
    again = Run(Environment(env=code("Game")), qwen, lambda text: "other")
    with anyio.fail_after(60):
        async with again.running() as episodes:
            order = LaunchTrajectory(
                id=trajectory.id, prompt=trajectory.prompt, group_size=2, seed=1, sampled_trajectory=trajectory
            )
            episodes.launch(order, again.take)
    [outcome] = again.outcomes
    assert outcome.outcome.trajectory == trajectory and not again.engine.asked


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"episode": "plain"}, "no coroutine function"),
        ({"episode": "missing"}, 'has no "missing"'),
        ({"env": "Counter"}, "has no step"),
        ({"tools": ("Game",)}, "has no docstring"),
        ({"tools": ("add", "add")}, "two tools have this name"),
        ({"tools": ("Static",)}, "no method of an instance"),
        ({"episode": "by_position"}, "positional-only"),
    ],
)
def test_code_that_is_no_environment_is_refused(
    environment: dict[str, Any], problem: str, code: Callable[[str], str]
) -> None:
    given = {
        name: tuple(map(code, value)) if isinstance(value, tuple) else code(value)
        for name, value in environment.items()
    }
    with pytest.raises(RecipeError, match=problem):
        load_episode(Environment(**given))


MADE = """
import asyncio
loop = None
try: loop = asyncio.get_running_loop()
except RuntimeError: pass
class Game:
    def __init__(self, level=0): raise ERROR
    def reset(self): pass
    def step(self, text): pass
def game(): return Game()
class Box:
    def __init__(self): Game()
    def look(self): "Look."
"""


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        ("TypeError('no level')", r"cannot be made, .*: TypeError: no level \(made.py:7\)"),
        ("ConnectionError('the simulator does not answer')", ""),
        ("SystemExit(f'{type(loop)}')", "cannot be imported: .*uvloop"),
    ],
)
@pytest.mark.parametrize(("form", "name"), [("env", "Game"), ("env", "game"), ("tools", "Box")])
def test_a_dry_run_makes_the_objects_of_the_user_in_a_loop(
    form: str, name: str, error: str, problem: str, tmp_path: Path
) -> None:
    """Objects are made in the event loop of a worker. A failure that may pass, or concerns a host, refuses nothing."""
    file = tmp_path / "made.py"
    file.write_text(f"{MADE}\nraise {error}" if "loop" in error else MADE.replace("ERROR", error))
    environment = Environment(**{form: (f"{file}:{name}",) if form == "tools" else f"{file}:{name}"})
    problems, *_ = look_at_environments(small_recipe(environment=environment), "", 120.0)
    assert len(problems) == bool(problem) and re.search(problem, "".join(problems))


def test_the_columns_of_an_environment_are_known_before(code: Callable[[str], str]) -> None:
    assert load_episode(Environment(episode=code("talks")))[1] == ("question",)
    assert load_episode(Environment(env=code("Game")))[1] == ("level",)
    assert EnvironmentResult() == EnvironmentResult(reward=None)
    assert asyncio.iscoroutinefunction(load_episode(Environment(env=code("Game")))[0])
