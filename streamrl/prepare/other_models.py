"""Checks of models that score the policy's tokens: their token ids must stand for the same texts. ``preflight`` calls
it in the process of the command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import anyio
from msgspec.structs import replace

from streamrl.base.errors import RecipeError
from streamrl.base.types import token_array
from streamrl.pretrained.model_facts import facts_of, read_model_facts
from streamrl.pretrained.tokenizer import Tokenizer, load_tokenizer
from streamrl.pretrained.trainable_models import refuse_untrainable, split_problems
from streamrl.pretrained.weight_files import ModelDirectoryError
from streamrl.recipe.sections import Recipe
from streamrl.rewards.served.client import ModelError
from streamrl.rewards.teacher.clients import TeacherClients, TeacherFailed, TeacherSilent

ANSWER_S = 10.0
"""Time in which a teacher at an address must have answered the first question."""
ASKED_TOKENS = 64


def reference_problems(recipe: Recipe) -> Iterator[str]:
    """Problems of ``objective.reference``, which must be a model that ranks can hold, with the policy's tokens."""
    key = "objective.reference"
    directory = Path(recipe.objective.reference)
    if not recipe.objective.reference:
        return
    try:
        logits = read_model_facts(directory).vocabulary
        refuse_untrainable(directory)
        splits = split_problems(directory, recipe.training.tensor_parallel_size, recipe.training.expert_parallel_size)
    except ModelDirectoryError as error:
        yield f"{key}: {directory} {error}"
        return
    yield from (f"{key}: {problem}" for problem in splits)
    yield from different_tokens(key, directory, recipe)
    yield from _missing_logits(key, directory, logits, recipe)


def _missing_logits(key: str, directory: Path, logits: int, recipe: Recipe) -> Iterator[str]:
    """The problem of the model in ``directory``, which ``key`` names, where it has fewer ``logits`` than the policy."""
    policy = facts_of(recipe.model.path)
    if policy is not None and logits < policy.vocabulary:
        yield (
            f"{key}: {directory} has logits of {logits} tokens, and the policy samples from {policy.vocabulary}: take "
            "a model of the same family that has as many"
        )


def teacher_problems(recipe: Recipe) -> Iterator[str]:
    """Problems of served teachers: tokenizers must be the policy's, and the key of endpoints must be set."""
    for name, address in recipe.teacher.addresses.items():
        key = f"teacher.advanced.further, {name}"
        if not name:
            key = "teacher.tokenizer" if address.endpoint else "teacher.model"
        if address.tokenizer:
            yield from different_tokens(key, Path(address.tokenizer), recipe)
    if recipe.teacher.is_own and (facts := facts_of(recipe.teacher.model)):
        yield from _missing_logits("teacher.model", Path(recipe.teacher.model), facts.vocabulary, recipe)
    variable = recipe.teacher.api_key_variable
    if variable and not os.environ.get(variable):
        yield f"teacher.advanced.api_key_variable: {variable} is not set: export it"


def address_problems(recipe: Recipe) -> Iterator[str]:
    """Problems of the addresses of teachers, each of which is asked for logprobs of tokens of the whole vocabulary: it
    must answer, and its token ids must stand for the texts of the policy's."""
    teacher = replace(recipe.teacher, timeout_s=ANSWER_S)
    try:
        tokenizer = load_tokenizer(recipe.model.path)
        clients = TeacherClients(teacher)
    except RecipeError:
        return  # reported as a problem of ``model.path``, or of the key
    for name, address in teacher.addresses.items():
        if address.endpoint and (problem := anyio.run(_problem_of_address, clients, name, tokenizer)):
            key = f"teacher.advanced.further, {name}" if name else "teacher.endpoint"
            yield f"{key}: {address.endpoint}: {problem}"


async def _problem_of_address(clients: TeacherClients, name: str, tokenizer: Tokenizer) -> str:
    every = max(1, tokenizer.vocabulary_size // ASKED_TOKENS)
    ids = sorted({*range(0, tokenizer.vocabulary_size, every)} - tokenizer.special_token_ids)
    try:
        answers = await clients.ask(name, token_array([ids[0], *ids]))
    except TeacherSilent as error:
        return f"{error}: start it first, or correct the address"
    except (ModelError, TeacherFailed) as error:
        return str(error)
    finally:
        await clients.aclose()
    for token_id, answer in zip(ids, answers, strict=True):
        text = tokenizer.decode(token_array([token_id]), False).strip()
        teacher_text = (answer.decoded_token or "").strip()
        # Servers write parts of characters and spaces in several ways.
        if teacher_text != text and teacher_text.isalnum() and text.isalnum():
            return (
                f"token {token_id} is {teacher_text!r} there, and {text!r} in the policy's: take a teacher with the "
                "same vocabulary"
            )
    return ""


def different_tokens(key: str, directory: Path, recipe: Recipe) -> Iterator[str]:
    """The problem of the model in ``directory``, which ``key`` names, where its token ids stand for other texts than
    the policy's."""
    try:
        other = load_tokenizer(directory)
    except RecipeError as error:
        yield from (f"{key}: {problem}" for problem in error.problems)
        return
    try:
        difference = load_tokenizer(recipe.model.path).first_difference(other)
    except RecipeError:
        return  # reported as a problem of ``model.path``
    if difference:
        yield (
            f"{key}: {directory} has another tokenizer: {difference}: it cannot score tokens of the policy; "
            "take a model with the same vocabulary"
        )
