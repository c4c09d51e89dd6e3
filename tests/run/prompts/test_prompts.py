"""Prompts from files and from user code, and what a user reads when they are wrong. Also the tokenizer."""

from __future__ import annotations

import asyncio
import json
import os
import textwrap
from pathlib import Path

import pytest
from builders.pretrained import tokenizer_json, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.types import Prompt, token_array
from streamrl.pretrained.tokenizer import Tokenizer, load_tokenizer
from streamrl.run.prompts.json_rows import decode_row
from streamrl.run.prompts.open_prompts import OpenPrompts, check_prompts, open_prompts
from streamrl.run.prompts.prompt_rows import BadRow, read_prompt

LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"
SPECIAL = ("<pad>", "<eos>", "<unk>", "<bos>")


def tokenizer_text(**changes: object) -> str:
    return json.dumps(tokenizer_json(SPECIAL, LETTERS, bos=3) | changes)


def write_model(directory: Path, text: str | None = None) -> Path:
    write_tokenizer(directory, {})
    (directory / "tokenizer.json").write_text(text or tokenizer_text())
    return directory


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def write_rows(tmp_path: Path):
    def write(*rows: object, name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "my_prompts.py"
    path.write_text(
        textwrap.dedent("""
            import asyncio, itertools, pathlib, sys, threading, time
            rows = [{"prompt": f"p{i}", "answer": i} for i in range(5)]
            thread = {}
            closed = []
            gate = threading.Event()
            def generate():
                thread["name"] = threading.current_thread().name
                try:
                    for i in itertools.count():
                        yield {"prompt": f"p{i}", "answer": i, "pair": (i, i)}
                finally:
                    closed.append("generate")
            async def agenerate():
                try:
                    for i in range(7):
                        await asyncio.sleep(0.001)
                        yield {"prompt": f"p{i}", "answer": i}
                finally:
                    closed.append("agenerate")
            async def opens():
                return iter(rows)
            class Dataset:
                def __aiter__(self):
                    return agenerate()
            def gated():
                yield rows[0]
                gate.wait()
                yield rows[1]
                yield rows[2]
            async def agated():
                yield rows[0]
                while not gate.is_set():
                    await asyncio.sleep(0.01)
                yield rows[1]
                yield rows[2]
            def blocks():
                time.sleep(600)
                yield rows[0]
            def waits():
                here = pathlib.Path(__file__).parent
                try:
                    while not (here / "go").exists():
                        time.sleep(0.01)
                    yield rows[0]
                    yield rows[1]
                finally:
                    (here / "closed").touch()
            def raises():
                yield rows[0]
                raise ValueError("disk gone\\nmore")
            def exits():
                yield rows[0]
                sys.exit(4)
            def bad_row():
                yield rows[0]
                yield {"answer": 1}
            def empty():
                return []
            def opaque():
                yield {"prompt": "a", "answer": object()}
            def number():
                return 3
            def live():
                return iter(rows)
            live.live = True
            """)
    )
    return path


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.columns["prompt"] for prompt in prompts]


async def draw_all(source: OpenPrompts, *counts: int) -> list[list[Prompt]]:
    try:
        return [await source.draw(count) for count in counts]
    finally:
        await source.aclose()


# ---- tokenizer -----------------------------------------------------------------------------------


def test_truncation_and_padding_of_tokenizers_are_off(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Truncation and padding of the tokenizer's file are off, and not in the digest."""
    cut = tokenizer_text(
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                 "pad_type_id": 0, "pad_token": "<pad>"},
    )  # fmt: skip
    other = load_tokenizer(write_model(tmp_path / "cut", cut))
    assert other.encode("abcd") == token_array([3, 4, 5, 6, 7])
    assert other.digest == tokenizer.digest
    indented = load_tokenizer(write_model(tmp_path / "indented", json.dumps(json.loads(tokenizer_text()), indent=2)))
    assert indented.digest == tokenizer.digest
    assert load_tokenizer(write_model(tmp_path / "changed", tokenizer_text(decoder=None))).digest != tokenizer.digest


def test_missing_files_are_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"absent does not exist: set model\.path"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(RecipeError, match=r"has no tokenizer\.json: save the tokenizer there"):
        load_tokenizer(tmp_path)
    directory = write_model(tmp_path / "broken", "{")
    with pytest.raises(RecipeError, match="cannot be read as a tokenizer"):
        load_tokenizer(directory)
    directory = write_model(tmp_path / "endless")
    (directory / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match="names no eos_token_id"):
        load_tokenizer(directory)


# ---- files ---------------------------------------------------------------------------------------


async def test_rows_become_prompts(tokenizer: Tokenizer, write_rows) -> None:
    path = write_rows(
        "\ufeff" + json.dumps({"prompt": "ab", "answer": [1, {"x": None}], "prompt_id": 7}),
        "",
        {"prompt_token_ids": [4, 5], "level": 2.5},
    )
    source = open_prompts(str(path), tokenizer, seed=0, shuffle=False)
    assert source.size == 2
    ((first, second),) = await draw_all(source, 2)
    assert first == Prompt(
        prompt_id="7", token_ids=token_array([3, 4, 5]), columns={"prompt": "ab", "answer": [1, {"x": None}]}
    )
    assert second.token_ids == token_array([4, 5])
    assert second.columns == {"level": 2.5}
    assert len(second.prompt_id) == 16


async def test_epochs_are_permutations_by_seed_and_epoch(tokenizer: Tokenizer, write_rows) -> None:
    """Epochs are permutations that depend on the seed and the epoch only."""
    path = write_rows(*({"prompt": f"p{i}"} for i in range(50)))
    rows = [f"p{i}" for i in range(50)]

    async def epochs(seed: int, *counts: int, shuffle: bool = True) -> list[list[str]]:
        source = open_prompts(str(path), tokenizer, seed=seed, shuffle=shuffle)
        drawn = [text for batch in await draw_all(source, *counts) for text in texts(batch)]
        return [drawn[start : start + 50] for start in range(0, len(drawn), 50)]

    whole = await epochs(5, 150)
    assert [sorted(epoch) for epoch in whole] == [sorted(rows)] * 3
    assert len({tuple(epoch) for epoch in [rows, *whole]}) == 4
    assert await epochs(5, 49, 2, 99) == whole  # how much is drawn at once changes nothing
    assert (await epochs(6, 50))[0] != whole[0]
    assert await epochs(5, 100, shuffle=False) == [rows, rows]


async def test_ids_are_stable_and_differ_between_equal_rows(tokenizer: Tokenizer, write_rows) -> None:
    path = write_rows({"prompt": "a"}, {"prompt": "a"}, {"prompt": "b"})
    drawn = [
        {p.prompt_id for p in (await draw_all(open_prompts(str(path), tokenizer, seed=seed, shuffle=True), 3))[0]}
        for seed in (1, 2)
    ]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 3


async def test_cancelled_draw_loses_nothing(tokenizer: Tokenizer, write_rows) -> None:
    path = write_rows(*({"prompt": f"p{i}"} for i in range(20)))
    source = open_prompts(str(path), tokenizer, seed=0, shuffle=False)
    async with asyncio.TaskGroup() as tasks:
        drawing = tasks.create_task(source.draw(5))
        await asyncio.sleep(0)
        drawing.cancel()
    (drawn,) = await draw_all(source, 5)
    assert texts(drawn) == [f"p{i}" for i in range(5)]


def test_check_finds_every_problem_of_a_file(tokenizer: Tokenizer, write_rows) -> None:
    path = write_rows(
        {"prompt": "abc", "answer": "x", "prompt_id": "one"},
        "{bad",
        "[1]",
        {"prompt": "abc"},
        "",
        {"prompt": "abcdefgh", "answer": "x"},
        {"answer": "x"},
        {"prompt": 3, "answer": "x"},
        {"prompt_token_ids": [99999], "answer": "x"},
        {"prompt": "abc", "answer": "y", "prompt_id": "one"},
        {"prompt_token_ids": [], "answer": "x"},
        '{"prompt": "\\ud800", "answer": "x"}',
        {"prompt": "[{'role': 'user', 'content': 'a'}]", "answer": "x"},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]}], "answer": "x"},
    )
    problems = check_prompts(str(path), tokenizer, {"exact": ("answer",), "free": ()}, max_tokens=6)
    expected = [
        ("line 2", "is not a JSON object"),
        ("line 3", "is not a JSON object (it begins a JSON array): write its rows one a line"),
        ("line 4", 'has no column "answer", which the reward exact needs'),
        ("line 6", "has a prompt of 9 tokens, at most 6 fit: shorten it"),
        ("line 7", 'has no column "prompt"'),
        ("line 8", 'has a int as "prompt": it must be text'),
        ("line 9", 'has a wrong "prompt_token_ids"'),
        ("line 10", 'has the prompt_id "one" of line 1'),
        ("line 11", "has an empty prompt"),
        ("line 12", "is not a JSON object"),
        ("line 13", "has Python's text of messages: write it as JSON"),
        (
            "line 14",
            "message 1: its \"content\" has a part of type 'image_url': models are trained on text alone; leave",
        ),
    ]
    assert len(problems) == len(expected), problems
    for problem, (line, words) in zip(problems, expected, strict=True):
        assert f"{path}, {line} " in problem
        assert words in problem
    with pytest.raises(BadRow, match="the file is compressed"):
        decode_row(b"\x1f\x8b\x08")


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a", "prompt": "b"}', 'line 1 has the key "prompt" 2 times: leave one'),
        ('{"prompt": "a", "x": [{"y": 1, "y" : 2}]}', 'line 1 has the key "y" 2 times: leave one'),
        ('{"prompt": "", "answer": "1"}', "line 1 has an empty prompt: remove the row"),
        ('{"prompt": null}', "line 1 has null as its prompt: remove the row"),
        ("<html>", "line 1 is not a JSON object (it begins a web page): download the file itself"),
    ],
)
def test_a_wrong_row_is_named(tokenizer: Tokenizer, write_rows, line: str, problem: str) -> None:
    [text] = check_prompts(str(write_rows(line)), tokenizer, {})
    assert problem in text


def test_a_text_that_looks_like_keys_is_a_row(tokenizer: Tokenizer, write_rows) -> None:
    row = {"prompt": 'a "x": 1, "x": 2', "more": {"prompt": "b", "y": [{"y": 1}, {"y": 2}]}}
    assert check_prompts(str(write_rows(row)), tokenizer, {}) == []


@pytest.mark.seconds(4)
def test_a_row_that_no_stream_takes_is_refused_where_it_is_read(tokenizer: Tokenizer, write_rows) -> None:
    """One that a reward worker cannot receive would end the run, or be sent again for ever."""
    long, small = "x" * (33 << 20), [[[]] * 1000] * 2000
    path = write_rows(
        {"prompt": "a", "tests": long}, {"prompt": "a", "tests": small}, {"prompt": "a", "tests": "x" * 9}
    )
    large, grows = check_prompts(str(path), tokenizer, {})
    assert f"{path}, line 1 has columns of 34603" in large
    assert "at most 33554432 travel with a prompt: keep large data in files" in large
    assert f"{path}, line 2 has columns of 2006" in grows
    assert "take more than 8 times that in memory" in grows
    assert "keep them in fewer and longer texts" in grows


def test_check_of_a_good_file_and_of_none(tokenizer: Tokenizer, write_rows, tmp_path: Path) -> None:
    assert check_prompts(str(write_rows({"prompt": "a", "answer": 1})), tokenizer, {"exact": ("answer",)}) == []
    assert "is empty: add rows" in check_prompts(str(write_rows("", "  ")), tokenizer, {})[0]
    assert "cannot be read" in check_prompts(str(tmp_path / "absent.jsonl"), tokenizer, {})[0]
    [none] = check_prompts("prompts.xml", tokenizer, {})
    assert "neither a .jsonl, .json, .csv, .parquet or .arrow file, nor" in none
    [one] = check_prompts(str(write_rows(*["{x"] * 100)), tokenizer, {})
    assert one.endswith("(so with 99 of the other 99 rows)")
    [other] = check_prompts(str(write_rows("prompt,answer", *(f"{n},{n}" for n in range(9)))), tokenizer, {})
    assert other.endswith("correct it, or name the file by its format, such as .csv")
    [one] = check_prompts(str(write_rows(*[{"question": "a"}] * 64)), tokenizer, {})
    assert ", line 1 " in one and "(so with 63 of the other 63 rows)" in one
    many = check_prompts(str(write_rows(*[{"prompt": "a", "prompt_id": n // 2} for n in range(100)])), tokenizer, {})
    assert len(many) == 21
    assert "30 more problems" in many[-1]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    line=st.binary(max_size=60)
    | st.dictionaries(st.text(), json_values, max_size=4).map(lambda r: json.dumps(r).encode())
)
def test_any_line_is_a_prompt_or_a_bad_row(tokenizer: Tokenizer, line: bytes) -> None:
    try:
        prompt = read_prompt(decode_row(line), 1, tokenizer, 50)
    except BadRow:
        return
    assert 0 < len(prompt.token_ids) <= 50


# ---- user code -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("rows", 5), ("agenerate", 7), ("opens", 5), ("Dataset", 7), ("empty", 0)])
async def test_iterators_end(tokenizer: Tokenizer, module: Path, name: str, count: int) -> None:
    source = open_prompts(f"{module}:{name}", tokenizer, seed=0, shuffle=True)
    assert source.size is None
    drawn = await draw_all(source, 3, 100, 3)
    assert [text for batch in drawn for text in texts(batch)] == [f"p{i}" for i in range(count)]
    assert len(drawn[0]) == min(3, count)
    assert drawn[2] == []


@pytest.mark.parametrize(
    ("name", "start", "expected", "logged"),
    [
        ("rows", 3, ["p3", "p4"], "skipped 3 rows that were drawn before"),
        ("agenerate", 3, ["p3", "p4", "p5", "p6"], "skipped 3 rows that were drawn before"),
        ("rows", 9, [], "ended after 5 rows; 9 were drawn before"),
        ("live", 3, ["p0", "p1", "p2", "p3", "p4"], "live, so none of the 3 rows"),
        ("rows", 0, ["p0", "p1", "p2", "p3", "p4"], ""),
    ],
)
async def test_an_iterator_goes_on_behind_what_an_earlier_life_drew(
    tokenizer: Tokenizer,
    module: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    start: int,
    expected: list[str],
    logged: str,
) -> None:
    spec = f"{module}:{name}"
    (whole,) = await draw_all(open_prompts(spec, tokenizer, seed=0, shuffle=False), 100)
    with caplog.at_level("INFO"):
        drawn = await draw_all(open_prompts(spec, tokenizer, seed=0, shuffle=False, start=start), 2, 100)
    resumed = [prompt for batch in drawn for prompt in batch]
    assert texts(resumed) == expected
    if name != "live":
        assert [prompt.prompt_id for prompt in resumed] == [prompt.prompt_id for prompt in whole][start:]
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("prompt_iterator")]
    assert len(lines) == bool(logged)
    assert logged in caplog.text


async def test_generator_runs_on_its_own_thread_and_is_closed(tokenizer: Tokenizer, module: Path) -> None:
    from streamrl.recipe.user_code import load_user_object

    source = open_prompts(f"{module}:generate", tokenizer, seed=0, shuffle=True)
    ((first, *_),) = await draw_all(source, 2)
    assert first.columns == {"prompt": "p0", "answer": 0, "pair": [0, 0]}
    assert load_user_object(f"{module}:thread")["name"].startswith("prompts ")  # type: ignore[index]
    assert load_user_object(f"{module}:closed") == ["generate"]


@pytest.mark.parametrize("name", ["gated", "agated"])
async def test_a_blocking_iterator_leaves_the_loop_free(tokenizer: Tokenizer, module: Path, name: str) -> None:
    """A blocking iterator leaves the loop free, and a cancelled draw loses nothing."""
    from streamrl.recipe.user_code import load_user_object

    source = open_prompts(f"{module}:{name}", tokenizer, seed=0, shuffle=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await source.draw(2)
    load_user_object(f"{module}:gate").set()  # type: ignore[attr-defined]
    drawn = await draw_all(source, 2, 2)
    assert [texts(batch) for batch in drawn] == [["p0", "p1"], ["p2"]]


async def test_iterator_that_never_returns_does_not_keep_anybody(tokenizer: Tokenizer, module: Path) -> None:
    source = open_prompts(f"{module}:blocks", tokenizer, seed=0, shuffle=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await source.draw(1)
    async with asyncio.timeout(300):  # half of what it waits
        await source.aclose()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", r"failed after 1 rows: ValueError: disk gone \(my_prompts.py:"),
        ("exits", "failed after 1 rows: SystemExit: 4"),
        ("opaque", "row 1 has a value that cannot be sent"),
        ("bad_row", 'row 2 has no column "prompt"'),
        ("number", "gave a int: name an"),
        ("absent", 'has no "absent"'),
    ],
)
async def test_user_code_that_fails_is_named(tokenizer: Tokenizer, module: Path, name: str, words: str) -> None:
    source = open_prompts(f"{module}:{name}", tokenizer, seed=0, shuffle=True)
    with pytest.raises(StreamRLError, match=words):
        await draw_all(source, 5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("generate", ""),
        ("agenerate", ""),
        ("empty", "is empty"),
        ("number", "gave a int"),
        ("absent", 'has no "absent"'),
        ("blocks", "gave no row within 3 s"),
    ],
)
def test_check_draws_the_first_row_in_another_process(
    tokenizer: Tokenizer, module: Path, name: str, words: str
) -> None:
    limit_s = 3.0 if name == "blocks" else 300.0
    problems = check_prompts(f"{module}:{name}", tokenizer, {"exact": ("answer",)}, timeout_s=limit_s)
    assert [words in problem for problem in problems] == ([True] if words else []), problems
    if name == "generate":
        (problem,) = check_prompts(f"{module}:{name}", tokenizer, {"exact": ("level",)}, 2)
        assert "row 1 has a prompt of 3 tokens, at most 2 fit" in problem
        (problem,) = check_prompts(f"{module}:{name}", tokenizer, {"exact": ("level",)})
        assert 'row 1 has no column "level", which the reward exact needs' in problem


async def test_rows_edited_while_read_are_not_trained(tmp_path: Path) -> None:
    """Rows that are edited while they are read are not trained."""
    file, tokenizer = tmp_path / "rows.jsonl", load_tokenizer(str(write_model(tmp_path / "model")))
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    source = open_prompts(str(file), tokenizer, seed=0, shuffle=False)
    await source.draw(2)
    os.utime(file, (1, 1))  # other times, the same rows
    await source.draw(2)
    with file.open("r+") as edited:  # of equal length, in place
        edited.write('{"prompt": "c"}')
    with pytest.raises(StreamRLError, match="was changed while this run reads it"):
        await source.draw(2)
    await source.aclose()
