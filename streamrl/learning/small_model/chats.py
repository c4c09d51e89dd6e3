"""The vocabulary of a small policy for chats, which the programs of ``examples`` that make such models call.

The chat template is ChatML, with tools in the format of Hermes and Qwen. Byte pairs are learned from examples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from streamrl.learning.small_model.characters import Vocabulary
from streamrl.learning.small_model.imitation import completion_losses, imitate
from streamrl.pretrained.chat_template import ChatFormat

PAD = "<|endoftext|>"
BEGIN = "<|im_start|>"
END = "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE = r"""{% set system = messages[0].content + '\n' if messages[0].role == 'system' else '' %}
{% if tools %}
{{- '<|im_start|>system\n' + system + 'Tools:\n' }}
{%- for tool in tools %}
{{- (tool | tojson) + '\n' }}
{%- endfor %}
{{- 'Call one: <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call><|im_end|>\n' }}
{%- elif system %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or () %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}"""

Message = Mapping[str, Any]


def chat_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """The text of ``messages`` in ``TEMPLATE``. ``tools``: JSON schemas. Raises ``ChatError``."""
    return ChatFormat("", {"default": TEMPLATE}, {}).write(messages, tools, None, generation_prompt=False)


class Chats(Vocabulary):
    """At most 1,024 tokens for texts of ``chat_text``, learned from ``texts``; equal texts give equal tokens. Any
    text can be encoded. A phrase or a number that occurs ``min_frequency`` times, such as the beginning of a tool call,
    becomes one token."""

    def __init__(self, texts: Iterable[str], context: int, *, min_frequency: int = 1) -> None:
        self._backend = Tokenizer(models.BPE())
        self._backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=False),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        self._backend.decoder = decoders.ByteLevel()
        special = [PAD, BEGIN, END]
        trainer = trainers.BpeTrainer(
            vocab_size=1024 - len(TAGS),
            min_frequency=min_frequency,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        markers = re.compile("|".join(map(re.escape, (*special, *TAGS))))
        self._backend.train_from_iterator((part for text in texts for part in markers.split(text)), trainer)
        self._backend.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
        self.ids = self._backend.get_vocab()
        self.context = context
        self.special_ids = {"bos_token_id": self.ids[PAD], "eos_token_id": self.ids[END], "pad_token_id": self.ids[PAD]}

    def demonstration(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of a chat, and the places of the assistant's tokens, the end of each turn among them."""
        opening = f"{BEGIN}assistant\n"
        first, *turns = text.split(opening)
        ids = self._encode(first)
        places = list[int]()
        for turn in turns:
            message, end, answer = turn.partition(END)
            ids += self._encode(opening)
            sampled = self._encode(message + end)
            places += range(len(ids), len(ids) + len(sampled))
            ids += sampled + self._encode(answer)
        return ids, places

    def _encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text).ids)

    def imitate(self, policy: PreTrainedModel, texts: Iterator[str], steps: int, batch: int) -> Iterator[float]:
        """Train ``policy`` on ``batch`` chats of ``texts`` a step, and yield the loss of each step."""

        def loss_of(chats: Sequence[tuple[list[int], list[int]]]) -> Tensor:
            return completion_losses(policy, chats, self.special_ids["pad_token_id"])[0].mean()

        batches = ([self.demonstration(text) for text in islice(texts, batch)] for _ in range(steps))
        yield from imitate(policy, batches, loss_of, steps)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Make a tokenizer of byte pairs, with ``TEMPLATE`` as chat template."""
        return PreTrainedTokenizerFast(
            tokenizer_object=self._backend,
            chat_template=TEMPLATE,
            model_max_length=self.context,
            pad_token=PAD,
            eos_token=END,
        )
