"""What must always hold, decided from what was seen at the edges of the product and not from its own counts.

Taps: what engines sampled and by which weights, what the user's function returned, what each trainer rank was given and
closed, what was published and committed, and, for the accounting, the orders of control. A violation names its
invariant (docs/evidence/faults.md)."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from copy import copy
from typing import Any

import msgspec

from streamrl.base.messages import CloseBatch, Generate
from streamrl.base.types import Completion, TrainingGroup, TrainingSample, TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.check import violations
from streamrl.control.machine import Control
from streamrl.engines.resumption import completion_id_of

STAMPS = 1 << 20
MODULUS = 1 << 64


def digest_of(*parts: object) -> int:
    """64 bits that depend on all parts."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def stamp_of(state_hash: int) -> float:
    """What a token says of the weights that sampled it, as a logprob that float32 holds exactly."""
    return -1.0 - state_hash % STAMPS / STAMPS


class Violation(msgspec.Struct, frozen=True):
    """``invariant``: a word (docs/evidence/faults.md); ``time_s``: when it was seen."""

    invariant: str
    text: str
    time_s: float


class ControlLedger:
    """One life of control: what it ordered, and what became of it."""

    def __init__(self) -> None:
        self.issued: set[TrajectoryId] = set()
        self.ended: set[TrajectoryId] = set()
        self.trained: set[TrajectoryId] = set()
        self.batched: dict[int, frozenset[TrajectoryId]] = defaultdict(frozenset)
        self.in_batch: dict[int, tuple[TrajectoryId, ...]] = {}
        self.group_of: dict[int, tuple[TrajectoryId, ...]] = {}
        self.closed: set[int] = set()
        self.live = -1

    def copy(self) -> ControlLedger:
        """As it is now."""
        other = ControlLedger()
        vars(other).update((name, copy(value)) for name, value in vars(self).items())
        return other


class Ledger:
    """The oracle of one world. ``clock``: virtual seconds."""

    def __init__(self, clock: Any, max_staleness: int) -> None:
        self._clock = clock
        self._max_staleness = max_staleness
        self.violations: list[Violation] = []
        self.bases: dict[bytes, ControlLedger] = {}
        self.control = ControlLedger()
        self.prompt_of: dict[str, bytes] = {}
        self.sampled: dict[str, set[tuple[bytes, bytes]]] = defaultdict(set)
        self.returned: dict[bytes, set[float]] = defaultdict(set)
        self.hash_of: dict[int, set[int]] = defaultdict(set)
        self.version_of: dict[float, int] = {}
        self.batches: dict[int, tuple[str, ...]] = {}
        self.closing: dict[int, dict[int, tuple[str, ...]]] = defaultdict(dict)
        self.open_batches: dict[tuple[int, int], list[TrainingSample]] = defaultdict(list)
        self.engine_version: dict[str, int] = {}
        self.held: set[int] = set()
        self.early: set[int] = set()
        self._committed_at: dict[str, float] = {}
        self._faults_until = -1.0
        self.max_version = -1
        self._newest_life: dict[tuple[str, str], int] = {}

    def violated(self, invariant: str, text: str) -> None:
        if len(self.violations) < 20:
            self.violations.append(Violation(invariant, text, round(self._clock(), 3)))

    # ---- control ---------------------------------------------------------------------------------

    def handled(self, control: Control, event: on.ControlEvent, actions: list[do.ControlAction]) -> None:
        """Control has handled ``event`` and orders ``actions``."""
        ledger = self.control = self._of(control)
        self._told(ledger, event)
        for action in actions:
            self._ordered(ledger, action)
        self._account(ledger, control)

    def _of(self, control: Control) -> ControlLedger:
        """The ledger of one life of control."""
        ledger: ControlLedger = control.__dict__.setdefault("_ledger_in_world", ControlLedger())
        return ledger

    def recorded(self, control: Control, whole: bytes) -> None:
        """Its state was written down: what is restored from that continues from here."""
        self.bases[whole] = self._of(control).copy()

    def restored(self, control: Control, whole: bytes) -> None:
        """Another life begins with what was written down."""
        if whole not in self.bases:
            self.violated("restore", "control was restored to a state that it never was in")
            return
        control.__dict__["_ledger_in_world"] = self.bases[whole].copy()

    def _told(self, ledger: ControlLedger, event: on.ControlEvent) -> None:
        match event:
            case on.BatchTrained():
                ledger.trained |= ledger.batched.pop(event.batch_id, frozenset())
            case on.WeightsLive():
                if event.policy_version <= ledger.live:
                    self.violated("versions", f"version {event.policy_version} went live after {ledger.live}")
                ledger.live = event.policy_version
            case on.TrajectoryFailed():
                self._ended(ledger, [event.id])

    def _ordered(self, ledger: ControlLedger, action: do.ControlAction) -> None:
        match action:
            case do.LaunchGroup():
                if twice := ledger.issued.intersection(action.ids):
                    self.violated("once", f"{sorted(map(str, twice))} were issued twice")
                ledger.issued.update(action.ids)
                ledger.group_of[action.group_id] = action.ids
            case do.Drop():
                self._ended(ledger, action.ids)
            case do.TrainGroupNow():
                ids = set(action.ids)
                alive = {t for t in ledger.group_of.get(action.group_id, ()) if t not in ledger.ended}
                if ids != alive:
                    self.violated("groups", f"group {action.group_id} is trained as {len(ids)} of {len(alive)} alive")
                if ids & (ledger.ended | ledger.trained):
                    self.violated("once", f"group {action.group_id} had ended and is trained")
                ledger.batched[action.batch_id] |= ids
                ledger.in_batch[action.group_id] = action.ids

            case do.StepOptimizer():
                ledger.closed.add(action.batch_id)

    def _ended(self, ledger: ControlLedger, ids: Iterable[TrajectoryId]) -> None:
        for trajectory in ids:
            if trajectory in ledger.ended or trajectory not in ledger.issued:
                continue  # a late result of what had ended
            if trajectory in ledger.trained:
                self.violated("once", f"{trajectory} was trained and then dropped")
                continue
            for batch_id, batch in ledger.batched.items():
                if trajectory in batch:  # a drain ends what is in a batch that is still open
                    ledger.batched[batch_id] = batch - {trajectory}
                    if batch_id in ledger.closed:
                        self.violated("once", f"{trajectory} is in closed batch {batch_id} and was dropped")
            ledger.ended.add(trajectory)

    def _account(self, ledger: ControlLedger, control: Control) -> None:
        said = control.state.accounting()
        mine = (len(ledger.issued), len(ledger.trained), len(ledger.ended))
        theirs = (said.issued, said.trained, sum(said.dropped.values()))
        if mine != theirs:
            self.violated("accounting", f"issued, trained, dropped are {mine}; control says {theirs}")
        for text in violations(control.state, control.rules):
            invariant, _, what = text.partition(": ")
            self.violated(invariant, what)

    # ---- streams ---------------------------------------------------------------------------------

    def accepted(self, endpoint: str, sender: Any, kept: int, window: int) -> None:
        """An item of ``sender``'s life came in at ``endpoint``, where ``kept`` wait to be taken."""
        newest = self._newest_life.get((endpoint, sender.name), 0)
        if sender.incarnation < newest:
            self.violated("lives", f"{endpoint} took an item of {sender} after one of its life {newest}")
        self._newest_life[endpoint, sender.name] = sender.incarnation
        if kept > window:
            self.violated("memory", f"{endpoint} keeps {kept} items, and its window is {window}")

    def life_heard(self, receiver: str, sender: str) -> int:
        """The newest life of ``sender`` of which an item came in at a stream of ``receiver``."""
        lives = (n for (at, name), n in self._newest_life.items() if name == sender and f"/{receiver}." in at)
        return max(lives, default=0)

    # ---- engines ---------------------------------------------------------------------------------

    def asked(self, engine: str, request: Generate) -> None:
        """What an engine is asked to go on with: a prompt, and what was sampled after it. Who was issued and never
        written down may be issued again for another prompt, so the prompt is that of the life that asks."""
        whole = completion_id_of(request.request_id)
        ids = self.control.group_of.get(int(whole.split(".", 1)[0]), ())
        given = len(request.token_ids) - request.prefix_length - request.unverified_tokens
        prompt = request.token_ids[: max(given, 0)].tobytes()
        if self.prompt_of.setdefault(ids[0].prompt_id if ids else whole, prompt) != prompt:
            self.violated(
                "tokens", f"{engine} is asked for {request.request_id} with {given} tokens as its prompt, another"
            )

    def sampled_by(self, engine: str, request_id: str, completion: Completion) -> None:
        """What an engine returned for one part of a trajectory."""
        whole = completion_id_of(request_id)
        if completion.token_ids:
            self.sampled[whole].add((completion.token_ids.tobytes(), completion.behavior_logprobs.tobytes()))

    def token_by(self, engine: str, claimed: int, live_hash: int) -> None:
        """An engine samples under the label ``claimed`` with weights of ``live_hash``."""
        if live_hash not in self.hash_of.get(claimed, ()):
            self.violated(
                "weights", f"{engine} samples as version {claimed} with weights that were not published as it"
            )

    def committed(self, engine: str, version: int) -> None:
        """An engine's life holds ``version`` now. ``engine`` names the life."""
        before = self.engine_version.get(engine, -1)
        if version < before:
            self.violated("versions", f"{engine} went from version {before} back to {version}")
        quiet = self._faults_until < self._committed_at.get(engine, -1.0)
        if version in self.early and before == version - 1 and quiet:
            self.violated("weights", f"version {version} was acknowledged before {engine}, which served, held it")
        self.engine_version[engine], self._committed_at[engine] = version, self._clock()
        self.held.add(version)

    # ---- rewards ---------------------------------------------------------------------------------

    def rewarded(self, tokens: bytes, value: float) -> None:
        """The user's function returned ``value``."""
        self.returned[tokens].add(value)

    # ---- trainer ---------------------------------------------------------------------------------

    def published(self, version: int, state_hash: int) -> None:
        """The trainer holds ``version`` with this hash of all ranks."""
        self.hash_of[version].add(state_hash)
        self.version_of[stamp_of(state_hash)] = version

    def acknowledged(self, version: int) -> None:
        """A rank hears that every engine holds it. Where all were lost meanwhile, none does; but one that takes it
        later, and to which nothing had been done since it took the version before, was not lost."""
        if version not in self.held:
            self.early.add(version)

    def faulted(self, seconds: float) -> None:
        """Something is done to somebody, for so long."""
        self._faults_until = max(self._faults_until, self._clock() + seconds)

    def given(self, rank: int, life: int, version: int, group: TrainingGroup) -> None:
        """A rank, whose weights are of ``version``, was given a group to train."""
        ordered = self.control.in_batch.get(group.group_id)
        ids = tuple(s.id for s in group.samples)
        if ordered is None or set(ordered) != set(ids):
            self.violated("groups", f"group {group.group_id} reached trainer-{rank} as {len(ids)} samples")
        for sample in group.samples:
            self._check_sample(sample, version)
        self.open_batches[rank, life].extend(group.samples)

    def _check_sample(self, sample: TrainingSample, version: int) -> None:
        count = sample.trained_tokens
        tokens = sample.token_ids[-count:]
        stamps = sample.behavior_logprobs[-count:]
        parts = self.sampled.get(str(sample.id), set())
        if not _is_joined(tokens.tobytes(), stamps.tobytes(), parts):
            self.violated("tokens", f"{sample.id} is trained on tokens that no engine sampled for it")
        if sample.reward not in self.returned.get(tokens.tobytes(), ()):
            self.violated("rewards", f"{sample.id} has reward {sample.reward}, which was never returned for it")
        versions = [self.version_of.get(stamp, -1) for stamp in set(stamps)]
        if min(versions) != sample.oldest_version or max(versions) != sample.newest_version:
            self.violated(
                "versions",
                f"{sample.id} says versions {sample.oldest_version} to {sample.newest_version}, its tokens say "
                f"{min(versions)} to {max(versions)}",
            )
        if version - min(versions) > self._max_staleness:
            self.violated("staleness", f"{sample.id}: a token of version {min(versions)} is trained by {version}")

    def closed(self, rank: int, life: int, close: CloseBatch, version: int, ranks: int) -> None:
        """A rank steps; when all have, the version is trained, and never by another batch."""
        samples = self.open_batches.pop((rank, life), [])
        made = close.policy_version
        self.held.discard(made)
        self.early.discard(made)
        if made != version + 1:
            self.violated("once", f"trainer-{rank} holds {version} and is ordered to make {made}")
        self.closing[made][rank] = tuple(f"{s.id}:{s.reward}:{digest_of(s.token_ids.tobytes())}" for s in samples)
        if len(self.closing[made]) < ranks:
            return
        names = tuple(sorted(name for part in self.closing.pop(made).values() for name in part))
        if self.batches.setdefault(made, names) != names:
            self.violated("resume", f"version {made} was trained by another batch before")
        if len(names) != close.samples:
            self.violated("groups", f"version {made} is to be of {close.samples} samples and {len(names)} were trained")
        self.max_version = max(self.max_version, made)

    # ---- the end ---------------------------------------------------------------------------------

    def check_end(self, steps: int | None) -> None:
        """The run ended well. ``steps``: that it was to make (None: it was stopped)."""
        control = self.control
        left = control.issued - control.trained - control.ended
        if left:
            self.violated("accounting", f"{len(left)} trajectories never ended: {sorted(map(str, left))[:5]}")
        given = Counter(name.split(":", 1)[0] for names in self.batches.values() for name in names)
        if twice := [name for name, count in given.items() if count > 1]:
            self.violated("once", f"trained in two batches: {twice[:5]}")
        if set(given) != set(map(str, control.trained)):
            self.violated(
                "accounting", f"ranks trained {len(given)} trajectories, control counts {len(control.trained)}"
            )
        if steps is not None and self.max_version != steps:
            self.violated("progress", f"the run ended with version {self.max_version} of {steps}")


def _is_joined(tokens: bytes, stamps: bytes, parts: set[tuple[bytes, bytes]]) -> bool:
    """Whether both are ``parts`` in some order, one after the other."""
    if not tokens:
        return True
    return any(
        part
        and tokens.startswith(part)
        and stamps.startswith(logprobs)
        and _is_joined(tokens[len(part) :], stamps[len(part) :], parts)
        for part, logprobs in parts
    )
