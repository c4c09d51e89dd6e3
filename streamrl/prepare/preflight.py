"""Checks of everything that a recipe points at: model, data, rewards, ports, memory, disk.

``train``, ``resume``, ``try`` and the dry run call ``preflight`` in the process of the command, before any process of
the run is started. All problems come at once, as one ``RecipeError``. Nothing remains: user code is imported in a
process of its own that ends here, and ports are bound only for the check."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.atomic_files import hold_lock, write_durable, write_link
from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.host_addresses import wrong_port
from streamrl.base.types import TextMapping, TextsByName
from streamrl.comm.object_store import access_problem
from streamrl.comm.transport_keys import transport_variables
from streamrl.comm.zmq_sockets import has_ipc_listener
from streamrl.engines.vllm.options import device_problems, max_model_len, model_config
from streamrl.engines.vllm.visible_gpus import installed_device, visible_gpus
from streamrl.learning.custom_objective.objective_trial import try_objective
from streamrl.learning.routing_replay import why_not_replayed
from streamrl.learning.state.durable_files import read_digests, refuse_faults, surviving_directory
from streamrl.learning.state.tensor_meaning import other_meanings
from streamrl.observe.trackers.available_trackers import name_and_options, tracker_problems
from streamrl.observe.trackers.prometheus import PORT as PROMETHEUS_PORT
from streamrl.prepare.gpu_placement import gpu_placement
from streamrl.prepare.machine_check import (
    GIB,
    INSTALL,
    LONGEST_SOCKET_PATH,
    available_memory,
    cuda_problem,
    engine_package,
    installed_version,
    nearest_existing,
    port_problem,
    shared_memory,
)
from streamrl.prepare.memory import estimate_memory, gib
from streamrl.prepare.other_models import address_problems, reference_problems, teacher_problems
from streamrl.prepare.recipe_probe import look_at_environments, problems_of_object
from streamrl.pretrained.composites import without_towers
from streamrl.pretrained.model_facts import ModelFacts, read_model_config, read_model_facts
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.pretrained.trainable_models import refuse_untrainable, row_split_problems, split_problems, unknown_modules
from streamrl.pretrained.weight_files import ModelDirectoryError, float32_tensors, stored_tensors
from streamrl.recipe.remote_names import is_url, url_problem
from streamrl.recipe.rules.rules import broken_rules
from streamrl.recipe.sections import EngineKind, OptimizerKind, Recipe, TransportKind
from streamrl.recipe.topology import Role, plan_topology, prepared_sets
from streamrl.rewards.calls.inspect import inspect_in_subprocess
from streamrl.rewards.calls.reward_set import combining_rewards
from streamrl.rewards.rewards_snapshot import RewardsSnapshot, read_rewards_file, resumed_rewards
from streamrl.rewards.served.options import served_model_problems
from streamrl.rewards.signature import needed_columns
from streamrl.run.copies.fetch_checkpoint import whole_copy
from streamrl.run.prompts.imitated_rows import imitated_tokens, sources_as_written
from streamrl.run.prompts.open_prompts import check_prompts, missing_source
from streamrl.run.prompts.prompt_spec import (
    columns_of_set,
    environment_writes,
    imitated_sources,
    prompt_sources,
    settings_of_sources,
    unused_keys,
)
from streamrl.run.prompts.row_notes import RowNotes

USER_CODE_TIMEOUT_S = 60.0


class CheckedModel(Struct, frozen=True):
    """A model directory that can be read. ``context``: number of tokens of the longest prompt with its completion."""

    facts: ModelFacts
    context: int


def with_checkpoint_rewards(recipe: Recipe) -> tuple[Recipe, RewardsSnapshot | None]:
    """``recipe`` with the rewards of the checkpoint that it resumes from, and their snapshot; None where the checkpoint
    has no rewards. Raises ``RecipeError`` where it is unclear which rewards are meant."""
    if not recipe.checkpoint.resume_from or is_url(recipe.checkpoint.resume_from):  # a dry run fetches none
        return recipe, None
    checkpoint = surviving_directory(Path(recipe.checkpoint.resume_from))
    try:
        snapshot = read_rewards_file(checkpoint)
    except StreamRLError as error:
        raise RecipeError(f"checkpoint.resume_from: {error}") from error
    if snapshot is None:
        return recipe, None
    resumed = resumed_rewards(recipe, snapshot, checkpoint)
    return recipe.with_rewards(resumed.rewards), resumed


def recipe_of_resumed_run(recipe: Recipe, run_directory: Path) -> tuple[Recipe, RewardsSnapshot | None]:
    """``recipe`` for a resumed run, in ``run_directory``; it has the rewards that were attached to it, and without
    ``checkpoint.resume_from`` once the run has a checkpoint of its own. Raises ``StreamRLError`` for a file that cannot
    be read."""
    snapshot = read_rewards_file(run_directory)
    if snapshot is not None:
        recipe = recipe.with_rewards(snapshot.rewards)
    if any((run_directory / "checkpoints").glob("step-*")):
        recipe = replace(recipe, checkpoint=replace(recipe.checkpoint, resume_from=""))
    return recipe, snapshot


def preflight(
    recipe: Recipe, snapshot: RewardsSnapshot | None = None, notes: dict[str, RowNotes] | None = None
) -> None:
    """Check what ``recipe`` points at. Raises ``RecipeError`` with every problem. Takes about a second; blocking.

    ``snapshot``: rewards of the run or checkpoint that is resumed. ``notes``: gets the notes about the rows of each
    source, by the path of its key."""
    problems = [f"{path}: {text}" for path, text in broken_rules(recipe)]
    model = None
    try:
        model = check_model(recipe)
    except RecipeError as error:
        problems += error.problems
    reward_problems = list(_rewards_and_prompts(recipe, model, notes))
    problems += reward_problems
    if reward_problems and snapshot and snapshot.changed_live:
        problems.append(_live_rewards(recipe, snapshot))
    for check in _CHECKS:
        problems += check(recipe)
    problems += _memory(recipe, model)
    if model is not None and recipe.engines.kind is EngineKind.VLLM:
        problems += device_problems(recipe, model_config(recipe.model.path), device=installed_device())
    if model is not None and recipe.training.routing_replay is True:
        reason = why_not_replayed(recipe, model_config(recipe.model.path))
        if reason:
            problems.append(f"training.advanced.routing_replay: {reason}")
    problems += _unusable("run.directory", recipe.run.directory) or _run_directory(Path(recipe.run.directory))
    problems += _unusable("TMPDIR", tempfile.gettempdir())
    of_trackers = tracker_problems(recipe.metrics.report_to, recipe.run.project, recipe.run.tags)
    problems += [f"metrics.report_to: {problem}" for problem in of_trackers]
    if problems:
        raise RecipeError(*dict.fromkeys(problems))


def check_model(recipe: Recipe) -> CheckedModel:
    """The model's sizes and its context. Raises ``RecipeError`` when the directory is not a whole model that can be
    trained, or has no modules by the names of ``lora.targets``."""
    directory = Path(recipe.model.path)
    try:
        facts = read_model_facts(directory)
        refuse_untrainable(directory)
        problems = split_problems(directory, recipe.training.tensor_parallel_size, recipe.training.expert_parallel_size)
        problems += row_split_problems(directory, recipe.training.context_parallel_size)
        targets = recipe.lora.named_targets if recipe.lora.rank else None
        unknown = unknown_modules(directory, targets or ())
        other_dtypes = set()
        if recipe.lora.syncs_adapter:
            tensors = without_towers(stored_tensors(directory))
            in_float32 = float32_tensors(tensors)
            other_dtypes = {tensor.dtype for name, tensor in tensors.items() if name not in in_float32} - {"BF16"}
    except ModelDirectoryError as error:
        raise RecipeError(f"model.path: {directory} {error}") from error
    if problems:
        raise RecipeError(*problems)
    if unknown:
        raise RecipeError(*(f'lora.targets: "{name}" {problem}' for name, problem in unknown.items()))
    if other_dtypes:
        raise RecipeError(
            f'lora.sync: "adapter" leaves the base of the engines as it is stored, and {directory} has '
            f"{min(other_dtypes)}: "
            'save the model in bfloat16, which is trained, or set "merged"'
        )
    return CheckedModel(facts, max_model_len(recipe, model_config(recipe.model.path)))


def _rewards_and_prompts(
    recipe: Recipe, model: CheckedModel | None, notes: dict[str, RowNotes] | None
) -> Iterator[str]:
    combining = combining_rewards(recipe.rewards, recipe.reward_limits)
    inspections = inspect_in_subprocess([*recipe.rewards, *combining], USER_CODE_TIMEOUT_S)
    for index, inspection in enumerate(inspections):
        path = f"rewards.{index}.function" if index < len(recipe.rewards) else "reward_limits.combine"
        yield from (f"{path}: {problem}" for problem in inspection.problems)
    columns = needed_columns([inspection.signature for inspection in inspections if inspection.signature is not None])
    tokenizer = None
    tools: TextMapping = {}
    try:
        read_model_config(Path(recipe.model.path))
        tokenizer = load_tokenizer(recipe.model.path)
    except ModelDirectoryError:
        pass  # ``check_model`` reports it
    except RecipeError as error:
        yield from (f"model.path: {problem}" for problem in error.problems)
    if recipe.environment.configured:
        readable_model = recipe.model.path if tokenizer else None
        problems, columns_of_environments, tools = look_at_environments(
            recipe, readable_model or "", USER_CODE_TIMEOUT_S
        )
        columns |= columns_of_environments
        yield from problems
    if recipe.environment.has_agent and tokenizer and not tokenizer.chat_templates:
        yield "environment: the model has no chat template, which requests of agents need: take one that has"
    settings = settings_of_sources(recipe)
    for path, spec in prompt_sources(recipe).items():
        if tokenizer:
            limit = settings[path].max_tokens or recipe.sampling.max_tokens
            longest = model.context - limit if model else None
            own_columns = columns_of_set(recipe, settings[path], columns)
            reader = None if environment_writes(recipe, settings[path]) else tokenizer
            source_notes = RowNotes()
            problems = check_prompts(spec, reader, own_columns, longest, notes=source_notes)
            if notes is not None:
                notes[path] = source_notes
        else:
            problems = missing_source(spec)
        yield from (f"{path}: {problem}" for problem in problems)
    yield from unused_keys(recipe)
    if not tokenizer:
        sources = imitated_sources(recipe)
        yield from (f"prompts.train.{name}: {fault}" for name in sources for fault in missing_source(sources[name]))
        return
    can_imitate = partial(imitated_tokens, tokenizer=tokenizer, context=model.context if model else recipe.context)
    for name, spec in sources_as_written(recipe, tokenizer, tools).items():
        source_notes = RowNotes()
        problems = check_prompts(spec, tokenizer, {}, notes=source_notes, check=can_imitate)
        if notes is not None:
            notes[f"prompts.train.{name}"] = source_notes
        yield from (f"prompts.train.{name}: {problem}" for problem in problems)


def _other_code(recipe: Recipe) -> Iterator[str]:
    """Problems of user code that is checked without a sample: a round policy, a loss, observers."""
    spec = recipe.rollout.policy
    if ":" in spec:
        yield from (f"rollout.policy: {problem}" for problem in problems_of_object(spec, USER_CODE_TIMEOUT_S))
    if recipe.objective_settings.is_custom and recipe.objective.function:
        trial = try_objective(recipe.objective, recipe.off_policy, sizes_vary=recipe.group_sizing.varies)
        yield from (f"objective.function: {problem}" for problem in trial.refusals)
    for spec in recipe.run.observers:
        problems = problems_of_object(spec, USER_CODE_TIMEOUT_S, kind="observer")
        yield from (f"run.advanced.observers: {problem}" for problem in problems)


def _devices(recipe: Recipe) -> Iterator[str]:
    last_core = max(map(int, re.findall(r"\d+", " ".join(recipe.engines.cores))), default=0)
    if recipe.on_one_host and last_core >= (os.cpu_count() or 1):
        yield f"engines.cores: this machine has no core {last_core}: name some of 0-{(os.cpu_count() or 1) - 1}"
    placement = gpu_placement(recipe)
    yield from placement.problems
    if placement.gpus:
        yield from _shared_memory(recipe)
        if placement.tenants and (problem := cuda_problem()):
            yield f"cuda: {problem}"
        return
    if recipe.on_one_host and recipe.training.device.startswith("cuda"):
        yield 'training.device: this host has no CUDA device: write "auto" or "cpu", or use a cluster (--cluster)'
    vllm = recipe.engines.kind is EngineKind.VLLM and engine_package() is not None
    if vllm and recipe.on_one_host and installed_device() == "cuda":
        yield "engines: vllm is a CUDA build and sees no GPU: nvidia-smi and CUDA_VISIBLE_DEVICES must show one"


def _shared_memory(recipe: Recipe) -> Iterator[str]:
    """NCCL and vLLM's workers need more than a container has by default (64 MiB)."""
    free = shared_memory()
    workers = max(engine_set.workers for engine_set in prepared_sets(recipe))
    if free is None or free >= GIB or max(workers, recipe.training.ranks) == 1:
        return
    setting = (
        f"engines.tensor_parallel_size = {workers}" if workers > 1 else f"training.ranks = {recipe.training.ranks}"
    )
    yield (
        f"{setting}: processes on several GPUs exchange data in /dev/shm, which has {free / GIB:.2f} GiB, "
        "and 1 GiB is needed: in a container use --shm-size=2g or --ipc=host"
    )


def _live_rewards(recipe: Recipe, snapshot: RewardsSnapshot) -> str:
    names = ", ".join(snapshot.changed_live)
    checkpoint = recipe.checkpoint.resume_from
    subject = f"checkpoint.resume_from: {checkpoint}" if checkpoint else "rewards: the run"
    remedy = "put their code back"
    if checkpoint:
        remedy += ', or start with the rewards of the recipe by checkpoint.advanced.rewards = "recipe"'
    return f"{subject} was scored with {names}, attached while the run went on: {remedy}"


def _installation(recipe: Recipe) -> Iterator[str]:
    if not recipe.on_one_host:
        return
    remedy = f"{INSTALL}; `streamrl check` tells more"
    if recipe.engines.kind is EngineKind.VLLM and engine_package() is None:
        yield f"vllm is not installed, and this run would start {recipe.engines.count} engines: {remedy}"
    for package in ("torch", "transformers"):
        if installed_version(package) is None:
            yield f"{package} is not installed, and training needs it: {remedy}"
    settings = {}
    if recipe.lora.rank:
        settings["peft"] = f"lora.rank = {recipe.lora.rank}"
    if recipe.training.optimizer is OptimizerKind.ADAMW_8BIT:
        settings["bitsandbytes"] = 'training.optimizer = "adamw_8bit"'
    for package, setting in settings.items():
        if installed_version(package) is None:
            yield f"{package} is not installed, and {setting} needs it: run `pip install {package}`"


def _ports(recipe: Recipe) -> Iterator[str]:
    """Problems of ports that this run would bind."""
    endpoints = {"metrics": recipe.metrics.endpoint}
    for name, options in map(name_and_options, recipe.metrics.report_to):
        port = options.get("port", str(PROMETHEUS_PORT))
        if name == "prometheus" and not wrong_port(port):
            endpoints[name] = f"tcp://{options.get('address', '127.0.0.1')}:{port}"
    if recipe.on_one_host:  # the daemon of each host of a cluster finds free ports
        endpoints = plan_topology(recipe, Path("/tmp")).endpoints | endpoints
        if recipe.transport.kind is TransportKind.TCP and (problem := port_problem(recipe.transport.host, 0)):
            yield f"transport.host: {problem}: set it to an address of this machine"
            return
    users: TextsByName = {}
    for name, endpoint in endpoints.items():
        path = {"metrics": "metrics.endpoint", "prometheus": "metrics.report_to"}.get(name, "transport.port")
        if endpoint.startswith("tcp://"):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            problem = wrong_port(port) or port_problem(host, int(port))
            if endpoint in users:
                problem = f"port {port} of {host} is already the one of {users[endpoint]}"
            users[endpoint] = name
            if problem:
                yield f"{path}: {problem} ({name}): end what uses it, or set {path} to another"
        elif name == "metrics" and endpoint:
            yield from _ipc_problem(path, Path(endpoint.removeprefix("ipc://")))


def _keys(recipe: Recipe) -> Iterator[str]:
    """Problems of the keys that processes of this run would read."""
    keys = recipe.transport.keys
    if keys and not Path(keys).is_dir():
        yield f"transport.keys: there is no directory {keys}: make it with `streamrl keys {keys}`"
        return
    for role in (Role.CONTROLLER, Role.ENGINE, Role.TRAINER):
        try:
            transport_variables(recipe, role)
        except StreamRLError as error:
            yield f"transport.keys: {error}"


def _ipc_problem(path: str, socket_path: Path) -> Iterator[str]:
    if len(str(socket_path).encode()) > LONGEST_SOCKET_PATH:
        yield f"{path}: {socket_path} is longer than {LONGEST_SOCKET_PATH} bytes: choose a shorter path"
    elif not os.access(socket_path.parent, os.W_OK | os.X_OK):
        yield f"{path}: nothing can be made in {socket_path.parent}: choose a directory that exists and can be written"
    else:
        try:
            if has_ipc_listener(f"ipc://{socket_path}"):
                yield f"{path}: another process listens at {socket_path}: end that process, or choose another path"
        except StreamRLError as error:
            yield f"{path}: {error}"


def _memory(recipe: Recipe, model: CheckedModel | None) -> Iterator[str]:
    if model is None or visible_gpus():
        return
    estimate = estimate_memory(recipe, model.facts, model.context)
    on_cluster = () if recipe.on_one_host else ("engine-", "trainer-")
    needed = sum(size for name, size in estimate.items() if not name.startswith(on_cluster))
    available = available_memory()
    if needed > available:
        yield (
            f"memory: this run needs about {gib(needed)} and {gib(available)} can be had: lower engines.count, "
            "engines.max_num_seqs, training.micro_batch_tokens or training.ranks, or take a smaller model"
        )


def _free_space(recipe: Recipe) -> Iterator[str]:
    """Disk space that must stay free beside each checkpoint: with less, every checkpoint would be refused. The size of
    a checkpoint itself is known only when it is written."""
    checkpoint = recipe.checkpoint
    if not (checkpoint.every or checkpoint.at_end):
        return
    directory = nearest_existing(Path(recipe.run.directory))
    free_gib = shutil.disk_usage(directory).free / (1 << 30)
    if free_gib < checkpoint.min_free_gib:
        yield (
            f"checkpoint.advanced.min_free_gib: {checkpoint.min_free_gib:g} GiB must stay free beside each "
            f"checkpoint, and "
            f"{directory} has {free_gib:.2f}: make room, set another run.directory, or allow less"
        )


def _unusable(name: str, path: str) -> list[str]:
    """The problem of a path whose text cannot stand in a file or a message of a run."""
    try:
        str(Path(path).absolute()).encode()
    except UnicodeEncodeError:
        return [f"{name}: {os.fsencode(Path(path).absolute())!r} is not UTF-8: choose another directory"]
    if "\0" in path:
        return [f"{name}: {path!r} has a NUL: remove it"]
    return []


def _run_directory(directory: Path) -> Iterator[str]:
    existing = nearest_existing(directory)
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".streamrl-preflight-") as directory_name:
            hold_lock(Path(directory_name, "lock"), StreamRLError).close()
            write_link(Path(directory_name, "link"), "lock")
            write_durable(Path(directory_name, "lock"), b"")
    except OSError as error:
        yield f"run.directory: nothing can be made in {existing} ({error.strerror}): set another directory"
    except StreamRLError as error:
        yield f"run.directory: {error}"


def _checkpoint(recipe: Recipe) -> Iterator[str]:
    """Problems of the checkpoint to start from: it must exist with all of its files. Trainer ranks compare the files
    with their digests when they read them."""
    resumed = recipe.checkpoint.resume_from
    if resumed:
        try:
            if is_url(resumed):
                whole_copy(resumed, give_up_s=0)
            else:
                saved = surviving_directory(Path(resumed))
                missing = [f"{name} is missing" for name in read_digests(saved) if not (saved / name).is_file()]
                refuse_faults(saved, missing)
                yield from other_meanings(saved, recipe.lora, recipe.model.path)
        except StreamRLError as error:
            yield f"checkpoint.resume_from: {error}"


def _stores(recipe: Recipe) -> Iterator[str]:
    """Problems of places in object stores, which must be writable."""
    places = {"checkpoint.advanced.copy_to": recipe.checkpoint.copy_to}
    places |= {"weights.advanced.transport": recipe.weights.transport}
    for key, url in places.items():
        if url and not url_problem(url) and (problem := access_problem(url)):  # a bad URL is a broken rule
            yield f"{key}: {problem}"


_CHECKS = (
    _other_code,
    _devices,
    _installation,
    _ports,
    _keys,
    served_model_problems,
    reference_problems,
    teacher_problems,
    address_problems,
    _checkpoint,
    _stores,
    _free_space,
)
"""Checks of what a recipe points at beside its model, rewards and prompts."""
