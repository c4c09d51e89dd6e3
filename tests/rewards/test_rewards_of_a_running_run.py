"""Rewards of a run that goes on, through the control socket, the command line and real worker processes; what a worker
that is replaced and a run that is resumed know of them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import psutil
import pytest
from msgspec import structs

from streamrl.base.errors import RecipeError
from streamrl.base.types import ScoredTrajectory, Trajectory
from streamrl.cli.main import main
from streamrl.launch.attached_rewards import AttachedRewards
from streamrl.launch.control_socket import serving_control
from streamrl.launch.pipeline import carry_out
from streamrl.launch.reward_workers import change_rewards, open_reward_stage
from streamrl.prepare.preflight import preflight, recipe_of_resumed_run, with_checkpoint_rewards
from streamrl.recipe.rewards import AdaptiveTimeout, Reward
from streamrl.recipe.sections import Recipe, ResumedRewards, TrainingSet
from streamrl.recipe.topology import Topology, control_socket, plan_topology, rewards_endpoint
from streamrl.rewards.attachments import RewardAttachments
from streamrl.rewards.time_limits import LearntLimits
from streamrl.stages.reward import RewardStage
from tests.rewards.conftest import KILLERS

MakeTrajectory = Callable[..., Trajectory]
MakeRecipe = Callable[..., Recipe]
WORKER = Path(__file__).parent / "worker_process.py"


class LiveRun:
    """Control's and the parent's side of the rewards of one run, and its worker in a process of its own."""

    def __init__(self, recipe: Recipe, run_directory: Path, sockets: Path) -> None:
        self.recipe = recipe
        self.run_directory = run_directory
        self.topology: Topology = plan_topology(recipe, sockets)
        self.attachments: RewardAttachments
        self.log: list[tuple[int, tuple[str, ...], str]] = []
        self.stage: RewardStage
        self.attached: AttachedRewards
        self.worker: subprocess.Popen[bytes]

    def start_worker(self) -> None:
        given = self.run_directory / "recipe.json"
        given.write_bytes(msgspec.json.encode(self.recipe))
        streams = [self.topology.endpoint("reward-0", stream) for stream in ("orders", "results")]
        self.worker = subprocess.Popen([sys.executable, WORKER, given, *streams])

    async def score(self, *trajectories: Trajectory, group_size: int = 1) -> list[ScoredTrajectory]:
        found: list[ScoredTrajectory] = []

        async def score(trajectory: Trajectory) -> None:
            scored = await self.stage.score(trajectory, group_size)
            assert isinstance(scored.outcome, ScoredTrajectory), scored
            found.append(scored.outcome)

        async with anyio.create_task_group() as tasks:
            for trajectory in trajectories:
                tasks.start_soon(score, trajectory)
        return found

    async def streamrl(self, *arguments: str) -> int:
        """One command, as a person would give it."""
        action, *others = arguments
        return await anyio.to_thread.run_sync(main, ["reward", action, str(self.run_directory), *others])

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[LiveRun]:
        (self.run_directory / "topology.json").write_bytes(msgspec.json.encode(self.topology))

        self.attachments = RewardAttachments()

        async def reply(answer: Any) -> None:
            self.attachments.deliver_reply(answer)

        def note(version: int, rewards: tuple[str, ...], change: str) -> None:
            self.log.append((version, rewards, change))

        self.stage, self.attached = await open_reward_stage(self.recipe, self.topology, self.run_directory, reply)
        self.start_worker()
        socket_path = control_socket(self.topology)
        try:
            async with (
                anyio.create_task_group() as tasks,
                serving_control(
                    socket_path,
                    self.run_directory,
                    partial(carry_out, self.attachments, lambda: self.log.append((-1, (), "drain"))),
                ),
            ):
                tasks.start_soon(change_rewards, self.topology, self.attached, self.run_directory, note)
                tasks.start_soon(self.attachments.run, rewards_endpoint(self.topology))
                async with self.stage.running():
                    yield self
                self.attachments.close()
                tasks.cancel_scope.cancel()
        finally:
            code = await anyio.to_thread.run_sync(self.worker.wait, 20)
        assert code == 0


@pytest.fixture
def live_run(make_recipe: MakeRecipe, tmp_path: Path) -> Callable[..., LiveRun]:
    made: list[LiveRun] = []
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "sort", "answer": "ab", "seconds": 0.0}) + "\n")

    def make(rewards: tuple[Reward, ...] = (), names: tuple[str, ...] = (), **checkpoint: Any) -> LiveRun:
        recipe = make_recipe("length")
        rows = str(tmp_path / "prompts.jsonl")
        train = {"named": TrainingSet(prompts=rows, rewards=names), "all": rows} if names else rows
        recipe = structs.replace(
            recipe,
            rewards=rewards or recipe.rewards,
            prompts=structs.replace(recipe.prompts, train=train),
            checkpoint=structs.replace(recipe.checkpoint, **checkpoint),
        )
        directory = tmp_path / f"run-{len(made)}"
        sockets = tmp_path / f"s{len(made)}"
        directory.mkdir()
        sockets.mkdir(mode=0o700)
        made.append(LiveRun(recipe, directory, sockets))
        return made[-1]

    return make


@pytest.mark.long
async def test_rewards_are_changed_from_the_command_line(
    live_run: Callable[..., LiveRun], make_trajectory: MakeTrajectory, capsys: pytest.CaptureFixture[str]
) -> None:
    async with live_run().going_on() as run:
        (before,) = await run.score(make_trajectory("ab", group=0))
        assert (before.reward, before.reward_version) == (2.0, 0)
        assert await run.streamrl("attach", f"{KILLERS}:half", "--weight", "2", "--name", "h") == 0
        assert capsys.readouterr().out == "version 1: length, h\n"
        assert (await run.score(make_trajectory("ab", group=1)))[0].reward == 3.0

        refused = [
            (("attach", f"{KILLERS}:half", "--name", "h"), '"h" is the name of an earlier reward'),
            (("attach", f"{KILLERS}:no_such"), 'has no "no_such"'),
            (("attach", f"{KILLERS}:match", "--option", "wrong"), "write --option key=value"),
            (("attach", f"{KILLERS}:prepared"), 'has no column "missing", which the reward prepared needs'),
            (("replace", "lenght", f"{KILLERS}:half"), 'no reward is called "lenght": name one of length, h'),
            (("attach", "no_such_builtin"), 'there is no built-in reward "no_such_builtin"'),
            (("attach", f"{KILLERS}:half", "--timeout", "-1"), "timeout_s"),
        ]
        for arguments, message in refused:
            assert await run.streamrl(*arguments) == 2, arguments
            said = capsys.readouterr().err
            assert message in said
        assert "the run is as it was" in said
        key = run.run_directory / "control.key"
        right = key.read_text()
        key.write_text("0" * 64)
        assert await run.streamrl("detach", "h") == 2
        assert "needs its key" in capsys.readouterr().err
        key.write_text(right)

        assert await run.streamrl("replace", "length", f"{KILLERS}:match", "--shadow") == 0
        assert await run.streamrl("list", "--json") == 0
        said = capsys.readouterr().out
        listed = json.loads(said[said.index("\n{") :])
        version = listed["reward_version"]
        assert [(r["name"], r["weight"], r["shadow"], r["since"]) for r in listed["rewards"]] == [
            ("match", 1.0, True, version),
            ("h", 2.0, False, 1),
        ]
        (after,) = await run.score(make_trajectory("ab", group=2, answer="ab"))
        assert (after.reward, after.reward_version) == (1.0, version)
        assert await run.streamrl("detach", "match") == 0
        assert await run.streamrl("list") == 0
        assert f"h  {KILLERS}:half  weight 2, since version 1" in capsys.readouterr().out
        assert [entry[2] for entry in run.log] == [
            f"attach h ({KILLERS}:half)",
            f"replace length by match ({KILLERS}:match)",
            "detach match",
        ]
        assert not any("key" in str(entry) for entry in run.log)
        assert await anyio.to_thread.run_sync(main, ["drain", str(run.run_directory)]) == 0
        assert run.log[-1][2] == "drain" and "and saves" in capsys.readouterr().out
    assert not (run.run_directory / "control.key").exists()
    assert not control_socket(run.topology).exists()
    assert await run.streamrl("list") == 1
    assert "no run listens" in capsys.readouterr().err


@pytest.mark.long
async def test_an_attached_reward_scores_sets_that_name_theirs(
    live_run: Callable[..., LiveRun], make_trajectory: MakeTrajectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after a resume; one of the recipe that the set does not name still does not. A name that a set has stays."""
    half = Reward(function=f"{KILLERS}:half", name="half")
    first = live_run(rewards=(Reward(function=f"{KILLERS}:length"), half), names=("length",))
    made = make_trajectory("ab", group=0, answer="ab")
    named = structs.replace(made, prompt=structs.replace(made.prompt, rewards=("length",)))
    async with first.going_on() as run:
        (before,) = await run.score(named)
        assert before.reward_parts == {"length": 2.0}
        assert await run.streamrl("attach", f"{KILLERS}:match", "--shadow") == 0
        (after,) = await run.score(structs.replace(named, id=structs.replace(named.id, group_id=1)))
        assert after.reward_parts == {"length": 2.0, "match": 1.0}
        capsys.readouterr()
        assert await run.streamrl("attach", f"{KILLERS}:prepared") == 2
        said = capsys.readouterr().err
        assert "prompts.train.named: " in said and 'has no column "missing"' in said
        assert await run.streamrl("replace", "length", f"{KILLERS}:match", "--name", "better") == 2
        assert 'prompts.train.named chooses rewards by name: give it the name "length"' in capsys.readouterr().err
    resumed, _ = recipe_of_resumed_run(first.recipe, first.run_directory)
    sets = resumed.prompts.sets
    assert [(sets[name].serves(half), sets[name].serves(resumed.rewards[-1])) for name in sets] == [
        (False, True),
        (True, True),
    ]


ADAPTIVE = Reward(
    function=f"{KILLERS}:takes",
    name="takes",
    timeout_s=90.0,
    adaptive_timeout=AdaptiveTimeout(factor=10.0, min_s=1.0, correct_from=1.0),
)


@pytest.mark.long
async def test_attached_rewards_outlive_worker_and_run(
    live_run: Callable[..., LiveRun], make_trajectory: MakeTrajectory, tmp_path: Path
) -> None:
    """Attached rewards, and the state that they learned, outlive the worker and the run."""

    def call(scored: list[ScoredTrajectory], name: str = "takes") -> Any:
        return next(call for call in scored[0].calls if call.function == name)

    checkpoint = tmp_path / "step-000003"
    checkpoint.mkdir()
    async with live_run((ADAPTIVE,)).going_on() as run:
        await run.attachments.attach(f"{KILLERS}:half", name="shade", shadow=True)
        first = call(await run.score(make_trajectory("ab", group=0, seconds=0.2)))
        assert (first.limit_s, first.adapted) == (90.0, False)
        run.worker.kill()
        run.worker.wait()
        run.start_worker()
        second = call(await run.score(make_trajectory("ab", group=0, seconds=0.0)))
        assert second.limit_s == pytest.approx(10 * first.seconds)
        for name, content in run.attached.file().items():
            (checkpoint / name).write_bytes(content)

    asked = structs.replace(run.recipe, checkpoint=structs.replace(run.recipe.checkpoint, resume_from=str(checkpoint)))
    recipe, kept = with_checkpoint_rewards(asked)
    assert kept is not None
    assert [(r.label, r.shadow) for r in recipe.rewards] == [("takes", False), ("shade", True)]
    again = live_run(recipe.rewards)
    (again.run_directory / "rewards.msgpack").write_bytes((checkpoint / "rewards.msgpack").read_bytes())
    async with again.going_on():
        scored = await again.score(make_trajectory("ab", group=0, seconds=0.0))
        assert (scored[0].reward, scored[0].reward_version) == (1.0, 1)
        assert call(scored).limit_s == second.limit_s
        assert call(scored, "shade").value == 0.5
        listed = await again.attachments.attached()
        assert [(r.name, r.since) for r in listed.rewards] == [("takes", 0), ("shade", 1)]
        # A function that replaces another starts without its state, whatever its name.
        assert await again.attachments.replace("takes", ADAPTIVE) == 2
        assert call(await again.score(make_trajectory("ab", group=0, seconds=0.0))).limit_s == 90.0
    assert again.log[0] == (1, ("takes", "shade"), "resume")


@pytest.mark.long
async def test_the_next_controller_scores_with_attached_rewards(
    live_run: Callable[..., LiveRun], make_trajectory: MakeTrajectory, tmp_path: Path
) -> None:
    """The next controller of a run scores with the rewards that were attached."""
    async with live_run().going_on() as run:
        await run.attachments.attach(f"{KILLERS}:half", name="half", weight=2.0)
        (before,) = await run.score(make_trajectory("ab", group=0))
    sockets = tmp_path / "next"
    sockets.mkdir(mode=0o700)
    async with LiveRun(run.recipe, run.run_directory, sockets).going_on() as following:
        (after,) = await following.score(make_trajectory("ab", group=1))
    assert (after.reward, after.reward_version) == (before.reward, 1)
    assert [call.function for call in after.calls] == [call.function for call in before.calls]


@pytest.mark.long
async def test_a_new_worker_has_the_functions_that_began_with_a_group(
    live_run: Callable[..., LiveRun], make_trajectory: MakeTrajectory
) -> None:
    async with live_run().going_on() as run:
        (one,) = await run.score(make_trajectory("ab", group=0, sample=0), group_size=2)
        await run.attachments.attach(f"{KILLERS}:half", name="half", weight=2.0)
        run.worker.kill()
        run.worker.wait()
        run.start_worker()
        (other,) = await run.score(make_trajectory("ab", group=0, sample=1), group_size=2)
    assert (one.reward_version, other.reward_version) == (0, 0)
    assert one.reward == other.reward


def test_a_resumed_run_reports_which_rewards_it_cannot_have(
    live_run: Callable[..., LiveRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamrl.rewards.rewards_snapshot import fresh_rewards, rewards_file

    gone = tmp_path / "style.py"
    style = Reward(function=f"{gone}:style")
    recipe = live_run(resume_from=str(tmp_path)).recipe
    kept = structs.replace(fresh_rewards(recipe), rewards=(*recipe.rewards, style), reward_version=4)
    for name, content in rewards_file(kept).items():
        (tmp_path / name).write_bytes(content)
    live, begins = with_checkpoint_rewards(recipe)
    earlier = (tmp_path / "rewards.msgpack").read_bytes().replace(b"\xa9variables", b"\xabenvironment")
    (tmp_path / "rewards.msgpack").write_bytes(earlier)
    assert with_checkpoint_rewards(recipe) == (live, begins), "checkpoints of earlier runs have another name of a key"
    with pytest.raises(RecipeError) as refused:
        preflight(live, begins)
    text = "\n".join(refused.value.problems)
    assert f"there is no file {gone}" in text
    assert "was scored with style, attached while the run went on: put their code back" in text
    assert 'checkpoint.advanced.rewards = "recipe"' in text

    of_recipe = structs.replace(recipe, checkpoint=structs.replace(recipe.checkpoint, rewards=ResumedRewards.RECIPE))
    chosen, begins = with_checkpoint_rewards(of_recipe)
    assert chosen.rewards == recipe.rewards
    assert begins is not None
    assert (begins.reward_version, begins.since) == (5, {"length": 0})

    other = structs.replace(recipe, rewards=(Reward(function="exact"),))
    with pytest.raises(RecipeError, match="has changed since, too"):
        with_checkpoint_rewards(other)
    (tmp_path / "rewards.msgpack").write_bytes(b"\x93garbage")
    with pytest.raises(RecipeError, match=r"rewards\.msgpack cannot be read"):
        with_checkpoint_rewards(recipe)


def test_limits_that_were_learnt_belong_to_one_attachment() -> None:
    limits = LearntLimits({"a": 0, "b": 2}, {"a": {"p": 1.0}, "gone": {"p": 9.0}})
    limits.observed(2, {"a": {"p": 0.5, "q": 2.0}, "b": {"p": 3.0}, "gone": {"p": 9.0}})
    limits.observed(1, {"b": {"p": 8.0}})  # of the one that b replaced
    assert limits.slowest_s == {"a": {"p": 1.0, "q": 2.0}, "b": {"p": 3.0}}
    assert list(limits.messages(0)) == [{"a": {"p": 1.0, "q": 2.0}}]
    limits.attached({"a": 0, "b": 3})
    assert limits.slowest_s == {"a": {"p": 1.0, "q": 2.0}}
    many = LearntLimits({"a": 0}, {"a": {str(key): 1.0 for key in range(45_000)}})
    messages = [message["a"] for message in many.messages(0)]
    assert [len(message) for message in messages] == [20_000, 20_000, 5_000]
    assert {key for message in messages for key in message} == {str(key) for key in range(45_000)}


@pytest.mark.long
async def test_detached_builtin_rewards_release_resources(
    live_run: Callable[..., LiveRun], make_trajectory: MakeTrajectory
) -> None:
    """Built-in rewards release their resources when they are detached."""
    pytest.importorskip("httpx")
    left = asyncio.Event()

    async def judging(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = json.dumps({"choices": [{"message": {"content": "Score: 10"}, "finish_reason": "stop"}]}).encode()
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(answer), answer))
        except asyncio.IncompleteReadError:
            left.set()
        writer.close()

    server = await asyncio.start_server(judging, "127.0.0.1", 0)
    endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    judge = Reward(
        function="judge",
        trusted=True,
        options={"endpoint": endpoint, "model": "m", "question": "{completion}?", "score": r"Score: (\d+)"},
    )
    length = Reward(function=f"{KILLERS}:length", trusted=True)
    code = Reward(function="code", options={"whole": True})
    tests = [{"input": "", "output": "x"}]
    async with server, live_run((length, judge, code)).going_on() as run:
        (scored,) = await run.score(make_trajectory("ab", group=0, tests=tests))
        assert scored.reward_parts == {"length": 2.0, "judge": 1.0, "code": 0.0}
        sandbox = psutil.Process(run.worker.pid).children(recursive=True)
        assert len(sandbox) >= 2
        assert not left.is_set()
        await run.attachments.detach("judge")
        await asyncio.wait_for(left.wait(), 300)
        left.clear()
        await run.attachments.detach("code")
        gone, alive = await anyio.to_thread.run_sync(psutil.wait_procs, sandbox, 10)
        assert (len(gone), alive) == (len(sandbox), [])
        assert run.worker.poll() is None
        # At the end of the run, too.
        await run.attachments.attach(judge)
        await run.score(make_trajectory("ab", group=1))
        assert not left.is_set()
    await asyncio.wait_for(left.wait(), 300)
