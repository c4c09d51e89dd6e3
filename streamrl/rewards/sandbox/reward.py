"""The reward: a completion's code against its test cases, in the sandbox. 1 for all passed, else 0 (or the share). A
case that could not be judged (the sandbox failed, the test is broken) raises: a failure is recorded, and is no 0."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.base.run_process import usable_cores
from streamrl.recipe.fields import Natural, Positive, PositiveFloat
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
from streamrl.rewards.sandbox.sandbox import ALL_LAYERS, LayersFound, ProgramEnd, Sandbox, available_layers
from streamrl.rewards.sandbox.values import same_result
from streamrl.rewards.time_limits import TimeLimits

_MIB = 1 << 20
_SCRATCH_FILES = 512
_MOST_CHARACTERS = 300
_log = logging.getLogger(__name__)


class CodeOptions(Options, frozen=True):
    """Options of the code reward.

    ``column``: holds the tests (see ``streamrl.rewards.sandbox.cases``). ``entry_point_column``, ``setup_column``:
    columns with the function that ``check`` is called with, and with Python to run before each snippet. ``whole``: the
    whole completion is the code. ``value``: ``all`` cases passed, or the ``share``. ``compare``, ``tolerance``: see
    ``same_output``; ``tolerance`` is for what functions return, too.

    Limits, for each case: ``timeout_s`` of wall time; ``time_limit_is_wrong`` False: a case beyond it fails the
    sample instead of counting as wrong. ``memory_mb`` of address space for each process, ``output_mb`` for each file
    and stdout, ``scratch_mb`` of /tmp, ``processes`` (1: none can be started), ``threads``, ``open_files``.

    ``forgeable`` False: a test that can only run in the code's own process, which can forge that it passed, fails the
    sample instead. ``concurrency``: runs at once (0: one for each CPU). ``allow_unsandboxed``: run the code although
    no layer of isolation holds."""

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


class CaseOutcome(msgspec.Struct, frozen=True):
    """One case: its end, wall and CPU seconds of the code, and a line about what went wrong. ``inside``: the test ran
    in the code's process, which can forge that it passed."""

    end: CaseEnd
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    message: str = ""
    inside: bool = False


class CodeOutcome(msgspec.Struct, frozen=True):
    """One completion. ``value`` None: there were no tests. ``cases``: those that were run, in order."""

    value: float | None
    cases: tuple[CaseOutcome, ...]


class CodeReward:
    """``await reward(completion, tests=...)``; ``judge`` gives the outcome of each case besides.

    On one event loop; ``aclose`` ends the sandbox (as the end of the process does). With ``learn_time_limits`` each
    test case of a prompt has a limit of its own, below ``timeout_s``: by the slowest run that passed it."""

    def __init__(self, options: CodeOptions, sandbox: Sandbox) -> None:
        self.options = options
        self._sandbox = sandbox
        self._slots = asyncio.Semaphore(options.concurrency or usable_cores())
        self._learnt: TimeLimits | None = None
        optional = [options.entry_point_column, options.setup_column]
        declare(self, columns=[options.column], optional=optional, provided=["prompt_id"])

    def learn_time_limits(self, limits: TimeLimits) -> None:
        """Keep what passed runs took in ``limits``, by prompt and test case, and limit runs by that."""
        self._learnt = limits

    async def __call__(self, completion: str, **columns: Any) -> float | None:
        """The value. Raises ``ValueError`` for tests that are none, ``SandboxError``, and ``TimeoutError`` for a test
        case that ran beyond ``timeout_s`` where ``time_limit_is_wrong`` is False, or beyond a limit that was learnt
        where the recipe does not say ``late_is_wrong``."""
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
        code = extract_code(completion, whole=options.whole)
        if code is None:
            return CodeOutcome(0.0, ())
        outcomes: list[CaseOutcome] = []
        for index, case in enumerate(cases):
            key = f"{prompt_id} case {index}"
            limit_s = options.timeout_s
            late_is_wrong = options.time_limit_is_wrong
            if self._learnt is not None and self._learnt.limit_s(key) < limit_s:
                limit_s = self._learnt.limit_s(key)
                late_is_wrong = self._learnt.late_is_wrong
            outcome = await self._run_case(code, case, limit_s)
            outcomes.append(outcome)
            if self._learnt is not None and outcome.end is CaseEnd.PASSED:
                self._learnt.observe(key, outcome.seconds, math.inf)
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
        async with self._slots:
            limits = self._limits(limit_s)
            if isinstance(case, ProgramCase):
                report, output = await self._sandbox.run_program(source, case.stdin.encode(), limits)
                return self._judge_output(report, output, case.stdout)
            test: SimpleTest | None = None
            nonce = secrets.token_hex(16)
            order: dict[str, Any] = {"setup": case.setup}
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
        """The questions of a test; None: it runs in the code's process. Raises ``ValueError`` for one that cannot run
        with any code."""
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
        passed = report.status == 0 and same_output(text, expected, options.compare, options.tolerance)
        return _outcome(report, "" if passed else "it wrote something else than expected")

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
    """Describe what is wrong with the result of a call; empty: nothing."""
    # APPS wraps what a function returns in a list, in some of its tasks.
    expected = [case.expected, *(case.expected if isinstance(case.expected, list) and len(case.expected) == 1 else ())]
    return _problem(lambda: len(values) == 1 and any(same_result(values[0], one, case.tolerance) for one in expected))


def _wrong_answers(values: Sequence[Any], test: SimpleTest | None, nonce: str) -> str:
    """Describe what is wrong with the answers to a simple test, or with the process's own report of another; empty:
    nothing."""
    if test is None:
        return _problem(lambda: values == [nonce])
    return _problem(lambda: len(values) == len(test.questions) and passes(test, values))


def _problem(check: Callable[[], bool]) -> str:
    try:
        return "" if check() else "AssertionError: it gave something else than expected"
    except Exception as error:  # noqa: BLE001 - an answer of another type than the test expects: not passed
        return f"{type(error).__name__}: {error}"


def _outcome(report: ProgramEnd, wrong: str, inside: bool = False) -> CaseOutcome:
    """``wrong``: what is wrong with the output or the answers; empty: nothing."""
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
    """Raises ``RecipeError`` where this machine cannot isolate the code and ``allow_unsandboxed`` is not set."""
    if options.compare == "exact" and options.tolerance is not None:
        raise BadOption(
            f'"tolerance" = {options.tolerance:g} has no effect with compare = "exact": leave it out, or write '
            'compare = "lines" or "tokens"'
        )
    found = available_layers()
    if not options.allow_unsandboxed:
        require_isolation(found)
    elif not found.isolating:
        _log.warning(
            'REWARD "code" RUNS A MODEL\'S CODE WITHOUT A SANDBOX (allow_unsandboxed = true): it can do whatever '
            "user %d can: read and delete files, use the network, signal processes",
            os.getuid(),
        )
    return CodeReward(options, Sandbox(ALL_LAYERS))


def require_isolation(found: LayersFound) -> None:
    """Raise ``RecipeError`` where code could reach files, the network or other processes."""
    if found.isolating:
        return
    reasons = "; ".join(f"{name}: {why}" for name, why in found.missing.items()) or "none was asked for"
    raise RecipeError(
        f'reward "code" would run a model\'s code without isolation on this machine ({reasons}): allow user '
        "namespaces (kernel.unprivileged_userns_clone = 1, or see docs/rewards_code.md for containers), or a "
        "kernel with seccomp filters on x86-64 or aarch64; or set rewards.options.allow_unsandboxed = true to "
        f"run it as user {os.getuid()} with everything that user may do"
    )


CODE = BuiltinReward("code", CodeOptions, _code)
