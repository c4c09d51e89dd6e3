"""Stop strings of a completion that comes in parts. vLLM looks for them in the text of a request, and what was sampled
before a cut is a part of the prompt of the next one: a string that a cut divides would not be found."""

from __future__ import annotations

from typing import Any

BEFORE = "streamrl_before"
"""Extra argument (``SamplingParams.extra_args``): so many tokens at the end of the prompt belong to the completion."""


def find_across_parts() -> None:
    """Patch vLLM's front end in this process: the text of a request begins with that of the tokens before it."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    original = IncrementalDetokenizer.from_new_request
    if hasattr(original, "streamrl_original"):
        return

    def from_new_request(tokenizer: Any, request: Any) -> Any:
        made = original(tokenizer, request)
        params = request.sampling_params
        if params.stop and (before := (params.extra_args or {}).get(BEFORE, 0)):
            ids = request.prompt_token_ids[-before:]
            made.output_text = tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        return made

    from_new_request.streamrl_original = original  # type: ignore[attr-defined]
    IncrementalDetokenizer.from_new_request = staticmethod(from_new_request)
