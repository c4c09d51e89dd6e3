"""Adapters that a real engine computes beside the base: what it samples with is what the trainer differentiates."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from streamrl.base.errors import EngineError
from streamrl.base.messages import Generate, PauseMode, announcement_of
from streamrl.base.types import Completion, token_array
from streamrl.engines.remote_engine import RemoteEngine
from streamrl.recipe.sections import Lora, LoraSync

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("peft")
pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.filterwarnings("ignore::ResourceWarning")]

TOKENS = token_array([2, 9, 30, 4, 17, 5, 11, 8, 23, 6, 31, 3, 12, 19, 7, 28])
LORA = Lora(rank=3, alpha=5.0, sync=LoraSync.ADAPTER, targets=("q_proj", "v_proj", "down_proj", "up_proj"))


class Trainer:
    """A policy with its adapter, and its publisher."""

    def __init__(self, model: Path, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        from streamrl.learning.model.policy import PackedPolicy
        from streamrl.learning.options import TrainerOptions
        from streamrl.learning.updates import make_weights
        from streamrl.weights.publish.torch_tensors import start_publisher

        self.options = TrainerOptions(
            model_path=str(model), run_id="r", weights_endpoint=f"ipc://{directory}/w", lora=LORA
        )
        self.policy = PackedPolicy(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())
        self.weights = make_weights(self.options, self.policy)
        self.publisher = start_publisher(self.options, self.weights.shards, torch.device("cpu"))
        self.version = -1

    def step(self, seed: int) -> None:
        """Move the adapter, less and less, so that a delta has few elements."""
        generator = torch.Generator().manual_seed(seed)
        moved = torch.randn(self.weights.masters.full().shape, generator=generator)
        self.weights.masters.load(self.weights.masters.full() + 0.06 * moved * (moved.abs() > 0.5 * seed))
        self.weights.refresh_forward()

    def publish(self) -> Any:
        self.version += 1
        made = self.publisher.publish(self.version, self.weights.values())
        return announcement_of(self.version, [made])

    @torch.no_grad()
    def logprobs(self, model: Any = None) -> Any:
        logits = (model or self.policy.hugging_face)(torch.tensor(TOKENS)[None]).logits[0, :-1]
        chosen = torch.tensor(TOKENS)[1:, None]
        return torch.log_softmax(logits, -1).gather(1, chosen)[:, 0].numpy()

    def merged(self) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.options.model_path, dtype=torch.float32)
        model.load_state_dict(self.weights.full_published(), strict=False)
        return self.logprobs(model)


def request(**fields: Any) -> Generate:
    return Generate(
        **({"request_id": "r", "token_ids": TOKENS, "max_tokens": 1, "seed": 0, "temperature": 1.0} | fields)
    )


async def push(engine: RemoteEngine, announcement: Any) -> None:
    await engine.stage(announcement)
    await engine.pause(PauseMode.KEEP, clear_cache=True)
    done = await engine.commit(announcement.policy_version)
    await engine.resume()
    assert done.state_hash == announcement.state_hash, "read back from what vLLM computes with"


async def computes_what_the_trainer_does(engine: RemoteEngine, trainer: Trainer) -> None:
    scored = await engine.generate(request(scored_tokens=len(TOKENS) - 1))
    assert {span.policy_version for span in scored.version_spans} == {trainer.version}
    assert np.abs(np.array(scored.behavior_logprobs) - trainer.logprobs()).max() < 1e-4
    # Merged weights are rounded to 8 bits of mantissa, and those of this model are large.
    assert np.abs(np.array(scored.behavior_logprobs) - trainer.merged()).max() < 5e-2


@pytest.mark.long
async def test_an_adapter_is_served_beside_the_base(
    tiny_model: Path, tiny_options: Callable, hosted: Callable, socket_directory: Path
) -> None:
    """Versions with requests in flight, which go on under the new one; the successor of a killed engine takes the live
    version, whole."""
    trainer = Trainer(tiny_model, socket_directory)
    options = msgspec.structs.replace(tiny_options(socket_directory), adapter=LORA)
    base = trainer.logprobs()
    completions: list[Completion] = []

    async def sample(engine: RemoteEngine, number: int) -> None:
        completions.append(await engine.generate(request(request_id=f"long-{number}", seed=number, max_tokens=250)))

    try:
        async with hosted(options, socket_directory) as (engine, host):
            await push(engine, trainer.publish())
            await computes_what_the_trainer_does(engine, trainer)
            assert np.abs(trainer.logprobs() - base).max() < 1e-6, "B is 0"
            async with anyio.create_task_group() as group:
                for number in range(4):
                    group.start_soon(sample, engine, number)
                for seed in range(1, 4):
                    await anyio.sleep(0.03)
                    trainer.step(seed)
                    announced = trainer.publish()
                    assert announced.base_version == trainer.version - 1
                    await push(engine, announced)
                    await computes_what_the_trainer_does(engine, trainer)
            assert np.abs(trainer.logprobs() - base).max() > 0.05
            assert any(len(one.version_spans) > 1 for one in completions)
            os.kill(host.pid, signal.SIGKILL)
            with pytest.raises(EngineError):
                await engine.checksums()
        async with hosted(options, socket_directory) as (engine, _):
            await push(engine, announcement_of(trainer.version, [trainer.publisher.publish_anchor(trainer.version)]))
            await computes_what_the_trainer_does(engine, trainer)
    finally:
        trainer.publisher.close()
