"""The language model of a composite model, which is what a trainer rank holds of it: towers for images or sound are
made without memory and dropped, so that they are neither loaded, trained nor published.

The trainer calls the innermost decoder, as engines do: the forward of the whole class puts other embeddings where a
policy has sampled a placeholder token of images. ``loading``, ``policy`` and ``packing_check`` use it."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from streamrl.base.errors import StreamRLError
from streamrl.learning.model.hugging_face import AutoModelForCausalLM, PreTrainedModel, transformers
from streamrl.pretrained.composites import towers, without_towers


def make_model(config: Any, **options: Any) -> PreTrainedModel:
    """Make the causal language model of a transformers configuration, of a composite model without its towers. Raises
    ``StreamRLError`` for towers that lie inside of the language model."""
    if not towers(config.to_dict()):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
        return model
    model = _class_of(config)._from_config(config, **options)
    _drop_towers(model)
    names = dict(model.named_parameters())
    inside = sorted(names.keys() - without_towers(names).keys())
    if inside:
        raise StreamRLError(
            f"model type {config.model_type!r} has {len(inside)} parameters of towers inside of its language model "
            f"({', '.join(inside[:3])}), where they cannot be left out: give a model that has them beside it"
        )
    return model


def _class_of(config: Any) -> Any:
    """The class that config.json names; engines follow it, too."""
    name = next(iter(config.architectures or ()), "")
    model_class = getattr(transformers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        raise StreamRLError(f"transformers {transformers.__version__} has no class {name!r}, which config.json names")
    return model_class


def text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the module that makes hidden states of tokens: the inner model, or the innermost one that has the
    embeddings where that is the model itself or has towers. Raises ``StreamRLError`` where there is none."""
    inner: PreTrainedModel = model.base_model
    if inner is not model and not towers(model.config.to_dict()):
        return inner
    embeddings = model.get_input_embeddings()
    around = [module for module in model.modules() if isinstance(module, PreTrainedModel) and _has(module, embeddings)]
    if around[-1] is model:
        raise StreamRLError(f"model type {model.config.model_type!r} has no inner model that gives hidden states")
    return around[-1]


def placeholder_tokens(config: Any) -> set[int]:
    """Return the tokens in whose place the class of a composite model puts embeddings of images or sound."""
    fields = config.to_dict()
    if not towers(fields):
        return set()
    return {
        value for key, value in fields.items() if key.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }


def _drop_towers(model: PreTrainedModel) -> None:
    """Remove all modules beside the decoder and the output head."""
    parts = [text_decoder(model), model.get_output_embeddings()]
    inside = {id(module) for part in parts for module in part.modules()}
    around = [module for module in model.modules() if id(module) not in inside]
    for module in around:
        for name, child in module.named_children():
            if not any(_has(child, part) for part in parts):
                setattr(module, name, None)


def _has(module: Module, part: Module) -> bool:
    return any(below is part for below in module.modules())
