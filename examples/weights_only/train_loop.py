"""A plain torch loop that feeds a stock ``vllm serve``: streamrl's weight path, and nothing else of streamrl.

    python examples/weights_only/train_loop.py                          # starts a server of its own
    python examples/weights_only/train_loop.py --server http://host:8000 --endpoint tcp://10.0.0.1:*

The loop teaches the demo model to copy the answers of examples/sort, five optimizer steps between two pushes. The
server answers all the while; after each push it is asked for greedy tokens, and so is the torch model with the same
(published, bfloat16) weights: they must agree. For a server that runs already, its environment and options are:

    VLLM_PLUGINS=streamrl STREAMRL_ENGINE=1 VLLM_SERVER_DEV_MODE=1 \\
        vllm serve MODEL --weight-transfer-config '{"backend": "streamrl"}'

Between two hosts the publisher wants keys: see "Over a network" in docs/take_out.md.

Any torch model will do whose parameters carry the names of a checkpoint that the server's vLLM loads."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from streamrl.weights import (
    SERVER_OPTIONS,
    ShardSpec,
    VllmServer,
    WeightPublisher,
    announcement_of,
    push,
    server_variables,
)

SORT = Path(__file__).resolve().parents[1] / "sort"
STEPS_BETWEEN_PUSHES = 5
BATCH = 16
ANSWER_TOKENS = 12


class PushReport(msgspec.Struct, frozen=True):
    """One push: how much of the model changed, what went over the wire, how long the server stood, and whether the
    server's greedy tokens (``sampled``) are those of the torch model (``expected``)."""

    version: int
    changed_elements: int
    payload_bytes: int
    commit_seconds: float
    sampled: list[int]
    expected: list[int]


class Trainer:
    """The user's own loop: float32 masters, AdamW, next-token loss. It knows nothing of any server."""

    def __init__(self, directory: Path, learning_rate: float = 1e-3) -> None:
        torch.manual_seed(0)
        self.directory = directory
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        rows = [json.loads(row) for row in (SORT / "train.jsonl").read_text().splitlines()]
        self._texts = itertools.cycle(row["prompt"] + row["answer"] for row in rows)

    def step(self) -> float:
        """One optimizer step; returns the loss."""
        texts = [torch.tensor(self.tokenizer.encode(text).ids) for text in itertools.islice(self._texts, BATCH)]
        tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)
        loss = self.model(tokens, labels=labels).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def published_bits(self) -> dict[str, np.ndarray]:
        """What engines get: the bit patterns of the bfloat16 cast, flat, tied weights once."""
        return {
            name: parameter.detach().to(torch.bfloat16).reshape(-1).view(torch.int16).numpy().view(np.uint16)
            for name, parameter in self.model.named_parameters()
        }

    def shards(self) -> list[ShardSpec]:
        """This process is the only rank: its shards are whole tensors."""
        named = self.model.named_parameters()
        return [ShardSpec(name, "bfloat16", tuple(p.shape), 0, p.numel()) for name, p in named]

    @torch.no_grad()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """``count`` greedy tokens under the published weights."""
        own = {name: parameter.clone() for name, parameter in self.model.named_parameters()}
        for parameter in self.model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        for name, parameter in self.model.named_parameters():
            parameter.copy_(own[name])
        return tokens[len(prompt) :]


async def train_and_push(trainer: Trainer, address: str, endpoint: str, pushes: int) -> AsyncIterator[PushReport]:
    """Publish version 0, then train and push ``pushes`` times. ``endpoint``: where the server's workers pull from."""
    server = VllmServer(address)
    prompt = trainer.tokenizer.encode("3908:").ids
    publisher = WeightPublisher(
        endpoint,
        run_id=f"loop-{os.getpid()}",
        rank=0,
        shards=trainer.shards(),
        checkpoint=trainer.directory,  # the server has loaded it too: version 0 is the same, and nothing is sent
    )
    publisher.start()
    try:
        for version in range(pushes + 1):
            if version:
                for _ in range(STEPS_BETWEEN_PUSHES):
                    await asyncio.to_thread(trainer.step)
            published = await asyncio.to_thread(publisher.publish, version, trainer.published_bits())
            done = await push(server, announcement_of(version, [published]))
            publisher.acknowledge(version)
            yield PushReport(
                version=version,
                changed_elements=published.source.changed_elements,
                payload_bytes=done.payload_bytes,
                commit_seconds=done.seconds,
                sampled=await asyncio.to_thread(ask, address, prompt, ANSWER_TOKENS),
                expected=trainer.greedy(prompt, ANSWER_TOKENS),
            )
    finally:
        publisher.close()


def ask(address: str, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens from the server."""
    options = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = call(f"{address}/v1/completions", {"model": "policy", **options})
    return list(answer["choices"][0]["token_ids"])


def call(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST as JSON."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return dict(json.loads(response.read()))


@contextmanager
def own_server(model: Path, directory: Path) -> Iterator[str]:
    """A ``vllm serve`` of this machine's CPU or GPU, at the address that is yielded; it ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs. Its command line asks for a distribution named vllm, and CPU builds have another name.
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", str(model)]
    command += [
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--served-model-name",
        "policy",
        "--dtype",
        "float32",
        "--enforce-eager",
    ]
    command += ["--max-model-len", "128", "--max-num-seqs", "8", "--num-gpu-blocks-override", "40", *SERVER_OPTIONS]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
        "VLLM_RPC_BASE_PATH": str(directory),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    environment = {**variables, **os.environ, **server_variables()}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, process_group=0)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_up(address, process)
        yield address
    finally:
        process.terminate()
        process.wait()


def wait_until_up(address: str, process: subprocess.Popen[bytes], timeout_s: float = 240.0) -> None:
    """Return when the server answers."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with exit code {process.returncode}; its message is above")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"the server at {address} was not up after {timeout_s:g} s")


def told(report: PushReport) -> str:
    """One line."""
    agree = "as the torch model" if report.sampled == report.expected else f"NOT {report.expected}"
    return (
        f"version {report.version}: {report.changed_elements} elements changed, {report.payload_bytes} bytes sent, "
        f"commit {1e3 * report.commit_seconds:.1f} ms; the server samples {report.sampled}, {agree}"
    )


async def run(trainer: Trainer, address: str, endpoint: str, pushes: int) -> bool:
    """Train and tell; True when the server agreed after every push."""
    agreed = True
    async for report in train_and_push(trainer, address, endpoint, pushes):
        print(told(report), flush=True)
        agreed = agreed and report.sampled == report.expected
    return agreed


def main() -> int:
    """Exit code 1 when the server once sampled something else than the torch model."""
    arguments = argparse.ArgumentParser(description="Train in plain torch; push every few steps into vllm serve.")
    arguments.add_argument("--model", type=Path, default=SORT / "model")
    arguments.add_argument("--pushes", type=int, default=8)
    arguments.add_argument("--server", help="address of a server that runs already; it was started with --model")
    arguments.add_argument("--endpoint", default="tcp://127.0.0.1:*", help="where that server's workers can pull from")
    options = arguments.parse_args()
    trainer = Trainer(options.model)
    if options.server:
        return 0 if asyncio.run(run(trainer, options.server, options.endpoint, options.pushes)) else 1
    with tempfile.TemporaryDirectory() as name, own_server(options.model, Path(name)) as address:
        return 0 if asyncio.run(run(trainer, address, f"ipc://{name}/weights", options.pushes)) else 1


if __name__ == "__main__":
    sys.exit(main())
