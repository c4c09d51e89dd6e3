"""The first prompt of a run as the model will see it, for the dry run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from streamrl.base.printable import one_line
from streamrl.base.types import Prompt, TokenArray, token_array
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.run.prompts.prompt_rows import as_chat

_ENDS, _CHARACTERS = 8, 400
_LONGEST = 64 << 10
"""Bytes of what is compared: it is an argument of a process."""


class WrittenPrompt(msgspec.Struct, frozen=True):
    """A prompt as its author wrote it, text or a chat, with the ``token_ids`` that it is here."""

    token_ids: Sequence[int]
    text: str = ""
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    arguments: Mapping[str, Any] = {}


def written_prompt(prompt: Prompt) -> WrittenPrompt | None:
    """The part of ``prompt`` that transformers could tokenise; None: there is none, or it is long."""
    columns, ids = prompt.columns, prompt.token_ids.tolist()
    written = columns.get("prompt") if columns.get("messages") is None else columns["messages"]
    chat = as_chat(written)
    if chat is not None:
        found = WrittenPrompt(ids, "", chat, columns.get("tools"), columns.get("chat_template_kwargs") or {})
    elif isinstance(written, str):
        found = WrittenPrompt(ids, written)
    else:
        return None
    return found if len(msgspec.json.encode(found)) <= _LONGEST else None


def first_prompt_lines(prompt: Prompt, tokenizer: Tokenizer) -> list[str]:
    """The ends of the prompt as ids and as text, special tokens among it, and the tokens that end a completion."""
    ids = prompt.token_ids
    text = one_line(tokenizer.decode(ids, skip_special=False))
    ends = [f"{token} ({_shown(tokenizer, token_array([token]))})" for token in sorted(tokenizer.eos_token_ids)]
    lines = [
        f"prompt      {prompt.prompt_id}, {len(ids):,} tokens: {_both_ends(list(map(str, ids)), _ENDS, ', ')}",
        f"text        {_both_ends(text, _CHARACTERS, '')}",
        f"completion  ends with {', '.join(ends)}",
    ]
    if ids[-1] in tokenizer.eos_token_ids:
        lines.append(f"{'':<12}the prompt itself ends with {_shown(tokenizer, ids[-1:])}, which ends a completion")
    return lines


def difference_from_transformers(model_path: str, written: WrittenPrompt) -> str:
    """The first difference between ``token_ids`` and those of transformers; empty: none. Imports transformers."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        if written.messages is None:
            ids = list(tokenizer(written.text)["input_ids"])
        else:
            begun = written.messages[-1].get("role") == "assistant"
            how = {"continue_final_message": begun, "add_generation_prompt": not begun, "return_dict": False}
            ids = tokenizer.apply_chat_template(written.messages, tools=written.tools, **how, **written.arguments)
    except Exception as error:  # noqa: BLE001 - of the tokenizer's own class, which may raise anything
        return f"it cannot tokenise the prompt ({type(error).__name__}: {one_line(str(error)):.200})"
    ours = list(written.token_ids)
    if ids == ours:
        return ""
    pairs = zip(ids, ours, strict=False)
    place = next((place for place, (theirs, mine) in enumerate(pairs) if theirs != mine), min(len(ids), len(ours)))
    shown = [
        f"{part[place]} ({one_line(tokenizer.decode(part[place : place + 1]))})" if place < len(part) else "no token"
        for part in (ids, ours)
    ]
    return f"token {place + 1} of {len(ids)} is {shown[0]} there, and {shown[1]} of {len(ours)} here"


def _shown(tokenizer: Tokenizer, ids: TokenArray) -> str:
    return one_line(tokenizer.decode(ids, skip_special=False))


def _both_ends(whole: Any, count: int, between: str) -> str:
    if len(whole) <= 2 * count:
        return between.join(whole)
    return f"{between.join(whole[:count])}{between or ' '}...{between or ' '}{between.join(whole[-count:])}"
