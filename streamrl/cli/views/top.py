"""``streamrl top``: a running run in the terminal. The command's own process subscribes to the metrics socket of the
run, reads its files, and sends orders over its control socket."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from msgspec import convert

from streamrl.base.errors import InputError, StreamRLError
from streamrl.cli.control import DRAINING
from streamrl.cli.watch import Watch
from streamrl.comm.zmq_sockets import has_ipc_listener
from streamrl.launch.control_protocol import ControlRefused, DrainRun, SteeringTaken, SteerRun
from streamrl.launch.control_socket import KEY_FILE, ask_run, read_key
from streamrl.observe.run_files.followed_lines import FollowedLines
from streamrl.observe.run_files.run_reader import RunFiles
from streamrl.observe.telemetry import TelemetrySubscriber
from streamrl.observe.top.displayed_run import MOST_STEPS, Picture

ANSWER_S = 60.0
_MOST_LOG_LINES = 5000


class Top(Watch, frozen=True):
    """Show a running run in the terminal, and steer it: engines, groups as they race, trainer, rewards, waits, curves,
    events. The `?` key lists the keys. With an endpoint instead of a run's directory it only looks. A run of
    another host: `ssh -t HOST streamrl top RUN`."""

    def run(self) -> int:
        """Show the run until `q`, without an effect on it. Raises ``StreamRLError`` without Textual or a terminal."""
        if find_spec("textual") is None:
            raise StreamRLError("Textual is not installed: pip install 'streamrl[top]'")
        if self.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise InputError(
                "streamrl top needs a terminal (with ssh: ssh -t); `streamrl watch --json` writes messages"
            )
        from streamrl.observe.top.application import TopApplication  # only here: Textual may be absent

        endpoint = self.endpoint()
        directory = Path(self.where)
        picture = Picture(lambda: not endpoint.startswith("ipc://") or has_ipc_listener(endpoint))
        files = None
        if directory.is_dir():
            files = RunFiles(directory)
            for line in deque(files.metric_lines(), MOST_STEPS):
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
        """Return the reason why orders cannot be given; empty where they can."""
        directory = Path(self.where)
        if not directory.is_dir():
            return "only from the directory of the run, on its host: ssh -t HOST streamrl top RUN"
        try:
            read_key(directory)
        except StreamRLError as error:
            key_file = directory / KEY_FILE
            return f"{error}" if key_file.exists() else f"{key_file} is not there: the run has ended"
        return ""

    async def _steer(self, order: str) -> str:
        operation = DrainRun() if order == "drain" else convert({"order": order, "type": "SteerRun"}, SteerRun)
        answer = await ask_run(Path(self.where), operation, ANSWER_S)
        if isinstance(answer, ControlRefused):
            raise StreamRLError("; ".join(answer.problems))
        return answer.text if isinstance(answer, SteeringTaken) else DRAINING


def _log_lines(files: RunFiles) -> Callable[[], list[str]]:
    """Return a function that reads the new lines of all logs, each with the name of its process."""
    followed: dict[str, FollowedLines] = {}

    def new_lines() -> list[str]:
        tail: list[str] = []
        for name, path in files.logs().items():
            log = followed.setdefault(name, FollowedLines(path))
            while lines := log.read():
                named_lines = [f"{name}: {line.decode(errors='replace')}" for line in lines]
                tail = [*tail, *named_lines][-_MOST_LOG_LINES:]
        return tail

    return new_lines
