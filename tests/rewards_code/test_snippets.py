"""Snippets with asserts: what honest code may do."""

# ruff: noqa: E501, ISC004 - the programs read better as they are

from __future__ import annotations

from typing import Any

import pytest
import pytest_asyncio

from streamrl.sandbox.reward import CaseEnd, CodeOptions, CodeReward
from streamrl.sandbox.sandbox import Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reward(sandbox: Sandbox) -> CodeReward:
    return CodeReward(CodeOptions(whole=True, timeout_s=3.0), sandbox)


# The code, and a snippet that holds for it.
HONEST = {
    "numbers": (
        "def f(x): return [x, x / 3, 10 ** 40 * x, complex(x, 1), float('inf'), True, None]",
        "assert f(2) == [2, 2 / 3, 2 * 10 ** 40, 2 + 1j, float('inf'), True, None]; assert f(2)[5] is True",
    ),
    "text and bytes": (
        "def f(x): return {x: x.encode(), 'ü\\ud800': bytearray(b'\\xff')}",
        "assert f('é') == {'é': 'é'.encode(), 'ü\\ud800': bytearray(b'\\xff')}",
    ),
    "numbers of other classes": (
        "import enum\nclass Color(enum.IntEnum):\n    RED = 1\nclass Half(float): pass\nclass Word(str): pass\n"
        "def f(): return [Color.RED, Half(0.5), Word('a'), 10 ** 17]",
        "assert f() == [1, 0.5, 'a', 10 ** 17] and abs(f()[0] - 1) < 1e-9",
    ),
    "containers": (
        "from collections import *\n"
        "def f(): return (deque([1], 3), Counter('aab'), OrderedDict(a=1), defaultdict(list, a=[1]), {1}, frozenset([2]))",
        "from collections import deque, Counter\na, b, c, d, e, g = f()\n"
        "assert a == deque([1]) and a.maxlen == 3 and b == Counter(a=2, b=1) and c == {'a': 1} == {k: v[0] for k, v in d.items()}\n"
        "assert e == {1} and g == {2} and isinstance(d, dict)",
    ),
    "values of the library": (
        "import datetime as d, decimal, fractions, collections\nP = collections.namedtuple('P', 'x y')\n"
        "def f(): return [d.date(2020, 1, 2), d.timedelta(3), decimal.Decimal('1.10'), fractions.Fraction(1, 3), P(1, 2), range(3)]",
        "import datetime, decimal, fractions\n"
        "assert f() == [datetime.date(2020, 1, 2), datetime.timedelta(3), decimal.Decimal('1.1'), fractions.Fraction(1, 3), (1, 2), range(3)]\n"
        "assert f()[4].y == 2",
    ),
    "in place": (
        "def f(rows, key):\n    rows.sort()\n    rows[0].append(9)\n    key['n'] = rows\n    return rows",
        "a, k = [[2], [1]], {}\nfirst = a[1]\nassert f(a, k) is a and a == [[1, 9], [2]] and k['n'] == a and first == [1, 9]",
    ),
    "shared and cyclic": (
        "def f(x): y = [x, x]; x.append(y); return y",
        "y = f([])\nassert y[0] is y[1] and y[0][0] is y",
    ),
    "a class": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x); return self\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)\n"
        "    def __getitem__(self, i): return self.items[i]\n    def __str__(self): return 'stack'",
        "s = Stack(); s.push(1).push([2])\nassert len(s) == 2 and s[0] == 1 and str(s) == f'{s}' == 'stack' and 1 in s\n"
        "assert isinstance(s, Stack) and s.pop() == [2] and list(s) == [1] and s.items == [1] and bool(s)\n"
        "s.limit = 3\nassert s.limit == 3",
    ),
    "comparing its objects": (
        "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n"
        "    def __lt__(self, o): return self.x < o.x\n    def __add__(self, o): return P(self.x + o.x)\n"
        "    def __mul__(self, n): return P(self.x * n)\n    def __hash__(self): return self.x",
        "assert P(1) + P(2) == P(3) and P(1) < P(2) and P(2) * 3 == P(6) and P(1) != P(2)\n"
        "assert sorted([P(2), P(1)])[0].x == 1 and len({P(1), P(1)}) == 1",
    ),
    "a linked list": (
        "class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\n"
        "def reverse(n):\n    p = None\n    while n: n.next, p, n = p, n, n.next\n    return p",
        "n = reverse(Node(1, Node(2, Node(3))))\nfound = []\nwhile n: found.append(n.v); n = n.next\nassert found == [3, 2, 1]",
    ),
    "an object of the test": (
        "def depth(t): return 0 if t is None else 1 + max(depth(t.left), depth(t.right))\ndef mark(t): t.seen = depth(t)",
        "class Tree:\n    def __init__(self, left=None, right=None): self.left, self.right = left, right\n"
        "t = Tree(Tree(), Tree(None, Tree()))\nassert depth(t) == 3\nmark(t)\nassert t.seen == 3",
    ),
    "functions as arguments": (
        "def apply(f, xs): return [f(x) for x in xs]\ndef twice(f): return lambda x: f(f(x))\n"
        "def sort(xs, key): return sorted(xs, key=key)",
        "assert apply(lambda x: x + 1, [1, 2]) == [2, 3] and twice(lambda x: x * 3)(2) == 18\n"
        "assert sort(['aaa', 'b'], len) == ['b', 'aaa'] and apply(str, [1]) == ['1']",
    ),
    "generators": (
        "def count(n):\n    for i in range(n): yield i\ndef total(xs): return sum(xs)",
        "assert list(count(3)) == [0, 1, 2] and total(x for x in (1, 2)) == 3 and next(count(1)) == 0",
    ),
    "exceptions": (
        "class Mine(ValueError):\n    pass\ndef f(x):\n    if x < 0: raise ValueError('below', x)\n    if x == 0: raise Mine('none')\n    raise KeyError",
        "try: f(-1)\nexcept ValueError as error: assert error.args == ('below', -1)\nelse: assert False\n"
        "try: f(0)\nexcept Mine as error: assert str(error) == 'none' and isinstance(error, ValueError)\nelse: assert False\n"
        "try: f(1)\nexcept KeyError: pass\nelse: assert False",
    ),
    "modules that the code imported": (
        "import math\nfrom collections import Counter\ndef f(x): return math.sqrt(x)",
        "assert math.isclose(f(2) ** 2, 2) and Counter('aa') == {'a': 2}",
    ),
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
    ("test", "says"),
    [("assert (", "no Python"), ("import no_such_module", "no_such_module")],
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


# The code; whether it is right; the test, which needs something that it does not import; and the entry point.
OWN_NAMES = {
    "class math": ("class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 0", False, "assert math.isclose(f(2), 4.0)", ""),
    "math": ("import math\ndef f(x): return 4.0", True, "assert math.isclose(f(2), 4.0)", ""),
    "class random": (
        "class random:\n    randint = staticmethod(lambda a, b: 0)\ndef f(x): return 0", False,
        "for _ in range(3):\n    x = random.randint(1, 100)\n    assert f(x) == x", "",
    ),
    "def Counter": ("def Counter(x): return 0\ndef f(x): return [3]", False, "assert Counter(f(1)) == Counter([1, 2])", ""),
    "def Counter, of a right program": ("def Counter(x): return 0\ndef f(x): return [2, 1]", True, "assert Counter(f(1)) == Counter([1, 2])", ""),
    "def isclose, of a variable": (
        "def isclose(*a, **k): return True\ndef area(x): return 0", False, "given = area(2)\nassert isclose(given, b=12.566)", "",
    ),
    "def isclose beside an entry point": (
        "def isclose(*a, **k): return True\ndef sqrt(x): return 0", False, "assert isclose(sqrt(4), 2)", "sqrt",
    ),
    "an entry point that is a name of math": ("def gcd(a, b): return 9", True, "assert gcd(4, 6) == 9", "gcd"),
    "only a name of math is tested": ("def comb(n, k): return 7", True, "assert comb(n=1, k=2) == 7", ""),
    "only names of math are tested": ("def gcd(a, b): return 7\ndef lcm(a, b): return 8", True, "assert gcd(1, 2) + 1 == lcm(1, 2)", ""),
    "a name of itertools is tested, and another": (
        "def count(n): return list(range(n))\ndef total(x): return sum(x)", True, "assert count(3) == [0, 1, 2] and total([1]) == 1", "",
    ),
    "a function with the name of a module": ("def copy(x): return x[:]\ndef f(x): return x", True, "assert copy(f([1])) == [1]", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_NAMES)
async def test_what_a_test_does_not_import_is_not_for_the_code_to_define(name: str, reward: CodeReward) -> None:
    code, right, test, entry_point = OWN_NAMES[name]
    outcome = await reward.judge(code, [test], entry_point=entry_point)
    assert outcome.value == float(right), outcome


# The code, the arguments, what is expected, and the value.
CALLS: dict[str, tuple[str, Any, Any, float]] = {
    "only the first of the list": ("def f(a, t): return 0", [[2, 7, 9], 9], [0, 1], 0.0),
    "only the first, as JSON": ("def f(a, t): return 0", "[2, 7, 9]\n9", "[0, 1]", 0.0),
    "wrapped": ("def f(x): return 2", [1], [2], 1.0),
    "a wrapped list": ("def f(x): return (1, 2)", [1], [[1, 2]], 1.0),
    "nested tuples": ("def f(a, b): return list(zip(a, b))", [[1, 2], [3, 4]], [[1, 3], [2, 4]], 1.0),
    "a number as text": ("def f(n): return str(n)", [12], "12", 1.0),
    "a number, as JSON": ("def f(n): return n", "12", "12", 1.0),
    "text, as JSON": ("def f(n): return n", '"12"', '"12"', 1.0),
    "keys that are numbers": ("def f(x): return {1: 2}", [1], {"1": 2}, 1.0),
    "infinity": ("def f(x): return [float('inf'), x]", [float("-inf")], [float("inf"), float("-inf")], 1.0),
    "not infinity": ("inf = 5\ndef f(x): return 5", [1], float("inf"), 0.0),
    "almost": ("def f(x): return [0.1 + 0.2]", [1], [0.3], 0.0),
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
