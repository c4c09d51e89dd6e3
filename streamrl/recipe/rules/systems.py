"""``rollout.system``: the keys that each published system sets, and their merge with the user's keys. Called by
``load_recipe``.

A system is applied to the table of a recipe, in which only the user's keys are present. The checks and the run then see
an ordinary recipe, with a value for each of these keys and without ``system``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from streamrl.base.types import JsonMapping, JsonObject, Texts
from streamrl.recipe.problems import Origin, problem, short_toml
from streamrl.recipe.scheduling import System

SANDBOXED = "code"
"""Built-in reward whose time limits RollPacker adapts; ``rewards.N`` in a key stands for every such reward."""


class Setting(NamedTuple):
    """A key that a system sets.

    ``key``: path in a recipe file;
    ``value``: value, or a function that computes it from the recipe's table (None: the key is not set);
    ``source``: section of the paper;
    ``only``: values that do not contradict the system (empty: any)."""

    key: str
    value: Any
    source: str
    only: tuple[Any, ...] = ()


def _essential(key: str, value: Any, source: str, *alternatives: Any) -> Setting:
    """A setting without which the recipe is not the system. ``alternatives``: other values that it may have."""
    return Setting(key, value, source, (value, *alternatives))


def _number(table: JsonMapping, section: str, key: str, default: int) -> int:
    """The integer at ``section.key`` of a recipe's table, or ``default``."""
    keys = table.get(section)
    number = keys.get(key, default) if isinstance(keys, Mapping) else default
    return number if isinstance(number, int) else default


_SORTED = (
    _essential("rollout.rounds", "length_sorted", "online length-aware scheduling"),
    Setting("length_sorted.cohort_batches", 4, "cache-aware grouped rollout; n is not published: ours"),
    Setting("length_sorted.advanced.single", True, "selective batching: trajectories, not groups"),
    Setting("objective.algorithm", "reinforce_plus_plus", 'experiments: logic ("ppo": math)'),
)

SYSTEMS: Mapping[System, tuple[Setting, ...]] = {
    System.ROLLPACKER: (
        _essential("rollout.rounds", "tail_batching", "3 Tail Batching"),
        _essential("rollout.max_staleness", 0, "3 Tail Batching: on-policy"),
        Setting("tail_batching.prompt_oversampling", 1.25, "6.3 Sensitivity Analysis: both 1.25"),
        Setting("tail_batching.response_oversampling", 1.25, "6.3 Sensitivity Analysis: both 1.25"),
        _essential("tail_batching.deferred_prompts", "regenerate", "3 Tail Batching", "replay", "verify"),
        Setting("tail_batching.long_round_batches", 1, "3 Tail Batching: P0 prompts"),
        Setting("training.advanced.streaming", True, "4.4 Stream Trainer"),
        Setting(
            "engines.release",
            lambda table: "drain" if _number(table, "engines", "count", 1) > 1 else None,
            "4.4 Stream Trainer (with 2 engines or more)",
        ),
        Setting("rewards.N.advanced.adaptive_timeout", {"factor": 1.5, "min_s": 2.0}, "4.3 Reward Scheduler (code)"),
        Setting("rewards.N.advanced.late_is_wrong", True, "4.3 Reward Scheduler (code)"),
    ),
    System.SORTEDRL: (
        *_SORTED,
        _essential("length_sorted.partial", False, "fully on-policy mode"),
        _essential("rollout.max_staleness", 0, "fully on-policy mode"),
    ),
    System.SORTEDRL_PARTIAL: (
        *_SORTED,
        _essential("length_sorted.partial", True, "partial mode"),
        Setting(
            "rollout.max_staleness",
            lambda table: _number(table, "length_sorted", "cohort_batches", 4) - 1,
            "partial mode: cohort_batches - 1",
        ),
        Setting("off_policy.proximal", "behavior", "partial mode: ratios against what sampled a token"),
    ),
    System.SAGC: (
        _essential("group_sizing.kind", "sagc", "abstract"),
        Setting("group_sizing.advanced.keeps", "prompts", "ours: otherwise a smaller group makes no shorter step"),
        Setting("rollout.rounds", "synchronous", "abstract"),
        Setting("objective.algorithm", "grpo", "abstract (DAPO, too)"),
    ),
    System.FASTEST: (
        _essential("rollout.rounds", "auto", "ours: rollout.rounds", "tail_batching"),
        _essential("rollout.max_staleness", 0, "ours: on-policy"),
        Setting("rollout.advanced.presubmit", True, "ours"),
        _essential("tail_batching.deferred_prompts", "verify", "ours", "replay", "regenerate"),
        Setting("tail_batching.long_round_batches", 4, "ours"),
    ),
    System.SYNCHRONOUS: (
        _essential("rollout.rounds", "synchronous", "the baseline"),
        _essential("rollout.max_staleness", 0, "the baseline"),
        _essential("group_sizing.kind", "fixed", "the baseline"),
    ),
}


def apply_system(table: JsonObject, origin: Origin) -> tuple[Origin, list[str], list[str]]:
    """Replace ``rollout.system`` in ``table`` by the keys that it sets, unless the table has them.

    Returns ``origin`` with the places of the keys that were set, a problem for each key of the user that contradicts
    the system (whose value replaces it), and the resulting values, one line for each key."""
    rollout = table.get("rollout")
    name = rollout.get("system") if isinstance(rollout, dict) else None
    if isinstance(rollout, dict) and name == "":  # ``--set 'rollout.system=""'`` removes the system of the file
        del rollout["system"]
    if not isinstance(rollout, dict) or not isinstance(name, str) or name not in SYSTEMS:
        return origin, [], []
    system = System(rollout.pop("system"))
    where = f'{origin.locate("rollout.system")} (system = "{name}")'
    problems = []
    rows = []
    implied = {}
    for setting in SYSTEMS[system]:
        published = setting.value(table) if callable(setting.value) else setting.value
        if published is None:
            continue
        for key, holder in _holders(table, setting.key):
            last = key.rpartition(".")[2]
            if last not in holder:
                holder[last] = published
                implied[key] = where
            elif setting.only and holder[last] not in setting.only:
                problems.append(problem(origin, key, _contradiction(system, setting, holder[last])))
                holder[last] = published
            text = short_toml(holder[last])
            if holder[last] != published:
                text += f" (yours, not {short_toml(published)})"
            rows.append((key, text, setting.source))
    return replace(origin, implied=implied), problems, _columns(rows)


def _holders(table: JsonObject, key: str) -> Iterator[tuple[str, JsonObject]]:
    """Yield (``key``, table with the last part of the key); for ``rewards.N`` one for each reward that runs code."""
    section, *parts = key.split(".")
    if parts[0] == "N":
        items = table.get(section)
        if not isinstance(items, list):
            return
        for index, item in enumerate(items):
            if isinstance(item, dict) and item.get("function") == SANDBOXED:
                for path, holder in _holders(item, ".".join(parts[1:])):
                    yield f"{section}.{index}.{path}", holder
        return
    target: Any = table
    for part in (section, *parts)[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            return  # the check of the sections reports it
    yield key, target


def _contradiction(system: System, setting: Setting, value: Any) -> str:
    """The problem with a ``value`` of the user that contradicts ``system``, with a system that has the value as
    remedy."""
    with_value = [
        name
        for name, settings in SYSTEMS.items()
        if any(other.key == setting.key and value in other.only for other in settings)
    ]
    remedy = f'set rollout.system = "{with_value[0]}"' if with_value else "leave rollout.system out"
    has = " or ".join(map(short_toml, setting.only))
    return f'{short_toml(value)} contradicts rollout.system = "{system}", which has {has}: remove it, or {remedy}'


def explained_systems() -> list[str]:
    """Return the keys that each system sets in a recipe with two engines and a reward that runs code, one line for
    each."""
    lines = []
    for system in SYSTEMS:
        table = {"rollout": {"system": system}, "engines": {"count": 2}, "rewards": [{"function": SANDBOXED}]}
        lines += [f"{system}:", *(f"  {line}" for line in apply_system(table, Origin(file="", lines={}))[2])]
    return lines


def _columns(rows: Sequence[Texts]) -> list[str]:
    """``rows`` as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
