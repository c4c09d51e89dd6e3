"""Looks at what a recipe names in a throw-away process, which a check of the recipe neither imports nor waits for:
``python -m streamrl.prepare.recipe_probe``, with a kind of ``_KINDS`` and its argument."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import anyio
from msgspec import Struct, json, msgpack

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.run_process import redirected
from streamrl.base.types import JsonObject, Prompt, Texts
from streamrl.observe.user_calls import observer_class
from streamrl.prepare.first_prompt import difference_from_transformers
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.environment import Environment
from streamrl.recipe.field_types import written_path
from streamrl.recipe.sections import Recipe
from streamrl.recipe.throwaway_process import ThrowawayAnswer, answer_parent, run_throwaway
from streamrl.recipe.user_code import load_user_object
from streamrl.rewards.user_variables import keep_variables_of_user_code

if TYPE_CHECKING:
    from streamrl.engines.vllm.options import EngineOptions


_WRITTEN = ("prompt", "messages", "tools", "chat_template_kwargs")
PROBE_TIMEOUT_S = 300.0
_LONGEST_ARGUMENT = 100_000
"""Bytes: Linux takes 128 KiB. A longer prompt is not compared."""


class _ProbeResult(Struct, frozen=True, kw_only=True):
    """Result of the child process."""

    problems: Texts = ()
    differs: str = ""
    columns: Texts = ()
    tools: str = ""


class ModelTrial(NamedTuple):
    """Result of a trial of a model.

    ``problem``: reason why no run can train the model (empty: it can be trained, or this is unknown)
    ``differs``: difference between the ids of a prompt and those of transformers
    ``failure``: failure that kept the trial from an answer (empty: it gave one)"""

    problem: str = ""
    differs: str = ""
    failure: str = ""


def problems_of_object(spec: str, timeout_s: float, *, kind: str = "object") -> Sequence[str]:
    """Problems of the object ``module:name`` or ``file.py:name``: reasons why it cannot be loaded or is no ``kind``
    (``object``: any object; ``observer``: a class of observers)."""
    result, child = _run_child(kind, spec, timeout_s)
    if result is not None:
        return result.problems
    if child.late:
        return [f"{spec} not imported within {timeout_s:g} s: move slow work out of the module's top level"]
    return [f"{spec} ended the process that imported it ({child.failure or 'exit code 0'}): import it by hand"]


def look_at_environments(
    recipe: Recipe, model: str, timeout_s: float
) -> tuple[list[str], dict[str, Texts], dict[str, str]]:
    """Problems of the code of all environments, the columns of a row that each needs, by its path in the recipe, and
    the JSON schemas of its tools as text (empty: none), by its name. ``model``: directory of the model (empty:
    unknown); with tools, its chat template must write calls in a known format."""
    problems: list[str] = []
    columns = {}
    tools = {}
    for name, environment in recipe.environment.by_name.items():
        path = recipe.environment.path_of(name)
        written = written_path(Recipe, path)
        result, child = _run_child("environment", json.encode((written, environment, model)).decode(), timeout_s)
        if result is not None:
            problems += result.problems
            columns[path] = result.columns
            tools[name] = result.tools
            continue
        how = f"ended its process ({child.failure or 'exit code 0'})"
        if child.late:
            how = f"not imported within {timeout_s:g} s"
        problems.append(f"{written}: its code {how}: import it by hand")
    return problems, columns, tools


def problem_of_model(
    options: EngineOptions,
    timeout_s: float,
    targets: Sequence[str] = (),
    prompt: Prompt | None = None,
    *,
    split: tuple[int, int] = (1, 1),
) -> ModelTrial:
    """Try the model of ``options`` and the ids of ``prompt``.

    ``split``: sizes of tensor and expert parallel ranks. Takes about ten seconds, mostly for the import of vLLM."""
    row = JsonObject()
    ids = list[int]()
    if prompt:
        row, ids = _compared(prompt)
    argument = json.encode((options, targets, split, row, ids))
    if len(argument) > _LONGEST_ARGUMENT:
        argument = json.encode((options, targets, split, {}, ()))
    result, child = _run_child("model", argument.decode(), timeout_s)
    if result is None:
        return ModelTrial(failure=child.failure or "no answer")
    return ModelTrial("".join(result.problems), result.differs)


def difference_of_prompt(model_path: str, prompt: Prompt, timeout_s: float) -> str:
    """Difference between the ids of ``prompt`` and those of transformers; empty: none, or unknown. Takes a few seconds,
    for an import of transformers."""
    row, ids = _compared(prompt)
    argument = json.encode((model_path, row, ids))
    if not row or len(argument) > _LONGEST_ARGUMENT:
        return ""
    result, _ = _run_child("prompt", argument.decode(), timeout_s)
    if result is None:
        return ""
    return result.differs


def _compared(prompt: Prompt) -> tuple[JsonObject, list[int]]:
    """Return the columns of a row of which transformers makes ids, and the ids of the prompt."""
    row = {name: prompt.columns[name] for name in _WRITTEN if name in prompt.columns}
    return row, prompt.token_ids.tolist()


def _run_child(kind: str, argument: str, timeout_s: float) -> tuple[_ProbeResult | None, ThrowawayAnswer]:
    child = run_throwaway("streamrl.prepare.recipe_probe", [kind, argument], timeout_s)
    result = msgpack.decode(child.written, type=_ProbeResult) if child.written and not child.failure else None
    return result, child


def _look_at(load: Callable[[str], object], spec: str) -> _ProbeResult:
    try:
        load(spec)
    except RecipeError as error:
        return _ProbeResult(problems=tuple(error.problems))
    return _ProbeResult()


def _look_at_environment(argument: str) -> _ProbeResult:
    from streamrl.run.environments.chat_tokens import ChatModel
    from streamrl.run.environments.environment_forms import load_episode, load_tools, try_objects
    from streamrl.run.environments.tools import Tool

    path, environment, model = json.decode(argument, type=tuple[str, Environment, str])
    keep_variables_of_user_code(environment.variables)
    server_tools = list[Tool]()

    async def look() -> _ProbeResult:
        chat_model = ChatModel(load_tokenizer(model), environment) if model else None
        _, columns = load_episode(environment, chat_model, server_tools=server_tools)
        await try_objects(environment)
        tools = ""
        if environment.tools:
            tools = json.encode(load_tools(environment, server_tools).schemas).decode()
        return _ProbeResult(columns=columns, tools=tools)

    try:
        if environment.servers:
            from streamrl.run.environments.mcp_tools import list_tools

            server_tools += list_tools(environment.servers, environment.variables)
        # In an event loop as the worker has one: user code may look at it.
        return anyio.run(look, backend_options={"use_uvloop": True})
    except RecipeError as error:
        return _ProbeResult(
            problems=tuple(f"{path}: {problem}".replace(": environment.", ".", 1) for problem in error.problems)
        )


def _look_at_prompt(argument: str) -> _ProbeResult:
    model_path, row, ids = json.decode(argument, type=tuple[str, JsonObject, list[int]])
    return _ProbeResult(differs=difference_from_transformers(model_path, row, ids))


def _look_at_model(argument: str) -> _ProbeResult:
    """Check the model in a probe of vLLM's loader. Errors that say nothing about a real engine are raised."""
    with open(os.devnull, "wb") as nowhere, redirected(2, nowhere.fileno()):  # vLLM warns of an engine that is none
        return _try_model(argument)


def _try_model(argument: str) -> _ProbeResult:
    from streamrl.engines.vllm.load_plan_probe import probe_engine, published_tensors
    from streamrl.engines.vllm.options import EngineOptions
    from streamrl.learning.state.unmerged import adapter_shapes
    from streamrl.weights.pull.replica import TensorSpec

    decoded = json.decode(argument, type=tuple[EngineOptions, Texts, tuple[int, int], JsonObject, list[int]])
    engine, targets, split, row, ids = decoded
    differs = ""
    if row:
        differs = difference_from_transformers(engine.model_path, row, ids)
    try:
        tensors = published_tensors(engine.model_path, targets, split)
        adapter = dict[str, TensorSpec]()
        if engine.adapter.syncs_adapter:
            shapes = adapter_shapes(engine.adapter, engine.model_path)
            adapter = {name: TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items()}
        probe_engine(engine, tensors, adapter)
    except StreamRLError as error:
        return _ProbeResult(problems=(str(error),), differs=differs)
    return _ProbeResult(differs=differs)


_KINDS: dict[str, Callable[[str], _ProbeResult]] = {
    "object": partial(_look_at, load_user_object),
    "observer": partial(_look_at, observer_class),
    "environment": _look_at_environment,
    "model": _look_at_model,
    "prompt": _look_at_prompt,
}


def _answer(answers: BinaryIO, arguments: Sequence[str]) -> None:
    kind, argument = arguments
    answers.write(msgpack.encode(_KINDS[kind](argument)))


if __name__ == "__main__":
    answer_parent(_answer)
