"""S12: a model folder that could run code, or that lies about its size, is refused in words, wherever it is read."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from builders.files import SORT_MODEL as SORT

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.engines.async_llm.options import shared_variables
from streamrl.engines.vllm.options import model_config
from streamrl.pretrained import weight_files
from streamrl.pretrained.model_facts import read_model_facts
from streamrl.pretrained.model_folder import unsafe_content
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.pretrained.weight_files import ModelDirectoryError
from streamrl.rewards.builtin import reward_model
from streamrl.rewards.declared import BadOption

CONFIG = {"hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1, "vocab_size": 8}


def weights(header: object, content: bytes = bytes(16)) -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + content


HONEST = weights({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "model.safetensors").write_bytes(HONEST)
    (directory / "README.md").write_text("a model")
    return directory


def adds(name: str, content: str = "") -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    return change


def asks(file: str, content: dict[str, object]) -> Callable[[Path], None]:
    return adds(file, json.dumps(CONFIG | content))


def links_out(folder: Path) -> None:
    outside = folder.parent / "secret.json"
    outside.write_text("{}")
    (folder / "generation_config.json").symlink_to(outside)


def links_folder_out(folder: Path) -> None:
    (folder / "extra").symlink_to("/etc")


MALICIOUS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a module": (adds("modeling_evil.py", "import os"), "holds code .modeling_evil.py."),
    "a module below": (adds("code/tokenizer.py"), "holds code"),
    "a library": (adds("ops.so"), "holds code .ops.so."),
    "compiled code": (adds("m.pyc"), "holds code"),
    "a pickle beside the weights": (adds("pytorch_model.bin"), r"holds a pickle .pytorch_model.bin."),
    "a torch file": (adds("optimizer.PT"), "holds a pickle"),
    "a checkpoint below": (adds("original/consolidated.00.pth"), "holds a pickle"),
    "a joblib file": (adds("x.joblib"), "holds a pickle"),
    "auto_map": (asks("config.json", {"auto_map": {"AutoModel": "m.M"}}), "auto_map in config.json"),
    "auto_map of the tokenizer": (
        asks("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["t.T", None]}}),
        "auto_map in tokenizer_config.json",
    ),
    "auto_map further in": (asks("config.json", {"text_config": {"auto_map": {"AutoModel": "m.M"}}}), "auto_map"),
    "auto_map of another repository": (asks("config.json", {"auto_map": {"AutoModel": "evil/repo--m.M"}}), "auto_map"),
    "trust_remote_code": (asks("config.json", {"trust_remote_code": True}), "trust_remote_code in config.json"),
    "trust in the generation settings": (asks("generation_config.json", {"trust_remote_code": True}), "trust_remote"),
    "a link that leads out": (links_out, "a link that leads out of it .generation_config.json to "),
    "a folder that leads out": (links_folder_out, "a link that leads out of it .extra to /etc"),
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_a_folder_that_could_run_code_is_refused_by_who_reads_it(folder: Path, name: str) -> None:
    change, said = MALICIOUS[name]
    assert unsafe_content(folder) == "" and read_model_facts(folder).parameters == 4
    change(folder)
    with pytest.raises(ModelDirectoryError, match=said):  # preflight
        read_model_facts(folder)
    with pytest.raises(RecipeError, match=f"model.path: .*{said}"):  # an engine process
        model_config(str(folder))
    with pytest.raises(BadOption, match=said):  # a reward model
        reward_model._labels(folder)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "config": ("config.json", read_model_facts),
    "reward model": ("config.json", reward_model._labels),
    "index": ("model.safetensors.index.json", read_model_facts),
    "tokenizer": ("tokenizer.json", load_tokenizer),
    "settings": ("tokenizer_config.json", load_tokenizer),
    "end tokens": ("generation_config.json", load_tokenizer),
    "template": ("chat_template.jinja", load_tokenizer),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_of_absurd_size_is_refused_before_it_is_read(folder: Path, name: str) -> None:
    file, read = READERS[name]
    shutil.copy(SORT / "tokenizer.json", folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": 1}))
    with (folder / file).open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises((StreamRLError, BadOption), match=f"{file} has {1 << 40} bytes, and at most "):
        read(folder)


@pytest.mark.torch
def test_the_trainer_refuses_foreign_code_before_imports(folder: Path) -> None:
    """The trainer refuses a folder with code before anything is imported for it."""
    torch = pytest.importorskip("torch")
    from streamrl.learning.model.loading import load_policy

    adds("modeling_evil.py", f"open({str(folder / 'ran')!r}, 'w')")(folder)
    asks("config.json", {"model_type": "evil", "auto_map": {"AutoModelForCausalLM": "modeling_evil.M"}})(folder)
    with pytest.raises(StreamRLError, match="holds code"):
        load_policy(str(folder), torch.device("cpu"))
    assert not (folder / "ran").exists()


def test_models_of_the_hub_cache_are_links_and_are_taken(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for index, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, repository / "blobs" / str(index))
        (snapshot / file.name).symlink_to(os.path.relpath(repository / "blobs" / str(index), snapshot))
    assert unsafe_content(snapshot) == ""
    assert read_model_facts(snapshot).parameters == 4
    (snapshot / "pytorch_model.bin").write_bytes(b"pickle")
    assert unsafe_content(snapshot) == "", "other programs put it there, and nothing here reads it"
    (snapshot / "other.json").symlink_to(tmp_path / "elsewhere")
    assert "leads out of it" in unsafe_content(snapshot)


def test_a_model_reached_by_a_link_is_taken(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(folder)
    assert unsafe_content(tmp_path / "latest") == ""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (struct.pack("<Q", 200_000_000) + b"{}", "its header claims 200000000 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "its header claims"),
        (weights({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 39]}}), "it is cut"),
        (weights({"w": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}), "broken model.safetensors"),
        (weights({"w": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}), "broken model.safetensors"),
        (struct.pack("<Q", 20_000) + b"[" * 20_000, "broken model.safetensors"),
        (b"\x80\x04cos\nsystem\n(S'touch ran'\ntR.", "broken model.safetensors"),
    ],
)
def test_lying_weight_files_are_refused_before_allocation(folder: Path, content: bytes, said: str) -> None:
    """Weight files with false sizes are refused before memory is allocated for them."""
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelDirectoryError, match=said):
        read_model_facts(folder)


def test_too_many_tensors_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert weight_files.MOST_TENSORS == 100_000
    monkeypatch.setattr(weight_files, "MOST_TENSORS", 3)
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    (folder / "model.safetensors").write_bytes(weights({str(n): entry for n in range(4)}))
    with pytest.raises(ModelDirectoryError, match="4 tensors, at most 3"):
        read_model_facts(folder)


def test_vllm_listens_on_this_host_and_takes_no_pickles() -> None:
    """S13. Set, not left out: what the user's shell exports must not count."""
    environment = shared_variables("/sockets")
    assert environment["VLLM_HOST_IP"] == "127.0.0.1" and environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0" and environment["VLLM_SERVER_DEV_MODE"] == "0"
    assert environment["VLLM_RPC_BASE_PATH"] == "/sockets"
