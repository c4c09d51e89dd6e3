"""Everything that a reward function can do to a run, one test each, in real processes.

A fault strikes on the completion "z"; its three siblings are scored by the same function at the same time. What a test
leaves running fails it (``tests/conftest.py``)."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import resource
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from forks.starts import own_children

from streamrl.base.concurrent_calls import first_error
from streamrl.base.errors import StreamRLError
from streamrl.base.types import RewardFailure, RewardFailureKind, ScoredTrajectory, Trajectory
from streamrl.learning.objective.advantages import group_advantages
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.objectives.catalog import ADVANTAGES
from streamrl.recipe.rewards import Reward, RewardLimits
from streamrl.rewards.calls.reward_set import RewardSet
from tests.rewards.conftest import KILLERS

MakeTrajectory = Callable[..., Trajectory]
RAISED, TIMED_OUT = RewardFailureKind.RAISED, RewardFailureKind.TIMED_OUT
NOT_FINITE, WRONG_TYPE = RewardFailureKind.NOT_FINITE, RewardFailureKind.WRONG_TYPE
CALL_S = 600


def everything_left() -> tuple[set[int], set[str]]:
    """Our processes, and our open descriptors other than those that the test's own loop has."""
    descriptors = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            descriptors.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:
            continue
    return {process.pid for process in own_children(recursive=True)}, descriptors


class Pool:
    """Makes reward sets; all are closed together."""

    def __init__(self, model_directory: Path, tasks: asyncio.TaskGroup) -> None:
        self._tokenizer = load_tokenizer(model_directory)
        self._tasks = tasks
        self.sets: list[RewardSet] = []

    async def open(self, *rewards: Reward, processes: int = 2) -> RewardSet:
        rewards_open = RewardSet(rewards, RewardLimits(processes=processes), self._tokenizer, self._tasks)
        self.sets.append(rewards_open)
        await rewards_open.open()
        return rewards_open


FAULTS = {
    "fault_raises": (RAISED, "ValueError: planted"),
    "fault_nan": (NOT_FINITE, "nan"),
    "fault_text": (WRONG_TYPE, "a str"),
    "fault_late": (TIMED_OUT, "1.5 s"),
    "fault_blocks_loop": (TIMED_OUT, "1.5 s"),
    "fault_swallows": (TIMED_OUT, "1.5 s"),
    "fault_exit": (RAISED, "SystemExit: 0"),
    "fault_os_exit": (RAISED, "ended its process (exit code 0)"),
    "fault_leaks": (RAISED, "MemoryError"),
    "fault_deadlocks": (TIMED_OUT, "1.5 s"),
    "fault_stops_clocks": (TIMED_OUT, "1.5 s"),
    "fault_stops_clocks_async": (TIMED_OUT, "1.5 s"),
    "fault_writes_to_its_channel": (RAISED, "its channel"),
}


@pytest_asyncio.fixture
async def pool(model_directory: Path) -> AsyncIterator[Pool]:
    async with asyncio.TaskGroup() as tasks:
        made = Pool(model_directory, tasks)
        yield made
        for rewards in made.sets:
            await rewards.aclose()


async def strike(pool: Pool, make_trajectory: MakeTrajectory, name: str) -> tuple[list[Any], Any]:
    """What ``name`` gave three siblings, and the outcome of the one that it struck."""
    timeout_s = 1.5 if FAULTS.get(name, (None,))[0] is TIMED_OUT else 300.0
    rewards = await pool.open(Reward(function=f"{KILLERS}:{name}", timeout_s=timeout_s, memory_mib=300))
    group = [make_trajectory(text, sample=i) for i, text in enumerate(["abc", "a", "z", "ab"])]
    outcomes = await rewards.score(group)
    again = await rewards.score(group[:2])  # the run goes on
    assert [outcome.trajectory for outcome in outcomes] == group
    assert [o.reward for o in again if isinstance(o, ScoredTrajectory)] == [3.0, 1.0]
    struck = outcomes[2]
    return [o.reward for o in outcomes if isinstance(o, ScoredTrajectory) and o is not struck], struck


@pytest.mark.parametrize("name", FAULTS)
async def test_fault_is_recorded_and_its_siblings_are_as_without_it(
    pool: Pool, make_trajectory: MakeTrajectory, name: str
) -> None:
    kind, message = FAULTS[name]
    values, struck = await strike(pool, make_trajectory, name)
    assert isinstance(struck, RewardFailure), struck
    assert (struck.kind, struck.function, struck.policy) == (kind, name, "drop_sample")
    assert message in struck.message
    assert values == [3.0, 1.0, 2.0]
    with_it = group_advantages(torch.tensor(values), ADVANTAGES["group_std"])
    without_it = group_advantages(torch.tensor([3.0, 1.0, 2.0]), ADVANTAGES["group_std"])
    assert torch.equal(with_it, without_it)


async def test_a_forking_function_answers_once(pool: Pool, make_trajectory: MakeTrajectory) -> None:
    """A function that forks answers once, and its copies do not stay."""
    values, forked = await strike(pool, make_trajectory, "fault_forks")
    assert (values, forked.reward) == ([3.0, 1.0, 2.0], 1.0)


async def test_function_that_prints_100_mb_is_read_and_scored(
    pool: Pool, make_trajectory: MakeTrajectory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="streamrl.rewards"):
        values, printed = await strike(pool, make_trajectory, "fault_prints")
    assert (values, printed.reward) == ([3.0, 1.0, 2.0], 1.0)
    assert 0 < sum(len(record.getMessage()) for record in caplog.records) < 1 << 20


@pytest.mark.parametrize(("name", "kind"), [("fault_late", TIMED_OUT), ("fault_os_exit", RAISED)])
async def test_only_the_call_in_progress_pays_when_its_process_ends(
    pool: Pool, make_trajectory: MakeTrajectory, name: str, kind: RewardFailureKind
) -> None:
    rewards = await pool.open(Reward(function=f"{KILLERS}:{name}", timeout_s=1.0), processes=4)
    await rewards.score([make_trajectory("ab", sample=i) for i in range(20)])  # now they are known to be quick
    group = [make_trajectory("z" if i % 50 == 49 else "ab", sample=i) for i in range(200)]
    outcomes = await rewards.score(group)
    failed = [(o.trajectory.id.sample, o.kind) for o in outcomes if isinstance(o, RewardFailure)]
    assert failed == [(i, kind) for i in range(200) if i % 50 == 49]
    assert sum(isinstance(o, ScoredTrajectory) for o in outcomes) == 196


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reward:
    """A function that notes what it began, all calls of which are sent ahead."""
    monkeypatch.setattr("streamrl.rewards.calls.pool._AHEAD_S", 1000.0)
    return Reward(function=f"{KILLERS}:noted", options={"path": str(tmp_path / "begun")}, timeout_s=4.0)


@pytest.mark.parametrize(("fault", "kind"), [("hang", TIMED_OUT), ("exit", RAISED), ("write", RAISED)])
async def test_only_the_running_call_of_a_process_fails(
    pool: Pool, make_trajectory: MakeTrajectory, noted: Reward, tmp_path: Path, fault: str, kind: RewardFailureKind
) -> None:
    """Of the calls that a process has, only the one that runs fails."""
    rewards = await pool.open(noted, processes=1)
    outcomes = await rewards.score([make_trajectory(text, sample=i) for i, text in enumerate(["aa", fault, "ccc"])])
    assert [o.kind for o in outcomes if isinstance(o, RewardFailure)] == [kind]
    assert [o.reward for o in outcomes if isinstance(o, ScoredTrajectory)] == [2.0, 3.0]
    begun = (tmp_path / "begun").read_text().split()
    assert begun[:2] == ["aa", fault]
    assert set(begun[2:]) == {"ccc"}  # one that wrote to its channel had begun the next, perhaps


async def test_time_of_a_call_counts_from_the_answer_before_it(
    pool: Pool, make_trajectory: MakeTrajectory, noted: Reward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.rewards.calls.pool._SLOW_S", 60.0)
    rewards = await pool.open(noted, processes=1)
    outcomes = await rewards.score(
        [make_trajectory("a", group=i, seconds=seconds) for i, seconds in ((1, 2.5), (2, 2.5))]
    )
    assert [o.reward for o in outcomes if isinstance(o, ScoredTrajectory)] == [1.0, 1.0], outcomes


async def test_calls_behind_a_slow_one_go_to_another_process(
    pool: Pool, make_trajectory: MakeTrajectory, noted: Reward, tmp_path: Path
) -> None:
    rewards = await pool.open(noted, processes=2)
    ended: list[str] = []

    async def score(text: str) -> None:
        await rewards.score([make_trajectory(text, group=len(text), seconds=0.9 if text == "slow" else 0.0)])
        ended.append(text)

    async with asyncio.TaskGroup() as tasks:
        for text in ("slow", "a", "bb"):
            tasks.create_task(score(text))
    assert ended[-1] == "slow"
    assert (tmp_path / "begun").read_text().split() == ["slow", "a", "bb"]


async def test_a_starved_process_begins_its_oldest_call(
    pool: Pool, make_trajectory: MakeTrajectory, noted: Reward, tmp_path: Path
) -> None:
    """A process without CPU time begins its oldest call, although the calls behind it went elsewhere."""
    rewards = await pool.open(noted, processes=1)
    assert len(await rewards.score([make_trajectory("warm")])) == 1
    processes = [process for process in own_children(recursive=True) if not process.children()]
    for process in processes:
        process.suspend()
    scored = asyncio.create_task(rewards.score([make_trajectory(text, sample=i) for i, text in enumerate(["a", "bb"])]))
    await asyncio.sleep(1.0)  # for those behind it to be taken away; a longer time would do as well
    for process in processes:
        process.resume()
    assert [o.reward for o in await scored if isinstance(o, ScoredTrajectory)] == [1.0, 2.0]
    assert sorted((tmp_path / "begun").read_text().split()) == ["a", "bb", "warm"]


async def test_a_replaced_process_loses_and_repeats_no_call(
    pool: Pool, make_trajectory: MakeTrajectory, noted: Reward, tmp_path: Path
) -> None:
    """A process that is replaced loses no call, and begins none twice."""
    rewards = await pool.open(noted, processes=1)
    outcomes = await rewards.score([make_trajectory("ab", sample=i) for i in range(100)])  # each keeps a thread
    assert [o.reward for o in outcomes if isinstance(o, ScoredTrajectory)] == [2.0] * 100
    assert (tmp_path / "begun").read_text().split() == ["ab"] * 100


@pytest.mark.long
@pytest.mark.parametrize("name", ["fault_segfaults", "fault_os_exit", "fault_kills_server"])
async def test_calls_that_crash_one_after_the_other_end_nothing(
    pool: Pool, make_trajectory: MakeTrajectory, name: str
) -> None:
    rewards = await pool.open(Reward(function=f"{KILLERS}:{name}"), processes=1)
    for _ in range(12):
        (outcome,) = await rewards.score([make_trajectory("z")])
        assert isinstance(outcome, RewardFailure) and outcome.kind is RAISED, outcome
    (good,) = await rewards.score([make_trajectory()])
    assert good.calls[0].value == 3.0


LEAKS = (
    *("leaks_threads", "leaks_addresses", "leaks_descriptors"),
    *("leaks_and_needs_many", "leaks_and_needs_many_async"),
)


@pytest.mark.long
@pytest.mark.parametrize("name", LEAKS)
async def test_calls_of_a_function_that_leaks_all_score(pool: Pool, make_trajectory: MakeTrajectory, name: str) -> None:
    few = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()  # models of tests before this one, whose files are mapped: a descriptor each
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, few[1]))
    try:
        rewards = await pool.open(Reward(function=f"{KILLERS}:{name}", memory_mib=300, timeout_s=300), processes=2)
        outcomes = await rewards.score([make_trajectory(sample=i) for i in range(120)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, few)
    assert [o.message for o in outcomes if isinstance(o, RewardFailure)] == []


async def test_what_a_module_prints_while_it_is_imported_is_cut(
    pool: Pool, make_trajectory: MakeTrajectory, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: Any
) -> None:
    caplog.set_level("INFO", logger="streamrl.rewards")
    module = tmp_path / "loud.py"
    module.write_text("print('loud ' * (1 << 20))\ndef plain(completion):\n    return 1.0\n")
    rewards = await pool.open(Reward(function=f"{module}:plain"), processes=1)
    (outcome,) = await rewards.score([make_trajectory()])
    assert isinstance(outcome, ScoredTrajectory)
    await rewards.aclose()
    assert "loud" in caplog.text
    assert len(caplog.text) + len("".join(capfd.readouterr())) < 100 << 10


async def test_children_of_a_killed_call_are_killed(
    pool: Pool, make_trajectory: MakeTrajectory, caplog: pytest.LogCaptureFixture
) -> None:
    """Processes that a killed call had started are killed with it, and the log says where the call was."""
    caplog.set_level("INFO", logger="streamrl.rewards")
    before, _ = everything_left()
    rewards = await pool.open(Reward(function=f"{KILLERS}:fault_forks_and_hangs", timeout_s=1.0), processes=1)
    (outcome,) = await rewards.score([make_trajectory("z")])
    assert isinstance(outcome, RewardFailure)
    # The server and the process that took the place of the killed one, whose words come by a pipe of their own.
    while len(everything_left()[0] - before) != 2 or "in fault_forks_and_hangs" not in caplog.text:
        await rewards.score([make_trajectory("a")])


async def test_environment_has_no_keys_but_those_that_the_recipe_names(
    pool: Pool, make_trajectory: MakeTrajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "1")
    monkeypatch.setenv("JUDGE_API_KEY", "2")
    reward = Reward(function=f"{KILLERS}:visible_environment", name="seen", variables=("JUDGE_API_KEY",))
    rewards = await pool.open(reward, processes=1)
    (outcome,) = await rewards.score([make_trajectory()])
    assert isinstance(outcome, ScoredTrajectory), outcome
    assert set(outcome.reward_parts) == {"seen", "seen.judge_api_key"}


async def test_raised_calls_are_tried_again_with_pauses(
    pool: Pool, make_trajectory: MakeTrajectory, tmp_path: Path
) -> None:
    options = {"directory": str(tmp_path), "until": 3}
    reward = Reward(function=f"{KILLERS}:tries", options=options, retries=2, backoff_s=0.05)
    rewards = await pool.open(reward, processes=1)
    (outcome,) = await rewards.score([make_trajectory()])
    assert isinstance(outcome, ScoredTrajectory), outcome
    assert outcome.reward == 3.0
    times = [float(line) for line in (tmp_path / "calls").read_text().split()]
    assert times[1] - times[0] >= 0.05 * 0.75
    assert times[2] - times[1] >= 0.1 * 0.75


async def test_process_that_grows_is_replaced_between_two_calls(pool: Pool, make_trajectory: MakeTrajectory) -> None:
    rewards = await pool.open(Reward(function=f"{KILLERS}:leaks_a_little", memory_mib=200), processes=1)
    outcomes = [(await rewards.score([make_trajectory(sample=i)]))[0] for i in range(14)]
    processes = {outcome.reward for outcome in outcomes if isinstance(outcome, ScoredTrajectory)}
    assert all(isinstance(outcome, ScoredTrajectory) for outcome in outcomes), outcomes
    assert 2 <= len(processes) < 14


async def test_module_with_threads_is_imported_by_each_process(
    pool: Pool, make_trajectory: MakeTrajectory, tmp_path: Path
) -> None:
    module = tmp_path / "threaded.py"
    module.write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "def here(completion):\n    return threading.active_count()\n"
    )
    rewards = await pool.open(Reward(function=f"{module}:here"), processes=1)
    (outcome,) = await rewards.score([make_trajectory()])
    assert isinstance(outcome, ScoredTrajectory), outcome
    assert (
        outcome.reward == 2.0
    )  # forked after the import it would be 1, and the lock that a thread held locked for ever


def threaded_module(directory: Path, *, second_import: str) -> Path:
    """One that is imported anew by each process, since it has a thread; there the first import is not as the others,
    ``second_import`` of them all: that before is the server's."""
    module = directory / "threaded.py"
    module.write_text(
        "import threading, time\nfrom pathlib import Path\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        f"imports = Path({str(directory / 'imports')!r})\n"
        "with imports.open('a') as file:\n    file.write('.')\n"
        f"if len(imports.read_text()) == 2:\n    {second_import}\n"
        "def plain(completion):\n    return 1.0\n"
        "async def coroutine(completion):\n    return 1.0\n"
    )
    return module


@pytest.mark.parametrize("name", ["plain", "coroutine"])
async def test_a_process_that_never_begins_is_replaced(
    pool: Pool, make_trajectory: MakeTrajectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A process that never begins is replaced, and another one makes its calls."""
    monkeypatch.setattr("streamrl.rewards.calls.pool._READY_LIMIT_S", 5.0)
    module = threaded_module(tmp_path, second_import="threading.Event().wait()")
    rewards = await pool.open(Reward(function=f"{module}:{name}", timeout_s=3.0), processes=1)
    (outcome,) = await rewards.score([make_trajectory()])
    assert isinstance(outcome, ScoredTrajectory), outcome


async def test_processes_that_never_begin_are_given_up_with_the_reason(
    model_directory: Path, make_trajectory: MakeTrajectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.rewards.calls.pool._READY_LIMIT_S", 0.2)
    module = threaded_module(tmp_path, second_import="pass")
    module.write_text(module.read_text().replace("== 2:\n    pass", ">= 2:\n    threading.Event().wait()"))
    with pytest.raises(BaseExceptionGroup) as ended:
        async with asyncio.TaskGroup() as tasks:
            rewards = await Pool(model_directory, tasks).open(Reward(function=f"{module}:plain"), processes=1)
            await rewards.score([make_trajectory()])
    error = first_error(ended.value)
    assert isinstance(error, StreamRLError)
    assert re.search(r"5 reward processes in a row .*was not ready within 0\.2 s", str(error))


async def test_a_call_that_leaves_its_output_blocked_is_late(pool: Pool, make_trajectory: MakeTrajectory) -> None:
    """A call that leaves its output blocked is late, and its process is replaced."""
    rewards = await pool.open(Reward(function=f"{KILLERS}:stalls_after_z", timeout_s=1.0), processes=1)
    outcomes = [(await rewards.score([make_trajectory(text)]))[0] for text in ("z", "ab")]
    assert [o.reward for o in outcomes if isinstance(o, ScoredTrajectory)] == [2.0]
    assert isinstance(outcomes[0], RewardFailure) and outcomes[0].kind is TIMED_OUT


async def test_shutdown_does_not_wait_for_user_code(model_directory: Path, make_trajectory: MakeTrajectory) -> None:
    """Shutdown leaves nothing behind and does not wait for user code."""
    before = everything_left()
    async with asyncio.TaskGroup() as tasks:
        pool = Pool(model_directory, tasks)
        names = ("fault_late", "fault_deadlocks", "fault_blocks_loop", "fault_swallows", "fault_forks")
        rewards = await pool.open(
            *(Reward(function=f"{KILLERS}:{name}", timeout_s=CALL_S) for name in names), processes=8
        )
        scoring = tasks.create_task(rewards.score([make_trajectory("z", sample=i) for i in range(3)]))
        while len(everything_left()[0] - before[0]) < 8:
            await asyncio.sleep(0.01)
        scoring.cancel()
        async with asyncio.timeout(CALL_S / 2):
            await rewards.aclose()
    assert everything_left() == before
