"""``Address``, a process of this file (``PORT LOG``) that gives logprobs of prompts, in the form of vLLM's completions.

Its teacher is a formula: the logprob of a token depends on it and on all tokens before it, and its tokens are those of
the demo. Each answer adds a line to LOG."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from streamrl.recipe.objectives.teacher import Teacher

VOCABULARY = Path(__file__).parents[2] / "examples" / "sort" / "model" / "tokenizer.json"


def logprobs_of(token_ids: Sequence[int]) -> list[float]:
    """A number for each token after the first, exact in float32."""
    before = 0
    values = []
    for token_id in token_ids:
        values.append(-((31 * before + token_id) % 97) / 16)
        before = (7 * before + token_id + 1) % 1009
    return values[1:]


@cache
def texts() -> dict[int, str]:
    """Texts of the demo's tokens."""
    vocabulary = json.loads(VOCABULARY.read_text())["model"]["vocab"]
    return {token_id: text for text, token_id in vocabulary.items()}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = body["prompt"]
        status, answer = 200, {"choices": [{"prompt_logprobs": [None]}]}
        for token_id, value in zip(ids[1:], logprobs_of(ids), strict=True):
            entry = {"logprob": value, "rank": 1, "decoded_token": texts().get(token_id)}
            answer["choices"][0]["prompt_logprobs"].append({str(token_id): entry})
        if body["model"] == "slow":
            time.sleep(0.6)
        if body["model"] not in ("teacher", "slow") or body["prompt_logprobs"] != 0:
            status, answer = 404, {"error": "no such model"}
        if body["model"] == "full":
            status, answer = 503, {"error": "no memory"}
        if body["model"] == "cut":  # what vLLM writes for a probability of 0
            status, impossible = 200, [{str(token_id): {"logprob": -9999.0}} for token_id in ids[1:]]
            answer = {"choices": [{"prompt_logprobs": [None, *impossible]}]}
        if body["model"] == "silent":  # a server that does not know prompt_logprobs
            status, answer = 200, {"choices": [{"text": "", "prompt_logprobs": None}]}
        content = json.dumps(answer).encode()
        with open(sys.argv[2], "a") as log:
            log.write("asked\n")
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if body["model"] == "packed":  # and it is not
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """No output."""


class Address:
    """The process at an address."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, __file__, str(self.port), str(self.log)])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def teacher(self, **fields: object) -> Teacher:
        endpoint = f"http://127.0.0.1:{self.port}/v1"
        return Teacher(endpoint=endpoint, model="teacher", tokenizer="t", **fields)  # type: ignore[arg-type]


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
