"""Stop strings of a completion that is sampled in several requests, its parts.

vLLM searches the text of each request alone. The tokens of earlier parts are in the prompt of the next request, so vLLM
would miss a stop string that begins in one part and ends in the next. ``VllmEngine.start`` patches vLLM's front
end, in the process that owns the engine."""

from __future__ import annotations

from typing import Any

BEFORE = "streamrl_before"
"""Extra argument (``SamplingParams.extra_args``): number of tokens at the end of the prompt that belong to the
completion."""


def find_across_parts() -> None:
    """Patch vLLM's front end in this process: the text of a request begins with the text of the earlier parts."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    original = IncrementalDetokenizer.from_new_request
    if hasattr(original, "streamrl_original"):
        return

    def from_new_request(tokenizer: Any, request: Any) -> Any:
        detokenizer = original(tokenizer, request)
        params = request.sampling_params
        before = (params.extra_args or {}).get(BEFORE, 0)
        if params.stop and before:
            ids = request.prompt_token_ids[-before:]
            detokenizer.output_text = tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        return detokenizer

    from_new_request.streamrl_original = original  # type: ignore[attr-defined]
    IncrementalDetokenizer.from_new_request = staticmethod(from_new_request)
