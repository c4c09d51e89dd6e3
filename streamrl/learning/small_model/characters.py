"""Small policies with a given vocabulary, and a vocabulary with one token a character.

``warm_up`` and the programs of ``examples`` that make models call it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

PAD = "<pad>"
BOS = "<bos>"
EOS = "<eos>"
UNKNOWN = "<unk>"


class Vocabulary(ABC):
    """Vocabulary of a small policy.

    ``ids``: token id of each token.
    ``context``: largest number of tokens of a text.
    ``special_ids``: token ids that the configuration of a model names, such as ``eos_token_id``."""

    ids: dict[str, int]
    context: int
    special_ids: Mapping[str, int]

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Make the tokenizer that is saved with a policy."""

    def policy(
        self, seed: int, *, layers: int = 3, architecture: Callable[..., PreTrainedConfig] = LlamaConfig
    ) -> PreTrainedModel:
        """Make a randomly initialised float32 policy of about 0.1 million parameters a layer. ``architecture``: class
        of its configuration.

        With a Qwen2 model, transformers replaces the saved tokenizer by Qwen2's own class, which drops spaces; with a
        Llama model it loads the saved tokenizer."""
        torch.manual_seed(seed)
        config = architecture(
            vocab_size=len(self.ids),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=layers,
            num_attention_heads=3,
            num_key_value_heads=1,
            max_position_embeddings=self.context,
            tie_word_embeddings=True,
            **self.special_ids,
        )
        policy: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        return policy.float()

    def save(self, policy: PreTrainedModel, folder: Path) -> int:
        """Write ``policy`` in bfloat16, the format that trainers publish and engines hold, and its tokenizer. Returns
        the number of parameters."""
        policy.generation_config = GenerationConfig(**self.special_ids)
        policy.to(torch.bfloat16).save_pretrained(folder)
        self.tokenizer().save_pretrained(folder)
        return sum(parameter.numel() for parameter in policy.parameters())


class Characters(Vocabulary):
    """The vocabulary of ``characters``, after four special tokens, for texts of ``context`` tokens at most."""

    def __init__(self, characters: Iterable[str], context: int) -> None:
        self.ids = {token: number for number, token in enumerate([PAD, BOS, EOS, UNKNOWN, *characters])}
        self.context = context
        self.special_ids = {f"{name}_token_id": self.ids[f"<{name}>"] for name in ("bos", "eos", "pad")}

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Make a tokenizer with one token a character, and ``<bos>`` in front of every encoded text."""
        tokenizer = Tokenizer(models.WordLevel(self.ids, unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, self.ids[BOS])]
        )
        tokenizer.decoder = decoders.Fuse()
        names = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNKNOWN}
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, padding_side="left", model_max_length=self.context, **names
        )
