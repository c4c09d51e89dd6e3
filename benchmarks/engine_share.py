"""How much of what an engine core samples alone does the pipeline train, in the same minutes, with the same policy?

    python benchmarks/engine_share.py --steps 12 --repeats 2

Alone: vLLM's ``EngineCore`` as the recipe configures it, in one process, whose outputs are only counted; batches of the
recipe's size that are waited for, then an engine that is always full. Beside it ``streamrl train`` with a negligible
learning rate (1e-12): synchronous rounds, then continuous ones. Prints completions a second and their ratios."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from msgspec import structs
from training_run import DEMO_RECIPE, training_run

from streamrl.engines.vllm.engine import engine_config
from streamrl.engines.vllm.options import engine_options
from streamrl.pretrained.tokenizer import end_tokens, load_tokenizer
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.weights import engine_variables

SKIPPED = 2  # batches and steps at the start


def core_alone(batches: int, model: str) -> dict[str, float]:
    """Completions a second of an engine core: ``waited`` batches, ``full`` without a pause."""
    recipe = load_recipe(DEMO_RECIPE, [f"model.path={model}"] if model else [])
    with tempfile.TemporaryDirectory(prefix="srl") as directory:
        options = engine_options(recipe, 0, directory)
        os.environ.update(options.variables | engine_variables())
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        from streamrl.base.messages import Generate
        from streamrl.base.types import token_array
        from streamrl.engines.async_llm.engine import sampling_params

        config = engine_config(options)
        core = EngineCore(config, Executor.get_class(config), log_stats=False)
        tokenizer = load_tokenizer(recipe.model.path)
        ends = list(end_tokens(recipe.model.path).ids)
        rows = [json.loads(line)["prompt"] for line in Path(recipe.prompts.sets[""].prompts).read_text().splitlines()]
        sampling, group = recipe.sampling, recipe.rollout.group_size
        size = recipe.rollout.prompts_per_batch * group

        def requests() -> Iterator[Any]:
            for number in itertools.count():
                name, tokens = str(number), token_array(tokenizer.encode(rows[number // group % len(rows)]))
                asked = Generate(request_id=name, token_ids=tokens, seed=number, **structs.asdict(sampling))
                params = sampling_params(asked, stop_token_ids=ends)
                yield EngineCoreRequest(name, list(tokens), None, params, None, time.time(), None, "0", None)

        coming = requests()

        def ended() -> int:
            outputs, executed = core.step()
            core.post_step(executed)
            done = [one for step in (outputs or {}).values() for one in step.outputs if one.finish_reason is not None]
            return len(done)

        def add(count: int) -> None:
            for request in itertools.islice(coming, count):
                core.add_request(*core.preprocess_add_request(request))

        seconds = []
        for _ in range(batches + SKIPPED):
            began = time.monotonic()
            add(size)
            while core.scheduler.has_requests():
                ended()
            seconds.append(time.monotonic() - began)
        add(size)
        total, began = 0, time.monotonic()
        while total < size * batches:
            count = ended()
            total += count
            add(count)
        full = total / (time.monotonic() - began)
        return {"waited": size * batches / sum(seconds[SKIPPED:]), "full": full}


def pipeline(rounds: str, steps: int, model: str) -> float:
    """Trained completions a second of the steps after the first ones."""
    settings: dict[str, Any] = {"run.steps": steps + SKIPPED, "rollout.rounds": rounds, "training.learning_rate": 1e-12}
    settings |= {"model.path": model} if model else {}
    if rounds == "continuous":
        settings["rollout.max_staleness"] = 1
    with training_run(DEMO_RECIPE, settings | {"evaluation.prompts": ""}) as run:
        run.wait(timeout_s=1800)
        reported = run.steps()
        first, last = reported[SKIPPED - 1], reported[-1]
        rollout = load_recipe(DEMO_RECIPE).rollout
        seconds = float(last["time"] - first["time"])
        return rollout.prompts_per_batch * rollout.group_size * (len(reported) - SKIPPED) / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description="The pipeline's share of what an engine core samples alone.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--model", default="", help="a folder: a policy that was trained (default: the recipe's)")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        print(json.dumps(core_alone(arguments.steps, arguments.model)), flush=True)
        os._exit(0)
    ratios: dict[str, list[float]] = {"waited": [], "full": []}
    for _ in range(arguments.repeats):
        command = [sys.executable, __file__, "--alone", "--steps", str(arguments.steps), "--model", arguments.model]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        alone: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        for kind, rounds in (("waited", "synchronous"), ("full", "continuous")):
            trained = pipeline(rounds, arguments.steps, arguments.model)
            ratios[kind].append(trained / alone[kind])
            print(f"{kind}: alone {alone[kind]:.1f}/s, {rounds} {trained:.1f}/s, {ratios[kind][-1]:.2f}", flush=True)
    print(
        "  ".join(f"{kind} {mean(found):.2f} ({min(found):.2f} to {max(found):.2f})" for kind, found in ratios.items())
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
