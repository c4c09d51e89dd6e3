"""One run under fire: started as a user would, shot at, watched until it works again, ended, judged."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil
from training_run import StreamrlCommand

from campaigns.chaos.chaos_oracle import Verdict, judge
from campaigns.chaos.chaos_plan import GUEST_METHODS, MUST_RESUME, SEEN_BY, TREE, Cell, Method, Phase, Shot
from campaigns.chaos.chaos_processes import (
    describe,
    directories_for_clean,
    labelled,
    living,
    mapped_segments,
    reap,
    residue,
    send,
    shared_memory,
    wait_until_none,
)
from campaigns.chaos.chaos_records import Record, Witness
from streamrl.launch.control_protocol import SteerRun
from streamrl.launch.control_socket import ask_run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLE = ROOT / "examples" / "sort"
GONE_S = 50.0
ENDLESS = 10**6
DRAIN_S = 300.0
PATIENCE_S = {"simulated": 300.0, "vllm": 900.0}
"""For the whole run to start, or for what died to work again."""


class ShotResult(msgspec.Struct, kw_only=True):
    """``outcome``: ``recovered``, ``resumed`` (by hand), ``ended`` (the run was over, and no resume brought it back),
    ``stuck``, ``vacuous`` (nothing was there to be shot). ``recovery_s``: by victim, from the shot until it worked
    again; ``resume``: from the command on. ``step_s``: until the next optimizer step."""

    shot: Shot
    outcome: str
    recovery_s: dict[str, float] = {}
    step_s: float = 0.0
    note: str = ""


class CellResult(msgspec.Struct, kw_only=True):
    """``faults``: everything that is wrong; empty when all is well. ``for_clean``: socket directories that lives left
    which were killed whole, for ``streamrl resume``."""

    cell: Cell
    shots: list[ShotResult]
    verdict: Verdict
    faults: list[str]
    seconds: float
    for_clean: int = 0
    accuracy: float | None = None


class ChaosRun(StreamrlCommand):
    """A run and its witnesses. ``steps`` 0: it goes on until it is stopped."""

    def __init__(self, cell: Cell, folder: Path, temporary: Path, *, steps: int) -> None:
        tap, self.ledger = folder / "tap.jsonl", folder / "ledger.jsonl"
        path = os.pathsep.join([str(HERE / "tap"), str(ROOT)])
        super().__init__(folder, {"PYTHONPATH": path, "STREAMRL_CHAOS_TAP": str(tap), "TMPDIR": str(temporary)})
        self.cell, self.temporary, self.steps = cell, temporary, steps
        self.witness = Witness(tap, self.ledger)
        self.patience_s = PATIENCE_S["vllm" if cell.teacher else cell.engines]
        self.shared: set[str] = set()

    @property
    def directory(self) -> Path | None:
        """The run directory, once there is one that can be resumed."""
        return next((path.parent for path in sorted(self.folder.glob("runs/*/recipe.toml"))), None)

    def train(self) -> None:
        """Start it from nothing."""
        recipe = self.folder / "recipe.toml"
        recipe.write_text(_recipe(self.cell, self.folder, self.ledger, self.steps))
        self.start("train", str(recipe))

    def resume(self) -> float:
        """Go on with what there is, and return when that began; where nothing was begun yet, begin."""
        began = time.monotonic()
        if self.directory is None:
            self.train()
        else:
            self.start("resume", str(self.directory))
        return began

    def said(self) -> str:
        """The last lines that it printed, in one."""
        return self.tail(6, separator=" | ")

    def wait_for_step(self, after_s: float) -> Record | None:
        """The next optimizer step that ends later than ``after_s``."""
        return self.witness.wait_for(
            lambda record: record["kind"] == "close_batch done" and record["t"] > after_s,
            self.patience_s,
            lambda: self.over,
        )


def run_cell(cell: Cell, folder: Path, *, steps: int = 0) -> CellResult:
    """Carry out one cell in ``folder``, which keeps what the run and its witnesses wrote."""
    began, shared_before = time.monotonic(), shared_memory()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="sk-", ignore_cleanup_errors=True) as name:  # a socket path has 107 bytes
        run = ChaosRun(cell, folder, Path(name), steps=steps)
        try:
            run.train()
            results = _shoot_all(run, faults)
            end_run(run, faults)
            abandoned = directories_for_clean(run.directory, run.temporary) if run.directory else []
            for directory in abandoned:
                shutil.rmtree(directory)
            faults += residue([run.directory] if run.directory else [], run.temporary, shared_before, ours=run.shared)
        finally:
            send(living(), signal.SIGKILL)
            wait_until_none(5.0)
            if run.process is not None:
                run.process.wait()
            reap()
    verdict = Verdict(faults=["nothing was begun"])
    if run.directory is not None:
        run.witness.read()
        records = sorted(run.witness.records, key=lambda record: record["t"])
        verdict = judge(cell, records, run.directory, drawn_prompts(cell), _batch(steps)[0], streams=bool(steps))
    faults += verdict.faults
    faults += [f"shot {n + 1}: {r.outcome}: {r.note}" for n, r in enumerate(results) if r.outcome in ("ended", "stuck")]
    seconds = round(time.monotonic() - began, 1)
    return CellResult(
        cell=cell,
        shots=results,
        verdict=verdict,
        faults=faults,
        seconds=seconds,
        for_clean=len(abandoned),
        accuracy=_accuracy(run.directory),
    )


def _shoot_all(run: ChaosRun, faults: list[str]) -> list[ShotResult]:
    results: list[ShotResult] = []
    for shot in run.cell.shots:
        results.append(shoot(run, shot, faults))
        if run.over or results[-1].outcome in ("ended", "stuck"):
            break
    return results


def shoot(run: ChaosRun, shot: Shot, faults: list[str]) -> ShotResult:
    """Aim, fire, and watch."""
    if missed := _aim(run, shot):
        done = run.steps and run.over and run.exit_code(0) == 0  # it was quicker than the shots
        return ShotResult(shot=shot, outcome="vacuous" if done else "ended" if run.over else "stuck", note=missed)
    assert run.process is not None
    known = labelled(run.process.pid)
    run.shared.update(*(mapped_segments(process.pid) for process in known.values()))
    victims = list(known.values()) if TREE in shot.victims else [known[name] for name in shot.victims if name in known]
    if run.over or len(victims) < len(shot.victims):
        if shot.phase is Phase.SHUTDOWN:
            run.exit_code(DRAIN_S)
            return _go_on(run, shot, time.monotonic(), "vacuous", faults)
        return ShotResult(shot=shot, outcome="vacuous", note=f"there were {', '.join(known) or 'none'}")
    if shot.method in GUEST_METHODS:
        return _take_back(run, shot, known[shot.victims[0]].pid, faults)
    fired = time.monotonic()
    send(victims, signal.SIGKILL if shot.method is Method.KILL else signal.SIGSTOP)
    if shot.method is not Method.KILL:
        time.sleep(shot.stopped_s)
        fired = time.monotonic()
        send(victims, signal.SIGKILL if shot.method is Method.STOP_KILL else signal.SIGCONT)
    if shot.phase is Phase.SHUTDOWN:
        run.exit_code(DRAIN_S)
    if shot.phase is Phase.SHUTDOWN or not MUST_RESUME.isdisjoint(shot.victims):
        return _go_on(run, shot, fired, "resumed", faults)
    return _watch(run, shot, fired, {name: known[name].pid for name in shot.victims}, faults)


def _aim(run: ChaosRun, shot: Shot) -> str:
    """Return when it is time to fire; or why it never was."""
    now = time.monotonic()
    if shot.phase not in (Phase.START, Phase.RECOVERY) and run.wait_for_step(now) is None:
        return f"no step before the shot: {run.said()}"
    kind = SEEN_BY.get(shot.phase)
    if kind is not None:
        seen = run.witness.wait_for(lambda record: record["kind"] == kind, run.patience_s, lambda: run.over)
        if seen is None:
            return f"never saw {kind!r}: {run.said()}"
    if shot.phase is Phase.SHUTDOWN:
        run.terminate()
    time.sleep(shot.delay_s)
    return ""


def _go_on(run: ChaosRun, shot: Shot, fired: float, outcome: str, faults: list[str]) -> ShotResult:
    """The whole run is over, or about to be: nothing may be left but what resume needs. Resume it."""
    run.exit_code(GONE_S)
    left = wait_until_none(GONE_S, [psutil.Process(os.getpid())])
    if left:
        faults.append(f"{GONE_S:.0f} s after {'+'.join(shot.victims)} there is still {'; '.join(map(describe, left))}")
        send(left, signal.SIGKILL)
        wait_until_none(5.0)
    gone_s = time.monotonic() - fired
    began = run.resume()
    step = run.wait_for_step(began)
    if step is None:
        return ShotResult(shot=shot, outcome="ended" if run.over else "stuck", note=f"after resume: {run.said()}")
    return ShotResult(
        shot=shot,
        outcome=outcome,
        recovery_s={"resume": round(step["t"] - began, 3)},
        step_s=round(step["t"] - began, 3),
        note=f"all gone after {gone_s:.1f} s",
    )


def _take_back(run: ChaosRun, shot: Shot, pid: int, faults: list[str]) -> ShotResult:
    """The host of an engine takes it back, and gives it back later. The note says after how many milliseconds the
    engine had ended its last request."""
    engine = shot.victims[0]
    ordered = time.monotonic()
    _order(run, shot.method.value, engine)
    answer_ms = 1000 * (time.monotonic() - ordered)
    time.sleep(shot.stopped_s)
    returned = time.monotonic()
    _order(run, "return_engine", engine)
    result = _watch(run, shot, returned, {engine: pid}, faults)
    ends = [
        record["t"]
        for record in run.witness.records
        if record["role"] == engine and record["kind"] == "generate done" and ordered < record["t"] < returned
    ]
    last_ms = 1000 * (max(ends, default=ordered) - ordered)
    note = f"{result.note} answer {answer_ms:.0f} ms, last request {last_ms:.0f} ms"
    return msgspec.structs.replace(result, note=note)


def _order(run: ChaosRun, order: str, engine: str) -> None:
    assert run.directory is not None
    request = SteerRun(order=order, engine=engine)  # type: ignore[arg-type]
    anyio.run(ask_run, run.directory, request, 30.0)


def _watch(run: ChaosRun, shot: Shot, fired: float, pids: dict[str, int], faults: list[str]) -> ShotResult:
    """What died must work again, and the run must step."""
    again = shot.method not in (Method.STOP_RESUME, *GUEST_METHODS)
    recovery: dict[str, float] = {}
    deadline = time.monotonic() + run.patience_s
    while len(recovery) < len(pids) and time.monotonic() < deadline and not run.over:
        run.witness.read()
        for name in pids:
            if name not in recovery and (worked := _works(run, name, fired, again)) is not None:
                recovery[name] = round(worked - fired, 3)
        time.sleep(0.02)
    step = None if run.over else run.wait_for_step(fired)
    if step is not None and len(recovery) == len(pids):
        return ShotResult(shot=shot, outcome="recovered", recovery_s=recovery, step_s=round(step["t"] - fired, 3))
    if not run.over:
        missing = ", ".join(set(pids) - set(recovery)) or "a step"
        return ShotResult(shot=shot, outcome="stuck", recovery_s=recovery, note=f"waited for {missing}: {run.said()}")
    note = f"exit code {run.exit_code(GONE_S)}: {run.said()}"
    if left := wait_until_none(GONE_S):
        faults.append(f"{GONE_S:.0f} s after {'+'.join(shot.victims)} there is still {'; '.join(map(describe, left))}")
    return ShotResult(shot=shot, outcome="ended", note=note)


WORK = {
    "controller": ("on_event",),
    "engine": ("generate done", "commit done"),
    "trainer": ("train_group", "close_batch done"),
    "reward": ("scored",),
    "environment": ("called",),
    "teacher": ("_admit done",),
}


def _works(run: ChaosRun, name: str, fired: float, again: bool) -> float | None:
    """When a successor of ``name`` (or itself, where it was only stopped) did its first work after the shot."""
    role = name.partition("/")[0].partition("#")[0]
    kinds = WORK[role.partition("-")[0]]
    for record in run.witness.records:
        mine = record["role"] == ("reward" if role.startswith("reward") else role)
        if mine and record["kind"] in kinds and record["t"] > fired and (not again or record["born"] > fired - 0.05):
            return float(record["t"])
    return None


def end_run(run: ChaosRun, faults: list[str]) -> None:
    """Let the run end: by itself where it has an end, else by the signal that people send."""
    if run.over:
        return
    if not run.steps:
        run.terminate()
    code = run.exit_code(DRAIN_S if not run.steps else 10 * run.patience_s)
    if code is None:
        faults.append(f"the run did not end within {DRAIN_S:.0f} s: {run.said()}")
    elif code != 0:
        faults.append(f"the run ended with exit code {code}: {run.said()}")


def drawn_prompts(cell: Cell, epochs: int = 1) -> list[str]:
    """Ids of the training prompts in the order in which a run of this seed draws them."""
    import anyio

    from streamrl.pretrained.tokenizer import load_tokenizer
    from streamrl.run.prompts.open_prompts import open_prompts

    async def draw() -> list[str]:
        tokenizer = load_tokenizer(EXAMPLE / "model")
        source = open_prompts(str(EXAMPLE / "train.jsonl"), tokenizer, seed=cell.seed, shuffle=True)
        try:
            drawn = [await source.draw(source.size or 0) for _ in range(epochs)]
            return [prompt.prompt_id for epoch in drawn for prompt in epoch]
        finally:
            await source.aclose()

    return anyio.run(draw)


def _accuracy(directory: Path | None) -> float | None:
    if directory is None or not (directory / "metrics.jsonl").exists():
        return None
    lines = [msgspec.json.decode(line) for line in (directory / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]
    found = [line for line in lines if line["kind"] == "evaluation"]
    figures: dict[str, Any] = found[-1].get("metrics", found[-1]) if found else {}
    return next((value for name, value in figures.items() if name.startswith("eval/held_out/avg@")), None)


def _batch(steps: int) -> tuple[int, int, int, float]:
    """Prompts, group size, tokens of a completion, learning rate: the demo's, or those of a small and quick run."""
    return (32, 8, 448, 2e-4) if steps else (4, 4, 64, 1e-4)


def _has_guests(cell: Cell) -> bool:
    """Return whether hosts take engines back: what these compute after that is then known to be requests of the run."""
    return any(shot.method in GUEST_METHODS for shot in cell.shots)


def _environment() -> str:
    return f"""
[environment]
episode = "{HERE / "chaos_reward.py"}:talk"
max_tokens = 500
"""


def _teacher() -> str:
    """A teacher that the run serves beside any engines; its batches are small, so that it is asked all the time."""
    return f"""
[objective]
algorithm = "distillation"
[teacher]
model = "{EXAMPLE / "model"}"
[teacher.advanced]
batch = 4
restarts = 100
"""


def _recipe(cell: Cell, folder: Path, ledger: Path, steps: int) -> str:
    function = "ledgered_sort" if steps else "ledgered"
    evaluation = f'prompts = "{EXAMPLE / "held_out.jsonl"}"\nat_start = false' if steps else ""
    batch = _batch(steps)
    return f"""
[run]
name = "chaos"
directory = "{folder / "runs"}"
seed = {cell.seed}
steps = {steps or ENDLESS}
[run.advanced]
restarts = 100
[model]
path = "{EXAMPLE / "model"}"
[prompts]
train = "{EXAMPLE / "train.jsonl"}"
[[rewards]]
function = "{HERE / "chaos_reward.py"}:{function}"
options = {{ ledger = "{ledger}" }}
[rollout]
rounds = "{cell.rounds}"
prompts_per_batch = {batch[0]}
group_size = {batch[1]}
max_staleness = {2 if cell.rounds == "continuous" else 0}
[sampling]
max_tokens = {batch[2]}
[training]
ranks = {cell.ranks}
learning_rate = {batch[3]}
warmup_steps = 5
[training.advanced]
threads = 1
[engines]
kind = "{cell.engines}"
count = {cell.engine_count}
max_model_len = 512
dtype = "float32"
[engines.advanced]
restarts = 100
[weights.advanced]
audit_interval = 1
canary = {str(not _has_guests(cell)).lower()}
[checkpoint]
every = 4
[checkpoint.advanced]
min_free_gib = 0.1
{_environment() if cell.talks else ""}
{_teacher() if cell.teacher else ""}
[evaluation]
{evaluation}"""
