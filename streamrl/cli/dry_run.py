"""``streamrl train RECIPE --dry-run``: everything that is known before a start, and every problem, and no start."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio

from streamrl.base.errors import RecipeError
from streamrl.base.types import Prompt
from streamrl.engines.vllm.options import engine_options
from streamrl.prepare.first_prompt import first_prompt_lines
from streamrl.prepare.gpu_demand import gpu_placement
from streamrl.prepare.hub.resolution import HubRecipe, hub_looked_up
from streamrl.prepare.preflight import CheckedModel, check_model, preflight, with_checkpoint_rewards
from streamrl.prepare.probe import problem_of_model
from streamrl.prepare.run_length import with_steps_of_epochs
from streamrl.prepare.summary import arithmetic_lines, process_lines
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.processes.cluster.opened import hosts_of
from streamrl.recipe.rules.load import dump_recipe
from streamrl.recipe.sections import EngineKind, Recipe
from streamrl.recipe.topology import plan_topology
from streamrl.run.prompts.prompt_spec import prompt_sources
from streamrl.run.prompts.prompts import stored_rows

PROBE_TIMEOUT_S = 300.0


def dry_run(recipe: Recipe, system: Sequence[str], path: Path, overrides: Sequence[str]) -> int:
    """Print the resolved recipe, its arithmetic and the processes; then raise ``RecipeError`` when a check fails.
    ``system``: what ``rollout.system`` set in it, one line a key."""
    arguments = " ".join([shlex.quote(str(path)), *(f"--set {shlex.quote(text)}" for text in overrides)])
    with hub_looked_up(recipe) as hub:
        return _dry_run(hub, system, arguments)


def _dry_run(hub: HubRecipe, system: Sequence[str], arguments: str) -> int:
    recipe, length = with_steps_of_epochs(hub.recipe)
    recipe, kept = with_checkpoint_rewards(recipe)
    topology = plan_topology(recipe, Path(tempfile.gettempdir()) / "streamrl-XXXXXXXX")
    model: CheckedModel | None = None
    with suppress(RecipeError):  # ``preflight`` says so at the end, with everything else
        model = check_model(recipe)
    facts, context = (model.facts, model.context) if model else (None, 0)
    print("# the resolved recipe\n")
    print(dump_recipe(hub.pinned(recipe)))
    if hub.lines:
        print("# models and data of the Hub\n", *hub.lines, "", sep="\n")
    if system:
        print("# what rollout.system sets\n", *system, "", sep="\n")
    print("# what it adds up to\n")
    print("\n".join([*filter(None, [length]), *arithmetic_lines(recipe, facts, context, _held_out(recipe))]))
    print("\n# what would be started\n")
    print("\n".join(process_lines(recipe, topology, arguments)))
    if hosts := anyio.run(hosts_of, recipe):
        print("\n# hosts of the cluster\n")
        print("\n".join(hosts))
    if gpus := gpu_placement(recipe).lines():
        print("\n# memory of the GPUs\n")
        print("\n".join(gpus))
    prompts: list[Prompt] = []
    preflight(recipe, kept, partial(_show_prompt, prompts))
    tried = _try_model(recipe, prompts)
    print(f"\n{'all checks passed' if tried else 'all other checks passed'}; nothing was started")
    return 0


def _show_prompt(seen: list[Prompt], tokenizer: Tokenizer, prompt: Prompt) -> None:
    if not len(prompt.token_ids):
        print(f"\nthe environment writes the prompts, from the columns {', '.join(prompt.columns)} of a row")
        return
    seen.append(prompt)
    print("\n# the prompt of the first row, as the model will see it\n")
    print("\n".join(first_prompt_lines(prompt, tokenizer)))


def _try_model(recipe: Recipe, prompts: Sequence[Prompt]) -> bool:
    """Try the model where this host starts engines of it. Returns False where the trial gave no answer. Raises
    ``RecipeError`` for a model that cannot be trained, or that vLLM cannot serve under trained weights."""
    if recipe.engines.kind is not EngineKind.VLLM or not recipe.starts_engines_here:
        print("\nthe model was not tried with vLLM: this host starts no engine of it")
        return True
    print("\nthe model is tried with the trainer and vLLM, without its weights (about 10 s): ", end="", flush=True)
    targets = recipe.lora.named_targets if recipe.lora.rank else ()
    options = engine_options(recipe, 0, tempfile.gettempdir())
    split = recipe.training.tensor_parallel_size, recipe.training.expert_parallel_size
    problem, differs = problem_of_model(options, PROBE_TIMEOUT_S, targets, *prompts, split=split)
    print({None: "not found out", "": "works"}.get(problem, "refused"))
    if differs:
        print(f"transformers makes other tokens of the first prompt: {differs}")
    if problem:
        raise RecipeError(problem if problem.startswith("engines.") else f"model.path: {problem}")
    return problem is not None


def _held_out(recipe: Recipe) -> dict[str, int]:
    """Rows of the held-out prompts by set, where they can be counted: ``preflight`` says why not, if that is wrong."""
    _, *sources = prompt_sources(recipe).values()
    found = {}
    for name, spec in zip(recipe.evaluation.sets, sources, strict=True):
        with suppress(RecipeError, OSError):
            found[name] = stored_rows(spec) or 0
    return found
