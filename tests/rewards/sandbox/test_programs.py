"""Programs by stdin and stdout, the cases of datasets, and what a completion's code is."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import msgspec
import pytest

from streamrl.base.errors import RecipeError
from streamrl.recipe.rewards import AdaptiveTimeout, Reward
from streamrl.rewards.calls.loading import load_reward
from streamrl.rewards.sandbox.cases import ProgramCase, SnippetCase, extract_code, read_cases, same_output
from streamrl.rewards.sandbox.reward import CODE, CaseEnd, CodeOptions, CodeReward
from streamrl.rewards.sandbox.sandbox import Sandbox
from streamrl.rewards.sandbox.values import same_result
from streamrl.rewards.time_limits import TimeLimits

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADD = "Here it is:\n```python\nprint(sum(map(int, input().split())))\n```\nDone."
TESTS = [{"input": "3 4", "output": "7"}, {"input": "1 1", "output": "2\n"}, {"input": "0 5", "output": "5"}]
WRONG_SECOND = "```python\na, b = map(int, input().split())\nprint(a + b + (a == b))\n```"


def make(sandbox: Sandbox, **options: Any) -> CodeReward:
    return CodeReward(CodeOptions(**options), sandbox)


async def test_all_cases_have_to_pass(sandbox: Sandbox) -> None:
    reward = make(sandbox)
    assert await reward(ADD, tests=TESTS) == 1.0
    assert await reward(WRONG_SECOND, tests=TESTS) == 0.0
    assert await reward("no code here", tests=TESTS) == 0.0
    assert await reward(ADD, tests=[]) is None


async def test_it_stops_at_the_first_failure_but_for_the_share(sandbox: Sandbox) -> None:
    first = await make(sandbox).judge(WRONG_SECOND, TESTS)
    assert [case.end for case in first.cases] == [CaseEnd.PASSED, CaseEnd.WRONG]
    shared = await make(sandbox, value="share").judge(WRONG_SECOND, TESTS)
    assert len(shared.cases) == 3 and shared.value == pytest.approx(2 / 3)


ENDINGS = {
    "print(7)": CaseEnd.PASSED,
    "import sys; sys.stdout.write('7'); sys.exit()": CaseEnd.PASSED,
    "import atexit, os; atexit.register(lambda: print(7))": CaseEnd.PASSED,
    "import threading; threading.Thread(target=print, args=(7,)).start()": CaseEnd.PASSED,
    "import sys; data = sys.stdin.buffer.read().split(); print(len(data) * 7 // 2); exit(0)": CaseEnd.PASSED,
    "print(len(open(0).readlines()) * 7)": CaseEnd.PASSED,
    "import asyncio\nasync def main(): print(7)\nasyncio.run(main())": CaseEnd.PASSED,
    "import tempfile\nwith tempfile.TemporaryFile('w+') as f: f.write('7'); f.seek(0); print(f.read())": CaseEnd.PASSED,
    "if __name__ == '__main__': print(7)": CaseEnd.PASSED,
    "import numpy": CaseEnd.RAISED,
    "print(7); exit(1)": CaseEnd.RAISED,
    "print(7); import os; os.abort()": CaseEnd.RAISED,
    "print(7); raise ValueError": CaseEnd.RAISED,
    "print(7": CaseEnd.RAISED,
    "import os; os._exit(0)": CaseEnd.WRONG,
    "print(77)": CaseEnd.WRONG,
    "": CaseEnd.WRONG,
    "print('x' * (1 << 20))": CaseEnd.TOO_MUCH_OUTPUT,
    "import time; time.sleep(600)": CaseEnd.TIMED_OUT,
}


@pytest.mark.parametrize("source", ENDINGS)
async def test_how_a_program_ends(source: str, sandbox: Sandbox) -> None:
    reward = make(sandbox, whole=True, output_mb=1, timeout_s=0.4 if "sleep" in source else 300)
    outcome = await reward.judge(source, [{"input": "3 4", "output": "7"}])
    assert [case.end for case in outcome.cases] == [ENDINGS[source]], outcome


async def test_beyond_the_limit_is_wrong_or_a_failure(sandbox: Sandbox) -> None:
    assert await make(sandbox, timeout_s=0.1)("```\nwhile True: pass\n```", tests=TESTS) == 0.0
    with pytest.raises(TimeoutError, match=r"case 0 of 3 ran beyond its limit of 0\.1 s"):
        await make(sandbox, timeout_s=0.1, time_limit_is_wrong=False)("```\nwhile True: pass\n```", tests=TESTS)


async def test_runs_side_by_side_do_not_mix(sandbox: Sandbox) -> None:
    reward = make(sandbox, concurrency=8)
    tests = [[{"input": f"{n} 1", "output": str(n + 1)}] for n in range(12)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(reward(ADD, tests=tests[n])) for n in range(12)]
        wrong = group.create_task(reward(ADD, tests=[{"input": "1 1", "output": "3"}]))
    assert [task.result() for task in tasks] == [1.0] * 12 and wrong.result() == 0.0


async def test_more_than_a_pipe_holds(sandbox: Sandbox) -> None:
    text = "\n".join(str(n) for n in range(100_000))
    assert (
        await make(sandbox)("```\nimport sys; print(sys.stdin.read())\n```", tests=[{"input": text, "output": text}])
        == 1.0
    )


async def test_the_columns_are_in_the_signature(sandbox: Sandbox) -> None:
    parameters = inspect.signature(make(sandbox, column="cases")).parameters
    assert list(parameters) == ["completion", "cases", "prompt_id", "entry_point", "setup"]
    assert parameters["cases"].default is inspect.Parameter.empty
    assert await make(sandbox, column="cases")(ADD, cases=TESTS) == 1.0
    assert inspect.iscoroutinefunction(type(make(sandbox)).__call__)  # how the runtime tells a coroutine function


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\ntext\n```python\nb\n```\n```\noutput\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```bash\nls\n```", None),
        ("  ~~~python3\n  a\n  ~~~", "a\n"),
        ("1. Code:\n   ```python\n   if a:\n       b\n c\nd\n   ```", "if a:\n    b\nc\nd\n"),
        ("\t```python\n\tif a:\n\t\tb\n\n\t```", "if a:\n\tb\n\n"),
        ("```python\ncut in the mid", "cut in the mid"),
        ("```python\nx = '''\n```` no end\n'''\n```", "x = '''\n```` no end\n'''\n"),
        ("````python\n```\n````", "```\n"),
        ("a", None),
    ],
)
async def test_the_last_block_is_the_code(completion: str, code: str | None) -> None:
    assert extract_code(completion) == code
    assert extract_code(completion, whole_completion=True) == completion


async def test_looking_for_code_takes_no_time_in_a_bad_completion() -> None:
    assert extract_code("```python\n" * 20_000 + "x" * 100_000) is not None
    assert extract_code("`" * 200_000) == ""
    assert extract_code("~~~ \n" * 100_001) == ""


@pytest.mark.parametrize(
    ("given", "expected", "options", "same"),
    [
        ("1 2 \n3\n\n", "1 2\n3", {"comparison": "lines"}, True),
        ("1  2", "1 2", {"comparison": "lines"}, False),
        ("1  2\n3", "1 2 3", {"comparison": "tokens"}, True),
        ("1\n", "1", {"comparison": "exact"}, False),
        ("1 \n", "1", {"comparison": "exact", "tolerance": 1e-6}, False),
        ("5", "inf", {"comparison": "lines", "tolerance": 1e-6}, False),
        ("0.3333333", "0.33333334", {"comparison": "lines", "tolerance": 1e-6}, True),
        ("0.34", "0.33", {"comparison": "lines", "tolerance": 1e-6}, False),
        ("nan", "1", {"comparison": "tokens", "tolerance": 1e9}, False),
        ("1", "1\n2", {"comparison": "lines"}, False),
        ("", "", {"comparison": "lines"}, True),
    ],
)
async def test_outputs(given: str, expected: str, options: dict[str, Any], same: bool) -> None:
    assert same_output(given, expected, **options) is same


async def test_exact_outputs_and_a_tolerance_contradict_each_other() -> None:
    with pytest.raises(RecipeError, match=r'"tolerance" = 1e-06 has no effect with compare = "exact"'):
        CODE(compare="exact", tolerance=1e-6)


@pytest.mark.parametrize(
    ("given", "expected", "tolerance", "same"),
    [
        ([(1, 2), (3, 4)], [[1, 2], [3, 4]], None, True),
        ([(1, 2), (3, 4)], [[1, 2], [3, 5]], None, False),
        ((1, 2), [1], None, False),
        ("ab", ["a", "b"], None, False),
        ({1: (2,), None: True}, {"1": [2], "null": True}, None, True),
        ({1: 2, "1": 2}, {"1": 2, "2": 2}, None, False),
        ({1: 2, "1": 3}, {"1": 2}, None, False),
        ({1: 3}, {"1": 2}, None, False),
        (float("inf"), float("inf"), None, True),
        (float("nan"), float("nan"), None, True),
        (1.0, float("nan"), 1.0, False),
        (1.0, float("inf"), 1.0, False),
        ({"a": [0.1 + 0.2]}, {"a": [0.3]}, 1e-6, True),
        ([0.1 + 0.2], [0.3], None, False),
        ([0.4], [0.3], 1e-6, False),
        (10**400, 10**400 + 1, 1e-6, False),
        (True, 1 + 1e-9, 1e-6, False),
        ("1.0", "1", 1e-6, False),
    ],
)
async def test_results_of_calls(given: Any, expected: Any, tolerance: float | None, same: bool) -> None:
    assert same_result(given, expected, tolerance) is same


async def test_forms_of_the_column() -> None:
    program = (ProgramCase("1", "2"),)
    assert read_cases([{"input": "1", "output": "2"}]) == read_cases({"inputs": ["1"], "outputs": ["2"]}) == program
    assert read_cases('[{"input": "1", "output": 2}]') == read_cases([{"stdin": ["1"], "stdout": ["2"]}]) == program
    assert read_cases(["assert f()"], setup="x") == (SnippetCase("assert f()", "x"),)
    assert read_cases("") == read_cases([]) == ()
    called = read_cases("def check(c):\n    pass", entry_point="f")[0]
    assert isinstance(called, SnippetCase) and called.test.endswith("check(f)\n")


@pytest.mark.parametrize("tests", [3, [3], {"inputs": ["1"]}, {"inputs": ["1"], "outputs": []}, [{"input": "1"}]])
async def test_tests_that_are_none_are_named(tests: Any) -> None:
    with pytest.raises(ValueError, match="test"):
        read_cases(tests)


@pytest.mark.long
async def test_cases_have_limits_learned_from_passing_programs(sandbox: Sandbox) -> None:
    """Each case of a prompt has a time limit learned from the programs that passed it."""
    adaptive = AdaptiveTimeout(factor=10.0, min_s=1.0)
    reward = make(sandbox, timeout_s=100.0, value="share", whole=True)
    late = Reward(function="code", timeout_s=100.0, adaptive_timeout=adaptive, late_is_wrong=True)
    limits = TimeLimits(late)
    reward.learn_time_limits(limits)
    tests = [{"input": "0", "output": "ok"}, {"input": "1.3", "output": "ok"}]

    def program(longer_s: float, says: str = "ok") -> str:
        return f"import time\ntime.sleep(float(input()) + {longer_s})\nprint({says!r})\n"

    async def ends(code: str, prompt_id: str) -> list[CaseEnd]:
        return [case.end for case in (await reward.judge(code, tests, prompt_id=prompt_id)).cases]

    assert await ends(program(2.0, "wrong"), "p") == [CaseEnd.WRONG] * 2
    assert not limits.take_updates(), "a wrong one teaches nothing"
    assert await reward(program(0.0), tests=tests, prompt_id="p") == 1.0
    short, long = (limits.limit_s(f"p case {n}") for n in (0, 1))
    assert 1.0 <= short < 13 <= long < 100
    assert await ends(program(short + 0.2), "p") == [CaseEnd.TIMED_OUT, CaseEnd.PASSED], (
        "the second was known to take longer"
    )
    assert await ends(program(1.2), "q") == [CaseEnd.PASSED] * 2, "another prompt has limits of its own"
    assert set(limits.take_updates()) == {f"{prompt} case {n}" for prompt in "pq" for n in (0, 1)}

    # What was learnt is no limit of the task's own: without late_is_wrong a run beyond it failed, and is not wrong.
    counted = TimeLimits(msgspec.structs.replace(late, late_is_wrong=False))
    counted.remember({"p case 0": 0.1})
    reward.learn_time_limits(counted)
    with pytest.raises(TimeoutError, match="beyond its limit of 1 s"):
        await reward(program(1.2), tests=tests, prompt_id="p")


@pytest.mark.long
async def test_the_recipe_asks_for_limits_of_test_cases() -> None:
    asked = Reward(function="code", timeout_s=60.0, adaptive_timeout=AdaptiveTimeout())
    limits = TimeLimits(asked)
    assert load_reward(asked, limits).call._case_limits is limits  # type: ignore[attr-defined]
    assert load_reward(Reward(function="code")).call._case_limits is None  # type: ignore[attr-defined]
