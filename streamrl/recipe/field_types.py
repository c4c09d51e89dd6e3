"""Types of a recipe's fields: numbers with bounds, the text of a key, the mark of advanced keys; and functions that
list the fields of a section. The sections, their checks and ``streamrl explain`` use them.

The text of a key is the string in the ``Annotated`` of its field; ``streamrl explain``, docs/recipe.md and error
messages show it. A key that few runs need (timers, constants of papers, aids of tests) is ``advanced``: a recipe file
has it below ``[SECTION.advanced]``, and the dry run shows it only where it is set. In Python it is a field of the
section like the others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import NODEFAULT, Meta, Struct, inspect

from streamrl.base.types import JsonObject

Share = Annotated[float, Meta(gt=0, le=1)]
ShareOrAuto = Annotated[float, Meta(ge=0, le=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NaturalFloat = Annotated[float, Meta(ge=0)]
Factor = Annotated[float, Meta(ge=1)]
Positive = Annotated[int, Meta(gt=0)]
Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(gt=0, le=4096)]
"""Number of processes and the like. A larger number is a mistake, and the plan of such a run would take very long."""

EngineDtype = Literal["auto", "float32", "bfloat16", "float16"]

ADVANCED = "advanced"
advanced = Meta(extra={ADVANCED: True})
"""Mark of an advanced key, which a recipe file has below ``[SECTION.advanced]``."""


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every recipe section."""


class Key(Struct, frozen=True, kw_only=True):
    """A field of a section.

    ``kind``: type of the value, without its text;
    ``annotation``: full type, for ``msgspec.convert``;
    ``text``: text of the key for people;
    ``advanced``: whether the key is written below ``[SECTION.advanced]``;
    ``required``: whether the key has no default;
    ``default``: default value (None also for a required key)."""

    name: str
    kind: inspect.Type
    annotation: Any
    text: str
    advanced: bool
    required: bool
    default: Any

    @property
    def nested(self) -> type[Struct] | None:
        """Struct of the value where it is a table, optional or not."""
        return next((kind.cls for kind in _members(self.kind) if isinstance(kind, inspect.StructType)), None)

    @property
    def item(self) -> type[Struct] | None:
        """Struct of the items where the value is a list of tables."""
        if not isinstance(self.kind, inspect.VarTupleType):
            return None
        item = bare(self.kind.item_type)
        return item.cls if isinstance(item, inspect.StructType) else None

    @property
    def named(self) -> type[Struct] | None:
        """Struct of the tables in a table whose keys users choose, as the sets of ``prompts.train``."""
        tables = [kind for kind in _members(self.kind) if isinstance(kind, inspect.DictType)]
        values = [value for table in tables for value in _members(table.value_type)]
        return next((value.cls for value in values if isinstance(value, inspect.StructType)), None)

    @property
    def struct(self) -> type[Struct] | None:
        """Struct of the table, or of the items of a list of tables."""
        return self.nested or self.item

    @property
    def inner(self) -> tuple[type[Struct] | None, str]:
        """(struct of the table or tables, what a path has before the keys of each: ``NAME.`` for the name of a
        table)."""
        return (self.struct or self.named, "NAME." * bool(self.named))

    @property
    def section(self) -> type[Struct]:
        """Struct of a key of the recipe itself, which is a section or a list of sections."""
        assert self.struct is not None, f"{self.name} is no section"
        return self.struct


def without_index(path: str) -> str:
    """Return a dotted path without the numbers of items of lists."""
    return ".".join(part for part in path.split(".") if not part.isdigit())


def bare(kind: inspect.Type) -> Any:
    """Return ``kind`` without its ``Meta`` annotations."""
    return bare(kind.type) if isinstance(kind, inspect.Metadata) else kind


def _members(kind: inspect.Type) -> list[Any]:
    """Return the members of a union, without their annotations; for another type the type itself."""
    kind = bare(kind)
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return [bare(member) for member in members]


@cache
def keys_of(struct: type[Struct]) -> Mapping[str, Key]:
    """Return the fields of a section, or of the recipe (whose fields are sections), in their order."""
    kind = inspect.type_info(struct)
    assert isinstance(kind, inspect.StructType)
    hints = get_type_hints(struct, include_extras=True)
    return {field.name: _key(field, hints[field.name]) for field in kind.fields}


def as_table(value: Any) -> Any:
    """Return ``value`` with every struct in it as the table of a recipe file, with advanced keys below
    ``advanced``."""
    if isinstance(value, Mapping):
        return {key: as_table(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_table(item) for item in value]
    if not isinstance(value, Struct):
        return value
    table: JsonObject = {}
    for name, key in keys_of(type(value)).items():
        target = table.setdefault(ADVANCED, {}) if key.advanced else table
        target[name] = as_table(getattr(value, name))
    return table


def _key(field: inspect.Field, annotation: Any) -> Key:
    notes = getattr(annotation, "__metadata__", ())
    return Key(
        name=field.name,
        kind=bare(field.type),
        annotation=annotation,
        text="".join(note for note in notes if isinstance(note, str)),
        advanced=advanced in notes,
        required=field.required,
        default=_default(field),
    )


def _default(field: inspect.Field) -> Any:
    if field.default_factory not in (NODEFAULT, None):
        return field.default_factory()
    return None if field.default is NODEFAULT else field.default


def written_path(recipe: type[Struct], path: str) -> str:
    """Return the path in a recipe file of the field ``path``: ``engines.advanced.sets.0.count`` for
    ``engines.sets.0.count``."""
    struct: type[Struct] | None = recipe
    written = []
    for part in path.split("."):
        key = keys_of(struct).get(part) if struct is not None else None
        if key is not None:
            if key.advanced:
                written.append(ADVANCED)
            struct = key.struct
        written.append(part)
    return ".".join(written)


def paths_in_view(recipe: type[Struct], *, with_advanced: bool = False) -> Iterator[str]:
    """Yield the paths of all keys that ``streamrl explain`` shows, with those of tables inside of sections, and with
    advanced keys those of tables that users name."""

    def below(struct: type[Struct], prefix: str) -> Iterator[str]:
        for name, key in keys_of(struct).items():
            if key.advanced and not with_advanced:
                continue
            yield f"{prefix}.{name}"
            inner, place = key.inner
            if inner is not None and (with_advanced or not place):
                yield from below(inner, f"{prefix}.{name}.{place}".rstrip("."))

    for name, section in keys_of(recipe).items():
        yield from below(section.section, name)


def paths_to(recipe: type[Struct], name: str) -> list[str]:
    """Return the paths in a recipe file of all keys with this name."""
    all_paths = paths_in_view(recipe, with_advanced=True)
    return [written_path(recipe, path) for path in all_paths if path.rpartition(".")[2] == name]


_DOTTED = re.compile(r"\b[a-z_]+(?:\.(?:\d+|N))?\.[a-z_0-9]+")


def as_written(recipe: type[Struct], text: str) -> str:
    """Return ``text`` with the names of fields (``engines.restarts``) as paths in a recipe file
    (``engines.advanced.restarts``)."""
    return _DOTTED.sub(lambda match: written_path(recipe, match[0]), text)
