"""Inputs on the way from reward to gradient: turns without rewards, passes of odd sizes, checkpoints of other meaning,
and experts of every family. Each row is a name, what comes out, and what is right."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from campaigns.cases import Case, add_case_arguments
from streamrl.base.types import FinishReason
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.policies.round_policies import make_control
from streamrl.control.settings import control_settings
from streamrl.recipe.environment import Credit
from streamrl.recipe.objectives.catalog import ADVANTAGES
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Lora

DEMO = Path(__file__).parents[1] / "examples" / "sort" / "recipe.toml"


# ---- turns: (rewards of the turns, what the trajectory earned beside them) of each sibling ------------------------

TURNS: dict[str, list[tuple[list[float], float]]] = {
    "nobody earns": [([0, 0], 0), ([0, 0, 0], 0)],
    "all earn the same in other turns": [([1, 0], 0), ([0, 1], 0)],
    "one earns nothing": [([1, 0, 0.5], 1), ([0, 0, 0], 0), ([0, 1, 0], 0)],
    "one ends in turn 1": [([1], 0), ([0, 0, 1], 0), ([0, 1, 0], 1)],
    "only one is left": [([1, 0, 2], 0)],
    "rewards that cancel": [([1, -1], 0), ([0, 0], 0), ([-1, 1], 0)],
    "only what is earned at the end": [([0, 0], 1), ([0], 0), ([0, 0, 0], 0.5)],
    "tenths that are no binary fractions": [([0.1, 0.2], 0), ([0.3, 0.0], 0), ([0.0, 0.3], 0)],
    "punished in turn 1": [([-1], 0), ([-1, 0], 1), ([0, 0], 0)],
    "large beside small": [([1e6, 0], 0), ([0, 1e-3], 0), ([0, 0], 0)],
}


def _advantages(group: list[tuple[list[float], float]], credit: Credit, estimator: str) -> list[list[float]]:
    from streamrl.learning.objective.advantages import turn_advantages

    totals = [sum(earned) + rest for earned, rest in group]
    of_turns = turn_advantages(totals, [earned for earned, _ in group], credit, ADVANTAGES[estimator])
    return [[_rounded(value) for value in row[: len(group[i][0])]] for i, row in enumerate(of_turns)]


def _rounded(value: Any) -> float:
    """To five digits: the trainer has float32."""
    return float(f"{float(value):.5g}") + 0.0


def _by_definition(group: list[tuple[list[float], float]], credit: Credit, estimator: str) -> list[list[float]]:
    """docs/environments.md, in float64."""
    longest = max(len(earned) for earned, _ in group)

    def compared(values: list[float]) -> Any:
        centred = np.array(values) - np.mean(values)
        if len(values) < 2 or np.abs(centred).max() <= 1e-12 * max(map(abs, values)):
            return np.zeros(len(values))
        return centred * (len(values) / (len(values) - 1) if estimator == "leave_one_out" else 1)

    def of_turn(turn: int) -> Any:
        if credit is Credit.TURN:
            return compared([(earned + [0.0] * longest)[turn] for earned, _ in group]) + compared([r for _, r in group])
        return compared([sum(earned[min(turn, len(earned) - 1) :]) + rest for earned, rest in group])

    return [[_rounded(of_turn(t)[i]) for t in range(len(earned))] for i, (earned, _) in enumerate(group)]


# ---- passes -------------------------------------------------------------------------------------------------------


def _drawn(prompts: int, *overrides: str) -> tuple[int, int]:
    """Prompts that a run of ``prompts`` draws, and those of them that are trained, in any order of answers."""
    recipe = load_recipe(
        DEMO, ["rollout.prompts_per_batch=8", "rollout.group_size=4", f"run.advanced.prompts={prompts}", *overrides]
    )
    control, chance = make_control(control_settings(recipe)), random.Random(0)
    events: list[on.ControlEvent] = [on.RunBegan()]
    running: list[Any] = []
    drawn, trained, ended = 0, set[str](), False
    while not ended:
        if events:
            event = events.pop(0)
        else:
            identity = running.pop(chance.randrange(len(running)))
            version = control.state.live_version
            event = on.TrajectoryScored(
                id=identity, reward=chance.random(), tokens=min(96, int(chance.lognormvariate(2.2, 1.0)) + 1),
                finish_reason=FinishReason.STOP, oldest_version=version, newest_version=version,
            )  # fmt: skip
        for order in control.handle(event):
            match order:
                case do.DrawPrompts(count=count):
                    events.append(on.PromptsDrawn(prompt_ids=tuple(f"p{drawn + i}" for i in range(count))))
                    drawn += count
                case do.LaunchGroup(ids=ids):
                    running += ids
                case do.Drop(ids=ids):
                    running = [one for one in running if one not in set(ids)]
                case do.TrainGroupNow(ids=ids):
                    trained.add(ids[0].prompt_id)
                case do.StepOptimizer():
                    events.append(on.BatchTrained(batch_id=order.batch_id, policy_version=order.policy_version))
                case do.PublishWeights(policy_version=version):
                    events.append(on.WeightsLive(policy_version=version))
                case do.WriteCheckpoint(policy_version=version):
                    events.append(on.CheckpointDone(policy_version=version))
                case do.Evaluate(policy_version=version):
                    events.append(on.EvaluationDone(policy_version=version))
                case do.End():
                    ended = True
    return drawn, len(trained)


PASSES = {
    "one prompt": (1, []),
    "one less than a batch": (7, []),
    "a batch": (8, []),
    "one more": (9, []),
    "long rounds": (61, ["rollout.rounds=tail_batching"]),
    "long rounds of four batches": (64, ["rollout.system=fastest", "rollout.rounds=tail_batching"]),
    "cohorts by length": (50, ["rollout.system=sortedrl"]),
    "continuous": (45, ["rollout.rounds=continuous", "rollout.max_staleness=2"]),
    "groups of chosen sizes": (64, ["rollout.system=sagc", "run.steps=40"]),
    "rollpacker": (70, ["rollout.system=rollpacker"]),
}

# ---- checkpoints: what is edited, and the keys of the refusals ---------------------------------------------------

MEANINGS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "the same": ({}, {}, []),
    "alpha": ({"lora_alpha": 32}, {}, ["lora.alpha"]),
    "alpha as a float": ({"lora_alpha": 16.0}, {}, []),
    "rank": ({"r": 2}, {}, ["lora.rank"]),
    "rslora": ({"use_rslora": True}, {}, ["lora.rslora"]),
    "dora": ({"use_dora": True}, {}, ["lora.dora"]),
    "a config of an older peft, without dora": ({"use_dora": None}, {}, []),
    "another epsilon": ({}, {"rms_norm_eps": 1e-3}, ["model.path"]),
    "another base of rope": ({}, {"rope_theta": 1e6}, ["model.path"]),
    "ties the head": ({}, {"tie_word_embeddings": True}, ["model.path"]),
    "another activation": ({}, {"hidden_act": "gelu"}, ["model.path"]),
    "another end of turn": ({}, {"eos_token_id": [1, 2]}, []),
    "saved by another transformers": ({}, {"transformers_version": "9.9", "torch_dtype": "float16"}, []),
}


def _refused(adapter: dict[str, Any], config: dict[str, Any]) -> list[str]:
    from streamrl.learning.state.tensor_meaning import other_meanings

    saved = {"r": 4, "lora_alpha": 16, "use_rslora": False, "use_dora": False} | adapter
    model = {"model_type": "llama", "hidden_size": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu"}
    model |= {"tie_word_embeddings": False, "eos_token_id": 2}
    with tempfile.TemporaryDirectory() as name:
        files = {"checkpoint/adapter/adapter_config.json": saved, "checkpoint/hf/config.json": model}
        for path, content in (files | {"model/config.json": model | config}).items():
            file = Path(name, path)
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
        problems = other_meanings(Path(name, "checkpoint"), Lora(rank=4), str(Path(name, "model")))
        return [problem.partition(":")[0] for problem in problems]


# ---- experts ------------------------------------------------------------------------------------------------------

EXPERTS = {
    "Mixtral": True, "Qwen2Moe": True, "Qwen3Moe": True, "Olmoe": True, "DeepseekV3": True, "GptOss": True,
    "Glm4Moe": True, "Dots1": True, "Phimoe": False,
}  # fmt: skip


def _replayable(kind: str) -> bool:
    """Whether a forward shows that the routers of a family choose by torch.topk."""
    import torch
    import transformers

    from streamrl.learning.model.routers import routers_of

    sizes: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 32, "n_shared_experts": 1,
        "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 8, "n_group": 2,
        "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "topk_group": 1, "q_lora_rank": 16,
        "first_k_dense_replace": 0, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mlp_only_layers": [],
    }  # fmt: skip
    if kind == "Phimoe":
        sizes["hidden_size"] = 64
    if kind == "GptOss":
        sizes["layer_types"] = ["full_attention"] * 2
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes)).eval()
    routers = routers_of(model)
    assert routers is not None
    with torch.no_grad():
        model(torch.arange(3, 13)[None])
    return routers.replayable


def cases() -> Iterator[Case]:
    """All cases."""
    for name, group in TURNS.items():
        for credit in (Credit.TURN, Credit.RETURN_TO_GO):
            for kind in ("group_mean", "leave_one_out"):
                right = _by_definition(group, credit, kind)
                yield Case(f"{name}, {credit}, {kind}", partial(_advantages, group, credit, kind), right)
    for name, (prompts, overrides) in PASSES.items():
        yield Case(f"a pass: {name}", partial(_drawn, prompts, *overrides), (prompts, prompts))
    for name, (adapter, config, keys) in MEANINGS.items():
        yield Case(f"a checkpoint: {name}", partial(_refused, adapter, config), keys)
    for kind, right_answer in EXPERTS.items():
        yield Case(f"experts: {kind}", partial(_replayable, kind), right_answer)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_case_arguments(command, cases)
