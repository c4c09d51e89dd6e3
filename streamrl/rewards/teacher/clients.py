"""Clients of the teachers of a run, and the form of their answers. The ``scorer`` asks with them in the controller, and
``prepare.other_models`` in the process of the command, before a run."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.types import TokenArray
from streamrl.recipe.objectives.teacher import TEACHER, Teacher
from streamrl.rewards.served.client import ModelClient


class PromptLogprob(Struct):
    """Logprob of a token of a prompt, and its text, where the server says it."""

    logprob: float
    decoded_token: str | None = None


class _Choice(Struct):
    prompt_logprobs: list[dict[str, PromptLogprob] | None]


class _Answer(Struct):
    choices: list[_Choice]


class TeacherFailed(StreamRLError):
    """A teacher that gave no logprobs. The message names it, its answer and the remedy."""


class TeacherSilent(StreamRLError):
    """A teacher that gave no answer in time. The message has the time, and its last failure."""


class TeacherClients:
    """A client of each teacher of ``teacher``, by its name."""

    def __init__(self, teacher: Teacher, own_socket: Path | None = None) -> None:
        """``own_socket``: socket of the teacher that the run serves; None: it serves none. Raises ``RecipeError``
        without the key of the endpoints."""
        self._teacher = teacher
        headers = {}
        if teacher.api_key_variable:
            key = os.environ.get(teacher.api_key_variable)
            if not key:
                raise RecipeError(
                    f"teacher.advanced.api_key_variable: {teacher.api_key_variable} is not set: export it"
                )
            headers = {"Authorization": f"Bearer {key}"}
        client = partial(
            ModelClient, concurrency=teacher.concurrency, retries=None, timeout_s=teacher.timeout_s, kind=TEACHER
        )
        served_elsewhere = {name: address for name, address in teacher.addresses.items() if address.endpoint}
        self._clients = {name: client(address.endpoint, headers) for name, address in served_elsewhere.items()}
        if teacher.is_own:
            self._clients[""] = client("http://teacher/v1", {}, socket_path=str(own_socket))

    async def ask(self, name: str, token_ids: TokenArray) -> list[PromptLogprob]:
        """Logprob of each token but the first after those before it. Raises ``TeacherSilent`` after the time limit of
        a question, ``TeacherFailed`` and ``ModelError``."""
        model = self._teacher.addresses[name].model
        client = self._clients[name]
        ids = token_ids.tolist()
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        try:
            content = await client.post("completions", body)
            of_prompt = msgspec.json.decode(content, type=_Answer).choices[0].prompt_logprobs
            return [(of_prompt[place] or {})[str(token_id)] for place, token_id in enumerate(ids) if place]
        except TimeoutError as error:
            reason = client.last_failure and f" ({client.last_failure})"
            raise TeacherSilent(f"no answer within {self._teacher.timeout_s:g} s{reason}") from error
        except (msgspec.MsgspecError, IndexError, KeyError) as error:
            raise TeacherFailed(
                f"the teacher {model} gave no logprobs of the prompt ({error}): its server must take prompt_logprobs, "
                "as vLLM's /v1/completions does"
            ) from error

    async def aclose(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            await client.aclose()
