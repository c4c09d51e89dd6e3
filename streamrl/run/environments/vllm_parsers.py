"""vLLM's tool parsers by name, imported where an environment runs and never by the controller: they bring torch and
half a gigabyte. Many make a call of one that was cut off, with the arguments that it had, and drop every call of a turn
of which one cannot be read. Therefore a turn must end with the tag with which the model's chat template ends calls, and
have a call for each tag that begins one; formats without tags have no such check."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.base.errors import RecipeError
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.pretrained.turns.template_facts import template_facts
from streamrl.pretrained.turns.tool_calls import BadCallError, CallReader, Found, Functions, read_call
from streamrl.recipe.environment import VLLM


def vllm_reader(tool_format: str, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> CallReader:
    """Return what reads calls of ``tools`` (JSON schemas) by the parser of ``tool_format`` (``vllm:PARSER``). Raises
    ``RecipeError`` where vLLM has none of the name, or it does not fit the model."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tokenizers import cached_get_tokenizer
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise RecipeError(f'environment.tool_format: "{tool_format}" needs vLLM ({error}): install it') from error
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)  # a traceback for each bad call
    known = ToolParserManager.list_registered()
    name = tool_format.removeprefix(VLLM)
    if name not in known:
        names = ", ".join(known)
        raise RecipeError(f'environment.tool_format: vLLM has no tool parser "{name}": write {VLLM} and one of {names}')
    request = ChatCompletionRequest(messages=[], tools=list(tools) or None)
    try:
        parser = ToolParserManager.get_tool_parser(name)
        of_vllm = cached_get_tokenizer(tokenizer.directory)
        parser(of_vllm, request.tools).extract_tool_calls("", request)
    except Exception as error:
        raise RecipeError(
            f'environment.tool_format: "{tool_format}" does not fit the model ({error}): name the parser of its family'
        ) from error
    opens, closes = template_facts(tokenizer, tools).call_tags

    def read(content: str, _: Functions) -> Found:
        content = content.strip()  # some want the call at its start
        try:  # a parser for each turn: it has the state of a stream
            found = parser(of_vllm, request.tools).extract_tool_calls(content, request)
        except Exception as error:
            raise BadCallError(f"the calls could not be read ({type(error).__name__}: {error})") from error
        calls = [read_call(one.function.name, one.function.arguments) for one in found.tool_calls]
        if opens and content.count(opens) > len(calls):
            raise BadCallError(f"not every {opens} begins a call that can be read")
        if calls and not content.endswith(closes):
            raise BadCallError(f"a turn that calls a tool must end with {closes}")
        return (found.content or "") if calls else content, calls

    return read
