"""Readers of calls that use vLLM's tool parsers.

``ChatModel.call_reader`` imports this file for a recipe with ``tool_format = "vllm:PARSER"``, in environment workers
and in the dry run. The controller never does: the parsers import torch and take half a gigabyte.

Many parsers make a call of a turn that was cut off in the middle of one, with the arguments that there were, and drop
all calls of a turn if one of them cannot be read. Therefore a turn must end with the tag that ends calls in the model's
chat template, and must have one call for each tag that begins one. Formats without tags have no such check."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from streamrl.base.errors import RecipeError
from streamrl.base.types import JsonMapping
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.pretrained.turns.template_facts import template_facts
from streamrl.pretrained.turns.tool_calls import BadCallError, CallReader, Functions, TextAndCalls, read_call
from streamrl.recipe.environment import VLLM

_TAG = r"([<\[][^\s<>\[\]{}()=\"']+[>\]])?"
_TAGS = re.compile(rf"{_TAG}.*?{_TAG}\Z", re.DOTALL)
"""Tags before and after a call, such as ``<tool_call>``; a text may have none."""


def vllm_reader(tool_format: str, tokenizer: Tokenizer, tools: Sequence[JsonMapping]) -> CallReader:
    """Return a reader of calls of ``tools`` (JSON schemas) that uses the parser in ``tool_format`` (``vllm:PARSER``).
    Raises ``RecipeError`` where vLLM has no parser of this name, or the parser does not fit the model."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tokenizers import cached_get_tokenizer
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise RecipeError(f'environment.tool_format: "{tool_format}" needs vLLM ({error}): install it') from error
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # a traceback for each bad call
    name = tool_format.removeprefix(VLLM)
    names = ToolParserManager.list_registered()
    if name not in names:
        listed = ", ".join(names)
        raise RecipeError(
            f'environment.tool_format: vLLM has no tool parser "{name}": write {VLLM} and one of {listed}'
        )
    request = ChatCompletionRequest(messages=[], tools=list(tools) or None)
    try:
        parser = ToolParserManager.get_tool_parser(name)
        vllm_tokenizer = cached_get_tokenizer(tokenizer.directory)
        parser(vllm_tokenizer, request.tools).extract_tool_calls("", request)
    except Exception as error:
        raise RecipeError(
            f'environment.tool_format: "{tool_format}" does not fit the model ({error}): name the parser of its family'
        ) from error
    opens, closes = _TAGS.findall(template_facts(tokenizer, tools).written_call)[0]

    def read(content: str, _: Functions) -> TextAndCalls:
        content = content.strip()  # some parsers require the call at the start
        try:
            # Each turn needs a parser of its own: a parser has the state of one stream.
            parsed = parser(vllm_tokenizer, request.tools).extract_tool_calls(content, request)
        except Exception as error:
            raise BadCallError(f"the calls could not be read ({type(error).__name__}: {error})") from error
        calls = [read_call(call.function.name, call.function.arguments) for call in parsed.tool_calls]
        if opens and content.count(opens) > len(calls):
            raise BadCallError(f"not every {opens} begins a call that can be read")
        if calls and not content.endswith(closes):
            raise BadCallError(f"a turn that calls a tool must end with {closes}")
        if calls:
            content = parsed.content or ""
        return content, calls

    return read
