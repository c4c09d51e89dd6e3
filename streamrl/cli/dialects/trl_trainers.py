"""``GRPOTrainer`` and ``RLOOTrainer`` with the constructors of TRL's, whose ``train()`` runs the pipeline. Scripts
import them from ``streamrl.trl``. They run in the process of the script, which is the supervisor of the run, as the
process of ``streamrl train`` is."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from streamrl.base.errors import RecipeError, StreamRLError, raise_problems
from streamrl.cli.dialects.translation import Translation, translated
from streamrl.cli.dialects.trl_objects import foreign_of_trainer
from streamrl.cli.train import run_in_foreground
from streamrl.cli.trained_models.exported_model import export_model
from streamrl.cli.trained_models.saved_model import saved_model
from streamrl.launch.pipeline import Pipeline
from streamrl.prepare.hub.resolution import with_hub_folders
from streamrl.recipe.cells.cell_code import CELLS, written
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import parse_toml

WITHOUT_UNSLOTH = (
    "unsloth is imported, which replaces the code of models and of trainers: leave it out, give the model's name as "
    'model="NAME" and LoraConfig(...) as peft_config'
)
ONLY_BY_REWARDS = "models are trained by rewards here, with GRPOTrainer and RLOOTrainer"


class GRPOTrainer:
    """GRPO of TRL as a run of streamrl.

    Takes the arguments of TRL's constructor. Every setting of ``args`` that differs from TRL's default is translated,
    or refused by name; the list is printed once. ``recipe``: recipe of the run; ``translation``: outcome of each
    setting; ``run_directory``: directory of the run, from ``train()`` on.

    Raises ``RecipeError`` with everything that has no counterpart."""

    method: ClassVar[str] = "GRPO"
    recipe: Recipe
    translation: Translation
    run_directory = Path()

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        **others: Any,
    ) -> None:
        objects = {name: value for name, value in locals().items() if name not in ("self", "others", "__class__")}
        refuse_other_code(type(self))
        self._take(objects | others)

    def _take(self, objects: Mapping[str, Any]) -> None:
        """Make the recipe of the objects, and print the outcome of each setting."""
        missing = [name for name in ("reward_funcs", "train_dataset") if objects[name] is None]
        if missing:
            raise RecipeError(f"{self.method}Trainer needs {' and '.join(missing)}: give it to the constructor")
        cells = Path(getattr(objects["args"], "output_dir", None) or "runs") / CELLS
        script = Path(getattr(sys.modules["__main__"], "__file__", None) or "the notebook").name
        foreign = foreign_of_trainer(self.method, script, objects, lambda *parts: str(written(cells, *parts)))
        self.translation = translated(foreign)
        raise_problems(self.translation.refused())
        print(*self.translation.lines(), sep="\n")
        self.recipe = load_recipe(parse_toml(self.translation.recipe))

    def train(self, resume_from_checkpoint: Any = None) -> Path:
        """Run the pipeline until its last step, or until it was drained (Ctrl-C), and return the run's directory.
        Raises ``StreamRLError`` where the run breaks."""
        if resume_from_checkpoint:
            raise StreamRLError("resume_from_checkpoint: streamrl resume RUN continues a run, with all of its state")
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            raise StreamRLError(
                "train() cannot wait in a notebook, whose event loop runs already: async with "
                "streamrl.Pipeline(trainer.recipe) as pipeline: async for step in streamrl.live_curve(pipeline): ..."
            )
        recipe = with_hub_folders(self.recipe)
        pipelines = []

        def make() -> Pipeline:
            pipelines.append(Pipeline(recipe))
            return pipelines[0]

        code = run_in_foreground(recipe, make, as_json=False)
        self.run_directory = pipelines[0].run_directory
        if code:
            raise KeyboardInterrupt("the run was ended at once")
        return self.run_directory

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the model of the run's last version to ``output_dir`` (default: ``output_dir`` of ``args``), as
        ``streamrl export`` does. Raises ``StreamRLError``."""
        destination = Path(output_dir or self.recipe.run.directory)
        destination.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination) as folder:
            model = Path(folder) / "model"
            export_model(saved_model(self.run_directory), model)
            for file in model.iterdir():
                shutil.move(file, destination / file.name)


class RLOOTrainer(GRPOTrainer):
    """RLOO of TRL as a run of streamrl: as ``GRPOTrainer``, for an ``RLOOConfig``."""

    method = "RLOO"


def refuse_other_code(trainer: type[GRPOTrainer]) -> None:
    """Raise ``RecipeError`` for a subclass with methods of its own, and for trainers that unsloth has replaced: neither
    would have an effect on a run."""
    for kind in trainer.__mro__[:-1]:
        if not kind.__module__.startswith("streamrl."):
            raise RecipeError(
                f"{kind.__name__} is a trainer of its own, whose methods the processes of a run do not call: write an "
                "objective (CONTRIBUTING.md), or follow a run with run.observers"
            )
    if sys.modules.get("unsloth") is not None:
        raise RecipeError(WITHOUT_UNSLOTH)
