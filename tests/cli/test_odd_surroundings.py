"""``streamrl`` in odd surroundings: screens that take nothing, closed descriptors, odd directories, signals."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from builders.files import SORT_RECIPE as EXAMPLE
from builders.files import json_lines

from streamrl.processes.exit_reason import Death
from streamrl.recipe.rules.load_recipe import dump_recipe, load_recipe
from streamrl.recipe.toml_text import toml_value

STREAMRL = shlex.join([sys.executable, "-m", "streamrl"])


def arguments(root: Path, **settings: object) -> list[str]:
    """Of the demo with simulated engines: two steps of eight completions."""
    (root / "reward.py").write_text("async def reward(completion):\n    return len(completion) % 7 / 6\n")
    common = {
        "run.directory": str(root / "runs"),
        "run.steps": 2,
        "engines.kind": "simulated",
        "rewards.0.function": f"{root / 'reward.py'}:reward",
        "rollout.prompts_per_batch": 2,
        "rollout.group_size": 4,
        "sampling.max_tokens": 32,
        "evaluation.prompts": "",
        "training.advanced.threads": 1,
        "checkpoint.advanced.min_free_gib": 0.0,
    }
    chosen = common | {key.replace("__", "."): value for key, value in settings.items()}
    return [str(EXAMPLE), *(part for key, value in chosen.items() for part in ("--set", f"{key}={toml_value(value)}"))]


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run by a shell, for its redirections."""
    env = os.environ | environment
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=900, check=False, env=env)


@pytest.mark.long
@pytest.mark.parametrize("redirection", [">/dev/full", ">/dev/full 2>&1"])
def test_a_dry_run_ends_as_it_would_on_a_screen(tmp_path: Path, redirection: str) -> None:
    done = shell(
        f"{STREAMRL} train {shlex.join(arguments(tmp_path))} --dry-run {redirection}", PYTHONIOENCODING="ascii"
    )
    assert done.returncode == 0, done.stderr
    noted = [line for line in done.stderr.splitlines() if "stdout cannot be written" in line]
    assert len(noted) == (redirection == ">/dev/full") and "Traceback" not in done.stderr


def test_a_report_that_cannot_be_written_is_a_failure() -> None:
    assert shell(f"{STREAMRL} explain", PYTHONIOENCODING="ascii").returncode == 0
    assert shell(f"{STREAMRL} explain >/dev/full").returncode != 0


@pytest.mark.long
@pytest.mark.torch
def test_a_screen_that_takes_nothing_ends_no_run(tmp_path: Path) -> None:
    command = f"{STREAMRL} train {shlex.join(arguments(tmp_path))} >/dev/full 2>&1 <&-"
    assert shell(command, PYTHONIOENCODING="ascii").returncode == 0
    run = tmp_path / "runs" / "latest"
    lines = json_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2]
    log = (run / "logs" / "supervisor.log").read_text()
    assert log.count("stdout cannot be written (No space left on device)") == 1


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.skipif(os.getuid() != 0, reason="changes the user id")
def test_a_user_without_home_and_name_can_train() -> None:
    """A user without a home directory and a name trains where no other folder can be written. As most containers run
    programs. The capability only lets it read: the interpreter may be root's."""
    user = (
        "setpriv --reuid 12345 --regid 12345 --clear-groups --inh-caps +dac_read_search --ambient-caps +dac_read_search"
    )
    with tempfile.TemporaryDirectory() as own:  # sockets need a short path
        train = f"{STREAMRL} train {shlex.join(arguments(Path(own)))}"
        environment = f"env -u HOME -u USER -u LOGNAME TMPDIR={own}"
        done = shell(f"chown -R 12345 {own}; cd /; {user} {environment} {train}")
        assert done.returncode == 0 and "finished: 2 of 2 steps" in done.stdout, done.stdout + done.stderr
        home = Path(own, "streamrl-home-12345")
        assert home.stat().st_mode & 0o777 == 0o700 and home.stat().st_uid == 12345


@pytest.mark.skipif(os.getuid() != 0, reason="changes the user id")
def test_caches_that_belong_to_another_leave_the_home_as_it_is() -> None:
    script = "import os; from streamrl.base.run_process import ensure_home; ensure_home(); print(os.environ['HOME'])"
    script += "; print(os.environ['XDG_CACHE_HOME'])"
    with tempfile.TemporaryDirectory() as own:
        os.chown(own, 12345, -1)
        Path(own, ".cache").mkdir(mode=0o700)
        user = "setpriv --reuid 12345 --clear-groups --inh-caps +dac_read_search --ambient-caps +dac_read_search"
        done = shell(f"{user} env HOME={own} TMPDIR={own} {sys.executable} -c {shlex.quote(script)}")
    assert done.stdout.split() == [own, f"{own}/streamrl-home-12345"], done.stderr


def refused(command: str, **environment: str) -> str:
    """What ``command`` said when it refused its input in words."""
    done = shell(command, **environment)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


@pytest.mark.long
def test_nameless_and_textless_places_are_refused(tmp_path: Path) -> None:
    """Places without a name, or whose name is not text, are refused by a sentence."""
    dry_run = f"{STREAMRL} train {shlex.join(arguments(tmp_path, run__directory='runs'))} --dry-run"
    assert "run.directory: " in (said := refused(f"cd {tmp_path}; mkdir $'caf\\xe9'; cd $'caf\\xe9'; {dry_run}"))
    assert "is not UTF-8" in said
    gone = f"cd {tmp_path}; mkdir gone; cd gone; rmdir ../gone; {dry_run}"
    assert "the current directory was deleted: change to another" in refused(gone)
    null = f"""{STREAMRL} train {EXAMPLE} --set 'run.directory="a\\u0000b"' --dry-run"""
    assert "run.directory: " in (said := refused(null)) and "NUL" in said
    assert "is not UTF-8" in refused(f"mkdir {tmp_path}/$'\\xe9'; TMPDIR={tmp_path}/$'\\xe9' {dry_run}")


@pytest.mark.skipif(os.getuid() != 0, reason="mounts")
def test_a_system_without_proc_is_refused_in_words(tmp_path: Path) -> None:
    dry_run = f"{STREAMRL} train {shlex.join(arguments(tmp_path))} --dry-run"
    assert "/proc is not there: mount it" in refused(f"unshare -m sh -c {shlex.quote(f'umount -l /proc; {dry_run}')}")


@pytest.mark.long
def test_local_modules_do_not_shadow_pythons_own(tmp_path: Path) -> None:
    """A module in the current directory does not replace a module of Python's."""
    for name in ("queue", "types", "msgspec"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "own_rewards.py").write_text("def reward(completion):\n    return 1.0\n")
    given = shlex.join(arguments(tmp_path, rewards__0__function="own_rewards:reward"))
    done = shell(f"cd {tmp_path}; {Path(sys.executable).parent / 'streamrl'} train {given} --dry-run")
    assert done.returncode == 0 and "all checks passed" in done.stdout, done.stderr


@pytest.mark.long
def test_prompts_that_are_no_regular_file_are_refused(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.parquet"):
        os.mkfifo(tmp_path / name)
        given = shlex.join(arguments(tmp_path, prompts__train=str(tmp_path / name)))
        assert "is not a regular file" in refused(f"timeout -s KILL 240 {STREAMRL} train {given} --dry-run")


def test_a_file_of_the_run_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    recipe = load_recipe(EXAMPLE, arguments(tmp_path)[2::2])
    (run := tmp_path / "runs" / "sort-1").mkdir(parents=True)
    (run / "recipe.toml").write_text(dump_recipe(recipe))
    (run / "lock").mkdir()
    done = shell(f"{STREAMRL} resume {run}")
    assert done.returncode == 1 and done.stderr == f"error: {run}/lock: Is a directory\n"


def test_where_the_disk_is_full_a_child_says_so_by_its_exit_code(tmp_path: Path) -> None:
    child = (
        "import errno, sys; from pathlib import Path; from streamrl.processes.run_role import leave\n"
        "from streamrl.recipe.topology import ProcessPlan, Role\n"
        "def work(): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "leave(ProcessPlan(role=Role.CONTROLLER, index=0), Path('/proc/self'), work)"
    )
    code = shell(f"{shlex.join([sys.executable, '-c', child])} >/dev/full 2>&1").returncode
    death = Death(name="controller", exit_code=code, detected_s=0.0)
    assert death.is_fatal and "the disk is full" in death.describe() and "resume" in death.describe()


def test_a_log_has_a_refusal_in_one_line_with_the_users_trace(tmp_path: Path) -> None:
    """Not the stacks of the task groups through which it came."""
    child = (
        "import sys; from pathlib import Path; from streamrl.processes.run_role import leave\n"
        "from streamrl.base.errors import StreamRLError\n"
        "from streamrl.recipe.topology import ProcessPlan, Role\n"
        "def rows(): raise LookupError('no more rows')\n"
        "def work():\n"
        "    try: rows()\n"
        "    except LookupError as error:\n"
        "        try: raise StreamRLError('rows.py failed: correct it') from error\n"
        "        except StreamRLError as refusal: raise ExceptionGroup('', [ExceptionGroup('', [refusal])])\n"
        "leave(ProcessPlan(role=Role.CONTROLLER, index=0), Path(sys.argv[1]), work)"
    )
    done = shell(shlex.join([sys.executable, "-c", child, str(tmp_path)]))
    first, *trace = done.stderr.splitlines()
    assert done.returncode == 1 and first.endswith("StreamRLError: rows.py failed: correct it")
    assert trace[0].startswith("Traceback") and trace[-1] == "LookupError: no more rows"
    assert "Group" not in done.stderr and "StreamRLError" not in "".join(trace)


ONE_CORE = """
import os, sys
from pathlib import Path
from streamrl.base import run_process

if sys.argv[2:]:
    run_process.CPU_QUOTA = Path(sys.argv[2])
else:
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import torch
from streamrl.learning import process_group
from streamrl.learning.options import trainer_options
from streamrl.recipe.rules.load_recipe import load_recipe

chosen = trainer_options(load_recipe(sys.argv[1]), 0, "run", "ipc:///s/weights")
process_group.use_threads(0)
print(chosen.threads, chosen.idle_threads, chosen.freed_threads, torch.get_num_threads())
"""


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one core is all that there is")
@pytest.mark.parametrize("quota", ["", "100000 100000"])
def test_threads_are_those_of_the_cores_that_a_process_may_use(tmp_path: Path, quota: str) -> None:
    """In a container, or under taskset: threads of the host's other cores wait in turn for the one that there is."""
    file = tmp_path / "cpu.max"
    file.write_text(quota)
    command = [sys.executable, "-c", ONE_CORE, str(EXAMPLE), *([str(file)] if quota else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout == "1 1 (1,) 1\n", done.stderr
