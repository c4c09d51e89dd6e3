"""``streamrl top``: a running run in the terminal."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.cli.control import DRAINING
from streamrl.cli.watch import Watch
from streamrl.comm.zmq_sockets import has_ipc_listener
from streamrl.launch.control_protocol import ControlRefused, DrainRun
from streamrl.launch.control_socket import KEY_FILE, ask_run, read_key
from streamrl.launch.steering.steering_messages import SteeringTaken, SteerRun
from streamrl.observe.follow.followed_lines import FollowedLines
from streamrl.observe.follow.run_files import RunFiles
from streamrl.observe.telemetry import TelemetrySubscriber
from streamrl.observe.top.picture import MOST_STEPS, Picture

ANSWER_S = 60.0


class Top(Watch, frozen=True):
    """Show a running run in the terminal, and steer it: engines, groups as they race, trainer, rewards, waits, curves,
    events. The `?` key lists the keys. With an endpoint instead of a run's directory it only looks. A run of
    another host: `ssh -t HOST streamrl top RUN`."""

    def run(self) -> int:
        """Show it until `q`; the run does not notice. Raises ``StreamRLError`` without Textual or a terminal."""
        if find_spec("textual") is None:
            raise StreamRLError("Textual is not installed: pip install 'streamrl[top]'")
        if self.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise StreamRLError(
                "streamrl top needs a terminal (with ssh: ssh -t); `streamrl watch --json` writes messages"
            )
        from streamrl.observe.top.application import TopApplication  # only here: Textual may be absent

        endpoint = self.endpoint()
        here = Path(self.where)
        picture = Picture(lambda: not endpoint.startswith("ipc://") or has_ipc_listener(endpoint))
        files = RunFiles(here) if here.is_dir() else None
        for line in deque(files.metric_lines(), MOST_STEPS) if files else ():
            picture.remember(line)
        why_not = self._why_not()
        with TelemetrySubscriber(endpoint) as subscriber:
            TopApplication(
                picture,
                subscriber,
                steer=None if why_not else self._steer,
                why_not=why_not,
                logs=_log_lines(files) if files else list,
            ).run()
        return 0

    def _why_not(self) -> str:
        """The reason for which orders cannot be given; empty where they can."""
        here = Path(self.where)
        if not here.is_dir():
            return "only from the directory of the run, on its host: ssh -t HOST streamrl top RUN"
        try:
            read_key(here)
        except StreamRLError as error:
            return f"{error}" if (here / KEY_FILE).exists() else f"{here / KEY_FILE} is not there: the run has ended"
        return ""

    async def _steer(self, order: str) -> str:
        here = Path(self.where)
        operation = DrainRun() if order == "drain" else msgspec.convert({"order": order, "type": "SteerRun"}, SteerRun)
        answer = await ask_run(here, operation, ANSWER_S)
        if isinstance(answer, ControlRefused):
            raise StreamRLError("; ".join(answer.problems))
        return answer.text if isinstance(answer, SteeringTaken) else DRAINING


def _log_lines(files: RunFiles) -> Callable[[], list[str]]:
    """New lines of all logs at each call, with the name of their process."""
    followed: dict[str, FollowedLines] = {}

    def new_lines() -> list[str]:
        found: list[str] = []
        for name, path in files.logs().items():
            log = followed.setdefault(name, FollowedLines(path))
            while lines := log.read():
                found = [*found, *(f"{name}: {line.decode(errors='replace')}" for line in lines)][-5000:]
        return found

    return new_lines
