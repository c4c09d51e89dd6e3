"""Count nodes, arrows and words of this repository, against limits (part of ``make lint``).

``python lint/house.py [ROOT]`` prints one line a count, with ``-v`` also each place, and exits 1 where a count is above
its limit. Limits are ratchets: lower one when its count falls; only an issue raises one. Lines, blank lines and
comments are free: what a reader pays for is in ``lint/page.py``, the order of the rooms in ``lint/rooms.py``."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from page import (
    STATEMENTS_A_CLASS,
    STATEMENTS_A_FUNCTION,
    bare_names,
    descriptions_without_a_noun,
    long_classes,
    long_functions,
    long_test_names,
    nodes_in,
    number_of_nodes,
    tuple_assignments,
    values_or_empty,
)
from rooms import (
    against_the_order,
    arrows,
    circles_of_files,
    circles_of_folders,
    circles_of_scripts,
    files_that_import_a_wing,
    imports_of,
    place_of,
    tree_of,
    unlisted_wings,
)

LIMITS = {
    "nodes of streamrl": 633_450,
    "words of README": 1000,
    "keys of a recipe in view": 150,
    "rooms": 18,
    "arrows between rooms": 105,
    "imports against the order": 0,
    "files that import a wing": 0,
    "imports of wings that are not listed": 0,
    "circles of rooms and folders": 0,
    "circles of files": 0,
    "circles of files in campaigns": 0,
    "circles of files in benchmarks": 0,
    "files above 15 in a folder": 0,
    f"classes above {STATEMENTS_A_CLASS} statements": 0,
    f"functions above {STATEMENTS_A_FUNCTION} statements": 0,
    "assignments of tuples to tuples": 0,
    "conditional expressions of a value or empty": 9,
    "names that are participles or pronouns": 51,
    "descriptions that open with a preposition or pronoun": 0,
    "names of tests above 60 characters": 0,
    "class names twice": 0,
    "openings of docstrings": 0,
    "banned words": 0,
    "banned words in names": 0,
}
FILES_A_FOLDER = 15

OPENINGS = {"what", "where", "how", "of", "until", "why", "see", "so", "none", "before"}
"""First words of a docstring that says neither what a thing is nor what it does: begin with a noun phrase or a verb."""

# Words of an English of its own, each with the field's word. Patterns; whole words unless they say otherwise.
BANNED = {
    r"whoever|whatever (it|he|she|they)": "the noun that is meant",
    r"so and so (many|often)": "the number",
    r"what becomes of|what it comes to|is bought with": "say what is returned, or what it costs",
    r"los(er|ers)|lost race": "deferred prompts",
    r"(is|are|was|were|be|been) told": "on_event, notify, report",
    r"whole state": "snapshot",
    r"stands? still|stood still": "paused",
    r"stands? by|standby": "spare process",
    r"forgiv(e|es|en|eness)": "restart policy",
    r"aftermath|what remains": "leftovers, postmortem",
    r"shelf": "prompt store",
    r"engine seats?|seated": "engine slot",
    r"noise of": "seed",
    r"the shadow|its shadow": "baseline",
    r"folded|folding|folds": "cumulative delta",
    r"greet(s|ed|ing|ings)?|farewell": "hello, ready, goodbye",
    r"takes? (it |them )?back|took back|take out": "drain, readmit",
    r"begins? anew|begun anew|brought up": "restart, catch up",
    r"gets on\b": "makes progress",
    r"refs/[a-z-]+\.md": "the paper: the repository has no such file",
}

_GROUPLESS = [re.sub(r"\((?!\?)", "(?:", banned) for banned in BANNED]

# Words of names, between underscores or capitals, each with the field's word.
BANNED_IN_NAMES = {
    "whoever": "the noun that is meant",
    "losers": "deferred prompts",
    "told": "report, sent",
    "tell": "send_event",
    "attend": "set, watch",
    "obey": "handle",
    "standby": "spare",
    "forgiven": "restart policy",
    "aftermath": "postmortem",
    "remains": "leftovers",
    "shelf": "store",
    "seat": "slot, or a unit of the batch",
    "seats": "slots, or a unit of the batch",
    "doomed": "pending kills",
    "strays": "orphans",
    "strangers": "unknown peers",
    "greeting": "hello",
    "farewell": "goodbye",
    "anew": "restart",
}


class Count(NamedTuple):
    """A number, and the places that it counts."""

    number: int
    places: list[str]


def counted(places: Iterable[str]) -> Count:
    """The number of ``places``, and the places."""
    all_places = list(places)
    return Count(len(all_places), all_places)


class House:
    """The files of a checkout: those that git knows, and new ones that it does not ignore."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.product, self.tests = self.files("streamrl/*.py"), self.files("tests/*.py")

    def files(self, pattern: str) -> list[Path]:
        """Files by a glob of git's."""
        found = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
            cwd=self.root,
            capture_output=True,
            text=True,
            check=True,
        )
        return [path for name in found.stdout.splitlines() if (path := self.root / name).is_file()]

    def where(self, path: Path, node: ast.AST) -> str:
        """``file:line``."""
        return f"{path.relative_to(self.root)}:{getattr(node, 'lineno', 1)}"

    def places(self, nodes: Iterable[tuple[Path, ast.AST, str]]) -> Count:
        """The nodes of a count of ``lint/page.py``, each as ``file:line: text``."""
        return counted(f"{self.where(path, node)}: {text}" for path, node, text in nodes)

    def full_folders(self) -> Iterator[str]:
        """Folders of more files than a reader keeps in mind, ``__init__`` aside."""
        counts = Counter(path.parent for path in self.product if path.name != "__init__.py")
        yield from (f"{folder.relative_to(self.root)}: {n}" for folder, n in counts.items() if n > FILES_A_FOLDER)

    def class_names_twice(self) -> Iterator[str]:
        """Public classes of a module that another module names, too."""
        places = defaultdict(list)
        for path in self.product:
            for node in tree_of(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(self.where(path, node))
        yield from (f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1)

    def circles(self, folder: str, root: Path) -> Count:
        """Files of ``folder`` that import each other."""
        circles = circles_of_scripts(self.files(f"{folder}/*.py"), root)
        return counted(" <-> ".join(circle) for circle in circles)

    def openings(self) -> Iterator[str]:
        """Docstrings that begin with one of ``OPENINGS``."""
        for path, node in nodes_in(self.product, ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""  # type: ignore[arg-type]
            if (first := re.match(r"\W*(\w+)", text)) and first[1].lower() in OPENINGS:
                yield f"{self.where(path, node)}: {text.splitlines()[0]}"

    def banned_words(self) -> Iterator[str]:
        """Places of ``BANNED``, each with the field's word."""
        words = list(BANNED.values())
        pattern = re.compile(rf"\b(?:{'|'.join(f'({banned})' for banned in _GROUPLESS)})\b", re.IGNORECASE)
        for path in [*self.product, *self.tests, *self.files("*.md"), *self.files("examples/*.py")]:
            text = path.read_text()
            for match in pattern.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                assert match.lastindex is not None
                yield f"{path.relative_to(self.root)}:{line}: {match[0]!r}: {words[match.lastindex - 1]}"

    def banned_names(self) -> Iterator[str]:
        """Names of classes, functions and their parameters, and of attributes that are set, with one of
        ``BANNED_IN_NAMES``."""
        kinds = ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.arg, ast.Name, ast.Attribute
        for path, node in nodes_in(self.product, *kinds):
            if not isinstance(getattr(node, "ctx", ast.Store()), ast.Store):
                continue
            name = next(getattr(node, key) for key in ("name", "arg", "id", "attr") if hasattr(node, key))
            for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name):
                if instead := BANNED_IN_NAMES.get(word.lower()):
                    yield f"{self.where(path, node)}: {name}: {word!r}: {instead}"

    def likely_places(self, places: list[str]) -> list[str]:
        """Those of ``places`` that are in files that differ from the last commit; all places where there are none."""
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--no-renames", "--untracked-files=all"],
            cwd=self.root,
            capture_output=True,
            text=True,
            check=True,
        )
        names = {line[3:] for line in changed.stdout.splitlines()}
        return [place for place in places if place.partition(":")[0] in names] or places

    def keys_in_view(self) -> Count:
        """Keys of all sections of a recipe that ``explain`` shows."""
        sys.path.insert(0, str(self.root))
        from streamrl.recipe.field_types import paths_in_view
        from streamrl.recipe.sections import Recipe

        return Count(len(list(paths_in_view(Recipe))), [])

    def counts(self) -> dict[str, Count]:
        """Every count of ``LIMITS``, with its places."""
        imports = imports_of(self.product, self.root)
        rooms = sorted({place_of(path, self.root).room for path in self.product} - {"", "contracts"})
        pairs = sorted((a, b) for a, b in arrows(imports) if "contracts" not in (a, b))
        return {
            "nodes of streamrl": Count(number_of_nodes(self.product), []),
            "words of README": Count(len((self.root / "README.md").read_text().split()), []),
            "keys of a recipe in view": self.keys_in_view(),
            "rooms": counted(rooms),
            "arrows between rooms": counted([f"{a} -> {b}" for a, b in pairs]),
            "imports against the order": counted(against_the_order(imports)),
            "files that import a wing": counted(files_that_import_a_wing(imports)),
            "imports of wings that are not listed": counted(unlisted_wings(imports)),
            "circles of rooms and folders": counted([" <-> ".join(circle) for circle in circles_of_folders(imports)]),
            "circles of files": counted([" <-> ".join(circle) for circle in circles_of_files(imports)]),
            "circles of files in campaigns": self.circles("campaigns", self.root),
            "circles of files in benchmarks": self.circles("benchmarks", self.root / "benchmarks"),
            "files above 15 in a folder": counted(self.full_folders()),
            f"classes above {STATEMENTS_A_CLASS} statements": self.places(long_classes(self.product)),
            f"functions above {STATEMENTS_A_FUNCTION} statements": self.places(long_functions(self.product)),
            "assignments of tuples to tuples": self.places(tuple_assignments(self.product)),
            "conditional expressions of a value or empty": self.places(values_or_empty(self.product)),
            "names that are participles or pronouns": self.places(bare_names(self.product)),
            "descriptions that open with a preposition or pronoun": self.places(
                descriptions_without_a_noun(self.product)
            ),
            "names of tests above 60 characters": self.places(long_test_names(self.tests)),
            "class names twice": counted(self.class_names_twice()),
            "openings of docstrings": counted(self.openings()),
            "banned words": counted(self.banned_words()),
            "banned words in names": counted(self.banned_names()),
        }


def main(arguments: list[str]) -> int:
    """Print the counts of the checkout that ``arguments`` names (default: this one); 1 where one is above its limit."""
    gc.disable()  # trees are kept: to look for garbage among them takes a third of the time
    named = [argument for argument in arguments if argument != "-v"]
    house = House(Path(named[0]).resolve() if named else Path(__file__).resolve().parent.parent)
    counts = house.counts()
    failed = False
    for name, (count, places) in counts.items():
        print(f"house: {name}: {count:,} (limit {LIMITS[name]:,})")
        failed |= count > LIMITS[name]
        if "-v" in arguments:
            print("".join(f"house:   {place}\n" for place in places), end="")
        elif count > LIMITS[name]:
            print("".join(f"house:   {place}\n" for place in house.likely_places(places)), end="")
    nodes_of_tests = number_of_nodes(house.tests)
    print(f"house: nodes of tests: {nodes_of_tests:,}")
    if nodes_of_tests >= counts["nodes of streamrl"].number:
        failed = True
        print("house: the tests are larger than the product")
    if failed:
        print("house: a count is above its limit: mend, delete, merge, or use a library", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
