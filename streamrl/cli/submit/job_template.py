"""Texts of a job: the templates of ``templates``, or a site's own copy of one, filled with the job's values.

``streamrl launch slurm`` and ``kubernetes`` fill one in their process, and hand it to ``sbatch`` or ``kubectl``."""

from __future__ import annotations

import json
import re
import shlex
from functools import partial
from pathlib import Path

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from streamrl.base.errors import RecipeError
from streamrl.base.types import JsonMapping

TEMPLATES = {path.stem: path for path in Path(__file__).with_name("templates").iterdir()}
"""Shipped templates by name: ``slurm``, ``ray_job`` and ``job_set``."""
_quoted = partial(json.dumps, ensure_ascii=False)
_PLAIN = r"[\w.,:=+@%/\[\]-]*"


def filled(template: Path, values: JsonMapping) -> str:
    """Return the text of ``template`` with ``values`` by the names of its placeholders.

    Raises ``RecipeError`` for a template that cannot be read or filled, or that has a placeholder without a value."""
    jinja = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    jinja.filters |= {"json": _quoted, "quote": shlex.quote, "sbatch": sbatch_value}
    if not template.is_file():
        raise RecipeError(f"{template}: no such file")
    text = template.read_text()
    try:
        placeholders = jinja2.meta.find_undeclared_variables(jinja.parse(text))
        unknown = sorted(placeholders - values.keys() - jinja.globals.keys())
        if unknown:
            names = ", ".join(sorted(values))
            raise RecipeError(f"{template}: {', '.join(unknown)}: there is no such placeholder; there are {names}")
        return jinja.from_string(text).render(values)
    except jinja2.TemplateSyntaxError as error:
        raise RecipeError(f"{template}:{error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise RecipeError(f"{template} cannot be filled: {error}") from error


def sbatch_value(value: str) -> str:
    """Return ``value`` in the quotes that sbatch reads in a script."""
    if re.fullmatch(_PLAIN, value):
        return value
    return _quoted(value)
