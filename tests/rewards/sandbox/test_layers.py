"""Which layers there are, each by itself, and the refusal where none is."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from streamrl.base.errors import RecipeError
from streamrl.rewards.sandbox import reward, seccomp
from streamrl.rewards.sandbox import sandbox as sandbox_module
from streamrl.rewards.sandbox.reward import require_isolation
from streamrl.rewards.sandbox.sandbox import (
    ALL_LAYERS,
    LayersFound,
    Sandbox,
    SandboxError,
    available_layers,
    probe_layers,
)

HEADERS = [
    (0, Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")),
    (1, Path("/usr/include/asm-generic/unistd.h")),  # what aarch64 uses
]
# What gets out of a process that nothing holds: the secret, the host's files, its network, its processes.
REACH = """
import os, socket
def tried(name, what):
    try: print(name, what())
    except OSError: print(name, "held")
tried("read", lambda: open("@FILE@").read())
tried("write", lambda: open("@DIRECTORY@/new", "w"))
tried("library", lambda: open(os.__file__, "a"))
tried("process", lambda: open("/proc/@PID@/environ").read())
tried("tcp", lambda: socket.create_connection(("127.0.0.1", @TCP@), 1))
tried("unix", lambda: socket.socket(socket.AF_UNIX).connect("@UNIX@"))
tried("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\x00@ABSTRACT@"))
tried("kill", lambda: os.kill(@PID@, 9))
"""


def test_this_machine_has_every_layer() -> None:
    found = available_layers()
    assert set(found.active) | set(found.missing) == set(ALL_LAYERS)
    assert found.isolating  # the tests of this folder mean nothing without it


@pytest.mark.parametrize(
    "chosen", [("namespaces",), ("seccomp",), ("landlock", "seccomp"), ("namespaces", "landlock")], ids="+".join
)
async def test_layers_hold_without_the_others(chosen: tuple[str, ...], host: Any, limits: Any) -> None:
    async with Sandbox(chosen) as sandbox:
        assert (await sandbox.layers()).active == tuple(name for name in ALL_LAYERS if name in chosen)
        report, output = await sandbox.run_program(host.fill(REACH), b"", limits())
        ended, printed = await sandbox.run_program(b"print(sum(map(int, input().split())))", b"3 4", limits())
    assert [line.split()[1:] for line in output.decode().splitlines()] == [["held"]] * 8, output
    assert host.victim_lives and not host.contacted("tcp") and not (host.directory / "new").exists()
    assert (report.status, ended.status, printed) == (0, 0, b"7\n")


async def test_the_file_tree_is_read_only(limits: Any) -> None:
    """Also where the code's user owns the library."""
    source = (
        b"import os\nfor path in ('/', os.__file__, '/dev/null', '/tmp'): print(os.statvfs(path).f_flag & os.ST_RDONLY)"
    )
    async with Sandbox(("namespaces",)) as sandbox:
        _, output = await sandbox.run_program(source, b"", limits())
    assert output.split() == [b"1", b"1", b"1", b"0"]


async def test_without_layers_it_reaches_everything(host: Any, limits: Any) -> None:
    async with Sandbox(()) as sandbox:
        _, output = await sandbox.run_program(host.fill(REACH), b"", limits())
    assert "held" not in output.decode()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("/usr/bin/python3"), reason="needs root, to become another")
async def test_an_unprivileged_user_has_the_same_layers(host: Any, limits: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sandbox_module.sys, "executable", "/usr/bin/python3")
    popen = partial(subprocess.Popen, user=65534, extra_groups=[])
    monkeypatch.setattr(sandbox_module.subprocess, "Popen", popen)
    try:
        async with Sandbox() as sandbox:
            assert (await sandbox.layers()).active == ALL_LAYERS, await sandbox.layers()
            _, output = await sandbox.run_program(host.fill(REACH), b"", limits())
            order = {"setup": "", "questions": ["f(2)"]}
            report, answer = await sandbox.run_module(b"def f(x): return x", order, limits())
    except SandboxError as error:
        pytest.skip(f"another user cannot read this folder or the system's interpreter: {error}")
    assert [line.split()[1:] for line in output.decode().splitlines()] == [["held"]] * 8, output
    assert (report.status, answer.values) == (0, [2])


def test_landlock_alone_is_not_isolation() -> None:
    found = probe_layers(("landlock",))
    assert found.active == ("landlock",) and not found.isolating


def test_without_a_layer_the_reward_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    nothing = LayersFound((), {"namespaces": "Operation not permitted", "seccomp": "no such call"})
    monkeypatch.setattr(reward, "available_layers", lambda: nothing)
    with pytest.raises(RecipeError, match=r"Operation not permitted.*allow_unsandboxed = true"):
        reward.CODE()
    with caplog.at_level(logging.WARNING):
        reward.CODE(allow_unsandboxed=True)
    assert "WITHOUT A SANDBOX" in caplog.text


def test_with_a_layer_it_is_not(caplog: Any) -> None:
    require_isolation(LayersFound(("seccomp",), {"namespaces": "no"}))
    with caplog.at_level(logging.WARNING):
        reward.CODE(allow_unsandboxed=True)
    assert not caplog.text


def test_another_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module.sys, "platform", "darwin")
    found = available_layers.__wrapped__()
    assert found.active == () and "Linux only" in found.missing["namespaces"]


@pytest.mark.parametrize("options", [{"time_limit": 3}, {"timeout_s": "x"}, {"memory_mb": 0}, {"value": "some"}])
def test_wrong_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(options))):
        reward.CODE(**options)


@pytest.mark.parametrize(("machine", "header"), HEADERS, ids=["x86-64", "aarch64"])
def test_numbers_of_system_calls_are_those_of_the_kernel(machine: int, header: Path) -> None:
    if not header.exists():
        pytest.skip(f"no {header}: install the kernel's headers for user space")
    text = header.read_text()
    found = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    tables = seccomp._ALWAYS | seccomp._PATHS | seccomp._MODES | seccomp._PROCESSES
    allowed = {name: numbers[machine] for name, numbers in tables.items() if numbers[machine] is not None}
    # The generic table gives a few a number under their 64-bit name.
    named = {name: found.get(name, found.get({"newfstatat": "fstatat", "mmap": "mmap"}.get(name, name)))
             for name in allowed}  # fmt: skip
    assert allowed == named


def test_the_filter_is_short_and_ends_with_a_refusal() -> None:
    for machine in (0, 1):
        program = seccomp.assemble(machine, paths=True, modes=True, processes=True, only_pid=None)
        assert len(program) % 8 == 0 and len(program) // 8 < 4096
        assert (0x50000 | 38).to_bytes(4, "little") == program[-4:]
