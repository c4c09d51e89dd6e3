"""Parts of a recipe's fields: checked numbers, and the mark of keys that are rarely needed.

The text of a key stands at its field: ``streamrl explain``, docs/recipe.md and error messages come from it. A key that
few runs need (timers, constants of papers, aids of tests) is ``advanced``: it is written below ``[SECTION.advanced]``,
and shown only where it is set. In Python all fields of a section are beside each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta, inspect

Share = Annotated[float, Meta(gt=0, le=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NaturalFloat = Annotated[float, Meta(ge=0)]
Factor = Annotated[float, Meta(ge=1)]
Positive = Annotated[int, Meta(gt=0)]
Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(gt=0, le=4096)]
"""Of processes and the like: more than any cluster has is a mistake, and the plan of a run would take for ever."""

EngineDtype = Literal["auto", "float32", "bfloat16", "float16"]

ADVANCED = "advanced"


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every recipe section."""


def doc(text: str) -> Meta:
    """The text of a key."""
    return Meta(description=text)


def advanced(text: str) -> Meta:
    """The text of a key that is written below ``[SECTION.advanced]``."""
    return Meta(description=text, extra={ADVANCED: True})


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A field of a section. ``kind``: its type without the text; ``annotation``: as ``msgspec.convert`` takes it;
    ``default``: None also where there is none."""

    name: str
    kind: inspect.Type
    annotation: Any
    text: str
    advanced: bool
    required: bool
    default: Any

    @property
    def nested(self) -> type[msgspec.Struct] | None:
        """The struct of a table inside of a section, optional or not."""
        kinds = self.kind.types if isinstance(self.kind, inspect.UnionType) else (self.kind,)
        return next((bare(kind).cls for kind in kinds if isinstance(bare(kind), inspect.StructType)), None)

    @property
    def item(self) -> type[msgspec.Struct] | None:
        """The struct of the items, where the value is a list of tables."""
        if not isinstance(self.kind, inspect.VarTupleType):
            return None
        item = bare(self.kind.item_type)
        return item.cls if isinstance(item, inspect.StructType) else None

    @property
    def struct(self) -> type[msgspec.Struct] | None:
        """The struct of the table, or of each item of a list of tables."""
        return self.nested or self.item

    @property
    def section(self) -> type[msgspec.Struct]:
        """``struct`` of a key of the recipe itself, which is a section or a list of sections."""
        assert self.struct is not None, f"{self.name} is no section"
        return self.struct


def bare(kind: inspect.Type) -> Any:
    """``kind`` without what ``Meta`` says beside it."""
    return bare(kind.type) if isinstance(kind, inspect.Metadata) else kind


@cache
def keys_of(struct: type[msgspec.Struct]) -> Mapping[str, Key]:
    """The fields of a section, or of the whole recipe (whose fields are sections), in their order."""
    kind = inspect.type_info(struct)
    assert isinstance(kind, inspect.StructType)
    hints = get_type_hints(struct, include_extras=True)
    return {field.name: _key(field, hints[field.name]) for field in kind.fields}


def as_table(value: Any) -> Any:
    """``value`` with every ``Section`` in it as the table that a file has: its advanced keys below ``advanced``."""
    if isinstance(value, Mapping):
        return {key: as_table(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_table(item) for item in value]
    if not isinstance(value, Section):
        return value
    table: dict[str, Any] = {}
    for name, key in keys_of(type(value)).items():
        place = table.setdefault(ADVANCED, {}) if key.advanced else table
        place[name] = as_table(getattr(value, name))
    return table


def _key(field: inspect.Field, annotation: Any) -> Key:
    extra: dict[str, Any] = {}
    text = ""
    kind = field.type
    while isinstance(kind, inspect.Metadata):
        extra |= kind.extra or {}
        text = text or (kind.extra_json_schema or {}).get("description", "")
        kind = kind.type
    return Key(
        name=field.name,
        kind=kind,
        annotation=annotation,
        text=text,
        advanced=extra.get(ADVANCED, False),
        required=field.required,
        default=_default(field),
    )


def _default(field: inspect.Field) -> Any:
    if field.default_factory not in (msgspec.NODEFAULT, None):
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default


def written_path(recipe: type[msgspec.Struct], path: str) -> str:
    """Return the path of field ``path`` (``engines.sets.0.count``) in a file: ``engines.advanced.sets.0.count``."""
    struct: type[msgspec.Struct] | None = recipe
    written = []
    for part in path.split("."):
        found = keys_of(struct).get(part) if struct is not None else None
        if found is not None:
            written += [ADVANCED] if found.advanced else []
            struct = found.struct
        written.append(part)
    return ".".join(written)


def paths_in_view(recipe: type[msgspec.Struct], *, with_advanced: bool = False) -> Iterator[str]:
    """Paths of all keys that ``streamrl explain`` shows, also of tables inside of sections."""

    def below(struct: type[msgspec.Struct], prefix: str) -> Iterator[str]:
        for name, found in keys_of(struct).items():
            if found.advanced and not with_advanced:
                continue
            yield f"{prefix}.{name}"
            if found.struct is not None:
                yield from below(found.struct, f"{prefix}.{name}")

    for name, section in keys_of(recipe).items():
        yield from below(section.section, name)


def paths_to(recipe: type[msgspec.Struct], name: str) -> list[str]:
    """Paths of all keys of this name, as they are written."""
    every = paths_in_view(recipe, with_advanced=True)
    return [written_path(recipe, path) for path in every if path.rpartition(".")[2] == name]


_DOTTED = re.compile(r"\b[a-z_]+(?:\.(?:\d+|N))?\.[a-z_0-9]+")


def as_written(recipe: type[msgspec.Struct], text: str) -> str:
    """``text`` whose names of keys (``engines.restarts``) are as they are written (``engines.advanced.restarts``)."""
    return _DOTTED.sub(lambda found: written_path(recipe, found[0]), text)
