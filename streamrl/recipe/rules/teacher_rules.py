"""Rules of ``[teacher]``, and of distillation, which needs a teacher."""

from __future__ import annotations

from streamrl.recipe.objectives.teacher import Teacher
from streamrl.recipe.problems import short_toml
from streamrl.recipe.rules.rule import Broken, Problem, has_no_effect, names_are_unique, rule, unless
from streamrl.recipe.sections import Recipe
from streamrl.recipe.served_models import ServedModel, address_problem

has_no_effect(
    " ".join(f"teacher.{name}" for name in Teacher.__struct_fields__ if name not in ("model", "endpoint")),
    unless(lambda recipe: recipe.teacher.addresses, " without teacher.model: name a model, or remove [teacher]"),
)
has_no_effect(
    " ".join(f"teacher.{name}" for name in ServedModel.__struct_fields__ if name != "model"),
    unless(
        lambda recipe: not recipe.teacher.endpoint,
        ", because the model at teacher.endpoint is not served by the run: set it there",
    ),
)
has_no_effect(
    "teacher.tokenizer",
    unless(
        lambda recipe: not recipe.teacher.is_own,
        ", because the run serves teacher.model with its own tokenizer: remove it",
    ),
)


@rule("objective", "teacher")
def distillation_has_one_teacher(recipe: Recipe) -> Broken:
    """Distillation needs a teacher, a served one or the reference, and a served teacher needs distillation."""
    settings = recipe.objective_settings
    key = "teacher.endpoint" if recipe.teacher.endpoint else "teacher.model"
    value = short_toml(recipe.teacher.endpoint or recipe.teacher.model)
    is_served = bool(recipe.teacher.addresses)
    if settings.distils and not settings.reference and not is_served:
        yield Problem(
            "objective.reference",
            f"is empty, and distillation_coefficient = {short_toml(settings.distillation_coefficient)} needs a "
            "teacher: name a model with the policy's tokens, or set teacher.model",
        )
    if is_served and not settings.distils:
        yield Problem(
            key,
            f'{value} is asked by nobody: set objective.algorithm = "distillation", or '
            "objective.distillation_coefficient",
        )
    if is_served and settings.reference and not settings.kl_coefficient:
        yield Problem(
            "objective.reference",
            f"{short_toml(settings.reference)} has no use beside {key}, which is the teacher: remove one",
        )
    if is_served and settings.exact_divergence:
        yield Problem(
            "objective.divergence",
            f"{short_toml(settings.divergence)} needs logits, which no served teacher gives: name the "
            "teacher in objective.reference",
        )


@rule("teacher", "sampling")
def teachers_can_be_asked(recipe: Recipe) -> Broken:
    """Addresses must be addresses, names of teachers must differ, and the policy must sample from all tokens."""
    teacher = recipe.teacher
    for name, address in teacher.addresses.items():
        if teacher.is_own and not name:
            continue
        if problem := address_problem(address.endpoint):
            yield Problem("teacher.endpoint", problem)
        if not address.model or not address.tokenizer:
            key = "tokenizer" if address.model else "model"
            yield Problem(f"teacher.{key}", f"is empty{name and f' for {name}'}: name it, as for every teacher")
    if teacher.is_own and teacher.batch > teacher.concurrency:
        yield Problem(
            "teacher.batch",
            f"{teacher.batch} questions never wait at once, because teacher.concurrency is {teacher.concurrency}: "
            "lower it, or raise concurrency",
        )
    yield from names_are_unique("teacher.further", [other.name for other in teacher.further])
    if bool(teacher.further) != bool(teacher.column):
        yield Problem("teacher.column", "and teacher.further belong together: set both, or remove the other")
    if teacher.addresses and (recipe.sampling.temperature != 1 or recipe.sampling.min_tokens):
        yield Problem(
            "teacher.endpoint" if teacher.endpoint else "teacher.model",
            f"a served teacher scores tokens at temperature 1, and sampling.temperature = "
            f"{recipe.sampling.temperature:g}, sampling.min_tokens = {recipe.sampling.min_tokens}: set them to 1 and "
            "0, or name the teacher in objective.reference",
        )
