"""What a recipe adds up to."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import pytest
from builders.recipe import small_recipe
from hypothesis import given
from hypothesis import strategies as st

from streamrl.learning.rank_memory import training_sizes
from streamrl.prepare.memory import estimate_memory
from streamrl.prepare.summary import (
    arithmetic_lines,
    micro_batches,
    off_policy_text,
    process_lines,
    staleness_sentence,
    streaming_notice,
    streaming_sentence,
)
from streamrl.pretrained.model_facts import ModelFacts, read_model_facts
from streamrl.pretrained.weight_files import ModelDirectoryError
from streamrl.recipe.objective import Objective, ObjectiveSettings, OffPolicy, Proximal, RatioLevel
from streamrl.recipe.objectives.ppo import ValueModel
from streamrl.recipe.scheduling import (
    GroupSizing,
    InFlight,
    Keeps,
    Rollout,
    RoundKind,
    SizingKind,
    StalePolicy,
    Straggler,
    TailBatching,
)
from streamrl.recipe.sections import (
    Checkpoint,
    Engines,
    EngineShape,
    Evaluation,
    Lora,
    OptimizerKind,
    Recipe,
    Run,
    Sampling,
    Training,
    Transport,
    TransportKind,
)
from streamrl.recipe.topology import plan_topology

RECIPE = small_recipe()
FACTS = ModelFacts(
    parameters=300_000, outside=6144, hidden=96, inner=256, layers=4, vocabulary=32, key_value_bytes=1024, queries=96,
    norms=2, norms_heads=True,
)  # fmt: skip


def test_counts() -> None:
    recipe = change(
        rollout=Rollout(prompts_per_batch=32, group_size=8, rounds=RoundKind.CONTINUOUS, max_staleness=2),
        sampling=Sampling(max_tokens=400),
        training=Training(ranks=2, micro_batch_tokens=1000),
        engines=Engines(count=2, max_num_seqs=64),
    )
    lines = arithmetic_lines(recipe, context=500)
    assert "run         100 steps x 256 = 25,600 trajectories trained" in lines
    assert f"slots       768 trajectories in flight at most, {768 * 500:,} tokens; 2 x 64 = 128 run at once" in lines
    # 128 samples a rank: ten of 100 tokens, or two of 400, fit into 1000.
    assert (micro_batches(recipe, 100, 1000), micro_batches(recipe, 400, 1000)) == (13, 64)


@given(st.integers(1, 200), st.integers(1, 32), st.integers(1, 4000), st.integers(1, 9000), st.integers(1, 5))
def test_micro_batches_hold_the_batch(prompts: int, group: int, tokens: int, budget: int, ranks: int) -> None:
    recipe = msgspec.structs.replace(
        RECIPE,
        rollout=Rollout(prompts_per_batch=prompts, group_size=group),
        sampling=Sampling(max_tokens=tokens),
        training=Training(ranks=ranks, micro_batch_tokens=budget),
    )
    few, many = micro_batches(recipe, tokens // 4, budget), micro_batches(recipe, tokens, budget)
    on_rank = -(-prompts * group // ranks)
    assert 1 <= few <= many <= on_rank
    assert many * max(budget, tokens) >= on_rank * tokens


def test_staleness_sentences() -> None:
    assert staleness_sentence(RECIPE) == "staleness 0: every token is trained by the version that sampled it"
    races = change(
        rollout=Rollout(rounds=RoundKind.TAIL_BATCHING),
        tail_batching=TailBatching(long_round_batches=4),
        training=Training(updates_per_batch=2, epochs_per_batch=2),
    )
    assert staleness_sentence(races).endswith("; a long round takes 16 optimizer steps, 4 along each gradient")
    rollout = Rollout(
        rounds=RoundKind.CONTINUOUS, max_staleness=1, in_flight=InFlight.RESUME, when_stale=StalePolicy.DROP
    )
    assert staleness_sentence(msgspec.structs.replace(RECIPE, rollout=rollout)) == (
        "staleness <= 1 step: no token is trained more than 1 step after the version that sampled it; "
        "before a trajectory becomes older, it is dropped (reason: stale); at a weight update requests in "
        "flight are cut and resumed from their tokens"
    )


def test_settings_of_group_sizing_are_shown() -> None:
    """The settings that a one-line recipe leaves to group sizing are shown."""
    lines = arithmetic_lines(change(group_sizing=GroupSizing(kind=SizingKind.SAGC)))
    measured = "budget measured in the first 8 steps at size 16, tradeoff = 1, stragglers in tokens"
    assert f"group size  sagc over 4, 8, 16: {measured}" in lines
    assert any('advantages = "leave_one_out"' in line for line in lines)
    timed = GroupSizing(kind=SizingKind.SAGC, straggler=Straggler.SECONDS, keeps=Keeps.PROMPTS)
    assert any(
        "first 8 steps at size 16 and 4, half each" in line for line in arithmetic_lines(change(group_sizing=timed))
    )
    short = change(group_sizing=GroupSizing(kind=SizingKind.SAGC, budget=0.6), run=Run(steps=72))
    assert "group size  sagc over 4, 8, 16: budget = 0.6, tradeoff = 0.5, stragglers in tokens" in arithmetic_lines(
        short
    )


def test_the_lines() -> None:
    assert arithmetic_lines(RECIPE, FACTS, 1024) == [
        "batch       32 prompts x 8 samples = 256 trajectories, one optimizer step",
        (
            'objective   grpo: surrogate = "token_clip", clip_low = 0.2, clip_high = 0.2, advantages = "group_std", '
            'loss_normalization = "token_mean"'
        ),
        "off-policy  nothing to correct: every token is trained by the version that sampled it",
        "streaming   on: groups are trained while others generate, with the gradient of the whole batch",
        (
            "training    64 to 256 micro-batches of at most 512 tokens (2,048 where prompts are long) a step "
            "(completions at a quarter of max_tokens = 512, and at all of it)"
        ),
        "run         100 steps x 256 = 25,600 trajectories trained",
        "slots       256 trajectories in flight at most, 262,144 tokens; 1 x 256 = 256 run at once",
        "bound       staleness 0: every token is trained by the version that sampled it",
        "checkpoints every 100 steps (for the journal: checkpoint.every = 0) and at the end; kept: the last 2",
        (
            "warning     training.learning_rate = 1e-06 is low for a model of 300,000 parameters: "
            "as a rule of thumb try 3e-05 to 3e-04"
        ),
        "memory      about 2.31 GiB on a CPU host (1.60 GiB an engine, 0.52 GiB a rank); 300,000 parameters",
    ]


def change(**sections: msgspec.Struct) -> Recipe:
    return msgspec.structs.replace(RECIPE, **sections)


@pytest.mark.parametrize(
    ("rate", "parameters", "rank", "range_"),
    [
        (2e-4, 299_136, 0, ""),  # the demo
        (2e-4, 1_200_000, 0, "is high for a model of 1,200,000 parameters: as a rule of thumb try 2e-05 to 1e-04"),
        (1e-6, 1_200_000, 0, "is low for a model of 1,200,000 parameters"),
        (5e-5, 1_200_000, 0, ""),
        (1e-6, 494_000_000, 0, ""),
        (1e-6, 7_600_000_000, 0, ""),
        (1e-5, 7_600_000_000, 0, "is high for a model of 7,600,000,000 parameters: as a rule of thumb try 3e-07"),
        (1e-5, 7_600_000_000, 16, ""),
        (1e-6, 494_000_000, 16, "is low for adapters of a model of 494,000,000 parameters"),
    ],
)
def test_unusual_learning_rates_are_warned_of(rate: float, parameters: int, rank: int, range_: str) -> None:
    """A learning rate that is unusual for the size of the model leads to a warning."""
    facts = msgspec.structs.replace(FACTS, parameters=parameters)
    chosen = change(training=Training(learning_rate=rate), lora=Lora(rank=rank))
    warnings = [line for line in arithmetic_lines(chosen, facts) if line.startswith("warning")]
    assert len(warnings) == bool(range_)
    assert not range_ or range_ in warnings[0]


def test_the_lines_say_what_is_asked_for() -> None:
    recipe = change(
        rollout=Rollout(prompts_per_batch=8, rounds=RoundKind.LENGTH_SORTED),
        objective=Objective(
            algorithm="ppo",
            kl_coefficient=0.1,
            entropy_coefficient=0.01,
            overlong_buffer=64,
            value_model=ValueModel.OWN,
        ),
        training=Training(updates_per_batch=4, epochs_per_batch=2),
        evaluation=Evaluation(prompts="/a/held.jsonl", samples=4, every=10, limit=64),
        checkpoint=Checkpoint(every=20, keep=3, keep_best=1, keep_every=100, resume_from="/runs/r/checkpoints/step-4"),
    )
    lines = arithmetic_lines(recipe, held_out={"held_out": 100})
    for expected in (
        (
            "batch       8 prompts x 8 samples = 64 trajectories, 8 optimizer steps in 2 passes, each on its share of "
            "the groups, shortest first"
        ),
        (
            "            critic: discount = 1.0, gae_lambda = 1.0, value_coefficient = 0.5, value_clip = 0.2, "
            'value_model = "own"'
        ),
        "            reference: the initial model",
        '            KL to the reference: kl_coefficient = 0.1, kl_estimator = "k1", kl_in = "reward"',
        "            entropy_coefficient = 0.01",
        "            overlong_buffer = 64, overlong_penalty = 1.0",
        (
            "streaming   off, although training.advanced.streaming = true: training.updates_per_batch = 4 steps on "
            "one batch "
            "need all of it first"
        ),
        (
            "evaluation  held.jsonl: at the start, at the end, every 10 steps on the first 64 prompts; all prompts: "
            "100 x 4 = 400 completions"
        ),
        (
            "checkpoints every 20 steps and at the end; kept: the last 3, the best 1, every 100-th step; "
            "starts from /runs/r/checkpoints/step-4"
        ),
    ):
        assert expected in lines
    dapo = arithmetic_lines(change(objective=Objective(algorithm="dapo", train_truncated=False)))
    assert "            train_truncated = false" in dapo
    assert "            dynamic_sampling = true: groups of equal rewards are dropped and refilled" in dapo
    assert "clip_high = 0.28" in dapo[1]


@pytest.mark.parametrize(
    ("rounds", "off_policy", "expected"),
    [
        (RoundKind.SYNCHRONOUS, OffPolicy(), "nothing to correct: every token is trained by the version that sampled"),
        (RoundKind.SYNCHRONOUS, OffPolicy(correct_mismatch=True), 'correct_mismatch = true, truncate = "token", cap ='),
        (RoundKind.CONTINUOUS, OffPolicy(), 'proximal = "interpolated", truncate = "token", cap = 2.0'),
        (RoundKind.CONTINUOUS, OffPolicy(truncate=RatioLevel.NONE), 'proximal = "interpolated", truncate = "none"'),
        (
            RoundKind.CONTINUOUS,
            OffPolicy(proximal=Proximal.BEHAVIOR, mask=RatioLevel.TOKEN, staleness_discount=0.9),
            'proximal = "behavior", staleness_discount = 0.9',
        ),
        (
            RoundKind.CONTINUOUS,
            OffPolicy(proximal=Proximal.DECOUPLED, mask=RatioLevel.GEOMETRIC),
            'proximal = "decoupled", truncate = "token", cap = 2.0, mask = "geometric", mask_low = 0.5, mask_high = 2',
        ),
    ],
)
def test_corrections_of_stale_tokens_list_effective_keys(
    rounds: RoundKind, off_policy: OffPolicy, expected: str
) -> None:
    """The correction of stale tokens lists the keys that have an effect."""
    recipe = change(rollout=Rollout(rounds=rounds, max_staleness=4), off_policy=off_policy)
    assert off_policy_text(recipe).startswith(expected)


def test_streaming_sentences() -> None:
    assert streaming_sentence(change(training=Training(streaming=False))).startswith(
        "off: training.advanced.streaming = false"
    )
    whole_batch = change(objective=Objective(algorithm="reinforce_plus_plus"))
    assert streaming_sentence(whole_batch) == (
        'off, although training.advanced.streaming = true: objective.advantages = "batch" compares with the whole batch'
    )
    assert streaming_notice(whole_batch) == streaming_sentence(whole_batch)
    off = msgspec.structs.replace(whole_batch, training=Training(streaming=False))
    assert streaming_notice(off) == "" == streaming_notice(RECIPE)


def needed(facts: ModelFacts = FACTS, **sections: msgspec.Struct) -> int:
    return sum(estimate_memory(change(**sections), facts, 512).values())


def test_memory_grows_with_what_costs_memory() -> None:
    for sections in (
        {"engines": Engines(count=2)},
        {"training": Training(ranks=2)},
        {"training": Training(micro_batch_tokens=65_536)},
        {"objective": Objective(kl_coefficient=0.1)},
    ):
        assert needed(**sections) > needed()
    assert needed(training=Training(activation_checkpointing=True)) < needed()
    larger = msgspec.structs.replace(FACTS, parameters=100_000_000)
    whole = needed(larger)
    assert whole - needed() == pytest.approx(26 * 99_700_000, rel=1e-6)
    assert needed(larger, objective=Objective(kl_coefficient=0.1)) - whole == 400_000_000
    eight_bit = needed(larger, training=Training(optimizer=OptimizerKind.ADAMW_8BIT))
    assert whole - eight_bit == 6 * 100_000_000, "two moments in 8 bits instead of float32"
    # Frozen weights instead of masters, gradients and moments; the base of the two projections that are adapted, in
    # four layers, and adapters of rank 16.
    base, adapters = 2 * 96**2 * 4, 2 * 16 * 96 * 2 * 4
    saved = 14 * 100_000_000 + 8 * (1 << 18) - 16 * adapters - 2 * base
    # The forward keeps no products of the MLP and no normed values, of tokens, queries and keys, for frozen weights.
    saved += 4 * 2048 * 4 * (256 + 2 * 96 + 96 + 32)
    assert whole - needed(larger, lora=Lora(rank=16)) == saved


def test_the_base_below_adapters_is_counted() -> None:
    """As the trainer does: every adapted weight lies a second time beside what the forward runs on."""
    larger = msgspec.structs.replace(FACTS, parameters=100_000_000)
    in_layers = 100_000_000 - 2 * 32 * 96
    sizes = partial(training_sizes, Training(), objective=ObjectiveSettings())
    assert sizes(lora=Lora(), facts=larger).adapted == 0
    assert sizes(lora=Lora(rank=8), facts=larger).adapted == 2 * 96**2 * 4
    assert sizes(lora=Lora(rank=8, targets=("all-linear",)), facts=larger).adapted == in_layers
    assert sizes(lora=Lora(rank=8), facts=FACTS).adapted == 2 * 96**2 * 4


def test_engine_sets_count_with_the_larger_one() -> None:
    """Sets of engines are shown, and the arithmetic counts the larger one."""
    deep = EngineShape(count=1, tensor_parallel_size=4, rounds=("long",))
    recipe = msgspec.structs.replace(RECIPE, engines=Engines(count=2, sets=(deep,)))
    [line] = [line for line in arithmetic_lines(recipe) if line.startswith("engines")]
    assert line == (
        "engines     2 engines x 1 worker at the start; instead of them, when it pays: "
        "1 engine x 4 workers (long rounds)"
    )
    assert not [line for line in arithmetic_lines(RECIPE) if line.startswith("engines")]
    lines = process_lines(recipe, plan_topology(recipe, Path("/tmp/s")))
    assert "  engine-1     started by this run" in lines
    assert "  engine-2     started when its set of engines serves" in lines
    largest = estimate_memory(recipe, FACTS, 512)
    alone = estimate_memory(msgspec.structs.replace(RECIPE, engines=Engines(count=2)), FACTS, 512)
    assert ("engine-0" in largest) != ("engine-2" in largest), "one set is awake"
    assert largest["engine-2"] >= alone["engine-0"] + alone["engine-1"]


def test_processes_and_endpoints() -> None:
    transport = Transport(kind=TransportKind.TCP)
    recipe = msgspec.structs.replace(RECIPE, transport=transport, engines=Engines(count=2))
    lines = process_lines(recipe, plan_topology(recipe, Path("/tmp/s")))
    assert "  reward-0     started by this run" in lines
    assert "  engine-1     started by this run" in lines
    assert any(line.startswith("  trainer-0.weights      tcp://127.0.0.1:") for line in lines)
    local = process_lines(RECIPE, plan_topology(RECIPE, Path("/tmp/s")))
    assert not any("tcp://" in line for line in local)


def test_model_facts_of_a_pickled_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelDirectoryError, match=r"holds a pickle .*save the model again with safe_serialization"):
        read_model_facts(tmp_path)


@given(st.binary(max_size=64))
def test_a_broken_weight_file_is_named(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text('{"hidden_size": 8}')
    (directory / "model.safetensors").write_bytes(junk)
    with pytest.raises(ModelDirectoryError, match=r"model\.safetensors|without a single parameter"):
        read_model_facts(directory)
