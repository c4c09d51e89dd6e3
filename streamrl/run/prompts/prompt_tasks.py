"""Prompts of reasoning-gym: a task makes each row from the seed and the number of the row, when the row is read.
``open_prompts`` opens them in the process that draws or checks prompts."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from streamrl.base.errors import RecipeError
from streamrl.base.types import JsonMapping, JsonObject
from streamrl.recipe.problems import did_you_mean
from streamrl.recipe.user_code import describe_error
from streamrl.run.prompts.prompt_rows import BadRow, RowStore
from streamrl.run.prompts.prompt_spec import PromptSpec

INSTRUCTION = "\nGive the final answer between <answer> and </answer>."
"""Text that is appended to the question (option ``instruction``), because the verifier reads the answer there."""

_SIZE = 1000


class TaskRows(RowStore):
    """Rows of a task. ``size`` (1000), ``seed`` (0) and ``instruction`` are options of every task; the task defines the
    others. Raises ``RecipeError``."""

    def __init__(self, spec: PromptSpec) -> None:
        options = dict(spec.options)
        self._task = spec.source
        self._instruction = str(options.pop("instruction", INSTRUCTION))
        size = options.pop("size", _SIZE)
        seed = options.pop("seed", 0)
        for name, value, minimum in (("size", size, 1), ("seed", seed, 0)):
            if type(value) is not int or value < minimum:
                raise RecipeError(f'prompts "{spec.text}": {name} = {value} is no integer >= {minimum}: correct it')
        self._options = options
        self.size = int(size)
        self._dataset = _create(spec, {**options, "size": size, "seed": seed})

    def row(self, index: int) -> JsonObject:
        """Return ``prompt``, and ``answer``, ``metadata``, ``task``, ``task_options`` and ``question`` for the
        verifier."""
        try:
            entry = self._dataset[index]
        except Exception as error:
            raise BadRow(f"cannot be made ({describe_error(error)}): change the task's options") from error
        return {
            "prompt": entry["question"] + self._instruction,
            "question": entry["question"],
            "answer": plain(entry["answer"]),
            "metadata": plain(entry["metadata"]),
            "task": self._task,
            "task_options": self._options,
        }


def _create(spec: PromptSpec, settings: JsonMapping) -> Any:
    if find_spec("reasoning_gym") is None:
        raise RecipeError(f"prompts \"{spec.text}\" need reasoning-gym: pip install 'streamrl[reasoning-gym]'")
    factory: Any = import_module("reasoning_gym.factory")
    if spec.source not in factory.DATASETS:
        hint = did_you_mean(spec.source, factory.DATASETS)
        count = len(factory.DATASETS)
        raise RecipeError(f'prompts "{spec.text}": reasoning-gym has no task "{spec.source}" among its {count}{hint}')
    try:
        return factory.create_dataset(spec.source, **settings)
    except Exception as error:  # a task checks its options by assertions, and by its constructor
        names = ", ".join(factory.DATASETS[spec.source][1].__dataclass_fields__)
        raise RecipeError(
            f'prompts "{spec.text}": {describe_error(error)}: correct the options (the task has {names})'
        ) from error


def plain(value: Any) -> Any:
    """Return ``value`` as text, numbers, lists and mappings, which can be sent. Other objects become their text."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if hasattr(value, "tolist"):  # NumPy
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {key if type(key) in (str, int) else str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)
