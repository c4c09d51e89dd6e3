"""The walk of a sampling setting, each of them: recipe, request on the wire, vLLM's parameters, trainer's logprobs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders.pretrained import write_tokenizer
from builders.recipe import small_recipe
from builders.stages import ZeroRewards

torch = pytest.importorskip("torch")

from streamrl.base.messages import Generate  # noqa: E402
from streamrl.base.stage_messages import LaunchTrajectory, TrajectoryOutcome  # noqa: E402
from streamrl.base.types import Completion, Prompt, SamplingSettings, TrajectoryId, token_array  # noqa: E402
from streamrl.comm.wire import OneFrameCodec  # noqa: E402
from streamrl.contracts import Journal  # noqa: E402
from streamrl.engines.async_llm.engine import bound_end_tokens, sampling_params  # noqa: E402
from streamrl.engines.simulated.engine import SimulatedEngine, SimulationOptions  # noqa: E402
from streamrl.engines.step_cost import StepCost  # noqa: E402
from streamrl.learning.batches.processed_logprobs import processed_logprobs  # noqa: E402
from streamrl.learning.model.policy import empty_micro_batch  # noqa: E402
from streamrl.learning.options import TrainerOptions, trainer_options  # noqa: E402
from streamrl.recipe.field_types import keys_of  # noqa: E402
from streamrl.recipe.sections import Recipe, Sampling  # noqa: E402
from streamrl.stages.episodes import Episodes  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.vllm]

VALUES: dict[str, Any] = {
    "temperature": 0.7, "top_p": 0.8, "top_k": 3, "min_p": 0.2, "max_tokens": 40, "min_tokens": 4, "stop": ("ab",)
}  # fmt: skip
"""A value of each setting that is not its default."""
LIMITS = {"max_tokens", "stop"}
"""Settings that end a completion, and change no probability of the tokens before."""


class Recorder(SimulatedEngine):
    async def generate(self, request: Generate) -> Completion:
        self.request = request
        return await super().generate(request)


async def request_of(recipe: Recipe) -> Generate:
    """The request that an engine process gets for a trajectory of ``recipe``."""
    engine = Recorder(SimulationOptions(step=StepCost(base_s=0.0, per_running_s=0.0)))
    await engine.start()
    episodes = Episodes(engine, recipe.sampling, ZeroRewards(), Journal())

    async def take(outcome: TrajectoryOutcome) -> None: ...

    async with episodes.running():
        identity = TrajectoryId(prompt_id="p", group_id=0, sample=0)
        prompt = Prompt(prompt_id="p", token_ids=token_array([2, 3]))
        episodes.launch(LaunchTrajectory(id=identity, prompt=prompt, group_size=1, seed=7), take)
    codec = OneFrameCodec(Generate)
    return codec.decode(codec.encode(engine.request))


def trained_logprobs(options: TrainerOptions) -> Any:
    """Logprobs and entropies, by the trainer, of six tokens of one turn."""
    logits = torch.linspace(-2, 2, 60).reshape(6, 10).sin() * 4
    row = empty_micro_batch(torch.device("cpu"))._replace(targets_N=logits.argmax(-1), places_N=torch.arange(6))
    return torch.stack(processed_logprobs(logits, row, slice(0, 6), options))


@pytest.mark.parametrize("name", SamplingSettings.__struct_fields__)
async def test_each_sampling_setting_reaches_engine_and_trainer(name: str, tmp_path: Path) -> None:
    value = VALUES[name]
    path = str(write_tokenizer(tmp_path / "model", {"added_tokens": []}))
    recipe = small_recipe(path, sampling=Sampling(**{name: value}))
    key = keys_of(Sampling)[name]
    assert key.text and value != key.default

    request = await request_of(recipe)
    assert getattr(request, name) == value
    given = getattr(sampling_params(request), name)
    assert (tuple(given) if isinstance(given, list) else given) == value

    options = trainer_options(recipe, 0, "run", "ipc://weights")
    assert getattr(options.sampling, name) == value
    ours = trained_logprobs(options)
    plain = trained_logprobs(trainer_options(small_recipe(path), 0, "run", "ipc://weights"))
    assert torch.equal(ours, plain) is (name in LIMITS), f"{name} has no effect on the logprobs of training"


@pytest.mark.parametrize(("named", "own"), [({"eos_token_id": [1, 40]}, 33), ({"eos_token_id": 40}, 1), ({}, None)])
def test_only_tokens_with_an_embedding_are_banned(named: dict[str, Any], own: int | None) -> None:
    """vLLM bans the end tokens that it reads itself, too: on a GPU at their place in memory, whatever their size."""
    llm = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 32)),
        input_processor=SimpleNamespace(generation_config_fields=named),
        renderer=SimpleNamespace(get_eos_token_id=lambda: own),
    )
    bound_end_tokens(llm)
    request = Generate(request_id="0.0.0", token_ids=token_array([2]), max_tokens=8, min_tokens=4, seed=1)
    params = sampling_params(request, stop_token_ids=[2])
    params.update_from_generation_config(named, llm.renderer.get_eos_token_id())
    assert params.all_stop_token_ids == ({2, 1} if named else {2})
