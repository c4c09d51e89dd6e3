"""Variables of a chat template from the recipe and from rows, in the forms in which rows have them, against
``apply_chat_template`` of transformers with the same variables."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from campaigns.front_door.folders import demo_model
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.run.prompts.open_prompts import check_prompts, open_prompts
from streamrl.run.prompts.prompt_spec import prompt_sources

TEMPLATE = """{% for m in messages %}{{ m.content }}:{% endfor %}\
{% if tools %}{{ tools | length }}{% endif %}\
{% if enable_thinking is defined and enable_thinking is false %}0:{% endif %}\
{% if effort is defined %}{{ effort }}:{% endif %}{{ keep | default(7) }}"""
CHAT = [{"role": "user", "content": "12"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
OFF = {"enable_thinking": False}


def _prompts(
    recipe: dict[str, Any], row: dict[str, Any], arguments: dict[str, Any], path: Path, *, source: str = "r.jsonl",
    options: str = "", tools: Any = None,
) -> str:  # fmt: skip
    """'' where the prompt of ``row``, trained and held out, has ``arguments``."""
    model = demo_model(path)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    if source.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist([row, {"messages": CHAT}]), path / source)
    elif source.endswith(".jsonl"):
        (path / source).write_text(json.dumps(row) + "\n")
    else:
        (path / "mine.py").write_text(f"rows = [{row}]")
    spec = f"{path}/{source}{options}"
    table = {"model": {"path": str(model)}, "prompts": {"train": spec, **recipe}, "rewards": [{"function": "m:f"}]}
    sources = prompt_sources(load_recipe({**table, "evaluation": {"prompts": spec}}))
    tokenizer = load_tokenizer(model)
    theirs = AutoTokenizer.from_pretrained(model).apply_chat_template(
        CHAT, tools=tools, add_generation_prompt=True, return_dict=False, **arguments
    )

    async def first(spec: str) -> list[int]:
        opened = open_prompts(spec, tokenizer, seed=0, shuffle=False)
        [prompt] = await opened.draw(1)
        await opened.aclose()
        return prompt.token_ids.tolist()

    for key, spec in sources.items():
        if problems := check_prompts(spec, tokenizer, {}):
            return problems[0]
        ours = anyio.run(first, spec)
        if ours != list(theirs):
            return f"{key}: {ours} in place of {theirs}"
    return ""


def _refused(row: dict[str, Any], words: str, path: Path, **recipe: Any) -> str:
    said = _prompts(recipe, row, {}, path)
    return "" if words in said else said


ROW: dict[str, Any] = {"messages": CHAT}
HERE = {"template_arguments": OFF}
KWARGS = "chat_template_kwargs"
VARIANTS: dict[str, Callable[[Path], str]] = {
    "neither says it": partial(_prompts, {}, ROW, {}),
    "the recipe": partial(_prompts, HERE, ROW, OFF),
    "a text that becomes a chat": partial(_prompts, HERE, {"prompt": "12"}, OFF, options="?chat=true"),
    "a row": partial(_prompts, {}, ROW | {KWARGS: OFF}, OFF),
    "a row as JSON text": partial(_prompts, {}, ROW | {KWARGS: json.dumps(OFF)}, OFF),
    "a row against the recipe": partial(
        _prompts, HERE, ROW | {KWARGS: {"enable_thinking": True}}, {"enable_thinking": True}
    ),
    "a row beside the recipe": partial(_prompts, HERE, ROW | {KWARGS: {"effort": 5}}, OFF | {"effort": 5}),
    "null in a row": partial(_prompts, HERE, ROW | {KWARGS: None}, OFF),
    "an empty text in a row": partial(_prompts, HERE, ROW | {KWARGS: ""}, OFF),
    "a table": partial(_prompts, HERE, ROW | {KWARGS: {"effort": 5}}, OFF | {"effort": 5}, source="r.parquet"),
    "nulls in a table": partial(
        _prompts, HERE, ROW | {KWARGS: {"enable_thinking": None, "effort": 5}}, OFF | {"effort": 5}, source="r.parquet"
    ),
    "an iterator": partial(_prompts, HERE, ROW, OFF, source="mine.py:rows"),
    "an iterator whose rows say it": partial(
        _prompts, HERE, ROW | {KWARGS: {"effort": 1}}, OFF | {"effort": 1}, source="mine.py:rows"
    ),
    "an option of the source": partial(
        _prompts, HERE, ROW, {"effort": 3}, options="?template_arguments={effort = 3}"
    ),
    "tools as JSON text": partial(_prompts, HERE, ROW | {"tools": json.dumps(TOOLS)}, OFF, tools=TOOLS),
    "a number in the recipe": partial(_prompts, {"template_arguments": {"keep": 12}}, ROW, {"keep": 12}),
    "a colon in the recipe": partial(_prompts, {"template_arguments": {"effort": "1:2:"}}, ROW, {"effort": "1:2:"}),
    "a list in a row": partial(_refused, ROW | {KWARGS: [1]}, 'has wrong "chat_template_kwargs"'),
    "Python's text in a row": partial(_refused, ROW | {KWARGS: str(OFF)}, 'has wrong "chat_template_kwargs"'),
}  # fmt: skip
