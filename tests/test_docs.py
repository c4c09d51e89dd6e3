"""Pages of the documentation: links, the navigation of the site, no foreign assets, and names of metrics and keys."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from lint.commands_page import page as commands_page
from lint.docs_site import ROOT, anchors_of, configuration, links_of, mirror, pages
from lint.metrics_page import find_metric
from streamrl.cli.command import parse_command
from streamrl.cli.main import COMMANDS

NAMED = [str(page.relative_to(ROOT)) for page in pages()]
LOADED = re.compile(r"<(?:script|link|img|iframe|style|source)\b|@import|url\(|!\[[^\]]*\]\([a-z]+:", re.IGNORECASE)
CODE = re.compile(r"`([^`\n]+)`")
WITHOUT_COMMAND = {
    "docs/how_it_works.md",
    "docs/glossary.md",
    "docs/recipe.md",
    "docs/metrics.md",
    "docs/commands.md",
    "docs/evidence/benchmarks.md",
    "docs/evidence/papers.md",
    "docs/evidence/log.md",
}
"""Pages to look something up, or to read."""
GUIDES_WITH_KEYS = [
    f"docs/{name}.md"
    for name in (
        "failures",
        "gpus_and_hosts",
        "how_it_works",
        "limits",
        "one_machine",
        "python",
        "rewards",
        "scheduling",
        "take_out",
    )
]


@pytest.mark.parametrize("name", NAMED)
def test_links_lead_to_files_and_headings(name: str) -> None:
    """Links of a page lead to files and headings, and load nothing."""
    page = ROOT / name
    text = page.read_text()
    wrong = []
    for target, anchor in links_of(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        path = (page.parent / target).resolve() if target else page
        inside = path.exists() and path.is_relative_to(ROOT)
        if not inside or (anchor and anchor not in anchors_of(path.read_text())):
            wrong.append(f"{target}#{anchor}")
    assert not wrong, f"{name}: no such file or heading"
    outside_of_code = CODE.sub("", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    assert not LOADED.findall(outside_of_code), "a page of the site loads something, or is HTML"


GUIDES = [name for name in NAMED if name.startswith("docs/") and not name.startswith("docs/adr/")]


@pytest.mark.parametrize("name", GUIDES)
def test_a_page_begins_with_what_to_type_in_short_lines(name: str) -> None:
    """A title that has a subject, then a command or a recipe; lines of prose have 120 characters at most."""
    text = (ROOT / name).read_text()
    head = text.partition("\n## ")[0]
    assert "```" in head or name in WITHOUT_COMMAND
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).splitlines()
    assert [line for line in prose if len(line) > 120 and not line.startswith(("|", "!", "    "))] == []


def test_files_that_pages_name_exist() -> None:
    """Of the tree; a file of a user's or of a run has a name in capitals, or no folder."""
    wrong = []
    for name in (*GUIDES, "README.md", "SECURITY.md"):
        for file in re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|toml|json|txt))(?::\w+)?`", (ROOT / name).read_text()):
            places = [ROOT / file, ROOT / "streamrl" / file]
            wrong += [f"{name}: {file}"] if not any(place.exists() for place in places) else []
    assert wrong == []


def test_files_and_names_of_contributing_exist() -> None:
    """``folder/file.py:name`` in a row on additions: a rename must not leave it behind. Patterns with NAME are left."""
    wrong = []
    for file, name in re.findall(r"`([\w/.-]+/[\w.]+\.\w+)(?::([\w.]+))?`", (ROOT / "CONTRIBUTING.md").read_text()):
        if "NAME" in file:
            continue
        path = ROOT / file if (ROOT / file).exists() else ROOT / "streamrl" / file
        if not path.exists() or not re.search(rf"\b{name.rpartition('.')[2]}\b", path.read_text()):
            wrong.append(f"{file}:{name}")
    assert wrong == []


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_load_nothing_and_run_nothing(picture: Path) -> None:
    text = picture.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|<script|<foreignObject|\bon\w+=|@import|href=", text)


def test_every_page_is_once_in_the_table_of_contents() -> None:
    """The navigation of the site is made from it."""

    def paths(entries: Any) -> Iterator[str]:
        for entry in entries:
            (value,) = entry.values()
            yield from [value] if isinstance(value, str) else paths(value)

    listed = list(paths(tomllib.loads(configuration())["project"]["nav"]))
    assert sorted(listed) == sorted(name for name in NAMED if not name.startswith("docs/adr/"))


def test_the_page_of_commands_is_made_from_the_commands() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert page == commands_page(), "run: python lint/commands_page.py > docs/commands.md"


def test_the_mirror_has_all_that_pages_link_to(tmp_path: Path) -> None:
    (tmp_path / "site" / "old").mkdir(parents=True)
    mirror(tmp_path / "site")
    assert not (tmp_path / "site" / "old").exists()
    for name in NAMED:
        copy = tmp_path / "site" / name
        assert copy.read_text() == (ROOT / name).read_text()
        targets = {target for target, _ in links_of(copy.read_text()) if target and "://" not in target}
        assert all((copy.parent / target).exists() for target in targets)


@pytest.mark.parametrize("name", NAMED)
def test_commands_that_pages_show_parse(name: str) -> None:
    text = (ROOT / name).read_text().replace("\\\n", " ")
    for block in re.findall(r"^```(?:sh)?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        for line in (line for line in block.splitlines() if line.startswith("streamrl ")):
            words = list(takewhile(lambda word: word not in (">", "|", "&", "&&"), shlex.split(line, comments=True)))[
                1:
            ]
            command = next(found for found in (" ".join(words[:2]), words[0]) if found in COMMANDS)
            module, _, kind = COMMANDS[command][0].partition(":")
            found = getattr(import_module(f"streamrl.cli.{module}"), kind)
            parse_command(found, command, words[len(command.split()) :])  # exits where they are wrong


@cache
def keys() -> set[str]:
    """Keys of the recipe by their page, which a test compares with the structs."""
    found, section = set(), ""
    for line in (ROOT / "docs" / "recipe.md").read_text().splitlines():
        if heading := re.match(r"## `\[+(\w+)\]+`", line):
            section = heading[1]
        elif row := re.match(r"\| `([\w.]+)` \|", line):
            found.add(f"{section}.{row[1]}")
    return found


@pytest.mark.parametrize("name", GUIDES_WITH_KEYS)
def test_metrics_and_keys_of_the_guides_are_there(name: str) -> None:
    sections = {key.partition(".")[0] for key in keys()}
    wrong = []
    for code in CODE.findall((ROOT / name).read_text()):
        word = code.partition(" ")[0]
        if re.fullmatch(r"[a-z]+/[\w/<>@]+", word):
            wrong += [] if find_metric(re.sub(r"<\w+>", "1", word)) else [word]
        elif re.fullmatch(r"(?!.*jsonl)[a-z_]+\.[a-z_.]+", word) and word.partition(".")[0] in sections:
            # What is below a key is the user's own: an argument of vLLM below engines.args.
            wrong += [] if {word, word.rpartition(".")[0]} & set(keys()) else [word]
    assert not wrong
