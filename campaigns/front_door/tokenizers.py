"""Tokenizers of all kinds: the ids of texts, and texts of ids, are those that transformers gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from campaigns.front_door.folders import demo_model
from streamrl.pretrained.tokenizer import load_tokenizer

SPECIAL = ("<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>")
CORPUS = (
    "The quick brown fox jumps over the lazy dog.",
    "def reward(completion):\n    return 1.0",
    "1 + 1 = 2, 12.5 % café über naïve 日本語 🙂 user assistant system",
) * 8
TEXTS = (
    *("", "Hello fox", " leading", "trailing  ", "tab\tand\nlines\n\n", "É ﬁ ① 日本 🙂 x", "\u00a0no\u200bbreak"),
    *(
        "<s>Hello",
        "<s> Hello",
        "a<|im_end|>b",
        "x  <|im_end|>  y",
        "<|im_start|>user\nhi<|im_end|>\n",
        "</s>",
        "<pad>q",
    ),
    *("fox<new>fox", "fox <new> fox", "FOX <NEW>", "don't 3.5 12345", "\ufeffBOM", "a\r\nb", "\x00\x07", "x" * 500),
)
Change = Callable[[Tokenizer], Any]


def same_ids(model: Path, *texts: str) -> str:
    """What differs between the product's ids of ``texts`` and those of transformers; '': nothing."""
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(model), AutoTokenizer.from_pretrained(model)
    for text in texts:
        here, there = ours.encode(text), list(theirs(text)["input_ids"])
        front = next((n for n in (2, 1) if there[:n] and there[:n] == there[n : 2 * n]), 0)
        if text.startswith("<s>") and front:  # the BOS that is in the text, and the one that is added
            there = there[front:]
        if here.tolist() != there:
            return f"{text!r} is {here.tolist()}, of transformers {there}"
        for skip in (False, True):
            text_here, text_there = ours.decode(here, skip), theirs.decode(there, skip_special_tokens=skip)
            if text_here != text_there:
                return f"{there} is {text_here!r}, of transformers {text_there!r}"
    return ""


def bpe() -> Tokenizer:
    """Byte-level BPE, as of GPT-2, Qwen and Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace(scheme: str, *, unigram: bool = False) -> Tokenizer:
    """SentencePiece's form, as of Llama 2, Mistral and Gemma, or as Unigram of T5."""
    tokenizer = Tokenizer(models.Unigram() if unigram else models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    if unigram:
        trainer: Any = trainers.UnigramTrainer(vocab_size=300, special_tokens=list(SPECIAL), unk_token="<unk>")
    else:
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=pieces)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """Lower-cased pieces of words, as of BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=list(SPECIAL)))
    return tokenizer


def _adds(single: str) -> Change:
    names = [(token, number) for number, token in enumerate(SPECIAL)]

    def change(tokenizer: Tokenizer) -> None:
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=names)

    return change


def _set_to(name: str, value: Any) -> Change:
    return lambda tokenizer: setattr(tokenizer, name, value)


def _plain_specials(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"] = []


def write(
    directory: Path,
    tokenizer: Tokenizer,
    config: dict[str, Any] | None = None,
    edit: Callable[[dict[str, Any]], Any] = lambda content: None,
    **files: Any,
) -> Path:
    """The folder of a model with ``tokenizer``; ``files``: further ones, by their names without ``.json``."""
    content = json.loads(tokenizer.to_str())
    edit(content)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    files |= {"tokenizer": content, "tokenizer_config": settings | (config or {}), "config": {"eos_token_id": 1}}
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


def variant(make: Callable[[], Tokenizer], *changes: Change, **how: Any) -> Callable[[Path], str]:
    """A variant that compares all texts."""

    def compare(directory: Path) -> str:
        tokenizer = make()
        for change in changes:
            change(tokenizer)
        return same_ids(write(directory, tokenizer, **how), *TEXTS)

    return compare


def _new(**flags: bool) -> Change:
    return lambda tokenizer: tokenizer.add_tokens([AddedToken("<new>", **flags)])


_bos = _adds("<s> $A")
_listed = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
_sequence = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
_digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
VARIANTS: dict[str, Callable[[Path], str]] = {
    "of the demo": lambda directory: same_ids(demo_model(directory), "12:", ""),
    "byte-level BPE": variant(bpe),
    "byte-level BPE with a BOS": variant(bpe, _bos),
    "byte-level BPE with two tokens in front": variant(bpe, _adds("<|im_start|> <s> $A")),
    "byte-level BPE with BOS and EOS": variant(bpe, _adds("<s> $A </s>")),
    "add_prefix_space": variant(bpe, _set_to("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True))),
    "digits alone": variant(bpe, _set_to("pre_tokenizer", _digits)),
    "a normalizer of several": variant(bpe, _set_to("normalizer", _sequence)),
    "NFC, as of Qwen": variant(bpe, _set_to("normalizer", normalizers.NFC())),
    "truncation and padding in the file": variant(bpe, lambda t: t.enable_padding(length=600), _bos),
    "merges as texts": variant(
        bpe, edit=lambda c: c["model"].update(merges=[" ".join(pair) for pair in c["model"]["merges"]])
    ),
    "an added token": variant(bpe, _new()),
    "an added token with lstrip": variant(bpe, _new(lstrip=True)),
    "an added token with rstrip": variant(bpe, _new(rstrip=True, special=True)),
    "an added token of single words": variant(bpe, _new(single_word=True)),
    "an added token that is normalized": variant(bpe, _set_to("normalizer", _sequence), _new(normalized=True)),
    "special tokens without their list": variant(bpe, edit=_plain_specials),
    "special tokens in special_tokens_map only": variant(
        bpe, _bos, edit=_plain_specials, special_tokens_map={"pad_token": {"content": "<pad>", "lstrip": True}}
    ),
    "added_tokens_decoder only": variant(
        bpe, edit=_plain_specials, config={"added_tokens_decoder": {"5": {"content": "<|im_end|>", **_listed}}}
    ),
    "added_tokens_decoder with another flag": variant(
        bpe, config={"added_tokens_decoder": {"5": {"content": "<|im_end|>", **_listed, "rstrip": True}}}
    ),
    "additional_special_tokens": variant(bpe, edit=_plain_specials, config={"additional_special_tokens": ["<new>"]}),
    "extra_special_tokens by name": variant(bpe, config={"extra_special_tokens": {"image_token": "<new>"}}),
    "added_tokens.json": variant(bpe, edit=_plain_specials, added_tokens={"<new>": 600, "<|im_end|>": 5}),
    "split_special_tokens": variant(bpe, config={"split_special_tokens": True}),
    "add_bos_token beside no post-processor": variant(bpe, config={"add_bos_token": True, "add_eos_token": True}),
    "clean_up_tokenization_spaces": variant(bpe, config={"clean_up_tokenization_spaces": True}),
    "model_max_length": variant(bpe, config={"model_max_length": 3, "truncation_side": "left"}),
    "of GPT-2's class": variant(bpe, config={"tokenizer_class": "GPT2Tokenizer"}),
    **{f"Metaspace, {scheme}": variant(partial(metaspace, scheme), _bos) for scheme in ("always", "first", "never")},
    "Unigram": variant(partial(metaspace, "always", unigram=True), _adds("$A </s>")),
    "WordPiece": variant(word_piece, _adds("<s> $A </s>")),
}
