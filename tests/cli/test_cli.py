"""The command line: exit codes, messages without tracebacks, the dry run, watch against a real socket."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import anyio
import pytest
from builders.files import ROOT
from builders.pretrained import MODEL_CONFIG, write_model

import streamrl.cli.train
from streamrl.base.errors import ProcessDied, RecipeError
from streamrl.base.run_events import RunEvent, RunFinished, RunStarted, StepFinished
from streamrl.cli.main import main, report_error
from streamrl.learning.state.durable_files import files_below, flush_and_digest, read_digests, write_digests
from streamrl.observe.telemetry import Telemetry, TelemetryPublisher, TelemetrySubscriber
from streamrl.prepare.preflight import preflight, recipe_of_resumed_run
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Recipe

RECIPE = """\
[run]
name = "small"
directory = "{directory}/runs"
steps = 3

[model]
path = "model"

[prompts]
train = "train.jsonl"

[[rewards]]
function = "reward.py:score"

[rollout]
prompts_per_batch = 4
group_size = 2

[sampling]
max_tokens = 16

[engines]
max_num_seqs = 8
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A whole small project: model, prompts, reward, recipe."""
    write_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 2 3", "answer": "1"}\n')
    (tmp_path / "reward.py").write_text("def score(completion: str, *, answer: str) -> float:\n    return 1.0\n")
    (tmp_path / "recipe.toml").write_text(RECIPE.format(directory=tmp_path))
    return tmp_path


# ---- bad input -----------------------------------------------------------------------------------


def test_recipe_errors_come_together_with_exit_code_2(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = project / "recipe.toml"
    assert main(["train", str(recipe), "--set", "rollout.group_sise=3", "--set", "run.steps=0"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: 2 problems; nothing was started\n"
        "  --set: run.steps: 0 is not allowed: must be an integer > 0\n"
        '  --set: rollout.group_sise: unknown key; did you mean "group_size"? Keys of [rollout]: system, '
        "prompts_per_batch, group_size, rounds, policy, max_staleness, admission, in_flight, when_stale, "
        "dynamic_sampling; below [rollout.advanced]: presubmit\n"
    )


@pytest.mark.parametrize(
    ("written", "path"),
    [
        (["rollout.group_sise=3"], "rollout.group_sise"),
        (["--rollout.group_sise", "3"], "rollout.group_sise"),
        (["--rollout.group-sise=3"], "rollout.group_sise"),
        (["--set", "rollout.group_sise=3"], "rollout.group_sise"),
    ],
)
def test_overrides_in_the_ways_of_hydra_and_of_dotted_flags(
    project: Path, capsys: pytest.CaptureFixture[str], written: list[str], path: str
) -> None:
    assert main(["train", *written, str(project / "recipe.toml"), "--dry-run"]) == 2
    assert f'--set: {path}: unknown key; did you mean "group_size"?' in capsys.readouterr().err


def problems(project: Path, *overrides: str) -> list[str]:
    before = sorted(project.rglob("*"))
    with pytest.raises(RecipeError) as caught:
        preflight(load_recipe(project / "recipe.toml", overrides))
    after = [path for path in sorted(project.rglob("*")) if "__pycache__" not in path.parts]
    assert after == [path for path in before if "__pycache__" not in path.parts], "something was left behind"
    return caught.value.problems


def test_a_whole_project_passes(project: Path) -> None:
    (project / "combines.py").write_text(COMBINES)
    preflight(load_recipe(project / "recipe.toml", ["reward_limits.combine=combines.py:mean"]))


COMBINES = "class Mean: ...\nNUMBER = 3\ndef needs(values, *, nosuch): return 0.0\ndef mean(values): return 0.0\n"
ROW = '{"prompt": "1 2 3"}\n'


@pytest.mark.parametrize(
    ("files", "overrides", "expected"),
    [
        ({}, "model.path=absent", "model.path: {here}/absent is not a directory: give a Hugging Face model directory"),
        ({"model/config.json": None}, "", "model.path: {here}/model has no config.json"),
        ({"model/model.safetensors": None}, "", "model.path: {here}/model has no *.safetensors weights"),
        ({"model/model.safetensors": "cut"}, "", "model.path: {here}/model has a broken model.safetensors: "),
        (
            {"model/model.safetensors": f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * 'a'}\n"},
            "",
            "model.path: {here}/model has a broken model.safetensors: model.safetensors is a pointer of git-lfs, not",
        ),
        (
            {"model/tokenizer.json": f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * 'a'}\n"},
            "",
            "model.path: {here}/model/tokenizer.json cannot be read as a tokenizer (it is a pointer of git-lfs, not",
        ),
        (
            {"model/config.json": json.dumps(MODEL_CONFIG | {"architectures": ["Qwen2VLForConditionalGeneration"]})},
            "",
            "model.path: {here}/model is a Qwen2VLForConditionalGeneration: only language models that continue",
        ),
        (
            {},
            "lora.rank=4 lora.targets=['q_porj']",
            'lora.targets: "q_porj" is no linear module of this model: name modu',
        ),
        ({"model/tokenizer.json": None}, "", "model.path: model directory {here}/model has no tokenizer.json"),
        ({"train.jsonl": ""}, "", "prompts.train: prompts {here}/train.jsonl is empty"),
        (
            {"train.jsonl": ROW},
            "",
            'prompts.train: prompts {here}/train.jsonl, line 1 has no column "answer", which the reward',
        ),
        ({}, "sampling.max_tokens=10 engines.max_model_len=11", "prompts.train: prompts {here}/train.jsonl, line 1"),
        ({}, "prompts.train=no.jsonl", "prompts.train: "),
        ({"reward.py": "import sys\nsys.exit(3)\n"}, "", "rewards.0.function: "),
        ({"reward.py": "def score() -> float:\n    return 1.0\n"}, "", "rewards.0.function: "),
        (
            {"results.jsonl": "kept"},
            "metrics.endpoint=ipc://{here}/results.jsonl",
            "metrics.endpoint: ipc://{here}/results.jsonl is a file or directory, not a socket",
        ),
        ({}, "run.directory={here}/train.jsonl", "run.directory: "),
        ({"hangs.py": "raise SystemExit(3)\n"}, "reward_limits.combine=hangs.py:mean", "reward_limits.combine: "),
        ({"combines.py": COMBINES}, "reward_limits.combine=combines.py:Mean", "reward_limits.combine: "),
        ({"combines.py": COMBINES}, "reward_limits.combine=combines.py:NUMBER", "reward_limits.combine: "),
        (
            {"combines.py": COMBINES},
            "reward_limits.combine=combines.py:needs",
            "prompts.train: prompts {here}/train.jsonl, line",
        ),
        (
            {},
            "rollout.rounds=custom rollout.policy=none.py:Rounds",
            'rollout.policy: "{here}/none.py:Rounds": there is',
        ),
        (
            {"losses.py": "def loss(ratio, advantages): return -(ratio * advantages).mean()"},
            "objective.function=losses.py:loss",
            'objective.function: "{here}/losses.py:loss" returned a tensor of shape []',
        ),
        ({}, "training.device=cuda", "training.device: this host has no CUDA device"),
        (
            {},
            "checkpoint.resume_from={here}",
            "checkpoint.resume_from: '{here}' is not a checkpoint of this version of",
        ),
    ],
)
def test_missing_and_wrong_inputs_are_named_before_a_start(
    project: Path, files: dict[str, str | None], overrides: str, expected: str
) -> None:
    """Missing and wrong inputs are named before any process starts."""
    for name, content in files.items():
        if content is None:
            (project / name).unlink()
        else:
            (project / name).write_text(content)
    found = problems(project, *overrides.format(here=project).split())
    assert [problem for problem in found if problem.startswith(expected.format(here=project))], found


def test_every_problem_comes_at_once(project: Path) -> None:
    found = problems(project, f"run.directory={project}/train.jsonl", "model.path=absent", "prompts.train=no.jsonl")
    assert [problem.partition(":")[0] for problem in found] == ["model.path", "prompts.train", "run.directory"]


def _bind_below_ephemeral_ports(taken: socket.socket) -> int:
    """Bind a free port that the kernel gives to no other test, and whose neighbours it gives to none. Return it."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000, 7):
        with suppress(OSError):
            taken.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port below 32,000")


def test_port_in_use(project: Path) -> None:
    with socket.socket() as taken:
        port = _bind_below_ephemeral_ports(taken)
        taken.listen()
        in_the_way = f"port {port} of 127.0.0.1 cannot be bound (Address already in use)"
        # The ports of the first engine are base + 3 and base + 4.
        found = problems(project, "transport.kind=tcp", f"transport.port={port - 4}")
        metrics = problems(project, f"metrics.endpoint=tcp://127.0.0.1:{port}")
    assert f"transport.port: {in_the_way} (engine-0.completions): end what uses it, or set transport.port" in found[0]
    assert metrics == [
        f"metrics.endpoint: {in_the_way} (metrics): end what uses it, or set metrics.endpoint to another"
    ]


def test_too_little_memory(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.prepare.preflight.available_memory", lambda: 1 << 30)
    monkeypatch.setattr("streamrl.prepare.preflight.installed_device", lambda: "cpu")
    (problem,) = problems(project)
    assert "memory: this run needs about" in problem
    assert "1.00 GiB can be had: lower engines.count" in problem


def test_engine_not_installed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.prepare.preflight.engine_package", lambda: None)
    monkeypatch.setattr("streamrl.prepare.preflight.installed_version", lambda package: None)
    found = problems(project)
    assert [problem.partition(" is not installed")[0] for problem in found] == ["vllm", "torch", "transformers"]
    found = problems(project, "lora.rank=8", "training.optimizer=adamw_8bit")[-2:]
    assert found[0] == "peft is not installed, and lora.rank = 8 needs it: run `pip install peft`"
    assert found[1].startswith('bitsandbytes is not installed, and training.optimizer = "adamw_8bit" needs it')
    preflight(load_recipe(project / "recipe.toml", ["cluster.kind=ray"]))


def test_a_disk_without_room_for_checkpoints_is_named_early(project: Path) -> None:
    """A disk that cannot take a checkpoint is named before the first training step."""
    free = shutil.disk_usage(project).free / (1 << 30)
    (problem,) = problems(project, f"checkpoint.advanced.min_free_gib={free + 100}")
    assert problem.startswith("checkpoint.advanced.min_free_gib: ")
    assert float(problem.partition(" has ")[2].partition(":")[0]) == pytest.approx(free, abs=2.0)
    assert "make room" in problem
    preflight(
        load_recipe(
            project / "recipe.toml", [f"checkpoint.advanced.min_free_gib={free + 100}", "checkpoint.at_end=false"]
        )
    )


def test_a_run_with_a_checkpoint_of_its_own_needs_no_other(project: Path, tmp_path: Path) -> None:
    recipe = load_recipe(project / "recipe.toml", [f"checkpoint.resume_from={project}"])
    run = tmp_path / "run"
    run.mkdir()
    assert recipe_of_resumed_run(recipe, run) == (recipe, None)
    (run / "checkpoints" / "step-000003").mkdir(parents=True)
    preflight(*recipe_of_resumed_run(recipe, run))


def test_a_checkpoint_to_start_from(project: Path) -> None:
    write_digests(project, [flush_and_digest(project, files_below(project))])
    preflight(load_recipe(project / "recipe.toml", [f"checkpoint.resume_from={project}"]))
    digests = read_digests(project) | {"trainer/shard-00002.safetensors": "0" * 64}
    write_digests(project, [digests])
    (problem,) = problems(project, f"checkpoint.resume_from={project}")
    assert "is damaged: trainer/shard-00002.safetensors is missing; resume from another checkpoint" in problem


def test_an_adapter_on_a_base_that_is_not_bfloat16(project: Path) -> None:
    weights = project / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"BF16", "shape": [12, 8]', b'"F32" , "shape": [12, 4]'))
    (problem,) = problems(project, "lora.rank=8", "lora.sync=adapter")
    assert problem.startswith('lora.sync: "adapter" leaves the base of the engines as it is stored, and ')
    assert problem.endswith('has F32: save the model in bfloat16, which is trained, or set "merged"')


# ---- dry run, check, explain ---------------------------------------------------------------------


def test_dry_run(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = project / "recipe.toml"
    arguments = ["--set", "transport.kind=tcp", "--set", "transport.port=45700"]
    arguments += ["--set", "engines.kind=simulated"]
    assert main(["train", str(recipe), "--dry-run", *arguments]) == 0
    text = capsys.readouterr().out
    assert 'path = "' + str(project / "model") + '"' in text
    assert "batch       4 prompts x 2 samples = 8 trajectories, one optimizer step" in text
    assert "bound       staleness 0: every token is trained by the version that sampled it" in text
    assert 'objective   grpo: surrogate = "token_clip"' in text
    assert "engine-0     started by this run" in text
    shown = text.partition("# the prompt of the first row, as the model will see it\n\n")[2].splitlines()
    assert shown[0].endswith(", 3 tokens: 1, 2, 3") and shown[1:3] == [
        "text        1 2 3",
        "completion  ends with 0 (0)",
    ]
    assert "engine-0.orders        tcp://127.0.0.1:45703" in text
    assert text.endswith("all checks passed; nothing was started\n")
    assert "the model was not tried with vLLM: this host starts no engine of it\n" in text
    assert not (project / "runs").exists()
    resolved = text.partition("# what it adds up to")[0].partition("\n")[2]
    (project / "resolved.toml").write_text(resolved)
    overrides = [text for text in arguments if "=" in text]
    assert load_recipe(project / "resolved.toml") == load_recipe(recipe, overrides)


@pytest.mark.started
def test_dry_run_counts_held_out_prompts_and_explains_streams(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run counts held-out prompts, and says why nothing streams."""
    (project / "held.jsonl").write_text('{"prompt": "1", "answer": "1"}\n\n{"prompt": "2", "answer": "2"}\n')
    (project / "model" / "generation_config.json").write_text('{"eos_token_id": [5]}')
    (project / "recipe.toml").write_text((project / "recipe.toml").read_text().replace("steps = 3\n", ""))
    sets = [
        "engines.kind=simulated",
        "training.epochs=8",
        "evaluation.prompts=held.jsonl",
        "evaluation.samples=3",
        "objective.algorithm=reinforce_plus_plus",
    ]
    arguments = [part for text in sets for part in ("--set", text)]
    assert main(["train", str(project / "recipe.toml"), "--dry-run", *arguments]) == 0
    text = capsys.readouterr().out
    assert "epochs      8.0 of 1 prompts: run.prompts = 8, 2 steps of 4\n" in text
    assert "\nsteps = 2\n" in text
    assert "evaluation  held.jsonl: at the start, at the end; all prompts: 2 x 3 = 6 completions\n" in text
    ends = "generation_config.json: 5; config.json: 0"
    assert f"            files of the model disagree about what ends a completion ({ends}): here 5 does\n" in text
    assert text.count("disagree") == 1
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([{"prompt": f"{n}", "answer": "1"} for n in range(300)]), project / "h.parquet")
    for source, count in (("h.parquet", 300), ("held.jsonl?chat=true", 2)):
        settings = ["--set", f"evaluation.prompts={source}", "--set", "engines.kind=simulated"]
        main(["train", str(project / "recipe.toml"), "--dry-run", *settings])
        assert f"all prompts: {count} x 1 = {count} completions" in capsys.readouterr().out
    assert (
        'streaming   off, although training.advanced.streaming = true: objective.advantages = "batch" compares' in text
    )


def test_dry_run_with_a_problem_still_shows_the_recipe(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(project / "recipe.toml"), "--dry-run", "--set", "model.path=absent"]) == 2
    captured = capsys.readouterr()
    assert "# what it adds up to" in captured.out
    assert captured.err.startswith("error: 1 problem; nothing was started\n  model.path: ")


@pytest.mark.long
def test_check_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert code == (1 if any(finding["state"] == "fail" for finding in findings) else 0)
    assert {"python", "vllm", "memory", "disk"} <= {finding["name"] for finding in findings}


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "rollout.in_flight"]) == 0
    assert 'rollout.in_flight: one of "keep", "recompute", "resume"; default "keep"' in capsys.readouterr().out
    assert main(["explain", "top_p"]) == 0
    assert capsys.readouterr().out.startswith("sampling.top_p: a number > 0 and <= 1; default 1.0")
    assert main(["explain", "objective.algorithm"]) == 0
    assert '  gspo: surrogate = "sequence_clip", advantages = "group_std"' in capsys.readouterr().out
    assert main(["explain"]) == 0
    assert main(["explain", "rollout.in_flihgt"]) == 2
    assert 'did you mean "in_flight"?' in capsys.readouterr().err


# ---- train, with a pipeline that plays a script ---------------------------------------------------


Interrupt = signal.Signals


class ScriptedPipeline:
    """Stands in for the pipeline: plays ``script``; an exception in it is raised, at a signal it waits for a drain."""

    script: ClassVar[list[RunEvent | BaseException | Interrupt]] = []
    run_directory: ClassVar[Path] = Path()
    impatient: ClassVar[bool] = False
    cleaned: ClassVar[bool] = False

    def __init__(self, recipe: Recipe) -> None:
        self.drained = anyio.Event()
        assert recipe.run.name == "small"

    async def __aenter__(self) -> ScriptedPipeline:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.impatient:
            os.kill(os.getpid(), signal.SIGINT)
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)
            type(self).cleaned = True

    def drain(self) -> None:
        self.drained.set()

    async def events(self) -> AsyncIterator[RunEvent]:
        for event in self.script:
            if isinstance(event, Interrupt):
                self.drained = anyio.Event()
                os.kill(os.getpid(), event)
                await self.drained.wait()
                continue
            if isinstance(event, BaseException):
                raise event
            yield event


def run_script(project: Path, monkeypatch: pytest.MonkeyPatch, script: list[Any]) -> int:
    monkeypatch.setattr(streamrl.cli.train, "Pipeline", ScriptedPipeline)
    monkeypatch.setattr(ScriptedPipeline, "script", script)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # below nohup it is ignored, and a run leaves it so
    try:
        return main(["train", str(project)])
    finally:
        signal.signal(signal.SIGHUP, before)


def started(project: Path) -> RunStarted:
    return RunStarted(run_id="r", directory=str(project), metrics_endpoint="", steps=1, parameters=9)


STEP = StepFinished(step=1, policy_version=1, metrics={"reward/mean": 0.5})


def test_a_run_that_cannot_stream_says_so(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (project / "recipe.toml").open("a") as recipe:
        recipe.write("[training]\nupdates_per_batch = 2\n")
    run_script(project, monkeypatch, [started(project), STEP, RunFinished(reason="finished", step=1)])
    before_the_first_step = capsys.readouterr().out.partition("step 1/1")[0]
    assert (
        "streaming off, although training.advanced.streaming = true: training.updates_per_batch = 2"
        in before_the_first_step
    )


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        (RunFinished(reason="drained", step=1), 0, ""),
        (ProcessDied("trainer-0 was killed by SIGKILL"), 1, "error: trainer-0 was killed by SIGKILL\n"),
        (
            ExceptionGroup("nursery", [OSError("x"), ExceptionGroup("inner", [ProcessDied("engine-0 died")])]),
            1,
            "error: engine-0 died\n",
        ),
        (RecipeError("model.path: not there"), 2, "error: 1 problem; nothing was started\n  model.path: not there\n"),
        (STEP, 130, ""),
    ],
    ids=["drained", "died", "group", "recipe", "cut short"],
)
def test_how_a_run_may_end(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: Any, code: int, error: str
) -> None:
    assert run_script(project, monkeypatch, [started(project), end]) == code
    assert capsys.readouterr().err == error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_drains_and_two_end_the_run(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    drained = RunFinished(reason="drained", step=1)
    assert run_script(project, monkeypatch, [started(project), number, STEP, drained]) == 0
    text = capsys.readouterr().out
    assert f"{number.name}: ending after the step that trains now" in text
    assert "drained: 1 of 1 steps" in text
    # The second one finds the run draining: it never comes back from there.
    assert run_script(project, monkeypatch, [started(project), number, number, STEP, drained]) == 130
    assert f"{number.name}: ending at once" in capsys.readouterr().out


def test_a_third_signal_does_not_cut_the_clean_up_short(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedPipeline, "impatient", True)
    number = signal.SIGINT
    assert run_script(project, monkeypatch, [started(project), number, number]) == 130
    assert ScriptedPipeline.cleaned


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        report_error(ZeroDivisionError())


@pytest.mark.parametrize(
    "words",
    [
        "status", "pause", "drain", "show", "samples", "runs", "watch", "report", "trace", "dashboard", "calibrate",
        "sync --to tensorboard", "export --version 2 place",
    ],
)  # fmt: skip
def test_a_place_that_is_no_run_is_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str) -> None:
    """The exit code is 2, as of all wrong input, and the place and the remedy are in one line."""
    command, *options = words.split()
    for place in (tmp_path, tmp_path / "none"):
        assert main([command, str(place), *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(place) in line and "Errno" not in line and any(verb in line for verb in ("name", "give", "write"))


# ---- watch ---------------------------------------------------------------------------------------


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[TelemetryPublisher]:
    publisher = TelemetryPublisher(f"ipc://{tmp_path}/m", run_id="run-9")
    yield publisher
    publisher.close()


def play_to_watcher(publisher: TelemetryPublisher, monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
    joined, receive = threading.Event(), TelemetrySubscriber.receive

    def receive_and_say(subscriber: TelemetrySubscriber, timeout_s: float) -> Telemetry | None:
        message = receive(subscriber, timeout_s)
        joined.set()
        return message

    monkeypatch.setattr(TelemetrySubscriber, "receive", receive_and_say)
    publisher.publish(
        "run", {"state": "started", "steps": 2, "parameters": 7, "metrics_endpoint": "", "directory": "/x"}
    )
    publisher.publish(
        "step", {"step": 1, "policy_version": 1, "metrics": {"reward/mean": 0.25, "optim/grad_norm": None}}
    )

    def finish() -> None:
        # The watcher must have joined: what it gets first is the replay, and only then may the run end.
        joined.wait()
        publisher.publish("unheard", {"of": 1})
        publisher.publish("event", {"event": "engine_lost", "fields": {}})
        publisher.publish("warning", {"step": 1, "message": "look there"})
        publisher.publish("run", {"state": "finished", "reason": "finished", "step": 1})

    thread = threading.Thread(target=finish)
    thread.start()
    return thread


def test_watch_shows_a_run_as_text_and_json(
    publisher: TelemetryPublisher, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = play_to_watcher(publisher, monkeypatch)
    assert main(["watch", publisher.endpoint]) == 0
    thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run run-9: 2 steps, 7 parameters"
    assert lines[3].startswith("step 1/2  reward 0.250  held-out -")
    assert lines[4] == "warning at step 1: look there"
    assert "finished: 1 of 2 steps" in lines[6]
    thread = play_to_watcher(publisher, monkeypatch)
    assert main(["watch", publisher.endpoint, "--json"]) == 0
    thread.join()
    messages = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [message["topic"] for message in messages[-4:]] == ["unheard", "event", "warning", "run"]
    assert [message["replay"] for message in messages[-4:]] == [False] * 4


# ---- the program ---------------------------------------------------------------------------------


def test_the_command_line_is_light() -> None:
    """And so quick: 0.1 s for 180 modules, of which most are Python's own."""
    script = (
        "import streamrl.cli.main, sys; streamrl.cli.main.outline(); print(len(sys.modules)); "
        "print(*(m for m in ('torch', 'vllm', 'zmq', 'numpy', 'rich', 'transformers') if m in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    modules, heavy = result.stdout.splitlines()
    assert heavy == "" and int(modules) < 250


def test_bad_usage_as_a_program() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "streamrl", "train", "absent.toml"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 2
    assert result.stderr == (
        "error: 1 problem; nothing was started\n  absent.toml: no such file; give the path of a recipe (TOML)\n"
    )
