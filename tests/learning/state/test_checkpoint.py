"""Checkpoints of one rank: exact, whole or absent, and refused with a reason. Several ranks: ``test_ranks.py``."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from streamrl.base.atomic_files import write_sidecar  # noqa: E402
from streamrl.base.errors import StreamRLError  # noqa: E402
from streamrl.learning import process_group  # noqa: E402
from streamrl.learning.options import TrainerOptions  # noqa: E402
from streamrl.learning.state import checkpoint, durable_files  # noqa: E402
from streamrl.learning.state.checkpoint import TrainerState  # noqa: E402
from streamrl.learning.state.optimizer import MasterOptimizer  # noqa: E402
from streamrl.learning.state.published_weights import FullWeights  # noqa: E402
from streamrl.pretrained.tokenizer import load_tokenizer  # noqa: E402

pytestmark = pytest.mark.torch
OPTIONS = TrainerOptions(model_path="", run_id="checkpoint", weights_endpoint="", learning_rate=1e-2)
STATE = TrainerState(policy_version=7, cohort=((8.0, 3.0, 2.5), (4.0, 1.0, 1.0)), skipped_steps=2)
HUGE = 1 << 60


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    process_group.join(OPTIONS, torch.device("cpu"))
    yield
    process_group.leave()


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """What of a model directory is copied: everything but the trained weights."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"torch_dtype": "float32", "hidden_size": 3}))
    (directory / "tokenizer.json").write_text("{}")
    stored = {"a.weight": torch.zeros(3, 5), "expert_bias": torch.arange(4.0) / 3}
    save_file(stored, directory / "model.safetensors")
    return directory


def part(seed: int, steps: int = 0) -> tuple[FullWeights, MasterOptimizer, dict[str, Tensor]]:
    """Weights of odd shapes, an optimizer that took ``steps``, and tensors beside them."""
    torch.manual_seed(seed)
    shapes = {"a.weight": (3, 5), "b.bias": (7,), "c.weight": (2, 3)}
    weights = FullWeights({name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()})
    optimizer = MasterOptimizer(OPTIONS, weights.masters, weights.decayed_places)
    for _ in range(steps):
        optimizer.step(torch.randn_like(weights.masters.full()), 1e-2)
    extra = {"critic.weight": torch.randn(1, 3), "critic.weight.step": torch.tensor(float(steps))}
    return weights, optimizer, extra


def saved(directory: Path, model_path: Path) -> tuple[FullWeights, MasterOptimizer, dict[str, Tensor]]:
    written = part(1, steps=3)
    weights, optimizer, extra = written
    checkpoint.save(directory, weights, optimizer, state=STATE, model_path=model_path, extra=extra)
    return written


def test_a_loaded_checkpoint_goes_on_with_the_same_bits(tmp_path: Path, model_path: Path) -> None:
    weights, optimizer, extra = saved(tmp_path / "step-7", model_path)
    other_weights, other_optimizer, other_extra = part(2)
    state = checkpoint.load(tmp_path / "step-7", other_weights, other_optimizer, extra=other_extra)
    assert state == STATE
    assert other_optimizer.steps == 3
    assert all(torch.equal(other_extra[name], extra[name]) for name in extra)
    for name, moment in optimizer.moments().items():
        assert torch.equal(other_optimizer.moments()[name], moment)
    gradient_L = torch.randn_like(weights.masters.full())
    optimizer.step(gradient_L.clone(), 1e-2)
    other_optimizer.step(gradient_L.clone(), 1e-2)
    assert torch.equal(other_weights.masters.full(), weights.masters.full())

    files = durable_files.files_below(tmp_path / "step-7")
    assert [name for name in files if name.startswith("hf/")] == [
        "hf/config.json",
        "hf/model.safetensors",
        "hf/tokenizer.json",
    ]
    assert json.loads((tmp_path / "step-7" / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    exported = load_file(tmp_path / "step-7" / "hf" / "model.safetensors")
    assert exported["a.weight"].any() and exported["a.weight"].dtype == torch.bfloat16
    assert torch.equal(exported["expert_bias"], torch.arange(4.0) / 3), (
        "what is not trained keeps its bits and its type"
    )
    checkpoint.load(tmp_path / "step-7", *part(2)[:2])  # what it holds besides is not in the way


def test_every_damaged_file_is_named(tmp_path: Path, model_path: Path) -> None:
    directory = tmp_path / "step-7"
    saved(directory, model_path)
    durable_files.verify(directory)
    for name in durable_files.files_below(directory):
        whole = (directory / name).read_bytes()
        (directory / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(StreamRLError, match=rf"is damaged: {re.escape(name)} differs; resume from another"):
            durable_files.verify(directory)
        with pytest.raises(StreamRLError, match=re.escape(name)):
            checkpoint.load(directory, *part(2)[:2])
        (directory / name).write_bytes(whole)
    (directory / "hf" / "tokenizer.json").unlink()
    with pytest.raises(StreamRLError, match=r"hf/tokenizer.json cannot be read \(No such file"):
        checkpoint.load(directory, *part(2)[:2])


def test_it_appears_only_when_everything_in_it_is_on_the_disk(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[int] = set()
    at_rename: list[set[int]] = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def recorded_rename(path: Path, target: Path) -> Path:
        if target == tmp_path / "step-7":
            at_rename.append(set(flushed))
            flushed.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    saved(tmp_path / "step-7", model_path)
    needed = [tmp_path / "step-7", *(tmp_path / "step-7").rglob("*")]
    assert [path for path in needed if path.stat().st_ino not in at_rename[0]] == []
    assert flushed == {tmp_path.stat().st_ino}  # and the rename itself, before save returns


def whole_directory(directory: Path, text: str) -> None:
    directory.mkdir()
    (directory / "a").write_text(text)
    durable_files.write_digests(directory, [durable_files.flush_and_digest(directory, ["a"])])


def test_a_whole_checkpoint_survives_any_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever and however often the writer is killed, a whole checkpoint can be read. Replacing step 4 is killed
    before each of what it does, twice in a row: a whole one can be found every time."""

    class Killed(BaseException):
        pass

    def dying(function: Callable[..., object], countdown: list[int], torn: bool) -> Callable[..., object]:
        def call(path: Path, *rest: object, **named: object) -> object:
            countdown[0] -= 1
            if countdown[0] < 0:
                if torn and path.is_dir():
                    (path / "a").unlink(missing_ok=True)  # as a removal is that is killed in the middle
                raise Killed
            return function(path, *rest, **named)

        return call

    def killed(root: Path, text: str, at: int) -> bool:
        step, partial, countdown = root / "checkpoints" / "step-000004", root / "checkpoints" / ".partial", [at]
        shutil.rmtree(partial, ignore_errors=True)
        whole_directory(partial, text)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", dying(Path.rename, countdown, torn=False))
            patch.setattr(durable_files, "flush_directory", dying(durable_files.flush_directory, countdown, torn=False))
            patch.setattr(shutil, "rmtree", dying(shutil.rmtree, countdown, torn=True))
            try:
                durable_files.move_into_place(partial, step)
            except Killed:
                return True
            return False

    for first, second in itertools.product(range(6), range(6)):
        root = tmp_path / f"{first}-{second}"
        (root / "checkpoints").mkdir(parents=True)
        whole_directory(root / "checkpoints" / "step-000004", "one")
        (root / "checkpoints" / "latest").symlink_to("step-000004")
        deaths = killed(root, "two", first) + killed(root, "three", second)
        found = durable_files.newest_checkpoint(root)
        assert found is not None, (first, second)
        assert (found / "a").read_text() in {"one", "two", "three"}
        assert not killed(root, "four", 100)
        assert sorted(path.name for path in (root / "checkpoints").iterdir()) == ["latest", "step-000004"]
        assert (root / "checkpoints" / "step-000004" / "a").read_text() == "four"
    assert deaths == 0, "the last pair was killed nowhere"


def test_files_set_aside_by_a_crash_get_their_name_again(tmp_path: Path) -> None:
    """A checkpoint that a crash left aside, of another version, gets its name again."""
    whole_directory(tmp_path / ".step-000004.replaced", "the only one")
    whole_directory(tmp_path / ".step-000006.replaced", "replaced already")
    whole_directory(tmp_path / "step-000006", "six")
    whole_directory(tmp_path / ".step-000008.partial", "eight")
    durable_files.move_into_place(tmp_path / ".step-000008.partial", tmp_path / "step-000008")
    kept = {path.name: (path / "a").read_text() for path in tmp_path.iterdir()}
    assert kept == {"step-000004": "the only one", "step-000006": "six", "step-000008": "eight"}


def test_controller_files_go_with_a_failed_write(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the controller are listed with digests, and are removed with a write that fails."""
    directory = tmp_path / "checkpoints" / "step-7"
    weights, optimizer, _ = part(1)

    def save() -> None:
        beside = write_sidecar(directory, {"control.msgpack": b"kept"})
        checkpoint.save(directory, weights, optimizer, state=STATE, model_path=model_path, sidecar_digests=beside)

    save()
    assert (directory / "control.msgpack").read_bytes() == b"kept"
    assert "control.msgpack" in durable_files.read_digests(directory)
    assert [path.name for path in directory.parent.iterdir()] == ["step-7"]

    monkeypatch.setattr(checkpoint, "HuggingFaceStorageWriter", lambda path, **_: _writer_that_fails(path))
    with pytest.raises(StreamRLError, match="No space left"):
        save()
    assert [path.name for path in directory.parent.iterdir()] == ["step-7"]


@pytest.mark.parametrize("failing", ["save_hugging_face", "_write_tensors"])
def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    directory = tmp_path / "checkpoints" / "step-7"
    weights, optimizer, _ = saved(directory, model_path)
    if failing == "save_hugging_face":

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(checkpoint, failing, full)
        reason = "No space left"
    else:
        monkeypatch.setattr(checkpoint, "HuggingFaceStorageWriter", lambda path, **_: _writer_that_fails(path))
        reason = "cannot write checkpoint files .* rank 0: .*No space left"
    optimizer.step(torch.ones_like(weights.masters.full()), 1e-2)
    with pytest.raises(StreamRLError, match=reason):
        checkpoint.save(directory, weights, optimizer, state=STATE, model_path=model_path)
    assert [path.name for path in directory.parent.iterdir()] == ["step-7"]
    durable_files.verify(directory)


def _writer_that_fails(path: str) -> object:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    class Full(HuggingFaceStorageWriter):
        def write_data(self, *_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return Full(path, save_distributed=True)


def test_a_disk_that_would_be_too_full_is_refused(tmp_path: Path, model_path: Path) -> None:
    """A disk that would become too full is refused with numbers."""
    weights, optimizer, _ = part(1)
    where = tmp_path / "checkpoints"
    with pytest.raises(StreamRLError) as refused:
        checkpoint.save(where / "a", weights, optimizer, state=STATE, model_path=model_path, min_free_bytes=HUGE)
    assert re.search(
        r"takes 0\.00 GiB and [\d.]+ GiB are free there: less than 1073741824\.00 GiB "
        r"\(checkpoint\.advanced\.min_free_gib\)",
        str(refused.value),
    )
    assert list(where.iterdir()) == []
    # 28 elements: master and two moments in float32, published in bfloat16; 16 bytes that are not trained, as a tower
    needed = 28 * 14 + 16
    free = checkpoint.shutil.disk_usage(tmp_path).free
    usage = type(checkpoint.shutil.disk_usage(tmp_path))
    for spare, fits in ((0, True), (-1, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint.shutil, "disk_usage", lambda _, n=spare: usage(free, 0, 1000 + needed + n))
            try:
                checkpoint.save(
                    where / "b", weights, optimizer, state=STATE, model_path=model_path, min_free_bytes=1000
                )
                assert fits
            except StreamRLError:
                assert not fits


def test_a_crash_between_renames_loses_nothing(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between the renames of a replacement loses nothing."""
    saved(tmp_path / "step-7", model_path)
    (tmp_path / "latest").symlink_to("step-7")
    rename = Path.rename

    def crash(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", crash)
        saved(tmp_path / "step-7", model_path)
    assert not (tmp_path / "step-7").exists()
    assert checkpoint.load(tmp_path / "latest", *part(2)[:2]) == STATE
    saved(tmp_path / "step-7", model_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "model", "step-7"]


def test_what_does_not_fit_is_refused_with_a_remedy(tmp_path: Path, model_path: Path) -> None:
    weights, optimizer, extra = part(1)
    directory = tmp_path / "step-1"
    checkpoint.save(directory, weights, optimizer, state=STATE, model_path=model_path)
    with pytest.raises(StreamRLError, match=r"has no tensors critic.weight, critic.weight.step, .*objective.algorithm"):
        checkpoint.load(directory, weights, optimizer, extra=extra)
    other = FullWeights({"a.weight": nn.Parameter(torch.zeros(4, 5))})
    with pytest.raises(StreamRLError, match="does not fit this model"):
        checkpoint.load(directory, other, MasterOptimizer(OPTIONS, other.masters, other.decayed_places))
    with pytest.raises(StreamRLError, match=r"'digests' cannot be read .*; give a step directory"):
        checkpoint.load(tmp_path / "model", weights, optimizer)
    scalars = directory / checkpoint.SCALARS
    scalars.write_bytes(msgspec.msgpack.encode({"format": 99}))
    digests = [durable_files.flush_and_digest(directory, durable_files.files_below(directory))]
    durable_files.write_digests(directory, digests)
    with pytest.raises(StreamRLError, match="has format 99; this version reads 2"):
        checkpoint.load(directory, weights, optimizer)


SHORT = "{% for m in messages %}{{ m.content }}{% endfor %}"
FOLDERS: dict[str, dict[str, Any]] = {
    "named templates": {
        "chat_template.jinja": f"{{{{ bos_token }}}}{SHORT}",
        "additional_chat_templates/tool_use.jinja": f"{{{{ tools | length }}}}{SHORT}",
    },
    "templates in the configuration": {
        "tokenizer_config.json": {"chat_template": [{"name": "default", "template": SHORT}]}
    },
    "older files": {
        "tokenizer_config.json": {"chat_template": f"{{{{ bos_token }}}}{SHORT}"},
        "special_tokens_map.json": {"bos_token": "<bos>", "eos_token": "<eos>"},
        "added_tokens.json": {"<new>": 32},
    },
    "ends in three files": {
        "generation_config.json": {"eos_token_id": [1]},
        "config.json": {"eos_token_id": 2},
        "chat_template.jinja": SHORT,
    },
}


@pytest.mark.parametrize("name", FOLDERS)
def test_prompts_of_a_checkpoint_are_those_of_its_model(tmp_path: Path, name: str) -> None:
    model = Path(shutil.copytree("examples/sort/model", tmp_path / "model"))
    for file, content in FOLDERS[name].items():
        path = model / file
        path.parent.mkdir(exist_ok=True)
        known = json.loads(path.read_text()) if path.suffix == ".json" and path.is_file() else {}
        path.write_text(content if isinstance(content, str) else json.dumps(known | content))
    checkpoint.save_hugging_face(tmp_path / "hf", {"w": torch.zeros(1, dtype=torch.bfloat16)}, model)
    before, after = load_tokenizer(model), load_tokenizer(tmp_path / "hf")
    chat, tools = [{"role": "user", "content": "1,2:"}], [{"type": "function", "function": {"name": "f"}}]
    for used in (None, tools):
        assert after.encode_chat(chat, used) == before.encode_chat(chat, used)
    assert (after.digest, after.eos_token_ids) == (before.digest, before.eos_token_ids)
