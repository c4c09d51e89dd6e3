"""Try a model family on a tiny checkpoint, in throw-away processes: what the trainer says of it, whether an engine
computes the same, and whether pushes arrive. ``streamrl families`` calls ``try_family``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import anyio
import msgspec
from msgspec import Struct

from streamrl.base.errors import StreamRLError
from streamrl.base.messages import FirstProbe
from streamrl.engines.families.push_probe import push_problem
from streamrl.engines.push.verify import WeightCanary, canary_of
from streamrl.engines.vllm.engine import RunEngine
from streamrl.engines.vllm.options import engine_options
from streamrl.learning.families.family import Family
from streamrl.learning.families.tiny_checkpoint import write_tiny_checkpoint
from streamrl.recipe.rewards import Reward
from streamrl.recipe.sections import Engines, Model, Prompts, Recipe, Sampling
from streamrl.recipe.throwaway_process import answer_parent, run_throwaway

PART_TIMEOUT_S = 600.0
_CONTEXT = 256


class FamilyReport(Struct, frozen=True, kw_only=True):
    """Result of a family. ``trainer``, ``plan``, ``engine``, ``push``: reason why the part does not work with it;
    empty: it works.
    ``engine_dtype``: dtype of the engine that was tried."""

    name: str
    title: str
    engine_dtype: str
    trainer: str = ""
    plan: str = ""
    engine: str = ""
    push: str = ""

    @property
    def verdict(self) -> str:
        """Return ``trains``, ``trains with engines.dtype = ...`` or ``refused: ...`` in one line."""
        for part in _PARTS:
            if reason := getattr(self, part):
                return f"refused ({part}): {' '.join(reason.split())}"
        return "trains" if self.engine_dtype == "float32" else f'trains with engines.dtype = "{self.engine_dtype}"'


def try_family(family: Family) -> FamilyReport:
    """Try the four parts, each in a process of its own: about a minute on two cores. Needs vLLM's CPU build."""
    reasons = {}
    with tempfile.TemporaryDirectory(prefix="srl") as directory:
        for part in _PARTS:
            arguments = [part, msgspec.json.encode(family).decode(), directory]
            answer = run_throwaway("streamrl.engines.families.family_probe", arguments, PART_TIMEOUT_S)
            reasons[part] = answer.failure or answer.written.decode()
            if part == "trainer" and reasons[part]:
                break
    return FamilyReport(name=family.name, title=family.title, engine_dtype=family.engine_dtype, **reasons)


def _recipe(family: Family, directory: str) -> Recipe:
    """The recipe of a run with one engine on a CPU."""
    return Recipe(
        model=Model(path=f"{directory}/model"),
        prompts=Prompts(train="none.jsonl"),
        rewards=(Reward(function="none:none"),),
        engines=Engines(dtype=family.engine_dtype, max_model_len=_CONTEXT, max_num_seqs=4),
        sampling=Sampling(max_tokens=_CONTEXT // 4),
    )


def _trainer_reason(family: Family, directory: str) -> str:
    """Load the model as a trainer rank does, and store for the engine what it computes."""
    import torch

    from streamrl.learning.batches.scoring import first_probe
    from streamrl.learning.model.loading import load_policy
    from streamrl.learning.options import trainer_options

    write_tiny_checkpoint(family, Path(directory) / "model")
    recipe = _recipe(family, directory)
    policy = load_policy(recipe.model.path, torch.device("cpu"))
    probe = first_probe(policy, trainer_options(recipe, 0, "families", f"ipc://{directory}/w"))
    (Path(directory) / "probe").write_bytes(msgspec.msgpack.encode(probe))
    return ""


def _engine_reason(family: Family, directory: str) -> str:
    """Start an engine, and compare what it computes as at the start of a run."""
    recipe = _recipe(family, directory)
    probe = msgspec.msgpack.decode((Path(directory) / "probe").read_bytes(), type=FirstProbe)
    canary = canary_of(recipe, "cpu", family.engine_dtype)
    assert canary is not None
    engine = RunEngine(engine_options(recipe, 0, directory, device="cpu"))

    async def look(canary: WeightCanary) -> None:
        await engine.start()
        try:
            await canary.check_first(engine, probe)
            await engine.checksums()  # raises for an engine that died of the requests
        finally:
            await engine.aclose()

    anyio.run(look, canary)
    return ""


def _plan_reason(family: Family, directory: str) -> str:
    """Look for places of the published tensors in vLLM's model, as the dry run does."""
    from streamrl.engines.vllm.load_plan_probe import probe_engine, published_tensors

    recipe = _recipe(family, directory)
    probe_engine(engine_options(recipe, 0, directory, device="cpu"), published_tensors(recipe.model.path), {})
    return ""


def _push_reason(family: Family, directory: str) -> str:
    """Push random versions, and compare with fresh loads."""
    recipe = _recipe(family, directory)
    return push_problem(engine_options(recipe, 0, directory, device="cpu"))


_PARTS: dict[str, Callable[[Family, str], str]] = {
    "trainer": _trainer_reason,
    "plan": _plan_reason,
    "engine": _engine_reason,
    "push": _push_reason,
}


def _answer(answers: BinaryIO, arguments: Sequence[str]) -> None:
    part, table, directory = arguments
    family = msgspec.json.decode(table, type=Family)
    try:
        reason = _PARTS[part](family, directory)
    except StreamRLError as error:
        reason = str(error).replace(f"{directory}/", "")
    answers.write(reason.encode())


if __name__ == "__main__":
    answer_parent(_answer)
