"""Install harnesses from their registries into a folder, and run each on a task of two turns with a tool at the real
endpoint, over a policy whose texts are known: does the harness finish, does its second turn go on from the tokens of
the first, and what does it ask and not get?"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from campaigns.endpoint_requests import small_tokenizer
from campaigns.harnesses.harness import HARNESSES, NPM, PYPI, RESULT, Harness
from streamrl.base.types import FinishReason, TokenArray, Turn, token_array
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.run.environments.chat_tokens import ChatModel
from streamrl.run.environments.endpoint_server import EndpointServer, Receive
from streamrl.run.environments.endpoint_session import EndpointSession

_SECONDS = 180.0
_SIDE = "A sum."


class KnownTexts:
    """A policy that calls the tool of a harness, and answers once the prompt has its result. Requests that do not
    offer the tool, as for a title, get a short text. ``contexts``: token ids up to the end of each turn; ``kinds``:
    what each turn was; ``after``: the turn that each goes on from (-1: none)."""

    def __init__(self, tokenizer: Tokenizer, harness: Harness) -> None:
        self.tokenizer = tokenizer
        self.harness = harness
        self.contexts: list[list[int]] = []
        self.kinds: list[str] = []
        self.after: list[int] = []

    async def sample(
        self, appended: TokenArray, *, after: int | None = None, max_tokens: int = 0, stop: tuple[str, ...] = ()
    ) -> Turn:
        await anyio.lowlevel.checkpoint()
        assert after is not None
        before = [*(self.contexts[after] if after >= 0 else []), *appended]
        prompt = self.tokenizer.decode(token_array(before), skip_special=False)
        kind = "side"
        text = _SIDE
        if self.harness.tool in prompt:
            kind = "answering" if RESULT in prompt else "calling"
            text = self.harness.answering if kind == "answering" else self.harness.calling
        # Ids character by character: no tokenizer would make them of the text again.
        ids = [token for character in text for token in self.tokenizer.encode_fragment(character)]
        ids.append(self.tokenizer.eos_token_ids[0])
        self.contexts.append([*before, *ids])
        self.kinds.append(kind)
        self.after.append(after)
        return Turn(number=len(self.after) - 1, token_ids=token_array(ids), finish_reason=FinishReason.STOP)

    @property
    def goes_on(self) -> bool:
        """Whether a turn after the tool's result goes on from the tokens of the turn that called it."""
        calling = [number for number, kind in enumerate(self.kinds) if kind == "calling"]
        return any(
            kind == "answering" and after in calling and context[: len(self.contexts[after])] == self.contexts[after]
            for kind, after, context in zip(self.kinds, self.after, self.contexts, strict=True)
        )


class _NotedRequests(EndpointServer):
    """An endpoint that notes the bodies of requests."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Callable[[Any], Any]) -> bool:
        parts: list[bytes] = []

        async def noted() -> Any:
            message = await receive()
            parts.append(message.get("body", b""))
            if not message.get("more_body") and b"".join(parts):
                self.bodies.append({"path": scope["path"], **msgspec.json.decode(b"".join(parts), type=dict)})
                parts.clear()
            return message

        return await super().__call__(scope, noted, send)


def install(folder: Path) -> None:
    """Install the packages of all harnesses below ``folder``, unless they are there."""
    if not (folder / "venv").exists():
        venv.create(folder / "venv", with_pip=True)
        subprocess.run([folder / "venv/bin/pip", "install", "-q", *PYPI], check=True)
    if not (folder / "node").exists():
        subprocess.run(["npm", "install", "--silent", "--prefix", str(folder / "node"), *NPM], check=True)


async def try_harness(harness: Harness, folder: Path) -> dict[str, Any]:
    """Run a harness. Returns whether it finished and went on from tokens, what was ignored and refused, and the end of
    what it printed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home_name:
        home = Path(home_name)
        tokenizer = small_tokenizer(home)
        policy = KnownTexts(tokenizer, harness)
        server = _NotedRequests()
        session = EndpointSession("key-of-the-harness", policy, ChatModel(tokenizer))
        for name, text in harness.files.items():
            file = home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("@URL", server.base_url).replace("@KEY", session.key))
        program = home / "program.py"  # smolagents reads the source of its tools
        program.write_text(harness.program)
        command = [str(folder / "venv/bin/python"), str(program)]
        if harness.command:
            command = [str(folder / "node/node_modules/.bin" / harness.command[0]), *harness.command[1:]]
        variables = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "127.0.0.1", "LANG": "C.UTF-8"}
        variables |= {"OPENAI_BASE_URL": f"{server.base_url}/v1", "OPENAI_API_KEY": session.key}
        variables |= {"ANTHROPIC_BASE_URL": server.base_url, "ANTHROPIC_API_KEY": session.key}
        printed = b""
        code: int | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve)
            with server.serving(session), anyio.move_on_after(_SECONDS):
                result = await anyio.run_process(
                    command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=variables, cwd=home, check=False
                )
                printed = result.stdout
                code = result.returncode
            tasks.cancel_scope.cancel()
    text = printed.decode(errors="replace")
    lost = {name: count for name, count in session.figures.items() if name.startswith(("ignored", "refused", "not_"))}
    return {
        "finished": code == 0 and RESULT in text,
        "goes on": policy.goes_on,
        "turns": policy.kinds,
        "asks": sorted({name for body in server.bodies for name in body} - {"path", "messages", "input", "model"}),
        "paths": sorted({body["path"] for body in server.bodies}),
        "not given": lost,
        "refusal": session.refusal,
        "printed": text[-600:],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", help=f"of {', '.join(HARNESSES)}; none: all")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "streamrl-harnesses")
    parser.set_defaults(work=_work)


def _work(options: argparse.Namespace) -> int:
    install(options.folder)
    failed = 0
    for name, harness in HARNESSES.items():
        if options.names and not any(word in name for word in options.names):
            continue
        outcome = anyio.run(try_harness, harness, options.folder)
        is_good = outcome["finished"] and outcome["goes on"] is not harness.rewrites
        failed += int(not is_good)
        print(f"{'good' if is_good else 'BAD '} {name}")
        for key, value in outcome.items():
            if key != "printed" or not is_good:
                print(f"     {key}: {value}")
        sys.stdout.flush()
    return int(failed > 0)
