"""Steering commands for a running run: ``streamrl status``, ``pause``, ``continue``, ``checkpoint``, ``evaluate``,
``set``, ``engine pause``, ``engine withdraw``, ``engine return``. Each sends one request from its own process over the
control socket of the run."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec.structs import asdict

from streamrl.base.types import Texts
from streamrl.cli.command import Argument, Command, RunPath
from streamrl.cli.control import ask_run
from streamrl.control.events import UserOrder
from streamrl.launch.control_protocol import (
    ChangeSettings,
    ReadStatus,
    SteeringRequest,
    SteeringStatus,
    SteeringTaken,
    SteerRun,
)


class Status(Command, frozen=True):
    """Say where a running run stands: step, versions, what it waits for, changed settings, processes. Of a run that
    ended: `streamrl show`."""

    run_directory: RunPath

    def run(self) -> int:
        answer = ask_run(self.run_directory, ReadStatus(), changes=False)
        assert isinstance(answer, SteeringStatus), answer
        fields = asdict(answer)
        del fields["request_id"]
        return self.print({"run": str(self.run_directory), **fields}, *_lines(answer))


class SteeringCommand(Command, frozen=True):
    """A command that gives one order to a running run."""

    order: ClassVar[UserOrder]
    run_directory: RunPath

    def run(self) -> int:
        """Send the order and return once it is in the journal of the run."""
        return _steer(self, SteerRun(order=self.order))


class Pause(SteeringCommand, frozen=True):
    """Launch nothing more until `streamrl continue`: what runs is finished, and a batch that fills is trained. A pause
    outlasts a kill and `streamrl resume`."""

    order = "pause"


class Continue(SteeringCommand, frozen=True):
    """Let a paused run go on."""

    order = "continue"


class WriteNow(SteeringCommand, frozen=True):
    """Have a running run write a checkpoint now, or once the step that is made is live."""

    order = "checkpoint"


class EvaluateNow(SteeringCommand, frozen=True):
    """Have a running run score all held-out prompts now, or once the step that is made is live."""

    order = "evaluate"


class SetKeys(Command, frozen=True):
    """Change settings of a running run, together, from the next batch on. They outlast a kill and `streamrl resume`.
    docs/watch.md lists the keys; of any other it is said why not."""

    run_directory: RunPath
    changes: Annotated[Texts, Argument("such as training.learning_rate=1e-6", metavar="KEY=VALUE", positional=True)]
    step: Annotated[int, Argument("from the batch of this step on (default: the next one)", metavar="N")] = 0

    def run(self) -> int:
        """Send the changes and return once they are in the journal of the run."""
        return _steer(self, ChangeSettings(changes=self.changes, step=self.step))


class EngineCommand(SteeringCommand, frozen=True):
    """An order about one engine of a running run."""

    engine: Annotated[str, Argument("such as engine-1", metavar="ENGINE", positional=True)]

    def run(self) -> int:
        """Send the order and return once it is in the journal of the run."""
        return _steer(self, SteerRun(order=self.order, engine=self.engine))


class PauseEngine(EngineCommand, frozen=True):
    """Have an engine serve nothing, since its host needs the GPU for a while. Its requests go on on the other engines
    from their tokens. It keeps its process and its memory, and gets new weights. A pause outlasts a kill and
    `streamrl resume`."""

    order = "pause_engine"


class WithdrawEngine(EngineCommand, frozen=True):
    """Have an engine serve nothing and end its process, which frees the memory of its GPU. Its requests go on on the
    other engines from their tokens. This outlasts a kill and `streamrl resume`."""

    order = "withdraw_engine"


class ReturnEngine(EngineCommand, frozen=True):
    """Have an engine serve again that was paused or withdrawn, once it has the live weights."""

    order = "return_engine"


def _steer(command: SteeringCommand | SetKeys, request: SteeringRequest) -> int:
    answer = ask_run(command.run_directory, request)
    assert isinstance(answer, SteeringTaken), answer
    return command.print({"run": str(command.run_directory), "taken": answer.text}, answer.text)


def _lines(status: SteeringStatus) -> list[str]:
    unit = "full" if status.batch >= status.batch_target else "filled"
    rows = {
        "state": status.state,
        "step": f"{status.step} of {status.steps}",
        "versions": f"trainer {status.trainer_version}, live {status.live_version}",
        "batch": f"{status.batch} of {status.batch_target} {unit}, {status.round_kind or 'no'} round",
        "under way": f"{status.in_flight} trajectories, {status.ready} groups ready, {status.queue} prompts queue",
        "waits for": f"{status.waits_for}, for {status.waited_s:.1f} s",
        "pending": ", ".join(status.pending),
        "away": ", ".join(status.engines_away),
        "changed": ", ".join(f"{key} = {value}" for key, value in status.changed.items()),
    }
    if not status.steps:
        del rows["step"], rows["versions"], rows["batch"], rows["under way"]
    if not status.waits_for:
        del rows["waits for"]
    lines = [f"{name:<12}{text}" for name, text in rows.items() if text]
    lines += [f"{'from step':<12}{change.step or 'next'}: {change.values}" for change in status.waiting]
    lines += [f"{'':<12}{wait}" for wait in status.waits]
    for process in status.processes:
        state = "runs" if process.exit_code is None else f"ended with {process.exit_code}"
        line = f"{'process':<12}{process.name}  {process.pid}  {state}, {process.started_s:.0f} s"
        if process.restarts:
            line += f", started again {process.restarts} times"
        lines.append(line)
    return lines
