"""Runs that are killed and resumed, beside one that is not: batches and weights must be equal (design, invariant 7).

    python -m campaigns twins --out twins --engines simulated --kills 50
    python -m campaigns twins --out twins_vllm --engines vllm --kills 10

    python -m campaigns twins --out twins_all --engines vllm --rounds rollpacker --victims parts --kills 1
    python -m campaigns twins --out twins_qwen --engines vllm --family qwen3_5 --rounds synchronous --kills 3
    python -m campaigns twins --out twins_lora --engines vllm --family qwen3_5 --lora merged --rounds synchronous

Every twin is a real run with ``run.deterministic``, whose whole process tree is killed with SIGKILL at a random moment
(some of them twice: a resume is resumed) and which ``streamrl resume`` ends; with ``--victims parts`` an engine is
killed and later the controller, and the run goes on by itself. ``tracked``: rounds without groups, whose baselines
of prompts and kept sets of tokens are in the journal. ``rollpacker``: every part of it at once (sets of
engines, freed engines, presubmission, restarts, races, streaming, SAGC, DAPO, an adaptive limit), on two engines.
Compared with the run that was left alone:
the groups of every batch in the order of training with reward and length of each member, and every tensor of the
weights and of the trainer's state in every checkpoint, bit for bit. ``rollpacker`` is not among the default rounds: its
dynamic sampling drops every group of the simulated engines' random text. ``--family``: the model is the tiny one of a
family, which learns digits (``campaigns/family_runs.py``), with ``--lora`` by adapters; else it is the demo.
Resumable: a finished twin is a JSON file in ``--out``."""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil
import torch
from safetensors.torch import load_file

from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.policies.round_policies import make_control
from streamrl.control.settings import control_settings
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.run.journal.journal_file import read_journal
from streamrl.run.journal.records import JournalBase, JournalCodec, JournalEvent

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "examples/sort/recipe.toml"
STEP_S = 0.7
RUN_LIMIT_S = 600.0
SEGMENTS = "all_segments"
ROUNDS: dict[str, dict[str, object]] = {
    "synchronous": {},
    "tail_batching": {"rollout.rounds": "tail_batching", "tail_batching.prompt_oversampling": 1.25},
    "length_sorted": {"rollout.rounds": "length_sorted", "length_sorted.cohort_batches": 2},
    "tracked": {
        "objective.advantages": "tracked",
        "rollout.group_size": 1,
        "rollout.prompts_per_batch": 32,
        "prompts.train": f"{ROOT}/examples/sort/train.jsonl?limit=64",  # each prompt comes back every second step
        "sampling.top_p": 0.9,
    },
    "rollpacker": {
        "rollout.rounds": "tail_batching",
        "tail_batching.prompt_oversampling": 1.5,
        "rollout.advanced.presubmit": "true",
        "rollout.dynamic_sampling": "true",
        "objective.algorithm": "dapo",
        "training.advanced.streaming": "true",
        "group_sizing.kind": "sagc",
        "group_sizing.sizes": "[4, 8]",
        "group_sizing.budget": 0.6,
        "group_sizing.advanced.dwell": 1,
        "engines.count": 2,
        "engines.release": "drain",
        "engines.advanced.restarts": 5,
        "engines.advanced.rounds": '["short"]',
        "engines.advanced.sets": '[{count = 1, rounds = ["long"]}]',
        "rewards.0.advanced.adaptive_timeout": "{min_s = 2.0}",
    },
}


class Twin(msgspec.Struct, frozen=True, kw_only=True):
    """``steps``: that were live when it was killed, ``at_s`` after it was seen; ``differences``: what is not equal."""

    seed: int
    rounds: str
    at_s: list[float]
    steps: list[int]
    differences: list[str]
    wall_s: float


class Fingerprint(msgspec.Struct, frozen=True):
    """``batches``: by version, what was trained; ``weights``: digest of each file of each checkpoint."""

    batches: dict[int, str]
    weights: dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engines", choices=("simulated", "vllm"), default="simulated")
    parser.add_argument("--rounds", nargs="+", choices=list(ROUNDS), default=list(ROUNDS)[:3])
    parser.add_argument("--family", default="", help="a table of streamrl/learning/families")
    parser.add_argument("--lora", choices=("adapter", "merged"), default="", help="train adapters of a --family")
    parser.add_argument("--victims", choices=("tree", "parts"), default="tree")
    parser.add_argument("--kills", type=int, default=50, help="twins; every fifth is killed twice")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the directories of twins that differ")
    parser.set_defaults(work=run)


def run(options: argparse.Namespace) -> int:
    """Kill twins, then compare them with the runs that were left alone; 1 where one differs."""
    options.out.mkdir(parents=True, exist_ok=True)
    options.recipe = _recipe_of(options)
    whole = {name: _unkilled(options, name) for name in options.rounds}
    twins = []
    for seed in range(options.first_seed, options.first_seed + options.kills):
        path = options.out / f"twin-{options.engines}-{seed}.json"
        if path.exists():
            twins.append(msgspec.json.decode(path.read_bytes(), type=Twin))
            continue
        rounds = options.rounds[seed % len(options.rounds)]
        twin = _killed(options, seed, rounds, whole[rounds])
        path.write_bytes(msgspec.json.encode(twin))
        twins.append(twin)
        killed = ", ".join(f"step {step} + {at:.2f} s" for at, step in zip(twin.at_s, twin.steps, strict=True))
        verdict = "equal" if not twin.differences else "; ".join(twin.differences)
        print(f"twin {seed} {rounds}, killed at {killed}: {verdict} ({twin.wall_s:.0f} s)", flush=True)
    different = [twin for twin in twins if twin.differences]
    print(f"{len(twins)} twins, {sum(len(twin.at_s) for twin in twins)} kills, {len(different)} different")
    return 1 if different else 0


def _recipe_of(options: argparse.Namespace) -> Path:
    if not options.family:
        return RECIPE
    from campaigns.family_runs import write_project

    project: Path = options.out.resolve() / options.family
    return write_project(options.family, project, lora=options.lora)


def _unkilled(options: argparse.Namespace, rounds: str) -> Fingerprint:
    path = options.out / f"whole-{options.engines}-{rounds}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Fingerprint)
    directory = options.out / f"whole-{rounds}"
    shutil.rmtree(directory, ignore_errors=True)
    with _all_segments(directory):
        run = _start(_train(options, directory, rounds), directory)
        if run.wait(RUN_LIMIT_S) != 0:
            raise SystemExit(f"the run that is not killed failed: see {directory / 'out'}")
    found = _fingerprint((directory / "latest").resolve())
    path.write_bytes(msgspec.json.encode(found))
    shutil.rmtree(directory)
    return found


def _killed(options: argparse.Namespace, seed: int, rounds: str, whole: Fingerprint) -> Twin:
    draw = random.Random(seed)
    began = time.monotonic()
    directory = options.out / f"twin-{seed}"
    at: list[float] = []
    steps: list[int] = []
    shutil.rmtree(directory, ignore_errors=True)
    command = _train(options, directory, rounds)
    with _all_segments(directory):
        for life in range(2 if seed % 5 == 4 else 1):
            run = _start(command, directory)
            after = draw.randrange(steps[-1] if steps else 0, options.steps)
            when = draw.uniform(0, STEP_S)
            _wait_for(run, lambda: _steps(directory, life) >= after and _has_journal(directory))  # noqa: B023
            time.sleep(when)
            if run.poll() is not None:
                raise SystemExit(f"twin {seed} ended before its kill, with {run.returncode}: see {directory}")
            if options.victims == "parts":
                _kill_parts(run.pid, directory, draw)
                at.append(when)
                steps.append(_steps(directory, life))
                command = []
                break
            os.kill(run.pid, signal.SIGKILL)
            run.wait()
            at.append(when)
            steps.append(_steps(directory, life))
            command = [sys.executable, "-m", "streamrl", "resume", str(directory / "latest")]
        run = _start(command, directory) if command else run
        try:
            code = run.wait(RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            run.kill()
            code = -1
    differences = [f"exit code {code}"] if code else _differences(whole, _fingerprint((directory / "latest").resolve()))
    if not (differences and options.keep):
        shutil.rmtree(directory)
    wall_s = time.monotonic() - began
    return Twin(seed=seed, rounds=rounds, at_s=at, steps=steps, differences=differences, wall_s=wall_s)


def _kill_parts(parent: int, directory: Path, draw: random.Random) -> None:
    """SIGKILL to an engine process, and to the controller after the next step."""
    for role in ("engine", "controller"):
        while not (found := [p for p in psutil.Process(parent).children() if role in _command(p)]):
            time.sleep(0.1)
        draw.choice(found).kill()
        killed_at = _steps(directory, 0)
        print(f"  SIGKILL to the {role} at step {killed_at}", flush=True)
        while role == "engine" and psutil.pid_exists(parent) and _steps(directory, 0) <= killed_at:
            time.sleep(0.1)


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def _train(options: argparse.Namespace, directory: Path, rounds: str) -> list[str]:
    settings: dict[str, object] = {
        "run.directory": str(directory),
        "run.deterministic": "true",
        "run.steps": options.steps,
        "engines.kind": options.engines,
        "checkpoint.every": 3,
        "checkpoint.keep": 100,
        "rollout.prompts_per_batch": 8,
        "evaluation.every": 0,
        "evaluation.at_start": "false",
        "evaluation.at_end": "false",
        **ROUNDS[rounds],
    }
    command = [sys.executable, "-m", "streamrl", "train", str(options.recipe)]
    return command + [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]


def _start(command: Sequence[str], directory: Path) -> subprocess.Popen[bytes]:
    directory.mkdir(parents=True, exist_ok=True)
    lives = len(list(directory.glob("out*")))
    with (directory / f"out{lives or ''}").open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)


def _output(directory: Path, life: int) -> str:
    return (directory / f"out{life or ''}").read_text(errors="replace")


def _wait_for(run: subprocess.Popen[bytes], met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RUN_LIMIT_S
    while run.poll() is None and time.monotonic() < deadline and not met():
        time.sleep(0.01)


def _has_journal(directory: Path) -> bool:
    return any(directory.glob("latest/journal/*.journal"))


def _steps(directory: Path, life: int) -> int:
    if not (directory / f"out{life or ''}").exists():
        return 0
    lines = [line for line in _output(directory, life).splitlines() if line.startswith("step")]
    return int(lines[-1].split()[1].partition("/")[0]) if lines else 0


def _fingerprint(run: Path) -> Fingerprint:
    return Fingerprint(_batches(run), _weights(run / "checkpoints"))


@contextmanager
def _all_segments(directory: Path) -> Iterator[None]:
    """Links every segment of the journal into ``SEGMENTS``: a run removes those that it does not need any more."""
    ended = threading.Event()

    def follow() -> None:
        while True:
            last = ended.is_set()
            for segment in directory.glob("latest/journal/*.journal"):
                link = segment.resolve().parent.parent / SEGMENTS / segment.name
                link.parent.mkdir(exist_ok=True)
                with suppress(FileExistsError, FileNotFoundError):
                    os.link(segment, link)
            if last:
                return
            ended.wait(0.05)

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def _batches(run: Path) -> dict[int, str]:
    """What each step trained: groups in their order, with each member's sample, reward and length."""
    codec, settings, control = JournalCodec(), control_settings(load_recipe(run / "recipe.toml")), None
    outcomes: dict[object, tuple[float, int]] = {}
    batch: list[str] = []
    batches: dict[int, str] = {}
    for record in map(codec.decode, read_journal(run / SEGMENTS).records(0)):
        if isinstance(record, JournalBase):
            control = make_control(settings, record.control)
        if control is None or not isinstance(record, JournalEvent):
            continue
        if isinstance(record.event, on.TrajectoryScored):
            outcomes[record.event.id] = (record.event.reward, record.event.tokens)
        for action in control.handle(record.event):
            if isinstance(action, do.TrainGroupNow):
                batch += [f"{i.prompt_id} {i} {outcomes[i]}" for i in action.ids]
            elif isinstance(action, do.StepOptimizer):
                batches[action.policy_version] = hashlib.sha256("\n".join(batch).encode()).hexdigest()
                batch = []
    return batches


def _weights(checkpoints: Path) -> dict[str, str]:
    found = {}
    for path in sorted(checkpoints.rglob("*")):
        name = path.relative_to(checkpoints).as_posix()
        if path.is_file() and not name.startswith("latest") and path.suffix == ".safetensors":
            found[name] = _tensors(path)
    return found


def _tensors(path: Path) -> str:
    """Digest of all tensors by name: torch writes those of its own checkpoints in any order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(path).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _differences(whole: Fingerprint, twin: Fingerprint) -> list[str]:
    found = [
        f"batch of step {version}"
        for version in sorted(whole.batches.keys() | twin.batches.keys())
        if whole.batches.get(version) != twin.batches.get(version)
    ]
    return found + [
        name
        for name in sorted(whole.weights.keys() | twin.weights.keys())
        if whole.weights.get(name) != twin.weights.get(name)
    ]
