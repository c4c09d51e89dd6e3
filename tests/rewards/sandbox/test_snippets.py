"""Snippets with asserts: what honest code may do."""

# ruff: noqa: E501, ISC004 - the programs read better as they are

from __future__ import annotations

from typing import Any

import pytest

from streamrl.rewards.sandbox.reward import CaseEnd, CodeOptions, CodeReward
from streamrl.rewards.sandbox.sandbox import Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")


# The code, and a snippet that holds for it.
HONEST = {
    "numbers": (
        "def f(x): return [x, x / 3, 10 ** 40 * x, complex(x, 1), float('inf'), True, None, 10 ** 1300]",
        "assert f(2) == [2, 2 / 3, 2 * 10 ** 40, 2 + 1j, float('inf'), True, None, 10 ** 1300]; assert f(2)[5] is True",
    ),
    "text and bytes": (
        "def f(x): return {x: x.encode(), 'ü\\ud800': b'\\xff'}",
        "assert f('é') == {'é': b'\\xc3\\xa9', 'ü\\ud800': b'\\xff'}",
    ),
    "values of other classes": (
        "import enum\nfrom collections import *\nclass Color(enum.IntEnum):\n    RED = 1\nclass Half(float): pass\n"
        "P = namedtuple('P', 'x y')\n"
        "def f(): return [Color.RED, Half(0.5), Counter('aab'), OrderedDict(a=1), {1}, frozenset([2]), P(1, 2), range(3)]",
        "a = f()\nassert a[0] == 1 and a[1:3] == [0.5, {'a': 2, 'b': 1}] and a[3]['a'] == 1 and a[4:7] == [{1}, {2}, (1, 2)]\n"
        "assert list(a[7]) == [0, 1, 2]",
    ),
    "values of the library": (
        "import datetime as d, decimal, collections\ndef f(): return [d.date(2020, 1, 2), decimal.Decimal('1.10'), collections.deque([1])]",
        "import datetime, decimal\nfrom collections import deque\nassert f() == [datetime.date(2020, 1, 2), decimal.Decimal('1.1'), deque([1])]",
    ),
    "in place": ("def f(rows): rows.sort(); return rows", "a = [[2], [1]]\nassert f(a) is a and a == [[1], [2]]"),
    "a class": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x); return self\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
        "s = Stack(); s.push(1).push([2])\nassert len(s) == 2 and isinstance(s, Stack) and s.pop() == [2] and s.items == [1]",
    ),
    "objects of the test": (
        "def depth(t): return 0 if t is None else 1 + max(depth(t.left), depth(t.right))",
        "class Tree:\n    def __init__(self, left=None, right=None): self.left, self.right = left, right\n"
        "assert depth(Tree(Tree(), Tree(None, Tree()))) == 3",
    ),
    "functions as arguments": (
        "def apply(f, xs): return [f(x) for x in xs]\ndef twice(f): return lambda x: f(f(x))",
        "assert apply(lambda x: x + 1, [1, 2]) == [2, 3] and apply(str, [1]) == ['1']\nassert twice(lambda x: x * 3)(2) == 18",
    ),
    "generators": ("def count(n): yield from range(n)", "assert list(count(3)) == [0, 1, 2]\nassert sorted(count(2)) == [0, 1]"),
    "exceptions": (
        "def f(x): raise ValueError('below', x)",
        "try: f(-1)\nexcept ValueError as error: assert error.args == ('below', -1)\nelse: assert False",
    ),
    "modules that the code imported": ("import math\ndef f(x): return math.sqrt(x)", "assert math.isclose(f(2) ** 2, 2)"),
    "its main part does not run": ("def f(): return __name__\nif __name__ == '__main__': input(); raise SystemExit(3)", "assert f()"),
    "deep recursion": ("def f(n): return 0 if n == 0 else 1 + f(n - 1)\nimport sys; sys.setrecursionlimit(10**6)", "assert f(20000) == 20000"),
    "a large value": ("def f(n): return list(range(n))", "assert f(100000)[-1] == 99999"),
    "printing": ("print('x' * 100000)\ndef f(): print('y'); return 1", "assert f() == 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
async def test_honest_code_passes(name: str, reward: CodeReward) -> None:
    code, test = HONEST[name]
    outcome = await reward.judge(code, [test, "assert False"])
    assert [case.end for case in outcome.cases] == [CaseEnd.PASSED, CaseEnd.WRONG], outcome


async def test_the_code_does_not_find_what_is_expected(reward: CodeReward) -> None:
    """It looks through all memory that Python can see, before and while it is called, for the number."""
    source = """
import gc, os, sys
def look(found=()):
    seen = [*gc.get_objects(), dict(os.environ), sys.argv, *sys._current_frames().values()]
    text = repr([x for x in seen if type(x) in (dict, list, tuple, str)])
    if "918273" + chr(54) + "45" in text: os.abort()
look()
def f(x): look(); return x
"""
    outcome = await reward.judge(source, ["assert f(1) == 918273645", "assert f(1) == 1"])
    assert [case.end for case in outcome.cases] == [CaseEnd.WRONG]
    assert "Assertion" in outcome.cases[0].message
    assert await reward(source, tests=["assert f(1) == 1"]) == 1.0


@pytest.mark.parametrize(
    ("test", "says"), [("assert (", "no Python"), ("import no_such_module", "no_such_module"), ("return", "no Python")]
)
async def test_a_broken_test_is_a_failure_and_no_0(test: str, says: str, reward: CodeReward) -> None:
    with pytest.raises(ValueError, match=says):
        await reward("def f(): return 1", tests=[test])


async def test_forms_of_datasets(reward: CodeReward) -> None:
    human_eval = "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n"
    right, wrong = "def total(xs): return sum(xs)", "def total(xs): return 3"
    apps: dict[str, Any] = {"fn_name": "total", "inputs": [[[1, 2]], "[]"], "outputs": [3, "0"]}
    solution = "class Solution:\n    def total(self, xs): return sum(xs)"
    setup = "import math\nbound = math.floor(3.5)"
    assert await reward(right, tests=human_eval, entry_point="total") == 1.0
    assert await reward(wrong, tests=human_eval, entry_point="total") == 0.0
    assert await reward(right, tests=apps) == await reward(solution, tests=apps) == 1.0
    assert await reward(wrong, tests=apps) == 0.0
    assert await reward(right, tests='["assert total([bound]) == 3"]', setup=setup) == 1.0
    assert await reward("def sum(a): return 3", tests="assert sum([4]) == 3", entry_point="sum") == 1.0


async def test_a_library_name_of_a_test_is_not_for_the_code_to_define(reward: CodeReward) -> None:
    code = "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 0"
    assert await reward(code, tests=["assert math.isclose(f(2), 4.0)"]) == 0.0
    assert await reward("def gcd(a, b): return 9", tests="assert gcd(4, 6) == 9", entry_point="gcd") == 1.0


# The code, the arguments, what is expected, and the value.
CALLS: dict[str, tuple[str, Any, Any, float]] = {
    "only the first of the list": ("def f(a, t): return 0", [[2, 7, 9], 9], [0, 1], 0.0),
    "only the first, as JSON": ("def f(a, t): return 0", "[2, 7, 9]\n9", "[0, 1]", 0.0),
    "wrapped": ("def f(x): return 2", [1], [2], 1.0),
    "a number as text": ("def f(n): return str(n)", [12], "12", 1.0),
    "a number, as JSON": ("def f(n): return n", "12", "12", 1.0),
    "text, as JSON": ("def f(n): return n", '"12"', '"12"', 1.0),
    "what equals everything": ("class E:\n    __eq__ = lambda s, o: True\ndef f(x): return E()", [1], [2], 0.0),
}


@pytest.mark.parametrize("name", CALLS)
async def test_calls_of_a_function(name: str, reward: CodeReward) -> None:
    code, arguments, expected, value = CALLS[name]
    assert await reward(code, tests={"fn_name": "f", "inputs": [arguments], "outputs": [expected]}) == value


@pytest.mark.parametrize("name", ["len", "isinstance", "float"])
async def test_a_function_with_the_name_of_a_built_in_does_not_compare(name: str, reward: CodeReward) -> None:
    code = f"def {name}(*a): return 1"
    tests = {"fn_name": name, "inputs": [[1], [2]], "outputs": [[[3]], [float("inf")]]}
    assert await reward(code, tests=tests) == 0.0
    assert await reward(code, tests={**tests, "outputs": [1, [1]]}) == 1.0


async def test_what_a_function_returns_may_differ_by_the_tolerance(sandbox: Sandbox) -> None:
    reward = CodeReward(CodeOptions(whole=True, tolerance=1e-6), sandbox)
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": [{"a": [0.3, 2]}]}
    assert await reward("def f(x): return {'a': (0.1 + 0.2, 2)}", tests=tests) == 1.0
    assert await reward("def f(x): return {'a': (0.31, 2)}", tests=tests) == 0.0
