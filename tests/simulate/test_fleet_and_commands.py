"""Fleet files, the picture, and the two commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders.files import SORT_RECIPE as RECIPE

from streamrl.base.errors import StreamRLError
from streamrl.cli.main import EXIT_BAD_INPUT, main
from streamrl.recipe.toml_text import toml_document
from streamrl.simulate.fleet import DEMO, PRESETS, load_fleet

SMALL = ["--set", "rollout.prompts_per_batch=4", "--steps", "4", "--warm-up", "1"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_cluster_file_reads_back_equal(name: str, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(toml_document(PRESETS[name]))
    assert load_fleet(str(file)) == load_fleet(name) == PRESETS[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("max_num_seqs = ", "max_runing = "), "max_runing"),
        (("[trainer]", "[trainers]"), "trainers|trainer"),
        (("correlation = 0.65", "correlation = 1.5"), "correlation 1.5"),
        (("cap = 448", 'cap = "long"'), r"lengths\.cap"),
    ],
)
def test_a_wrong_cluster_file_is_refused_by_name(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(toml_document(DEMO).replace(*change))
    with pytest.raises(StreamRLError, match=message):
        load_fleet(str(file))


def test_an_unknown_cluster_names_those_there_are() -> None:
    with pytest.raises(StreamRLError, match=r"neither a file nor one of demo, heavy"):
        load_fleet("dmo")


def test_simulate_compares_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare = "synchronous,tail_batching:tail_batching.response_oversampling=1.25"
    assert main(["simulate", str(RECIPE), *SMALL, "--compare", compare]) == 0
    shown = capsys.readouterr().out
    assert "short" in shown and "goodput" in shown


def test_simulate_compares_rounds_and_systems(capsys: pytest.CaptureFixture[str]) -> None:
    """The command ``simulate`` compares rounds and systems of a recipe that names a system."""
    recipe = RECIPE.parents[1] / "systems" / "rollpacker.toml"
    assert main(["simulate", str(recipe), *SMALL, "--json", "--compare", "synchronous,rollpacker,sortedrl"]) == 0
    rounds = [one["report"]["rounds"] for one in json.loads(capsys.readouterr().out)]
    assert rounds == ["synchronous", "tail_batching", "length_sorted"]


def test_settings_that_the_cluster_decides_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulated = ["simulate", str(RECIPE), *SMALL, "--json"]
    assert main(simulated) == 0
    as_recipe = capsys.readouterr()
    assert "note" not in as_recipe.err
    assert main([*simulated, "--set", "engines.count=3", "--set", "sampling.max_tokens=32"]) == 0
    shorter = capsys.readouterr()
    assert "note: the fleet has 1 engines, whatever the recipe says (engines.count = 3)" in shorter.err
    assert "go up to 448 tokens and are cut at sampling.max_tokens = 32" in shorter.err
    longest = [json.loads(told.out)[0]["report"]["unbiased"]["longest"] for told in (as_recipe, shorter)]
    assert longest[0] > 32 == longest[1]
    assert main([*simulated, "--set", "sampling.max_tokens=460"]) == 0
    assert "no completion is longer than the fleet's 448 tokens" in capsys.readouterr().err


def test_what_if_tells_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["what-if", str(RECIPE), "--steps", "2", "--warm-up", "0", "--json", "--set", "engines.count=3"]
    assert main([*asked, "--set", "rollout.prompts_per_batch=2", "--fleet", "heavy"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert all(
        any(text in note for note in told["notes"])
        for text in ("engines.count = 3", "cut at sampling.max_tokens = 448")
    )


def test_simulate_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(RECIPE), *SMALL, "--fleet", "heavy", "--json"]) == 0
    (outcome,) = json.loads(capsys.readouterr().out)
    assert outcome["fleet"] == "heavy"
    report = outcome["report"]
    assert report["steps"] == 4 and len(report["recent"]) == 4
    assert report["trained_tokens"] == sum(row["trained_tokens"] for row in report["recent"])


def test_a_timeline_has_every_step_and_every_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As chrome://tracing and Perfetto read it: spans of one row follow each other."""
    file = tmp_path / "timeline.json"
    compare = ["--compare", "synchronous,tail_batching", "--timeline", str(file)]
    assert main(["simulate", str(RECIPE), *SMALL, *compare]) == 0
    events = json.loads(file.read_bytes())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert len(named) == 4 and {"synchronous: steps", "tail_batching: engine 0"} <= set(named.values())
    spans = [event for event in events if event["ph"] == "X"]
    steps = [event for event in spans if "rollout" in event["name"]]
    assert len(steps) == 2 * 4, "the warm-up's are left out"
    requests = [event for event in spans if named[event["pid"]] == "synchronous: engine 0"]
    assert len(requests) == 5 * 4 * 8 and not any(event["args"]["stopped"] for event in requests)
    assert any(e["args"]["stopped"] for e in spans if named[e["pid"]] == "tail_batching: engine 0")
    ends: dict[tuple[int, int], float] = {}
    for event in spans:
        row = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(row, 0.0) - 1e-3
        ends[row] = event["ts"] + event["dur"]
    assert main(["simulate", str(RECIPE), *SMALL, "--timeline", str(tmp_path / "no" / "file")]) == EXIT_BAD_INPUT


def test_wrong_input_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(RECIPE), "--compare", "sychronous"]) == EXIT_BAD_INPUT
    assert "'sychronous' is no system and no kind of rounds" in capsys.readouterr().err
    assert main(["simulate", str(RECIPE), "--steps", "0"]) == EXIT_BAD_INPUT
    for command in ("simulate", "what-if"):
        assert main([command, str(RECIPE), "--seed", "-1"]) == EXIT_BAD_INPUT
    assert main(["simulate", str(RECIPE), "--fleet", "nowhere"]) == EXIT_BAD_INPUT
    assert main(["calibrate", str(tmp_path)]) == EXIT_BAD_INPUT
    assert "trace.jsonl" in capsys.readouterr().err
