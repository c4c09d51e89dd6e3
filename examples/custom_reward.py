"""A custom reward: how close the completion is to the answer, and nothing at all for an empty one.

In a recipe:

    [[rewards]]
    function = "examples/custom_reward.py:similarity"
    timeout_s = 5.0

``answer`` is a column of the dataset, ``finish_reason`` comes from streamrl, ``columns`` takes the rest."""

import difflib

import anyio.to_thread


async def similarity(completion: str, *, answer: str, finish_reason: str, **columns: object) -> float | None:
    """1.0 for the answer itself, down to 0.0; None (not applicable) where the prompt has no answer."""
    if not answer:
        return None
    if finish_reason == "length":
        return 0.0  # it never came to an end: a deliberate zero, which is not the same as a failure
    # Comparing long texts takes milliseconds: in a thread, other rewards go on meanwhile.
    return await anyio.to_thread.run_sync(_ratio, completion.strip(), answer)


def _ratio(completion: str, answer: str) -> float:
    return difflib.SequenceMatcher(None, completion, answer, autojunk=False).ratio()
