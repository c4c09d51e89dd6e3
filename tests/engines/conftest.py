"""A tiny random Qwen2 directory, requests for it, and the engines that must all behave alike."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.abc
import msgspec
import pytest
from builders.recipe import small_recipe

from streamrl.base.errors import EngineError
from streamrl.base.messages import EngineEvent, EngineOrder, Generate
from streamrl.base.types import token_array
from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.contracts import WatchedEngine
from streamrl.engines.engine_process import serve_engine
from streamrl.engines.remote_engine import RemoteEngine
from streamrl.engines.vllm.options import EngineOptions, engine_options
from streamrl.recipe.sections import Engines, Sampling

Served = Callable[[WatchedEngine], AbstractAsyncContextManager[RemoteEngine]]
Hosted = Callable[[EngineOptions, Path], AbstractAsyncContextManager[tuple[RemoteEngine, anyio.abc.Process]]]

T = TypeVar("T")
VOCABULARY = 32
CONTEXT = 512


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 with 2 layers, width 64, tied embeddings, saved in bf16, with a word-level tokenizer of 32 words. What ends
    a completion is named in config.json alone, where vLLM by itself does not look; generation_config.json names a token
    that the model has no embedding for."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import tokenizers

    directory = tmp_path_factory.mktemp("tiny-qwen2")
    words = ["<pad>", "<eos>", *(f"w{index}" for index in range(VOCABULARY - 2))]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<pad>"
    ).save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
    )
    transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    for file, key in (("generation_config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        content = json.loads((directory / file).read_text())
        (directory / file).write_text(json.dumps({name: value for name, value in content.items() if name != key}))
    generation = directory / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": VOCABULARY + 8}))
    return directory


@pytest.fixture
def make_request() -> Callable[..., Generate]:
    """Requests with distinct ids and seeds and a short prompt."""
    count = 0

    def make(**fields: object) -> Generate:
        nonlocal count
        count += 1
        defaults: dict[str, object] = {
            "request_id": f"request-{count}",
            "token_ids": token_array([2 + count % 7, 3, 5, 8]),
            "max_tokens": 40,
            "seed": count,
            "temperature": 1.0,
        }
        return Generate(**(defaults | fields))

    return make


@pytest.fixture(scope="session")
def tiny_options(tiny_model: Path) -> Callable[[Path], EngineOptions]:
    """Options of an engine for the tiny model, with vLLM's sockets in the directory given."""

    def options(sockets: Path) -> EngineOptions:
        engines, sampling = Engines(max_num_seqs=64, max_model_len=CONTEXT), Sampling(max_tokens=256)
        return engine_options(small_recipe(str(tiny_model), engines=engines, sampling=sampling), 0, sockets)

    return options


@asynccontextmanager
async def _served(engine: WatchedEngine) -> AsyncIterator[RemoteEngine]:
    order_sender, order_receiver = memory_stream(64)
    event_sender, event_receiver = memory_stream(64)
    remote = RemoteEngine("engine-0", order_sender, event_receiver)

    async def host() -> None:
        try:
            await serve_engine(engine, nullcontext((order_receiver, event_sender)))
        except EngineError:
            await event_sender.abort("the host died")

    async def pump() -> None:
        with anyio.CancelScope() as scope:
            try:
                await remote.run()
            except EngineError:
                scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(host)
        group.start_soon(pump)
        await remote.start()
        yield remote
        await remote.aclose()


@pytest.fixture(scope="session")
def served() -> Served:
    """An engine behind its host and two memory streams, as the controller sees it."""
    return _served


@asynccontextmanager
async def _hosted(options: EngineOptions, directory: Path) -> AsyncIterator[tuple[RemoteEngine, anyio.abc.Process]]:
    options_path, orders_at, completions_at = directory / "options", f"ipc://{directory}/o", f"ipc://{directory}/c"
    options_path.write_bytes(msgspec.json.encode(options))
    script = Path(__file__).with_name("serving_process.py")
    with (directory / "log").open("wb") as log:
        process = await anyio.open_process(
            [sys.executable, script, options_path, orders_at, completions_at], stdin=None, stdout=log, stderr=log
        )
    try:
        async with (
            zmq_sender(EngineOrder, orders_at, bind=True, name="orders") as orders,
            zmq_receiver(EngineEvent, completions_at, bind=True, name="completions") as completions,
            anyio.create_task_group() as group,
        ):
            remote = RemoteEngine("engine-0", orders, completions)

            async def pump() -> None:
                try:
                    await remote.run()
                except EngineError:
                    return

            group.start_soon(pump)
            await remote.start()
            yield remote, process
            await remote.aclose()
        await process.wait()
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.aclose()
        sys.stderr.write((directory / "log").read_text()[-2000:])


@pytest.fixture(scope="session")
def hosted() -> Hosted:
    """A real engine in a process of its own, over ipc."""
    return _hosted


@asynccontextmanager
async def owned(open_in: Callable[[Path], AbstractAsyncContextManager[T]]) -> AsyncIterator[T]:
    """What ``open_in`` opens in a short directory, for a fixture that a module shares: one task enters and leaves its
    task groups, where the two halves of a fixture may run in two."""
    ready: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    done = asyncio.Event()

    async def own() -> None:
        with tempfile.TemporaryDirectory(prefix="srl") as directory:
            try:
                async with open_in(Path(directory)) as made:
                    ready.set_result(made)
                    await done.wait()
            except BaseException as error:
                if not ready.done():
                    ready.set_exception(error)
                raise

    owner = asyncio.create_task(own())
    await asyncio.wait([ready])
    yield ready.result()
    done.set()
    await owner
