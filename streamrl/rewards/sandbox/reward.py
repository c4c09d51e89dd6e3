"""The reward ``code``: 1 where a completion's code passes all its test cases in the sandbox, otherwise 0 (or the share
of passed cases). Listed in ``builtin.catalog``.

It runs in a call process, or in the reward worker where the reward is trusted. A case that could not be judged (the
sandbox failed, the test is broken) raises, so a failure of the reward is recorded and not a 0."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import Struct

from streamrl.base.errors import RecipeError
from streamrl.base.run_process import usable_cores
from streamrl.base.types import JsonObject
from streamrl.recipe.field_types import Natural, Positive, PositiveFloat
from streamrl.rewards.declared import BadOption, BuiltinReward, Options, declare
from streamrl.rewards.sandbox.asserts import SimpleTest, parse_test, passes, take_apart
from streamrl.rewards.sandbox.cases import (
    CallCase,
    Case,
    Comparison,
    ProgramCase,
    SnippetCase,
    extract_code,
    read_cases,
    same_output,
)
from streamrl.rewards.sandbox.jail import Limits
from streamrl.rewards.sandbox.sandbox import LayersFound, ProgramEnd, Sandbox, available_layers
from streamrl.rewards.sandbox.values import same_result
from streamrl.rewards.time_limits import TimeLimits

_MIB = 1 << 20
_SCRATCH_FILES = 512
_MOST_CHARACTERS = 300
_log = logging.getLogger(__name__)


class CodeOptions(Options, frozen=True):
    """Options of the code reward.

    ``column``: dataset column with the tests (see ``streamrl.rewards.sandbox.cases``). ``entry_point_column``: column
    with the name of the function that is passed to ``check``; ``setup_column``: column with Python that runs before
    each snippet. ``whole``: the whole completion is the code. ``value``: ``all`` for 1 where all cases pass, ``share``
    for the share of passed cases. ``compare``, ``tolerance``: comparison of outputs, see ``same_output``; ``tolerance``
    also compares the results of functions.

    Limits for each case: ``timeout_s``: wall time; ``time_limit_is_wrong`` False: a case beyond it fails the sample
    instead of counting as wrong. ``memory_mb``: address space of each process; ``output_mb``: size of each file and of
    stdout; ``scratch_mb``: size of /tmp; ``processes`` (1: no process can be started), ``threads``, ``open_files``.

    ``forgeable`` False: a test that can only run in the code's own process, which can forge that it passed, fails the
    sample instead. ``concurrency``: runs at once (0: one for each CPU). ``allow_unsandboxed``: the code runs even where
    no layer of isolation works."""

    column: str = "tests"
    entry_point_column: str = "entry_point"
    setup_column: str = "setup"
    whole: bool = False
    value: Literal["all", "share"] = "all"
    compare: Comparison = "lines"
    tolerance: float | None = None
    timeout_s: PositiveFloat = 5.0
    time_limit_is_wrong: bool = True
    memory_mb: Positive = 512
    output_mb: Positive = 8
    scratch_mb: Positive = 16
    processes: Positive = 1
    threads: Positive = 16
    open_files: Positive = 64
    stack_mb: Positive = 64
    forgeable: bool = True
    concurrency: Natural = 0
    allow_unsandboxed: bool = False


class CaseEnd(enum.StrEnum):
    """Outcome of one case."""

    PASSED = "passed"
    WRONG = "wrong"
    RAISED = "raised"
    TIMED_OUT = "timed_out"
    TOO_MUCH_OUTPUT = "too_much_output"


class CaseOutcome(Struct, frozen=True):
    """Outcome of one case. ``seconds``, ``cpu_seconds``: wall and CPU time of the code; ``message``: a line about the
    error; ``inside``: the test ran in the code's process, which can forge that it passed."""

    end: CaseEnd
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    message: str = ""
    inside: bool = False


class CodeOutcome(Struct, frozen=True):
    """Outcome of one completion. ``value``: None: there were no tests; ``cases``: outcomes of the cases that were run,
    in order."""

    value: float | None
    cases: tuple[CaseOutcome, ...]


class CodeReward:
    """The reward function: ``await reward(completion, tests=...)``; ``judge`` also returns the outcome of each case.

    It belongs to one event loop; ``aclose`` ends the sandbox, and so does the end of the process. With
    ``learn_time_limits`` each test case of a prompt has its own limit, at most ``timeout_s``, which follows from the
    slowest run that passed it."""

    def __init__(self, options: CodeOptions, sandbox: Sandbox) -> None:
        self.options = options
        self._sandbox = sandbox
        self._concurrent_runs = asyncio.Semaphore(options.concurrency or usable_cores())
        self._case_limits: TimeLimits | None = None
        optional = [options.entry_point_column, options.setup_column]
        declare(self, columns=[options.column], optional=optional, provided=["prompt_id"])

    def learn_time_limits(self, limits: TimeLimits) -> None:
        """Keep the times of runs that passed in ``limits``, by prompt and test case, and limit later runs by them."""
        self._case_limits = limits

    async def __call__(self, completion: str, **columns: Any) -> float | None:
        """The value. Raises ``ValueError`` for invalid tests, ``SandboxError``, and ``TimeoutError`` for a test case
        that ran beyond ``timeout_s`` where ``time_limit_is_wrong`` is False, or beyond an adaptive limit where the
        recipe does not set ``late_is_wrong``."""
        options = self.options
        outcome = await self.judge(
            completion,
            columns[options.column],
            entry_point=columns.get(options.entry_point_column) or "",
            setup=columns.get(options.setup_column) or "",
            prompt_id=columns.get("prompt_id", ""),
        )
        return outcome.value

    async def judge(
        self, completion: str, tests: Any, *, entry_point: str = "", setup: str = "", prompt_id: str = ""
    ) -> CodeOutcome:
        """Run the cases of ``prompt_id``, each in a jail of its own. Raises as ``__call__`` does."""
        options = self.options
        cases = read_cases(tests, entry_point=entry_point, setup=setup, tolerance=options.tolerance)
        if not cases:
            return CodeOutcome(None, ())
        code = extract_code(completion, whole_completion=options.whole)
        if code is None:
            return CodeOutcome(0.0, ())
        outcomes = []
        for index, case in enumerate(cases):
            key = f"{prompt_id} case {index}"
            limit_s = options.timeout_s
            late_is_wrong = options.time_limit_is_wrong
            if self._case_limits is not None and self._case_limits.limit_s(key) < limit_s:
                limit_s = self._case_limits.limit_s(key)
                late_is_wrong = self._case_limits.late_is_wrong
            outcome = await self._run_case(code, case, limit_s)
            outcomes.append(outcome)
            if self._case_limits is not None and outcome.end is CaseEnd.PASSED:
                self._case_limits.observe(key, outcome.seconds, math.inf)  # inf: the run is correct
            if outcome.end is CaseEnd.TIMED_OUT and not late_is_wrong:
                raise TimeoutError(f"test case {index} of {len(cases)} ran beyond its limit of {limit_s:g} s")
            if outcome.end is not CaseEnd.PASSED and options.value == "all":
                break
        passed = sum(outcome.end is CaseEnd.PASSED for outcome in outcomes)
        value = passed / len(cases) if options.value == "share" else float(passed == len(cases))
        return CodeOutcome(value, tuple(outcomes))

    async def aclose(self) -> None:
        """End the sandbox."""
        await self._sandbox.aclose()

    async def _run_case(self, code: str, case: Case, limit_s: float) -> CaseOutcome:
        source = code.encode(errors="surrogatepass")
        async with self._concurrent_runs:
            limits = self._limits(limit_s)
            if isinstance(case, ProgramCase):
                report, output = await self._sandbox.run_program(source, case.stdin.encode(), limits)
                return self._judge_output(report, output, case.stdout)
            test = None
            nonce = secrets.token_hex(16)
            order: JsonObject = {"setup": case.setup}
            if isinstance(case, CallCase):
                order |= {"function": case.function, "arguments": case.arguments}
            else:
                test = self._read_test(case)
                order |= {"test": case.test, "nonce": nonce}
                if test is not None:
                    order = {"setup": test.setup, "questions": test.questions}
            report, answer = await self._sandbox.run_module(source, order, limits)
        inside = "test" in order
        message = answer.raised
        if answer.values is not None:
            if isinstance(case, CallCase):
                message = _wrong_result(answer.values, case)
            else:
                message = _wrong_answers(answer.values, test, nonce)
        return _outcome(report, message, inside)

    def _read_test(self, case: SnippetCase) -> SimpleTest | None:
        """Questions and checks of a test; None: the test runs in the code's process. Raises ``ValueError`` for a test
        that cannot run with any code."""
        try:
            test = take_apart(case.setup, parse_test(case.setup, case.test), case.entry_point)
        except ValueError as error:
            raise ValueError(f"the test case cannot be run with any code: {error}") from error
        if test is None and not self.options.forgeable:
            raise ValueError("the test can only run in the code's process, and rewards.options.forgeable is false")
        return test

    def _judge_output(self, report: ProgramEnd, output: bytes, expected: str) -> CaseOutcome:
        options = self.options
        if len(output) >= options.output_mb * _MIB and not report.timed_out:
            message = f"it wrote {options.output_mb} MiB or more"
            return CaseOutcome(CaseEnd.TOO_MUCH_OUTPUT, report.seconds, report.cpu_seconds, message)
        text = output.decode(errors="replace")
        if report.status == 0 and same_output(text, expected, options.compare, options.tolerance):
            return _outcome(report, "")
        return _outcome(report, "it wrote something else than expected")

    def _limits(self, seconds: float) -> Limits:
        options = self.options
        return Limits(
            seconds=seconds,
            memory_bytes=options.memory_mb * _MIB,
            file_bytes=options.output_mb * _MIB,
            scratch_bytes=options.scratch_mb * _MIB,
            scratch_files=_SCRATCH_FILES,
            processes=options.processes,
            threads=options.threads,
            open_files=options.open_files,
            stack_bytes=options.stack_mb * _MIB,
        )


def _wrong_result(values: Sequence[Any], case: CallCase) -> str:
    """Message about a wrong result of a call; empty: the result is right."""
    expected = [case.expected]
    if isinstance(case.expected, list) and len(case.expected) == 1:
        expected += case.expected  # some tasks of APPS wrap the result of a function in a list

    def is_right() -> bool:
        return len(values) == 1 and any(same_result(values[0], result, case.tolerance) for result in expected)

    return _problem(is_right)


def _wrong_answers(values: Sequence[Any], test: SimpleTest | None, nonce: str) -> str:
    """Message about wrong answers to the questions of a simple test, or about a missing nonce of another test (None);
    empty: the test passed."""

    def is_right() -> bool:
        if test is None:
            return values == [nonce]
        return len(values) == len(test.questions) and passes(test, values)

    return _problem(is_right)


def _problem(is_right: Callable[[], bool]) -> str:
    try:
        if is_right():
            return ""
    except Exception as error:  # noqa: BLE001 - an answer of an unexpected type may raise anything: not passed
        return f"{type(error).__name__}: {error}"
    return "AssertionError: it gave something else than expected"


def _outcome(report: ProgramEnd, wrong: str, inside: bool = False) -> CaseOutcome:
    """Outcome of a case. ``wrong``: message about a wrong output or answer; empty: the result is right."""
    end = CaseEnd.PASSED
    message = ""
    if report.timed_out:
        end = CaseEnd.TIMED_OUT
        message = "it ran beyond its time limit"
        inside = False
    elif wrong and report.status != 0:
        end = CaseEnd.RAISED
        message = report.last_error or f"it ended with {report.status}"
    elif wrong:
        end = CaseEnd.WRONG
        message = wrong[:_MOST_CHARACTERS]
    return CaseOutcome(end, report.seconds, report.cpu_seconds, message, inside)


def _code(options: CodeOptions) -> CodeReward:
    """Make the reward. Raises ``RecipeError`` where this machine cannot isolate the code and ``allow_unsandboxed`` is
    not set."""
    if options.compare == "exact" and options.tolerance is not None:
        raise BadOption(
            f'"tolerance" = {options.tolerance:g} has no effect with compare = "exact": leave it out, or write '
            'compare = "lines" or "tokens"'
        )
    layers = available_layers()
    if not options.allow_unsandboxed:
        require_isolation(layers)
    elif not layers.isolating:
        _log.warning(
            'REWARD "code" RUNS A MODEL\'S CODE WITHOUT A SANDBOX (allow_unsandboxed = true): it can do whatever '
            "user %d can: read and delete files, use the network, signal processes",
            os.getuid(),
        )
    return CodeReward(options, Sandbox())


def require_isolation(layers: LayersFound) -> None:
    """Raise ``RecipeError`` where code could reach files, the network or other processes."""
    if layers.isolating:
        return
    reasons = "; ".join(f"{name}: {reason}" for name, reason in layers.missing.items()) or "none was asked for"
    raise RecipeError(
        f'reward "code" would run a model\'s code without isolation on this machine ({reasons}): allow user '
        "namespaces (kernel.unprivileged_userns_clone = 1; in Docker --security-opt seccomp=unconfined), or a "
        "kernel with seccomp filters on x86-64 or aarch64; or set rewards.options.allow_unsandboxed = true to "
        f"run it as user {os.getuid()} with everything that user may do"
    )


CODE = BuiltinReward("code", CodeOptions, _code)
