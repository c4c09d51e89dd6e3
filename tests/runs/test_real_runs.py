"""Whole runs as a user starts them: real vLLM engines, real torch ranks, real sockets, real signals and kills."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from builders.files import EXAMPLES, json_lines

from streamrl.cli.show import read_run
from streamrl.control.check import violations
from streamrl.control.policies.round_policies import make_control
from streamrl.control.settings import control_settings
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.toml_text import toml_value
from streamrl.run.journal.journal_file import read_journal
from streamrl.run.journal.records import JournalCodec, JournalDecision, JournalEvent, JournalPrompt, JournalRecord
from streamrl.run.journal.recover import replayed_run

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.torch]

EXAMPLE = EXAMPLES / "sort" / "recipe.toml"
ROLLPACKER = EXAMPLES / "systems" / "rollpacker.toml"
STREAMRL = str(Path(sys.executable).with_name("streamrl"))
SMALL = {
    "rollout.prompts_per_batch": 4,
    "rollout.group_size": 4,
    "sampling.max_tokens": 64,
    "evaluation.prompts": "",
    "training.advanced.threads": 1,
}
# The demo's reward gives few groups of four a signal, and the figures of a step are of what had one.
ANY_TWO_DIFFER = {"rewards__0__function": f"{Path(__file__).with_name('reward_of_text.py')}:reward_of_text"}


class Run:
    """``streamrl train`` with a small batch, in a directory of its own."""

    def __init__(self, directory: Path, recipe: Path = EXAMPLE, **settings: object) -> None:
        self.directory = directory
        chosen = {**SMALL, "run.directory": str(directory), **{k.replace("__", "."): v for k, v in settings.items()}}
        self.overrides = [part for k, v in chosen.items() for part in ("--set", f"{k}={toml_value(v)}")]
        self.process = subprocess.Popen(
            [STREAMRL, "train", str(recipe), *self.overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @property
    def files(self) -> Path:
        """The run directory that the run made."""
        return self.directory / "latest"

    def wait_for_step(self, step: int) -> None:
        """Until ``step`` is in metrics.jsonl."""
        self.wait_until(lambda: self.text("metrics.jsonl").count('"kind":"step"') >= step, f"step {step}")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Until ``condition`` holds. Raises ``AssertionError`` when the run ends before, or it takes too long."""
        deadline = time.monotonic() + 900
        while time.monotonic() < deadline and self.process.poll() is None:
            if condition():
                return
            time.sleep(0.05)
        raise AssertionError(f"{what} was not reached:\n{self.end(kill=True)}")

    def text(self, name: str) -> str:
        """Of one of its files; empty while there is none."""
        path = self.files / name
        return path.read_text() if path.exists() else ""

    def decisions(self, subject: str) -> list[dict[str, float]]:
        """The figures of control's decisions about ``subject`` that something was done for."""
        found = [record.decision for record in self.records() if isinstance(record, JournalDecision)]
        return [one.figures for one in found if one.subject == subject and "moved" in one.figures]

    def records(self) -> list[JournalRecord]:
        """Of its journal."""
        return [JournalCodec().decode(body) for body in read_journal(self.files / "journal").records(0)]

    def tree(self) -> list[psutil.Process]:
        """Every process of the run, the command itself first."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def engine_cores(self) -> list[psutil.Process]:
        """The processes in which vLLM computes."""
        return [process for process in self.tree() if "VLLM::EngineCore" in " ".join(_command(process))]

    def end(self, *, kill: bool = False, within: float = 900) -> str:
        """Wait for the end; returns what was printed."""
        if kill:
            self.process.kill()
        output, _ = self.process.communicate(timeout=within)
        return output

    def metrics(self) -> list[dict[str, float]]:
        """The lines of the optimizer steps."""
        lines = (self.files / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == "step"]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
def test_two_engines_and_two_ranks_train_on_policy(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Two engines and two ranks train on-policy, and the example goes on from their export over tcp. What the first run
    exported, the second one loads: trainer and vLLM."""
    run = Run(tmp_path, run__steps=3, engines__count=2, training__ranks=2, **ANY_TWO_DIFFER)
    output = run.end()
    assert run.process.returncode == 0, output
    steps = run.metrics()
    assert [s["step"] for s in steps] == [1, 2, 3]
    for step in steps:
        assert abs(step["policy/is_weight_mean"] - 1) < 1e-3
        assert step["async/staleness_oldest_max"] == 0
        assert step["weights/payload_bytes"] > 0
        assert 0 < step["weights/canary_deviation"] < 1e-4, "engines compute as the trainer does, to rounding"
    accounting = read_run(run.files).summary.accounting
    assert (accounting.issued, accounting.trained, accounting.in_flight) == (48, 48, 0)
    from transformers import AutoModelForCausalLM

    [exported] = {path.parent for path in (run.files / "checkpoints").resolve().rglob("config.json")}
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(exported).parameters()) == 299136
    apart = tmp_path / "apart"
    chosen = {**SMALL, "run.directory": str(apart), "run.steps": 2, "model.path": str(exported)}
    flags = [part for k, v in chosen.items() for part in ("--set", f"{k}={json.dumps(v)}")]
    command = [sys.executable, "-m", "streamrl", "train", str(EXAMPLE), *flags]
    command += ["--set", "transport.kind=tcp", "--set", f"transport.port={free_ports(8)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json_lines(apart / "latest" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2]


@pytest.mark.seconds(10)
@pytest.mark.usefixtures("nothing_left")
def test_continuous_rounds_respect_the_staleness_bound(tmp_path: Path) -> None:
    """Continuous rounds update weights in flight within the staleness bound."""
    run = Run(
        tmp_path,
        run__steps=6,
        rollout__in_flight="recompute",
        rollout__rounds="continuous",
        rollout__max_staleness=2,
        sampling__max_tokens=256,
    )
    output = run.end()
    assert run.process.returncode == 0, output
    steps = run.metrics()
    assert max(s["async/staleness_oldest_max"] for s in steps) <= 2
    assert max(s["async/staleness_max"] for s in steps) >= 1, "nothing was ever off-policy: were rounds continuous?"
    assert max(s["async/versions_per_sample_mean"] for s in steps) > 1, "no completion lived through a weight update"
    assert max(s["weights/reanchored"] for s in steps) == 0


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
def test_a_signal_drains_and_the_run_resumes_with_more_ranks(tmp_path: Path) -> None:
    """A signal drains the run and saves it, and the run goes on with more ranks."""
    method = {
        "objective__algorithm": "ppo",
        "objective__kl_coefficient": 0.01,
        "rollout__rounds": "tail_batching",
        "rollout__advanced__presubmit": True,
    }
    first = Run(tmp_path / "first", run__steps=500, **method)
    first.wait_for_step(2)
    shadow = [f"{EXAMPLE.with_name('reward.py')}:sorted_trace", "--shadow", "--name", "shade"]
    subprocess.run([STREAMRL, "reward", "attach", str(first.files), *shadow], check=True)
    os.killpg(first.process.pid, signal.SIGINT)  # as a terminal sends it: to every process of the group
    output = first.end()
    assert first.process.returncode == 0, output
    settings = control_settings(load_recipe(first.files / "recipe.toml"))
    ended = replayed_run(read_journal(first.files / "journal").records(), partial(make_control, settings), 0)
    assert ended is not None
    state, accounting = ended.state, ended.state.accounting()
    assert accounting.in_flight == 0 and not violations(state, ended.control.rules)
    assert accounting.dropped["lost_race"] >= 4, "each race of five prompts defers one"
    done = len(first.metrics())
    held_out = {
        "evaluation__prompts": str(EXAMPLE.with_name("held_out.jsonl")),
        "evaluation__every": 1,
        "evaluation__limit": 4,
        "evaluation__samples": 2,
        "evaluation__at_start": False,
        "evaluation__at_end": False,
    }
    saved = str(first.files / "checkpoints" / "latest")
    changes = {"checkpoint__resume_from": saved, "training__ranks": 2, "run__steps": 500}
    second = Run(tmp_path / "second", **method, **held_out, **changes)
    second.wait_for_step(2)
    os.killpg(second.process.pid, signal.SIGTERM)
    output = second.end()
    assert second.process.returncode == 0, output
    steps = second.metrics()
    assert [s["step"] for s in steps[:2]] == [done + 1, done + 2], output
    assert steps[0]["reward/func/shade/mean"] == steps[0]["reward/func/sorted_trace/mean"], "what was attached live"
    waits = {ref.prompt_id for ref in (*state.prompts.queue, *state.prompts.waiting)}
    base = itertools.takewhile(lambda record: not isinstance(record, JournalEvent), second.records())
    known = {record.prompt.prompt_id for record in base if isinstance(record, JournalPrompt)}
    assert waits and waits <= known, "what was deferred or under way is sampled after the resume"
    assert max(s["async/staleness_oldest_max"] for s in first.metrics() + steps) == 0
    assert steps[0]["optim/value_loss"] > 0
    assert steps[0]["policy/reference_kl"] != 0, "the reference is version 0, not what was resumed"
    assert abs(steps[0]["policy/is_weight_mean"] - 1) < 1e-3, "the engines hold the weights of the checkpoint"
    samples = second.files / "evaluations" / f"step-{done + 1:06d}.jsonl"
    assert len(samples.read_text().splitlines()) == 8
    assert '"eval/held_out/pass@2"' in (second.files / "metrics.jsonl").read_text()


FREED = {
    "engines__count": 2,
    "engines__release": "drain",
    "rollout__prompts_per_batch": 24,  # outcomes come in bunches: few of few would jump over the window
    "rollout__group_size": 8,
    "sampling__max_tokens": 256,
}


@pytest.mark.started
@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
def test_a_freed_engine_is_back_with_the_next_weights(tmp_path: Path) -> None:
    """An engine is freed late in a round, and is back with the weights of the next one."""
    run = Run(tmp_path, run__steps=5, weights__advanced__audit_interval=1, **FREED, **ANY_TWO_DIFFER)
    output = run.end()
    assert run.process.returncode == 0, output
    steps, freed = run.metrics(), run.decisions("engines_freed")
    assert len(freed) >= 2, output
    assert all(0.2 <= figures["progress"] <= 0.5 and figures["peak_share"] <= 0.9 for figures in freed)
    assert sum(figures["moved"] for figures in freed) > 0, "nothing migrated"
    assert_right_weights(run, steps, [{"engine-0", "engine-1"}] * 6)
    accounting = read_run(run.files).summary.accounting
    assert accounting.in_flight == 0 and accounting.trained == 192 * len(steps)


SETS = {
    "rollout__rounds": "tail_batching",
    "tail_batching__prompt_oversampling": 2.0,  # so every other round is a long one
    "engines__advanced__rounds": ["short"],
    "engines__advanced__sets": [{"count": 2, "rounds": ["long"]}],
}


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
def test_another_engine_set_serves_the_long_round(tmp_path: Path) -> None:
    """Another set of engines serves the long round, and the first one comes back. Processes end and others begin."""
    run = Run(tmp_path, run__steps=3, weights__advanced__audit_interval=1, **SETS, **ANY_TWO_DIFFER)
    output = run.end()
    assert run.process.returncode == 0, output
    steps = run.metrics()
    assert [step["engines/set"] for step in steps] == [0, 1, 0], output
    assert [step["engines/switches_total"] for step in steps] == [0, 1, 2]
    assert all((step["time/engine_switch_s"] > 0) == (step["step"] > 1) for step in steps)
    one, both = {"engine-0"}, {"engine-1", "engine-2"}
    assert_right_weights(run, steps, [one, one, both, one])
    accounting = read_run(run.files).summary.accounting
    assert accounting.in_flight == 0 and accounting.trained == 16 * len(steps)
    assert "engine_set from step 2 on: long rounds belong to set 2x1 (engines.advanced.sets)" in output


def assert_right_weights(run: Run, steps: list[dict[str, float]], serving: list[set[str]]) -> None:
    """Every version was live on the engines of ``serving``, from the first on, bit for bit the same, and sampled what
    it trained."""
    for step in steps:
        assert abs(step["policy/is_weight_mean"] - 1) < 1e-3, "a completion is one of its version"
        assert step["async/staleness_oldest_max"] == 0
    audits = [json.loads(line)["checksums"] for line in run.text("audits.jsonl").splitlines()]
    assert [set(checksums) for checksums in audits] == serving
    assert all(len({json.dumps(held) for held in checksums.values()}) == 1 for checksums in audits)
    held = {json.dumps(next(iter(checksums.values()))) for checksums in audits}
    assert len(held) == len(audits), "every version has weights of its own"


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
def test_rollpacker_survives_a_killed_engine_and_rank(tmp_path: Path) -> None:
    """RollPacker goes on after a killed engine and a killed rank. ``python -m campaigns chaos`` kills the others;
    ``test_systems.py`` kills runs of every system, simulated."""
    run = Run(tmp_path, ROLLPACKER, run__steps=100_000)
    run.wait_for_step(1)
    [core] = run.engine_cores()
    core.kill()
    run.wait_until(lambda: any(c.pid != core.pid for c in run.engine_cores()), "another engine")
    run.wait_for_step(len(run.metrics()) + 1)
    [rank] = [p for p in run.tree() if {"trainer", "--index"} <= set(_command(p))]
    rank.kill()
    run.wait_for_step(len(run.metrics()) + 2)
    run.process.terminate()
    output = run.end()
    assert run.process.returncode == 0, output
    assert "engine-0 is lost" in output and "engine-0 serves again" in output, output
    steps = {s["step"] for s in run.metrics()}
    assert steps == set(range(1, max(steps) + 1))
    assert max(s["async/staleness_oldest_max"] for s in run.metrics()) == 0
    summary = read_run(run.files).summary
    assert not summary.violations and summary.accounting.in_flight == 0


def test_bad_input_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run = Run(tmp_path, run__steps=2, rollout__group_sise=4)
    output = run.end()
    assert run.process.returncode == 2
    assert "rollout.group_sise" in output and "group_size" in output
    assert not list(tmp_path.iterdir())
