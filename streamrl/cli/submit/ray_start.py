"""The start of Ray on a host of a cluster: variables, arguments, and the command of ``submit.cluster_host``. Used by
the texts of Slurm, Kubernetes and ssh, in the process of the command, and by ``submit.cluster_host`` on each host."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec import Struct

from streamrl.base.types import TextMapping, Texts, TextsByName
from streamrl.processes.cluster.this_host import MEMORY_MONITOR

RAY_PORT = 6379
DRAIN_S = 120
"""Seconds before the end of a job at which it is asked to drain."""
STORE_BYTES = 80_000_000
"""About the smallest object store that Ray takes: tokens and weights do not pass it."""
_VARIABLES = {
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",  # Ray gives 15 to all that it starts, engines and ranks with it
    MEMORY_MONITOR: "0",  # it would end the daemon of a host, with all engines and ranks, at 95 % of the memory
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_OF_A_STEP = ("SLURM", "PMI")
_DEVICES = "CUDA_VISIBLE_DEVICES"


def ray_variables() -> TextsByName:
    """Variables of all Ray processes. The token is not among them: each way to start has its own place for it."""
    return dict(_VARIABLES)


def variables_with_ray(variables: TextMapping, token_file: Path) -> TextsByName:
    """Variables of Ray and of its processes: ``variables`` without those of the job step that started this process,
    which an MPI program would join, and with GPUs in order."""
    inherited = {name: value for name, value in variables.items() if not name.startswith(_OF_A_STEP)}
    devices = inherited.get(_DEVICES, "").split(",")
    if all(device.isdigit() for device in devices):
        inherited[_DEVICES] = ",".join(sorted(devices, key=int))
    return inherited | ray_variables() | {"RAY_AUTH_TOKEN_PATH": str(token_file)}


def ray_arguments(*, head: bool, at: str, address: str, temporary: Path, gpus: int | None) -> list[str]:
    """Command that starts Ray's head, or another host of its cluster. ``at``: HOST:PORT of the head; ``address``:
    address of this host."""
    command = ["ray", "start"]
    if head:
        command += ["--head", "--port", at.rpartition(":")[2], "--include-dashboard=false"]
    else:
        command += ["--address", at]
    command += ["--node-ip-address", address, "--temp-dir", str(temporary)]
    if gpus is not None:
        command.append(f"--num-gpus={gpus}")
    # One CPU: Ray starts a worker for each CPU, and the daemons of a run ask for none.
    command += ["--num-cpus=1", f"--object-store-memory={STORE_BYTES}"]
    command += ["--include-log-monitor=false", "--disable-usage-stats", "--log-color=false", "--block"]
    return command


class Work(Struct, frozen=True, kw_only=True):
    """Work of the first host, which has Ray's head.

    ``recipe``: path of the recipe on that host.
    ``name``: run.name (empty: as the recipe has it).
    ``resume``: whether ``recipe`` is the directory of a run."""

    recipe: str
    overrides: Texts = ()
    name: str = ""
    resume: bool = False

    def command(self, cluster: str, *settings: str) -> list[str]:
        """Return the command of the run on the cluster at ``cluster`` (HOST:PORT). A run that begins has ``settings``,
        too."""
        overrides = [*self.overrides]
        if self.name and not self.resume:
            overrides.append(f"run.name={self.name}")
        if not self.resume:
            overrides += settings
        words = [word for text in overrides for word in ("--set", text)]
        verb = "resume" if self.resume else "train"
        return ["python", "-m", "streamrl", verb, self.recipe, "--cluster", cluster, *words]


def host_command(arguments: Sequence[str], work: Work) -> list[str]:
    """Command of ``submit.cluster_host``, which starts Ray on a host, waits, and ends it; on the first host it runs
    ``work``."""
    words = ["python", "-m", "streamrl.cli.submit.cluster_host", *arguments]
    return [*words, "--", *work.command("{cluster}")]


def ray_version() -> str:
    """Version of Ray that is installed here; where Ray is not installed, the version that was tested."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return "2.60.0"
