"""Prompts of a run, the episodes that sample their completions, and the push of weights to the engines.

``run_controller`` makes them at the start, in the controller's process."""

from __future__ import annotations

from pathlib import Path

from anyio import to_thread

from streamrl.base.errors import raise_problems
from streamrl.base.run_events import RunWarning
from streamrl.base.types import TextMapping, token_array
from streamrl.base.waits import Waits
from streamrl.contracts import Journal, Scorer
from streamrl.control.run_state import PromptPool
from streamrl.engines.push.relay_tree import RelayTree, relay_places
from streamrl.engines.push.verify import canary_of
from streamrl.engines.push.weight_sync import WeightSync
from streamrl.engines.vllm.batch_invariance import PROBES, batch_invariant
from streamrl.engines.vllm.options import dtype_of_engines
from streamrl.engines.vllm.visible_gpus import installed_device
from streamrl.launch.processes import Emit, Processes
from streamrl.prepare.recipe_probe import PROBE_TIMEOUT_S, look_at_environments
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.sections import ONE_SET, Recipe
from streamrl.recipe.topology import Role, Topology, model_socket, read_topology
from streamrl.rewards.teacher.scorer import TeacherScorer
from streamrl.run.evaluate.evaluation import HeldOut
from streamrl.run.prompts.imitated_rows import ImitatedRows
from streamrl.run.prompts.prompt_sets import PromptSets, open_training_sets
from streamrl.run.prompts.prompt_spec import environment_writes
from streamrl.stages.episodes import Episodes, completion_or, one_completion


def training_prompts(recipe: Recipe, tokenizer: Tokenizer, pool: PromptPool) -> PromptSets:
    """Open the prompts that are trained on. ``pool``: prompts that earlier lives of the run drew."""
    positions = {name: drawn.drawn for name, drawn in pool.sets.items()}
    return open_training_sets(recipe, tokenizer, {**positions, ONE_SET: pool.drawn})


async def open_imitated_rows(recipe: Recipe, processes: Processes, emit: Emit) -> ImitatedRows:
    """Open the rows that are imitated, which the trainer ranks get with each order to step. Raises ``RecipeError``
    where the environment's tools, which rows have, cannot be loaded."""
    tools: TextMapping = {}
    if any(environment.tools for environment in recipe.environment.by_name.values()) and any(
        environment_writes(recipe, settings) for settings in recipe.prompts.imitated.values()
    ):
        problems, _, tools = await to_thread.run_sync(look_at_environments, recipe, recipe.model.path, PROBE_TIMEOUT_S)
        raise_problems(problems)
    rows = ImitatedRows(recipe, processes.tokenizer, emit, tools)
    if recipe.prompts.imitated:
        processes.trainer.imitated_rows = rows.of_version
    return rows


async def open_episodes(
    recipe: Recipe, topology: Topology, processes: Processes, journal: Journal, held_out: HeldOut, emit: Emit
) -> Episodes:
    """Make the episodes, which sample, record and score trajectories. In a deterministic run an engine that samples
    other bits in a batch than alone gets one request at a time, and a warning is emitted."""
    one_at_a_time = False
    if recipe.run.deterministic and recipe.compares_logprobs:
        probes = [prompt.token_ids for prompt in held_out.prompts[:PROBES] if prompt.token_ids]
        probes = probes or [token_array((1, 2, 3))]
        one_at_a_time = not await batch_invariant(processes.pool, probes, recipe.sampling)
    if one_at_a_time:
        message = "engines sample other bits in a batch than alone: run.deterministic gives them one request at a time"
        await emit(RunWarning(step=0, message=message))
    scorer: Scorer = processes.reward
    if recipe.teacher.addresses:
        scorer = TeacherScorer(scorer, recipe.teacher, model_socket(topology, Role.TEACHER))
    return Episodes(
        processes.pool,
        recipe.sampling,
        scorer,
        journal,
        episode=one_completion if processes.environment is None else completion_or(processes.environment.episode),
        verifies_deferred=recipe.tail_batching.verifies(deterministic=recipe.run.deterministic),
        one_at_a_time=one_at_a_time,
        capacity=capacity(recipe, processes),
        on_end=processes.pool.forget_trajectory,
    )


def capacity(recipe: Recipe, processes: Processes) -> int:
    """Number of trajectories at which shares of free slots count the engines as full, for every kind of rounds."""
    return min(processes.ready.max_num_seqs, recipe.batch_trajectories)


async def open_weight_sync(
    recipe: Recipe, run_directory: Path, processes: Processes, episodes: Episodes, waits: Waits
) -> WeightSync:
    """Make the weight sync, which makes versions live on the engines, also on engines that start later."""
    device = installed_device()
    dtype = await to_thread.run_sync(dtype_of_engines, recipe, device)
    sync = WeightSync(
        processes.pool.attached,
        processes.trainer.publish_anchor,
        in_flight=recipe.rollout.in_flight,
        timeout_s=recipe.weights.push_timeout_s,
        on_pause=episodes.engines_paused,
        on_failure=processes.engine_processes.on_failure,
        canary=await to_thread.run_sync(canary_of, recipe, device, dtype),
        waits=waits,
        add_relays=RelayTree(lambda: relay_places(read_topology(run_directory))).with_relays,
    )
    processes.engine_processes.set_weight_sync(sync)
    attached = processes.pool.attached
    paused_engines = sync.paused_engines

    def paused_names() -> list[str]:
        if not paused_engines:  # called for each request: no search while no engine is paused
            return []
        return [name for name, engine in attached.items() if engine in paused_engines]

    processes.pool.paused = paused_names
    return sync
