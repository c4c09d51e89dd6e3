"""What the simulated engine needs in a process of its own: text with exact logprobs, and weights that are verified."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from builders.base import InstantClock
from builders.files import SORT_MODEL as MODEL

from streamrl.base.errors import RecipeError, WeightError
from streamrl.base.messages import Generate, PauseMode, WeightAnnouncement, announcement_of
from streamrl.base.types import token_array
from streamrl.engines.simulated.engine import SimulatedEngine
from streamrl.engines.simulated.text import Sentences, sentences_of
from streamrl.prepare.memory import estimate_memory
from streamrl.prepare.preflight import preflight
from streamrl.prepare.summary import arithmetic_lines
from streamrl.pretrained.model_facts import read_model_facts
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.weights.publish.publisher import ShardSpec, WeightPublisher
from streamrl.weights.pull.shared_replica import shared_replica
from streamrl.weights.vllm.simulated_engine import SimulatedWeights

MakeRequest = Callable[..., Generate]
TABLE = Sentences((5, 6, 7), full_stop=8, end_token=2)


def test_logprobs_are_those_of_what_is_drawn(make_request: MakeRequest) -> None:
    """By counting: of all tokens after the same one, the share of each is its chance."""
    seen: dict[int | None, Counter[int]] = {}
    told: dict[tuple[int | None, int], float] = {}
    for seed in range(400):
        draft = TABLE.draft(make_request(max_tokens=200, seed=seed), 1000)
        assert len(draft.token_ids) == len(draft.logprobs)
        previous: int | None = None
        for token, logprob in zip(draft.token_ids, draft.logprobs, strict=True):
            kind = previous if previous in (None, 8) else 5
            seen.setdefault(kind, Counter())[token] += 1
            told[kind, token] = math.exp(logprob)
            previous = token
        assert draft.ends == (draft.token_ids[-1] == 2)
    for kind, counts in seen.items():
        assert sum(chance for (of, _), chance in told.items() if of == kind) == pytest.approx(1)
        for token, count in counts.items():
            chance, all_of_them = told[kind, token], counts.total()
            assert abs(count / all_of_them - chance) < 5 * math.sqrt(chance / all_of_them), (kind, token)


def test_a_resumed_completion_goes_on_from_its_last_token(make_request: MakeRequest) -> None:
    request = make_request(max_tokens=50)
    after_stop = msgspec.structs.replace(request, token_ids=request.token_ids + token_array([5, 8]), prefix_length=2)
    draft = TABLE.draft(after_stop, 1000)
    assert draft.token_ids[0] == 2 and draft.logprobs[0] == pytest.approx(math.log(0.9))
    assert len(TABLE.draft(msgspec.structs.replace(after_stop, max_tokens=2), 1000).token_ids) == 0
    assert len(TABLE.draft(msgspec.structs.replace(request, seed=4), 3).token_ids) <= 3, "no more than the context has"


def test_text_of_the_demo_decodes_and_is_an_answer_now_and_then(make_request: MakeRequest) -> None:
    tokenizer = load_tokenizer(MODEL)
    text = sentences_of(tokenizer)
    drafts = [text.draft(make_request(max_tokens=448, seed=seed), 512) for seed in range(200)]
    answers = [tokenizer.decode(draft.token_ids) for draft in drafts]
    assert 20 < answers.count(".") < 70, "the right answer to a sorted list"
    assert len(set(answers)) > 100 and max(map(len, answers)) > 100
    assert all(len(answer) + draft.ends == len(draft.token_ids) for answer, draft in zip(answers, drafts, strict=True))


@pytest.mark.long
def test_what_is_known_before_a_start_knows_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ['engines.kind="simulated"', 'evaluation.prompts=""']
    recipe = load_recipe(MODEL.parent / "recipe.toml", overrides)
    facts = read_model_facts(MODEL)
    assert any("simulated" in line for line in arithmetic_lines(recipe, facts, 512))
    assert estimate_memory(recipe, facts, 512)["engine-0"] < 256 << 20
    assert not recipe.canary and not recipe.compares_logprobs
    monkeypatch.setattr("streamrl.prepare.preflight.engine_package", lambda: None)
    preflight(recipe)
    with pytest.raises(RecipeError, match="vllm is not installed"):
        preflight(load_recipe(MODEL.parent / "recipe.toml", overrides[1:]))


# ---- weights --------------------------------------------------------------------------------------------------------

SHAPES = {"embed": (16, 4), "head": (16, 4), "norm": (4,)}
Bits = dict[str, np.ndarray]


class Pushes:
    """A publisher in a thread of its own, and simulated engines that share a replica."""

    def __init__(self, directory: Path) -> None:
        shards = [ShardSpec(name, "bfloat16", shape, 0, math.prod(shape)) for name, shape in SHAPES.items()]
        self.publisher = WeightPublisher(f"ipc://{directory}/w", run_id="r", rank=0, shards=shards)
        self.publisher.start()
        self.directory = directory
        self.version = -1
        self.bits: Bits = {}
        self.engines = [self.engine(), self.engine()]

    def engine(self) -> SimulatedEngine:
        clock = InstantClock()
        weights = SimulatedWeights(self.directory / "model", shared_replica("r", "m", self.directory))
        return SimulatedEngine(weights=weights, clock=clock.now, sleep=clock.sleep)

    def publish(self) -> WeightAnnouncement:
        self.version += 1
        source = np.random.default_rng(self.version)
        bits = {name: source.integers(0, 1 << 16, math.prod(shape), np.uint16) for name, shape in SHAPES.items()}
        if self.bits:  # a delta: one element of each
            bits = {name: np.concatenate([new[:1], self.bits[name][1:]]) for name, new in bits.items()}
        self.bits = bits
        return announcement_of(self.version, [self.publisher.publish(self.version, bits)])

    async def push(self, announced: WeightAnnouncement, engines: list[SimulatedEngine]) -> None:
        for engine in engines:
            await engine.stage(announced)
        for engine in engines:
            await engine.pause(PauseMode.KEEP, clear_cache=False)
            done = await engine.commit(announced.policy_version)
            assert done.state_hash == announced.state_hash
            await engine.resume()
        self.publisher.acknowledge(announced.policy_version)


@pytest.fixture
def pushes(tmp_path: Path) -> Iterator[Pushes]:
    made = Pushes(tmp_path)
    yield made
    made.publisher.close()


async def test_engines_hold_what_is_published_bit_for_bit(pushes: Pushes) -> None:
    for _ in range(3):
        await pushes.push(pushes.publish(), pushes.engines)
    one, other = [await engine.checksums() for engine in pushes.engines]
    assert one == other and set(one) == set(SHAPES)
    late = pushes.engine()  # as after a death: it takes all from the replica of the other two
    await pushes.push(pushes.publish(), [*pushes.engines, late])
    assert await late.checksums() == await pushes.engines[0].checksums() != one
    for engine in (*pushes.engines, late):
        await engine.aclose()
    assert not [path for path in pushes.directory.iterdir() if path.name.startswith("streamrl-replica")]
    assert not [t for t in threading.enumerate() if t.name.startswith("weight staging")]


async def test_wrongly_announced_weights_are_refused(pushes: Pushes) -> None:
    """Weights that were announced wrongly, or written by somebody else, are refused."""
    [engine, other] = pushes.engines
    first = pushes.publish()
    with pytest.raises(WeightError, match="state hash"):
        await engine.stage(msgspec.structs.replace(first, state_hash=first.state_hash ^ 1))
    await pushes.push(first, [engine, other])
    held = await engine.checksums()
    second = pushes.publish()
    await engine.stage(second)
    await engine.pause(PauseMode.KEEP, clear_cache=False)
    live = engine._weights._live._bits  # type: ignore[union-attr]
    live["embed"][0] ^= 1
    with pytest.raises(WeightError, match="the live weights have state hash"):
        await engine.commit(second.policy_version)
    assert await engine.checksums() == held, "undone from the replica"
    await pushes.push(second, [engine, other])
    assert await engine.checksums() == await other.checksums() != held
