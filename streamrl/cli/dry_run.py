"""``streamrl train RECIPE --dry-run``: prints the plan of a run and every problem, and starts nothing but probes of the
model. Called by ``train`` in the command's own process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from streamrl.base.errors import RecipeError, raise_problems
from streamrl.base.types import Prompt
from streamrl.engines.vllm.options import engine_options
from streamrl.launch.weight_movers import mover_lines
from streamrl.prepare.adapter_sync import with_adapter_sync
from streamrl.prepare.called_rewards import call_rewards
from streamrl.prepare.data_summary import data_lines
from streamrl.prepare.first_prompt import first_prompt_lines
from streamrl.prepare.gpu_placement import gpu_placement
from streamrl.prepare.hub.resolution import HubRecipe, hub_looked_up
from streamrl.prepare.preflight import check_model, preflight, with_checkpoint_rewards
from streamrl.prepare.recipe_probe import PROBE_TIMEOUT_S, difference_of_prompt, problem_of_model
from streamrl.prepare.run_length import with_steps_of_epochs
from streamrl.prepare.summary import arithmetic_lines, process_lines
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.processes.cluster.open_launcher import hosts_of
from streamrl.recipe.rules.load_recipe import dump_recipe
from streamrl.recipe.sections import EngineKind, LoraSync, Recipe
from streamrl.recipe.topology import plan_topology
from streamrl.rewards.rewards_snapshot import RewardsSnapshot
from streamrl.run.prompts.open_prompts import stored_rows
from streamrl.run.prompts.prompt_spec import held_out_sources, training_path, with_settings
from streamrl.run.prompts.row_notes import RowNotes


def dry_run(recipe: Recipe, system: Sequence[str]) -> int:
    """Print the resolved recipe, its arithmetic and the processes; then raise ``RecipeError`` when a check fails.
    ``system``: keys that ``rollout.system`` sets, one line each."""
    with hub_looked_up(recipe) as hub:
        return _dry_run(hub, system)


def _dry_run(hub: HubRecipe, system: Sequence[str]) -> int:
    recipe, length = with_steps_of_epochs(hub.recipe)
    recipe, snapshot = with_checkpoint_rewards(recipe)
    merging = ""
    serves_adapters = False
    if recipe.lora.sync is LoraSync.AUTO:
        recipe, merging = with_adapter_sync(recipe)
        serves_adapters = recipe.lora.sync is LoraSync.ADAPTER
    resolved = recipe  # another host may share its GPUs in another way
    placement = gpu_placement(recipe)
    recipe = placement.decided(recipe)
    topology = plan_topology(recipe, Path(tempfile.gettempdir()) / "streamrl-XXXXXXXX")
    model = None
    with suppress(RecipeError):  # ``preflight`` reports it at the end, with all other problems
        model = check_model(recipe)
    facts = model.facts if model else None
    context = model.context if model else 0
    print("# the resolved recipe\n")
    print(dump_recipe(hub.pinned(resolved)), end="")
    _print_part("models and data of the Hub", hub.lines)
    _print_part("what rollout.system sets", system)
    arithmetic = arithmetic_lines(recipe, facts, context, _held_out(recipe))
    _print_part("what it adds up to", [*filter(None, [length, merging]), *arithmetic])
    movers = mover_lines(recipe, placement.placed(topology))
    _print_part("what would be started", [*process_lines(recipe, topology), *movers])
    _print_part("hosts of the cluster", anyio.run(hosts_of, recipe))
    _print_part("memory of the GPUs", placement.lines())
    prompts = _checked_prompts(recipe, snapshot)
    verdict = (
        "all checks passed" if _try_model(recipe, prompts, answered=serves_adapters) else "all other checks passed"
    )
    print(f"\n{verdict}; nothing was started")
    return 0


def _print_part(title: str, lines: Sequence[str]) -> None:
    """Print a part of the plan, where it has lines."""
    if lines:
        print(f"\n# {title}\n", *lines, sep="\n")


def _checked_prompts(recipe: Recipe, snapshot: RewardsSnapshot | None) -> list[Prompt]:
    """Check the recipe, print what its rows are, and call its rewards. Returns the first prompt, where the model sees
    it. Raises ``RecipeError`` with all problems."""
    notes: dict[str, RowNotes] = {}
    problems = []
    try:
        preflight(recipe, snapshot, notes)
    except RecipeError as error:
        problems = error.problems
    _print_part("the rows", list(data_lines(recipe, notes)))
    prompts = []
    tokenizer = None
    callable_rewards = not any(problem.startswith(("reward", "prompts.train")) for problem in problems)
    for name in recipe.prompts.sets:
        first = notes.get(training_path(recipe, name), RowNotes()).first
        of_set = ""
        if len(recipe.prompts.sets) > 1:
            of_set = f" of {training_path(recipe, name)}"
        if first and len(first.token_ids):
            prompts.append(first)
            tokenizer = tokenizer or load_tokenizer(recipe.model.path)
            _print_part(
                f"the prompt of the first row{of_set}, as the model will see it", first_prompt_lines(first, tokenizer)
            )
            if callable_rewards:
                scored = with_settings(first, recipe.prompts.sets[name])
                reward_problems, reward_notes = call_rewards(recipe, scored, tokenizer)
                problems = [*problems, *reward_problems]
                for note in reward_notes:
                    print(f"warning: {note}")
        elif first:
            columns = ", ".join(first.columns)
            print(f"\nthe environment writes the prompts{of_set}, from the columns {columns} of a row")
    raise_problems(problems)
    return prompts


def _try_model(recipe: Recipe, prompts: Sequence[Prompt], *, answered: bool) -> bool:
    """Try the model where this host starts engines of it, unless the choice of ``lora.sync`` has ``answered``. Returns
    False where the trial gave no answer. Raises ``RecipeError`` for a model that cannot be trained, or that vLLM cannot
    serve under trained weights."""
    if recipe.engines.kind is not EngineKind.VLLM or not recipe.on_one_host:
        print("\nthe model was not tried with vLLM: this host starts no engine of it")
        return True
    if answered:
        print('\nthe model was tried with the trainer and vLLM, without its weights, for lora.sync = "auto": works')
        _print_difference(
            "".join(difference_of_prompt(recipe.model.path, prompt, PROBE_TIMEOUT_S) for prompt in prompts)
        )
        return True
    print("\nthe model is tried with the trainer and vLLM, without its weights (about 10 s): ", end="", flush=True)
    targets: Sequence[str] = ()
    if recipe.lora.rank:
        targets = recipe.lora.named_targets
    options = engine_options(recipe, 0, tempfile.gettempdir())
    split = recipe.training.tensor_parallel_size, recipe.training.expert_parallel_size
    trial = problem_of_model(options, PROBE_TIMEOUT_S, targets, *prompts, split=split)
    if trial.failure:
        print(f"not found out ({trial.failure})")
        return False
    print("refused" if trial.problem else "works")
    _print_difference(trial.differs)
    if trial.problem:
        raise RecipeError(trial.problem if trial.problem.startswith("engines.") else f"model.path: {trial.problem}")
    return True


def _print_difference(difference: str) -> None:
    if difference:
        print(f"transformers makes other tokens of the first prompt: {difference}")


def _held_out(recipe: Recipe) -> dict[str, int]:
    """Return the number of held-out prompts by set, where they can be counted; ``preflight`` reports the problems."""
    row_counts = {}
    for name, spec in held_out_sources(recipe).items():
        with suppress(RecipeError, OSError):
            row_counts[name] = stored_rows(spec) or 0
    return row_counts
