"""The recipe with folders in place of names of the Hub. The Hub is asked once, by a process of its own (``fetch``), and
what a run goes on with has the commit in its path: a resume asks nobody, and never has another commit."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.prepare.hub import messages
from streamrl.prepare.hub.messages import HubAnswer, Resolved, WantedFiles, answer_s
from streamrl.recipe.rewards import Reward
from streamrl.recipe.rules.hub_names import HUB, cached_name, is_bare_name, read_hub_name
from streamrl.recipe.sections import Model, Prompts, Recipe
from streamrl.run.copies.fetched import with_fetched_checkpoint

_OWN_OPTIONS = ("config", "split", "files")
_LONGEST_S = 30 * 24 * 3600.0
_SLOW_MACHINE_S = 5.0
"""Seconds beyond the time for an answer, in which a busy machine lets the process say that there was none."""
Place = tuple[str | int, ...]


class HubRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """``recipe``: with folders. ``names``: with commits, by what stands in their place. ``lines``: sizes of each."""

    recipe: Recipe
    names: dict[str, str] = {}
    lines: tuple[str, ...] = ()

    def pinned(self, recipe: Recipe) -> Recipe:
        """``recipe`` with names and commits in place of folders."""
        table = msgspec.to_builtins(recipe)
        for place in _places(table):
            text = _at(table, place)
            _at(table, place[:-1])[place[-1]] = self.names.get(text, text)
        return msgspec.convert(table, Recipe)


def with_hub_folders(recipe: Recipe) -> Recipe:
    """``recipe`` with the folders in the cache that its names of the Hub mean, after a download that shows its progress
    on stderr; so with a checkpoint of an object store. Blocking. Raises ``RecipeError`` with every name that cannot be
    had."""
    return with_fetched_checkpoint(_resolved(recipe, "").recipe)


def with_hub_prompts(spec: str) -> str:
    """The same of what ``prompts.train`` may say."""
    return with_hub_folders(recipe_around(prompts=spec)).prompts.train


def recipe_around(*, model: str = "/", prompts: str = "none.jsonl") -> Recipe:
    """A recipe of which only its model or its prompts count."""
    return Recipe(model=Model(path=model), prompts=Prompts(train=prompts), rewards=(Reward(function="none:none"),))


@contextmanager
def hub_looked_up(recipe: Recipe) -> Iterator[HubRecipe]:
    """The same without weights that would be downloaded: where they are not in the cache, a folder with their headers
    stands in, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="streamrl-hub-") as stand_ins:
        yield _resolved(recipe, stand_ins)


def _resolved(recipe: Recipe, stand_ins: str) -> HubRecipe:
    table = msgspec.to_builtins(recipe)
    wanted: dict[Place, WantedFiles] = {}
    problems: list[str] = []
    for place in _places(table):
        key = ".".join(map(str, place))
        text = _at(table, place)
        try:
            if one := _wanted(key, text, prompts=place[0] in ("prompts", "evaluation")):
                wanted[place] = one
        except RecipeError as error:
            problems += [f"{key}: {problem}" for problem in error.problems]
    if problems:
        raise RecipeError(*problems)
    if not wanted:
        return HubRecipe(recipe=recipe)
    found = _ask(tuple(wanted.values()), stand_ins)
    names = {}
    for place, one in wanted.items():
        got = found[one.key]
        _, question, query = _at(table, place).partition("?")
        options = [part for part in query.split("&") if part and part.partition("=")[0] not in _OWN_OPTIONS]
        chosen = "&".join([f"?files={quote(got.files, safe='/*|')}", *options]) if got.files else ""
        names[f"{got.folder}{chosen}"] = f"{HUB}{got.name}{question}{query}"
        _at(table, place[:-1])[place[-1]] = f"{got.folder}{chosen}"
    absent = {
        one.key: f", of which {_size(one.missing)} would be downloaded" * (one.missing > 0) for one in found.values()
    }
    lines = (f"{one.key}: {one.name}, {_size(one.total)}{absent[one.key]}" for one in found.values())
    return HubRecipe(recipe=msgspec.convert(table, Recipe), names=names, lines=tuple(lines))


def _places(table: dict[str, Any]) -> Iterator[Place]:
    """Places at which a recipe may name data or a model."""
    yield from (("prompts", "train"), ("model", "path"), ("judge", "model"))
    held_out = table["evaluation"]["prompts"]
    if isinstance(held_out, str):
        yield ("evaluation", "prompts")
    else:
        for name, one in held_out.items():
            yield ("evaluation", "prompts", name, *(() if isinstance(one, str) else ("prompts",)))
    for n, reward in enumerate(table["rewards"]):
        if reward["function"] == "reward_model" and "path" in reward["options"]:
            yield ("rewards", n, "options", "path")
    for engines in (("engines",), *(("engines", "sets", n) for n in range(len(table["engines"]["sets"])))):
        drafts = _at(table, engines).get("args", {}).get("speculative_config")
        if isinstance(drafts, dict) and "model" in drafts:
            yield (*engines, "args", "speculative_config", "model")


def _at(table: Any, place: Place) -> Any:
    return reduce(getitem, place, table)


def _wanted(key: str, text: object, *, prompts: bool) -> WantedFiles | None:
    """Files of the Hub that ``text`` names; None: it is a path, and what it names is there or not of the cache."""
    source, _, query = str(text).partition("?") if prompts else (str(text), "", "")
    if source.startswith(HUB) or (not prompts and is_bare_name(source) and not Path(source).exists()):
        name = read_hub_name(source, dataset=prompts)
    elif (found := cached_name(source)) and not Path(source).exists():
        name = found  # of an earlier life of the run, and removed from the cache since
    else:
        return None
    options = dict(part.partition("=")[::2] for part in query.split("&"))
    return WantedFiles(key=key, name=name, **{option: options.get(option, "") for option in _OWN_OPTIONS})


def _ask(wanted: Sequence[WantedFiles], stand_ins: str) -> dict[str, Resolved]:
    """Have the files of every key. Raises ``RecipeError``."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    found: dict[str, Resolved] = {}
    problems: list[str] = []
    console = Console(stderr=True, soft_wrap=True)
    columns = TextColumn("downloading {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with tempfile.TemporaryFile() as errors:
        bars = Progress(*columns, console=console)
        tasks = dict[str, Any]()
        try:
            for answer in _answers(wanted, stand_ins, errors):
                match answer:
                    case messages.DownloadProgress(name=name, done=done, total=total):
                        bars.start()
                        tasks[name] = tasks[name] if name in tasks else bars.add_task(name)
                        bars.update(tasks[name], completed=done, total=total)
                    case Resolved(key=key, name=at, notice=notice):
                        found[key] = answer
                        if notice:
                            console.print(f"{key}: {at} of the cache ({notice})", highlight=False)
                    case messages.Unresolved(key=key, problem=problem):
                        problems.append(f"{key}: {problem}")
        finally:
            if tasks:
                bars.stop()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().rpartition("\n")[2][:200]
    if not problems:
        ended = f"ended ({last}): correct that" if last else ""
        why = ended or "got no answer: try again later, or set HF_ENDPOINT to a mirror"
        lost = [one for one in wanted if one.key not in found]
        problems = [f"{one.key}: the process that asks the Hub for {one.name} {why}" for one in lost]
    if problems:
        raise RecipeError(*problems)
    return found


def _answers(wanted: Sequence[WantedFiles], stand_ins: str, errors: IO[bytes]) -> Iterator[HubAnswer]:
    """Messages of the process, until it ends, or has asked in vain for too long: looking up an address has no time
    limit of its own."""
    command = [sys.executable, "-P", "-m", "streamrl.prepare.hub.fetch", str(_LONGEST_S), str(os.getpid())]
    command += [msgspec.json.encode(wanted).decode(), stand_ins]
    nothing = subprocess.DEVNULL
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=nothing, stdout=pipe, stderr=errors, start_new_session=True)
    assert child.stdout is not None, "it has a pipe"
    guard_s = answer_s() + _SLOW_MACHINE_S
    output = child.stdout.fileno()
    waiting = b""
    patience_s = _LONGEST_S
    try:
        while select.select([output], (), (), patience_s)[0] and (read := os.read(output, 1 << 16)):
            *lines, waiting = (waiting + read).split(b"\n")
            for line in lines:
                answer = msgspec.json.decode(line, type=HubAnswer)
                patience_s = guard_s if answer == messages.Asking() else _LONGEST_S
                yield answer
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
