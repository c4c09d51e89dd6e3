"""Domains under every kind of round that keeps them: batches fill, losers get their long round."""

from __future__ import annotations

from control_world import control_settings
from policy_world import DOMAINS, PolicyWorld

from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.policies.tail_batching import LONG
from streamrl.recipe.scheduling import RoundKind, TailBatching


def domain_race(groups: int = 3, steps: int = 12, **options: object) -> PolicyWorld:
    tail = TailBatching(**{"domain_column": "domain", "domains": DOMAINS, **options})  # type: ignore[arg-type]
    world = PolicyWorld(
        control_settings(
            rounds=RoundKind.TAIL_BATCHING, batch_groups=groups, group_size=1, steps=steps, tail_batching=tail
        )
    )
    world.begin()
    return world


def test_long_rounds_of_two_batches_open_with_domains_too() -> None:
    world = domain_race(prompt_oversampling=2.0, long_round_batches=2)
    world.run_to_end()
    steps = [action for action in world.answers if isinstance(action, do.StepOptimizer)]
    assert 6 in [step.samples for step in steps], "no long round of two batches: losers wait until the last step"
    assert len(world.core.supply.queue) < 12, "the queue of losers grows for ever"


def test_a_race_launches_what_its_batch_needs_of_every_domain() -> None:
    """Largest remainders give the third domain 2 of 10 seats and 1 of 11 (the Alabama paradox)."""
    shares = {"a": 6.0, "b": 6.0, "c": 2.0}
    world = PolicyWorld(
        control_settings(
            rounds=RoundKind.TAIL_BATCHING,
            batch_groups=10,
            group_size=1,
            steps=2,
            tail_batching=TailBatching(prompt_oversampling=1.05, domain_column="domain", domains=shares),
        )
    )
    world.begin()
    for _ in range(400):
        if world.finished is not None:
            return
        if world.draw is not None:
            count, world.draw = world.draw, None
            numbers = range(world.next_prompt, world.next_prompt + count)
            world.next_prompt += count
            world.tell(
                on.PromptsDrawn(
                    prompt_ids=tuple(f"p{n}" for n in numbers),
                    prompt_tokens=tuple(5 for _ in numbers),
                    domains=tuple("aaabbbc"[n % 7] for n in numbers),
                )
            )
        elif world.to_publish is not None:
            world.go_live()
        elif world.to_step is not None:
            super(PolicyWorld, world).step()
        elif world.sampled:
            world.score(world.sampled[0], 1.0, 3)
        else:
            raise AssertionError("nothing can happen and the run has not ended")
    raise AssertionError("the run does not end")


def test_a_long_round_that_lacks_a_domain_starts_fresh_prompts_of_it_at_once() -> None:
    """The queue is overfull with one domain; the other's place in the round is a fresh prompt's."""
    world = domain_race(steps=30, prompt_oversampling=1.34)
    opened: set[int] = set()
    lacked = 0
    while world.finished is None:
        if not world.goes_on():
            batch = world.core.batch
            if batch.round_kind == LONG and batch.batch_id not in opened:
                opened.add(batch.batch_id)
                lacked += any(not t.attempt for t in world.sampled)
                assert len(world.sampled) == 3, "part of the long round waits for the rest of it"
            easy = [t for t in world.sampled if world.domain_of[t.prompt_id] == "easy"]
            world.score((easy or world.sampled)[0], 1.0, 3)
    assert lacked, "no long round lacked a domain"
