"""Tokenizers of all kinds: the ids of texts are those that transformers gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from campaigns.front_door.folders import demo_model
from streamrl.pretrained.tokenizer import load_tokenizer


def same_ids(model: Path, *texts: str) -> str:
    """What differs between the product's ids of ``texts`` and those of transformers; '': nothing."""
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(model), AutoTokenizer.from_pretrained(model)
    for text in texts:
        if (here := ours.encode(text).tolist()) != (there := list(theirs(text)["input_ids"])):
            return f"{text!r} is {here}, of transformers {there}"
    return ""


def _demo(directory: Path) -> str:
    return same_ids(demo_model(directory), "12:", "")


VARIANTS: dict[str, Callable[[Path], str]] = {"of the demo": _demo}
