"""Chats as the model's own template writes them, the digest that processes compare, and ids that text cannot carry."""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from builders import pretrained
from builders.base import InstantClock
from builders.files import ROOT
from builders.stages import episodes_on

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.messages import PauseMode
from streamrl.base.stage_messages import LaunchTrajectory, Scored, TrajectoryOutcome
from streamrl.base.types import Completion, ScoredTrajectory, TrajectoryId, to_training_sample, token_array
from streamrl.engines.simulated.engine import LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.prepare.first_prompt import difference_from_transformers, first_prompt_lines
from streamrl.pretrained.chat_template import ChatError
from streamrl.pretrained.tokenizer import Tokenizer, load_tokenizer, refuse_different_tokenizers
from streamrl.recipe.rewards import Reward, RewardLimits
from streamrl.rewards.calls.loading import load_reward
from streamrl.rewards.calls.reward_set import RewardSet
from streamrl.run.prompts.prompt_rows import BadRow, read_prompt, to_form
from streamrl.run.prompts.prompt_spec import RowForm

PACKAGE = ROOT / "streamrl"
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "é"]
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<turn>"]
CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>\\n' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = 'Today is ' + (date if date is defined else strftime_now('%d %b %Y')) %}
{%- endif %}
{{- '<turn>system\\n\\n' + system_message + '<|eot|>' }}
{% for message in messages %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {{- '<turn>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>assistant\\n\\n' }}{% endif %}
"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}
{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant') }}
{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<turn>' + role + '\\n' + message['content'] | trim + '<|eot|>\\n' }}
{% endfor %}
{% if add_generation_prompt %}
<turn>model
{% endif %}"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "gemma": GEMMA}
ASKS = [{"role": "user", "content": "  Sort <b>\"é\" & 'a'</b>  \n"}]
TALK = [*ASKS, {"role": "assistant", "content": "a, b"}, {"role": "user", "content": "Now {{ c }}"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "<sum> of é", "parameters": {"x": 1}}}


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    """One token a character, "ab" one token; text begins with BOS unless special tokens are not asked for."""
    made = pretrained.tokenizer_json(SPECIAL, [*CHARACTERS, "ab"], bos=1)
    model = made["model"] | {"type": "BPE", "merges": [["a", "b"]]}
    return made | {"pre_tokenizer": None, "model": model} | changes


def write_model(directory: Path, template: str | None = None, **changes: Any) -> Path:
    pretrained.write_tokenizer(directory, tokenizer_json(**changes), eos=2)
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<bos>",
                "eos_token": {
                    "__type": "AddedToken",
                    "content": "<eos>",
                    **dict.fromkeys(["lstrip", "rstrip", "normalized"], False),
                },
                "pad_token": "<pad>",
            }
        )
    )
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.fixture
def chat_tokenizer(tmp_path: Path) -> Callable[[str], Tokenizer]:
    return lambda name: load_tokenizer(write_model(tmp_path / name, TEMPLATES[name]))


# ---- chats ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_are_what_transformers_makes_of_them(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    directory = write_model(tmp_path, TEMPLATES[name])
    ours, theirs = load_tokenizer(directory), transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    system = {"role": "system", "content": "Be brief."}
    chats: list[tuple[list[dict[str, str]], Any, dict[str, Any]]] = [
        (ASKS, None, {}),
        (TALK, None, {"documents": [{"text": "a"}]}),
    ]
    if name != "gemma":
        chats += [([system, *TALK], None, {}), ([system, *ASKS], [TOOL], {"date": "1 May", "enable_thinking": False})]
    if name == "llama":
        chats += [([*ASKS, {"role": "stop", "content": ""}, *ASKS], None, {})]
    for messages, tools, arguments in chats:
        expected = theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False, **arguments
        )
        assert ours.render_chat(messages, tools, arguments) == expected
        ids = theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_dict=False, **arguments
        )
        assert ours.encode_chat(messages, tools, arguments).tolist() == ids
        assert ids.count(1) == (0 if name == "chatml" else 1)
    assert len({ours.render_chat(*chat) for chat in chats[:4]}) == min(4, len(chats))


def test_bos_is_written_by_the_template_only(chat_tokenizer: Callable[[str], Tokenizer]) -> None:
    assert chat_tokenizer("gemma").encode_chat(ASKS).tolist().count(1) == 1
    plain = chat_tokenizer("chatml")
    assert plain.encode_chat(ASKS).tolist().count(1) == 0
    assert plain.encode("a")[0] == 1


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())

    def rendered(**changes: Any) -> str:
        path.write_text(json.dumps(config | changes))
        return load_tokenizer(directory).render_chat(ASKS) + load_tokenizer(directory).render_chat(ASKS, [TOOL])

    assert rendered(chat_template="one") == "oneone"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tool"}]
    assert rendered(chat_template=named) == "plain1 tool"
    (directory / "chat_template.jinja").write_text("file")
    assert rendered(chat_template="one") == rendered(chat_template=named) == "filefile"
    with pytest.raises(ChatError, match=r"refuses the messages \(SecurityError: access to attribute '__class__'"):
        (directory / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
        load_tokenizer(directory).render_chat(ASKS)


def test_rows_with_messages(chat_tokenizer: Callable[[str], Tokenizer]) -> None:
    tokenizer = chat_tokenizer("chatml")
    row = {"messages": ASKS, "answer": 3, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    prompt = read_prompt(row, 1, tokenizer, None)
    assert prompt.token_ids == tokenizer.encode_chat(ASKS, [TOOL], {"enable_thinking": False})
    assert prompt.columns == row
    assert tokenizer.decode(prompt.token_ids).endswith("assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("column", ["tools", "chat_template_kwargs", "messages"])
def test_columns_of_a_chat_may_be_json_text(column: str, chat_tokenizer: Callable[[str], Tokenizer]) -> None:
    """As TRL keeps tools in tables; an empty text is none."""
    row = {"messages": ASKS, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    tokenizer = chat_tokenizer("chatml")
    token_ids = read_prompt(row, 1, tokenizer).token_ids
    assert read_prompt(row | {column: json.dumps(row[column])}, 1, tokenizer).token_ids == token_ids
    if column != "messages":
        without = {name: value for name, value in row.items() if name != column}
        assert read_prompt(row | {column: " "}, 1, tokenizer).token_ids == read_prompt(without, 1, tokenizer).token_ids


def test_rows_have_the_arguments_of_the_recipe(chat_tokenizer: Callable[[str], Tokenizer]) -> None:
    """Those of a row go before them; its column may be JSON text or null."""
    form = RowForm(template_arguments={"enable_thinking": False, "more": 1})
    for own, arguments in (
        ({}, {"enable_thinking": False, "more": 1}),
        ({"chat_template_kwargs": None}, {"enable_thinking": False, "more": 1}),
        ({"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True, "more": 1}),
        ({"chat_template_kwargs": '{"enable_thinking": true}'}, {"enable_thinking": True, "more": 1}),
    ):
        prompt = read_prompt(to_form({"messages": ASKS, **own}, form), 1, chat_tokenizer("chatml"))
        assert prompt.columns["chat_template_kwargs"] == arguments
        assert prompt.token_ids == chat_tokenizer("chatml").encode_chat(ASKS, None, arguments)
        assert read_prompt(to_form(own, form), 1, None).columns == {"chat_template_kwargs": arguments}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": []}, 'has wrong "messages": a list of objects'),
        ({"messages": "hello"}, 'has wrong "messages": a list of objects'),
        ({"messages": [*ASKS, "b"]}, "has a wrong message 2: it is a str, not an object"),
        ({"messages": [{"content": "b"}]}, 'has a wrong message 1: its "role" must be text'),
        ({"messages": [{"role": "user", "content": 3}]}, 'has a wrong message 1: its "content" must be text'),
        ({"messages": [{"role": "user"}]}, 'has a wrong message 1: its "content" must be text'),
        ({"messages": ASKS, "tools": "add"}, 'has wrong "tools": a list of JSON schemas, or the JSON text of one'),
        ({"messages": ASKS, "tools": "{}"}, 'has wrong "tools": a list of JSON schemas, or the JSON text of one'),
        ({"messages": ASKS, "chat_template_kwargs": [1]}, 'has wrong "chat_template_kwargs": an object of variables'),
        ({"messages": ASKS, "prompt": "b"}, 'has both "prompt" and "messages"'),
        ({"prompt": [*ASKS, "b"]}, "has a wrong message 2: it is a str, not an object"),
        ({"prompt": [3]}, "has a wrong message 1: it is a int"),
        (
            {"messages": [*ASKS, {"role": "assistant", "content": None, "tool_calls": [1]}]},
            "has no text that it could go",
        ),
        ({"messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": []}]}, "has no text that"),
        ({"messages": TALK[:2] * 2 + TALK[1:2]}, "Roles must alternate user/assistant"),
        ({"messages": [{"role": "system", "content": "b"}]}, "System role not supported"),
        ({"messages": ASKS * 9}, r"refuses the messages \(TemplateError: Roles must alternate"),
    ],
)
def test_rows_with_wrong_messages(row: dict[str, Any], words: str, chat_tokenizer: Callable[[str], Tokenizer]) -> None:
    with pytest.raises(BadRow, match=words):
        read_prompt(row, 1, chat_tokenizer("gemma"), None)


def test_messages_without_a_template_name_the_directory(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path / "bare"))
    with pytest.raises(BadRow, match=r"bare has no chat template: put its chat_template\.jinja there, or give prompts"):
        read_prompt({"messages": ASKS}, 1, tokenizer, None)


@pytest.mark.parametrize("content", ["Let me", "<think>\n", "ends in spaces  ", [{"type": "text", "text": "parts"}]])
@pytest.mark.parametrize("template", ["[{{ m.content }}]", "[{{ m.content | trim }}]", "{{ m.content[0].text }}"])
def test_what_the_assistant_has_begun_is_continued(template: str, content: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    turns = "{% for m in messages %}" + template + "{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"
    directory = write_model(tmp_path, turns)
    begun = [*ASKS, {"role": "assistant", "content": content}]
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    try:
        expected = theirs.apply_chat_template(begun, continue_final_message=True, tokenize=False)
    except ValueError:  # the template does not show the message
        with pytest.raises(ChatError, match="does not show all of it"):
            load_tokenizer(directory).render_chat(begun)
    else:
        assert load_tokenizer(directory).render_chat(begun) == expected


def test_a_bos_that_a_text_begins_with_is_not_added_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path))
    assert tokenizer.encode("<bos>ab") == tokenizer.encode("ab")
    assert tokenizer.encode("<bos>") == tokenizer.encode("")
    assert tokenizer.encode("<bos><bos>a").tolist()[:3] == [1, 1, tokenizer.encode("a")[1]]
    assert [record.getMessage() for record in caplog.records] == [
        "prompts begin with <bos>, which the tokenizer adds as well: it is written once"
    ]


SPECIAL_TOKENS: dict[str, dict[str, Any]] = {
    "in the map only": {"special_tokens_map": {"bos_token": "<turn>", "eos_token": {"content": "<eos>"}}},
    "in both": {"tokenizer_config": {"bos_token": "<bos>"}, "special_tokens_map": {"bos_token": "<turn>"}},
    "in the map, which is not read": {
        "tokenizer_config": {"added_tokens_decoder": {"1": {"content": "<bos>", "special": True}}},
        "special_tokens_map": {"bos_token": "<turn>"},
    },
    "with other names": {
        "tokenizer_config": {"image_token": "<turn>", "extra_special_tokens": {"eot_token": "<|eot|>"}}
    },
    "of the model": {"tokenizer_config": {"model_specific_special_tokens": {"think_token": "<turn>"}}},
    "that text may hold": {"tokenizer_config": {"bos_token": "ab", "extra_special_tokens": ["b<"]}},
    "of the old name": {"tokenizer_config": {"additional_special_tokens": ["b<"]}},
    "with spaces": {"tokenizer_config": {"added_tokens_decoder": {"7": {"content": "<turn>", "lstrip": True}}}},
    "of another file": {"added_tokens": {"b<": 300, "<eos>b": 200}, "special_tokens_map": {"pad_token": "<eos>b"}},
    "that are split": {"tokenizer_config": {"split_special_tokens": True}},
}


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_special_tokens_are_those_that_transformers_finds(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    names = ("bos_token", "eos_token", "pad_token", "image_token", "eot_token", "think_token")
    directory = write_model(tmp_path, "".join(f"{{{{ {name} }}}}" for name in names) + "{{ messages[0].content }}")
    for file, content in ({"tokenizer_config": {}} | SPECIAL_TOKENS[name]).items():
        (directory / f"{file}.json").write_text(json.dumps(content))
    ours, theirs = load_tokenizer(directory), transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    assert ours.encode_chat(ASKS).tolist() == theirs.apply_chat_template(ASKS, return_dict=False)
    text = "ab<eos>b  <turn> <|eot|>"
    assert ours.encode(text).tolist() == theirs(text)["input_ids"]
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)


def test_the_first_prompt_is_shown_and_compared(tmp_path: Path) -> None:
    directory = write_model(tmp_path, CHATML)
    tokenizer = load_tokenizer(directory)

    def first(**row: Any) -> tuple[list[str], str]:
        prompt = read_prompt({"prompt_id": "p"} | row, 1, tokenizer)
        found = difference_from_transformers(str(directory), prompt.columns, prompt.token_ids.tolist())
        return first_prompt_lines(prompt, tokenizer), found

    pytest.importorskip("transformers")
    begun = {"role": "assistant", "content": "ab"}
    for row in ({"prompt": "a\nb"}, {"messages": ASKS, "tools": [TOOL]}, {"prompt": json.dumps([*ASKS, begun])}):
        assert first(**row)[1] == ""
    lines, differs = first(prompt="<bos>" + "ab\n" * 300 + "<eos>")
    assert lines[0].startswith("prompt      p, 602 tokens: 1, 105, 103, 105,") and lines[0].endswith(
        " 103, 105, 103, 2"
    )
    assert (
        lines[1].startswith("text        <bos>ab\\nab\\n") and lines[1].endswith("ab\\n<eos>") and " ... " in lines[1]
    )
    assert lines[2:] == [
        "completion  ends with 2 (<eos>)",
        f"{'':<12}the prompt itself ends with <eos>, which ends a completion",
    ]
    assert differs == "token 2 of 603 is 1 (<bos>) there, and 105 (ab) of 602 here"
    assert first(prompt_token_ids=[9])[1] == ""
    (directory / "config.json").write_text('{"model_type": "qwen3_5"}')
    (directory / "tokenizer_config.json").unlink(missing_ok=True)
    cause = "; the cause may be its Qwen3_5Tokenizer, which has rules of its own in place of those of tokenizer.json"
    assert first(prompt="a 1")[1].endswith(f" here{cause}")


# ---- one tokenizer everywhere --------------------------------------------------------------------


def test_digest_covers_everything_that_gives_ids_a_meaning(tmp_path: Path) -> None:
    plain = load_tokenizer(write_model(tmp_path / "plain", CHATML)).digest
    assert load_tokenizer(write_model(tmp_path / "same", CHATML)).digest == plain
    added = tokenizer_json()["added_tokens"]
    others = {
        "added token": write_model(tmp_path / "added", CHATML, added_tokens=added[:-1]),
        "template": write_model(tmp_path / "template", LLAMA),
        "no template": write_model(tmp_path / "none"),
        "end token": write_model(tmp_path / "end", CHATML),
        "named token": write_model(tmp_path / "named", CHATML),
    }
    (others["end token"] / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    (others["named token"] / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<turn>"}))
    digests = {name: load_tokenizer(directory).digest for name, directory in others.items()}
    assert len({plain, *digests.values()}) == 1 + len(others), digests


def test_an_end_token_has_an_embedding(tmp_path: Path) -> None:
    """Ids count from 0: with six embeddings, 6 is behind the last."""
    directory = write_model(tmp_path)
    (directory / "config.json").write_text(json.dumps({"vocab_size": 6}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5, 6]}))
    tokenizer = load_tokenizer(directory)
    assert tuple(tokenizer.eos_token_ids) == (2, 5)
    assert "disagree about what ends a completion" in tokenizer.end_notice


def test_different_tokenizers_stop_the_run() -> None:
    refuse_different_tokenizers("models/a", {"the controller": "11", "the engines": "", "trainer rank 0": "11"})
    words = (
        r"loaded from models/a \(the controller: 11; the engines: 22; trainer rank 0: 11\): copy one model directory"
    )
    with pytest.raises(StreamRLError, match=words):
        refuse_different_tokenizers("models/a", {"the controller": "11", "the engines": "22", "trainer rank 0": "11"})


def test_broken_configuration_is_named(tmp_path: Path) -> None:
    (write_model(tmp_path) / "tokenizer_config.json").write_text("{")
    with pytest.raises(RecipeError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(tmp_path)


# ---- ids are the only truth ----------------------------------------------------------------------


class RecordingEngine(SimulatedEngine):
    """Keeps what it sampled."""

    sampled: list[Completion]

    async def generate(self, request: Any) -> Completion:
        completion = await super().generate(request)
        self.sampled.append(completion)
        return completion


async def test_ids_that_text_cannot_carry_reach_the_trainer(tmp_path: Path) -> None:
    """A completion of "a", "b" and special tokens, cut once and resumed, read by a reward as text."""
    tokenizer = load_tokenizer(write_model(tmp_path, CHATML))
    prompt = read_prompt({"messages": ASKS, "prompt_id": "p"}, 1, tokenizer, None)
    a, b = tokenizer.encode("a")[1], tokenizer.encode("b")[1]
    clock = InstantClock()
    lengths = LengthMixture(median=200, sigma=0.01, long_share=0.0)
    options = SimulationOptions(lengths=lengths, policy_version=3, vocabulary=tokenizer.vocabulary_size, end_token=2)
    engine = RecordingEngine(options, clock=clock.now, sleep=clock.sleep)
    engine.sampled = []
    await engine.start()
    episodes, outcomes = episodes_on(engine), asyncio.Queue[TrajectoryOutcome]()
    async with episodes.running():
        identity = TrajectoryId(prompt_id="p", group_id=0, sample=0)
        episodes.launch(LaunchTrajectory(id=identity, prompt=prompt, group_size=1, seed=7), outcomes.put)
        while engine.load().running < 1:
            await anyio.lowlevel.checkpoint()
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        await engine.pause(PauseMode.ABORT, clear_cache=True)
        await engine.resume()
    finished = outcomes.get_nowait()
    assert isinstance(finished, Scored)
    assert len(engine.sampled) == 2
    ids = [token for completion in engine.sampled for token in completion.token_ids]
    file = tmp_path / "reward.py"
    file.write_text("texts = []\ndef reward(completion):\n    texts.append(completion)\n    return 1.0\n")
    reward = Reward(function=f"{file}:reward", trusted=True)
    async with asyncio.TaskGroup() as tasks:
        rewards = RewardSet([reward], RewardLimits(), tokenizer, tasks)
        await rewards.open()
        [scored] = await rewards.score([finished.outcome.trajectory])
    assert isinstance(scored, ScoredTrajectory)
    sample = to_training_sample(scored)
    assert sample.token_ids == prompt.token_ids + token_array(ids)
    [text] = load_reward(reward).call.__globals__["texts"]  # type: ignore[attr-defined]
    assert tokenizer.encode(text)[1:] != token_array(ids)
    assert tokenizer.encode(tokenizer.decode(token_array([a, b])))[1:] != token_array([a, b])


@pytest.mark.long
def test_text_is_tokenised_in_one_place() -> None:
    """Only rows become ids, what stands between turns, texts of a file that ``streamrl reward test`` reads, what a
    reward model of its own vocabulary reads, and the words of a simulated engine: nothing that was sampled and is
    trained is so again."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if node.func.attr.startswith("encode") and ("tokenizer" in owner or owner.endswith("_backend")):
                    found.add(path.relative_to(PACKAGE).as_posix())
                if node.func.attr in {"apply_chat_template", "from_pretrained"} and "Tokenizer" in owner:
                    found.add(path.relative_to(PACKAGE).as_posix())
    apart = {
        "cli/try_rewards/trial_completions.py",
        "rewards/builtin/classifier_scores.py",
        "engines/simulated/text.py",
    }
    apart |= {"prepare/first_prompt.py"}  # to compare with transformers
    apart |= {"prepare/called_rewards.py"}  # completions that a dry run shows to rewards
    apart |= {"learning/small_model/packaged.py"}  # only saves one
    apart |= {"run/prompts/imitated_rows.py"}  # completions to imitate
    apart |= {"learning/small_model/chats.py"}  # demonstrations of a warm-up
    apart |= {"run/environments/chat.py", "run/environments/chat_tokens.py"}  # what environments say
    apart |= {"pretrained/turns/seam_tokens.py", "pretrained/turns/template_facts.py"}
    assert found == {"run/prompts/prompt_rows.py", "pretrained/tokenizer.py"} | apart
