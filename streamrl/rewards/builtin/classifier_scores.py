"""A Hugging Face sequence classifier that scores completions in batches, for the reward ``reward_model``.

``rewards.builtin.reward_model`` imports this file, and with it torch, at the first completion: in the reward worker
where the reward is trusted, otherwise in the call process of coroutines."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from msgspec import Struct
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from streamrl.base.concurrent_calls import retrieve_exception
from streamrl.recipe.sections import BFLOAT16_CAPABILITY, ComputeDtype
from streamrl.rewards.builtin.reward_model_options import RewardModelOptions


class _WaitingText(Struct, eq=False):
    """A text that waits for its score."""

    token_ids: list[int]
    score: asyncio.Future[float]


class BatchedClassifier:
    """Scores texts in batches. Texts that arrive while a batch is computed form the next batches, texts of similar
    length together. Belongs to one event loop; the model is loaded and run on a thread, so the loop stays free."""

    def __init__(self, options: RewardModelOptions) -> None:
        self._options = options
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward model")
        self._load_lock = asyncio.Lock()
        self._batch_lock = asyncio.Lock()
        self._waiting: list[_WaitingText] = []
        self._model: Any = None
        self._tokenizer: Any = None
        self._model_padding: int | None = None

    async def score(self, prompt: str, messages: Any, completion: str) -> float:
        """The logit (or its sigmoid) of a completion. Raises ``ValueError`` for a text that is too long or that the
        template refuses, ``OSError`` for a model that cannot be loaded."""
        loop = asyncio.get_running_loop()
        async with self._load_lock:
            if self._model is None:
                await loop.run_in_executor(self._thread, self._load)
        text = _WaitingText(self._tokens(prompt, messages, completion), loop.create_future())
        text.score.add_done_callback(retrieve_exception)  # nobody awaits it where this call is cancelled
        self._waiting.append(text)
        # The call that has the lock scores batches of all waiting texts, until its own text is among them. Another call
        # may have scored its text before.
        try:
            async with self._batch_lock:
                while not text.score.done():
                    await self._score_batch(loop)
        finally:
            if text in self._waiting:  # this call was cancelled
                self._waiting.remove(text)
        return await text.score

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False)

    async def _score_batch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._waiting.sort(key=lambda text: len(text.token_ids))
        batch = self._waiting[-self._options.batch :]
        self._waiting = self._waiting[: -self._options.batch]
        computation = loop.run_in_executor(self._thread, self._forward, [text.token_ids for text in batch])
        try:
            scores = await asyncio.shield(computation)
        except asyncio.CancelledError:  # this call was cancelled: another call scores the texts of the batch
            self._waiting += [text for text in batch if not text.score.done()]
            raise
        except Exception as error:  # noqa: BLE001 - it is raised again in every call of the batch
            for text in batch:
                text.score.set_exception(error)
            return
        for text, score in zip(batch, scores, strict=True):
            text.score.set_result(score)

    def _load(self) -> None:
        options = self._options
        device = options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        on_cuda = device.startswith("cuda")
        half = options.dtype is ComputeDtype.BFLOAT16
        if options.dtype is ComputeDtype.AUTO and on_cuda:
            half = torch.cuda.get_device_capability(device) >= BFLOAT16_CAPABILITY
        if options.threads and not on_cuda:
            torch.set_num_threads(options.threads)
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        self._tokenizer = AutoTokenizer.from_pretrained(options.path, **local)
        model = AutoModelForSequenceClassification.from_pretrained(
            options.path, use_safetensors=True, dtype=torch.bfloat16 if half else torch.float32, **local
        )
        self._model_padding = model.config.get_text_config().pad_token_id
        self._model = model.to(device).eval()

    def _tokens(self, prompt: str, messages: Any, completion: str) -> list[int]:
        options = self._options
        if options.chat:
            turns = messages or [{"role": "user", "content": prompt}]
            answer = {"role": "assistant", "content": completion}
            text = self._tokenizer.apply_chat_template([*turns, answer], tokenize=False)
            token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            token_ids = self._tokenizer(prompt + completion)["input_ids"]
        if len(token_ids) > options.max_tokens:
            raise ValueError(
                f"{len(token_ids)} tokens are more than the reward model's max_tokens = {options.max_tokens}: raise it"
            )
        return list(token_ids)

    def _forward(self, rows: Sequence[list[int]]) -> list[float]:
        """Scores of ``rows``, in their order. The rows are padded on the right."""
        longest = max(len(row) for row in rows)
        padding = self._model_padding
        if padding is None:
            # transformers scores a decoder at the last token that is no padding, so padding must be in no row.
            tokens_of_rows = {token for row in rows for token in row}
            padding = next(token for token in itertools.count() if token not in tokens_of_rows)
            self._model.config.get_text_config().pad_token_id = padding
        ids = torch.tensor([row + [padding] * (longest - len(row)) for row in rows], device=self._model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=ids.device)
        with torch.inference_mode():
            logits = self._model(input_ids=ids, attention_mask=mask).logits[:, max(self._options.label, 0)].float()
        scores = torch.sigmoid(logits) if self._options.sigmoid else logits
        return [float(score) for score in scores]
