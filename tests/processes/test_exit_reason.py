"""Which of several deaths was first."""

from __future__ import annotations

import asyncio
import errno
import signal
from pathlib import Path

import anyio
import pytest
from builders.recipe import small_recipe

from streamrl.base.errors import DiskFull, EngineError, EpochLost, ModelRefused, RecipeError, StreamBroken
from streamrl.processes.exit_monitor import ExitMonitor
from streamrl.processes.exit_reason import (
    DISK_FULL_EXIT_CODE,
    Death,
    ExitKind,
    ExitReason,
    exit_code_of,
    first_cause,
    last_lines,
    notice_of,
    read_reason,
    reason_of,
    write_reason,
)
from streamrl.recipe.topology import Role, plan_topology, planned_engine
from streamrl.run.journal.log_errors import JournalFailed


def death(name: str, code: int | None, seen: float, kind: ExitKind | None = None, at: float = 0.0) -> Death:
    reason = ExitReason(kind=kind, message=f"{name} says why", monotonic_s=at) if kind else None
    return Death(name=name, exit_code=code, detected_s=seen, reason=reason)


@pytest.mark.parametrize(
    ("later", "first"),
    [
        (  # a killed process, even when it is seen after what followed from it
            death("controller", 1, 1.0, ExitKind.CONSEQUENCE, at=0.9),
            death("engine-0", -signal.SIGKILL, 2.0),
        ),
        (death("trainer-1", 1, 1.0, ExitKind.CAUSE, at=0.95), death("engine-0", -signal.SIGKILL, 2.0)),
        (  # own failures, by their own clock and not by when they were seen
            death("trainer-0", 1, 1.0, ExitKind.CAUSE, at=0.9),
            death("trainer-1", 1, 1.5, ExitKind.CAUSE, at=0.8),
        ),
        (  # of consequences the controller says which part failed it
            death("reward-0", 1, 1.0, ExitKind.CONSEQUENCE, at=0.8),
            death("controller", 1, 1.5, ExitKind.CONSEQUENCE, at=0.9),
        ),
        (  # an abort may follow from something else
            death("trainer-0", -signal.SIGABRT, 1.0),
            death("engine-0", 1, 1.2, ExitKind.CAUSE, at=0.9),
        ),
    ],
)
def test_which_death_was_first(later: Death, first: Death) -> None:
    assert first_cause([later, first]) is first_cause([first, later]) is first
    assert first.is_consequence == (first.reason is not None and first.reason.kind is ExitKind.CONSEQUENCE)


def test_an_engine_that_had_no_host_to_start_on_is_no_cause(tmp_path: Path) -> None:
    topology = plan_topology(small_recipe(), tmp_path)
    monitor = ExitMonitor(topology, tmp_path, replacements=0, others_end_s=1.0)
    monitor.without_host(planned_engine(topology, "engine-0"))
    assert monitor.notice([death("reward-0", 1, 1e9)]).startswith("reward-0") and "engine-0" in monitor.policy.retired


@pytest.mark.parametrize(("message", "shown"), [("CannotContinue: too many", False), ("KeyError: 1", True)])
def test_a_traceback_is_shown_below_what_is_a_bug_alone(message: str, shown: bool, tmp_path: Path) -> None:
    log = tmp_path / "controller.log"
    log.write_text("Traceback (most recent call last):\n  in step_finished\n")
    reason = ExitReason(kind=ExitKind.VERDICT, message=message, monotonic_s=0.0)
    ended = Death(name="controller", exit_code=1, detected_s=1.0, reason=reason)
    notice = notice_of([ended], {"controller": (log, 0)}, tmp_path)
    assert message in notice and str(log) in notice
    assert ("in step_finished" in notice) == shown


def caused_by(error: Exception) -> RecipeError:
    """Return a refusal of user code that raised ``error``."""
    refusal = RecipeError(str(error))
    refusal.__cause__ = error
    return refusal


@pytest.mark.parametrize(
    ("role", "error", "kind"),
    [
        (Role.TRAINER, StreamBroken("peer gone"), ExitKind.CONSEQUENCE),
        (Role.ENGINE, EngineError("EngineCore died"), ExitKind.CAUSE),
        (Role.ENGINE, ModelRefused("engine-0: heads of 16"), ExitKind.VERDICT),
        (Role.TRAINER, ModelRefused("lora.targets"), ExitKind.VERDICT),
        (Role.JUDGE, ModelRefused("judge: heads of 16"), ExitKind.VERDICT),
        (Role.TRAINER, RecipeError("no tokenizer.json"), ExitKind.VERDICT),
        (Role.TRAINER, EpochLost("a later process writes there"), ExitKind.VERDICT),
        (Role.REWARD, RecipeError("a server that does not answer yet"), ExitKind.CAUSE),
        (Role.REWARD, caused_by(ConnectionError("no answer")), ExitKind.CAUSE),
        (Role.REWARD, caused_by(ImportError("no module")), ExitKind.VERDICT),
        (Role.ENVIRONMENT, caused_by(ValueError("cannot patch the loop")), ExitKind.VERDICT),
        (Role.ENVIRONMENT, ValueError("an error of the worker"), ExitKind.CAUSE),
        (Role.CONTROLLER, EngineError("engine-0 is gone"), ExitKind.CONSEQUENCE),
        (Role.CONTROLLER, ValueError("bad"), ExitKind.VERDICT),
    ],
)
def test_kind_of_an_exception(role: Role, error: Exception, kind: ExitKind) -> None:
    assert reason_of(role, error).kind is kind


def test_the_cause_inside_a_group_is_reported() -> None:
    group = BaseExceptionGroup(
        "nursery",
        [
            asyncio.CancelledError(),
            anyio.BrokenResourceError(),
            StreamBroken("peer gone"),
            ExceptionGroup("inner", [ValueError("nan")]),
        ],
    )
    reason = reason_of(Role.CONTROLLER, group)
    assert (reason.kind, reason.message) == (ExitKind.VERDICT, "ValueError: nan")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(75), 75),
        (SystemExit(None), 0),
        (SystemExit("no"), 1),
        (ValueError("x"), 1),
        (OSError(errno.ENOSPC, "full"), DISK_FULL_EXIT_CODE),
        (DiskFull("no room for a checkpoint"), DISK_FULL_EXIT_CODE),
        (JournalFailed(Path("journal"), "flushing", OSError(errno.EDQUOT, "quota")), DISK_FULL_EXIT_CODE),
    ],
)
def test_exit_code(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code
    assert exit_code_of(BaseExceptionGroup("nursery", [error])) == code


def test_reason_file_round_trip_and_damage(tmp_path: Path) -> None:
    assert read_reason(tmp_path, "engine-0") is None
    reason = reason_of(Role.ENGINE, ValueError("nan"))
    write_reason(tmp_path, "engine-0", reason)
    assert read_reason(tmp_path, "engine-0") == reason
    (tmp_path / "exit" / "engine-0.json").write_bytes(b'{"kind": "cau')
    assert read_reason(tmp_path, "engine-0") is None


def test_last_lines_begin_where_this_start_began(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text("an earlier run\n")
    start = log.stat().st_size
    with log.open("a") as append:
        append.write("".join(f"line {i}\n" for i in range(100)))
    assert last_lines(log, start=start, lines=2) == ["line 98", "line 99"]
    assert last_lines(log, start=start, lines=1000)[0] == "line 0"
    assert last_lines(tmp_path / "missing.log") == []
