"""Prompts of several domains come in the shares that the recipe gives them, also after a resume."""

from __future__ import annotations

from collections import Counter

import pytest

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.types import Prompt, token_array
from streamrl.run.prompts import mixed_prompts
from streamrl.run.prompts.mixed_prompts import MixedPrompts

SHARES = {"math": 2.0, "code": 1.0}


class Rows:
    """A source in which every fourth prompt is code."""

    size = None

    def __init__(self, kinds: list[str]) -> None:
        self.kinds = kinds
        self.at = 0

    async def draw(self, count: int) -> list[Prompt]:
        kinds = self.kinds[self.at : self.at + count]
        first, self.at = self.at, self.at + len(kinds)
        return [
            Prompt(prompt_id=f"p{first + n}", token_ids=token_array([1]), columns={"kind": kind})
            for n, kind in enumerate(kinds)
        ]

    async def aclose(self) -> None: ...


def rows(count: int) -> Rows:
    return Rows(["code" if n % 4 == 3 else "math" for n in range(count)])


async def test_any_number_of_prompts_has_the_shares() -> None:
    """Any number of prompts has the shares, and a resumed run gets the prompts that follow."""
    mixed = MixedPrompts(rows(400), "kind", SHARES)
    drawn = [prompt for _ in range(60) for prompt in await mixed.draw(3)]
    for end in range(1, len(drawn) + 1):
        code = Counter(prompt.columns["kind"] for prompt in drawn[:end])["code"]
        assert abs(code - end / 3) <= 1
    assert len({prompt.prompt_id for prompt in drawn}) == len(drawn)
    resumed = await MixedPrompts(rows(400), "kind", SHARES, start=50).draw(20)
    assert [prompt.prompt_id for prompt in resumed] == [prompt.prompt_id for prompt in drawn[50:70]]


async def test_an_exhausted_source_gives_all_its_prompts() -> None:
    """An exhausted source gives all of its prompts, whatever the shares."""
    mixed = MixedPrompts(rows(20), "kind", SHARES)
    assert len(await mixed.draw(30)) == 20
    assert await mixed.draw(5) == []


async def test_a_domain_that_is_not_named_or_never_comes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match='has "math": add it there'):
        await MixedPrompts(Rows(["code"]), "kind", {"math": 1.0}).draw(1)
    monkeypatch.setattr(mixed_prompts, "MOST_WAITING", 10)
    with pytest.raises(StreamRLError, match='one of domain "code"'):
        await MixedPrompts(Rows(["math"] * 50), "kind", SHARES).draw(30)
