"""The recipe's ``[teacher]``: models that score the tokens which the policy sampled, for distillation. The run serves
the first one itself, or it is at an address. ``rewards.teacher`` asks them, while the rewards are computed."""

from __future__ import annotations

from typing import Annotated

from streamrl.recipe.field_types import Natural, Positive, PositiveFloat, Section, advanced
from streamrl.recipe.rewards import FailurePolicy
from streamrl.recipe.served_models import ServedModel

TEACHER = "teacher"
"""Name of the teacher's logprobs among the values of sampled tokens, and of a teacher that failed."""


class TeacherAddress(Section, frozen=True, kw_only=True):
    """A model that scores tokens. It must have the policy's tokenizer."""

    name: Annotated[str, "value of the column teacher.column for rows that this teacher scores"] = ""
    endpoint: Annotated[str, "address of vLLM's OpenAI-compatible server, such as http://host:8000/v1"]
    model: Annotated[str, "name of the model at the endpoint"]
    tokenizer: Annotated[str, "directory with the teacher's tokenizer.json, which the dry run compares"]


class Teacher(ServedModel, frozen=True):
    """Models that score each sampled token. Which teacher scores a row, its ``column`` says."""

    model: Annotated[
        str,
        "a Hugging Face directory, or a model of the Hub, which the run serves; with an endpoint, its name there "
        "(empty: no served teacher)",
    ] = ""
    endpoint: Annotated[
        str, "address of vLLM's OpenAI-compatible server, such as http://host:8000/v1 (empty: the run serves the model)"
    ] = ""
    tokenizer: Annotated[
        str, "directory with the tokenizer.json of the model at the endpoint, which the dry run compares"
    ] = ""
    max_model_len: Annotated[
        Natural, advanced, "tokens of the longest prompt and completion, and one more (0: those of the policy)"
    ] = 0
    column: Annotated[str, advanced, "column of a row with the name of its teacher; empty there: the first one"] = ""
    further: Annotated[tuple[TeacherAddress, ...], advanced, "further teachers"] = ()
    api_key_variable: Annotated[str, advanced, "environment variable that holds the key of the endpoints"] = ""
    concurrency: Annotated[Positive, advanced, "questions at once to each teacher"] = 32
    timeout_s: Annotated[
        PositiveFloat, advanced, "time limit of a question, within which it is asked again while a teacher is away"
    ] = 600.0
    on_failure: Annotated[FailurePolicy, advanced] = FailurePolicy.DROP_SAMPLE

    @property
    def is_own(self) -> bool:
        """Whether the run starts the first teacher itself."""
        return bool(self.model) and not self.endpoint

    @property
    def addresses(self) -> dict[str, TeacherAddress]:
        """Teachers by name; the first one has the empty name, and where the run serves it, an empty endpoint. Empty
        without a served teacher."""
        if not self.endpoint and not self.model:
            return {}
        tokenizer = self.model if self.is_own else self.tokenizer
        first = TeacherAddress(endpoint=self.endpoint, model=self.model, tokenizer=tokenizer)
        return {"": first} | {address.name: address for address in self.further}
