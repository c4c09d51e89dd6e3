"""The card of an exported model: its training and its evaluation, without prompts, paths or rewards' code. Written by
``exported_model`` in the command's own process."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import json

from streamrl.base.types import TokenDistribution
from streamrl.cli.trained_models.saved_model import SavedModel
from streamrl.launch.run_directory import INPUTS_FILE, RunInputs
from streamrl.observe.run_files.run_reader import SCORE, RunFiles
from streamrl.recipe.remote_names import hub_name
from streamrl.recipe.sections import Recipe

_BASE_FIELDS = ("license", "license_name", "license_link", "language")
"""Fields of the base model's card that also hold for models trained from it."""


def model_card(saved: SavedModel, recipe: Recipe) -> str:
    """The text of the card."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    name = recipe.run.name
    base = hub_name(recipe.model.path)
    algorithm = str(recipe.objective.algorithm)
    scores = list(_scores(saved))
    readme = saved.folder / "README.md"
    text = ""
    if readme.is_file():
        text = readme.read_text(errors="replace")
    if not text.startswith("---"):  # without a block of metadata the library warns
        text = f"---\n\n---\n{text}"
    card = ModelCard(text, ignore_metadata_errors=True)
    base_fields = {field: value for field in _BASE_FIELDS if (value := card.data.get(field))}
    sources = {name: Path(held_out.prompts.partition("?")[0]) for name, held_out in recipe.evaluation.sets.items()}
    data = {name: hub_name(str(path)) or path.name for name, path in sources.items()}
    results = [
        EvalResult("text-generation", data.get(match["set"], match["set"]), match["set"], match["metric"], value)
        for match, value in scores
    ]
    tags = ["streamrl", "reinforcement-learning", algorithm]
    if recipe.lora.rank:
        tags.append("lora")
    metadata = ModelCardData(
        base_model=base,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=tags,
        model_name=name if results else None,
        eval_results=results or None,
        **base_fields,
    )
    method = f"LoRA of rank {recipe.lora.rank}, merged into" if recipe.lora.rank else "all weights of"
    base_link = f"[{base}](https://huggingface.co/{base})" if base else f"`{Path(recipe.model.path).name}`"
    lines = [f"# {name}", "", f"Trained by streamrl with {algorithm}: {method} {base_link}, in bfloat16.", ""]
    if scores:
        lines += ["| held-out prompts | score | value |", "|---|---|---|"]
    lines += [f"| {match['set']} | {match['metric']} | {value:.4g} |" for match, value in scores]
    lines += ["", "| training | |", "|---|---|", *(f"| {fact} | {text} |" for fact, text in _facts(saved, recipe)), ""]
    return "\n".join(["---", metadata.to_yaml(), "---", "", *lines])


def _facts(saved: SavedModel, recipe: Recipe) -> Iterator[tuple[str, str]]:
    rollout = recipe.rollout
    sampling = recipe.sampling
    inputs = saved.run / INPUTS_FILE
    yield "optimizer steps", f"{saved.version} of {recipe.run.steps}"
    yield "batch", f"{rollout.prompts_per_batch} prompts x {rollout.group_size} completions, {rollout.rounds} rounds"
    yield "learning rate", f"{recipe.training.learning_rate:g}"
    distribution = [f"{name} {getattr(sampling, name):g}" for name in TokenDistribution.__struct_fields__]
    yield "sampling", ", ".join([*distribution, f"{sampling.max_tokens} tokens"])
    yield "rewards", ", ".join(reward.label for reward in recipe.rewards)
    yield "recipe", f"sha256 {hashlib.sha256((saved.run / 'recipe.toml').read_bytes()).hexdigest()}"
    packages = {}
    if inputs.is_file():
        packages = json.decode(inputs.read_bytes(), type=RunInputs).packages
    yield "versions", ", ".join(f"{package} {number}" for package, number in packages.items())


def _scores(saved: SavedModel) -> Iterator[tuple[re.Match[str], float]]:
    """Yield the scores of the last evaluation of the saved version, each with the match of its metric's name."""
    values = {}
    for line in RunFiles(saved.run).metric_lines():
        if line.kind == "evaluation" and line.step == saved.version:
            values = line.values
    for name, value in values.items():
        if match := SCORE.fullmatch(name):
            yield match, value
