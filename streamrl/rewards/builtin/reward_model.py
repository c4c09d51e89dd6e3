"""A Hugging Face sequence classifier that scores completions in batches. Imported when the first one comes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from streamrl.recipe.sections import ComputeDtype
from streamrl.rewards.builtin.reward_model_options import RewardModelOptions


class _Waiting(msgspec.Struct, eq=False):
    """A text that waits for its score."""

    token_ids: list[int]
    score: asyncio.Future[float]


def _consume_exception(score: asyncio.Future[float]) -> None:
    """Retrieve the exception of a score whose call was cancelled, which nobody awaits."""
    if not score.cancelled():
        score.exception()


class BatchedClassifier:
    """Scores what came in while the batch before was computed, longest with longest. Belongs to one event loop. The
    model is loaded and run on a thread of its own, so the loop stays free."""

    def __init__(self, options: RewardModelOptions) -> None:
        self._options = options
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward model")
        self._loaded: asyncio.Lock = asyncio.Lock()
        self._turn = asyncio.Lock()
        self._waiting: list[_Waiting] = []
        self._model: Any = None
        self._tokenizer: Any = None
        self._own_padding: int | None = None

    async def score(self, prompt: str, messages: Any, completion: str) -> float:
        """The logit (or its sigmoid). Raises ``ValueError`` for a text that is too long or that the template refuses,
        ``OSError`` for a model that cannot be loaded."""
        loop = asyncio.get_running_loop()
        async with self._loaded:
            if self._model is None:
                await loop.run_in_executor(self._thread, self._load)
        ours = _Waiting(self._tokens(prompt, messages, completion), loop.create_future())
        ours.score.add_done_callback(_consume_exception)
        self._waiting.append(ours)
        # A call that has the turn scores a batch of all that wait; its own score may have come with another batch.
        try:
            async with self._turn:
                while not ours.score.done():
                    await self._score_batch(loop)
        finally:
            if ours in self._waiting:  # it was cancelled
                self._waiting.remove(ours)
        return await ours.score

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False)

    async def _score_batch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._waiting.sort(key=lambda waiting: len(waiting.token_ids))
        batch = self._waiting[-self._options.batch :]
        self._waiting = self._waiting[: -self._options.batch]
        computed = loop.run_in_executor(self._thread, self._forward, [waiting.token_ids for waiting in batch])
        try:
            scores = await asyncio.shield(computed)
        except asyncio.CancelledError:  # ours came too late: the others go back to wait
            self._waiting += [waiting for waiting in batch if not waiting.score.done()]
            raise
        except Exception as error:  # noqa: BLE001 - it is raised again in every call of the batch
            for waiting in batch:
                waiting.score.set_exception(error)
            return
        for waiting, score in zip(batch, scores, strict=True):
            waiting.score.set_result(score)

    def _load(self) -> None:
        options = self._options
        on_cuda = torch.cuda.is_available() if options.device == "auto" else options.device.startswith("cuda")
        device = options.device if options.device != "auto" else "cuda" if on_cuda else "cpu"
        half = options.dtype is ComputeDtype.BFLOAT16 or (options.dtype is ComputeDtype.AUTO and on_cuda)
        if options.threads and not on_cuda:
            torch.set_num_threads(options.threads)
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        self._tokenizer = AutoTokenizer.from_pretrained(options.path, **local)
        model = AutoModelForSequenceClassification.from_pretrained(
            options.path, use_safetensors=True, dtype=torch.bfloat16 if half else torch.float32, **local
        )
        self._own_padding = model.config.get_text_config().pad_token_id
        self._model = model.to(device).eval()

    def _tokens(self, prompt: str, messages: Any, completion: str) -> list[int]:
        options = self._options
        if options.chat:
            turns = messages if messages else [{"role": "user", "content": prompt}]
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
        """Scores of rows padded on the right, in their order."""
        longest = max(len(row) for row in rows)
        padding = self._own_padding
        if padding is None:
            # A decoder's score is that of the last token, which transformers finds as the last that is no padding.
            used = {token for row in rows for token in row}
            padding = next(token for token in itertools.count() if token not in used)
            self._model.config.get_text_config().pad_token_id = padding
        ids = torch.tensor([row + [padding] * (longest - len(row)) for row in rows], device=self._model.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=ids.device)
        with torch.inference_mode():
            logits = self._model(input_ids=ids, attention_mask=mask).logits[:, max(self._options.label, 0)].float()
        return [float(score) for score in (torch.sigmoid(logits) if self._options.sigmoid else logits)]
