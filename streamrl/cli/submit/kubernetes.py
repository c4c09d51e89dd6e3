"""Manifests of Kubernetes: a RayJob of KubeRay, or a JobSet, which needs no operator of Ray. ``streamrl launch
kubernetes`` prints the manifest, or hands it to ``kubectl``."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping
from typing import Any

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.cli.submit.ray_start import DRAIN_S, STORE_BYTES, Work, host_command, ray_variables, ray_version

_HEAD = "head"
_NODE = "node"
_PLAIN = r"[\w@%+=:,./\[\]-]+"
_START_S = 1800
"""Seconds in which pods have to be placed and their images pulled."""


class KubernetesJob(msgspec.Struct, frozen=True, kw_only=True):
    """A run on ``nodes`` pods, the first with Ray's head.

    ``mount``: directory in the pods where the volume claim ``pvc`` is mounted.
    ``folder``: folder of the recipe, below ``mount``.
    ``runs``: folder of runs.
    ``limits``, ``environment``: resource limits and variables of each pod."""

    name: str
    namespace: str
    image: str
    work: Work
    nodes: int
    gpus: int
    pvc: str
    mount: str
    folder: str
    runs: str
    interface: str = ""
    limits: Mapping[str, str] = {}
    environment: Mapping[str, str] = {}


def ray_job(job: KubernetesJob) -> dict[str, Any]:
    """A RayJob: KubeRay starts Ray in the pods, and the run by Ray's job server (``ray[default]`` in the image)."""
    ray = {"num-cpus": "1", "num-gpus": str(job.gpus), "object-store-memory": str(STORE_BYTES)}
    command = job.work.command("auto")
    if not job.work.resume:
        command += ["--set", f"run.directory={job.runs}"]
    for word in command:
        if not re.fullmatch(_PLAIN, word):
            raise RecipeError(
                f"{word!r}: KubeRay passes commands through two shells, and quotes and blanks do not survive: "
                "write it into the recipe, or use --jobset"
            )
    draining = {"preStop": {"exec": {"command": ["sh", "-c", _drain(job)]}}}
    worker_groups = []
    if job.nodes > 1:
        workers = {
            "groupName": _NODE,
            **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), job.nodes - 1),
            "rayStartParams": ray,
            "template": _pod(job, "ray-worker", {}),
        }
        worker_groups.append(workers)
    return {
        **_named("ray.io/v1", "RayJob", job),
        "spec": {
            "entrypoint": shlex.join(command),
            "submissionMode": "K8sJobMode",
            "backoffLimit": 0,  # a run is resumed from its journal, not begun again
            "preRunningDeadlineSeconds": _START_S,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "rayVersion": ray_version(),
                "authOptions": {"mode": "token"},
                "headGroupSpec": {"rayStartParams": ray, "template": _pod(job, "ray-head", {"lifecycle": draining})},
                "workerGroupSpecs": worker_groups,
            },
        },
    }


def job_set(job: KubernetesJob) -> dict[str, Any]:
    """A JobSet: each pod starts Ray by ``submit.cluster_host``, as hosts of other clusters do."""
    token = posixpath.join(job.mount, ".launch", f"{job.namespace}-{job.name}", "token")
    head = f"{job.name}-{_HEAD}-0-0.{job.name}"
    arguments = ["--nodes", str(job.nodes), "--head", head, "--token", token]
    arguments += ["--gpus", str(job.gpus), "--start-s", str(_START_S), "--linger"]
    if job.interface:
        arguments += ["--interface", job.interface]

    def pods(kind: str, count: int, rank: int) -> dict[str, Any]:
        command = host_command(["--rank", str(rank), *arguments], job.work)
        pod = _pod(job, kind, {"command": command, "workingDir": job.folder})
        template = {"parallelism": count, "completions": count, "completionMode": "Indexed", "backoffLimit": 0}
        return {"name": kind, "replicas": 1, "template": {"spec": {**template, "template": pod}}}

    jobs = [pods(_HEAD, 1, 0)]
    if job.nodes > 1:
        jobs.append(pods(_NODE, job.nodes - 1, 1))
    return {
        **_named("jobset.x-k8s.io/v1alpha2", "JobSet", job),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [_HEAD]},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": jobs,
        },
    }


def _named(version: str, kind: str, job: KubernetesJob) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": job.name, "namespace": job.namespace}}


def _pod(job: KubernetesJob, container: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    variables = ray_variables() | {"RAY_JOB_STOP_WAIT_TIME_S": str(DRAIN_S)} | dict(job.environment)
    if container.startswith("ray-"):
        del variables["RAY_AUTH_MODE"]  # KubeRay sets it, with the token
    limits = dict(job.limits)
    if job.gpus:
        limits["nvidia.com/gpu"] = str(job.gpus)
    mounts = {"runs": job.mount, "shm": "/dev/shm"}
    return {
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": DRAIN_S,
            "containers": [
                {
                    "name": container,
                    "image": job.image,
                    **settings,
                    "env": [
                        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                        *({"name": name, "value": value} for name, value in variables.items()),
                    ],
                    "resources": {"limits": limits},
                    "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
                }
            ],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": job.pvc}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},  # engines and ranks exchange weights there
            ],
        }
    }


def _drain(job: KubernetesJob) -> str:
    """Shell line that drains the run of this job and waits until its lock is free: KubeRay ends Ray, but not the
    processes of the run."""
    run_path = shlex.quote(posixpath.join(job.runs, job.work.name))
    run = shlex.quote(job.work.recipe) if job.work.resume else f'"$(ls -dt {run_path}-2* | head -n 1)"'
    return f'RUN={run}; python -m streamrl drain "$RUN" && timeout {DRAIN_S - 10} flock "$RUN/lock" true || true'
