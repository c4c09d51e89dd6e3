"""Whether an object of the user's is there, in a process of its own: ``-m streamrl.prompts.user_code_probe SPEC``."""

from __future__ import annotations

import json
import os
import sys

from streamrl.base.errors import RecipeError
from streamrl.prompts.probe_process import answer_of
from streamrl.recipe.user_code import load_user_object


def problems_of_object(spec: str, timeout_s: float) -> list[str]:
    """Why the object ``module:name`` or ``file.py:name`` cannot be loaded; each problem names it."""
    found = answer_of("streamrl.prompts.user_code_probe", [spec], timeout_s)
    if found is None:
        return [f"{spec} not imported within {timeout_s:g} s: move slow work out of the module's top level"]
    answer, code = found
    try:
        return [str(problem) for problem in json.loads(answer.splitlines()[-1])]
    except (IndexError, TypeError, ValueError):
        return [f"{spec} ended the process that imported it (exit code {code}): import it by hand"]


def main(spec: str) -> None:
    """Load it and write a JSON list of the problems, as the last line."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the user's module prints must not mix with the answer
    problems: list[str] = []
    try:
        load_user_object(spec)
    except RecipeError as error:
        problems = error.problems
    answers.write(json.dumps(problems).encode() + b"\n")
    os._exit(0)  # a thread that the user's module left behind must not keep this process


if __name__ == "__main__":
    main(sys.argv[1])
