"""Mirror the pages of the repository, and the files that they link to, for the documentation site (``make docs``).

``python lint/docs_site.py DIRECTORY`` writes DIRECTORY anew, and DIRECTORY.toml: ``zensical.toml`` with the navigation,
which is made from the sections and links of ``docs/index.md``. Links stay as they are: they work in the repository and
on the site. A folder that a page links to gets a page that lists its files."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/*.md",
    "docs/evidence/*.md",
    "docs/adr/*.md",
)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)#]+\.md)\) \|", re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


class Link(NamedTuple):
    """A link of a page: the path that it leads to (empty: this page; another host's address as it is), the anchor."""

    target: str
    anchor: str


def pages() -> list[Path]:
    """The pages of the site."""
    return [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def links_of(text: str) -> Iterator[Link]:
    """The links of a page in Markdown, without those in code."""
    for link in _LINK.findall(_FENCE.sub("", text)):
        target, _, anchor = link.partition("#")
        yield Link(target, anchor)


def anchors_of(text: str) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", found) for found in _HEADING.findall(_FENCE.sub("", text)))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def navigation() -> dict[str, dict[str, str]]:
    """The sections of ``docs/index.md``: the title and path of each page that begins a row of its tables."""
    sections = (ROOT / "docs" / "index.md").read_text().split("\n## ")[1:]
    index = ROOT / "docs"
    return {
        section.partition("\n")[0]: {
            title: str((index / target).resolve().relative_to(ROOT)) for title, target in _ROW.findall(section)
        }
        for section in sections
    }


def configuration() -> str:
    """The settings of the site, with its navigation."""
    lines = ['{ "Contents" = "docs/index.md" },']
    for section, entries in navigation().items():
        lines += [f'{{ "{section}" = [', *(f'{{ "{title}" = "{path}" }},' for title, path in entries.items()), "] },"]
    nav = "nav = [\n" + "\n".join(lines) + "\n]\n"
    return (ROOT / "zensical.toml").read_text().replace("\n[project.theme]", f"{nav}\n[project.theme]", 1)


def mirror(directory: Path) -> None:
    """Write the pages, and what they link to, below ``directory``, in place of what is there."""
    shutil.rmtree(directory, ignore_errors=True)
    wanted = {page.resolve() for page in pages()} | {path.resolve() for path in ROOT.glob("docs/*.svg")}
    for page in pages():
        targets = (link.target for link in links_of(page.read_text()) if "://" not in link.target)
        wanted |= {(page.parent / target).resolve() for target in targets if target}
    for source in sorted(wanted):
        copy = directory / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not source.is_dir():
            shutil.copyfile(source, copy)
            continue
        copy.mkdir(exist_ok=True)
        files = [path.name for path in sorted(source.iterdir()) if path.is_file()]
        for name in files:
            shutil.copyfile(source / name, copy / name)
        if "README.md" not in files:
            rows = "".join(f"- [{name}]({name})\n" for name in files)
            (copy / "README.md").write_text(f"# {source.relative_to(ROOT)}\n\n{rows}")


if __name__ == "__main__":
    mirror(Path(sys.argv[1]))
    Path(f"{sys.argv[1]}.toml").write_text(configuration())
