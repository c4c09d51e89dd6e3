"""Training sets of real files: their order, their shares, and their rows after kills."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from builders.pretrained import tokenizer_json, write_tokenizer

from streamrl.base.errors import RecipeError
from streamrl.base.types import Prompt, token_array
from streamrl.buffers.rollout_buffer import PromptRef
from streamrl.control import events as on
from streamrl.control.mixture import draw_order, take_drawn
from streamrl.control.run_state import PromptPool
from streamrl.control.settings import control_settings
from streamrl.launch.sampling import training_prompts
from streamrl.pretrained.tokenizer import Tokenizer, load_tokenizer
from streamrl.recipe.rules.load_recipe import dump_recipe, load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.run.evaluate.evaluation import read_held_out
from streamrl.run.prompts.open_prompts import check_prompts
from streamrl.run.prompts.prompt_spec import (
    columns_of_set,
    held_out_sources,
    prompt_sources,
    read_spec,
    settings_of_sources,
    training_sources,
    unused_keys,
    with_settings,
)

DRAWS = 10_000
KILLS = 20


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder, {})
    content = tokenizer_json(("<pad>", "<eos>", "<unk>", "<bos>"), "abcdefghijklmnopqrstuvwxyz 0123456789", bos=3)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return load_tokenizer(folder)


def recipe_of(folder: Path) -> Recipe:
    """Sums with three quarters, words and the easy sums again, and an iterator that ends."""
    sums = [{"prompt": f"sum {n}", "kind": "easy" if n % 3 else "hard"} for n in range(30)]
    words = [{"prompt": f"word {n}", "kind": "word"} for n in range(7)]
    for name, rows in (("sums", sums), ("words", words)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "few.py").write_text("def rows():\n    return iter([{'prompt': f'few {n}'} for n in range(11)])\n")
    sets = {
        "sums": {"prompts": f"{folder}/sums.jsonl", "share": 6},
        "words": f"{folder}/words.jsonl",
        "easy": {"prompts": f'{folder}/sums.jsonl?where=kind == "easy"', "share": 0.5},
        "few": {"prompts": f"{folder}/few.py:rows", "share": 0.5},
    }
    return load_recipe({"model": str(folder), "prompts": {"train": sets}, "rewards": "r.py:score"})


async def drawn_prompts(
    recipe: Recipe, tokenizer: Tokenizer, count: int, random: Random, kills: list[int]
) -> list[Prompt]:
    """The first prompts of a run whose controller is killed after each of ``kills`` prompts, in a draw at that."""
    pool = PromptPool()
    settings = control_settings(recipe)
    source = training_prompts(recipe, tokenizer, pool)
    prompts: list[Prompt] = []
    while len(prompts) < count:
        size = min(random.randint(1, 9), count - len(prompts))
        sets = draw_order(pool, settings.shares, size).sets
        if kills and len(prompts) >= kills[0]:
            kills.pop(0)
            await source.draw(size, sets)  # lost
            await source.aclose()
            source = training_prompts(recipe, tokenizer, pool)
        drawn = await source.draw(size, sets)
        names = tuple(prompt.set for prompt in drawn)
        missing = tuple((Counter(sets) - Counter(names)).keys())
        event = on.PromptsDrawn(prompt_ids=(), sets=names, exhausted_sets=missing)
        refs = [PromptRef(prompt_id=str(number)) for number in range(len(drawn))]
        prompts += [drawn[int(ref.prompt_id)] for ref in take_drawn(pool, refs, event, settings, [])]
    await source.aclose()
    assert not kills
    return prompts


@pytest.mark.long
async def test_kills_change_neither_shares_nor_rows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Each prompt comes from the set and the row that a run without kills draws: 10,000 draws, 20 kills."""
    recipe = recipe_of(tmp_path)
    undisturbed = await drawn_prompts(recipe, tokenizer, DRAWS, Random(1), [])
    kills = sorted(Random(2).sample(range(DRAWS), KILLS))
    killed = await drawn_prompts(recipe, tokenizer, DRAWS, Random(1), kills)
    assert [prompt.prompt_id for prompt in killed] == [prompt.prompt_id for prompt in undisturbed]
    assert [prompt.set for prompt in killed].count("few") == 11
    last_few = max(place for place, prompt in enumerate(killed) if prompt.set == "few")
    counts = Counter(prompt.set for prompt in killed[last_few + 20 :])
    for name, share in {"sums": 0.8, "words": 1 / 7.5, "easy": 0.5 / 7.5}.items():
        assert abs(counts[name] - share * counts.total()) < 2
    rows = [prompt.columns["prompt"] for prompt in killed if prompt.set == "words"]
    for epoch in range(0, len(rows) - 7, 7):
        assert sorted(rows[epoch : epoch + 7]) == [f"word {n}" for n in range(7)], "an epoch of a set has its rows once"


async def test_sets_of_the_same_rows_have_prompts_of_their_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompts = await drawn_prompts(recipe_of(tmp_path), tokenizer, 200, Random(3), [])
    easy = {prompt.prompt_id for prompt in prompts if prompt.set == "easy"}
    sums = {prompt.prompt_id for prompt in prompts if prompt.set == "sums"}
    assert all(prompt.prompt_id.startswith(f"{prompt.set}/") for prompt in prompts)
    assert all(prompt.columns["kind"] == "easy" for prompt in prompts if prompt.set == "easy")
    assert easy
    assert not easy & sums


def test_keys_of_the_section_are_options_of_each_set(tmp_path: Path) -> None:
    """``prompts.template`` holds for all sets but iterators, and the sources are named by the paths of their keys."""
    recipe = recipe_of(tmp_path)
    assert list(prompt_sources(recipe)) == [f"prompts.train.{name}" for name in ("sums", "words", "easy", "few")]
    recipe = load_recipe(
        {
            "model": str(tmp_path),
            "prompts": {"train": {"a": "a.jsonl", "b": "m:rows"}, "template": "{{q}}"},
            "rewards": "r.py:score",
        }
    )
    sources = training_sources(recipe)
    assert sources["a"].endswith("a.jsonl?template=%22%7B%7Bq%7D%7D%22")
    assert sources["b"] == "m:rows"


SCOPED = {
    "prompts": {
        "train": {
            "sums": {"prompts": "s.jsonl", "rewards": ["exact"], "max_tokens": 8, "template_arguments": {"a": 1}},
            "words": {"prompts": "w.jsonl", "template": "{{w}}", "answer": "w"},
        },
        "template": "{{q}}",
        "template_arguments": {"b": 2},
    },
    "evaluation": {
        "prompts": {"sums": "hs.jsonl", "more": {"prompts": "hm.jsonl", "like": "words"}, "rest": "hr.jsonl"}
    },
    "rewards": [
        {"function": "exact", "name": "shadowed", "shadow": True},
        {"function": "length"},
        {"function": "exact"},
    ],
}


def test_settings_of_a_set_are_those_of_its_source() -> None:
    """Templates of the set go before those of the section; a held-out set has those of the training set of its name, or
    of that which it names."""
    recipe = load_recipe({"model": "m", **SCOPED})
    forms = {path: read_spec(source).form for path, source in prompt_sources(recipe).items()}
    sums = forms["prompts.train.sums"]
    words = forms["prompts.train.words"]
    assert (sums.template, sums.answer, sums.template_arguments) == ("{{q}}", "", {"b": 2, "a": 1})
    assert (words.template, words.answer, words.template_arguments) == ("{{w}}", "w", {"b": 2})
    assert forms["evaluation.prompts.sums"] == sums
    assert forms["evaluation.prompts.more"] == words
    assert forms["evaluation.prompts.rest"].template_arguments == {"b": 2}
    scored = {path: settings.rewards for path, settings in settings_of_sources(recipe).items()}
    assert scored["prompts.train.sums"] == scored["evaluation.prompts.sums"] == ("exact",)
    scores = [recipe.score_of(name) for name in recipe.evaluation.sets]
    assert [score and score.label for score in scores] == ["exact", "length", "length"]
    needed = {"exact": ("answer",), "length": ("limit",)}
    assert columns_of_set(recipe, recipe.prompts.sets["sums"], needed) == {"exact": ("answer",)}
    assert columns_of_set(recipe, recipe.prompts.sets["words"], needed) == needed


def test_a_set_has_the_environment_that_it_names() -> None:
    """Its prompts carry the name, its rows need the columns of that environment, and its held-out set has it, too."""
    train = {"a": "a.jsonl", "b": {"prompts": "b.jsonl", "environment": "game"}, "c": {"prompts": "c.jsonl"}}
    train["c"] = {"prompts": "c.jsonl", "environment": False, "rewards": ["exact"]}
    environment = {"env": "m:Game", "advanced": {"further": [{"name": "game", "env": "m:Other"}]}}
    recipe = load_recipe(
        {
            "model": "m",
            "prompts": {"train": train},
            "evaluation": {"prompts": {"b": "h.jsonl"}},
            "environment": environment,
            "rewards": [{"function": "environment"}, {"function": "exact"}],
        }
    )
    prompt = Prompt(prompt_id="p", token_ids=token_array())
    names = [with_settings(prompt, settings).environment for settings in recipe.prompts.sets.values()]
    assert names == ["", "game", ""]
    assert recipe.settings_of_held_out("b").environment == "game"
    needed = {"environment": ("level",), "environment.further.0": ("size",), "exact": ("answer",)}
    columns = [sorted(columns_of_set(recipe, settings, needed)) for settings in recipe.prompts.sets.values()]
    assert columns == [["environment", "exact"], ["environment.further.0", "exact"], ["exact"]]


def test_a_held_out_set_is_made_as_rows_to_imitate() -> None:
    """Of the set that it names, or whose name it has; all rewards score it."""
    demo = {"prompts": "d.jsonl", "imitate": 1, "template": "{{w}}", "answer": "w"}
    prompts = {"train": {"sums": "s.jsonl", "demo": demo}}
    held_out = {"demo": "hd.jsonl", "more": {"prompts": "hm.jsonl", "like": "demo"}, "rest": "hr.jsonl"}
    recipe = load_recipe({"model": "m", "prompts": prompts, "rewards": "m:f", "evaluation": {"prompts": held_out}})
    forms = {name: read_spec(source).form for name, source in held_out_sources(recipe).items()}
    assert {name: (form.template, form.answer) for name, form in forms.items()} == {
        "demo": ("{{w}}", "w"),
        "more": ("{{w}}", "w"),
        "rest": ("", ""),
    }


@pytest.mark.parametrize(
    ("source", "key", "problem"),
    [
        (
            "m:rows",
            "template",
            "template: has no effect, because m:rows is an iterator, whose code makes the rows: rem",
        ),
        ("m:rows", "answer", "answer: has no effect, because m:rows is an iterator"),
        (
            "a.jsonl?template=x",
            "template",
            "template: has no effect, because its source has ?template=, too: remove on",
        ),
        ("a.jsonl?limit=2&prompt=q", "template", "template: has no effect, because its source has ?prompt=, too: remo"),
        (
            "a.jsonl?answer=x",
            "answer",
            "answer: has no effect, because its source has ?answer=, too: remove one of them",
        ),
        ("a.jsonl?answer=x", "template", ""),
        ("m:rows", "template_arguments", ""),
        ("m:rows?template_arguments={a=1}", "template_arguments", "its source has ?template_arguments=, too"),
    ],
)
def test_a_key_that_its_source_does_not_use_is_refused(source: str, key: str, problem: str) -> None:
    """Of sets that are sampled and of those that are imitated: two makers of rows, of which one would be dropped."""
    value = {"a": 2} if key == "template_arguments" else "w"
    sets = {"sums": {"prompts": source, key: value}, "demo": {"prompts": source, key: value, "imitate": 1}}
    recipe = load_recipe({"model": "m", "prompts": {"train": sets}, "rewards": "m:f"})
    said = list(unused_keys(recipe))
    assert len(said) == (2 if problem else 0)
    for name, text in zip(sets, said, strict=False):
        assert text.startswith(f"prompts.train.{name}.{key}: ") and problem in text


async def test_prompts_of_a_set_have_its_rewards_and_its_limit(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """They travel with the prompt, also with those that are held out; a prompt of a set without them has none."""
    for name in ("s", "w", "hs", "hm", "hr"):
        (tmp_path / f"{name}.jsonl").write_text('{"q": "a", "w": "b"}\n')
    text = dump_recipe(load_recipe({"model": "m", **SCOPED})).replace(str(Path.cwd()), str(tmp_path))
    (tmp_path / "recipe.toml").write_text(text)
    recipe = load_recipe(tmp_path / "recipe.toml")
    source = training_prompts(recipe, tokenizer, PromptPool())
    sums, words = await source.draw(2, ("sums", "words"))
    await source.aclose()
    assert (sums.rewards, sums.max_tokens) == (("exact",), 8)
    assert (words.rewards, words.max_tokens) == ((), 0)
    assert sums.token_limit(512) == 8
    assert sums.token_limit(4) == 4, "a user may set a lower one while the run goes on"
    assert words.token_limit(512) == 512
    held_out = await read_held_out(recipe, tokenizer, in_flight=1)
    assert [prompt.max_tokens for prompt in held_out.prompts] == [8, 0, 0]
    assert held_out.scores == {"sums": "exact", "more": "length", "rest": "length"}


async def test_a_set_without_the_environment_has_prompts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """An environment writes the prompts of its sets; those of the others have their tokens."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "abc"}\n')
    rows = str(tmp_path / "rows.jsonl")
    sets = {name: {"prompts": rows, "environment": name == "game"} for name in ("game", "plain")}
    rewards = [{"function": "environment"}, {"function": "length"}]
    held_out = {"plain": rows, "rest": rows}
    recipe = load_recipe(
        {
            "model": "m",
            "prompts": {"train": sets},
            "environment": {"env": "m:Game"},
            "rewards": rewards,
            "evaluation": {"prompts": held_out},
        }
    )
    source = training_prompts(recipe, tokenizer, PromptPool())
    game, plain = await source.draw(2, ("game", "plain"))
    await source.aclose()
    assert not game.token_ids
    assert len(plain.token_ids) == 4
    assert (game.max_tokens, plain.max_tokens) == (0, 512), "a completion has no limit of an episode"
    read = await read_held_out(recipe, tokenizer, in_flight=1)
    assert [len(prompt.token_ids) for prompt in read.prompts] == [4, 0]


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ('kind == "odd"', 'where=kind == "odd" is true for none of 30 rows'),
        ("colour == 1", "line 1: ?where=colour == 1 has no value ('colour' is undefined): correct it"),
        ("kind ==", "line 1: ?where=kind == has no value"),
    ],
)
def test_a_condition_that_selects_nothing_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, where: str, problem: str
) -> None:
    recipe_of(tmp_path)
    (found,) = check_prompts(f"{tmp_path}/sums.jsonl?where={where}", tokenizer, {})
    assert problem in found


def test_rows_keep_their_numbers_in_a_selection(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Problems of selected rows name their lines, and their ids are those of the whole file."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "k": 0}\n{"prompt": "b", "k": 1}\n{"prompt": "", "k": 1}\n')
    (found,) = check_prompts(f"{tmp_path}/a.jsonl?where=k", tokenizer, {})
    assert "line 3 has an empty prompt" in found
    with pytest.raises(RecipeError, match="an iterator takes no options"):
        training_prompts(
            load_recipe({"model": "m", "prompts": {"train": {"a": "m:rows?where=k"}}, "rewards": "r.py:score"}),
            tokenizer,
            PromptPool(),
        )
