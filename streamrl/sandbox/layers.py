"""Which layers of isolation this machine has, and whether they are enough to run code that nobody has read."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from functools import cache

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.sandbox.answers import SandboxError
from streamrl.sandbox.sandbox import ALL_LAYERS, Sandbox

_DOCUMENT = "docs/rewards_code.md"


class LayersFound(msgspec.Struct, frozen=True):
    """``held``: layers that were built and tried; ``missing``: why others could not be."""

    held: tuple[str, ...]
    missing: dict[str, str]

    @property
    def isolating(self) -> bool:
        """Whether files, network and other processes are out of reach. Landlock alone leaves UDP and signals open."""
        return "namespaces" in self.held or "seccomp" in self.held


@cache
def available_layers() -> LayersFound:
    """What this machine has, by starting a sandbox once (about a tenth of a second). Raises nothing."""
    if sys.platform != "linux":
        return LayersFound((), dict.fromkeys(ALL_LAYERS, f"{sys.platform} has none of them: Linux only"))
    return probe_layers(ALL_LAYERS)


def probe_layers(layers: tuple[str, ...], user: int | None = None) -> LayersFound:
    """Those of ``layers`` that hold when a sandbox is started (as ``user``)."""
    found: list[LayersFound] = []

    async def ask() -> None:
        try:
            async with Sandbox(layers, user=user) as sandbox:
                found.append(LayersFound(await sandbox.layers(), await sandbox.missing()))
        except (SandboxError, OSError) as error:
            found.append(LayersFound((), dict.fromkeys(layers, str(error))))

    # In a thread: the caller may be on an event loop already.
    thread = threading.Thread(target=lambda: asyncio.run(ask()), name="sandbox probe")
    thread.start()
    thread.join()
    return found[0]


def require_isolation(found: LayersFound) -> None:
    """Raise ``RecipeError`` where code could reach files, the network or other processes."""
    if found.isolating:
        return
    reasons = "; ".join(f"{name}: {why}" for name, why in found.missing.items()) or "none was asked for"
    raise RecipeError(
        [
            (
                f'reward "code" would run a model\'s code without isolation on this machine ({reasons}): allow user '
                f"namespaces (kernel.unprivileged_userns_clone = 1, or see {_DOCUMENT} for containers), or a kernel "
                "with seccomp filters on x86-64 or aarch64; or set rewards.options.allow_unsandboxed = true to run it "
                f"as user {os.getuid()} with everything that user may do"
            )
        ]
    )
