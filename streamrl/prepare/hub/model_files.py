"""Choice of the files of a model among those of a repository. Pure; ``fetch`` calls it."""

from __future__ import annotations

from collections.abc import Iterable

WEIGHTS = ".safetensors"
_OF_MODELS = (WEIGHTS, ".json", ".txt", ".model", ".jinja", ".tiktoken", "README.md")
_OF_OTHER_FORMATS = (".bin.index.json", ".h5.index.json", ".msgpack.index.json")


def model_files(names: Iterable[str]) -> list[str]:
    """The files of a model that are read: safetensors, configuration, tokenizer, chat templates. No pickles, no other
    formats of the same weights, no code."""
    places = [name for name in names if "/" not in name or name.startswith("additional_chat_templates/")]
    model_names = [name for name in places if name.endswith(_OF_MODELS) and not name.endswith(_OF_OTHER_FORMATS)]
    consolidated = [name for name in model_names if name.endswith(WEIGHTS) and name.startswith("consolidated")]
    only = len(consolidated) == sum(name.endswith(WEIGHTS) for name in model_names)
    return model_names if only else [name for name in model_names if name not in consolidated]
