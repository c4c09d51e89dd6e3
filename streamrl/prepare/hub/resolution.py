"""The recipe with folders in place of names of the Hub. Commands call ``with_hub_folders`` in their process before a
run. The Hub is asked once, by a process of its own (``fetch``), and the folders of a run have the commit in their path:
a resumed run asks no server and never has another commit."""

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

from msgspec import Struct, convert, json, to_builtins

from streamrl.base.errors import RecipeError, raise_problems
from streamrl.base.run_process import end_session, last_line, start_session
from streamrl.base.types import JsonObject, Texts, TextsByName
from streamrl.prepare.hub import messages
from streamrl.prepare.hub.messages import HubAnswer, Resolved, WantedFiles, answer_s
from streamrl.recipe.remote_names import HUB, cached_name, is_bare_name, read_hub_name
from streamrl.recipe.rewards import Reward, reward_traits
from streamrl.recipe.sections import Model, Prompts, Recipe
from streamrl.recipe.throwaway_process import stdin_of
from streamrl.run.copies.fetch_checkpoint import with_fetched_checkpoint

_OWN_OPTIONS = ("config", "split", "files")
_LONGEST_S = 30 * 24 * 3600.0
_SLOW_MACHINE_S = 5.0
"""Seconds beyond the time for an answer that the process has for its message that there was none, on a busy machine."""
Place = tuple[str | int, ...]


class HubRecipe(Struct, frozen=True, kw_only=True):
    """A recipe whose names of the Hub are resolved.

    ``recipe``: recipe with folders in place of names.
    ``names``: names with commits, by the text that replaced them in the recipe.
    ``lines``: name and size of each, for people."""

    recipe: Recipe
    names: TextsByName = {}
    lines: Texts = ()

    def pinned(self, recipe: Recipe) -> Recipe:
        """``recipe`` with names and commits in place of folders."""
        table = to_builtins(recipe)
        for place in _places(table):
            text = _at(table, place)
            _at(table, place[:-1])[place[-1]] = self.names.get(text, text)
        return convert(table, Recipe)


def with_hub_folders(recipe: Recipe) -> Recipe:
    """``recipe`` with folders of the cache in place of its names of the Hub, after a download that shows its progress
    on stderr; a checkpoint of an object store is downloaded as well. Blocking. Raises ``RecipeError`` with every name
    that cannot be resolved."""
    return with_fetched_checkpoint(_resolved(recipe, "").recipe)


def with_hub_prompts(spec: str) -> str:
    """``spec``, a value of ``prompts.train``, with a folder of the cache in place of a name of the Hub. Raises
    ``RecipeError``."""
    (training_set,) = with_hub_folders(recipe_around(prompts=spec)).prompts.sets.values()
    return training_set.prompts


def recipe_around(*, model: str = "/", prompts: str = "none.jsonl") -> Recipe:
    """A recipe for a model or prompts alone. Its other fields are placeholders."""
    return Recipe(model=Model(path=model), prompts=Prompts(train=prompts), rewards=(Reward(function="none:none"),))


@contextmanager
def hub_looked_up(recipe: Recipe) -> Iterator[HubRecipe]:
    """The recipe with folders, without a download of weights: weights that are not in the cache are replaced by a
    folder with their headers, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="streamrl-hub-") as stand_ins:
        yield _resolved(recipe, stand_ins)


def _resolved(recipe: Recipe, stand_ins: str) -> HubRecipe:
    table = to_builtins(recipe)
    requests = {}
    problems = []
    for place in _places(table):
        key = ".".join(map(str, place))
        text = _at(table, place)
        try:
            if request := _request_for(key, text, prompts=place[0] in ("prompts", "evaluation")):
                requests[place] = request
        except RecipeError as error:
            problems += [f"{key}: {problem}" for problem in error.problems]
    raise_problems(problems)
    if not requests:
        return HubRecipe(recipe=recipe)
    resolutions = _ask(tuple(requests.values()), stand_ins)
    names = {}
    for place, request in requests.items():
        resolved = resolutions[request.key]
        _, question, query = _at(table, place).partition("?")
        text = resolved.folder
        if resolved.files:
            options = [part for part in query.split("&") if part and part.partition("=")[0] not in _OWN_OPTIONS]
            text += "&".join([f"?files={quote(resolved.files, safe='/*|')}", *options])
        names[text] = f"{HUB}{resolved.name}{question}{query}"
        _at(table, place[:-1])[place[-1]] = text
    lines = tuple(map(_size_line, resolutions.values()))
    return HubRecipe(recipe=convert(table, Recipe), names=names, lines=lines)


def _size_line(resolved: Resolved) -> str:
    line = f"{resolved.key}: {resolved.name}, {_size(resolved.total)}"
    if resolved.missing:
        line += f", of which {_size(resolved.missing)} would be downloaded"
    return line


def _places(table: JsonObject) -> Iterator[Place]:
    """Places at which a recipe may name data or a model."""
    yield from (("model", "path"), ("judge", "model"), ("objective", "reference"))
    if not table["teacher"]["endpoint"]:
        yield ("teacher", "model")
    keys: tuple[Place, ...] = (("prompts", "train"), ("evaluation", "prompts"))
    for key in keys:
        sources = _at(table, key)
        if isinstance(sources, str):
            yield key
        else:
            for name, prompts in sources.items():
                yield (*key, name) if isinstance(prompts, str) else (*key, name, "prompts")
    for n, reward in enumerate(table["rewards"]):
        model = reward_traits(reward["function"]).model
        if model in reward["options"]:
            yield ("rewards", n, "options", model)
    sets: list[Place] = [("engines", "sets", n) for n in range(len(table["engines"]["sets"]))]
    for engines in (("engines",), *sets):
        drafts = _at(table, engines).get("args", {}).get("speculative_config")
        if isinstance(drafts, dict) and "model" in drafts:
            yield (*engines, "args", "speculative_config", "model")


def _at(table: Any, place: Place) -> Any:
    return reduce(getitem, place, table)


def _request_for(key: str, text: object, *, prompts: bool) -> WantedFiles | None:
    """The files of the Hub that ``text`` names; None where ``text`` is a path that exists, or no path of the cache."""
    source, _, query = str(text).partition("?") if prompts else (str(text), "", "")
    if source.startswith(HUB) or (not prompts and is_bare_name(source) and not Path(source).exists()):
        name = read_hub_name(source, dataset=prompts)
    elif (cached := cached_name(source)) and not Path(source).exists():
        name = cached  # a folder of an earlier start of the run, removed from the cache since
    else:
        return None
    options = dict(part.partition("=")[::2] for part in query.split("&"))
    return WantedFiles(key=key, name=name, **{option: options.get(option, "") for option in _OWN_OPTIONS})


def _ask(requests: Sequence[WantedFiles], stand_ins: str) -> dict[str, Resolved]:
    """Download the files of every request. Returns an answer for each key. Raises ``RecipeError``."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from streamrl.observe.terminal.console import open_console

    resolutions = {}
    problems = []
    console = open_console(sys.stderr, soft_wrap=True)
    name_column = TextColumn("downloading {task.description}", markup=False)
    columns = name_column, BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with tempfile.TemporaryFile() as errors:
        bars = Progress(*columns, console=console)
        tasks = dict[str, Any]()
        try:
            for answer in _answers(requests, stand_ins, errors):
                match answer:
                    case messages.DownloadProgress(name=name, downloaded=downloaded, total=total):
                        bars.start()
                        if name not in tasks:
                            tasks[name] = bars.add_task(name)
                        bars.update(tasks[name], completed=downloaded, total=total)
                    case Resolved(key=key, name=at, notice=notice):
                        resolutions[key] = answer
                        if notice:
                            console.print(f"{key}: {at} {notice}")
                    case messages.Unresolved(key=key, problem=problem):
                        problems.append(f"{key}: {problem}")
        finally:
            if tasks:
                bars.stop()
        last = last_line(errors.fileno())
    if not problems:
        why = "got no answer: try again later, or set HF_ENDPOINT to a mirror"
        if last:
            why = f"ended ({last}): correct that"
        lost = [request for request in requests if request.key not in resolutions]
        problems = [f"{request.key}: the process that asks the Hub for {request.name} {why}" for request in lost]
    raise_problems(problems)
    return resolutions


def _answers(requests: Sequence[WantedFiles], stand_ins: str, errors: IO[bytes]) -> Iterator[HubAnswer]:
    """Messages of the process that asks the Hub, until it ends, or has waited too long for the Hub: the lookup of an
    address has no time limit of its own."""
    command = [sys.executable, "-P", "-m", "streamrl.prepare.hub.fetch", str(_LONGEST_S), str(os.getpid())]
    with stdin_of([json.encode(requests).decode(), stand_ins]) as stdin:
        child = start_session(command, stdin=stdin, stdout=subprocess.PIPE, stderr=errors)
    assert child.stdout is not None, "it has a pipe"
    guard_s = answer_s() + _SLOW_MACHINE_S
    output = child.stdout.fileno()
    waiting = b""
    patience_s = _LONGEST_S
    try:
        while select.select([output], (), (), patience_s)[0] and (read := os.read(output, 1 << 16)):
            *lines, waiting = (waiting + read).split(b"\n")
            for line in lines:
                answer = json.decode(line, type=HubAnswer)
                patience_s = guard_s if answer == messages.Asking() else _LONGEST_S
                yield answer
    finally:
        end_session(child)
        child.stdout.close()


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"
