"""A run that fails, as its holder sees it: one message, one crash bundle with the stacks of what lived, no secret."""

from __future__ import annotations

import os
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest
from builders.files import SORT_RECIPE as DEMO

import streamrl.launch.pipeline
from streamrl.base.errors import ProcessDied
from streamrl.launch.pipeline import Pipeline
from streamrl.processes.cluster import open_launcher
from streamrl.processes.crash_bundle import read_manifest
from streamrl.processes.watchdog import ask_for_stacks
from streamrl.recipe.rewards import Reward
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.rewards.rewards_snapshot import RewardsSnapshot, rewards_file
from tests.processes.test_supervisor import STAND_IN, until

CANARY = "canary-of-the-hub-4711"
ATTACHED = "canary-of-a-reward-4711"
"""An option of a reward that is not in the recipe, printed by whatever was called with it."""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The demo's, with stand-ins for its processes. They serve, except the engine, which fails on command."""
    recipe = load_recipe(DEMO, [f"run.directory={tmp_path / 'runs'}", "engines.advanced.restarts=0"])
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setattr(open_launcher, "ENTRY", (str(STAND_IN),))
    monkeypatch.setattr(streamrl.launch.pipeline, "preflight", lambda *_: None)
    make = streamrl.launch.pipeline._make_run_directory

    def with_behaviour(*arguments: object) -> Path:
        directory = make(*arguments)  # type: ignore[arg-type]
        for folder in ("behaviour", "pids", "temporary"):
            (directory / folder).mkdir()
        for name in ("controller", "reward-0", "engine-0", "trainer-0"):
            (directory / "behaviour" / name).write_text("raise" if name == "engine-0" else "serve")
        return directory

    monkeypatch.setattr(streamrl.launch.pipeline, "_make_run_directory", with_behaviour)
    return recipe


async def test_a_run_that_fails_leaves_one_bundle_that_tells_why(recipe: Recipe) -> None:
    async with Pipeline(recipe) as pipeline:
        run = pipeline.run_directory
        started = [run / "pids" / f"{name}.0" for name in ("controller", "reward-0", "engine-0", "trainer-0")]
        await until(lambda: all(path.exists() for path in started))
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it may end meanwhile
                assert not any(CANARY in word for word in child.cmdline()), "no secret in an argv"
        judge = Reward(function="judge", options={"api_key": ATTACHED})
        attached = RewardsSnapshot(reward_version=1, rewards=(*recipe.rewards, judge), of_recipe=recipe.rewards)
        for name, content in rewards_file(attached).items():
            (run / name).write_bytes(content)
        (run / "metrics.jsonl").write_text(f"judge got {ATTACHED}\n")
        (run / "go").touch()
        with pytest.raises(ProcessDied) as died:
            async for _ in pipeline.events():
                pass
    first, *rest = str(died.value).splitlines()
    assert first == "engine-0 ended with exit code 1: ValueError: the loss is not finite"
    [bundle] = (run / "crash").iterdir()
    assert rest[-1] == f"crash bundle: {bundle} (streamrl show {bundle})"
    manifest = read_manifest(bundle)
    assert manifest.failure.splitlines()[0] == first and "HF_TOKEN" in manifest.variable_names
    with zipfile.ZipFile(bundle) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert b"in behave" in files["logs/trainer-0.log"], "the stack of a process that lived"
    assert msgspec.json.decode(files["exit/engine-0.json"])["message"] == "ValueError: the loss is not finite"
    written = [path for path in run.rglob("*") if path.is_file()]
    assert not [path for path in written if CANARY.encode() in path.read_bytes()], "no secret in any file"
    secrets = (CANARY.encode(), ATTACHED.encode())
    assert not [name for name, content in files.items() if any(secret in content for secret in secrets)]
    assert files["metrics.jsonl"] == b"judge got [rewards.judge.api_key removed]\n"


async def test_a_bundle_that_cannot_be_written_hides_no_failure(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(streamrl.launch.pipeline, "write_crash_bundle", full)
    async with Pipeline(recipe) as pipeline:
        (pipeline.run_directory / "go").touch()
        with pytest.raises(ProcessDied) as died:
            async for _ in pipeline.events():
                pass
    assert str(died.value).startswith("engine-0 ended with exit code 1")
    assert str(died.value).endswith("no crash bundle could be written: [Errno 28] No space left on device")


async def test_no_bundle_is_written_where_secrets_cannot_be_known(recipe: Recipe) -> None:
    async with Pipeline(recipe) as pipeline:
        run = pipeline.run_directory
        (run / "rewards.msgpack").write_bytes(b"torn")
        (run / "go").touch()
        with pytest.raises(ProcessDied, match="engine-0 ended with exit code 1") as died:
            async for _ in pipeline.events():
                pass
    assert "no crash bundle could be written: " in str(died.value) and not (run / "crash").exists()


async def test_stacks_are_asked_only_of_catching_processes() -> None:
    """Only processes of a run that catch the signal are asked for stacks."""
    catches = "import signal, time; signal.signal(signal.SIGUSR2, lambda *_: open('caught', 'w')); "
    waits = "print(flush=True); time.sleep(7200)"
    commands = {
        "a user's own": (catches + waits, {}),
        "starting": ("import time; " + waits, {"STREAMRL_RUN_MARKER": "w"}),
    }
    started = []
    for code, environment in commands.values():
        process = await anyio.open_process([sys.executable, "-c", code], env=os.environ | environment)
        assert process.stdout is not None
        await process.stdout.receive(1)
        started.append(process)
    try:
        assert ask_for_stacks(os.getpid()) == []
        assert all(process.returncode is None for process in started), "nobody died of it"
    finally:
        for process in started:
            process.kill()
            await process.aclose()
