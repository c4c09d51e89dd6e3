"""Rows to imitate: which step has which, what their tokens are, and what has none."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from builders.pretrained import tokenizer_json, write_tokenizer
from msgspec.structs import replace

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.run_events import RunWarning
from streamrl.base.types import Prompt, token_array
from streamrl.prepare.preflight import preflight
from streamrl.pretrained.tokenizer import Tokenizer, load_tokenizer
from streamrl.recipe.environment import RUN_ENVIRONMENT, Environment
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.run.prompts.imitated_rows import ImitatedRows, imitated_tokens, rows_until, sources_as_written
from streamrl.run.prompts.open_prompts import check_prompts
from streamrl.run.prompts.prompt_spec import training_sources

TEMPLATE = (
    "{% for message in messages %}<im>{{ message.role }} {{ message.content }}<done>"
    "{% if loop.first and tools %}<im>tools {{ tools[0].function.name }}<done>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<im>assistant {% endif %}"
)
ROWS = 10


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A model of characters with two end tokens, of which its template writes the second."""
    folder = tmp_path_factory.mktemp("model")
    special = ("<pad>", "<eos>", "<unk>", "<im>", "<done>")
    write_tokenizer(folder, tokenizer_json(special, "abcdefghijklmnopqrstuvwxyz 0123456789"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 4]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<eos>"}))
    return load_tokenizer(folder)


def recipe_of(folder: Path, tokenizer: Tokenizer, *, per_batch: int = 4, rows: Any = None, **demo: Any) -> Recipe:
    rows = rows or [{"prompt": f"say {n}", "completion": f"said {n}", "prompt_id": n} for n in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = {
        "sums": {"prompts": "sums.jsonl", "share": 2},
        "words": {"prompts": "words.jsonl"},
        "demo": {"prompts": f"{folder}/rows.jsonl", "share": 1.5, "imitate": 0.5} | demo,
    }
    recipe = load_recipe({"model": str(tokenizer.directory), "prompts": {"train": sets}, "rewards": "r.py:score"})
    return replace(recipe, rollout=replace(recipe.rollout, prompts_per_batch=per_batch))


async def silent(_: RunWarning) -> None:
    raise AssertionError("nothing is to be warned of")


async def rows_of(
    recipe: Recipe, tokenizer: Tokenizer, versions: range, kills: tuple[int, ...] = ()
) -> list[list[str]]:
    """Ids of the rows of each version, by a controller that dies before each of ``kills``."""
    rows = ImitatedRows(recipe, tokenizer, silent, {})
    found = []
    for version in versions:
        if version in kills:
            await rows.aclose()
            rows = ImitatedRows(recipe, tokenizer, silent, {})
        found.append([sample.id.prompt_id for one in await rows.of_version(version) for sample in one.samples])
    await rows.aclose()
    return found


async def test_rows_are_drawn_by_version_in_exact_shares(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Half as many rows as prompts; the same ones whatever dies, and when batches are trained again."""
    recipe = recipe_of(tmp_path, tokenizer, per_batch=5)
    assert list(training_sources(recipe)) == ["sums", "words"] and recipe.prompts.shares == {
        "sums": 2 / 3,
        "words": 1 / 3,
    }
    for version in range(10_000):
        assert 0 <= version * 2.5 - rows_until(recipe, "demo", version) < 1
    found = await rows_of(recipe, tokenizer, range(1, 101))
    assert Counter(map(len, found)) == {2: 50, 3: 50}
    assert Counter(row for rows in found for row in rows) == {f"demo/{n}": 25 for n in range(ROWS)}
    for epoch in range(25):
        flat = [row for rows in found for row in rows][epoch * ROWS :][:ROWS]
        assert len(set(flat)) == ROWS, "each row is in an epoch once"
    kills = tuple(Random(1).sample(range(2, 101), 20))
    assert await rows_of(recipe, tokenizer, range(1, 101), kills) == found
    assert await rows_of(recipe, tokenizer, range(60, 101)) == found[59:]


async def test_a_warm_up_ends(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = await rows_of(recipe_of(tmp_path, tokenizer, imitate_steps=3), tokenizer, range(1, 7))
    assert list(map(len, found)) == [2, 2, 2, 0, 0, 0]


async def test_a_row_is_its_prompt_and_what_is_imitated(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with aclosing(ImitatedRows(recipe_of(tmp_path, tokenizer), tokenizer, silent, {})) as source:
        (rows,) = await source.of_version(1)
    assert (rows.name, rows.weight) == ("demo", 0.5)
    for sample in rows.samples:
        number = sample.id.prompt_id.removeprefix("demo/")
        assert tokenizer.decode(sample.token_ids, False) == f"say {number}said {number}<eos>"
        assert list(sample.loss_mask) == [0] * len(f"say {number}") + [2] * len(f"said {number}") + [2]
        assert len(sample.behavior_logprobs) == len(sample.token_ids) and not any(sample.behavior_logprobs)
    assert len({sample.id.group_id for sample in rows.samples}) == len(rows.samples) == 2


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"prompt": "ab", "completion": '[{"role": "assistant", "content": "cd"}]'}, "cd<eos>"),
        ({"prompt": "ab", "completion": "cd"}, "cd<eos>"),
        ({"prompt": "ab", "completion": [{"role": "assistant", "content": "cd"}]}, "cd<eos>"),
        ({"prompt": [{"role": "user", "content": "ab"}], "completion": "cd"}, "cd<done>"),
        ({"messages": [{"role": "user", "content": "ab"}], "completion": "cd"}, "cd<done>"),
        # Which is a part of the text of the end token.
        ({"messages": [{"role": "user", "content": "ab"}], "completion": "e"}, "e<done>"),
    ],
)
def test_a_completion_ends_as_the_model_ends_it(tokenizer: Tokenizer, columns: dict[str, Any], text: str) -> None:
    """By its end token, or by what its template writes behind a message."""
    prompt = Prompt(prompt_id="p", token_ids=token_array(), columns=columns)
    assert tokenizer.decode(imitated_tokens(prompt, tokenizer, 9), False) == text


CHAT = [{"role": "user", "content": "ab"}]
BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "ab"}, "no completion to imitate"),
    ({"prompt": "ab", "completion": ""}, "no completion to imitate"),
    ({"prompt": "ab", "completion": None}, "no completion to imitate"),
    ({"prompt": "ab", "completion": 7}, "no completion to imitate"),
    ({"prompt": CHAT, "completion": " \n"}, "no completion to imitate"),
    ({"prompt": CHAT, "completion": CHAT * 2}, "no completion to imitate"),
    ({"prompt": CHAT, "completion": [{"role": "assistant", "content": None}]}, "no completion to imitate"),
    ({"prompt": "ab", "completion": "[{'role': 'assistant'}]"}, "Python's text of messages: write it as JSON"),
    ({"prompt": "ab", "completion": "c" * 4000}, "4003 tokens with its completion, above the "),
]


async def test_what_cannot_be_imitated_is_named_before(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The dry run names the places of the rows; a row that comes later, as of an iterator, ends the run with its id."""
    recipe = recipe_of(tmp_path, tokenizer, rows=[row for row, _ in BAD_ROWS])
    with pytest.raises(RecipeError) as refused:
        preflight(recipe)
    said = [problem for problem in refused.value.problems if problem.startswith("prompts.train.demo")]
    place = f"prompts.train.demo: prompts {tmp_path}/rows.jsonl, line"
    assert [problem.partition(" has ")[0] for problem in said] == [f"{place} {line}" for line in (1, 8, 9)]
    assert said[0].endswith("(so with 6 of the other 8 rows)")
    for row, problem in BAD_ROWS:
        recipe = recipe_of(tmp_path, tokenizer, rows=[row | {"prompt_id": "p"}])
        async with aclosing(ImitatedRows(recipe, tokenizer, silent, {})) as source:
            with pytest.raises(StreamRLError, match=rf"prompts\.train\.demo: the row p has {problem}"):
                await source.of_version(1)


async def test_an_iterator_that_ends_is_warned_of(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Once, and steps without rows have no metrics of them."""
    warnings: list[RunWarning] = []

    async def warn(warning: RunWarning) -> None:
        warnings.append(warning)

    (tmp_path / "few.py").write_text("rows = [{'prompt': f'{n}', 'completion': 'a'} for n in range(3)]\n")
    recipe = recipe_of(tmp_path, tokenizer, prompts=f"{tmp_path}/few.py:rows")
    async with aclosing(ImitatedRows(recipe, tokenizer, warn, {})) as source:
        counts = [[len(one.samples) for one in await source.of_version(version)] for version in range(1, 5)]
    assert counts == [[2], [1], [], []]
    assert [(one.step, one.message) for one in warnings] == [
        (2, "the iterator of prompts.train.demo has ended: its rows are not imitated any more")
    ]


TOOLS = '[{"type": "function", "function": {"name": "add"}}]'


@pytest.mark.parametrize("apart", [False, True])
async def test_rows_are_written_as_the_environment_writes(tmp_path: Path, tokenizer: Tokenizer, apart: bool) -> None:
    """With its system message and tools, unless the set is apart from the environment; an iterator, too."""
    (tmp_path / "rows.py").write_text("rows = 2 * [{'prompt': 'say', 'completion': 'said'}]\n")
    seen = []
    for source in (f"{tmp_path}/rows.jsonl", f"{tmp_path}/rows.py:rows"):
        rows = [{"prompt": "say", "completion": "said"}]
        recipe = recipe_of(tmp_path, tokenizer, rows=rows, prompts=source)
        demo = replace(recipe.prompts.imitated["demo"], environment=not apart)
        prompts = replace(recipe.prompts, train=recipe.prompts.sets | {"demo": demo})
        recipe = replace(recipe, prompts=prompts, environment=Environment(tools=("m:add",), system="calm"))
        assert (
            check_prompts(sources_as_written(recipe, tokenizer, {RUN_ENVIRONMENT: TOOLS})["demo"], tokenizer, {}) == []
        )
        async with aclosing(ImitatedRows(recipe, tokenizer, silent, {RUN_ENVIRONMENT: TOOLS})) as imitated:
            (drawn,) = await imitated.of_version(1)
        seen.append(tokenizer.decode(drawn.samples[0].token_ids, False))
    written = "<im>system calm<done><im>tools add<done><im>user say<done><im>assistant said<done>"
    assert seen == ["saysaid<eos>" if apart else written] * 2


def test_sets_that_teach_nothing_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for sets, message in (
        ({"demo": {"prompts": "d.jsonl", "imitate": 1.0}}, "has no set that is sampled: add one without imitate"),
        ({"sums": {"prompts": "s.jsonl", "imitate_steps": 3}}, "imitate_steps: has no effect without imitate"),
        (
            {"sums": "s.jsonl", "demo": {"prompts": "d.jsonl", "imitate": 1.0, "max_tokens": 9}},
            "max_tokens: has no effect with imitate",
        ),
    ):
        with pytest.raises(RecipeError) as refused:
            load_recipe({"model": str(tmp_path), "prompts": {"train": sets}, "rewards": "r.py:score"})
        assert message in str(refused.value)
