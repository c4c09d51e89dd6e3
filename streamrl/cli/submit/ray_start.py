"""The one way in which a host of a cluster starts Ray: environment, arguments, and the command of ``submit.host``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

RAY_PORT = 6379
DRAIN_S = 120
"""Seconds before the end of a job at which it is asked to drain."""
STORE_BYTES = 80_000_000
"""About Ray's least: tokens and weights go past its object store."""
_VARIABLES = {
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",  # Ray gives 15 to all that it starts, engines and ranks with it
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_OF_A_STEP = ("SLURM", "PMI")
_DEVICES = "CUDA_VISIBLE_DEVICES"


def ray_variables() -> dict[str, str]:
    """Variables of all Ray processes. The token is not among them: each way to start has its own place for it."""
    return dict(_VARIABLES)


def ray_environment(given: Mapping[str, str], token_file: Path) -> dict[str, str]:
    """``given`` for Ray and all below it: without the variables of the step that started this process (a program that
    asks MPI who it is would join it), GPUs in order."""
    kept = {name: value for name, value in given.items() if not name.startswith(_OF_A_STEP)}
    devices = kept.get(_DEVICES, "").split(",")
    if all(device.isdigit() for device in devices):
        kept[_DEVICES] = ",".join(sorted(devices, key=int))
    return kept | ray_variables() | {"RAY_AUTH_TOKEN_PATH": str(token_file)}


def ray_arguments(*, head: bool, at: str, own: str, temporary: Path, gpus: int | None) -> list[str]:
    """Command of Ray's head, or of another host of it. ``at``: HOST:PORT of the head; ``own``: address of this host."""
    where = ["--head", "--port", at.rpartition(":")[2], "--include-dashboard=false"] if head else ["--address", at]
    counted = [] if gpus is None else [f"--num-gpus={gpus}"]
    return [
        *("ray", "start", *where, "--node-ip-address", own, "--temp-dir", str(temporary), *counted),
        # One CPU: Ray starts a worker for each, and agents ask for none.
        *("--num-cpus=1", f"--object-store-memory={STORE_BYTES}"),
        *("--include-log-monitor=false", "--disable-usage-stats", "--log-color=false", "--block"),
    ]


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Work of the first host, where Ray's head is. ``recipe``: as that host names it; ``name``: of the run's directory
    in ``runs`` and, by it, of the run that a restarted job goes on with (empty: none); ``resume``: ``recipe`` is the
    directory of a run."""

    recipe: str
    overrides: tuple[str, ...] = ()
    name: str = ""
    runs: str = ""
    resume: bool = False

    def command(self, cluster: str) -> list[str]:
        """The command, on the cluster at ``cluster``."""
        named = [] if self.resume or not self.name else [f"run.name={self.name}"]
        settings = [word for text in (*self.overrides, *named) for word in ("--set", text)]
        verb = "resume" if self.resume else "train"
        return ["python", "-m", "streamrl", verb, self.recipe, "--cluster", cluster, *settings]

    def begun_before(self) -> list[str]:
        """Arguments of ``submit.host`` by which it finds the run of an earlier start of the same job."""
        return ["--begun", f"{self.runs}/{self.name}"] if self.name and self.runs and not self.resume else []


def host_command(arguments: Sequence[str], work: Work) -> list[str]:
    """Command of the program that starts Ray on a host, waits and ends it; on the first one, runs ``work``."""
    words = ["python", "-m", "streamrl.cli.submit.host", *arguments, *work.begun_before()]
    return [*words, "--", *work.command("{cluster}")]


def ray_version() -> str:
    """Version of Ray that is installed here; where there is none, the one that was tested."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return "2.60.0"
