"""Prompts from parquet, Arrow and dataset directories, from reasoning-gym, and from columns of other names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.types import Prompt
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.rules.load_recipe import load_recipe, resolve_spec
from streamrl.run.prompts.open_prompts import check_prompts, open_prompts, stored_rows
from streamrl.run.prompts.prompt_spec import SourceKind, prompt_sources, read_spec

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = [{"prompt": f"p{i}", "answer": i, "tests": [{"in": "a", "out": str(i)}], "level": None} for i in range(40)]


class Letters(Tokenizer):
    """One token a letter; chats are written as JSON."""

    def __init__(self) -> None:
        self.vocabulary_size = 1 << 16

    def encode(self, text: str) -> Any:
        from streamrl.base.types import token_array

        return token_array(list(map(ord, text)))

    def encode_chat(self, messages: Any, tools: Any = None, arguments: Any = None) -> Any:
        return self.encode(json.dumps(messages))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Letters()


def write_parquet(path: Path, rows: list[dict[str, Any]] = ROWS, row_group_size: int = 7) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def write_arrow(path: Path, rows: list[dict[str, Any]] = ROWS, *, stream: bool = True) -> Path:
    """As ``datasets`` writes it: the stream format, several batches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_saved(directory: Path) -> Path:
    """What ``Dataset.save_to_disk`` leaves: two shards and a state."""
    write_arrow(directory / "data-00000-of-00002.arrow", ROWS[:25])
    write_arrow(directory / "data-00001-of-00002.arrow", ROWS[25:])
    files = [{"filename": "data-00000-of-00002.arrow"}, {"filename": "data-00001-of-00002.arrow"}]
    (directory / "state.json").write_text(json.dumps({"_data_files": files, "_fingerprint": "x", "_split": "train"}))
    return directory


def write_hub(directory: Path) -> Path:
    """A snapshot of a hub dataset: two configurations, shards, and what git leaves beside them."""
    for config in ("main", "socratic"):
        write_parquet(directory / config / "train-00000-of-00002.parquet", ROWS[:25])
        write_parquet(directory / config / "train-00001-of-00002.parquet", ROWS[25:])
    write_parquet(directory / "main" / "test-00000-of-00001.parquet", ROWS[:5])
    write_parquet(directory / ".cache" / "old-00000-of-00001.parquet", ROWS[:1])
    return directory


SOURCES: dict[str, Callable[[Path], str]] = {
    "parquet": lambda path: str(write_parquet(path / "rows.parquet")),
    "arrow stream": lambda path: str(write_arrow(path / "rows.arrow")),
    "arrow file": lambda path: str(write_arrow(path / "rows.arrow", stream=False)),
    "save_to_disk": lambda path: str(write_saved(path / "saved")),
    "hub": lambda path: f"{write_hub(path / 'hub')}?split=main/train",
}


async def draw(spec: str, tokenizer: Tokenizer, count: int, **options: Any) -> list[Prompt]:
    source = open_prompts(spec, tokenizer, **{"seed": 3, "shuffle": True, **options})
    try:
        return await source.draw(count)
    finally:
        await source.aclose()


@pytest.mark.parametrize("kind", list(SOURCES))
async def test_equal_rows_give_equal_prompts_from_any_source(kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The same rows give the same prompts, ids and order from any source."""
    expected = await draw(str(write_jsonl(tmp_path / "rows.jsonl")), tokenizer, 100)
    found = await draw(SOURCES[kind](tmp_path), tokenizer, 100)
    assert found == expected
    assert len({prompt.prompt_id for prompt in found}) == 40
    assert found[0].columns["tests"][0]["in"] == "a"
    # A resumed run goes on where it was.
    assert await draw(SOURCES[kind](tmp_path), tokenizer, 30, start=70) == expected[70:]


def test_a_missing_column_is_one_problem_of_the_table(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A missing column is one problem of the table, which names the columns that are there."""
    (problem,) = check_prompts(str(write_parquet(tmp_path / "r.parquet")), tokenizer, {"math": ("solution",)})
    assert 'r.parquet has no column "solution", which the reward math needs (it has answer, level,' in problem
    rows = [{"question": "q", "answer": 1}] * 3
    (problem,) = check_prompts(str(write_parquet(tmp_path / "q.parquet", rows)), tokenizer, {})
    assert 'has no column "prompt" (it has answer, question): name the one with ?prompt=COLUMN' in problem
    (problem,) = check_prompts(f"{tmp_path}/q.parquet?prompt=quest", tokenizer, {})
    assert 'has no column "quest"' in problem
    asks = {"judge": ("question", "messages")}
    assert check_prompts(f"{write_parquet(tmp_path / 'c.parquet')}?chat=true", tokenizer, asks) == []


def test_rows_of_a_table_that_are_no_prompts_are_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": "abc", "prompt_id": "a"}, {"prompt": "", "prompt_id": "b"}, {"prompt": "d", "prompt_id": "a"}]
    path = write_parquet(tmp_path / "rows.parquet", rows)
    problems = check_prompts(str(path), tokenizer, {}, max_tokens=2)
    assert [problem.removeprefix(f"prompts {path}, ")[:30] for problem in problems] == [
        "row 1 has a prompt of 3 tokens",
        "row 2 has an empty prompt: rem",
    ]
    problems = check_prompts(str(path), tokenizer, {})
    assert problems[1].endswith('row 3 has the prompt_id "a" of row 1: make ids unique')


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("{hub}", "has several configurations: set ?config=NAME, with one of main, socratic"),
        ("{hub}?split=train", "has several configurations: set ?config=NAME, with one of main, socratic"),
        (
            "{hub}?split=main/dev",
            'has no split "dev" in its configuration main: set split=NAME, with one of train, test',
        ),
        ("{hub}?config=other", 'has no configuration "other": set ?config=NAME, with one of main, socratic'),
        ("{half}", "has 1 of the 2 files train-*-of-00002: download it again"),
        ("{packed}", "has train.jsonl.gz, a format that is not read: convert it to parquet"),
        ("{hub}?splitt=train", 'unknown option "splitt"; did you mean "split"?'),
        ("{saved}?split=train", 'has no splits, so no "train": remove the option'),
        ("{rows}?split=train", 'is a file and has no split "train"'),
        ("{rows}?chat=maybe", "chat is true or false"),
        ("{rows}?chat", '"chat" is no option: write ?key=value'),
        ("{empty}", "is no dataset directory (no .parquet, .jsonl, .json, .csv or .arrow files)"),
        ("{root}/absent.parquet", "cannot be read ("),
        ("{root}/absent", "nor a directory that exists"),
        ("{broken}", "cannot be read ("),
        ("{none}", "is empty: add rows"),
        ("{lines}?files=**a", "has no files **a: correct ?files="),
        ("lines.jsonl?size=3", 'unknown option "size"'),
        ("lines.jsonl?limit=0", "limit = 0 is no integer >= 1: correct it"),
        ("lines.jsonl?prompt=a&template=b", "?prompt= and ?template= both make the prompt: remove one"),
        ("mine.py:rows?template=b", "an iterator takes no options, nor prompts.template and prompts.answer"),
        ("module:rows?size=3", "an iterator takes no options"),
    ],
)
def test_sources_that_cannot_be_read(spec: str, problem: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("empty", "lines"):
        (tmp_path / name).mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        write_jsonl(tmp_path / "lines" / name, [{"prompt": name}])
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 or not")
    write_parquet(tmp_path / "half" / "data" / "train-00000-of-00002.parquet")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "train.jsonl.gz").write_bytes(b"x")
    places = {
        "root": tmp_path,
        "hub": write_hub(tmp_path / "hub"),
        "lines": tmp_path / "lines",
        "half": tmp_path / "half",
        "packed": tmp_path / "packed",
        "saved": write_saved(tmp_path / "saved"),
        "rows": write_parquet(tmp_path / "rows.parquet"),
        "none": write_arrow(tmp_path / "none.arrow", [{"prompt": "a"}][:0] or []),
        "empty": tmp_path / "empty",
        "broken": tmp_path / "broken.parquet",
    }
    (found,) = check_prompts(spec.format(**places), tokenizer, {})
    assert problem in found
    with pytest.raises(RecipeError):
        source = open_prompts(spec.format(**places), tokenizer, seed=0, shuffle=False)
        raise AssertionError(source)


def test_one_split_needs_no_name_and_one_configuration_no_path(tokenizer: Tokenizer, tmp_path: Path) -> None:
    hub = write_hub(tmp_path / "hub")
    assert open_prompts(f"{hub}?split=test", tokenizer, seed=0, shuffle=False).size == 5
    write_parquet(tmp_path / "one" / "data" / "train-00000-of-00001.parquet")
    assert open_prompts(str(tmp_path / "one"), tokenizer, seed=0, shuffle=False).size == 40
    splits = tmp_path / "splits"
    write_saved(splits / "train")
    write_saved(splits / "test")
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert open_prompts(f"{splits}?split=test", tokenizer, seed=0, shuffle=False).size == 40


async def test_rows_of_several_json_files_are_one_source(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Lines and an array, and a place that names the file."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "train-00000-of-00002.jsonl", ROWS[:25])
    (folder / "train-00001-of-00002.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS[25:], indent=2).encode())
    drawn = await draw(str(tmp_path), tokenizer, 40, shuffle=False)
    assert [prompt.columns["answer"] for prompt in drawn] == [row["answer"] for row in ROWS]
    (folder / "train-00001-of-00002.json").write_text(json.dumps([*ROWS[25:30], {"prompt": ""}]))
    problem = f"prompts {tmp_path}, train-00001-of-00002.json, row 6 has an empty prompt: remove the row"
    assert check_prompts(str(tmp_path), tokenizer, {}) == [problem]
    (tmp_path / "cut.json").write_text('[{"prompt": "a"},')
    (problem,) = check_prompts(f"{tmp_path}/cut.json", tokenizer, {})
    assert "cut.json begins a JSON array and is none (" in problem and "write its rows one a line" in problem


async def test_values_separated_by_commas_are_a_table(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """With a byte order mark, quotes, a line break in a value, and a date, which stays text."""
    text = '\ufeffprompt,answer,day\n"a, ""b""\nc",1,2026-01-02\nd,2.5,\n'
    (tmp_path / "rows.csv").write_text(text)
    first, second = await draw(f"{tmp_path}/rows.csv", tokenizer, 2, shuffle=False)
    assert first.columns == {"prompt": 'a, "b"\nc', "answer": 1.0, "day": "2026-01-02"}
    assert second.columns == {"prompt": "d", "answer": 2.5, "day": ""}
    (tmp_path / "rows.tsv").write_text("prompt\tanswer\na,b\t1\n")
    assert (await draw(f"{tmp_path}/rows.tsv", tokenizer, 1))[0].columns == {"prompt": "a,b", "answer": 1}
    (tmp_path / "ragged.csv").write_text("prompt,answer\na,b,c\n")
    (problem,) = check_prompts(f"{tmp_path}/ragged.csv", tokenizer, {})
    assert "ragged.csv cannot be read (" in problem and "Expected 2 columns, got 3" in problem
    (tmp_path / "latin.csv").write_bytes("prompt\ncafé\n".encode("latin-1"))
    (problem,) = check_prompts(f"{tmp_path}/latin.csv", tokenizer, {})
    assert "latin.csv cannot be read (" in problem and "UTF8" in problem


@pytest.mark.parametrize("ending", ["csv", "parquet", "arrow"])
def test_two_columns_of_one_name_are_refused(ending: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A table in which a column would hide another of its name is refused."""
    path = tmp_path / f"twice.{ending}"
    table = pa.table([["q"], ["right"], ["wrong"]], names=["prompt", "answer", "answer"])
    if ending == "csv":
        path.write_text("prompt,answer,answer\nq,right,wrong\n")
    elif ending == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    (problem,) = check_prompts(str(path), tokenizer, {})
    assert f"twice.{ending} cannot be read (2 columns are named answer): correct" in problem


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "rows.arrow", "rows.jsonl", "rows.json"])
def test_a_pointer_of_git_lfs_is_named(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """What a clone has where git-lfs is not installed; no reader of its format explains it."""
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 2690\n")
    problem, *_ = check_prompts(f"{tmp_path}/{name}", tokenizer, {})
    assert "is a pointer of git-lfs, not the file itself" in problem and "run `git lfs pull` there" in problem


async def test_categories_of_several_row_groups_are_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Each group of rows has a dictionary of its own, as a loop that appends leaves it."""
    schema = pa.schema([("prompt", pa.string()), ("source", pa.dictionary(pa.int8(), pa.string()))])
    with pq.ParquetWriter(tmp_path / "rows.parquet", schema) as writer:
        for name in "ab":
            writer.write_table(pa.Table.from_pylist([{"prompt": name, "source": name}] * 3, schema=schema))
    drawn = await draw(f"{tmp_path}/rows.parquet", tokenizer, 6, shuffle=False)
    assert [prompt.columns["source"] for prompt in drawn] == list("aaabbb")


# ---- columns of other names ----------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_parquet, write_jsonl])
async def test_the_prompt_may_have_another_name_and_become_a_chat(
    write: Callable[..., Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    name = "rows.parquet" if write is write_parquet else "rows.jsonl"
    path = write(tmp_path / name, [{"question": "2+2", "answer": "4"}])
    (plain,) = await draw(f"{path}?prompt=question", tokenizer, 1)
    assert plain.columns == {"question": "2+2", "answer": "4", "prompt": "2+2"}
    assert plain.token_ids == tokenizer.encode("2+2")
    (chat,) = await draw(f"{path}?prompt=question&chat=true&system=Be brief%26kind", tokenizer, 1)
    messages = [{"role": "system", "content": "Be brief&kind"}, {"role": "user", "content": "2+2"}]
    assert chat.columns == {"question": "2+2", "answer": "4", "messages": messages}
    assert chat.token_ids == tokenizer.encode(json.dumps(messages))


GSM8K = {"question": "2+2", "answer": "it is #### 4", "no": {"it": 3}, "gold answer": "5"}


@pytest.mark.parametrize(
    ("template", "answer", "prompt", "gold"),
    [
        ("{{question}}\nAnswer after ####.", "", "2+2\nAnswer after ####.", "it is #### 4"),
        ("{% if no.it > 2 %}{{question|upper}}?{% endif %}", "no.it", "2+2?", 3),
        ("question", "answer.split('####')[-1].strip()", "2+2", "4"),
        ("'Say: ' ~ question", "gold answer", "Say: 2+2", "5"),
        ("", "{{no.it}}{{no.it}}", "asked", "33"),
    ],
)
@pytest.mark.parametrize("write", [write_parquet, write_jsonl])
async def test_prompts_are_made_of_columns_by_templates(
    write: Callable[..., Path], template: str, answer: str, prompt: str, gold: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Prompt and answer are made of columns by a template or an expression."""
    path = write(
        tmp_path / ("rows.parquet" if write is write_parquet else "rows.jsonl"),
        [GSM8K | ({} if template else {"prompt": "asked"})] * 2,
    )
    table = {"model": {"path": "m"}, "rewards": [{"function": "math"}], "evaluation": {"prompts": f"{path}?limit=1"}}
    given = {"train": str(path), "template": template, "answer": answer}
    train, held = prompt_sources(load_recipe(table | {"prompts": given})).values()
    assert check_prompts(train, tokenizer, {"math": ("answer",)}) == []
    for spec, rows in ((train, 2), (held, 1)):
        (drawn,) = await draw(spec, tokenizer, 1)
        assert (drawn.columns["prompt"], drawn.columns["answer"]) == (prompt, gold)
        assert stored_rows(spec) == rows
    own = read_spec(
        prompt_sources(load_recipe(table | {"prompts": given | {"train": f"{path}?answer=mine"}}))["prompts.train"]
    )
    assert own.form.answer == "mine", "an option goes before the key"
    with pytest.raises(RecipeError, match='"" is no option'):
        read_spec(prompt_sources(load_recipe(table | {"prompts": given | {"train": f"{path}?"}}))["prompts.train"])


@pytest.mark.parametrize("source", ["rows.jsonl", "mine.py:rows"])
async def test_arguments_of_the_template_hold_for_every_source(
    source: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Rows of files and of iterators, trained and held out."""
    write_jsonl(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    (tmp_path / "mine.py").write_text("rows = [{'messages': [{'role': 'user', 'content': 'a'}]}]")
    table = {"model": {"path": "m"}, "rewards": [{"function": "math"}]}
    table |= {"evaluation": {"prompts": f"{tmp_path}/{source}"}}
    given = {"train": f"{tmp_path}/{source}", "template_arguments": {"enable_thinking": False, "effort": "low & slow"}}
    recipe = load_recipe(table | {"prompts": given}, ["prompts.template_arguments.effort=none"])
    assert len(prompt_sources(recipe)) == 2
    for spec in prompt_sources(recipe).values():
        assert check_prompts(spec, tokenizer, {"math": ()}) == []
        (drawn,) = await draw(spec, tokenizer, 1)
        assert drawn.columns["chat_template_kwargs"] == {"enable_thinking": False, "effort": "none"}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "{{question}} {{hint}}",
            "line 17 cannot be put into prompts.template ('hint' is undefined; the row has quest",
        ),
        ("{{question}} {{note}}", "line 17 cannot be put into prompts.template (a value in it is null; the row has"),
        ("note", "line 17 cannot be put into prompts.template (it is null; the row has"),
        ("hint", "line 17 cannot be put into prompts.template ('hint' is undefined"),
        ("question|length", "line 1 has a int as what prompts.template names: it must be text (so with 17 of the"),
        ("{{question", "line 1 cannot be put into prompts.template (unexpected end of template"),
        ("{{question.__class__.mro()}}", "line 1 cannot be put into prompts.template (access to attribute '__class__'"),
    ],
)
def test_a_row_that_a_template_cannot_show_is_named(
    source: str, said: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [{"question": f"q{n}", "hint": "h", "note": "n"} for n in range(18)]
    rows[16] = {"question": "q", "note": None}
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    table = {
        "model": {"path": "m"},
        "rewards": [{"function": "math"}],
        "prompts": {"train": str(path), "template": source},
    }
    problem, *_ = check_prompts(prompt_sources(load_recipe(table))["prompts.train"], tokenizer, {})
    assert problem.startswith(f"prompts {path}, {said}")
    (problem,) = check_prompts(f"{path}?prompt=question&answer=[hint]", tokenizer, {})
    assert "line 17 cannot be put into prompts.answer ('hint' is undefined" in problem


async def test_a_system_message_goes_before_a_chat(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}, {"prompt": 3}])
    source = open_prompts(f"{path}?system=Be+kind", tokenizer, seed=0, shuffle=False)
    (chat,) = await source.draw(1)
    assert [message["content"] for message in chat.columns["messages"]] == ["Be+kind", "hi"]
    with pytest.raises(StreamRLError, match='line 2 has a int as "prompt": it must be text to become a chat'):
        await source.draw(1)
    await source.aclose()


CHAT = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "2+2", "name": None}]
OF_VERL = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 3}}


@pytest.mark.parametrize("form", ["", "?chat=true", "?prompt=prompt", "?prompt=asked"])
@pytest.mark.parametrize("write", [write_parquet, write_jsonl])
@pytest.mark.parametrize("prompt", [CHAT, json.dumps(CHAT)])
async def test_a_list_of_messages_is_a_chat(
    prompt: Any, write: Callable[..., Path], form: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """As TRL and verl write rows; a table gives each message the fields of all."""
    row = {"asked" if "asked" in form else "prompt": prompt, **OF_VERL}
    path = write(tmp_path / ("rows.parquet" if write is write_parquet else "rows.jsonl"), [row])
    assert check_prompts(f"{path}{form}", tokenizer, {"compute_score": tuple(OF_VERL)}) == []
    (drawn,) = await draw(f"{path}{form}", tokenizer, 1)
    shown = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "2+2"}]
    assert drawn.token_ids == tokenizer.encode(json.dumps(shown))
    assert {name: drawn.columns[name] for name in OF_VERL} == OF_VERL
    assert [message["content"] for message in drawn.columns["messages"]] == ["Be kind", "2+2"]
    assert "prompt" not in drawn.columns


def test_what_the_model_shall_see_is_not_guessed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": CHAT}, {"messages": CHAT}, {"prompt": "2+2"}])
    problems = check_prompts(f"{path}?system=Be brief", tokenizer, {})
    wrong = "has a system message, and ?system= gives another one: remove ?system=, or that message"
    assert problems == [f"prompts {path}, line 1 {wrong} (so with 1 of the other 2 rows)"]
    path = write_jsonl(tmp_path / "both.jsonl", [{"prompt": "2+2", "messages": CHAT}])
    assert "name the one that the model shall see with ?prompt=" in check_prompts(str(path), tokenizer, {})[0]
    for name in ("prompt", "messages"):
        assert check_prompts(f"{path}?prompt={name}", tokenizer, {}) == []


async def test_arrays_of_numpy_are_lists(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """As pandas gives lists of a parquet file."""
    (tmp_path / "mine.py").write_text(
        f"import numpy\nrows = [{{'prompt': numpy.array({CHAT!r}), 'n': numpy.int64(3), 'x': numpy.array([[0.5]])}}]\n"
    )
    spec = f"{tmp_path}/mine.py:rows"
    assert check_prompts(spec, tokenizer, {}) == []
    (drawn,) = await draw(spec, tokenizer, 1)
    assert drawn.columns == {"messages": CHAT, "n": 3, "x": [[0.5]]}


def test_specs_are_taken_apart_and_made_absolute(tmp_path: Path) -> None:
    assert read_spec("reasoning_gym:chain_sum?size=3").kind is SourceKind.TASK
    assert read_spec("x/rows.arrow").kind is SourceKind.FILES
    assert read_spec("task.py:rows").kind is SourceKind.ITERATOR
    options = read_spec('reasoning_gym:leg_counting?min_animals=2&kinds=["a", "b"]&name=plain').options
    assert options == {"min_animals": 2, "kinds": ["a", "b"], "name": "plain"}
    assert resolve_spec("data?system=You are: x", tmp_path) == f"{tmp_path}/data?system=You are: x"
    assert resolve_spec("reasoning_gym:sudoku?size=3", tmp_path) == "reasoning_gym:sudoku?size=3"


# ---- reasoning-gym -------------------------------------------------------------------------------


async def test_a_task_gives_the_same_prompts_for_a_seed(tokenizer: Tokenizer) -> None:
    pytest.importorskip("reasoning_gym")
    spec = "reasoning_gym:chain_sum?size=12&seed=7&min_terms=3"
    first = await draw(spec, tokenizer, 30)
    assert first == await draw(spec, tokenizer, 30)
    assert len({prompt.prompt_id for prompt in first}) == 12
    one = first[0].columns
    assert one["prompt"].endswith("between <answer> and </answer>.")
    assert (one["task"], one["task_options"]) == ("chain_sum", {"min_terms": 3})
    other = await draw(spec.replace("seed=7", "seed=8"), tokenizer, 12)
    assert not {prompt.prompt_id for prompt in other} & {prompt.prompt_id for prompt in first}
    (bare,) = await draw("reasoning_gym:chain_sum?instruction=", tokenizer, 1)
    assert bare.columns["prompt"] == bare.columns["question"]


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("chain_sums", 'has no task "chain_sums" among its 106; did you mean "chain_sum"?'),
        ("chain_sum?terms=3", "terms'"),
        ("chain_sum?terms=3", "(the task has min_terms, max_terms,"),
        ("chain_sum?min_terms=0", "min_terms must be positive"),
        ("chain_sum?size=many", "size = many is no integer >= 1"),
    ],
)
def test_tasks_that_cannot_be_made(spec: str, problem: str, tokenizer: Tokenizer) -> None:
    pytest.importorskip("reasoning_gym")
    (found,) = check_prompts(f"reasoning_gym:{spec}", tokenizer, {})
    assert problem in found


def test_a_task_has_the_columns_of_its_verifier(tokenizer: Tokenizer) -> None:
    pytest.importorskip("reasoning_gym")
    needed = {"reasoning_gym": ("answer", "metadata", "task")}
    assert check_prompts("reasoning_gym:leg_counting?size=2", tokenizer, needed) == []
    assert 'no column "tests"' in check_prompts("reasoning_gym:leg_counting", tokenizer, {"code": ("tests",)})[0]


def test_what_is_missing_names_the_extra(tokenizer: Tokenizer, tmp_path: Path, monkeypatch) -> None:
    import streamrl.run.prompts.prompt_tasks as tasks

    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    (problem,) = check_prompts("reasoning_gym:chain_sum", tokenizer, {})
    assert "pip install 'streamrl[reasoning-gym]'" in problem
