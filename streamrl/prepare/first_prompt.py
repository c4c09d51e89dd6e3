"""The first prompt of a run as the model will see it. The dry run and ``streamrl try`` print it in the process of the
command; the dry run compares its ids with those of transformers in the process of ``recipe_probe``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamrl.base.printable import one_line
from streamrl.base.types import JsonMapping, Prompt, token_array
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.run.prompts.prompt_rows import as_chat

_TOKENS = 8
_CHARACTERS = 400


def first_prompt_lines(prompt: Prompt, tokenizer: Tokenizer) -> list[str]:
    """Lines with both ends of the prompt, as ids and as text with its special tokens, and the tokens that end a
    completion."""
    ids = prompt.token_ids
    text, last = (one_line(tokenizer.decode(part, skip_special=False)) for part in (ids, ids[-1:]))
    ends = [f"{end} ({one_line(tokenizer.decode(token_array([end]), False))})" for end in tokenizer.eos_token_ids]
    lines = [
        f"prompt      {prompt.prompt_id}, {len(ids):,} tokens: {_abbreviated(list(map(str, ids)), _TOKENS, ', ')}",
        f"text        {_abbreviated(text, _CHARACTERS, '')}",
        f"completion  ends with {', '.join(ends)}",
    ]
    ends_completion = ids[-1] in tokenizer.eos_token_ids
    if tokenizer.end_notice:  # the files of the model name different end tokens
        lines.append(f"{'':<12}{tokenizer.end_notice}")
    if ends_completion:
        lines.append(f"{'':<12}the prompt itself ends with {last}, which ends a completion")
    return lines


def difference_from_transformers(model_path: str, row: JsonMapping, ours: Sequence[int]) -> str:
    """The first difference between ``ours``, the ids of a row, and the ids of transformers, which this function
    imports. A part of a sentence whose subject is transformers; empty where the ids are equal, or where the row gives
    ids in place of text."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    prompt_of_row = row.get("prompt") if row.get("messages") is None else row["messages"]
    chat = as_chat(prompt_of_row)  # None for a text
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        if chat is not None:
            unfinished = chat[-1]["role"] == "assistant"
            template_arguments = row.get("chat_template_kwargs") or {}
            how = {"continue_final_message": unfinished, "add_generation_prompt": not unfinished, "return_dict": False}
            ids = tokenizer.apply_chat_template(chat, tools=row.get("tools"), **how, **template_arguments)
        else:
            ids = list(tokenizer(prompt_of_row)["input_ids"]) if isinstance(prompt_of_row, str) else ours
    except Exception as error:  # noqa: BLE001 - of the tokenizer's own class, which may raise anything
        return f"it cannot tokenise the prompt ({type(error).__name__}: {one_line(str(error)):.200})"
    pairs = zip(ids, ours, strict=False)
    differences = (index for index, (their_id, our_id) in enumerate(pairs) if their_id != our_id)
    place = next(differences, min(len(ids), len(ours)))
    if len(ids) == len(ours) == place:
        return ""

    def token_at(tokens: list[int]) -> str:
        if place >= len(tokens):
            return "no token"
        return f"{tokens[place]} ({one_line(tokenizer.decode(tokens[place : place + 1]))})"

    their_token = token_at(ids)
    our_token = token_at(list(ours))
    cause = ""
    if type(tokenizer) is not PreTrainedTokenizerFast:  # as the class of Qwen3.5, which takes the vocabulary alone
        rules = "has rules of its own in place of those of tokenizer.json"
        cause = f"; the cause may be its {type(tokenizer).__name__}, which {rules}"
    return f"token {place + 1} of {len(ids)} is {their_token} there, and {our_token} of {len(ours)} here{cause}"


def _abbreviated(parts: Any, count: int, between: str) -> str:
    """``parts`` joined; where there are many, only the first and last ``count``."""
    if len(parts) <= 2 * count:
        return between.join(parts)
    gap = between or " "
    return f"{between.join(parts[:count])}{gap}...{gap}{between.join(parts[-count:])}"
