"""Model of a cluster: engines, lengths, rewards, training, push. Named ones, and TOML files."""

from __future__ import annotations

import math
from bisect import bisect
from itertools import accumulate
from pathlib import Path

import msgspec

from streamrl.base.errors import UNDECODABLE, StreamRLError
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import parse_toml
from streamrl.simulate.engines import EngineModel
from streamrl.simulate.lengths import DomainLengths, LengthModel, LengthSource, ModelledLengths
from streamrl.simulate.stages import PushModel, RewardModel, TrainerModel


class ClusterEngines(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``count`` equal engines; prompts of ``prompt_tokens``; ``capacity``: requests in full engines, for
    shares of free slots (0: ``count`` x ``max_num_seqs`` of the engine, or a batch of the recipe where that is fewer).

    ``migration_s``: from the abort of a request that moves to its submission elsewhere. ``tensor_parallel_size``:
    workers of one engine; ``parallel_scaling``: share of the ideal speed-up that doubling them gives;
    ``weight_tokens``: tokens whose KV takes as much memory as the weights; ``switch_s``: from one set of
    engines to another."""

    count: int = 1
    prompt_tokens: int = 0
    capacity: int = 0
    migration_s: float = 0.0
    tensor_parallel_size: int = 1
    parallel_scaling: float = 0.8
    weight_tokens: float = 0.0
    switch_s: float = 0.0


class Domain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts of one kind, ``share`` of all (in any unit), with lengths and rewards of their own."""

    share: float
    lengths: LengthModel
    reward: RewardModel = RewardModel()


class ClusterModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a recipe does not say. A TOML file has a table for each field; ``domains``, an array of them,
    replace its lengths and reward."""

    engine: EngineModel
    trainer: TrainerModel
    lengths: LengthModel
    engines: ClusterEngines = ClusterEngines()
    reward: RewardModel = RewardModel()
    push: PushModel = PushModel()
    domains: tuple[Domain, ...] = ()

    def __post_init__(self) -> None:
        if any(domain.share <= 0 or domain.lengths.cap != self.lengths.cap for domain in self.domains):
            raise ValueError(
                f"domains: each needs a share above 0 and lengths.cap = {self.lengths.cap}, as all lengths"
            )

    def domain_of(self, prompt: int) -> int:
        """Domain of a prompt. In any stretch of prompts each domain has its share, nearly."""
        shares = list(accumulate(domain.share for domain in self.domains))
        return bisect(shares, prompt * GOLDEN % 1.0 * shares[-1]) if shares else 0

    def drawn_lengths(self, seed: int) -> LengthSource:
        """Lengths of prompts of each domain."""
        return DomainLengths([ModelledLengths(one.lengths, seed) for one in self.domains or [self]], self.domain_of)


GOLDEN = (math.sqrt(5) - 1) / 2

# The demo model on two CPU cores, fitted to three measured points.
DEMO = ClusterModel(
    engine=EngineModel(
        base_s=1.7e-3,
        per_running_s=0.027e-3,
        arrival_s=1e-3,
        admission_s=0.8e-3,
        admission_per_running_s=0.010e-3,
        presubmitted_s=0.2e-3,
        max_num_seqs=1024,
    ),
    engines=ClusterEngines(count=1, prompt_tokens=8, switch_s=30.0),
    lengths=LengthModel(
        cap=448, weights=(1.0,), mus=(math.log(45),), sigmas=(1.183,), cap_share=0.041, correlation=0.65
    ),
    trainer=TrainerModel(token_s=0.9e-3 / 80, optimizer_s=0.02, streaming_speed=1.0),
    push=PushModel(seconds=0.03, pause_s=0.01, abort_barrier_s=0.021),
)

# A-heavy of the same section: the body of A-demo, and a power-law tail to the cap.
HEAVY = msgspec.structs.replace(
    DEMO, lengths=msgspec.structs.replace(DEMO.lengths, cap=2048, cap_share=0.02, tail_from=315)
)

# RollPacker's math task (arXiv 2509.21009): its lengths and times of a step.
ROLLPACKER_14B = ClusterModel(
    engine=EngineModel(
        base_s=11e-3,
        per_running_s=0.03e-3,
        per_context_token_s=0.0367e-6,
        max_num_seqs=256,
        kv_tokens=490_000,
        prefill_tokens_s=30_000.0,
    ),
    engines=ClusterEngines(
        count=16,
        prompt_tokens=128,
        migration_s=1.5,
        tensor_parallel_size=2,
        weight_tokens=28e9 / 196_608,  # 14B at two bytes; 48 layers x 8 heads x 128 x 2 x 2 bytes a token
        switch_s=5.0,
    ),
    lengths=LengthModel(
        cap=16_384,
        weights=(0.435, 0.565),
        mus=(6.408, 6.683),
        sigmas=(0.416, 1.244),
        cap_share=0.0099,
        tail_from=4096,
        correlation=0.35,
    ),
    # Training has the engines' own devices: those that are freed late in a round, and all of them at the close.
    trainer=TrainerModel(token_s=75 / 1024 / 1286, optimizer_s=13.0),
    push=PushModel(seconds=15.0, pause_s=15.0, round_s=50.0),
)
ROLLPACKER_14B_CODE = msgspec.structs.replace(
    ROLLPACKER_14B,
    lengths=msgspec.structs.replace(
        ROLLPACKER_14B.lengths, weights=(0.727, 0.273), mus=(6.428, 6.979), sigmas=(0.394, 1.062), cap_share=0.0091
    ),
    trainer=msgspec.structs.replace(ROLLPACKER_14B.trainer, token_s=57 / 1024 / 1085),
)

PRESETS: dict[str, ClusterModel] = {
    "demo": DEMO,
    "heavy": HEAVY,
    "rollpacker-14b-16k": ROLLPACKER_14B,
    "rollpacker-14b-16k-code": ROLLPACKER_14B_CODE,
}


def differences(recipe: Recipe, model: ClusterModel, cap: int) -> list[str]:
    """List settings of the recipe that the simulation ignores. ``cap``: of the lengths that it draws."""
    found: list[str] = []
    if recipe.engines.count != model.engines.count:
        found.append(
            f"the cluster has {model.engines.count} engines, whatever the recipe says (engines.count = "
            f"{recipe.engines.count}): a cluster file sets engines.count"
        )
    wanted = recipe.sampling.max_tokens
    if wanted < cap:
        found.append(f"lengths of the cluster go up to {cap} tokens and are cut at sampling.max_tokens = {wanted}")
    elif wanted > cap:
        found.append(
            f"no completion is longer than the cluster's {cap} tokens, and the recipe allows more (sampling.max_tokens "
            f"= {wanted}): a cluster file sets lengths.cap"
        )
    return found


def load_cluster(name_or_path: str) -> ClusterModel:
    """A preset by name, or a TOML file. Raises ``StreamRLError`` that names what is wrong with it."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    path = Path(name_or_path)
    if not path.is_file():
        raise StreamRLError(
            f"cluster {name_or_path!r} is neither a file nor one of {', '.join(PRESETS)}; "
            "streamrl calibrate RUN writes such a file"
        )
    try:
        table = parse_toml(path.read_text(encoding="utf-8"))
        return msgspec.convert(table, ClusterModel)
    except UNDECODABLE as error:
        raise StreamRLError(f"{path}: not a cluster model: {error}") from error
