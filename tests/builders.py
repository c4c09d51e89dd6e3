"""What many tests begin with: a recipe, a trajectory, a tokenizer of characters."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import anyio.lowlevel

from lint.metrics_page import find_metric
from streamrl.base.stage_messages import Scored
from streamrl.base.types import (
    FinishReason,
    Prompt,
    ScoredTrajectory,
    Segment,
    Trajectory,
    TrajectoryId,
    VersionSpan,
    float_array,
    token_array,
)
from streamrl.contracts import Journal, Sampler, Scorer
from streamrl.recipe.sections import Model, Prompts, Recipe, Reward, Sampling
from streamrl.stages.episodes import Episodes


def small_recipe(path: str = "m", **sections: Any) -> Recipe:
    """A model, prompts and a reward that are not read, and these sections."""
    given: dict[str, Any] = {"prompts": Prompts(train="t.jsonl"), "rewards": (Reward(function="m:f"),)}
    return Recipe(model=Model(path=path), **(given | sections))


def trajectory(
    sample: int = 0,
    group: int = 0,
    *,
    prompt_id: str = "p",
    attempt: int = 0,
    prompt: Iterable[int] = (4, 5),
    tokens: Sequence[int] = (5,),
    logprob: float = -1.0,
    version: int | None = None,
    columns: dict[str, Any] | None = None,
    **fields: Any,
) -> Trajectory:
    """A completion of one segment. ``version`` sampled all of it; None: nobody says."""
    spans = (VersionSpan(start=0, end=len(tokens), policy_version=version),) if tokens and version is not None else ()
    segment = Segment(
        token_ids=token_array(tokens),
        trained=True,
        behavior_logprobs=float_array([logprob] * len(tokens)),
        version_spans=spans,
    )
    given: dict[str, Any] = {"finish_reason": FinishReason.STOP, "segments": (segment,)}
    return Trajectory(
        id=TrajectoryId(prompt_id=prompt_id, group_id=group, sample=sample, attempt=attempt),
        prompt=Prompt(prompt_id=prompt_id, token_ids=token_array(prompt), columns=columns or {}),
        **(given | fields),
    )


class ZeroRewards:
    """A ``Scorer`` by which every reward is 0."""

    async def score(self, trajectory: Trajectory, group_size: int) -> Scored:
        return Scored(outcome=ScoredTrajectory(trajectory=trajectory, reward=0.0))

    async def lost(self, trajectory: TrajectoryId, group_size: int) -> None: ...


def episodes_on(
    engine: Sampler, max_tokens: int = 300, scorer: Scorer | None = None, journal: Journal | None = None, **options: Any
) -> Episodes:
    """Trajectories on ``engine``, scored with 0 where there is no ``scorer``, and not recorded without ``journal``."""
    return Episodes(engine, Sampling(max_tokens=max_tokens), scorer or ZeroRewards(), journal or Journal(), **options)


def tokenizer_json(special: Sequence[str], characters: Iterable[str], *, bos: int | None = None) -> dict[str, Any]:
    """A token for each character, special ones first; text begins with the token ``bos`` where there is one."""
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    processor = None
    if bos is not None:
        start = {"SpecialToken": {"id": special[bos], "type_id": 0}}
        processor = {
            "type": "TemplateProcessing",
            "single": [start, text],
            "pair": [start, text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {special[bos]: {"id": special[bos], "ids": [bos], "tokens": [special[bos]]}},
        }
    vocabulary = {content: index for index, content in enumerate((*special, *characters))}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": content, **flags} for index, content in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
        "post_processor": processor,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }


def write_tokenizer(directory: Path, tokenizer: dict[str, Any], eos: int = 1) -> Path:
    """A model directory of a tokenizer and the token that ends a completion."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    return directory


def unregistered(names: Iterable[str]) -> list[str]:
    """Metrics that the registry does not know: nothing may emit them."""
    return [name for name in names if find_metric(name) is None]


class InstantClock:
    """Virtual time: ``sleep`` advances it and lets other tasks run."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        await anyio.lowlevel.checkpoint()


MODEL_CONFIG = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 12,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}


def write_model(directory: Path) -> None:
    """A model directory that can be read, with one tensor of 12 x 8 in bfloat16 and a tokenizer of ten digits."""
    import tokenizers

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL_CONFIG))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [12, 8], "data_offsets": [0, 192]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(192))
    words = tokenizers.models.WordLevel({str(digit): digit for digit in range(10)}, unk_token="0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
