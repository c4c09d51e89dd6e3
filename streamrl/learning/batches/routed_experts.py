"""Experts of the tokens of a row, put together from the experts that engines returned for its samples.

``packing`` calls it for each row, in each trainer rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from streamrl.base.types import RoutedTokens
from streamrl.learning.model.routers import RoutedRow


class RoutedSpan(NamedTuple):
    """Tokens ``[first, stop)`` of a sequence, which lie in the row from ``place`` on.

    ``siblings``: returned experts of each sibling that shares the tokens. A token takes the experts of the first
    sibling that has them."""

    place: int
    first: int
    stop: int
    siblings: Sequence[Sequence[RoutedTokens]]


def routed_row(spans: Sequence[RoutedSpan], device: torch.device) -> RoutedRow | None:
    """Experts of a row that ``spans`` fill one after the other; None where no token has experts."""
    parts = [part for span in spans for sibling in span.siblings for part in sibling]
    if not parts:
        return None
    shape = parts[0].shape
    tokens = spans[-1].place + spans[-1].stop - spans[-1].first
    experts_TLK = np.zeros((tokens, *shape), dtype=np.int16 if parts[0].experts.typecode == "H" else np.uint8)
    known_T = np.zeros(tokens, dtype=bool)
    for span in spans:
        for part in chain.from_iterable(span.siblings):
            first = max(part.start, span.first)
            stop = min(part.stop, span.stop)
            places = np.arange(first, stop) - span.first + span.place
            places = places[~known_T[places]]
            if len(places):
                experts_PLK = np.asarray(part.experts).reshape(-1, *shape)
                experts_TLK[places] = experts_PLK[places - span.place + span.first - part.start]
                known_T[places] = True
    missing = tokens - int(known_T.sum())
    return RoutedRow(torch.from_numpy(experts_TLK).to(device), torch.from_numpy(known_T).to(device), missing)
