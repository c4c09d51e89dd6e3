"""The first prompt of a run as the model will see it, for the dry run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.base.printable import one_line
from streamrl.base.types import Prompt, token_array
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.run.prompts.prompt_rows import as_chat

_TOKENS = 8
_CHARACTERS = 400


def first_prompt_lines(prompt: Prompt, tokenizer: Tokenizer) -> list[str]:
    """The ends of the prompt as ids and as text, special tokens among it, and the tokens that end a completion."""
    ids = prompt.token_ids
    text, last = (one_line(tokenizer.decode(part, skip_special=False)) for part in (ids, ids[-1:]))
    ends = [f"{end} ({one_line(tokenizer.decode(token_array([end]), False))})" for end in tokenizer.eos_token_ids]
    lines = [
        f"prompt      {prompt.prompt_id}, {len(ids):,} tokens: {_abbreviated(list(map(str, ids)), _TOKENS, ', ')}",
        f"text        {_abbreviated(text, _CHARACTERS, '')}",
        f"completion  ends with {', '.join(ends)}",
    ]
    ended = ids[-1] in tokenizer.eos_token_ids
    also = [f"the prompt itself ends with {last}, which ends a completion"] if ended else []
    return [*lines, *(f"{'':<12}{line}" for line in (tokenizer.end_notice, *also) if line)]


def difference_from_transformers(model_path: str, row: Mapping[str, Any], ours: Sequence[int]) -> str:
    """The first difference between ``ours``, the ids of a row, and those of transformers, which this imports; empty:
    there is none, or the row has only ids."""
    from transformers import AutoTokenizer

    written = row.get("prompt") if row.get("messages") is None else row["messages"]
    chat = as_chat(written)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        if chat is not None:
            begun = chat[-1]["role"] == "assistant"
            given = row.get("chat_template_kwargs") or {}
            how = {"continue_final_message": begun, "add_generation_prompt": not begun, "return_dict": False}
            ids = tokenizer.apply_chat_template(chat, tools=row.get("tools"), **how, **given)
        else:
            ids = list(tokenizer(written)["input_ids"]) if isinstance(written, str) else ours
    except Exception as error:  # noqa: BLE001 - of the tokenizer's own class, which may raise anything
        return f"it cannot tokenise the prompt ({type(error).__name__}: {one_line(str(error)):.200})"
    pairs = zip(ids, ours, strict=False)
    place = next((at for at, (theirs, mine) in enumerate(pairs) if theirs != mine), min(len(ids), len(ours)))
    if len(ids) == len(ours) == place:
        return ""
    there, here = (
        f"{part[place]} ({one_line(tokenizer.decode(part[place : place + 1]))})" if place < len(part) else "no token"
        for part in (ids, list(ours))
    )
    return f"token {place + 1} of {len(ids)} is {there} there, and {here} of {len(ours)} here"


def _abbreviated(whole: Any, count: int, between: str) -> str:
    if len(whole) <= 2 * count:
        return between.join(whole)
    return f"{between.join(whole[:count])}{between or ' '}...{between or ' '}{between.join(whole[-count:])}"
