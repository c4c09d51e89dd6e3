"""Kept sets of engines: carried through parts, turns, sequences and rows to the tokens that they are of, and exact
weights of stale tokens, against the formula in float64."""

from __future__ import annotations

import math
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from builders.recipe import small_recipe
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

torch = pytest.importorskip("torch")

from streamrl.base.types import (  # noqa: E402
    Completion,
    FinishReason,
    KeptSets,
    Prompt,
    ScoredTrajectory,
    Segment,
    TokenDistribution,
    TrainingSample,
    Trajectory,
    TrajectoryId,
    VersionSpan,
    count_array,
    float_array,
    to_training_sample,
    token_array,
)
from streamrl.comm.wire import OneFrameCodec  # noqa: E402
from streamrl.engines.resumption import accepted_part, join_completions  # noqa: E402
from streamrl.learning.batches.packing import PreparedSample, pack, sequences_of  # noqa: E402
from streamrl.learning.kept_sets import kept_tokens  # noqa: E402
from streamrl.learning.objective.logprobs import outside_of_kept_sets, removed_tokens, token_logprobs  # noqa: E402
from streamrl.recipe.sections import Rollout, Sampling, Training  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
Sets = list[list[int]]
"""Kept set of each token; empty: not known."""


def kept_sets(sets: Sets) -> KeptSets:
    ids = [token for kept in sets for token in kept]
    return KeptSets(counts=count_array([len(kept) for kept in sets]), token_ids=token_array(ids))


def completion(sets: Sets, *, returned: bool) -> Completion:
    """A completion whose tokens are the first of their sets (2 where the set is not known)."""
    tokens = token_array([kept[0] if kept else 2 for kept in sets])
    if not returned:  # as a verification does
        return accepted_part(tokens, [-1.0] * len(tokens), len(tokens), 0)
    return Completion(
        token_ids=tokens,
        behavior_logprobs=float_array([-1.0] * len(tokens)),
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(0, len(tokens), 0),),
        kept_sets=kept_sets(sets),
    )


PARTS = st.lists(
    st.tuples(st.lists(st.lists(st.integers(3, 99), max_size=4, unique=True), min_size=1, max_size=5), st.booleans()),
    min_size=1,
    max_size=3,
)
"""Parts of a completion: their sets, and whether the engine returned them."""


@given(turns=st.lists(PARTS, min_size=1, max_size=4), branches=st.booleans())
def test_each_trained_token_has_the_set_that_it_was_drawn_from(
    turns: list[list[tuple[Sets, bool]]], branches: bool
) -> None:
    """Over parts of a completion, with observations between the turns, also where each turn begins again from the
    prompt, in the records of the wire."""
    segments = []
    expected: list[tuple[int, list[int]]] = []
    for number, parts in enumerate(turns):
        joined, *others = [completion(sets, returned=returned) for sets, returned in parts]
        for other in others:
            joined = join_completions(joined, other)
        expected += [
            (token, kept if returned else [])
            for sets, returned in parts
            for token, kept in zip(completion(sets, returned=returned).token_ids, sets, strict=True)
        ]
        segments.append(
            Segment(token_ids=token_array([number + 1]), trained=False, follows=-1 if branches or not number else None)
        )
        segments.append(
            Segment(
                token_ids=joined.token_ids,
                trained=True,
                behavior_logprobs=joined.behavior_logprobs,
                version_spans=joined.version_spans,
                kept_sets=joined.kept_sets,
            )
        )
    trajectory = Trajectory(
        id=TrajectoryId(prompt_id="p", group_id=0, sample=0),
        prompt=Prompt(prompt_id="p", token_ids=token_array([7, 8])),
        segments=tuple(segments),
        finish_reason=FinishReason.STOP,
    )
    codec = OneFrameCodec(TrainingSample)
    sample = codec.decode(codec.encode(to_training_sample(ScoredTrajectory(trajectory=trajectory, reward=1.0))))
    sequences = sequences_of(PreparedSample(sample))
    assert len(sequences) == (len(turns) if branches else 1)
    plain = [structs.replace(item, sample=structs.replace(item.sample, kept_sets=KeptSets())) for item in sequences]
    row = pack([*sequences, *plain], 0, CPU)  # the second half has no sets

    if not any(kept for _, kept in expected):
        assert row.kept_NK is None
        return
    assert row.kept_NK is not None
    rows = [[token for token in kept if token >= 0] for kept in row.kept_NK.tolist()]
    half = len(rows) // 2
    assert list(zip(row.targets_N.tolist()[:half], rows[:half], strict=True)) == expected
    assert not any(rows[half:])


SETTINGS = [
    TokenDistribution(top_k=4), TokenDistribution(top_p=0.7), TokenDistribution(min_p=0.1),
    TokenDistribution(temperature=0.8, top_k=6, top_p=0.8, min_p=0.02),
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
def test_weights_of_stale_tokens_are_exact(settings: TokenDistribution) -> None:
    """Tokens of a distribution that has moved since: logprobs and gradients are those of the new logits over the old
    set. A set of the new logits is another one, and its weights are off by more than a thousandth."""
    torch.manual_seed(0)
    old_NV = torch.randn(200, 24, dtype=torch.float64) * 2
    new_NV = (old_NV + 0.2 * torch.randn_like(old_NV)).requires_grad_()
    removed_NV = removed_tokens(old_NV / settings.temperature, settings)
    assert removed_NV is not None
    targets_N = (old_NV / settings.temperature).masked_fill(removed_NV, -torch.inf).softmax(-1).multinomial(1)[:, 0]
    sets = [(~row).nonzero()[:, 0].tolist() for row in removed_NV]
    width = max(map(len, sets))
    kept_NK = torch.tensor([kept + [-1] * (width - len(kept)) for kept in sets])
    coefficients_N = torch.randn(200, dtype=torch.float64)

    logprobs_N, entropy_N = token_logprobs(new_NV, targets_N, settings, kept_NK=kept_NK, entropy_gradient=True)
    (coefficients_N * logprobs_N + entropy_N).sum().backward()

    exact_NV = new_NV.detach().clone().requires_grad_()
    expected_NV = (exact_NV / settings.temperature).masked_fill(removed_NV, -torch.inf).log_softmax(-1)
    expected_N = expected_NV.gather(1, targets_N[:, None])[:, 0]
    terms_NV = torch.where(removed_NV, 0.0, expected_NV.exp() * expected_NV.masked_fill(removed_NV, 0.0))
    (coefficients_N * expected_N - terms_NV.sum(-1)).sum().backward()
    assert (logprobs_N - expected_N).abs().max() < 1e-12
    assert (new_NV.grad - exact_NV.grad).abs().max() < 1e-12
    own_N, _ = token_logprobs(new_NV.detach(), targets_N, settings)
    assert (own_N - expected_N).abs().max() > 1e-3


def test_the_trainer_cuts_where_no_set_is_known() -> None:
    settings = TokenDistribution(top_k=2)
    logits_NV = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 3)
    outside_NV = outside_of_kept_sets(logits_NV, settings, torch.tensor([[3, -1, -1], [-1, -1, -1], [0, 1, 2]]))
    assert outside_NV.tolist() == [[True, True, True, False], [False, False, True, True], [False, False, False, True]]
    nothing_removed = outside_of_kept_sets(logits_NV, TokenDistribution(), torch.tensor([[3, 0]] + [[-1, -1]] * 2))
    assert nothing_removed.tolist() == [[False, True, True, False], [False] * 4, [False] * 4]


def test_sets_are_returned_where_tokens_are_removed(tmp_path: Path) -> None:
    def most(*, replay: bool = True, size: int = 8, **sampling: Any) -> int:
        recipe = small_recipe(
            str(tmp_path),
            sampling=Sampling(**sampling),
            training=Training(kept_set_replay=replay),
            rollout=Rollout(prompts_per_batch=2, group_size=size),
        )
        return kept_tokens(recipe)

    assert most(temperature=0.5) == 0
    assert most(top_k=20) == 28  # some may be tied with the last one
    assert most(top_k=1000) == 128
    assert most(top_p=0.9) == most(min_p=0.1) == 32
    assert most(replay=False, top_k=20) == 0
    assert most(size=64, top_k=20, max_tokens=100_000) == 2  # what fits a message of a group
    assert most(size=1, top_k=100, max_tokens=100_000) == 13  # what fits the memory of an engine


@pytest.mark.vllm
def test_a_set_is_whole_or_not_returned() -> None:
    """vLLM gives the sampled token, and then the most likely ones."""
    logprobs = pytest.importorskip("vllm.logprobs")
    from streamrl.engines.async_llm.engine import kept_sets_of

    def flat(rows: list[list[tuple[int, float]]]) -> Any:
        stops = list(accumulate(map(len, rows)))
        pairs = [pair for row in rows for pair in row]
        return logprobs.FlatLogprobs(
            start_indices=[0, *stops[:-1]], end_indices=stops,
            token_ids=[token for token, _ in pairs], logprobs=[logprob for _, logprob in pairs],
        )  # fmt: skip

    out = -math.inf
    rows = [
        [(5, -1.0), (4, -0.5), (5, -1.0), (9, out)],  # two tokens, and one outside
        [(9, -2.0), (4, -0.2), (9, -2.0), (6, -3.0)],  # perhaps more than three
        [(4, 0.0), (4, 0.0), (8, out), (9, out)],
    ]
    assert kept_sets_of(flat(rows), 100) == kept_sets([[4, 5], [], [4]])
    assert kept_sets_of(flat(rows), 3) == kept_sets([[4, 5], [4, 9, 6], [4]])  # the whole vocabulary
    nothing = [None, logprobs.FlatLogprobs(), flat([row[:1] for row in rows])]
    assert [kept_sets_of(without_sets, 100) for without_sets in nothing] == [KeptSets()] * 3
