"""Faults that the tests must see: one line of the product is changed in a copy of the last commit, and tests are run.

For each fault the quick tests of its folders run first, then the long ones. A fault is caught when a test fails with it
that passes without it. About half a minute a fault on two cores."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from campaigns.planted_copy import copy_of_the_tree, planted

TIERS = {"quick": "not long", "long": "long"}
"""Marks that select the tests of a tier."""
LONGEST_TEST_S = 100
"""Seconds after which a test has failed: many a fault has a test wait for ever."""


class Fault(NamedTuple):
    """``line``, which ``file`` (below ``streamrl/``) has once, becomes ``planted``: a part of a line, or several lines.
    ``tests``: files and folders below ``tests/``, likely ones first."""

    file: str
    line: str
    planted: str
    tests: str


# One in each room at least.
FAULTS = {
    "version of a later turn": Fault(
        "base/types.py",
        "VersionSpan(start=before + span.start, end=before",
        "VersionSpan(start=span.start, end=before",
        "learning/batches/test_preparation.py learning/batches/test_packing.py stages run/environments",
    ),
    "one version too stale": Fault(
        "buffers/slots.py",
        "return oldest_version + max_staleness\n",
        "return oldest_version + max_staleness + 1\n",
        "control/test_check.py control/test_kept_prompts.py control/test_control.py run",
    ),
    "exit code of check": Fault(
        "cli/check.py",
        "return int(any(finding.state is State.FAIL for finding in findings))",
        "return 0",
        "cli/test_machine_check.py cli",
    ),
    "larger window": Fault(
        "comm/stream_protocol.py",
        "min(self.hello.window, self.peer_hello.window)",
        "max(self.hello.window, self.peer_hello.window)",
        "comm",
    ),
    "drop reason": Fault(
        "control/apply.py",
        "_note_outcome(state, rules.settings, failed=True)",
        "_note_outcome(state, rules.settings, failed=False)",
        "control/test_control.py control run",
    ),
    "abort that is not sent": Fault(
        "engines/pool.py",
        "is not None and name in self._engines:\n",
        "is not None and name in self._engines and not by_engine:\n",
        "engines/test_engine_pool.py engines stages run",
    ),
    "stop token left out": Fault(
        "engines/async_llm/engine.py",
        "stop_token_ids=list(self._end_tokens), **changes)",
        "stop_token_ids=list(self._end_tokens)[1:], **changes)",
        "engines/vllm/test_vllm_contract.py engines/vllm/test_engine_options.py engines",
    ),
    "request without seed": Fault(
        "engines/async_llm/engine.py",
        '"seed": request.seed,\n',
        '"seed": None,\n',
        "engines/vllm/test_vllm_contract.py engines/vllm/test_engine_options.py engines",
    ),
    "forgotten child": Fault(
        "processes/local_launcher.py",
        "self.sessions.add(process.pid)\n",
        "self.sessions.add(process.pid) if plan.index == 0 else None\n",
        "processes/test_supervisor.py processes/test_restarts.py processes security",
    ),
    "child without marker": Fault(
        "processes/local_launcher.py",
        "            RUN_MARKER: self.marker,\n",
        "",
        "processes/test_supervisor.py processes/test_restarts.py processes security runs",
    ),
    "resume from nothing": Fault(
        "launch/roles.py",
        'resume_from=str(newest or ""),\n',
        'resume_from="",\n',
        "processes/test_restarts.py processes runs",
    ),
    "samples in place of tokens": Fault(
        "learning/objective/objectives.py",
        "is LossNormalization.TOKEN_MEAN:\n        return trained_tokens or 1.0\n",
        "is LossNormalization.TOKEN_MEAN:\n        return samples or 1.0\n",
        "learning/objective/test_objectives.py learning/objective/test_exact_gradients.py learning",
    ),
    "mask of a row": Fault(
        "learning/batches/packing.py",
        "needed_tokens(sample), prefix)\n",
        "needed_tokens(sample), prefix - 1 if prefix > 0 else prefix)\n",
        "learning/batches/test_packing.py learning/model/test_attention.py learning",
    ),
    "schedule": Fault(
        "learning/updates.py",
        "rate_factor(options, close.policy_version, close",
        "rate_factor(options, close.policy_version - bool(options.resume_from), close",
        "learning/test_trainer.py learning recipe",
    ),
    "lost lines are not counted": Fault(
        "observe/run_files/followed_lines.py",
        "self.gaps += 1\n",
        "self.gaps += 0\n",
        "observe/test_followed_lines.py observe",
    ),
    "token behind the last": Fault(
        "pretrained/end_tokens.py",
        "0 <= token < size]",
        "0 <= token <= size]",
        "pretrained/test_tokenizer.py recipe engines",
    ),
    "advantage": Fault(
        "recipe/objectives/grpo.py",
        "(rewards_S.std() + STD_EPSILON)",
        "(rewards_S.std(correction=0) + STD_EPSILON)",
        "recipe/test_algorithms.py recipe/test_arithmetic.py learning/objective/test_objectives.py learning",
    ),
    "reason of a reward": Fault(
        "rewards/calls/process.py",
        "describe_error(error), count), _is_exhausted(error)\n",
        '"", count), _is_exhausted(error)\n',
        "rewards/test_reward_faults.py rewards stages",
    ),
    "order of turns": Fault(
        "run/environments/endpoint_session.py",
        "node.end >= deepest.end:",
        "node.end > deepest.end:",
        "run/environments/test_endpoint.py run/environments",
    ),
    "no fsync": Fault(
        "run/journal/journal_file.py",
        "if self._fsync:\n            os.fdatasync",
        "if self._fsync and self._number < 0:\n            os.fdatasync",
        "run/journal/test_log.py run/journal/test_log_processes.py run/journal",
    ),
    "torn line": Fault(
        "run/journal/journal_file.py",
        "if path == self.content.segments[-1]:\n                    os.ftruncate",
        "if False:\n                    os.ftruncate",
        "run/journal/test_log.py run/journal/test_log_processes.py run/journal run",
    ),
    "growth of a context": Fault(
        "simulate/engines.py", "growth * steps * steps / 2\n", "growth * steps * steps\n", "simulate"
    ),
    "last observation": Fault(
        "stages/episodes.py", "segments.pop()  #", "pass  #", "stages run/environments run engines/test_engine_pool.py"
    ),
    "index of a delta": Fault(
        "weights/codec/kernels.py",
        "start = positions[n] + 1\n",
        "start = positions[n]\n",
        "weights/codec/test_weight_codec.py weights/publish/test_weight_publisher.py weights engines/push",
    ),
    "undo of live weights": Fault(
        "weights/vllm/live_weights.py",
        "self._write(write, write.old_bits)\n                continue\n",
        "continue\n",
        "weights/vllm/test_weight_transaction.py weights/vllm/test_layer_reload.py weights",
    ),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "names", nargs="*", metavar="NAME", help=f"faults to plant; all where none is named: {', '.join(FAULTS)}"
    )
    command.add_argument("--tier", choices=TIERS, help="tests of this tier only")
    command.add_argument("--workers", type=int, default=4, help="number of pytest's workers")
    command.set_defaults(work=run)


def run(arguments: argparse.Namespace) -> int:
    """Plant each fault that is named, and say what caught it; 1 where one was not caught."""
    if unknown := [name for name in arguments.names if name not in FAULTS]:
        raise SystemExit(f"no fault has the name {unknown[0]!r}: {', '.join(FAULTS)}")
    names = arguments.names or list(FAULTS)
    caught: dict[str, list[str]] = {tier: [] for tier in TIERS}
    with copy_of_the_tree() as copy:
        for name in names:
            for tier in [arguments.tier] if arguments.tier else TIERS:
                began = time.monotonic()
                test = _test_that_sees(copy, FAULTS[name], TIERS[tier], arguments.workers)
                seconds = time.monotonic() - began
                print(f"{name:<27} {tier:<6} {seconds:4.0f} s  {test or 'NOT CAUGHT'}", flush=True)
                if test:
                    caught[tier].append(name)
                    break
    missed = set(names).difference(*caught.values())
    counts = ", ".join(f"{len(faults)} by {tier} tests" for tier, faults in caught.items())
    print(f"{len(names)} faults: {counts}, {len(missed)} not caught")
    return int(bool(missed))


def _test_that_sees(copy: Path, fault: Fault, marks: str, workers: int) -> str:
    """Return a test that fails with ``fault`` and passes without it; empty where no test does."""
    # Likely places one after the other: pytest's workers begin with what takes longest.
    for place in fault.tests.split():
        with planted(copy, fault.file, fault.line, fault.planted):
            failures = _failures(copy, [copy / "tests" / place], marks, workers)
        if failures:
            also_without = _failures(copy, failures, marks, workers)
            failures = [test for test in failures if test not in also_without]
        if failures:
            return failures[0]
    return ""


def _failures(copy: Path, tests: Sequence[str | Path], marks: str, workers: int) -> list[str]:
    """Run ``tests`` of ``copy`` up to the first failure. Returns the names of those that failed."""
    options = ["-p", "no:cacheprovider", "-x", "-q", "--tb=no", "-rfE", "-n", str(workers)]
    options.append(f"--timeout={LONGEST_TEST_S}")
    command = [sys.executable, "-m", "pytest", *options, "-m", marks, *map(str, tests)]
    variables = os.environ | {"PYTHONPATH": str(copy)}  # before the checkout that is installed
    process = subprocess.run(command, cwd=copy, env=variables, capture_output=True, text=True, check=False)
    failures = [
        line.split(" - ")[0].split(" ", 1)[1]
        for line in process.stdout.splitlines()
        if line.startswith(("FAILED ", "ERROR "))
    ]
    if process.returncode not in (0, 1, 2, 5) or (process.returncode in (1, 2) and not failures):
        raise SystemExit(
            f"pytest ended with exit code {process.returncode}: {process.stdout[-2000:]}{process.stderr[-2000:]}"
        )
    return failures
