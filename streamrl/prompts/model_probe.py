"""Whether a model can be trained and served under trained weights: ``-m streamrl.prompts.model_probe OPTIONS``."""

from __future__ import annotations

import os
import sys

import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.prompts.probe_process import answer_of
from streamrl.vllm.options import EngineOptions


def problem_of_model(options: EngineOptions, timeout_s: float) -> str | None:
    """Why no run can train the model of ``options``; empty: one can; None: that was not found out. About ten seconds in
    a process of its own, most of which imports vLLM."""
    found = answer_of("streamrl.prompts.model_probe", [msgspec.json.encode(options).decode()], timeout_s)
    return None if found is None or found[1] else found[0].decode(errors="replace")


def main(options: EngineOptions) -> None:
    """Write the problem to standard output, and nothing else. Raises what says nothing about a real engine."""
    answers, silent = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)  # vLLM warns of an engine that is none
    from streamrl.learning.model.loading import published_tensors
    from streamrl.weights.vllm.load_plan_probe import probe_engine

    try:
        probe_engine(options, published_tensors(options.model_path))
    except StreamRLError as error:
        os.write(answers, str(error).encode())
    os._exit(0)  # nothing that vLLM began is waited for


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=EngineOptions))
