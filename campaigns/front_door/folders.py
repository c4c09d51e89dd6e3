"""Small folders to vary: a model's with a tokenizer, written as people's tools write them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEMO_MODEL = Path(__file__).parents[2] / "examples/sort/model"


def demo_model(directory: Path) -> Path:
    """A copy of the demo's model in ``directory/model``."""
    return Path(shutil.copytree(DEMO_MODEL, directory / "model"))


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the object in ``file``, which is made where it is not there."""
    content = json.loads(file.read_text()) if file.is_file() else {}
    change(content)
    file.write_text(json.dumps(content))
