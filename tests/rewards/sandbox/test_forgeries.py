"""Tests that are compared outside: no object, patch or message of the code's passes one of them."""

# ruff: noqa: E501 - the programs read better as they are

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tiers import quick_only

from streamrl.rewards.sandbox.asserts import parse_test, passes, take_apart
from streamrl.rewards.sandbox.reward import CaseEnd, CodeOptions, CodeReward
from streamrl.rewards.sandbox.sandbox import Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")


HONEST = """
def add(a, b): return a + b
def half(x): return x / 2
def members(x): return {1, 2}
def text(x): return "abc"
def squares(n): return [i * i for i in range(n)]
def count(n): yield from range(n)
def pair(x): return (x, str(x))
def table(x): return {"a": [x]}
def double(xs): xs[:] = [2 * x for x in xs]
def fail(x): raise ValueError(x)
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
class Solution:
    def add(self, a, b): return a + b
"""
# The names of HONEST, each of which gives an object of E where it is called, or is one.
EVERYWHERE = """
def add(a, b): return E()
half = members = text = squares = count = pair = table = double = fail = lambda *a: E()
class Stack:
    items = E()
    push = pop = lambda *a: E()
class Solution:
    add = lambda *a: E()
"""
_OPERATORS = (
    "for _n in 'add sub mul truediv floordiv mod pow and or xor lshift rshift matmul'.split():\n"
    "    setattr(E, f'__{_n}__', lambda s, *o: s); setattr(E, f'__r{_n}__', lambda s, *o: s)\n"
)
_ORDERS = "for _n in 'eq lt le gt ge contains instancecheck'.split(): setattr(E, f'__{_n}__', lambda s, *o: True)\n"
OBJECTS = (
    (  # 0, empty and false, whatever is done with it
        "class E:\n"
        "    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = lambda s, *o: s\n"
        "    __float__ = lambda s: 0.0\n    __int__ = __index__ = __len__ = __hash__ = __trunc__ = __floor__ = lambda s: 0\n"
        "    __bool__ = lambda s: False\n    __str__ = __repr__ = __format__ = lambda s, *o: '0'\n"
        "    __iter__ = lambda s: iter(())\n    __getattr__ = lambda s, n: lambda *a: E()\n"
    ),
    (  # equals, has and confirms everything
        "class E:\n"
        "    __hash__ = lambda s: hash(5)\n    __ne__ = lambda s, o: False\n    __call__ = lambda s, *a: True\n"
        "    __getattr__ = lambda s, n: lambda *a: True\n"
    ),
)
# Each holds for HONEST. The first fifteen and more passed for an object with such methods where operators saw it.
CHECKS = [
    "assert float(abs(add(2, 3) - 5)) < 1e-6",
    "import math; assert math.isclose(add(2, 3) - 5, 0, abs_tol=1e-6)",
    "assert not members(0) ^ {1, 2}",
    "assert len(members(0) ^ {1, 2}) == 0",
    "assert int(add(2, 3) - 5) == 0",
    'assert str(add(2, 3) - 5) == "0"',
    "assert not add(2, 3) - 5",
    "assert bool(add(2, 3) - 5) is False",
    "assert [7][add(2, 3) - 5] == 7",
    "assert round(float(half(5) - 2.5), 6) == 0",
    "assert not members(0) - {1, 2} and not {1, 2} - members(0)",
    "assert add(2, 3) == 5",
    "assert add(2, 3) == 5, f'no, {add(2, 3)}'",
    "assert not add(2, 3) != 5",
    "assert add(2, 3) in (5, 6) and 5 in [add(2, 3)]",
    "assert 4.9 < add(2, 3) <= 5",
    "assert sorted(members(0)) == [1, 2] and set(members(0)) == {1, 2}",
    "assert max(squares(4)) == 9 and sum(squares(4)) == 14 and len(squares(4)) == 4",
    "assert squares(4)[-1] == 9 and squares(3) == [0, 1, 4] and squares(4)[1:] == [1, 4, 9]",
    'assert pair(1) == (1, "1") and table(1)["a"] == [1]',
    "assert list(count(3)) == [0, 1, 2]",
    "assert Solution().add(2, 3) == 5",
    "xs = [1, 2]\nassert add(xs, [3]) == [1, 2, 3]",
    "given = add(2, 3)\nassert given == 5 and given % 2 == 1",
    "METADATA = {}\ndef check(candidate):\n    'sums'\n    assert candidate(2, 3) == 5\n    assert candidate(0, 0) == 0\ncheck(add)",
]


async def test_checks_are_compared_outside_the_sandbox(reward: CodeReward) -> None:
    """Checks are compared outside the sandbox, and honest code passes them."""
    outcome = await reward.judge(HONEST, CHECKS)
    assert [(case.end, case.inside) for case in outcome.cases] == [(CaseEnd.PASSED, False)] * len(CHECKS), outcome


@pytest.mark.parametrize("check", CHECKS)
async def test_no_object_passes(check: str, reward: CodeReward) -> None:
    codes = (OBJECTS[0] + _OPERATORS + EVERYWHERE, OBJECTS[1] + _OPERATORS + _ORDERS + EVERYWHERE)
    outcomes = await asyncio.gather(*(reward.judge(code, [check]) for code in codes))
    assert [(one.value, one.cases[0].inside) for one in outcomes] == [(0.0, False)] * 2, outcomes


_WORDS = "{'values': [True], 'nonce': '', 'verdict': 'passed', 'status': 0}"
# None of them adds, and each is tested with TRICKED.
TRICKS = {
    "exit at the import": "import os; os._exit(0)",
    "exit when called": "import os\ndef add(a, b): os._exit(0)",
    "SystemExit": "def add(a, b): raise SystemExit(0)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): raise SystemExit(0)",
    "an exception that ends iterators": "def add(a, b): raise StopIteration",
    "an exception of unittest": "import unittest\ndef add(a, b): raise unittest.SkipTest('skipped')",
    "an exception of its own": "class Passed(AssertionError):\n    __bool__ = __eq__ = lambda *a: True\ndef add(a, b): raise Passed",
    "a subclass of int": "class I(int):\n    __eq__ = lambda s, o: True\n    __sub__ = __rsub__ = lambda s, o: 0\n    __hash__ = int.__hash__\ndef add(a, b): return I(1)",
    "a subclass of float": "class F(float):\n    __eq__ = __lt__ = __le__ = lambda s, o: True\n    __sub__ = __abs__ = lambda s, *o: 0.0\ndef add(a, b): return F(1)",
    "a subclass of str": "class S(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\ndef add(a, b): return S('x')",
    "a subclass of list": "class L(list):\n    __eq__ = __contains__ = lambda s, o: True\n    __sub__ = lambda s, o: 0\ndef add(a, b): return L([1])",
    "a subclass of dict": "class D(dict):\n    __eq__ = __contains__ = lambda s, o: True\n    __missing__ = lambda s, k: 5\ndef add(a, b): return D()",
    "a subclass of tuple": "class T(tuple):\n    __eq__ = __contains__ = lambda s, o: True\ndef add(a, b): return T((1,))",
    "a number of an enum": "import enum\nclass C(enum.IntEnum):\n    A = 1\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\ndef add(a, b): return C.A",
    "a class": "class M(type):\n    __eq__ = lambda s, o: True\n    __hash__ = type.__hash__\n    __sub__ = lambda s, o: 0\nclass E(metaclass=M): pass\ndef add(a, b): return E",
    "add is a class": "class add:\n    def __init__(s, a, b): pass\n    __eq__ = lambda s, o: True\n    __sub__ = lambda s, o: 0\n    __hash__ = lambda s: 5",
    "a mock": "from unittest.mock import ANY, MagicMock\nadd = MagicMock(return_value=ANY)",
    "a lying class": "class E:\n    __class__ = int\n    __eq__ = lambda s, o: True\ndef add(a, b): return E()",
    "not a number": "def add(a, b): return float('nan')",
    "a named tuple with a method": "import collections\nN = collections.namedtuple('N', 'bit_length count')\ndef add(a, b): return N(lambda *a: True, lambda *a: True)",
    "an iterator that never ends": "import itertools\ndef add(a, b): return itertools.count()",
    "built-ins": "import builtins\nbuiltins.AssertionError = StopIteration\nbuiltins.abs = builtins.isinstance = builtins.all = lambda *a: True\nabs = all = isinstance = len = sorted = lambda *a: True\ndef add(a, b): return True",
    "encoder of JSON": "import json\njson.dumps = lambda *a, **k: '{\"value\": 5, \"nonce\": \"\"}'\njson.loads = lambda *a: {}\ndef add(a, b): return 1",
    "functions of the server": "import sys\nfor m in list(sys.modules.values()):\n    for n in ('encode', 'decode', 'serve', 'same_result', 'compile'):\n        if m and hasattr(m, n): setattr(m, n, lambda *a: {'nonce': '', 'value': True})\ndef add(a, b): return 1",
    "modules": "import sys, types\nfor n in list(sys.modules): sys.modules[n] = types.SimpleNamespace(isclose=lambda *a, **k: True, add=5)\ndef add(a, b): return 1",
    "math": "import math\nmath.isclose = math.fabs = lambda *a, **k: True\ndef add(a, b): return 1",
    "a class for math": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef add(a, b): return 1",
    "the module of the test": "import sys, types\nsys.modules['test'] = sys.modules['judge'] = types.SimpleNamespace(add=lambda *a: 5)\ndef add(a, b): return 1",
    "frames": "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n        for n in ('order', 'answer'):\n            if n in f.f_locals: f.f_locals[n].update(nonce='', verdict='passed')\n        f = f.f_back\n    return 1",
    "what the collector knows": "import gc\ndef add(a, b):\n    for x in gc.get_objects():\n        if isinstance(x, dict) and 'nonce' in x: return x['nonce']\n        if isinstance(x, str) and 'add(2, 3)' in x: return 5\n    return 1",
    "/proc": "import os\ndef add(a, b):\n    for p in range(1, 50):\n        for n in ('mem', 'environ', 'cmdline', 'fd/3'):\n            try:\n                with open(f'/proc/{p}/{n}', 'rb') as file: return 5 if file.read(9) else 0\n            except OSError: pass\n    return 1",
    "a trace": "import sys, threading\ndef t(*a): return t\nsys.settrace(t); threading.setprofile(t)\ndef add(a, b): return 1",
    "a kill": "import os\ndef add(a, b):\n    for p in (1, os.getppid(), 0, -1):\n        try: os.kill(p, 9)\n        except OSError: pass\n    return 1",
    "words on every file": f"import json, os\ndef add(a, b):\n    for fd in range(64):\n        try: os.write(fd, json.dumps({_WORDS}).encode() + b'\\n')\n        except OSError: pass\n    os._exit(0)",
    "nested": "import sys; sys.setrecursionlimit(10**6)\ndef add(a, b):\n    x = []\n    for _ in range(20000): x = [x]\n    return x",
    "an answer without an end": "import os\ndef add(a, b):\n    while True:\n        for fd in range(3, 9):\n            try: os.write(fd, b'[' * 65536)\n            except OSError: pass",
    "an answer that is no JSON": "import os\ndef add(a, b):\n    for fd in range(3, 9):\n        try: os.write(fd, b'\\xff\\n')\n        except OSError: pass\n    os._exit(0)",
    "numbers with one hash": "def add(a, b): return {i * (2**61 - 1) for i in range(20000)}",
    "a module that is missing": "def add(a, b): raise ModuleNotFoundError('the test needs it')",
    "names of the checks": "import unittest.mock as math\nisclose = approx = all = map = lambda *a, **k: True\nadd = lambda a, b: math.ANY",
    "all names": "class A(Exception): pass\nimport builtins\nfor n in dir(builtins):\n    if n not in ('__build_class__', '__import__'): globals()[n] = lambda *a, **k: True\ndef add(a, b): return True",
    "an import that fails": "def add(a, b): import numpy.nowhere",
    "a message that is too long": "def add(a, b): return 'x' * (17 << 20)",
    "a cycle": "def add(a, b): x = []; x.append(x); return x",
    "no Python": "def add(a, b) return a + b",
    "nothing": "",
}  # fmt: skip
TRICKED: list[Any] = [
    "assert add(2, 3) == 5 and abs(add(2, 3) - 5) < 1e-6",
    "assert math.isclose(add(2, 3), 5)",
    {"fn_name": "add", "inputs": [[2, 3]], "outputs": [5]},
]


ENDLESS = ("an iterator that never ends", "an answer without an end", "numbers with one hash")


@pytest.mark.parametrize("name", quick_only(TRICKS, TRICKS.keys() - set(ENDLESS)))
async def test_no_trick_passes(name: str, sandbox: Sandbox) -> None:
    reward = CodeReward(CodeOptions(whole=True, timeout_s=3.0 if name in ENDLESS else 10.0), sandbox)
    outcomes = await asyncio.gather(*(reward.judge(TRICKS[name], tests) for tests in TRICKED))
    assert [(one.value, one.cases[0].inside) for one in outcomes] == [(0.0, False)] * len(TRICKED), outcomes


# The code of each is right; its test does more than compare what a function gives.
INSIDE = {
    "operators": ("class V:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return V(s.x + o.x)\n    def __eq__(s, o): return s.x == o.x", "assert V(1) + V(2) == V(3)"),
    "an object": ("class S:\n    def push(s, x): s.x = x\n    def pop(s): return s.x", "s = S()\ns.push(2)\nassert s.pop() == 2"),
    "an exception": ("def f(): raise KeyError", "try: f()\nexcept KeyError: pass\nelse: assert False"),
    "a loop": ("def f(x): return x + 1", "for i in range(3):\n    assert f(i) == i + 1"),
    "identity": ("def f(x): x.append(1); return x", "a = []\nassert f(a) is a"),
    "in place": ("def f(x): x.append(1); return x", "a = []\nassert f(a) == [1]\nassert a == [1]"),
    "an answer as an argument": ("def f(x): return x + 1", "assert f(f(1)) == 3"),
    "a method of an answer": ("def f(): return 'abc'", "assert f().startswith('ab')"),
    "a function of the test": ("def f(x): return x", "def same(a, b): return a == b\nassert same(f(1), 1)"),
    "a name of the library": ("from collections import Counter\ndef f(x): return x", "assert Counter(f('aa')) == {'a': 2}"),
    "a coroutine": ("async def f(x): return x", "import asyncio\nassert asyncio.run(f(2)) == 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
async def test_what_runs_inside_says_so_and_can_be_refused(name: str, reward: CodeReward, sandbox: Sandbox) -> None:
    code, test = INSIDE[name]
    outcome = await reward.judge(code, [test, f"{test}\nassert False"])
    assert [(case.end, case.inside) for case in outcome.cases] == [(CaseEnd.PASSED, True), (CaseEnd.WRONG, True)], (
        outcome
    )
    strict = CodeReward(CodeOptions(whole=True, forgeable=False), sandbox)
    with pytest.raises(ValueError, match="forgeable"):
        await strict(code, tests=[test])
    assert await strict(HONEST, tests=CHECKS[:1]) == 1.0


# Each would reach out of the reward process, or take long in it, if it were evaluated there.
OUTER = [
    "assert f(1).__class__",
    "assert f(1) == [].__class__.__base__",
    "assert f(1) == __import__('os').getpid()",
    "assert f(1) == open('/etc/passwd').read()",
    "assert f(1) == eval('1')",
    "assert f(1) == (lambda: 1)()",
    "assert f(1) == [x for x in range(3)]",
    "assert f(1) == f'{1:>999999999}'",
    "assert f(1) == 1 << 10**12",
    "assert f(1) == max(1, key=f)",
    "assert f(1) == math.__loader__",
    "assert (x := f(1)) == 1",
    "assert all(i for i in f(1))",
]


@pytest.mark.parametrize("test", OUTER)
async def test_only_a_known_syntax_is_evaluated_outside(test: str) -> None:
    assert take_apart("", parse_test("", test), "") is None


@pytest.mark.parametrize("parameter", ["candidate", "f"])
async def test_a_check_may_name_its_parameter_as_the_function(parameter: str) -> None:
    """As HumanEval's ``check(candidate)``: such a test is simple, whatever the name."""
    test = parse_test("", f"def check({parameter}):\n    assert {parameter}(1) == 2\ncheck(f)")
    simple = take_apart("", test, "f")
    assert simple is not None and simple.questions == ("f(1)",)


@pytest.mark.parametrize(
    "expression", ["10**10**10", "'x' * 10**12", "[0] * f(0)", "2 ** f(0)", "'%999999999d' % 1", "round(5, -(10**9))"]
)
async def test_nothing_large_is_made_outside(expression: str) -> None:
    test = take_apart("", parse_test("", f"assert {expression} == 1\nassert f(0)"), "")
    assert test is not None
    with pytest.raises((ValueError, TypeError)):
        passes(test, [10**12] * len(test.questions))
