"""Whether the user's own objects are there, in a process of its own: ``python -m streamrl.stages.user_code_probe S``.

Checking a recipe must not import user code into the checking process, nor wait for it without a limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from streamrl.errors import RecipeError
from streamrl.user_code import load_user_object


def problems_of_objects(specs: Sequence[str], timeout_s: float) -> list[str]:
    """Why objects, each ``module:name`` or ``file.py:name``, cannot be loaded; each problem names its object."""
    if not specs:
        return []
    command = [sys.executable, "-m", "streamrl.stages.user_code_probe", *specs]
    names = ", ".join(specs)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    try:
        answer, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return [f"{names} not imported within {timeout_s:g} s: move slow work out of the module's top level"]
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing of its group is left
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    try:
        return [str(problem) for problem in json.loads(answer.splitlines()[-1])]
    except (IndexError, TypeError, ValueError):
        return [f"{names} ended the process that imported it (exit code {child.returncode}): import it by hand"]


def main(specs: Sequence[str]) -> None:
    """Load each and write a JSON list of the problems, as the last line."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the user's module prints must not mix with the answer
    problems: list[str] = []
    for spec in specs:
        try:
            load_user_object(spec)
        except RecipeError as error:
            problems += error.problems
    answers.write(json.dumps(problems).encode() + b"\n")
    os._exit(0)  # a thread that the user's module left behind must not keep this process


if __name__ == "__main__":
    main(sys.argv[1:])
