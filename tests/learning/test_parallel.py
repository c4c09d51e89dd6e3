"""Ranks that share layers, experts, rows or replicas, as real processes, against one rank: gradients, weights after
some steps, what is published, checkpoints. With STREAMRL_EVERY_LAYOUT=1 in the environment every family in every
layout, ten steps, and planted bugs: that takes minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from builders.files import ROOT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from parallel_process import Case  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from sample_groups import VOCABULARY  # noqa: E402

from streamrl.base.errors import StreamRLError  # noqa: E402
from streamrl.learning.options import TrainerOptions  # noqa: E402
from streamrl.learning.state import durable_files  # noqa: E402
from streamrl.recipe.objective import Objective, objective_settings  # noqa: E402
from streamrl.recipe.sections import Gathered  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.long]
SCRIPT = Path(__file__).parent / "parallel_process.py"
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, tie_word_embeddings=False),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SMALL, query_pre_attn_scalar=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, tie_word_embeddings=False, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
    ),
}
LAYOUTS = {  # ranks, tensor parallel, expert parallel, replicas; context parallel where it is not 1
    "one": (1, 1, 1, 1), "fsdp2": (2, 1, 1, 1), "hsdp2": (2, 1, 1, 2), "hsdp2x2": (4, 1, 1, 2), "tp2": (2, 2, 1, 1),
    "tp2fsdp2": (4, 2, 1, 1), "ep2": (2, 2, 2, 1), "ep2fsdp2": (4, 2, 2, 1), "fsdp4": (4, 1, 1, 1),
    "tp2hsdp2": (4, 2, 1, 2), "cp2": (2, 1, 1, 1, 2), "cp2fsdp2": (4, 1, 1, 1, 2), "cp2tp2": (4, 2, 1, 1, 2),
    "cp4": (4, 1, 1, 1, 4), "cp2hsdp2": (4, 1, 1, 2, 2),
}  # fmt: skip
EVERY = os.environ.get("STREAMRL_EVERY_LAYOUT") == "1"
TRAINED = [("qwen3", "tp2fsdp2"), ("qwen3", "hsdp2"), ("moe", "ep2"), ("gemma3", "cp2fsdp2")]
LOADED = ["one", "fsdp2"]
PLANTED: dict[str, str] = {}
if EVERY:
    TRAINED = [(model, layout) for model in MODELS for layout in ("fsdp2", "hsdp2x2", "tp2", "tp2fsdp2", "tp2hsdp2")]
    TRAINED += [("moe", "ep2"), ("moe", "ep2fsdp2")]
    TRAINED += [(model, layout) for model in ("llama", "qwen3", "gemma3") for layout in ("cp2", "cp2fsdp2")]
    TRAINED += [("qwen3", "cp2tp2"), ("qwen3", "cp4"), ("qwen3", "cp2hsdp2")]
    LOADED = ["one", "fsdp4", "hsdp2x2", "tp2", "tp2fsdp2"]
    PLANTED = {"no reduction": "tp2", "rows": "tp2", "twice": "hsdp2x2", "no sum": "cp2"}
STEPS = 10 if EVERY else 3
CUT = {  # ratios of whole sequences, and values of whole trajectories, where sequences are cut over ranks
    name: objective_settings(Objective(algorithm=name, kl_coefficient=0.1, entropy_coefficient=0.01))
    for name in ("gspo", "ppo")
} | {"custom": objective_settings(Objective(function=f"{ROOT}/examples/custom_loss.py:gmpo"))}


class Outputs(NamedTuple):
    """What the ranks of each case wrote. Parts that several have must agree; distances are relative to norms."""

    directory: Path

    def of(self, name: str) -> list[dict[str, np.ndarray]]:
        return [dict(np.load(path)) for path in sorted(self.directory.glob(f"{name}.?.npz"))]

    def hash_of(self, name: str, when: str = "hash") -> int:
        return sum(int(rank[when]) for rank in self.of(name)) % (1 << 64)

    def whole(self, name: str, kind: str) -> dict[str, np.ndarray]:
        joined: dict[str, np.ndarray] = {}
        for rank in self.of(name):
            for key in (key for key in rank if key.startswith(f"{kind}/")):
                tensor = key.partition("/")[2]
                full = joined.setdefault(tensor, np.full(rank[f"shape/{tensor}"], np.nan, dtype=np.float64))
                place = np.ix_(*(rank[f"held/{side}/{tensor}"] for side in range(full.ndim)))
                before = full[place]
                assert (np.isnan(before) | np.isclose(before, rank[key], rtol=1e-4, atol=1e-6)).all(), tensor
                full[place] = rank[key]
        assert not any(np.isnan(full).any() for full in joined.values())
        return joined

    def distance(self, name: str, other: str, kind: str) -> float:
        lefts, rights = self.whole(name, kind), self.whole(other, kind)
        assert lefts.keys() == rights.keys()
        return max(float(np.linalg.norm(lefts[n] - rights[n]) / np.linalg.norm(rights[n])) for n in rights)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    directory = tmp_path_factory.mktemp("p")
    for name, config in MODELS.items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config()).bfloat16().save_pretrained(directory / name)
    cases: list[list[Case]] = []

    def add(name: str, model: str, layout: str, steps: int = 0, planted: str = "", save: str = "", **more: Any) -> None:
        ranks, tensor, expert, replicas, context = (*LAYOUTS[layout], 1)[:5]
        cases.append([])
        for rank in range(ranks):
            options = TrainerOptions(
                model_path=str(directory / model), run_id="p", rank=rank, ranks=ranks, device="cpu", threads=1,
                weights_endpoint=f"ipc://{directory}/w{len(cases)}.{rank}", learning_rate=1e-3, micro_batch_tokens=64,
                rendezvous=f"file://{directory}/{name}.meet" if ranks > 1 else "", collective_timeout_s=200.0,
                gathered=Gathered.LAYER, tensor_parallel_size=tensor, expert_parallel_size=expert, replicas=replicas,
                context_parallel_size=context, beta2=0.95, **more,
            )  # fmt: skip
            out = str(directory / f"{name}.{rank}.npz")
            cases[-1].append(
                Case(
                    options=options,
                    out=out,
                    steps=steps,
                    prompts=70 if name.startswith(tuple(CUT)) else 6,
                    planted=planted,
                    save=save,
                )
            )

    checkpoint = str(directory / "tp2fsdp2.ckpt")
    for layout in ("one", "cp2", "fsdp2"):
        for name, objective in CUT.items() if layout != "fsdp2" else [("custom", CUT["custom"])]:
            imitated = {"learn_observations": 0.3} if name == "gspo" else {}
            add(f"{name}-{layout}", "qwen3", layout, steps=2, streaming=False, objective=objective, **imitated)
    for model in dict(TRAINED):
        add(f"{model}-one", model, "one", steps=STEPS)
    for model, layout in TRAINED:
        written = checkpoint if (model, layout) == ("qwen3", "tp2fsdp2") else ""
        add(f"{model}-{layout}", model, layout, steps=STEPS, save=written)
    for layout in LOADED:
        add(f"loaded-{layout}", "qwen3", layout, resume_from=checkpoint, save=str(directory / f"{layout}.again"))
    for planted, layout in PLANTED.items():
        add(planted, "qwen3", layout, steps=1, planted=planted)
    path = directory / "cases.json"
    path.write_bytes(msgspec.json.encode(cases))
    subprocess.run([sys.executable, SCRIPT, path], env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=1500, check=True)
    return Outputs(directory)


@pytest.mark.parametrize(("model", "layout"), TRAINED)
def test_any_layout_trains_and_publishes_as_one_rank(outputs: Outputs, model: str, layout: str) -> None:
    name, one = f"{model}-{layout}", f"{model}-one"
    ranks, [expected] = outputs.of(name), outputs.of(one)
    assert outputs.hash_of(name) == outputs.hash_of(one)
    assert outputs.hash_of(name, "after") == int(ranks[0]["exported"])
    assert sum(int(rank["elements"]) for rank in ranks) == int(expected["elements"])  # each byte once
    for key in (key for key in expected if key.startswith(("loss/", "norm/"))):
        assert all(float(rank[key]) == float(ranks[0][key]) for rank in ranks)
        assert float(ranks[0][key]) == pytest.approx(float(expected[key]), rel=1e-3, abs=1e-5)
    assert max(outputs.distance(name, one, kind) for kind in ("gradient", "master")) < 1e-5


@pytest.mark.parametrize(("name", "layout"), [*((name, "cp2") for name in CUT), ("custom", "fsdp2")])
def test_objectives_of_whole_sequences_see_over_the_cuts(outputs: Outputs, name: str, layout: str) -> None:
    """Those of the catalog, and a loss of one's own that reads whole trajectories."""
    ranks, [one] = outputs.of(f"{name}-{layout}"), outputs.of(f"{name}-one")
    for rank in ranks:
        assert layout != "cp2" or (int(rank["cut_prompts"]) and int(rank["cut_continuations"]))
    for version in range(2):
        assert float(ranks[1][f"loss/{version}"]) == pytest.approx(float(one[f"loss/{version}"]), rel=1e-3, abs=1e-5)
    assert outputs.distance(f"{name}-{layout}", f"{name}-one", "gradient") < 1e-5
    assert outputs.distance(f"{name}-{layout}", f"{name}-one", "master") < 1e-5


def test_a_checkpoint_goes_on_in_any_layout(outputs: Outputs) -> None:
    exported = load_file(outputs.directory / "tp2fsdp2.ckpt" / "hf" / "model.safetensors")
    for layout in LOADED:
        assert outputs.distance(f"loaded-{layout}", "qwen3-tp2fsdp2", "master") == 0
        assert outputs.hash_of(f"loaded-{layout}") == outputs.hash_of("loaded-one")
        again = load_file(outputs.directory / f"{layout}.again" / "hf" / "model.safetensors")
        assert again.keys() == exported.keys() and all(torch.equal(again[name], exported[name]) for name in exported)
    lost = sorted((outputs.directory / "tp2fsdp2.ckpt" / "trainer").iterdir())[-1]
    lost.unlink()  # of another rank than the one that loads
    with pytest.raises(StreamRLError, match=f"trainer/{lost.name} cannot be read .*; resume from another checkpoint"):
        durable_files.verify(lost.parent.parent)


@pytest.mark.skipif(not EVERY, reason="needs STREAMRL_EVERY_LAYOUT=1")
def test_planted_bugs_are_found(outputs: Outputs) -> None:
    [found, *_], right = outputs.of("no reduction"), outputs.whole("qwen3-one", "gradient")
    norms = [name for name in right if "q_norm" in name] or pytest.fail("no norms")
    assert not any(np.allclose(found[f"gradient/{name}"], right[name], rtol=1e-2) for name in norms)
    assert outputs.distance("no sum", "qwen3-one", "gradient") > 1e-2
    assert outputs.hash_of("qwen3-one") not in [outputs.hash_of(name) for name in ("rows", "twice")]
