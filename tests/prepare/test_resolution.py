"""Names of the Hub in a recipe, resolved against a Hub on loopback by the process that asks it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from builders.files import SORT_MODEL as MODEL
from builders.hub import CONVERTED, TOKEN, LocalHub
from msgspec import structs

from streamrl.base.errors import RecipeError
from streamrl.prepare.hub.resolution import hub_looked_up, with_hub_folders
from streamrl.pretrained.weight_files import stored_tensors
from streamrl.processes.local_launcher import LocalLauncher
from streamrl.recipe.objective import Objective
from streamrl.recipe.rewards import Reward
from streamrl.recipe.rules.load_recipe import dump_recipe, load_recipe
from streamrl.recipe.sections import Engines, Evaluation, EvaluationSet, Recipe
from streamrl.recipe.served_models import Judge
from streamrl.recipe.topology import ProcessPlan, Role

CARD = b"---\nconfigs:\n" + b"".join(
    b"- config_name: %s\n  data_files:\n  - split: train\n    path: %s/tr*\n  - split: test\n    path: %s/te*\n"
    % (n, n, n)
    for n in (b"main", b"socratic")
)
ROWS = {"main/train.jsonl": b'{"question": "1"}\n', "main/test.jsonl": b"x", "socratic/train.jsonl": b"x"}
CLOSED = "http://127.0.0.1:9"
LIMIT_S = 30
"""The libraries alone take 35 s to say that there is no network."""


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    with LocalHub() as hub:
        yield hub


@pytest.fixture(autouse=True)
def client(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and a Hub with everything."""
    for name, value in hub.environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "60")  # a machine may be busy
    hub.repositories.clear(), hub.faults.clear(), hub.requests.clear()
    hub.says_sizes = True
    files = {path.name: path.read_bytes() for path in MODEL.iterdir()} | {"pytorch_model.bin": b"pickle"}
    files["additional_chat_templates/../../../../out.json"] = b"{}"  # a name that leads out of the cache
    for name, marks in {"org/tiny": {}, "org/gated": {"gated": True}, "org/private": {"private": True}}.items():
        hub.commit(name, files, **marks)
    hub.commit("org/pickles", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    hub.commit("datasets/org/rows", {"README.md": CARD + b"---\n"} | ROWS)
    hub.commit("datasets/org/tables", {"all.csv": b"question\n1\n"})
    hub.commit("datasets/org/tables", {"default/train/0000.parquet": b"PAR1"}, ref=CONVERTED)


def recipe(model: str = "org/tiny", prompts: str = "t.jsonl") -> Recipe:
    return load_recipe({"model": {"path": model}, "prompts": {"train": prompts}, "rewards": [{"function": "m:f"}]})


def refused(model: str = "org/tiny", prompts: str = "t.jsonl") -> str:
    began = time.monotonic()
    with pytest.raises(RecipeError) as error:
        with_hub_folders(recipe(model, prompts))
    assert time.monotonic() - began < LIMIT_S
    [problem] = error.value.problems
    assert "Hub" in problem and "\n" not in problem and TOKEN not in problem
    return problem


@pytest.mark.parametrize(
    ("named", "environment", "fault", "said"),
    [
        ({}, {"HF_ENDPOINT": CLOSED}, None, ("cannot be reached", "`hf download org/tiny`", "HF_ENDPOINT to a mirror")),
        ({}, {"HF_HUB_OFFLINE": "1"}, None, ("HF_HUB_OFFLINE is set", "neither a folder nor in", "unset it")),
        ({"model": "org/none"}, {}, None, ("no model of that name, or it is private", "`hf auth login`")),
        ({"model": "org/private"}, {"HF_TOKEN": "hf_of_another"}, None, ("the token that is set may not read it",)),
        (
            {"model": "org/gated"},
            {},
            None,
            ("org/gated of the Hub is gated: ask for access at http", "`hf auth login`"),
        ),
        ({"model": "org/gated"}, {"HF_TOKEN": "hf_of_another"}, None, ("is gated", "with another token")),
        ({"model": "org/tiny@v2"}, {}, None, ('has no revision "v2"', "/org/tiny/commits/main")),
        ({"model": "org/tiny@0123abcd"}, {}, None, ('"0123abcd": a commit is written with all its 40 digits',)),
        ({}, {}, 503, ("answers 503", "try again later")),
        ({}, {}, 429, ("answers 429 (too many requests)", "`hf auth login`")),
        ({}, {}, 401, ("does not know the token that is set", "`hf auth login`")),
        ({}, {}, "hang", ("does not answer", "HF_HUB_ETAG_TIMEOUT")),
        ({}, {"HF_HUB_ETAG_TIMEOUT": "1"}, "hang", ("does not answer",)),
        ({"model": "hf:a/b/c"}, {}, None, ('model.path: "hf:a/b/c" is no name of the Hub', "owner/name")),
        ({"model": "org/pickles"}, {}, None, ("has no .safetensors weights", "convert it")),
        ({"prompts": "hf:org/none"}, {}, None, ("prompts.train: org/none", "no dataset of that name")),
        ({"prompts": "hf:org/rows"}, {}, None, ("several configurations: set ?config=NAME", "main, socratic")),
        ({"prompts": "hf:org/rows?config=x&split=y"}, {}, None, ('no configuration "x"',)),
        ({"prompts": "hf:org/rows?config=main&split=y"}, {}, None, ('no split "y"', "train, test")),
        ({"prompts": "hf:org/tables?split=y"}, {}, None, ('no split "y"', "with one of train")),
    ],
)
def test_what_cannot_be_had(
    named: dict[str, str],
    environment: Mapping[str, str],
    fault: int | str | None,
    said: tuple[str, ...],
    hub: LocalHub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fault == "hang":
        monkeypatch.delenv("HF_HUB_ETAG_TIMEOUT")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    hub.faults |= {"/api/models/org/tiny": fault} if fault else {}
    problem = refused(**named)
    assert all(words in problem for words in said), problem


@pytest.mark.started
@pytest.mark.long
def test_downloads_are_minimal_and_pinned(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the needed files are downloaded, once, and a moved branch changes nothing that is pinned."""
    prompts = "hf:org/rows?config=main&split=train&prompt=question"
    first = with_hub_folders(recipe(prompts=prompts))
    folder = Path(first.model.path)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in MODEL.iterdir())
    assert folder.name == hub.repositories["org/tiny"].refs["main"]
    assert first.prompts.train.endswith("?files=main/train.jsonl&prompt=question")
    asked = {request.path.rpartition("/")[2] for request in hub.requests}
    assert not asked & {"pytorch_model.bin", "test.jsonl"} and len({request.process for request in hub.requests}) == 1
    hub.commit("org/tiny", {"config.json": b"{}", "model.safetensors": b"x"})
    hub.requests.clear()
    assert with_hub_folders(first) == first
    assert with_hub_folders(recipe(f"org/tiny@{folder.name}")).model.path == first.model.path
    assert not hub.requests, "a commit that is cached asks nobody"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert with_hub_folders(recipe()).model.path == first.model.path, "what the branch was"
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    assert with_hub_folders(recipe()).model.path != first.model.path
    folder.rename(tmp_path / "gone")
    hub.requests.clear()
    assert with_hub_folders(first) == first and folder.is_dir(), "an earlier life's commit is fetched again"
    assert all(folder.name in request.path for request in hub.requests)


def test_a_hub_that_does_not_answer_is_asked_once(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_ETAG_TIMEOUT")
    hub.faults |= {"/api/models": "hang", "/api/datasets": "hang"}
    with pytest.raises(RecipeError) as error:
        with_hub_folders(recipe(prompts="hf:org/rows"))
    assert [problem.partition(":")[0] for problem in error.value.problems] == ["prompts.train", "model.path"]
    assert len(hub.requests) == 1


@pytest.mark.long
def test_every_place_of_a_name(hub: LocalHub) -> None:
    drafts = {
        "args": {"speculative_config": {"method": "draft_model", "model": "org/tiny", "num_speculative_tokens": 2}}
    }
    named = structs.replace(
        recipe(),
        evaluation=Evaluation(prompts={"a": "hf:org/tables", "b": EvaluationSet(prompts="hf:org/tables?split=train")}),
        judge=Judge(model="org/tiny"),
        objective=Objective(kl_coefficient=0.1, reference="org/tiny"),
        rewards=(Reward(function="reward_model", options={"path": "org/tiny"}),),
        engines=msgspec.convert(drafts, Engines),
    )
    with hub_looked_up(named) as found:
        text = dump_recipe(found.recipe)
        assert (
            "org/tiny" not in text and "hf:" not in text and text.count(found.recipe.model.path.rpartition("/")[2]) == 5
        )
        assert dump_recipe(found.pinned(found.recipe)).count("hf:org/") == 7
    asked = [request.path for request in hub.requests if request.path == "/api/models/org/tiny"]
    assert len(asked) == 1, "each repository once"


def test_other_formats_come_as_the_hub_converts_them() -> None:
    assert with_hub_folders(recipe(prompts="hf:org/tables")).prompts.train.endswith("?files=default/train/0000.parquet")


def fill(hub: LocalHub, code: str) -> None:
    """Fill the cache as another program does, in a process of its own."""
    subprocess.run([sys.executable, "-c", f"from huggingface_hub import *\n{code}"], check=True, capture_output=True)


@pytest.mark.parametrize("how", ["file by file", "by an older huggingface_hub", "by hand", "without refs"])
@pytest.mark.parametrize("pinned", [False, True])
def test_a_cache_that_others_filled(
    how: str, pinned: bool, hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers needs neither the README nor a list of all files; an older huggingface_hub writes no such list."""
    names = [path.name for path in MODEL.iterdir()]
    storage = tmp_path / "home" / "hub" / "models--org--tiny"
    if how == "file by file":
        fill(hub, f"for name in {names}: hf_hub_download('org/tiny', name)")
    else:
        fill(hub, "snapshot_download('org/tiny', ignore_patterns='*out.json')")
    ref = storage / "refs" / "main"
    commit = ref.read_text()
    if how == "by an older huggingface_hub":
        shutil.rmtree(storage / "trees")
    if how == "by hand":
        ref.write_text(f"{commit}\n")
    if how == "without refs":
        shutil.rmtree(storage / "refs")
    named = f"org/tiny@{commit}" if pinned else "org/tiny"
    for variable, value in {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": CLOSED}.items():
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert with_hub_folders(recipe(named)).model.path == str(storage / "snapshots" / commit)


def test_a_part_of_a_repository_in_the_cache_is_named(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.commit("datasets/org/sharded", {f"train-0000{n}-of-00002.jsonl": b'{"prompt": "1"}\n' for n in range(2)})
    fill(hub, "hf_hub_download('org/tiny', 'config.json')")
    fill(hub, "hf_hub_download('org/sharded', 'train-00001-of-00002.jsonl', repo_type='dataset')")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    problem = refused()
    assert "lacks .safetensors weights, and the Hub: run `hf download org/tiny --revision" in problem
    problem = refused("/", "hf:org/sharded?split=train")
    assert "of the Hub has 1 of the 2 files train-*-of-00002: download it again" in problem


def test_a_table_that_others_put_into_the_cache_is_read(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """``datasets`` takes the file itself, where this program would take the parquet copy."""
    hub.commit("datasets/org/set", {"train.csv": b"prompt\n1\n"})
    fill(hub, "hf_hub_download('org/set', 'train.csv', repo_type='dataset')")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert with_hub_folders(recipe("/", "hf:org/set?split=train")).prompts.train.endswith("?files=train.csv")


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({f"data/a-0000{n}-of-00002.jsonl": b"{}" for n in range(2)}, "?files=data/a-*-of-00002.jsonl"),
        ({"train.json": b"[]", "metadata.jsonl": b"{}"}, "?files=default/train/0000.parquet"),
        ({"train.csv": b"", "logs/debug.jsonl": b"{}"}, "?files=default/train/0000.parquet"),
        ({"train.jsonl.gz": b"", "samples.jsonl": b"{}"}, "?files=default/train/0000.parquet"),
        ({"rows.py": b""}, "?files=default/train/0000.parquet"),
        ({"rows-17k.parquet": b"PAR1"}, "?files=rows-17k.parquet"),
    ],
)
@pytest.mark.parametrize("at", ["", "@main"])
def test_the_files_that_are_the_data_set(files: dict[str, bytes], end: str, at: str, hub: LocalHub) -> None:
    hub.commit("datasets/org/set", files)
    hub.commit("datasets/org/set", {"default/train/0000.parquet": b"PAR1"}, ref=CONVERTED)
    assert with_hub_folders(recipe("/", f"hf:org/set{at}")).prompts.train.endswith(end)


def test_a_set_without_a_copy_is_read_or_refused(hub: LocalHub) -> None:
    hub.commit("datasets/org/set", {"train.csv": b"prompt\n1\n", "test.csv": b"prompt\n"})
    assert with_hub_folders(recipe("/", "hf:org/set?split=train")).prompts.train.endswith("?files=train.csv")
    hub.commit("datasets/org/set", {"train.jsonl.gz": b"", "a.jsonl": b"{}"})
    problem = refused("/", "hf:org/set")
    assert "has no parquet, JSON or CSV files there (it has train.jsonl.gz), and no parquet copy" in problem


def test_a_part_that_the_hub_converted_is_said(hub: LocalHub, capfd: pytest.CaptureFixture[str]) -> None:
    hub.commit("datasets/org/set", {"train.csv": b"prompt\n1\n"})
    hub.commit("datasets/org/set", {"default/partial-train/0000.parquet": b"PAR1"}, ref=CONVERTED)
    assert "/partial-train/" in with_hub_folders(recipe("/", "hf:org/set?split=train")).prompts.train
    assert "a partial copy: the Hub has converted only the first part of the data set" in capfd.readouterr().err


def test_a_private_model_with_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (Path(with_hub_folders(recipe("org/private")).model.path) / "config.json").is_file()


def test_the_dry_run_takes_headers_for_weights(hub: LocalHub) -> None:
    with hub_looked_up(recipe()) as found:
        stand_in = Path(found.recipe.model.path)
        shapes = {name: (one.dtype, one.shape) for name, one in stored_tensors(stand_in).items()}
        assert shapes == {name: (one.dtype, one.shape) for name, one in stored_tensors(MODEL).items()}
        assert (stand_in / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
    assert not stand_in.exists() and found.pinned(found.recipe).model.path == f"hf:org/tiny@{stand_in.name}"
    assert "0.61 MB, of which 0.60 MB would be downloaded" in found.lines[0]
    whole = [request for request in hub.requests if request.path.endswith(".safetensors") and not request.range]
    assert not [request for request in whole if request.method == "GET"]


@pytest.mark.long
def test_a_download_that_breaks_off_is_no_model(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults["/org/tiny/resolve"] = "cut"
    assert "try again" in refused()
    hub.faults.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert f"the copy of org/tiny@{hub.repositories['org/tiny'].refs['main']} in" in refused()
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    hub.requests.clear()
    model = Path(with_hub_folders(recipe()).model.path) / "model.safetensors"
    assert model.read_bytes() == (MODEL / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("given", "seen"), [("", "1"), ("0", "0")])
def test_processes_of_a_run_do_not_ask(given: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``0``: of a user whose own code asks."""
    monkeypatch.setenv("HF_HUB_OFFLINE", given)
    (tmp_path / "logs").mkdir()
    command = [sys.executable, "-c", "import os; print(os.environ['HF_HUB_OFFLINE'])"]
    plan = ProcessPlan(role=Role.ENGINE, index=0)
    child = LocalLauncher(command, tmp_path, tmp_path).start(plan)
    while child.running:
        time.sleep(0.01)
    assert child.exit_code == 0 and child.log.read_text() == f"{seen}\n"


@pytest.mark.long
@pytest.mark.parametrize("says_sizes", [True, False])
def test_a_full_disk(says_sizes: bool, hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the download where sizes are known, and in the middle of it."""
    hub.says_sizes = says_sizes
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True)
    if made.returncode:
        pytest.skip(f"this user may not mount: {made.stderr.decode().strip()}")
    try:
        monkeypatch.setenv("HF_HUB_CACHE", str(disk / "hub"))
        problem = refused()
        assert f"{disk}/hub has no room for org/tiny" in problem and "set HF_HOME to another disk" in problem
        assert ("GB are needed" in problem) == says_sizes
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        assert (Path(with_hub_folders(recipe()).model.path) / "model.safetensors").is_file()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
