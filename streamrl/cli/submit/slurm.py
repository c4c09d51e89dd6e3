"""The script of a Slurm job. ``streamrl launch slurm`` prints it, or hands it to ``sbatch``; Slurm runs it on the first
node of the job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamrl.cli.submit.ray_start import DRAIN_S, Work, host_command


class SlurmJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job of Slurm.

    ``folder``: working directory of the job, for relative paths of the recipe.
    ``runs``: folder of runs, on a file system of all nodes.
    ``setup``: shell lines that run first.
    ``least_hosts``: number of hosts that the run needs; with fewer than ``nodes``, the job outlives a node.
    ``options``: further options of sbatch."""

    name: str
    work: Work
    nodes: int
    folder: Path
    runs: Path
    setup: Sequence[str]
    least_hosts: int
    port: int
    gpus_per_node: int | None = None
    interface: str = ""
    requeue: bool = False
    options: Sequence[tuple[str, str]] = ()


def slurm_script(job: SlurmJob) -> str:
    """The script. Slurm ends all steps of a job that ends, so no process outlives the script."""
    survives = job.least_hosts < job.nodes
    ends_with_a_host = f"--kill-on-bad-exit={0 if survives else 1} --wait={0 if survives else 60}"
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "exclusive": "",
        "mem": "0",
        "chdir": str(job.folder),
        "output": f"{str(job.folder).replace('%', '%%')}/slurm-%j.log",
        "open-mode": "append",
        "signal": f"B:TERM@{DRAIN_S}",
        "requeue" if job.requeue else "no-requeue": "",
    }
    if survives:
        options["no-kill"] = ""
    if job.gpus_per_node is not None:
        options["gpus-per-node"] = str(job.gpus_per_node)
    options |= dict(job.options)
    lines = [f"#SBATCH --{key}={_quoted(value)}" if value else f"#SBATCH --{key}" for key, value in options.items()]
    arguments = ["--rank", "@@SLURM_NODEID@@", "--nodes", str(job.nodes), "--head", "@@HEAD@@", "--peer", "@@PEER@@"]
    arguments += ["--token", "@@JOB@@/token", "--pid", "@@JOB@@/pid", "--port", str(job.port)]
    if job.interface:
        arguments += ["--interface", job.interface]
    if job.gpus_per_node is not None:
        arguments += ["--gpus", "@@SLURM_GPUS_ON_NODE@@"]
    command = _shell_text(host_command(arguments, job.work))
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "set -euo pipefail",
            *job.setup,
            f"JOB={shlex.quote(str(job.runs / '.launch'))}/$SLURM_JOB_ID",
            'mkdir -p -m 700 "$JOB"',
            'trap \'rm -f "$JOB/token" "$JOB/pid" "$JOB/code"; rmdir "$JOB" 2>/dev/null || true\' EXIT',
            'if [ -e "$JOB/ended" ]; then echo "the run of this job has ended"; exit 0; fi',
            'mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            "address() { scontrol -o show node \"$1\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p'; }",
            'HEAD=$(address "${NODES[0]}") PEER=$(address "${NODES[-1]}")',
            "export JOB HEAD PEER",
            # The first host that ends ends the step: after the run (--wait), or because it failed.
            f"srun --cpu-bind=none {ends_with_a_host} bash -s <<'NODE' &",
            f"exec {command}",
            "NODE",
            "STEP=$!",
            "DRAINED= WAIT=1",
            "# Time is nearly up, or `scancel --batch --signal=TERM`: the run drains.",
            # Only to that program, on this node: srun would signal Ray, too.
            'trap \'DRAINED=1 WAIT=1; kill -USR1 "$(cat "$JOB/pid")" 2>/dev/null || true\' TERM',
            'while [ -n "$WAIT" ]; do WAIT=; CODE=0; wait $STEP || CODE=$?; done  # each signal ends a wait',
            '[ ! -e "$JOB/code" ] || CODE=$(cat "$JOB/code")  # of the run: srun has the largest of all hosts',
            *_ending(job.requeue),
            "exit $CODE",
            "",
        ]
    )


def _shell_text(words: Sequence[str]) -> str:
    """A command in which ``@@NAME@@`` is a variable of the shell."""
    texts = []
    for word in words:
        text = ""
        for number, part in enumerate(re.split("@@([A-Z_]+)@@", word)):
            if number % 2:  # names of variables alternate with the text between them
                text += f'"${part}"'
            elif part:
                text += shlex.quote(part)
        texts.append(text)
    return " ".join(texts)


def _ending(requeue: bool) -> list[str]:
    mark_ended = '[ "$CODE" != 0 ] || [ -n "$DRAINED" ] || touch "$JOB/ended"'
    requeue_again = (
        '[ "$CODE$DRAINED" != 01 ] || scontrol requeue "$SLURM_JOB_ID"  # drained: go on in a new allocation'
    )
    if not requeue:
        return []
    return [mark_ended, requeue_again]


def _quoted(value: str) -> str:
    """``value`` in the quotes that sbatch reads in a script."""
    is_plain = all(letter.isalnum() or letter in "-_.,:=+@%/[]" for letter in value)
    return value if is_plain else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
