"""Looks at what a recipe names in a throw-away process, which a check of the recipe neither imports nor waits for:
``python -m streamrl.prepare.probe ... KIND ARGUMENT``, with a kind of ``_KINDS``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.types import Prompt
from streamrl.observe.user_calls import observer_class
from streamrl.prepare.first_prompt import difference_from_transformers
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.environment import Environment
from streamrl.recipe.throwaway_process import ThrowawayAnswer, answer_parent, run_throwaway
from streamrl.recipe.user_code import load_user_object

if TYPE_CHECKING:
    from streamrl.engines.vllm.options import EngineOptions


_WRITTEN = ("prompt", "messages", "tools", "chat_template_kwargs")
_LONGEST_ARGUMENT = 100_000
"""Bytes: Linux takes 128 KiB. A longer prompt is not compared."""


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the child process."""

    problems: tuple[str, ...] = ()
    differs: str = ""
    columns: tuple[str, ...] = ()


def problems_of_object(spec: str, timeout_s: float, *, kind: str = "object") -> Sequence[str]:
    """Problems of the object ``module:name`` or ``file.py:name``: each names it, and why it cannot be loaded or is no
    ``kind`` (``object``: any; ``observer``)."""
    found, ran = _run_child(kind, spec, timeout_s)
    if found is not None:
        return found.problems
    if ran.late:
        return [f"{spec} not imported within {timeout_s:g} s: move slow work out of the module's top level"]
    return [f"{spec} ended the process that imported it ({ran.failure or 'exit code 0'}): import it by hand"]


def look_at_environment(given: Environment, model: str, timeout_s: float) -> tuple[Sequence[str], tuple[str, ...]]:
    """Return problems of what ``[environment]`` names, and the columns that it cannot do without. ``model``: its
    directory (empty: none is known), which must write calls in a known way where there are tools."""
    found, ran = _run_child("environment", msgspec.json.encode((given, model)).decode(), timeout_s)
    if found is not None:
        return found.problems, found.columns
    how = f"not imported within {timeout_s:g} s" if ran.late else f"ended its process ({ran.failure or 'exit code 0'})"
    return [f"environment: its code {how}: import it by hand"], ()


def problem_of_model(
    options: EngineOptions,
    timeout_s: float,
    targets: Sequence[str] = (),
    prompt: Prompt | None = None,
    *,
    split: tuple[int, int] = (1, 1),
) -> tuple[str | None, str]:
    """Return why no run can train the model of ``options`` (empty: one can; None: not found out), and how the ids of
    ``prompt`` differ from those of transformers. ``split``: sizes of tensor and expert parallel ranks. Takes about ten
    seconds, most of which imports vLLM."""
    written = {name: prompt.columns[name] for name in _WRITTEN if name in prompt.columns} if prompt else {}
    argument = msgspec.json.encode((options, targets, split, written, prompt.token_ids.tolist() if prompt else ()))
    if len(argument) > _LONGEST_ARGUMENT:
        argument = msgspec.json.encode((options, targets, split, {}, ()))
    found, _ = _run_child("model", argument.decode(), timeout_s)
    return (None, "") if found is None else ("".join(found.problems), found.differs)


def _run_child(kind: str, argument: str, timeout_s: float) -> tuple[_Found | None, ThrowawayAnswer]:
    ran = run_throwaway("streamrl.prepare.probe", [kind, argument], timeout_s)
    found = msgspec.msgpack.decode(ran.written, type=_Found) if ran.written and not ran.failure else None
    return found, ran


def _look_at(load: Callable[[str], object], spec: str) -> _Found:
    try:
        load(spec)
    except RecipeError as error:
        return _Found(problems=tuple(error.problems))
    return _Found()


def _look_at_environment(argument: str) -> _Found:
    from streamrl.run.environments.chat_tokens import ChatModel
    from streamrl.run.environments.forms import load_episode

    environment, model = msgspec.json.decode(argument, type=tuple[Environment, str])
    try:
        chat_model = ChatModel(load_tokenizer(model), environment) if model else None
        return _Found(columns=load_episode(environment, chat_model)[1])
    except RecipeError as error:
        return _Found(problems=tuple(f"environment: {one}".replace(": environment.", ".", 1) for one in error.problems))


def _look_at_model(argument: str) -> _Found:
    """Raises what says nothing about a real engine."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # vLLM warns of an engine that is none
    from streamrl.engines.vllm.load_plan_probe import probe_engine
    from streamrl.engines.vllm.options import EngineOptions
    from streamrl.learning.model.loading import published_shapes
    from streamrl.learning.state.unmerged import adapter_shapes
    from streamrl.weights.pull.replica import TensorSpec

    asked = msgspec.json.decode(
        argument, type=tuple[EngineOptions, tuple[str, ...], tuple[int, int], dict[str, Any], list[int]]
    )
    engine, targets, split, row, ids = asked
    differs = difference_from_transformers(engine.model_path, row, ids) if row else ""
    try:
        shapes = published_shapes(engine.model_path, targets, split)
        adapter = adapter_shapes(engine.adapter, engine.model_path) if engine.adapter.served else {}
        probe_engine(engine, *({n: TensorSpec(n, "bfloat16", s) for n, s in one.items()} for one in (shapes, adapter)))
    except StreamRLError as error:
        return _Found(problems=(str(error),), differs=differs)
    return _Found(differs=differs)


_KINDS: dict[str, Callable[[str], _Found]] = {
    "object": partial(_look_at, load_user_object),
    "observer": partial(_look_at, observer_class),
    "environment": _look_at_environment,
    "model": _look_at_model,
}


def _answer(answers: BinaryIO, arguments: Sequence[str]) -> None:
    kind, argument = arguments
    answers.write(msgspec.msgpack.encode(_KINDS[kind](argument)))


if __name__ == "__main__":
    answer_parent(_answer)
