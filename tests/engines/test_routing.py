"""Choice of engines for the turns of trajectories, and what the prefix caches have of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
from builders.observe import unregistered
from hypothesis import find, given, settings
from hypothesis import strategies as st

from streamrl.base.messages import Generate
from streamrl.base.types import CachedPrefix, Completion, FinishReason, VersionSpan, float_array, token_array
from streamrl.engines.prefix_hits import PrefixHits
from streamrl.engines.resumption import part_id
from streamrl.engines.routing import SIBLING_SLACK, Router, ServedRequest

ENGINES = 3
Script = list[tuple[str, int]]
WORDS = ["begin", "begin", "begin", "whole", "whole", "turn", "turn", "cut", "end", "serve", "pause", "lose"]
SCRIPTS = st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 40)), max_size=60)


class Walk:
    """Trajectories of three prompts on a router, and the rules that it is to keep at each choice."""

    def __init__(self, router: Router[int]) -> None:
        self.router, self.serving, self.paused = router, set(range(ENGINES)), set[int]()
        self.order = tuple(range(ENGINES))  # the same tuple until another engine serves, as a pool has it
        self.parts: dict[str, int] = {}
        self.prompts = set[str]()
        self.open: dict[str, int] = {}  # engine of a request, by its trajectory
        self.between: dict[str, None] = {}  # trajectories between two turns
        self.before: dict[str, int] = {}  # engine of the turn before, unless that was lost

    def step(self, word: str, number: int) -> None:
        engine, open_now, between = number % ENGINES, list(self.open), list(self.between)
        match word:
            case "begin":
                self.submit(f"{number % 3}.{len(self.parts)}.0")
            case "whole" if self.open:
                whole = open_now[number % len(open_now)]
                self.router.note_turn(part_id(whole, self.parts[whole]))
                self.before[whole] = self.close(whole)
                self.between[whole] = None
            case "cut" if self.open:
                self.close(whole := open_now[number % len(open_now)])
                self.submit(whole)
            case "turn" | "end" if self.between:
                del self.between[whole := between[number % len(between)]]
                if word == "turn":
                    self.submit(whole)
                else:
                    self.before.pop(whole, None)
                    self.router.forget_trajectory(whole)
            case "serve" if self.serving != {engine}:
                self.serving ^= {engine}
                self.order = tuple(sorted(self.serving))
            case "pause":
                self.paused ^= {engine}
            case "lose":  # and started again
                self.router.forget_engine(engine)
                self.before = {whole: was for whole, was in self.before.items() if was != engine}
        assert self.router._turns == self.before, "ended ones are forgotten"

    def submit(self, whole: str) -> None:
        part = self.parts[whole] = self.parts.get(whole, -1) + 1
        serving, loads = self.order, [list(self.open.values()).count(one) for one in range(ENGINES)]
        chosen = self.router.choose(part_id(whole, part), whole[0], serving, self.paused)
        assert chosen in serving
        if (before := self.before.get(whole)) is not None:
            awake = [one for one in serving if one not in self.paused] or list(serving)
            least = min(loads[one] for one in awake)
            near = before in awake and loads[before] <= least + SIBLING_SLACK
            assert chosen == before if near else loads[chosen] == least and chosen in awake
        elif whole[0] not in self.prompts:
            assert chosen == min(serving, key=loads.__getitem__), "the idlest, the first of equals"
        self.prompts.add(whole[0])
        request = {"request_id": part_id(whole, part), "prompt": 4, "sampled": 0, "max_tokens": 9, "since": 0.0}
        self.router.add_request(ServedRequest(engine=chosen, **request))  # type: ignore[arg-type]
        self.open[whole] = chosen

    def close(self, whole: str) -> int:
        self.router.remove_request(part_id(whole, self.parts[whole]))
        return self.open.pop(whole)


def walk(router: Router[int], script: Script) -> None:
    walked = Walk(router)
    for word, number in script:
        walked.step(word, number)


@settings(max_examples=300, deadline=None)
@given(SCRIPTS)
def test_a_turn_goes_to_the_engine_of_the_turn_before(script: Script) -> None:
    """A turn goes to the engine of the turn before, where that engine serves, samples and has a similar load."""
    walk(Router(range(ENGINES)), script)


class ByPromptOnly(Router[int]):
    """The planted bug: the turns of a trajectory follow its siblings."""

    def choose(self, request_id: str, prompt: Hashable, *others: Any) -> int:
        return super().choose(f"another-{request_id}", prompt, *others)


class NeverForgets(Router[int]):
    def forget_trajectory(self, completion_id: str) -> None:
        return


class RanksOnce(Router[int]):
    """The planted bug: loads are ranked when the engines change, and no request moves one."""

    def _rank_again(self, engine: int) -> None:
        return


@pytest.mark.long
@pytest.mark.parametrize("wrong", [ByPromptOnly, NeverForgets, RanksOnce])
def test_the_walk_finds_a_router_that_is_wrong(wrong: Callable[[range], Router[int]]) -> None:
    def fails(script: Script) -> bool:
        try:
            walk(wrong(range(ENGINES)), script)
        except (AssertionError, IndexError):
            return True
        return False

    assert find(SCRIPTS, fails)


# ---- what the prefix caches have -----------------------------------------------------------------


class Turns:
    """Turns of one trajectory: each has a prompt of 10 tokens more than the turn before and its completion of 30."""

    def __init__(self) -> None:
        self.hits, self.parts, self.context = PrefixHits(), 0, token_array(range(40))

    def turn(self, cached: int = 0, engine: str = "a", pauses: int = 0, version: int = 0, **more: Any) -> None:
        self.context += token_array(range(self.parts, self.parts + 10))
        asked = {"request_id": part_id("0.0.0", self.parts), "token_ids": self.context, "max_tokens": 30, "seed": 0}
        known = CachedPrefix(tokens=cached, block_tokens=32, pauses=pauses)
        spans = (VersionSpan(start=0, end=30, policy_version=version),)
        ends = {"finish_reason": FinishReason.STOP, "version_spans": spans, "cached": known}
        completion = Completion(token_ids=token_array([7] * 30), behavior_logprobs=float_array([-1.0] * 30), **ends)
        request = Generate(**asked, temperature=1.0, prefix_length=more.get("prefix_length", 0))
        assert self.hits.note_answer(request, engine, completion, more.get("paused", ())).cached is None
        self.parts, self.context = self.parts + 1, self.context + completion.token_ids


SHARES = ("hit", "miss_new", "miss_pause", "miss_engine", "miss_evicted", "hit_of_possible")


@pytest.mark.parametrize(
    ("second", "tokens", "of_possible"),
    [  # The first turn leaves 80 tokens, 64 of them in whole blocks that are computed; the prompt has 90.
        pytest.param((64,), (64, 26, 0, 0, 0), 1.0, id="hit"),
        pytest.param((32,), (32, 26, 0, 0, 32), 0.5, id="evicted"),
        pytest.param((0, "a", 1, 1), (0, 26, 64, 0, 0), None, id="push"),
        pytest.param((32, "b"), (32, 26, 0, 32, 0), 0.5, id="another-engine"),
        pytest.param((0, "b", 0, 1), (0, 26, 64, 0, 0), None, id="another-engine-after-a-push"),
        pytest.param((0, "b", 0, 0, "a"), (0, 26, 64, 0, 0), None, id="another-engine-before-a-push"),
        pytest.param((80,), (80, 10, 0, 0, 0), 1.0, id="shared-with-a-sibling"),
    ],
)
def test_misses_have_their_cause(second: tuple, tokens: tuple[int, ...], of_possible: float | None) -> None:
    turns = Turns()
    turns.turn()
    first = turns.context[:]
    turns.turn(prefix_length=10)
    assert turns.hits.take() == {}, "neither a first turn nor the rest of a cut one counts"
    turns.context = first  # it goes on from there: what was sampled after it is not in the prompt
    turns.turn(*second[:4], paused=second[4:])
    shares = dict(zip(SHARES, (*(count / 90 for count in tokens), of_possible), strict=True))
    found = turns.hits.take()
    assert found == {f"engines/prefix_{name}_ratio": share for name, share in shares.items() if share is not None}
    assert not unregistered(found) and turns.hits.take() == {}


def test_lost_engines_and_ended_trajectories_are_forgotten() -> None:
    """The router forgets an engine that was lost and a trajectory that has ended."""
    turns = Turns()
    turns.turn()
    turns.hits.forget_engine("a")
    turns.turn()
    assert turns.hits.take()["engines/prefix_miss_engine_ratio"] > 0.5
    turns.hits.forget_trajectory("0.0.0")
    turns.turn()
    assert turns.hits.take() == {} and len(turns.hits._contexts) == 1
