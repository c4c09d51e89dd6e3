"""Model folders: what is taken is what transformers and vLLM would load, and all else is refused in words.

Each variant changes a small model that both load. The product is asked as its dry run asks (files, configuration, the
trainer's empty model, tokenizer); transformers loads the folder, vLLM's own loader chooses and reads the files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from campaigns.front_door.folders import demo_model, edit_json
from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.pretrained.model_facts import read_model_facts
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.pretrained.trainable_models import refuse_untrainable, unknown_modules
from streamrl.pretrained.weight_files import ModelDirectoryError
from streamrl.run.prompts.open_prompts import check_prompts

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Change = Callable[[Path], Any]
Digests = dict[str, str]
"""Of the values of every tensor, by its name in the files."""


# ---- what the product and the yardsticks make of a folder ------------------------------------------


def ours(model: Path) -> Digests:
    """Raises what the product says of a folder that it refuses."""
    import torch

    from streamrl.learning.model.loading import published_shapes
    from streamrl.weights.pull.loaded_checkpoint import map_checkpoint

    read_model_facts(model)
    refuse_untrainable(model)
    load_tokenizer(model)
    names, found = published_shapes(str(model)), map_checkpoint(model)
    values = {name: torch.from_numpy(found[name].bits.copy()).view(getattr(torch, found[name].dtype)) for name in names}
    return _digests(values)


def of_vllm(model: Path) -> Digests:
    """By the files that vLLM chooses, the last of a name; raises what its loader raises."""
    from safetensors.torch import load_file
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = DefaultModelLoader(LoadConfig(load_format="safetensors"))
    _, files, *_ = loader._prepare_weights(str(model), None, None, True, None)
    return _digests({name: tensor for file in sorted(files) for name, tensor in load_file(file).items()})


def of_transformers(model: Path) -> Digests:
    """Raises where a tensor is missing, not used, or of another shape."""
    from transformers import AutoModelForCausalLM

    how = {"output_loading_info": True, "dtype": "float32", "local_files_only": True}
    loaded, info = AutoModelForCausalLM.from_pretrained(model, **how)
    if wrong := {key: value for key, value in info.items() if value}:
        raise ValueError(f"transformers: {wrong}")
    return _digests(loaded.state_dict())


def _digests(values: Mapping[str, Any]) -> Digests:
    """Of the values in float32, whatever they are stored as."""
    return {
        name: hashlib.sha256(one.float().contiguous().numpy().tobytes()).hexdigest() for name, one in values.items()
    }


def compared(change: Change, directory: Path, *, refused: str = "") -> str:
    """What is wrong with the product's answer to the changed model. ``refused``: what its refusal says; '': the folder
    is taken, and both yardsticks load the same from it."""
    model = demo_model(directory)
    change(model)
    try:
        found, said = ours(model), ""
    except (ModelDirectoryError, RecipeError, StreamRLError) as error:
        found, said = {}, str(error)
    if refused or said:
        return "" if refused and refused in said else f"refused: {said}" if said else f"taken, not refused: {refused!r}"
    for ask in (of_vllm, of_transformers):
        theirs = ask(model)  # what it raises is a wrong answer of ours
        if wrong := [tensor for tensor, digest in found.items() if theirs.get(tensor) != digest]:
            return f"{ask.__name__} loads another {wrong[0]}"
    return ""


# ---- changes ---------------------------------------------------------------------------------------


def all_of(*changes: Change) -> Change:
    def change(model: Path) -> None:
        for one in changes:
            one(model)

    return change


def config(**fields: Any) -> Change:
    """Set fields of config.json."""
    return lambda model: edit_json(model / "config.json", lambda content: content.update(fields))


def tensors(change: Callable[[dict[str, Any]], Any], file: str = WEIGHTS, *, other: bool = False) -> Change:
    """Save the changed weights as ``file``. ``other``: of another save, with other values."""

    def save(model: Path) -> None:
        from safetensors.torch import load_file, save_file

        content = load_file(model / WEIGHTS)
        content = {name: tensor + 1 for name, tensor in content.items()} if other else content
        save_file(change(content) or content, model / file, metadata={"format": "pt"})

    return save


def shards(*, index: bool = True, keep: bool = False) -> Change:
    """Two shards in place of the one file, which ``keep`` leaves there."""

    def change(model: Path) -> None:
        from safetensors.torch import load_file, save_file

        content = load_file(model / WEIGHTS)
        names = sorted(content)
        parts = {FIRST: names[: len(names) // 2], SECOND: names[len(names) // 2 :]}
        for file, mine in parts.items():
            save_file({name: content[name] for name in mine}, model / file, metadata={"format": "pt"})
        if not keep:
            (model / WEIGHTS).unlink()
        if index:
            weight_map = {name: file for file, mine in parts.items() for name in mine}
            (model / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))

    return change


def removed(name: str) -> Change:
    return lambda model: (model / name).unlink()


def added(name: str, content: str = "{}") -> Change:
    return lambda model: (model / name).write_text(content)


def cut(at: int) -> Change:
    return lambda model: (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:at])


def renamed(content: dict[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("model."): tensor for name, tensor in content.items()}


def without(*parts: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda content: {name: one for name, one in content.items() if not any(part in name for part in parts)}


def with_head(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "lm_head.weight": content["model.embed_tokens.weight"].clone()}


def widened(content: dict[str, Any]) -> dict[str, Any]:
    import torch

    embedding = content["model.embed_tokens.weight"]
    return {**content, "model.embed_tokens.weight": torch.cat([embedding, embedding])}


def no_end_token(model: Path) -> None:
    for file, key in _END_KEYS.items():
        edit_json(model / f"{file}.json", partial(_set, key, None))


def _set(key: str, value: Any, content: dict[str, Any]) -> None:
    content[key] = value
    if value is None:
        del content[key]


_END_KEYS = {"config": "eos_token_id", "generation_config": "eos_token_id", "tokenizer_config": "eos_token"}
_INDEX = '{"metadata": {}, "weight_map": {"model.norm.weight": "model.safetensors"}}'
LOADED: dict[str, Change] = {
    "of the demo": lambda model: None,
    "two shards and their index": shards(),
    "an index of the one file": added(
        INDEX, '{"metadata": {}, "weight_map": {"model.norm.weight": "model.safetensors"}}'
    ),
    "the original format beside an index": all_of(tensors(renamed, "consolidated.safetensors", other=True), shards()),
    "an older save beside an index": all_of(tensors(renamed, "model-00001-of-00003.safetensors", other=True), shards()),
    "a tied head that is stored as well": tensors(with_head),
    "float16": tensors(lambda content: {name: one.half() for name, one in content.items()}),
    "an embedding larger than the tokenizer": all_of(tensors(widened), config(vocab_size=64)),
    "a README, an image, a git file": all_of(added("README.md"), added("a.png"), added(".gitattributes")),
}
REFUSED: dict[str, tuple[Change, str]] = {
    "an index left behind": (
        added(INDEX, _INDEX.replace(WEIGHTS, FIRST)), f"has no {FIRST}, which {INDEX} names"),
    "shards beside the one file": (shards(keep=True), "remove the files of one of the two saves"),
    "a missing shard": (all_of(shards(), removed(SECOND)), f"has no {SECOND}"),
    "a missing shard without an index": (all_of(shards(index=False), removed(FIRST)), f"has no {FIRST}"),
    "two saves": (tensors(without("norm"), "model-old.safetensors", other=True), "more than one save"),
    "a cut file": (cut(-100), "it is cut"),
    "a cut header": (cut(40), "its header claims"),
    "an empty file": (cut(0), "broken model.safetensors"),
    "a pointer of Git LFS": (added(WEIGHTS, "version https://git-lfs.github.com/spec/v1"), "broken model.safetensors"),
    "a layer too few in the weights": (tensors(without("layers.1.")), "num_hidden_layers"),
    "a layer too few in the configuration": (config(num_hidden_layers=1), "num_hidden_layers"),
    "a missing projection": (tensors(without("layers.1.mlp.up_proj")), "has no weights for 1 parameters"),
    "another vocabulary": (config(vocab_size=40), "vocab_size = 40 in config.json"),
    "another width": (config(intermediate_size=24), "by config.json: they are not of one model"),
    "padding beyond the embedding": (config(pad_token_id=32), "pad_token_id = 32"),
    "a pickle alone": (all_of(removed(WEIGHTS), added("pytorch_model.bin")), "holds a pickle"),
    "GGUF alone": (all_of(removed(WEIGHTS), added("model-q4.gguf")), "no *.safetensors weights"),
    "an adapter alone": (all_of(removed("config.json"), added("adapter_config.json")), "is an adapter"),
    "an adapter's configuration beside a model": (
        added("adapter_config.json", '{"base_model_name_or_path": "elsewhere"}'), "adapter_config.json"),
    "a model without its head": (config(architectures=["Qwen2Model"]), "is a Qwen2Model: only causal"),
    "another class than the type's": (config(architectures=["MistralForCausalLM"]), "names MistralForCausalLM"),
    "a classifier": (config(architectures=["Qwen2ForSequenceClassification"]), "only causal language models"),
    "a vision model": (
        config(architectures=["Qwen2VLForConditionalGeneration"], vision_config={"depth": 2}), "takes more than text"),
    "an encoder and decoder": (
        config(architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True), "is a T5ForConditionalGen"),
    "quantised": (config(quantization_config={"quant_method": "gptq"}), "is quantised (gptq)"),
    "a type that nobody knows": (config(model_type="qwen99"), "does not recognize this architecture"),
    "an activation that nobody knows": (config(hidden_act="gelu_99"), "gelu_99"),
    "code of its own": (config(auto_map={"AutoModelForCausalLM": "m.M"}), "asks for code of its own"),
    "no end token": (no_end_token, "names no eos_token_id"),
}  # fmt: skip


# ---- what ends a completion, tokens beyond the model, adapters, checkpoints ------------------------


def ends(directory: Path, **files: Any) -> str:
    """End tokens as each file names them; what ends a completion for transformers or vLLM must end it here."""
    from transformers import AutoTokenizer, GenerationConfig

    model = demo_model(directory)
    no_end_token(model)
    for file, value in files.items():
        edit_json(model / f"{file}.json", partial(_set, _END_KEYS[file], value))
    named = GenerationConfig.from_pretrained(model).eos_token_id or files["config"]
    theirs = {named} if isinstance(named, int) else set(named)
    theirs |= {AutoTokenizer.from_pretrained(model).eos_token_id} - {None}
    found = set(load_tokenizer(model).eos_token_ids)
    return "" if {token for token in theirs if token < 32} <= found else f"ends are {found}, there {theirs}"


def beyond(directory: Path, row: dict[str, Any]) -> str:
    """A token of id 32 where the model has 32 embeddings."""
    model = demo_model(directory)
    token = {"id": 32, "content": "<new>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    edit_json(model / "tokenizer.json", lambda content: content["added_tokens"].append({**token, "special": False}))
    (directory / "rows.jsonl").write_text(json.dumps({"prompt": "1"}) + "\n" + json.dumps(row) + "\n")
    found = check_prompts(f"{directory}/rows.jsonl", load_tokenizer(model), {})
    return "" if len(found) == 1 and "line 2 has a prompt with the token 32 ('<new>')" in found[0] else f"{found}"


def adapters(directory: Path, *targets: str, taken: bool) -> str:
    """Names of modules: all are adapted by peft, or the dry run refuses."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = demo_model(directory)
    refused = unknown_modules(model, targets)
    if bool(refused) == taken:
        return f"{refused or 'taken'}"
    if taken:
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules=list(targets)))
        names = {name.split(".")[-2] for name, _ in adapted.named_modules() if name.endswith(".lora_A")}
        return "" if names == set(targets) else f"peft adapts {names}"
    return ""


def checkpoint(directory: Path, files: Mapping[str, str]) -> str:
    """A chat, with tools and without, is the same from the model and from its checkpoint, here and by transformers."""
    import torch
    from transformers import AutoTokenizer

    from streamrl.learning.state.checkpoint import save_hugging_face

    model, chat = demo_model(directory), [{"role": "user", "content": "12"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for name, content in files.items():
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(content)
    save_hugging_face(directory / "hf", {"w": torch.zeros(1)}, model)
    shown = []
    for folder in (model, directory / "hf"):
        here, there = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        shown.append([here.render_chat(chat, used) for used in (None, tools)])
        shown.append([there.apply_chat_template(chat, tools=used, tokenize=False) for used in (None, tools)])
    return "" if all(one == shown[0] for one in shown) else f"{shown}"


SHORT = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
VARIANTS: dict[str, Callable[[Path], str]] = {
    **{name: partial(compared, change) for name, change in LOADED.items()},
    **{name: partial(compared, change, refused=said) for name, (change, said) in REFUSED.items()},
    "ends in the configuration alone": partial(ends, config=2),
    "ends in the tokenizer alone": partial(ends, config=2, tokenizer_config="<eos>"),
    "ends in three files": partial(ends, config=3, generation_config=[2, 5], tokenizer_config="<bos>"),
    "an end beyond the embedding": partial(ends, config=2, generation_config=[2, 40]),
    "a token beyond the embedding, as text": partial(beyond, row={"prompt": "1<new>"}),
    "a token beyond the embedding, as ids": partial(beyond, row={"prompt_token_ids": [5, 32]}),
    "adapters of two modules": lambda folder: adapters(folder, "q_proj", "up_proj", taken=True),
    "an adapter that is no module": lambda folder: adapters(folder, "q_proj", "v_porj", taken=False),
    "an adapter of the tied head": lambda folder: adapters(folder, "lm_head", taken=False),
    "an adapter of the embedding": lambda folder: adapters(folder, "embed_tokens", taken=False),
    "a checkpoint of a template": partial(checkpoint, files={"chat_template.jinja": SHORT}),
    "a checkpoint of named templates": partial(checkpoint, files={
        "chat_template.jinja": SHORT, "additional_chat_templates/tool_use.jinja": f"tools{SHORT}"}),
    "a checkpoint of older files": partial(checkpoint, files={
        "chat_template.jinja": SHORT, "special_tokens_map.json": '{"bos_token": "<bos>", "eos_token": "<eos>"}'}),
}  # fmt: skip
