"""Experts of the tokens of a row, from those that engines returned for its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from streamrl.base.types import RoutedTokens
from streamrl.learning.model.routers import RoutedRow


class RoutedSpan(NamedTuple):
    """Tokens ``[first, stop)`` of a sequence, laid from ``place`` in the row on. ``known``: experts of each of the
    siblings that share them; the first that has a token's holds."""

    place: int
    first: int
    stop: int
    known: Sequence[Sequence[RoutedTokens]]


def routed_row(spans: Sequence[RoutedSpan], device: torch.device) -> RoutedRow | None:
    """The experts of a row that ``spans`` fill one after the other; None where no token has any."""
    parts = [part for span in spans for known in span.known for part in known]
    if not parts:
        return None
    shape = parts[0].shape
    tokens = spans[-1].place + spans[-1].stop - spans[-1].first
    experts_TLK = np.zeros((tokens, *shape), dtype=np.int16 if parts[0].experts.typecode == "H" else np.uint8)
    known_T = np.zeros(tokens, dtype=bool)
    for span in spans:
        for part in (part for known in span.known for part in known):
            first = max(part.start, span.first)
            stop = min(part.stop, span.stop)
            where = np.arange(first, stop) - span.first + span.place
            where = where[~known_T[where]]
            if len(where):
                of_part = np.asarray(part.experts).reshape(-1, *shape)
                experts_TLK[where] = of_part[where - span.place + span.first - part.start]
                known_T[where] = True
    missing = tokens - int(known_T.sum())
    return RoutedRow(torch.from_numpy(experts_TLK).to(device), torch.from_numpy(known_T).to(device), missing)
