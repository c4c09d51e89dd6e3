"""Commands as structs: a field is an argument, its type decides how it is parsed, and its ``Argument`` has its help.
``main`` parses the command line into a command and calls its ``run``, in the command's own process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from streamrl.base.errors import RecipeError
from streamrl.base.printable import printable_json
from streamrl.base.types import Texts
from streamrl.cli.dialects.command_line import normalized_arguments, unknown_words
from streamrl.cli.help_texts.examples import EXAMPLES

CommandType = TypeVar("CommandType", bound="Command")


class Argument(Struct, frozen=True):
    """``positional``: whether the argument has a place and no name. ``flag``: name on the command line (empty: ``--``
    and the name of the field)."""

    help: str
    metavar: str = ""
    flag: str = ""
    positional: bool = False


class Command(Struct, frozen=True, kw_only=True):
    """A command with its arguments. A bool field is a switch, a tuple an option that may be repeated (of integers: one
    list with commas), a ``Literal`` a choice. The docstring is the description that ``--help`` prints, with the example
    of ``cli/help_texts/examples.py``."""

    follows_a_run: ClassVar[bool] = False
    """Whether the command goes on when its output can no longer be written."""
    json: Annotated[bool, Argument("print JSON on stdout, and nothing else there", flag="--json")] = False

    def run(self) -> int:
        """Run the command. Returns the exit code; ``StreamRLError`` and ``OSError`` are reported by ``main``."""
        raise NotImplementedError

    def print(self, value: Any, *lines: str) -> int:
        """Print ``value`` as JSON with ``--json``, else ``lines``. Returns 0, the exit code."""
        if self.json:
            print_json(value)
        else:
            print("\n".join(lines))
        return 0


SET = "--set"
Overrides = Annotated[
    Texts,
    Argument(
        "override one value, such as rollout.group_size=4 or rewards.0.weight=2; may be repeated; also without --set, "
        "and as --rollout.group_size 4",
        metavar="SECTION.KEY=VALUE",
        flag=SET,
    ),
]
RecipePath = Annotated[Path, Argument("a recipe (TOML), or the directory of a run", metavar="RECIPE", positional=True)]
RunPath = Annotated[Path, Argument("the directory of a run, such as runs/latest", metavar="RUN", positional=True)]


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON on stdout."""
    print(printable_json(msgspec.json.format(msgspec.json.encode(value)).decode()))


def refuse_no_folder(flag: str, file: Path | None) -> None:
    """Raise ``RecipeError`` where the folder of a ``file`` that a command would write is not there."""
    if file is not None and not file.absolute().parent.is_dir():
        raise RecipeError(f"{flag} {file}: there is no directory {file.absolute().parent}: make it")


def recipe_file(path: Path) -> Path:
    """Return the recipe of a run directory, or the path itself."""
    return path / "recipe.toml" if path.is_dir() else path


def parse_command(kind: type[CommandType], name: str, arguments: Sequence[str]) -> CommandType:
    """Parse ``arguments`` into the command. Exits with 2 and the usage where they are wrong, with 0 after help."""
    example = f"example: streamrl {EXAMPLES.get(name, name)}"
    parser = argparse.ArgumentParser(prog=f"streamrl {name}", description=kind.__doc__, epilog=example)
    flags = [flag for flag in add_arguments(parser, kind) if flag]
    takes_overrides = SET in flags
    words = normalized_arguments(arguments, SET, parser.error) if takes_overrides else list(arguments)
    namespace, unknown = parser.parse_known_args(words)
    if unknown:
        close_flags = [flag for word in unknown for flag in get_close_matches(word, flags, 1, 0.8)]
        text = f"unrecognized arguments: {' '.join(unknown)}"
        if close_flags:
            parser.error(f'{text}; did you mean "{close_flags[0]}"?')
        parser.error(unknown_words(unknown) if takes_overrides else text)
    fields = vars(namespace)
    for field, value in fields.items():
        if isinstance(value, list):
            fields[field] = tuple(value)
    return kind(**fields)


def add_arguments(parser: argparse.ArgumentParser, kind: type[Command]) -> list[str]:
    """Add the arguments of a command. Returns their flags."""
    hints = get_type_hints(kind, include_extras=True)
    return [_add(parser, field, hints[field.name]) for field in msgspec.structs.fields(kind)]


def _add(parser: argparse.ArgumentParser, field: msgspec.structs.FieldInfo, annotation: Any) -> str:
    """Add the argument of a field. Returns its flag."""
    kind, argument = get_args(annotation)
    required = bool(field.required)
    options: dict[str, Any] = {"help": argument.help}
    if argument.metavar:
        options["metavar"] = argument.metavar
    if not required:
        options["default"] = field.default
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (member for member in get_args(kind) if member is not type(None))
    if kind is bool:
        options["action"] = "store_true"
    elif kind == tuple[int, ...]:
        options["type"] = _integers
    elif get_origin(kind) is tuple:
        options |= {"nargs": "*"} if argument.positional else {"action": "append", "default": []}
    elif get_origin(kind) is Literal:
        options["choices"] = get_args(kind)
    else:
        options["type"] = kind
    if argument.positional:
        if not required:
            options.setdefault("nargs", "?")
        parser.add_argument(field.name, **options)
        return ""
    flag = argument.flag or f"--{field.name.replace('_', '-')}"
    parser.add_argument(flag, dest=field.name, required=required, **options)
    return flag


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of integers: write it as 0,20") from None
