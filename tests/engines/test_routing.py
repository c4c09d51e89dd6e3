"""Choice of engines for the turns of trajectories, and what the prefix caches have of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
from builders import unregistered
from hypothesis import find, given, settings
from hypothesis import strategies as st

from streamrl.base.messages import Generate
from streamrl.base.types import CachedPrefix, Completion, FinishReason, VersionSpan, float_array, token_array
from streamrl.engines.prefix_hits import PrefixHits
from streamrl.engines.resumption import part_id
from streamrl.engines.routing import SIBLING_SLACK, Router, ServedRequest

ENGINES = 3
Script = list[tuple[str, int]]
SCRIPTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "begin", "whole", "whole", "turn", "turn", "cut", "end"])
        | st.sampled_from(["withdraw", "readmit", "pause", "resume", "lose"]),
        st.integers(0, 40),
    ),
    max_size=60,
)


class Walk:
    """Trajectories of three prompts on a router, and the rules that it is to keep at each choice."""

    def __init__(self, router: Router[int]) -> None:
        self.router = router
        self.serving, self.paused = set(range(ENGINES)), set[int]()
        self.began = 0
        self.open: dict[str, tuple[int, int]] = {}  # prompt and engine of a request, by its trajectory
        self.between: dict[str, tuple[int, int | None]] = {}  # prompt and engine of the turn before, None: stopped
        self.before: dict[str, int | None] = {}
        self.parts: dict[str, int] = {}

    def step(self, word: str, number: int) -> None:
        engine = number % ENGINES
        match word:
            case "begin":
                whole, self.began = f"{number % 3}.{self.began}.0", self.began + 1
                self.submit(whole, number % 3)
            case "whole" if self.open:
                whole, (prompt, engine) = pick(self.open, number)
                self.router.answered(part_id(whole, self.parts[whole]))
                self.close(whole)
                self.before[whole] = engine
                self.between[whole] = prompt, engine
            case "cut" if self.open:
                whole, (prompt, _) = pick(self.open, number)
                self.close(whole)
                self.submit(whole, prompt)
            case "turn" if self.between:
                whole, (prompt, _) = pick(self.between, number)
                del self.between[whole]
                self.submit(whole, prompt)
            case "end" if self.between:
                whole, _ = pick(self.between, number)
                del self.between[whole], self.before[whole]
                self.router.ended(whole)
            case "withdraw" if len(self.serving) > 1:
                self.serving.discard(engine)
            case "readmit":
                self.serving.add(engine)
            case "pause":
                self.paused.add(engine)
            case "resume":
                self.paused.discard(engine)
            case "lose":  # and started again
                self.router.lost(engine)
                self.before = {whole: None if was == engine else was for whole, was in self.before.items()}
        assert self.router._turns == {whole: was for whole, was in self.before.items() if was is not None}

    def submit(self, whole: str, prompt: int) -> None:
        part = self.parts[whole] = self.parts.get(whole, -1) + 1
        serving = sorted(self.serving)
        chosen = self.router.choose(part_id(whole, part), prompt, serving, self.paused)
        assert chosen in serving
        if (before := self.before.get(whole)) is not None:
            awake = [one for one in serving if one not in self.paused] or serving
            idlest = min(awake, key=lambda one: sum(engine == one for _, engine in self.open.values()))
            loads = [sum(engine == one for _, engine in self.open.values()) for one in range(ENGINES)]
            near = before in awake and loads[before] <= loads[idlest] + SIBLING_SLACK
            assert chosen == before if near else loads[chosen] == loads[idlest] and chosen in awake
        self.router.opened(
            ServedRequest(request_id=part_id(whole, part), engine=chosen, prompt=4, sampled=0, most_tokens=9, since=0.0)
        )
        self.open[whole] = prompt, chosen

    def close(self, whole: str) -> None:
        self.router.closed(part_id(whole, self.parts[whole]))
        del self.open[whole]


def pick(among: dict[str, tuple[int, int]] | dict[str, tuple[int, int | None]], number: int) -> tuple[str, tuple]:
    return list(among.items())[number % len(among)]


def walk(router: Router[int], script: Script) -> None:
    walked = Walk(router)
    for word, number in script:
        walked.step(word, number)


@settings(max_examples=300, deadline=None)
@given(SCRIPTS)
def test_a_turn_goes_to_the_engine_of_the_turn_before_where_that_serves_samples_and_is_near(script: Script) -> None:
    walk(Router(range(ENGINES)), script)


class ByPromptOnly(Router[int]):
    """The planted bug: the turns of a trajectory follow its siblings."""

    def choose(self, request_id: str, prompt: Hashable, *others: object) -> int:
        return super().choose(f"another-{request_id}", prompt, *others)  # type: ignore[arg-type]


class NeverForgets(Router[int]):
    def ended(self, whole: str) -> None:
        return


class IgnoresLoad(Router[int]):
    def _serves_near(self, engine: int, idlest: int, serving: object) -> bool:
        return engine in serving  # type: ignore[operator]


@pytest.mark.parametrize("wrong", [ByPromptOnly, NeverForgets, IgnoresLoad])
def test_the_walk_finds_a_router_that_is_wrong(wrong: Callable[[range], Router[int]]) -> None:
    def fails(script: Script) -> bool:
        try:
            walk(wrong(range(ENGINES)), script)
        except AssertionError:
            return True
        return False

    crowd: Script = [("begin", 0), *[("begin", 0), ("whole", 1), ("turn", 0)] * 2 * SIBLING_SLACK]
    assert fails(crowd) if wrong is IgnoresLoad else find(SCRIPTS, fails)


# ---- what the prefix caches have -----------------------------------------------------------------


class Turns:
    """Turns of one trajectory: each has a prompt of 10 tokens more than the turn before and its completion of 30."""

    def __init__(self) -> None:
        self.hits, self.parts, self.context = PrefixHits(), 0, token_array(range(40))

    def turn(self, cached: int = 0, *, engine: str = "a", pauses: int = 0, version: int = 0, new: int = 10) -> None:
        self.context += token_array(range(self.parts, self.parts + new))
        completion = Completion(
            token_ids=token_array([7] * 30),
            behavior_logprobs=float_array([-1.0] * 30),
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(start=0, end=30, policy_version=version),),
            cached=CachedPrefix(tokens=cached, block_tokens=32, pauses=pauses),
        )
        request = Generate(
            request_id=part_id("0.0.0", self.parts), token_ids=self.context, max_tokens=30, seed=0, temperature=1.0
        )
        assert self.hits.answered(request, engine, completion).cached is None
        self.parts += 1
        self.context = self.context + completion.token_ids


SHARES = ("hit", "miss_new", "miss_pause", "miss_engine", "miss_evicted", "hit_of_possible")


@pytest.mark.parametrize(
    ("second", "tokens", "of_possible"),
    [
        # The first turn leaves 80 tokens, 64 of them in whole blocks that are computed; the prompt has 90.
        ({"cached": 64}, (64, 26, 0, 0, 0), 1.0),
        ({"cached": 32}, (32, 26, 0, 0, 32), 0.5),
        ({"cached": 0, "pauses": 1, "version": 1}, (0, 26, 64, 0, 0), None),
        ({"cached": 32, "engine": "b"}, (32, 26, 0, 32, 0), 0.5),
        ({"cached": 0, "engine": "b", "version": 1}, (0, 26, 64, 0, 0), None),
        ({"cached": 80}, (80, 10, 0, 0, 0), 1.0),
    ],
    ids=["hit", "evicted", "push", "another-engine", "another-engine-after-a-push", "shared-with-a-sibling"],
)
def test_misses_have_their_cause(second: dict, tokens: tuple[int, ...], of_possible: float | None) -> None:
    turns = Turns()
    turns.turn()
    assert turns.hits.take() == {}, "a first turn counts as neither"
    turns.turn(**second)
    shares = dict(zip(SHARES, (*(count / 90 for count in tokens), of_possible), strict=True))
    found = turns.hits.take()
    assert found == {f"engines/prefix_{name}_ratio": share for name, share in shares.items() if share is not None}
    assert not unregistered(found) and turns.hits.take() == {}


def test_a_turn_that_goes_on_from_an_earlier_one_is_compared_with_that() -> None:
    turns = Turns()
    turns.turn()
    first = turns.context[:]
    turns.turn(64, engine="b")
    turns.hits.take()
    turns.context = first  # what was sampled after it is not in the prompt
    turns.turn(64)
    assert turns.hits.take()["engines/prefix_hit_of_possible_ratio"] == 1.0
    turns.hits.lost("a")
    turns.turn(0)
    assert turns.hits.take()["engines/prefix_miss_engine_ratio"] > 0.5
    turns.hits.ended("0.0.0")
    turns.turn(0)
    assert turns.hits.take() == {} and len(turns.hits._contexts) == 1


def test_the_rest_of_a_cut_turn_is_no_turn() -> None:
    turns = Turns()
    turns.turn()
    request = Generate(
        request_id="0.0.0/1", token_ids=turns.context, max_tokens=9, seed=0, temperature=1.0, prefix_length=30
    )
    spans = (VersionSpan(start=0, end=1, policy_version=0),)
    cached = CachedPrefix(tokens=64, block_tokens=32, pauses=0)
    one = {"token_ids": token_array([1]), "behavior_logprobs": float_array([-1.0]), "version_spans": spans}
    turns.hits.answered(request, "a", Completion(**one, finish_reason=FinishReason.STOP, cached=cached))
    assert turns.hits.take() == {}
