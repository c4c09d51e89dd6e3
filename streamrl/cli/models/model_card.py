"""The card of an exported model: what trained it and how it was evaluated, without prompts, paths or rewards' code."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from streamrl.cli.models.saved_model import SavedModel
from streamrl.launch.run_directory import INPUTS_FILE, RunInputs
from streamrl.observe.follow.run_files import SCORE, RunFiles
from streamrl.recipe.rules.hub_names import hub_name
from streamrl.recipe.sections import Recipe

_OF_THE_BASE = ("license", "license_name", "license_link", "language")
"""Fields of the base's card that hold for what was made of it."""


def model_card(saved: SavedModel, recipe: Recipe) -> str:
    """The text of the card."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    name = recipe.run.name
    base = hub_name(recipe.model.path)
    algorithm = str(recipe.objective.algorithm)
    scores = list(_scores(saved))
    readme = saved.folder / "README.md"
    card = ModelCard(readme.read_text(errors="replace") if readme.is_file() else "", ignore_metadata_errors=True)
    kept = {field: value for field in _OF_THE_BASE if (value := card.data.get(field))}
    sources = {name: Path(one.prompts.partition("?")[0]) for name, one in recipe.evaluation.sets.items()}
    data = {name: hub_name(str(path)) or path.name for name, path in sources.items()}
    results = [
        EvalResult("text-generation", data.get(found["set"], found["set"]), found["set"], found["metric"], value)
        for found, value in scores
    ]
    metadata = ModelCardData(
        base_model=base,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["streamrl", "reinforcement-learning", algorithm, *(["lora"] if recipe.lora.rank else [])],
        model_name=name if results else None,
        eval_results=results or None,
        **kept,
    )
    how = f"LoRA of rank {recipe.lora.rank}, merged into" if recipe.lora.rank else "all weights of"
    what = f"[{base}](https://huggingface.co/{base})" if base else f"`{Path(recipe.model.path).name}`"
    lines = [f"# {name}", "", f"Trained by streamrl with {algorithm}: {how} {what}, in bfloat16.", ""]
    lines += ["| held-out prompts | score | value |", "|---|---|---|"] if scores else []
    lines += [f"| {found['set']} | {found['metric']} | {value:.4g} |" for found, value in scores]
    lines += ["", "| training | |", "|---|---|", *(f"| {fact} | {text} |" for fact, text in _facts(saved, recipe)), ""]
    return "\n".join(["---", metadata.to_yaml(), "---", "", *lines])


def _facts(saved: SavedModel, recipe: Recipe) -> Iterator[tuple[str, str]]:
    rollout = recipe.rollout
    sampling = recipe.sampling
    inputs = saved.run / INPUTS_FILE
    yield "optimizer steps", f"{saved.version} of {recipe.run.steps}"
    yield "batch", f"{rollout.prompts_per_batch} prompts x {rollout.group_size} completions, {rollout.rounds} rounds"
    yield "learning rate", f"{recipe.training.learning_rate:g}"
    yield "sampling", f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, {sampling.max_tokens} tokens"
    yield "rewards", ", ".join(reward.label for reward in recipe.rewards)
    yield "recipe", f"sha256 {hashlib.sha256((saved.run / 'recipe.toml').read_bytes()).hexdigest()}"
    packages = msgspec.json.decode(inputs.read_bytes(), type=RunInputs).packages if inputs.is_file() else {}
    yield "versions", ", ".join(f"{package} {number}" for package, number in packages.items())


def _scores(saved: SavedModel) -> Iterator[tuple[re.Match[str], float]]:
    """Scores of the last evaluation of this version."""
    last: dict[str, float] = {}
    for line in RunFiles(saved.run).metric_lines():
        if line.kind == "evaluation" and line.step == saved.version:
            last = line.values
    yield from ((found, value) for name, value in last.items() if (found := SCORE.fullmatch(name)))
