"""Split masters: float32 values as what the forward runs on and 16 bits more, read back exactly."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from streamrl.learning.state import masters as masters_module
from streamrl.learning.state.masters import SplitMasters

pytestmark = pytest.mark.torch


def patterns(first: int, last: int) -> Tensor:
    """The float32 values of consecutive bit patterns."""
    return torch.arange(first, last, dtype=torch.int64).to(torch.int32).view(torch.float32)


def split(values_L: Tensor) -> tuple[Tensor, SplitMasters]:
    forward_L = values_L.clone()
    return forward_L, SplitMasters([lambda: forward_L], [len(values_L)], torch.device("cpu"))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("high", [0x3F80, 0x3F81, 0x0000, 0x7F7E])  # even, odd, subnormal, the largest finite ones
def test_low_halves_are_read_but_for_one_tie(high: int, sign: float) -> None:
    """Every low half is read again, except for the tie that has no room."""
    values_L = sign * patterns(high << 16, (high + 1) << 16)
    forward_L, masters = split(values_L)
    assert torch.equal(forward_L, values_L.bfloat16().float())  # the published bits, ties to even
    read_L = masters.full()
    moved = (read_L.view(torch.int32) != values_L.view(torch.int32)).nonzero().flatten().tolist()
    assert moved == ([0x8000] if high % 2 == 0 else [])
    for place in moved:  # one float32 nearer to zero, where it is published as before
        assert int(values_L.view(torch.int32)[place]) - int(read_L.view(torch.int32)[place]) == 1
        assert torch.equal(read_L[place].bfloat16().float(), forward_L[place])
    masters.load(read_L)  # a checkpoint: nothing moves a second time
    assert torch.equal(masters.full().view(torch.int32), read_L.view(torch.int32))
    assert torch.equal(forward_L, read_L.bfloat16().float())


def test_parts_cross_the_vectors_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under FSDP2: one vector a parameter, some of them empty, and steps that end inside of one."""
    monkeypatch.setattr(masters_module, "STEP_ELEMENTS", {"cpu": 256})
    sizes = [3, 0, 600, 1, 0, 41, 255]
    values_L = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0))
    vectors = [part.clone() for part in torch.split(values_L, sizes)]
    masters = SplitMasters([partial(vectors.__getitem__, i) for i in range(len(sizes))], sizes, torch.device("cpu"))
    assert torch.equal(masters.full(), values_L)
    places = list(masters.chunks())
    assert [place.stop - place.start for place in places] == [256, 256, 256, 132]
    for place in places:
        masters.write(place, masters.read(place).mul_(3.0))
    assert torch.equal(masters.full(), values_L * 3.0)
    assert torch.equal(torch.cat(vectors), (values_L * 3.0).bfloat16().float())
