"""What a recipe adds up to."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config.arithmetic import (
    arithmetic_lines,
    batch_arithmetic,
    estimate_memory,
    process_lines,
    staleness_sentence,
)
from streamrl.config.model_facts import ModelDirectoryError, ModelFacts, read_model_facts
from streamrl.config.recipe import (
    Engines,
    InFlight,
    Launch,
    Model,
    Prompts,
    Recipe,
    Reward,
    Rollout,
    RoundKind,
    Sampling,
    StalePolicy,
    Training,
    Transport,
    TransportKind,
)
from streamrl.config.topology import plan_topology

RECIPE = Recipe(model=Model(path="m"), prompts=Prompts(train="t"), rewards=(Reward(function="a:b"),))
FACTS = ModelFacts(
    parameters=300_000, weight_bytes=600_000, hidden=96, layers=4, vocabulary=32, max_position=512, key_value_bytes=1024
)


def test_counts() -> None:
    recipe = msgspec.structs.replace(
        RECIPE,
        rollout=Rollout(prompts_per_batch=32, group_size=8, rounds=RoundKind.CONTINUOUS, max_staleness=2),
        sampling=Sampling(max_tokens=400),
        training=Training(ranks=2, micro_batch_tokens=1000),
        engines=Engines(count=2, max_running=64),
    )
    counts = batch_arithmetic(recipe, context=500)
    assert (counts.trajectories, counts.run_trajectories) == (256, 25_600)
    assert (counts.slots, counts.running_capacity) == (768, 128)
    assert counts.tokens_in_flight == 768 * 500
    # 128 samples a rank: ten of 100 tokens, or two of 400, fit into 1000.
    assert counts.micro_batches == (13, 64)


@given(st.integers(1, 200), st.integers(1, 32), st.integers(1, 4000), st.integers(1, 9000), st.integers(1, 5))
def test_micro_batches_hold_the_batch(prompts: int, group: int, tokens: int, budget: int, ranks: int) -> None:
    recipe = msgspec.structs.replace(
        RECIPE,
        rollout=Rollout(prompts_per_batch=prompts, group_size=group),
        sampling=Sampling(max_tokens=tokens),
        training=Training(ranks=ranks, micro_batch_tokens=budget),
    )
    few, many = batch_arithmetic(recipe).micro_batches
    on_rank = -(-prompts * group // ranks)
    assert 1 <= few <= many <= on_rank
    assert many * max(budget, tokens) >= on_rank * tokens


def test_staleness_sentences() -> None:
    assert staleness_sentence(RECIPE) == "staleness 0: every token is trained by the version that sampled it"
    rollout = Rollout(
        rounds=RoundKind.CONTINUOUS, max_staleness=1, in_flight=InFlight.RESUME, when_stale=StalePolicy.DROP
    )
    assert staleness_sentence(msgspec.structs.replace(RECIPE, rollout=rollout)) == (
        "staleness <= 1 step: no token is trained more than 1 optimizer step after the version that sampled it; "
        "before a trajectory becomes older, it is dropped (reason: stale); at a weight update requests in "
        "flight are cut and resumed from their tokens"
    )


def test_the_lines() -> None:
    assert arithmetic_lines(RECIPE, FACTS, 1024) == [
        "batch       32 prompts x 8 samples = 256 trajectories, one optimizer step",
        (
            "training    8 to 32 micro-batches of at most 4,096 tokens a step (completions at a quarter of "
            "max_tokens = 512, and at all of it)"
        ),
        "run         100 steps x 256 = 25,600 trajectories trained",
        "slots       256 trajectories in flight at most, 262,144 tokens; 1 x 256 = 256 run at once",
        "bound       staleness 0: every token is trained by the version that sampled it",
        "memory      about 2.34 GiB on a CPU host (1.60 GiB an engine, 0.54 GiB a rank); 300,000 parameters",
    ]


def test_memory_grows_with_what_costs_memory() -> None:
    base = estimate_memory(RECIPE, FACTS, 512).total
    for change in (
        {"engines": Engines(count=2)},
        {"training": Training(ranks=2)},
        {"training": Training(micro_batch_tokens=65_536)},
    ):
        assert estimate_memory(msgspec.structs.replace(RECIPE, **change), FACTS, 512).total > base
    larger = msgspec.structs.replace(FACTS, parameters=100_000_000)
    assert estimate_memory(RECIPE, larger, 512).total - base == pytest.approx(26 * 99_700_000, rel=1e-6)


def test_processes_and_commands() -> None:
    transport = Transport(kind=TransportKind.TCP, engines=Launch.EXTERNAL, training=Launch.EXTERNAL)
    recipe = msgspec.structs.replace(RECIPE, transport=transport, engines=Engines(count=2))
    lines = process_lines(recipe, plan_topology(recipe, Path("/tmp/s")), "demo.toml")
    assert "  reward-0     started by this run" in lines
    assert "  engine-1     started by hand (external)" in lines
    assert lines[-4:] == [
        "start by hand",
        "  streamrl serve engine demo.toml --index 0",
        "  streamrl serve engine demo.toml --index 1",
        "  streamrl serve trainer demo.toml --index 0",
    ]
    local = process_lines(RECIPE, plan_topology(RECIPE, Path("/tmp/s")), "demo.toml")
    assert "start by hand" not in local
    assert not any("must be free" in line for line in local)


def test_model_facts_of_a_pickled_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelDirectoryError, match=r"only as \.bin pickles: save it again with safe_serialization=True"):
        read_model_facts(tmp_path)


@given(st.binary(max_size=64))
def test_a_broken_weight_file_is_named(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text('{"hidden_size": 8}')
    (directory / "model.safetensors").write_bytes(junk)
    with pytest.raises(ModelDirectoryError, match=r"model\.safetensors|without a single parameter"):
        read_model_facts(directory)
