"""Outputs that stay in vLLM's core: the host gets what it would have got token by token, in one piece."""

from __future__ import annotations

import enum
import queue
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.engines.vllm import held_outputs
from streamrl.engines.vllm.held_outputs import HeldOutputs
from streamrl.engines.vllm.statistics import DraftFigures, EngineCounters


class Kind(enum.Enum):
    DELTA = 1
    FINAL_ONLY = 2


class Logprobs(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any
    cu_num_generated_tokens: Any = None


class Output(SimpleNamespace):  # of vLLM what is used; tests/engines/vllm/test_vllm_contract.py knows what is installed
    def __init__(self, request_id: str, new_token_ids: list[int], **fields: Any) -> None:
        once = ("new_logprobs", "new_prompt_logprobs_tensors", "prefill_stats", "finish_reason")
        more = ("pooling_output", "routed_experts", "new_sampling_mask", "prompt_token_id_logprobs")
        nothing = dict.fromkeys(once + more)
        super().__init__(**(nothing | fields), request_id=request_id, new_token_ids=new_token_ids)


class Outputs(SimpleNamespace):
    def __init__(self, outputs: list[Output], weight_version: str | None) -> None:
        super().__init__(outputs=outputs, weight_version=weight_version)


KINDS = (  # by the last digit of a request's name
    SimpleNamespace(output_kind=Kind.FINAL_ONLY, stop=[]),
    SimpleNamespace(output_kind=Kind.FINAL_ONLY, stop=[]),
    SimpleNamespace(output_kind=Kind.DELTA, stop=[]),
    SimpleNamespace(output_kind=Kind.FINAL_ONLY, stop=["end"]),
)
HELD = (0, 1)


class Core:
    """An engine core of which only outputs are there; ``number`` makes every token and logprob another one."""

    def __init__(self) -> None:
        self.scheduler: Any = SimpleNamespace(
            requests={},
            running=[],
            kv_cache_manager=SimpleNamespace(usage=0.25),
            schedule=lambda tokens, drafts={}: SimpleNamespace(
                num_scheduled_tokens=tokens,
                total_num_scheduled_tokens=sum(tokens.values()),
                scheduled_spec_decode_tokens=drafts,
            ),
            update_from_output=lambda scheduled: None,
            _preempt_request=lambda request: None,
        )
        self.sent: queue.Queue[Any] = queue.Queue()
        self.outputs = HeldOutputs(self.sent, self.scheduler)
        self.alone: list[Outputs] = []
        self.version = "1"
        self.number = 0

    def output(self, name: str, tokens: int, ends: str | None) -> Output:
        new = [self.number + i for i in range(tokens)]
        self.number += tokens
        logprobs = None
        if tokens and name.endswith("1"):
            width = 1 + self.number % 3  # as many columns as the others in the step ask for
            ids = np.repeat(np.array(new).reshape(-1, 1), width, axis=1)
            logprobs = Logprobs(ids, -ids.astype(np.float32), np.arange(len(new)))
        return Output(request_id=name, new_token_ids=new, new_logprobs=logprobs, finish_reason=ends)

    def step(self, tokens: dict[str, int], ending: set[str]) -> None:
        for name in tokens:
            self.scheduler.requests.setdefault(name, SimpleNamespace(sampling_params=KINDS[int(name[-1])]))
        made = [self.output(n, count, "stop" if n in ending else None) for n, count in tokens.items()]
        self.put(made, self.version)
        for name in ending:
            self.scheduler.requests.pop(name, None)

    def abort(self, names: list[str]) -> None:
        self.put([self.output(name, 0, "abort") for name in names], None)
        for name in names:
            self.scheduler.requests.pop(name, None)

    def put(self, made: list[Output], version: str | None) -> None:
        copies = [Output(**(vars(one) | {"new_token_ids": list(one.new_token_ids)})) for one in made]
        self.alone.append(Outputs(outputs=copies, weight_version=version))
        self.outputs.put_nowait((0, Outputs(outputs=made, weight_version=version)))

    def all_sent(self) -> list[Outputs]:
        return [self.sent.get_nowait()[1] for _ in range(self.sent.qsize())]


def received(messages: list[Outputs]) -> dict[str, list[Any]]:
    """What a host makes of them: of each request (token, logprob, rank, version) and its end."""
    found: dict[str, list[Any]] = {}
    for message in messages:
        for one in message.outputs:
            mine = found.setdefault(one.request_id, [])
            flat = one.new_logprobs
            for i, token in enumerate(one.new_token_ids):
                of_token = (
                    (flat.logprob_token_ids[i, 0], flat.logprobs[i, 0], flat.sampled_token_ranks[i]) if flat else ()
                )
                mine.append((token, *of_token, message.weight_version))
            if one.finish_reason is not None:
                mine.append(one.finish_reason)
    return found


NAMES = [f"request-{n}" for n in range(8)]  # two of each kind
STEPS = st.tuples(
    st.just("step"), st.dictionaries(st.sampled_from(NAMES), st.integers(1, 3)), st.sets(st.sampled_from(NAMES))
)
ABORTS = st.tuples(st.just("abort"), st.sets(st.sampled_from(NAMES)), st.none())
PUSHES = st.tuples(st.just("push"), st.none(), st.none())


def of_kind(name: str) -> str:
    return f"{name}-{int(name[-1]) % 4}"


@given(st.lists(STEPS | ABORTS | PUSHES, max_size=80))
def test_the_host_gets_the_same_in_one_piece(operations: list[Any]) -> None:
    core, sent = Core(), list[Outputs]()
    ended: set[str] = set()
    for kind, what, ending in operations:
        if kind == "step":
            tokens = {of_kind(name): count for name, count in what.items() if of_kind(name) not in ended}
            closed = {of_kind(name) for name in ending} & set(tokens)
            core.step(tokens, closed)
            ended |= closed
        elif kind == "abort":
            names = sorted({of_kind(name) for name in what} - ended)
            core.abort(names)
            ended.update(names)
        else:
            core.version = str(int(core.version) + 1)
        now = core.all_sent()
        sent += now
        for one in (one for message in now if message.weight_version == core.version for one in message.outputs):
            assert int(one.request_id[-1]) not in HELD or one.finish_reason is not None
        alone, held = received(core.alone), received(sent)
        assert all(held[name] == alone[name] for name in alone if int(name[-1]) not in HELD), "these stream"
    core.abort(sorted({of_kind(name) for name in NAMES} - ended))
    sent += core.all_sent()
    assert core.outputs._pending == {}
    alone, held = received(core.alone), received(sent)
    for name in alone:  # who has an end without tokens has no version to compare
        assert held[name] == alone[name], name


def test_steps_are_joined_and_pieces_of_prefill_kept() -> None:
    """Outputs of many steps are joined, and pieces of the prefill are kept."""
    core = Core()
    for step in range(1000):
        core.step({"a-1": 1, "b-0": 1}, {"a-1"} if step == 999 else set())
        assert all(len(held._logprobs) < 2 * held_outputs._JOIN_FROM for held in core.outputs._pending.values() if held)
    (message,) = core.all_sent()
    (output,) = message.outputs
    assert output.new_token_ids == list(range(0, 2000, 2)) == output.new_logprobs.logprob_token_ids[:, 0].tolist()
    core.outputs.discard(["b-0"])
    assert core.outputs._pending == {} and core.sent.empty()


def test_a_pauses_preemptions_are_no_want_of_memory() -> None:
    """Steps are counted, and requests that a pause preempts are no sign of scarce memory."""
    core, counters = Core(), EngineCounters()
    for preempts in (0, 1):
        core.scheduler._preempt_request("by a pause")

        def step(preempts: int = preempts) -> bool:
            scheduled = core.scheduler.schedule({"a-0": 1, "b-2": 4 if preempts else 400}, {"b-2": [7, 8, 9]})
            core.scheduler.update_from_output(scheduled)
            core.step({"a-0": 1, "b-2": 2}, set())
            for _ in range(preempts):
                core.scheduler._preempt_request("for want of memory")
            return preempts == 1

        assert core.outputs.count(counters, step) is (preempts == 1)
    load = counters.load(open_requests=2, paused=False)
    assert (load.generated_tokens, load.decode_steps, load.decode_tokens) == (6, 1, 2), "the first was a prefill"
    assert (load.drafted_tokens, load.accepted_tokens) == (3, 1)
    figures = DraftFigures(lambda: load)
    assert figures.take() == {"perf/draft_accepted_ratio": 1 / 3, "perf/draft_accepted_per_step": 0.5}
    assert figures.take() == {}, "nothing since"
    assert load.decode_s > 0 and load.preemptions == 1 and load.kv_cache_usage == 0.25


def test_outputs_are_counted_with_the_schedule_they_belong_to() -> None:
    """With async scheduling, a step of the core schedules one step of the model and gets the outputs of the last."""
    core, counters, last = Core(), EngineCounters(), list[Any]()
    for tokens in ({"a-0": 300, "b-0": 100}, {"a-0": 1, "b-0": 1}, {"a-0": 1, "b-0": 1}, {}):

        def step(tokens: dict[str, int] = tokens) -> bool:
            scheduled = core.scheduler.schedule(tokens)
            if last:
                core.scheduler.update_from_output(last.pop())
                core.step({"a-0": 1, "b-0": 1}, set())
            last.append(scheduled)
            return True

        core.outputs.count(counters, step)
    load = counters.load(open_requests=2, paused=False)
    assert (load.generated_tokens, load.decode_steps, load.decode_tokens) == (6, 2, 4)


LACKING = """
import logging, warnings
warnings.simplefilter("ignore")
from streamrl.engines.vllm.held_outputs import hold_outputs
from streamrl.engines.vllm.statistics import EngineCounters
from vllm.v1.engine.core import EngineCoreProc
logging.basicConfig(format="%(message)s")
before = EngineCoreProc._process_engine_step
del EngineCoreProc._send_abort_outputs
assert not hold_outputs(EngineCounters()) and EngineCoreProc._process_engine_step is before
"""


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.torch
def test_a_vllm_without_a_symbol_streams() -> None:
    done = subprocess.run([sys.executable, "-c", LACKING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "outputs leave vLLM's core token by token: type object 'EngineCoreProc' has no attribute" in done.stderr
