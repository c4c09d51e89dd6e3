"""Sources of completion lengths for a simulation: a model (a mixture with a tail and a mass at the cap, correlated
within a prompt), or the lengths of a recorded run. ``simulation`` draws from a source for each launched group.

A length is a function of (seed, prompt, seed base, sample) alone. The *seed base* belongs to a group: a deferred
prompt that is replayed keeps its seed base and so its lengths; one that is regenerated gets other lengths for the same
prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import sqrt
from random import Random
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from streamrl.base.errors import StreamRLError
from streamrl.base.types import TurnTimes
from streamrl.observe.report.trajectory_trace import RecordedRun, TrajectoryLine
from streamrl.recipe.sections import Recipe
from streamrl.simulate.stages import EnvironmentModel

Turns = tuple[TurnTimes, ...]
Floats = NDArray[np.float64]

POOL_BITS = 19
MOST_SAMPLES = 4096
GRID = 1 << 15
WIDEST = 9.0
_MASK = (1 << 64) - 1
NEIGHBOURS = 3
"""Number of recorded prompts on either side, in order of length, that may replace a prompt."""


class LengthModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model of completion lengths in tokens: a mixture of log-normals, with a tail and a mass at the cap.

    ``cap``: longest completion;
    ``weights``, ``mus``, ``sigmas``: parts of the mixture (logarithms are natural);
    ``cap_share``: share of completions that reach ``cap``;
    ``tail_from``: length from which survival follows a power law to the cap (0: no power law, and completions that the
      mixture lacks at the cap are a mass at the cap alone);
    ``loop_share``: share of completions that are a mass at the cap beside the power law (degenerate loops);
    ``correlation``: correlation rho of two completions of a prompt, in the Gaussian copula
      ``z = sqrt(rho) u + sqrt(1 - rho) e``;
    ``drift_per_step``: growth of the logarithm of every length below the cap with each policy version;
    ``drift_steps``: versions after which the drift ends (0: never)."""

    cap: int
    weights: tuple[float, ...]
    mus: tuple[float, ...]
    sigmas: tuple[float, ...]
    cap_share: float = 0.0
    tail_from: float = 0.0
    loop_share: float = 0.0
    correlation: float = 0.35
    drift_per_step: float = 0.0
    drift_steps: int = 0

    def __post_init__(self) -> None:
        if not self.weights or len({len(self.weights), len(self.mus), len(self.sigmas)}) > 1:
            raise ValueError(
                f"lengths: {len(self.weights)} weights, {len(self.mus)} mus and {len(self.sigmas)} sigmas; give the "
                "same number of each, one at least"
            )
        if abs(sum(self.weights) - 1) > 1e-6:
            raise ValueError(f"lengths: the weights {self.weights} add up to {sum(self.weights):g}; they must to 1")
        if not 0 <= self.correlation < 1 or not 0 <= self.loop_share <= self.cap_share < 1:
            raise ValueError(
                f"lengths: correlation {self.correlation:g} and cap_share {self.cap_share:g} must be in [0, 1), "
                f"loop_share {self.loop_share:g} at most cap_share"
            )

    def survival(self, tokens: Floats) -> Floats:
        """Share of completions longer than ``tokens``, below the cap."""
        share = self._mixture_survival(tokens)
        loops = self._loops()
        if self.tail_from:
            tail_share = float(self._mixture_survival(np.array([self.tail_from]))[0])
            cap_share = max((self.cap_share - loops) / (1 - loops), 1e-12)
            exponent = math.log(tail_share / cap_share) / math.log(self.cap / self.tail_from)
            tail = tail_share * (np.maximum(tokens, self.tail_from) / self.tail_from) ** -exponent
            share = np.where(tokens > self.tail_from, tail, share)
        survival: Floats = loops + (1 - loops) * share
        return survival

    def _loops(self) -> float:
        """Share of the mass at the cap alone."""
        if self.tail_from:
            return self.loop_share
        mixture_share = float(self._mixture_survival(np.array([float(self.cap)]))[0])
        return max((self.cap_share - mixture_share) / (1 - mixture_share), 0.0)

    def _mixture_survival(self, tokens: Floats) -> Floats:
        logs = np.log(np.maximum(tokens, 1e-9))
        total: Floats = np.zeros_like(logs)
        for weight, mu, sigma in zip(self.weights, self.mus, self.sigmas, strict=True):
            total += weight * 0.5 * _erfc((logs - mu) / (sigma * sqrt(2)))
        return total

    def quantile_table(self) -> tuple[Floats, Floats]:
        """(grid of standard normal values, length at each of them), ascending. Values in the mass at the cap have the
        length of the cap."""
        grid = np.linspace(-WIDEST, WIDEST, GRID)
        lengths = np.concatenate([np.geomspace(0.5, self.cap, 2 * GRID), [float(self.cap)]])
        survival = self.survival(lengths)
        survival[-1] = 0.0
        shares = 0.5 * _erfc(grid / sqrt(2))
        # Survival falls with length, and the interpolation needs ascending values.
        quantiles = np.interp(shares, survival[::-1], lengths[::-1])
        quantiles[shares <= survival[-2]] = self.cap
        return grid, quantiles


class LengthSource(Protocol):
    """Source of lengths."""

    @property
    def cap(self) -> int:
        """The longest completion, in tokens."""

    def draw(self, prompt: int, seed_base: int, samples: int, version: int) -> list[int]:
        """Lengths in tokens of samples ``0 .. samples - 1`` of the ``prompt``-th prompt under ``version``."""


class ModelledLengths:
    """Draws from a ``LengthModel``. Normal numbers come from a pool, at places given by a hash, so that a draw of eight
    lengths takes some microseconds."""

    def __init__(self, model: LengthModel, seed: int = 0) -> None:
        self.model = model
        self.cap = model.cap
        self._seed = seed
        source = np.random.default_rng(seed)
        # Scaled so that the sum of a prompt's and a member's number is the index of a length in the table.
        scale = (GRID - 1) / (2 * WIDEST)
        members = source.standard_normal((1 << POOL_BITS) + MOST_SAMPLES) * sqrt(1 - model.correlation) * scale
        prompts = source.standard_normal(1 << POOL_BITS) * sqrt(model.correlation) * scale + GRID / 2
        self._members: list[float] = members.tolist()
        self._prompts: list[float] = prompts.tolist()
        _, lengths = model.quantile_table()
        self._lengths: list[int] = np.maximum(np.rint(lengths), 1).astype(int).tolist()

    def draw(self, prompt: int, seed_base: int, samples: int, version: int) -> list[int]:
        mask = (1 << POOL_BITS) - 1
        table = self._lengths
        latent = self._prompts[hash((self._seed, prompt)) & mask]
        start = hash((self._seed, prompt, seed_base)) & mask
        lengths = [table[int(latent + member)] for member in self._members[start : start + samples]]
        drift = self.model.drift_per_step
        cap = self.cap
        if not drift:
            return lengths
        steps = min(version, self.model.drift_steps) if self.model.drift_steps else version
        factor = math.exp(drift * steps)

        def drifted(length: int) -> int:
            if length >= cap:
                return cap
            return max(min(round(length * factor), cap), 1)

        return [drifted(length) for length in lengths]


class DomainLengths:
    """Lengths from one source for each domain. ``domain_of``: function that returns the domain of a prompt."""

    def __init__(self, sources: Sequence[LengthSource], domain_of: Callable[[int], int]) -> None:
        self._sources = sources
        self._domain_of = domain_of
        self.cap = sources[0].cap

    def draw(self, prompt: int, seed_base: int, samples: int, version: int) -> list[int]:
        return self._sources[self._domain_of(prompt)].draw(prompt, seed_base, samples, version)


class RecordedLengths:
    """Lengths of a recorded run, the lengths of a prompt together.

    ``resample``: whether a draw takes any recorded prompt. Otherwise prompts come in the order of the record, which
    starts again at its end, each with its own lengths in their order; then an object serves one simulation, since it
    remembers which draw of a prompt was the first.

    Draws beyond the record (another attempt at a prompt, more samples) take recorded prompts of nearly the same length.
    A completion that was stopped before its end has the length of a longer recorded one."""

    def __init__(self, run: RecordedRun, *, resample: bool = True, seed: int = 0) -> None:
        self._rows = recorded_rows(run, seed)
        if not self._rows:
            raise StreamRLError(
                f"run {run.header.run_id} recorded no finished trajectory: there are no lengths to replay"
            )
        means = [sum(math.log(length) for length, _ in row) / len(row) for row in self._rows]
        self._sorted = sorted(range(len(means)), key=means.__getitem__)
        self._places = [0] * len(means)
        for place, row in enumerate(self._sorted):
            self._places[row] = place
        self._near = min(NEIGHBOURS, len(means) // 20)
        self._resample = resample
        self._seed = seed
        self._seed_bases: dict[int, int] = {}
        self.cap = run.header.max_tokens

    def draw(self, prompt: int, seed_base: int, samples: int, version: int) -> list[int]:
        """Draw from the record. ``version`` is ignored: a record has its own drift."""
        return [length for length, _ in self.completions(prompt, seed_base, samples)]

    def completions(self, prompt: int, seed_base: int, samples: int) -> list[tuple[int, Turns]]:
        """Draw as ``draw`` does. Returns each length with its turns."""
        count = len(self._rows)
        if not self._resample and self._seed_bases.setdefault(prompt, seed_base) == seed_base:
            return self._row(self._places[prompt % count], 0, samples)
        mixed = _scattered(self._seed, prompt, seed_base)
        place = self._places[prompt % count] if not self._resample else _scattered(self._seed, prompt) % count
        place += mixed % (2 * self._near + 1) - self._near
        # Places beyond the ends are reflected, so that all rows are drawn equally often.
        if place < 0:
            place = -1 - place
        elif place >= count:
            place = 2 * count - 1 - place
        return self._row(place, mixed >> 8, samples)

    def _row(self, place: int, shift: int, samples: int) -> list[tuple[int, Turns]]:
        """``samples`` completions of the row at ``place`` (in order of length), rotated by ``shift``. Rows nearby
        follow where the row has fewer."""
        row = self._rows[self._sorted[place]]
        completions: list[tuple[int, Turns]] = []
        distance = 0
        while len(completions) < samples:
            start = shift % len(row)
            completions += row[start:] + row[:start]
            distance = distance % self._near + 1 if self._near else 0
            neighbour = place + distance
            if neighbour >= len(self._rows):
                neighbour = place - distance
            row = self._rows[self._sorted[neighbour]]
        return completions[:samples]


class RecipeLengths:
    """Lengths of ``source``, no longer than ``recipe`` allows; lengths beyond the cap of the source stay unknown. With
    an environment they are split into turns: recorded ones, or those of the model ``environment``."""

    def __init__(self, recipe: Recipe, environment: EnvironmentModel, source: LengthSource, seed: int = 0) -> None:
        self._source = source
        self._model = environment
        self._seed = seed
        self.cap = min(recipe.max_tokens, source.cap)
        turns = [environment.max_turns for environment in recipe.environment.by_name.values()]
        self._most_turns = max(turns) if recipe.environment.configured else 0

    def draw(self, prompt: int, seed_base: int, samples: int, version: int) -> list[int]:
        return [min(length, self.cap) for length in self._source.draw(prompt, seed_base, samples, version)]

    def turns(self, prompt: int, seed_base: int, samples: int, version: int) -> list[Turns]:
        """Turns of each sample, and after them a turn without tokens with the last wait for its environment. Empty
        without an environment."""
        source = self._source
        if not self._most_turns:
            return []
        if isinstance(source, RecordedLengths):
            completions = source.completions(prompt, seed_base, samples)
        else:
            completions = [(length, ()) for length in source.draw(prompt, seed_base, samples, version)]
        samples_turns: list[Turns] = []
        for sample, (length, turns) in enumerate(completions):
            if turns:
                samples_turns.append(turns[:-1][: self._most_turns] + turns[-1:])
            else:
                numbers = Random(hash((self._seed, prompt, seed_base, sample)))
                samples_turns.append(self._modelled(min(length, self.cap), numbers))
        return samples_turns

    def _modelled(self, length: int, numbers: Random) -> Turns:
        """Turns of a completion of ``length`` tokens by the model."""
        model = self._model
        number = round(length / model.turn_tokens) if model.turn_tokens else 1
        count = max(min(number, self._most_turns, length), 1)
        ends = [length * turn // count for turn in range(count + 1)]
        waits = [0.0, *(model.seconds * numbers.expovariate(1.0) for _ in range(count))]
        turns = ((model.appended_tokens, waits[i], ends[i + 1] - ends[i], 0.0) for i in range(count))
        return (*turns, (0, waits[-1], 0, 0.0))


def drawn_turns(source: LengthSource, *draw: int) -> tuple[list[int], list[Turns]]:
    """(lengths of a draw, turns of each sample). ``draw``: arguments of ``LengthSource.draw``. There are no turns
    without an environment."""
    if isinstance(source, RecipeLengths):
        samples_turns = source.turns(*draw)
        if samples_turns:
            return [sum(tokens for _, _, tokens, _ in turns) for turns in samples_turns], samples_turns
    return source.draw(*draw), []


def recorded_rows(run: RecordedRun, seed: int = 0) -> list[list[tuple[int, Turns]]]:
    """Lengths of each prompt, with turns, in the order of launches. Of several attempts at a prompt the one with most
    finished completions counts. A completion that was stopped gets the length of a longer recorded one, or the cap
    where there is none."""
    attempts: dict[str, dict[int, list[TrajectoryLine]]] = {}
    for line in run.trajectories:
        attempts.setdefault(line.prompt_id, {}).setdefault(line.group, []).append(line)
    finished_lengths = np.sort([line.tokens for line in run.trajectories if line.finish_reason])
    source = np.random.default_rng([seed, 11])
    rows = []
    for groups in sorted(attempts.values(), key=min):
        # A replayed prompt repeats its lengths, so that the attempt with most finished completions has them all.
        lines = max(groups.values(), key=lambda group: sum(bool(line.finish_reason) for line in group))
        row = list[tuple[int, Turns]]()
        for line in sorted(lines, key=lambda line: line.sample):
            if line.finish_reason:
                row.append((max(line.tokens, 1), line.turns))
            elif line.tokens:
                longer_lengths = finished_lengths[np.searchsorted(finished_lengths, line.tokens, side="right") :]
                length = int(source.choice(longer_lengths)) if len(longer_lengths) else run.header.max_tokens
                row.append((length, ()))
        if row:
            rows.append(row)
    return rows


def _scattered(*values: int) -> int:
    """Hash of ``values`` (murmur3's finisher). Hashes of similar values differ in all bits, which hashes of tuples do
    not."""
    mixed = hash(values) & _MASK
    mixed = (mixed ^ mixed >> 33) * 0xFF51AFD7ED558CCD & _MASK
    mixed = (mixed ^ mixed >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return mixed ^ mixed >> 33


def _erfc(values: Floats) -> Floats:
    return np.array([math.erfc(value) for value in values.tolist()])
