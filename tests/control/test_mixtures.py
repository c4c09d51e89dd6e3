"""Several training sets are drawn in their shares, exactly, whatever happens to the run."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from oracle.control_walks import random_shares
from oracle.control_world import control_settings, through_bytes

from streamrl.base.errors import RecipeError
from streamrl.buffers.rollout_buffer import PromptRef
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.machine import fork
from streamrl.control.mixture import sets_in_turn, take_drawn
from streamrl.control.policies.round_policies import make_control
from streamrl.control.run_state import DrawnSet, PromptPool
from streamrl.recipe.rules.load_recipe import load_recipe

DRAWS = 10_000
KILLS = 20


@pytest.mark.parametrize("seed", range(6))
def test_every_prefix_of_draws_has_the_shares(seed: int) -> None:
    """10,000 draws of a few prompts each, with 20 kills: after every prompt each set has its share to within one, and
    the order is that of a run without kills."""
    random = Random(seed)
    shares: dict[str, float] = {}
    while len(shares) < 2 + seed:
        shares = random_shares(random)
    undisturbed = sets_in_turn({}, shares, DRAWS)
    kills = sorted(random.sample(range(DRAWS), KILLS))
    pool = PromptPool()
    names: list[str] = []
    while len(names) < DRAWS:
        if kills and len(names) >= kills[0]:
            kills.pop(0)
            sets_in_turn(pool.sets, shares, 3)  # ordered, and lost with the controller
            pool = _through_bytes(pool)
        ordered = sets_in_turn(pool.sets, shares, min(random.randint(1, 9), DRAWS - len(names)))
        take(pool, shares, *ordered)
        names += ordered
    assert not kills
    assert tuple(names) == undisturbed
    counts = Counter[str]()
    for number, name in enumerate(names, start=1):
        counts[name] += 1
        assert all(abs(counts[other] - share * number) < 1 for other, share in shares.items())
    assert {name: drawn.drawn for name, drawn in pool.sets.items()} == counts


def take(pool: PromptPool, shares: dict[str, float], *names: str, exhausted: tuple[str, ...] = ()) -> None:
    """A prompt of each of ``names`` is drawn, in their order, which is that of the turns."""
    refs = [PromptRef(prompt_id=f"{name}/{number}") for number, name in enumerate(names)]
    event = on.PromptsDrawn(prompt_ids=tuple(ref.prompt_id for ref in refs), sets=names, exhausted_sets=exhausted)
    assert take_drawn(pool, refs, event, control_settings(shares=shares), []) == refs


def _through_bytes(pool: PromptPool) -> PromptPool:
    control = make_control(control_settings())
    control.state.prompts = pool
    return through_bytes(control.snapshot()).state.prompts


def test_an_exhausted_set_leaves_the_others_their_shares() -> None:
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    pool = PromptPool()
    take(pool, shares, "a", "b", exhausted=("a",))
    counts = Counter(sets_in_turn(pool.sets, shares, 100))
    assert counts == {"b": 60, "c": 40}
    for name in ("b", "c"):
        take(pool, shares, exhausted=(name,))
    assert sets_in_turn(pool.sets, shares, 5) == ()


def test_a_run_orders_its_sets_and_goes_on_at_their_positions() -> None:
    """A draw without an answer is ordered again as it was; another run from a checkpoint has the positions."""
    shares = {"math": 0.75, "code": 0.25}
    control = make_control(control_settings(batch_groups=8, shares=shares))
    (draw,) = [a for a in control.handle(on.RunBegan()) if isinstance(a, do.DrawPrompts)]
    assert Counter(draw.sets) == {"math": 6, "code": 2}
    assert control.unanswered_orders() == [draw]
    control.handle(on.PromptsDrawn(prompt_ids=tuple(f"{n}/{i}" for i, n in enumerate(draw.sets)), sets=draw.sets))
    forked = fork(through_bytes(control.snapshot()), control_settings(shares={"math": 0.5, "code": 0.5}))
    assert forked.state.prompts.sets == {"math": DrawnSet(drawn=6), "code": DrawnSet(drawn=2)}


def test_a_single_source_orders_no_sets() -> None:
    """Nothing of a run with one set changes: neither its orders nor what is written down."""
    control = make_control(control_settings())
    (draw,) = [a for a in control.handle(on.RunBegan()) if isinstance(a, do.DrawPrompts)]
    assert draw == do.DrawPrompts(count=2)
    control.handle(on.PromptsDrawn(prompt_ids=("a", "b")))
    assert not control.state.prompts.sets


def test_shares_of_a_recipe_are_parts_of_one() -> None:
    recipe = {"model": "m", "rewards": "r.py:score"}
    sets = {"math": {"prompts": "m.jsonl", "share": 3}, "code": "c.jsonl"}
    assert load_recipe({**recipe, "prompts": {"train": sets}}).prompts.shares == {"math": 0.75, "code": 0.25}
    assert load_recipe({**recipe, "prompts": "m.jsonl"}).prompts.shares == {}
    rows = [{"prompt": "1 + 1 ="}]
    written = load_recipe({**recipe, "prompts": {"train": {"sums": rows, "code": {"prompts": rows, "share": 2}}}})
    assert all(one.prompts.endswith(".jsonl") for one in written.prompts.sets.values())
    with pytest.raises(RecipeError, match=r"prompts\.train\.math\.share: 0 is not allowed: must be a number > 0"):
        load_recipe({**recipe, "prompts": {"train": {"math": {"prompts": "m.jsonl", "share": 0}}}})
