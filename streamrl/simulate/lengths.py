"""Lengths of completions: mixtures with a tail and a mass at the cap, correlated within a prompt; or recorded ones. A
length is a function of (seed, prompt, noise, sample) alone: a deferred prompt that is replayed keeps its noise and so
its lengths; for one that is regenerated they are drawn again around the same prompt."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
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
"""Recorded prompts on either side, in order of length, that may stand in for one."""


class LengthModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Completion lengths in tokens: log-normals of ``weights``, ``mus`` (natural log of tokens) and ``sigmas``.

    ``cap_share``: of all completions reach ``cap``. Beyond ``tail_from`` tokens survival follows a power law to that
    share, of which ``loop_share`` is no part (degenerate loops: a mass at the cap alone); ``tail_from`` 0: all that the
    log-normals lack of it is such a mass. ``correlation``: of two completions of a
    prompt, in the Gaussian copula ``z = sqrt(rho) u + sqrt(1 - rho) e``. ``drift_per_step``:
    the natural log of every length below the cap grows by so much with each policy version, ``drift_steps`` long (0:
    without end)."""

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
        share = self._body(tokens)
        loops = self._loops()
        if self.tail_from:
            at = float(self._body(np.array([self.tail_from]))[0])
            reaching = max((self.cap_share - loops) / (1 - loops), 1e-12)
            exponent = math.log(at / reaching) / math.log(self.cap / self.tail_from)
            tail = at * (np.maximum(tokens, self.tail_from) / self.tail_from) ** -exponent
            share = np.where(tokens > self.tail_from, tail, share)
        survival: Floats = loops + (1 - loops) * share
        return survival

    def _loops(self) -> float:
        """Mass at the cap alone."""
        if self.tail_from:
            return self.loop_share
        at_cap = float(self._body(np.array([float(self.cap)]))[0])
        return max((self.cap_share - at_cap) / (1 - at_cap), 0.0)

    def _body(self, tokens: Floats) -> Floats:
        logs = np.log(np.maximum(tokens, 1e-9))
        parts = zip(self.weights, self.mus, self.sigmas, strict=True)
        total: Floats = np.zeros_like(logs)
        for weight, mu, sigma in parts:
            total += weight * 0.5 * _erfc((logs - mu) / (sigma * math.sqrt(2)))
        return total

    def quantile_table(self) -> tuple[Floats, Floats]:
        """A grid of standard normal values and the length at each, ascending; at the cap where the mass is."""
        grid = np.linspace(-WIDEST, WIDEST, GRID)
        lengths = np.concatenate([np.geomspace(0.5, self.cap, 2 * GRID), [float(self.cap)]])
        survival = self.survival(lengths)
        survival[-1] = 0.0
        wanted = 0.5 * _erfc(grid / math.sqrt(2))
        # Survival falls with length: both axes turned round for the interpolation.
        found = np.interp(wanted, survival[::-1], lengths[::-1])
        found[wanted <= survival[-2]] = self.cap
        return grid, found


class LengthSource(Protocol):
    """Source of lengths."""

    @property
    def cap(self) -> int:
        """The longest completion, in tokens."""
        ...

    def draw(self, prompt: int, noise: int, samples: int, version: int) -> list[int]:
        """Lengths in tokens of samples ``0 .. samples - 1`` of the ``prompt``-th prompt under ``version``."""
        ...


class ModelledLengths:
    """Draws from a ``LengthModel``. Normals come from one pool by hash: a draw of eight costs some microseconds."""

    def __init__(self, model: LengthModel, seed: int = 0) -> None:
        self.model = model
        self.cap = model.cap
        self._seed = seed
        source = np.random.default_rng(seed)
        # Scaled so that prompt + member is the index of a length in the table.
        scale = (GRID - 1) / (2 * WIDEST)
        members = source.standard_normal((1 << POOL_BITS) + MOST_SAMPLES) * math.sqrt(1 - model.correlation) * scale
        prompts = source.standard_normal(1 << POOL_BITS) * math.sqrt(model.correlation) * scale + GRID / 2
        self._members: list[float] = members.tolist()
        self._prompts: list[float] = prompts.tolist()
        _, lengths = model.quantile_table()
        self._lengths: list[int] = np.maximum(np.rint(lengths), 1).astype(int).tolist()

    def draw(self, prompt: int, noise: int, samples: int, version: int) -> list[int]:
        mask = (1 << POOL_BITS) - 1
        table = self._lengths
        latent = self._prompts[hash((self._seed, prompt)) & mask]
        start = hash((self._seed, prompt, noise)) & mask
        lengths = [table[int(latent + member)] for member in self._members[start : start + samples]]
        drift = self.model.drift_per_step
        cap = self.cap
        if not drift:
            return lengths
        steps = min(version, self.model.drift_steps) if self.model.drift_steps else version
        factor = math.exp(drift * steps)
        return [cap if length >= cap else max(min(round(length * factor), cap), 1) for length in lengths]


class DomainLengths:
    """Lengths of ``sources``, one a domain; ``domain_of`` gives the domain of a prompt."""

    def __init__(self, sources: Sequence[LengthSource], domain_of: Callable[[int], int]) -> None:
        self._sources = sources
        self._domain_of = domain_of
        self.cap = sources[0].cap

    def draw(self, prompt: int, noise: int, samples: int, version: int) -> list[int]:
        return self._sources[self._domain_of(prompt)].draw(prompt, noise, samples, version)


class RecordedLengths:
    """Lengths of a real run, a prompt's together. ``resample``: any recorded prompt; otherwise they return in the order
    of the record, again from its start when it ends, each with its own lengths in their order. One object then serves
    one simulation, since the first draw of a prompt is the recorded one.

    What is drawn beyond the record (another attempt at a prompt, more samples) comes from recorded prompts of nearly
    the same length. A completion that was stopped before its end is as long as a recorded one that is longer."""

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
        self._noises: dict[int, int] = {}
        self.cap = run.header.max_tokens

    def draw(self, prompt: int, noise: int, samples: int, version: int) -> list[int]:
        """Draw from the record. ``version`` is ignored: a record has its own drift."""
        return [length for length, _ in self.completions(prompt, noise, samples)]

    def completions(self, prompt: int, noise: int, samples: int) -> list[tuple[int, Turns]]:
        """The same lengths, each with its turns."""
        count = len(self._rows)
        if not self._resample and self._noises.setdefault(prompt, noise) == noise:
            return self._drawn(self._places[prompt % count], 0, samples)
        mixed = _scattered(self._seed, prompt, noise)
        place = self._places[prompt % count] if not self._resample else _scattered(self._seed, prompt) % count
        place += mixed % (2 * self._near + 1) - self._near
        # Reflected at both ends, so that every row is drawn as often.
        place = -1 - place if place < 0 else place if place < count else 2 * count - 1 - place
        return self._drawn(place, mixed >> 8, samples)

    def _drawn(self, place: int, turn: int, samples: int) -> list[tuple[int, Turns]]:
        """The row at ``place`` in order of length, turned round, and as many of those beside it as it takes."""
        row = self._rows[self._sorted[place]]
        lengths: list[tuple[int, Turns]] = []
        beside = 0
        while len(lengths) < samples:
            turned = turn % len(row)
            lengths += row[turned:] + row[:turned]
            beside = beside % self._near + 1 if self._near else 0
            other = place + beside if place + beside < len(self._rows) else place - beside
            row = self._rows[self._sorted[other]]
        return lengths[:samples]


class RecipeLengths:
    """Lengths of ``source``, no longer than ``recipe`` allows: what is longer than their own cap is unknown. With an
    environment they are in turns: the recorded ones, or such as ``environment`` has."""

    def __init__(self, recipe: Recipe, environment: EnvironmentModel, source: LengthSource, seed: int = 0) -> None:
        self._source = source
        self._model = environment
        self._seed = seed
        self.cap = min(recipe.most_tokens, source.cap)
        self._most_turns = recipe.environment.max_turns if recipe.environment.given else 0

    def draw(self, prompt: int, noise: int, samples: int, version: int) -> list[int]:
        return [min(length, self.cap) for length in self._source.draw(prompt, noise, samples, version)]

    def turns(self, prompt: int, noise: int, samples: int, version: int) -> list[Turns]:
        """The turns of each sample, with what its environment does after the last; empty without an environment."""
        source = self._source
        if not self._most_turns:
            return []
        if isinstance(source, RecordedLengths):
            drawn = source.completions(prompt, noise, samples)
        else:
            drawn = [(length, ()) for length in source.draw(prompt, noise, samples, version)]
        return [
            turns[:-1][: self._most_turns] + turns[-1:]
            or self._modelled(min(length, self.cap), random.Random(hash((self._seed, prompt, noise, sample))))
            for sample, (length, turns) in enumerate(drawn)
        ]

    def _modelled(self, length: int, source: random.Random) -> Turns:
        model = self._model
        wanted = round(length / model.turn_tokens) if model.turn_tokens else 1
        count = max(min(wanted, self._most_turns, length), 1)
        ends = [length * number // count for number in range(count + 1)]
        waits = [0.0, *(model.seconds * source.expovariate(1.0) for _ in range(count))]
        turns = ((model.appended_tokens, waits[i], ends[i + 1] - ends[i], 0.0) for i in range(count))
        return (*turns, (0, waits[-1], 0, 0.0))


def drawn_turns(source: LengthSource, *draw: int) -> tuple[list[int], list[Turns]]:
    """A ``draw`` of lengths, and their turns; those are empty without an environment."""
    turns = source.turns(*draw) if isinstance(source, RecipeLengths) else []
    return [sum(turn[2] for turn in one) for one in turns] or source.draw(*draw), turns


def recorded_rows(run: RecordedRun, seed: int = 0) -> list[list[tuple[int, Turns]]]:
    """The lengths, with turns, of each prompt in the order of their launch; of several attempts the one that says most.
    A completion that was stopped gets the length of a recorded one that is longer, or the cap where none is."""
    attempts: dict[str, dict[int, list[TrajectoryLine]]] = {}
    for line in run.trajectories:
        attempts.setdefault(line.prompt_id, {}).setdefault(line.group, []).append(line)
    finished = np.sort([line.tokens for line in run.trajectories if line.finish_reason])
    source = np.random.default_rng([seed, 11])
    rows = []
    for groups in sorted(attempts.values(), key=min):
        # A replayed prompt repeats its lengths: the attempt that got furthest has them all.
        lines = max(groups.values(), key=lambda group: sum(bool(line.finish_reason) for line in group))
        row = list[tuple[int, Turns]]()
        for line in sorted(lines, key=lambda line: line.sample):
            if line.finish_reason:
                row.append((max(line.tokens, 1), line.turns))
            elif line.tokens:
                longer = int(np.searchsorted(finished, line.tokens, side="right"))
                beyond = longer < len(finished)
                row.append((int(source.choice(finished[longer:])) if beyond else run.header.max_tokens, ()))
        if row:
            rows.append(row)
    return rows


def _scattered(*values: int) -> int:
    """A hash in all of whose bits neighbours differ at random, which those of a tuple do not (murmur3's finisher)."""
    mixed = hash(values) & _MASK
    mixed = (mixed ^ mixed >> 33) * 0xFF51AFD7ED558CCD & _MASK
    mixed = (mixed ^ mixed >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return mixed ^ mixed >> 33


def _erfc(values: Floats) -> Floats:
    return np.array([math.erfc(value) for value in values.tolist()])
