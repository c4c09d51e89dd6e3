"""Everything of vLLM, and of torch's packed attention, that the product names is in what is installed: symbols,
attributes, parameters, environment variables. Read from the sources of both: nothing is imported."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from builders.files import ROOT

FOREIGN = re.compile(r"vllm(\.|$)|torch\.nn\.attention\.varlen$")
LLM = "vllm.v1.engine.async_llm.AsyncLLM"
OUTPUT = "vllm.outputs.CompletionOutput|vllm.outputs.RequestOutput"
FLAT = "vllm.logprobs.FlatLogprobs"
RUNNER = {"runner": "vllm.v1.worker.gpu_model_runner.GPUModelRunner"}
SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
HELD = {  # what holds an object of vLLM, by the file and the name there
    "engines/async_llm/engine.py": {
        "_llm": LLM,
        "llm": LLM,
        "output": OUTPUT,
        "span": "vllm.outputs.WeightVersionSpan",
        "flat": FLAT,
        "config": "vllm.config.VllmConfig",
        "model": "vllm.config.ModelConfig",
    },
    "engines/vllm/engine.py": {"_llm": LLM, "output": OUTPUT, "flat": FLAT, "config": "vllm.config.VllmConfig"},
    "engines/vllm/openai_form.py": {"_llm": LLM},
    "engines/async_llm/worker.py": {
        "attention": "vllm.model_executor.layers.attention.mla_attention.MLAAttention",
        "router": "vllm.model_executor.layers.fused_moe.router.cpu_router.CPURouter",
    },
    "weights/engine_push.py": {"llm": LLM},
    "engines/vllm/statistics.py": {"llm": LLM, "cache": "vllm.config.CacheConfig"},
    "engines/vllm/held_outputs.py": {
        "core": "vllm.v1.engine.core.EngineCoreProc",
        "scheduler": SCHEDULER,
        "_scheduler": SCHEDULER,
        "output": "vllm.v1.engine.EngineCoreOutput",
        "_first": "vllm.v1.engine.EngineCoreOutput",
        "step": "vllm.v1.engine.EngineCoreOutputs",
        "params": "vllm.sampling_params.SamplingParams",
    },
    "engines/vllm/sampler_patches.py": {
        "state": "vllm.v1.worker.gpu_input_batch.CachedRequestState",
        "sampler": "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler",
        **RUNNER,
    },
    "engines/vllm/cpu_kernels.py": {
        "module": "vllm.model_executor.layers.layernorm.RMSNorm",
        "norm": "vllm.model_executor.layers.layernorm.RMSNorm",
        "gate": "vllm.model_executor.layers.activation.SiluAndMul",
    },
    "weights/vllm/adapter.py": {
        "worker_manager": "vllm.lora.worker_manager.LRUCacheWorkerLoRAManager",
        "manager": "vllm.lora.model_manager.LoRAModelManager",
        "module": "vllm.lora.layers.base.BaseLayerWithLoRA",
        "wrapper": "vllm.lora.punica_wrapper.punica_base.PunicaWrapperBase",
    },
    "weights/vllm/weight_receiver.py": {
        "worker": "vllm.v1.worker.worker_base.WorkerBase|vllm.v1.worker.gpu_worker.Worker"
    },
}
BY_TEXT = {  # what no syntax shows, with parameters
    "vllm.model_executor.model_loader.reload.layerwise.LAYERWISE_INFO": [],
    "vllm.model_executor.model_loader.reload.layerwise.make_online_process_loader": [],
    "vllm.engine.arg_utils.AsyncEngineArgs": [
        "enable_sleep_mode",
        "weight_transfer_config",
        "worker_extension_cls",
        "gpu_memory_utilization",
        "block_size",
        "num_gpu_blocks_override",
    ],
    "vllm.sampling_params.SamplingParams": ["extra_args", "prompt_logprobs"],
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_cpu": ["logits", "generators", "k", "p"],
    "vllm.model_executor.layers.layernorm.RMSNorm.forward_native": ["x", "residual"],
    "vllm.model_executor.layers.activation.SiluAndMul.forward_native": ["x"],
    "vllm.v1.outputs.LogprobsLists.logprob_token_ids": [],
    "vllm.v1.engine.core_client.AsyncMPClient.call_utility_async": [],
    "vllm.v1.engine.output_processor.OutputProcessor.external_req_ids": [],
    "vllm.v1.engine.output_processor.OutputProcessor.request_states": [],
}
Uses = dict[str, set[str]]
"""Parameters by the dotted name that takes them."""


# ---- what the product uses ------------------------------------------------------------------------------


def uses_of(tree: ast.AST, held: dict[str, str]) -> Uses:
    """``held``: dotted classes by the name that holds an object of them."""
    found: Uses = defaultdict(set)
    names = dict(held)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and FOREIGN.match(node.module or ""):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found[f"{node.module}.{alias.name}"].update()
        elif isinstance(node, ast.Constant) and re.fullmatch(r"vllm(\.\w+)+", str(node.value)):
            found[str(node.value)].update()

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute) and node.attr not in names:
            owner = dotted(node.value)
            return owner and f"{owner}.{node.attr}"
        return names.get(node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", ""))

    for node in ast.walk(tree):
        name = dotted(node.func if isinstance(node, ast.Call) else node)
        ours = name is not None and ".streamrl_" in name
        if name is None or ours or name.count(".") > max(one.count(".") for one in names.values()) + 1:
            continue
        if not any(name == f"{one}" or name.rpartition(".")[0] == one for one in names.values()):
            continue
        found[name].update(keywords_of(node, tree) if isinstance(node, ast.Call) else ())
    return {name: parameters for name, parameters in found.items() if name not in held.values() or parameters}


def keywords_of(call: ast.Call, tree: ast.AST) -> Iterator[str]:
    """With those of dictionaries that are handed on."""
    spread: set[str] = set()
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg
        else:
            spread.update(node.id for node in ast.walk(keyword.value) if isinstance(node, ast.Name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and isinstance(node.value, ast.Dict):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id in spread:
                yield from (str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))


def product_uses() -> Uses:
    """Of all files of the product."""
    found: Uses = defaultdict(set, {name: set(parameters) for name, parameters in BY_TEXT.items()})
    for path in sorted((ROOT / "streamrl").rglob("*.py")):
        text = path.read_text()
        if "vllm" in text or "varlen" in text:
            for name, parameters in uses_of(
                ast.parse(text), HELD.get(path.relative_to(ROOT / "streamrl").as_posix(), {})
            ).items():
                found[name] |= parameters
    return found


# ---- what is installed ----------------------------------------------------------------------------------


@cache
def module_file(module: str) -> Path | None:
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)  # of a package at the top: imports nothing
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    place = Path(spec.origin).parent.joinpath(*rest)
    return next((file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()), None)


@cache
def top_level(module: str) -> dict[str, ast.stmt]:
    """Statements that bind a name in a module, also below ``if`` and ``try``."""
    file, found = module_file(module), dict[str, ast.stmt]()
    pending: list[ast.AST] = [ast.parse(file.read_text())] if file else []
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found[node.name] = node
            elif isinstance(node, ast.ImportFrom):
                found.update({alias.asname or alias.name: node for alias in node.names})
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update({target.id: node for target in targets if isinstance(target, ast.Name)})
            elif isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
                pending.append(node)
    return found


def definition(module: str, name: str) -> tuple[str, ast.stmt] | None:
    """Where a name of a module is defined, through imports."""
    node = top_level(module).get(name)
    if isinstance(node, ast.ImportFrom):
        package = module.split(".") if str(module_file(module)).endswith("__init__.py") else module.split(".")[:-1]
        base = package[: len(package) - node.level + 1] if node.level else []
        original = next(alias.name for alias in node.names if name in (alias.asname, alias.name))
        return definition(".".join([*base, *filter(None, [node.module])]), original)
    return (module, node) if node is not None else None


def members(module: str, node: ast.stmt) -> dict[str, ast.stmt]:
    """Of a class and what it inherits, with attributes that its methods set."""
    found: dict[str, ast.stmt] = {}
    if not isinstance(node, ast.ClassDef):
        return found
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(name, ast.Name) and (known := definition(module, name.id)):
            found |= members(*known)
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            found[inner.name] = inner
        elif isinstance(inner, ast.Assign | ast.AnnAssign):
            for target in inner.targets if isinstance(inner, ast.Assign) else [inner.target]:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, inner)
                elif isinstance(target, ast.Attribute):
                    found.setdefault(target.attr, inner)
    return found


def lookup(dotted: str) -> tuple[str, ast.stmt, dict[str, ast.stmt]] | None:
    """The module, node and members of a symbol, or of an attribute of one."""
    module, _, name = dotted.rpartition(".")
    if module_file(module):
        known = definition(module, name)
        return (*known, members(*known)) if known else None
    if (owner := lookup(module)) is None:
        return None
    inside = owner[2]
    if isinstance(owner[1], ast.AnnAssign) and isinstance(owner[1].annotation, ast.Name):
        inside = members(*(definition(owner[0], owner[1].annotation.id) or ("", ast.Pass())))
    return (owner[0], inside[name], {}) if name in inside else None


def missing(dotted: str, parameters: set[str]) -> str:
    """What is not there of one use; empty where all is."""
    if module_file(dotted):
        return ""
    owners, _, attribute = dotted.rpartition(".")
    found = next(filter(None, (lookup(f"{owner}.{attribute}") for owner in owners.split("|"))), None)
    if found is None:
        return dotted
    _, node, inside = found
    if isinstance(node, ast.ClassDef):
        node = inside.get("__init__", node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        accepted = {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        accepted |= parameters if node.args.kwarg else set()
    else:
        accepted = set(inside)
    return "".join(f"{dotted}({name}=)" for name in sorted(parameters - accepted)[:1])


@pytest.fixture(autouse=True)
def installed() -> None:
    if module_file("vllm") is None or module_file("torch") is None:
        pytest.skip("vllm and torch are not installed")


@pytest.mark.long
def test_everything_that_is_used_is_installed() -> None:
    uses = product_uses()
    assert uses["vllm.outputs.CompletionOutput|vllm.outputs.RequestOutput.weight_versions"] == set()
    assert uses[f"{LLM}.pause_generation"] == {"mode", "clear_cache"}
    assert "max_num_batched_tokens" in uses["vllm.engine.arg_utils.AsyncEngineArgs"]
    assert "window_size" in uses["torch.nn.attention.varlen.varlen_attn"]
    assert len(uses) > 60
    assert [gone for name, parameters in uses.items() if (gone := missing(name, parameters))] == []


@pytest.mark.parametrize(
    ("source", "gone"),
    [
        ("from vllm.outputs import Gone", "vllm.outputs.Gone"),
        ("from vllm.gone import Thing", "vllm.gone.Thing"),
        ("llm.gone_method()", f"{LLM}.gone_method"),
        ("llm.pause_generation(gone=1)", f"{LLM}.pause_generation(gone=)"),
        ("from vllm.sampling_params import SamplingParams as S\nmore = {'gone': 1}\nS(**more)",
         "vllm.sampling_params.SamplingParams(gone=)"),
        ("from torch.nn.attention.varlen import varlen_attn\nvarlen_attn(gone=1)",
         "torch.nn.attention.varlen.varlen_attn(gone=)"),
        ("NOTES = 'vllm.gone.module'", "vllm.gone.module"),
    ],
)  # fmt: skip
def test_a_new_use_that_is_not_installed_is_named(source: str, gone: str) -> None:
    uses = uses_of(ast.parse(source), {"llm": LLM})
    assert [found for name, parameters in uses.items() if (found := missing(name, parameters))] == [gone]


def test_every_holder_of_a_vllm_object_is_listed() -> None:
    """Files that import vLLM's front end, its outputs or statistics, or call its worker, say which names hold them."""
    for path in (ROOT / "streamrl").rglob("*.py"):
        held = r"\b_?llm\.\w|\bworker\.(weight_transfer_engine|model_runner)|\blora_manager\b"
        if re.search(held, path.read_text()):
            assert path.relative_to(ROOT / "streamrl").as_posix() in HELD, (
                f"{path}: add the names that hold an object of vLLM to HELD"
            )


def test_every_environment_variable_is_known() -> None:
    texts = {path: path.read_text() for path in (ROOT / "streamrl").rglob("*.py")}
    named = {name for text in texts.values() for name in re.findall(r'"(VLLM_[A-Z_]+)"', text)}
    envs = module_file("vllm.envs")
    assert envs is not None and len(named) > 5
    assert [name for name in sorted(named) if f'"{name}"' not in envs.read_text()] == []


def test_abstract_methods_of_the_weight_backend_are_there() -> None:
    known = definition("vllm.distributed.weight_transfer.base", "WeightTransferEngine")
    assert known is not None
    abstract = {
        name
        for name, node in members(*known).items()
        if any("abstractmethod" in ast.unparse(one) for one in getattr(node, "decorator_list", ()))
    }
    tree = ast.parse((ROOT / "streamrl/weights/vllm/weight_receiver.py").read_text())
    ours = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "StreamrlWeightTransfer")
    assert abstract and abstract <= {node.name for node in ours.body if isinstance(node, ast.FunctionDef)}


def test_only_the_version_that_was_tried_is_allowed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "vllm>=0.32,<0.33" in extras["vllm"]
