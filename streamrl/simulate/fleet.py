"""Model of a fleet: engines, lengths, rewards, training, push. Presets by name, and TOML files.

``streamrl simulate`` and ``streamrl what-if`` load one, ``streamrl calibrate`` and the adviser fit one (``calibrate``);
the simulation reads its costs."""

from __future__ import annotations

from bisect import bisect
from itertools import accumulate
from math import sqrt
from pathlib import Path

from msgspec import Struct, convert

from streamrl.base.errors import UNDECODABLE, InputError
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import parse_toml
from streamrl.simulate.engines import EngineModel
from streamrl.simulate.host_model import HostsModel
from streamrl.simulate.lengths import DomainLengths, LengthModel, LengthSource, ModelledLengths
from streamrl.simulate.stages import EnvironmentModel, PushModel, RewardModel, TrainerModel


class FleetEngines(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal engines.

    ``count``: number of engines;
    ``prompt_tokens``: length of every prompt;
    ``capacity``: requests in full engines, for shares of free slots (0: ``count`` x ``max_num_seqs`` of the engine, or
      a batch of the recipe where this is fewer);
    ``migration_s``: seconds from the abort of a request that moves to its submission elsewhere;
    ``tensor_parallel_size``: workers of one engine;
    ``parallel_scaling``: share of the ideal speed-up that twice the workers give;
    ``weight_tokens``: tokens whose KV takes as much memory as the weights;
    ``switch_s``: seconds of a change from one set of engines to another."""

    count: int = 1
    prompt_tokens: int = 0
    capacity: int = 0
    migration_s: float = 0.0
    tensor_parallel_size: int = 1
    parallel_scaling: float = 0.8
    weight_tokens: float = 0.0
    switch_s: float = 0.0


class Domain(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts of one kind, with lengths and rewards of their own. ``share``: share of all prompts, in any unit."""

    share: float
    lengths: LengthModel
    reward: RewardModel = RewardModel()


class FleetModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All costs and lengths, which a recipe does not have. A TOML file has a table for each field; ``domains`` is an
    array of tables, which replace ``lengths`` and ``reward``."""

    engine: EngineModel
    trainer: TrainerModel
    lengths: LengthModel
    engines: FleetEngines = FleetEngines()
    reward: RewardModel = RewardModel()
    push: PushModel = PushModel()
    environment: EnvironmentModel = EnvironmentModel()
    hosts: HostsModel = HostsModel()
    domains: tuple[Domain, ...] = ()

    def __post_init__(self) -> None:
        if self.hosts.count > self.engines.count:
            raise ValueError(
                f"hosts.count = {self.hosts.count} for engines.count = {self.engines.count}: an engine is on one host, "
                "so give as many engines as hosts, or more"
            )
        if any(domain.share <= 0 or domain.lengths.cap != self.lengths.cap for domain in self.domains):
            raise ValueError(
                f"domains: each needs a share above 0 and lengths.cap = {self.lengths.cap}, as all lengths"
            )

    def domain_of(self, prompt: int) -> int:
        """Number of the domain of a prompt. Any sequence of prompts has about the shares of the domains."""
        if not self.domains:
            return 0
        shares = list(accumulate(domain.share for domain in self.domains))
        return bisect(shares, prompt * GOLDEN % 1.0 * shares[-1])

    def drawn_lengths(self, seed: int) -> LengthSource:
        """Source of lengths, which draws from the model of a prompt's domain."""
        models = [domain.lengths for domain in self.domains] or [self.lengths]
        return DomainLengths([ModelledLengths(model, seed) for model in models], self.domain_of)


GOLDEN = (sqrt(5) - 1) / 2


def _read(path: Path) -> FleetModel:
    try:
        return convert(parse_toml(path.read_text(encoding="utf-8")), FleetModel)
    except UNDECODABLE as error:
        raise InputError(f"{path}: not a fleet model: {error}") from error


_FILES = {path.stem: path for path in Path(__file__).with_name("fleets").glob("*.toml")}
PRESETS = {name: _read(_FILES[name]) for name in sorted(_FILES)}
"""Models by the names of their files in ``fleets``. A comment in each file has the source of its numbers."""

DEMO = PRESETS["demo"]
HEAVY = PRESETS["heavy"]


def differences(recipe: Recipe, model: FleetModel, cap: int) -> list[str]:
    """Messages about settings of the recipe that the simulation ignores. ``cap``: cap of the lengths that it draws."""
    messages: list[str] = []
    if recipe.engines.count != model.engines.count:
        messages.append(
            f"the fleet has {model.engines.count} engines, whatever the recipe says (engines.count = "
            f"{recipe.engines.count}): a fleet file sets engines.count"
        )
    key = "environment.max_tokens" if recipe.environment.configured else "sampling.max_tokens"
    limit = recipe.max_tokens
    if limit < cap:
        messages.append(f"lengths of the fleet go up to {cap} tokens and are cut at {key} = {limit}")
    elif limit > cap:
        messages.append(
            f"no completion is longer than the fleet's {cap} tokens, and the recipe allows more ({key} = {limit}): "
            "a fleet file sets lengths.cap"
        )
    return messages


def load_fleet(name_or_path: str) -> FleetModel:
    """Load a preset by name, or a TOML file. Raises ``StreamRLError`` that names the problem of the file."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    path = Path(name_or_path)
    if not path.is_file():
        raise InputError(
            f"fleet {name_or_path!r} is neither a file nor one of {', '.join(PRESETS)}; "
            "streamrl calibrate RUN writes such a file"
        )
    return _read(path)
