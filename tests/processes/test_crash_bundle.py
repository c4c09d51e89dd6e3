"""The crash bundle: what is in it, what is not, and that it is whole."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from streamrl.base.errors import StreamRLError
from streamrl.processes.crash_bundle import SUMMARY, read_manifest, write_crash_bundle

CANARIES = {"HF_TOKEN": "canary-hub-0123", "WANDB_API_KEY": "canary-tracker-0123", "JUDGE": "canary-judge-0123"}
SECRET_OPTION = "canary-option-0123"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run that wrote its secrets into everything that it writes."""
    directory = tmp_path / "sort-1"
    for folder in ("logs", "exit", "stalls"):
        (directory / folder).mkdir(parents=True)
    leak = " ".join([*CANARIES.values(), SECRET_OPTION])
    recipe = f'[[rewards]]\nfunction = "judge"\nvariables = ["JUDGE"]\n[rewards.options]\napi_key = "{SECRET_OPTION}"\n'
    (directory / "recipe.toml").write_text(recipe)
    (directory / "control.key").write_text("the key of the control socket")
    for name in ("topology.json", "metrics.jsonl", "exit/engine-0.json", "stalls/1.txt"):
        (directory / name).write_text(f'{{"said": "{leak}"}}\n')
    (directory / "logs" / "engine-0.log").write_text(f"first\n{leak}\n" + "x" * (600 << 10) + "\nlast line\n")
    return directory


def contents(bundle: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(bundle) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_bundle_holds_what_tells_and_no_secret(run: Path) -> None:
    shown = {"VLLM_X": f"with {CANARIES['HF_TOKEN']}", "OMP_X": CANARIES["JUDGE"]}
    variables = {**CANARIES, **shown, "HOME": "/home/somebody", "MAIL": "me@x.org"}
    bundle = write_crash_bundle(run, f"engine-0 died of {CANARIES['JUDGE']}", variables=variables)
    files = contents(bundle)
    told = {"recipe.toml", "topology.json", "metrics.jsonl", "exit/engine-0.json", "stalls/1.txt"}
    assert set(files) == {*told, "logs/engine-0.log", "bundle.json"}, "and neither the key nor anything else"
    for secret in (*CANARIES.values(), SECRET_OPTION, "/home/somebody", "me@x.org"):
        assert not [name for name, content in files.items() if secret.encode() in content], secret
    manifest = read_manifest(bundle)
    assert manifest.failure == "engine-0 died of [JUDGE removed]" and manifest.run_id == "sort-1"
    assert manifest.harmless_variables == {"VLLM_X": "with [HF_TOKEN removed]", "OMP_X": "[JUDGE removed]"}
    assert set(manifest.variable_names) == set(variables)
    assert "msgspec" in manifest.versions
    assert files["logs/engine-0.log"].endswith(b"last line\n") and b"first" not in files["logs/engine-0.log"]
    assert any(text.startswith("logs/engine-0.log: its first") for text in manifest.left_out)
    assert bundle.stat().st_mode & 0o077 == 0, "for its owner to pass on"


def test_a_bundle_respects_its_limit_and_lists_omissions(run: Path) -> None:
    """A crash bundle never exceeds its limit, and lists the files that are missing."""
    (run / "metrics.jsonl").write_bytes(os.urandom(1 << 18).hex().encode())
    limit = 600 << 10
    bundle = write_crash_bundle(run, "failed", variables={}, largest=limit)
    assert bundle.stat().st_size <= limit
    files, manifest = contents(bundle), read_manifest(bundle)
    assert "metrics.jsonl" not in files and "recipe.toml" in files
    assert "metrics.jsonl: the bundle is full" in manifest.left_out
    assert any(text.startswith(f"{SUMMARY}: error: ") for text in manifest.left_out), "a run without a journal"
    assert "metrics.jsonl" in contents(write_crash_bundle(run, "failed", variables={}))


def test_two_in_one_second_and_nothing_half_written(run: Path) -> None:
    bundles = [write_crash_bundle(run, "failed", variables={}, now=0.0) for _ in range(2)]
    assert len(set(bundles)) == 2
    assert sorted(path.name for path in (run / "crash").iterdir()) == sorted(path.name for path in bundles)


def test_a_run_that_wrote_nothing_has_a_bundle(tmp_path: Path) -> None:
    assert read_manifest(write_crash_bundle(tmp_path, "nothing began", variables={})).failure == "nothing began"


def test_a_file_that_cannot_be_written_leaves_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_crash_bundle(run, "failed", variables={})
    assert list((run / "crash").iterdir()) == []


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(b"PK nonsense")
    with pytest.raises(StreamRLError, match="not a crash bundle"):
        read_manifest(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bundle.json", b'{"schema": 99}')
    with pytest.raises(StreamRLError, match="not a crash bundle"):
        read_manifest(path)
