"""Real commands in odd surroundings: descriptors, limits, environments, file systems, damaged runs, signals, prompts.

Each case is a shell script that runs ``streamrl train`` or ``streamrl resume`` with simulated engines, or a dry run
where the surroundings are judged there. It passes when the command ends in time and without a traceback, when it does
what the case expects (the run is done, or refused in a sentence), when every reward of the trace is one that the
function returned (none is 0), and when no process is left. Cases that mount something are skipped without root."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from campaigns.hostile.real_runs import RECIPE, flags

AT_ONCE = 2
LIMIT_S = 150.0
LEAST_REWARD = 0.25

REWARD = "def reward(completion):\n    return 0.25 + len(completion) % 4 / 4\n"
SETTINGS: dict[str, object] = {
    "run.name": "odd",
    "run.steps": 2,
    "rollout.prompts_per_batch": 2,
    "checkpoint.advanced.min_free_gib": 0.0,
}

# What every script begins with: ``train``, ``dry`` and ``resume`` of this case, in its own directory.
PRELUDE = """\
cd {root}; export ROOT={root} BASE={base} RECIPE={recipe}
python={python}; given=({given} --set run.directory={root}/runs)
train() {{ exec_ train "$RECIPE" "${{given[@]}}" "$@"; }}
dry() {{ train --dry-run "$@"; }}
background() {{ exec $wrap "$python" -m streamrl train "$RECIPE" "${{given[@]}}" "$@"; }}
resume() {{ exec_ resume "$@"; }}
exec_() {{ $wrap "$python" -m streamrl "$@"; }}
steps() {{ cat runs/odd-*/metrics.jsonl 2>/dev/null | grep -c '"kind":"step"'; }}
await() {{ while [ "$(steps)" -lt "$1" ] && kill -0 $pid; do sleep 0.05; done; }}
"""

FULL = ("disk is full", "No space left on device")


class Case(msgspec.Struct, frozen=True):
    """``expects``: ``done`` (exit code 0, and the steps of the run where there is one), ``refused`` (exit code 1 or 2,
    and a sentence), ``full`` (exit code 0, or 1 and a sentence that names the full disk), ``either``. ``steps``: of the
    run in ``runs/``; None: a dry run, or it does not matter."""

    name: str
    expects: str
    script: str
    steps: int | None = None


def dry(name: str, before: str, arguments: str = "", *, expects: str = "done", after: str = "") -> Case:
    """A dry run."""
    return Case(f"dry run: {name}", expects, f"{before} dry {arguments} {after}")


def whole(name: str, before: str, arguments: str = "", *, expects: str = "done", after: str = "") -> Case:
    """A run of two steps."""
    return Case(name, expects, f"{before} train {arguments} {after}", 2)


def resumed(name: str, damage: str, arguments: str = "", *, expects: str = "done", run: str = "runs/odd-1") -> Case:
    """One more step of a copy of a run that is done."""
    script = f"mkdir runs; cp -a $BASE runs/odd-1; {damage}\nresume {run} --set run.steps=3 {arguments}"
    return Case(f"resume: {name}", expects, script, 3)


def signalled(name: str, when: str, then: str, *, expects: str = "done", steps: int | None = None) -> Case:
    """A run of 60 steps that gets signals."""
    script = f"background --set run.steps=60 & pid=$!; {when}; {then}; wait $pid"
    return Case(f"signal: {name}", expects, script, steps)


def mounted(case: Case, *, unshared: str = "-m") -> Case:
    """``case`` in a mount namespace of its own."""
    return msgspec.structs.replace(case, script=f"#unshare {unshared}\n{case.script}")


TMPFS = "mkdir -p $ROOT/disk; mount -t tmpfs -o {} none $ROOT/disk;"
DISK = "--set run.directory=$ROOT/disk/runs"
EDIT = "background --set run.steps=6 --set prompts.train=$ROOT/rows.jsonl & pid=$!; await 1; {}; wait $pid"
ROWS = "head -4 " + str(RECIPE.parent / "train.jsonl") + " > rows.jsonl;"
PROMPTS = "--set prompts.train=$ROOT/{}"


def screens() -> Iterator[Case]:
    """Descriptors, and what is at their other ends."""
    yield whole("stdout is full", "", after=">/dev/full")
    yield whole("descriptors 0 to 2 are closed", "", after="<&- >&- 2>&-")
    yield whole("stdout is closed", "", after=">&-")
    yield whole("stdin is closed", "", after="<&-")
    yield whole("stderr is closed", "", after="2>&-")
    yield whole("stdout and stderr are full", "", after=">/dev/full 2>&1")
    yield whole("stdout takes ASCII", "PYTHONIOENCODING=ascii")
    yield whole("stdin never ends", "", after="</dev/zero")
    yield whole("many descriptors are inherited", 'for n in $(seq 20 120); do eval "exec $n</dev/null"; done;')
    spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    yield whole("a terminal of one column", f"echo '{spawn}' > spawn.py; export COLUMNS=1; wrap=\"$python spawn.py\";")
    yield whole("the reader goes away", "", after="| head -1", expects="either")
    yield whole("a slow reader", "", after="| (sleep 5; cat)")
    yield dry("stdout is full", "", after=">/dev/full")
    yield dry("descriptors 0 to 2 are closed", "", after="<&- >&- 2>&-")
    yield dry("stdout takes ASCII", "LC_ALL=C PYTHONUTF8=0")


def limits() -> Iterator[Case]:
    """What the system gives."""
    yield dry("16 descriptors", "ulimit -n 16;", expects="either")
    yield dry("32 descriptors", "ulimit -n 32;", expects="either")
    yield dry("files of 1 KiB", "ulimit -f 1;", expects="either")
    yield whole("64 descriptors", "ulimit -n 64;", expects="either")
    yield whole("128 descriptors", "ulimit -n 128;", expects="either")
    yield whole("files of 50 KiB", "ulimit -f 50;", expects="either")
    yield whole("a stack of 256 KiB", "ulimit -s 256;", expects="either")
    yield whole("1.5 GB of address space", "ulimit -v 1500000;", expects="either")
    yield dry("0.3 GB of address space", "ulimit -v 300000;", expects="either")
    yield whole("one core, the lowest priority", "wrap='nice -n 19 taskset -c 0';")
    yield whole("no locked memory", "ulimit -l 0;")


def environments() -> Iterator[Case]:
    """Variables, and the mask of modes."""
    for setting in (
        "HOME=",
        "HOME=/nowhere",
        "PATH=",
        "PYTHONOPTIMIZE=2",
        "PYTHONSAFEPATH=1",
        "PYTHONPATH=/nowhere",
        "PYTHONDONTWRITEBYTECODE=1",
        "OMP_NUM_THREADS=abc",
        "COLUMNS=abc",
        "TERM=nothing",
        "TZ=No/Where",
        "LANG=xx_XX.bogus LC_ALL=xx_XX.bogus",
        "CUDA_VISIBLE_DEVICES=99",
        "HF_HOME=/dev/null",
        "http_proxy=http://127.0.0.1:1 https_proxy=http://127.0.0.1:1",
        "STREAMRL_PARENT_PID=1 STREAMRL_RUN_MARKER=x",
    ):
        yield dry(setting, f"export {setting};")
    yield dry("HOME is not set", "unset HOME USER;")
    yield dry("100 KiB in one variable", "export LONG=$(head -c 100000 /dev/zero | tr '\\0' x);")
    yield whole("warnings are errors", "export PYTHONWARNINGS=error;", expects="either")
    yield whole("variables of torchrun are left over", "export RANK=7 WORLD_SIZE=8 MASTER_ADDR=no.where MASTER_PORT=1;")
    yield whole("OMP_NUM_THREADS is no number", "export OMP_NUM_THREADS=abc;")
    yield whole("modes are masked out", "umask 0777;", expects="either")
    yield whole("modes are open", "umask 0;")
    yield whole("TMPDIR is relative", "mkdir t; export TMPDIR=t;", expects="either")
    yield dry("TMPDIR is missing", "export TMPDIR=/nowhere;")
    yield dry("TMPDIR is a file", "touch t; export TMPDIR=$ROOT/t;")
    yield whole("TMPDIR is long", "t=$ROOT/$(printf 'x%.0s' {1..120}); mkdir $t; export TMPDIR=$t;", expects="refused")
    yield dry("TMPDIR is not UTF-8", "mkdir $'\\xe9'; export TMPDIR=$ROOT/$'\\xe9';", expects="refused")
    yield mounted(whole("TMPDIR is full", TMPFS.format("size=4k") + "export TMPDIR=$ROOT/disk;", expects="either"))


def directories() -> Iterator[Case]:
    """Where it is started, and where its files go."""
    for name in ("with space", "quo'te\"", "new\nline", "100%s", "$HOME", "*[x]", "日本 🙂", "-rf", "x" * 200):
        yield dry(f"in {name[:12]!r}", f"mkdir -- {shlex.quote(name)}; cd -- {shlex.quote(name)};")
    yield Case("a run in odd names", "done", "mkdir 'a b%$*[é]'; train --set \"run.directory=$ROOT/a b%\\$*[é]/runs\"")
    yield dry(
        "in a name that is not UTF-8", "mkdir $'\\xe9'; cd $'\\xe9';", "--set run.directory=runs", expects="refused"
    )
    yield dry("in a deleted directory", "mkdir gone; cd gone; rmdir ../gone;", expects="refused")
    yield Case("resume in a deleted directory", "refused", "mkdir gone; cd gone; rmdir ../gone; resume $BASE")
    modules = "for m in queue types msgspec psutil; do echo 'raise RuntimeError' > $m.py; done;"
    yield dry("modules of Python's names", modules + ' exec_() { "$(dirname "$python")/streamrl" "$@"; };')
    yield whole("a directory named streamrl", "mkdir streamrl;")
    for value in ("/dev/null", "/proc/x", "$ROOT/file", "$ROOT/loop", "/dev/full/runs"):
        before = "touch file; ln -s loop loop;"
        yield dry(f"run.directory is {value}", before, f'--set "run.directory={value}"', expects="refused")
    yield dry("run.directory has a NUL", "", "--set 'run.directory=\"a\\u0000b\"'", expects="refused")
    yield dry("run.name is a path", "", "--set run.name=../x", expects="refused")
    yield whole("run.directory is a link", "mkdir real; ln -s real runs;")
    yield dry("the recipe is a directory", "RECIPE=/tmp;", expects="refused")
    yield dry("the recipe is not there", "RECIPE=/nowhere.toml;", expects="refused")


def systems() -> Iterator[Case]:
    """Mounts and namespaces."""
    yield mounted(dry("runs are read-only", TMPFS.format("ro"), DISK, expects="refused"))
    for size in ("16k", "40k", "80k", "192k"):
        yield mounted(
            whole(f"runs have {size}", TMPFS.format(f"size={size}"), DISK + " --set run.steps=6", expects="full")
        )
    yield mounted(whole("runs have 20 inodes", TMPFS.format("nr_inodes=20"), DISK, expects="either"))
    yield mounted(resumed("read-only", "mount --bind runs runs; mount -o remount,ro,bind runs;", expects="refused"))
    yield mounted(dry("no /proc", "umount -l /proc;", expects="refused"))
    yield mounted(whole("/dev/shm is tiny", "mount -t tmpfs -o size=4k none /dev/shm;", expects="either"))
    yield mounted(whole("/dev/shm is read-only", "mount -t tmpfs -o ro none /dev/shm;", expects="either"))
    yield mounted(whole("TMPDIR is noexec", TMPFS.format("noexec") + "export TMPDIR=$ROOT/disk;"))
    yield mounted(whole("no network, not even loopback", "", expects="either"), unshared="-n")
    yield mounted(whole("a process namespace", ""), unshared="-p -f --mount-proc")
    yield mounted(whole("100 days after boot", ""), unshared="-T -f --boottime 8640000 --monotonic 8640000")


def damaged() -> Iterator[Case]:
    """Runs that were renamed, moved or damaged."""
    run = "runs/odd-1"
    yield resumed("as it is", ":")
    yield resumed("renamed", f"mv {run} runs/best", run="runs/best")
    yield resumed("moved", f"mkdir other; mv {run} other/; rmdir runs; mv other runs")
    yield resumed(
        "by a link", f"ln -s odd-1 runs/latest; mv {run} runs/odd-2; ln -sfn odd-2 runs/latest", run="runs/latest"
    )
    yield resumed("a byte of the journal is missing", f"f=$(ls {run}/journal/*.journal | tail -1); truncate -s -1 $f")
    yield resumed("no journal", f"rm -r {run}/journal", expects="refused")
    yield resumed("the journal is a file", f"rm -r {run}/journal; touch {run}/journal", expects="refused")
    yield resumed(
        "the journal is garbage", f"for f in {run}/journal/*.journal; do echo x > $f; done", expects="refused"
    )
    yield resumed("lock is a directory", f"rm {run}/lock; mkdir {run}/lock", expects="refused")
    yield resumed("logs is a file", f"rm -r {run}/logs; touch {run}/logs", expects="refused")
    yield resumed("exit is a file", f"rm -r {run}/exit; touch {run}/exit", expects="refused")
    yield resumed("topology.json is garbage", f"echo '{{' > {run}/topology.json")
    yield resumed("inputs.json is garbage", f"echo '{{' > {run}/inputs.json", expects="either")
    yield resumed("the recipe is missing", f"rm {run}/recipe.toml", expects="refused")
    yield resumed("the recipe is garbage", f"echo '[[[' > {run}/recipe.toml", expects="refused")
    yield resumed("the recipe has a byte order mark", f"sed -i '1s/^/\\xef\\xbb\\xbf/' {run}/recipe.toml")
    yield resumed(
        "metrics.jsonl is a directory", f"rm {run}/metrics.jsonl; mkdir {run}/metrics.jsonl", expects="refused"
    )
    yield resumed("half a line of metrics", f"truncate -s -9 {run}/metrics.jsonl", expects="either")
    yield resumed("no checkpoints", f"rm -r {run}/checkpoints", expects="either")
    yield resumed("latest dangles", f"ln -sfn nothing {run}/checkpoints/latest")
    yield resumed("no trace", f"rm {run}/trace.jsonl")
    yield resumed("no modes", f"chmod 000 {run}", expects="either")
    yield resumed("locked by another", f"exec 9>{run}/lock; flock 9", expects="refused")
    yield resumed("an empty directory", "mkdir runs/empty", expects="refused", run="runs/empty")
    yield resumed("a file", "touch file", expects="refused", run="file")
    yield resumed("an unknown setting", ":", "--set run.stepz=4", expects="refused")


def signals() -> Iterator[Case]:
    """Signals, at moments of a run."""
    for name in ("INT", "TERM", "HUP"):
        kill = f"kill -{name} $pid"
        yield signalled(f"{name} after a step", "await 1", kill)
        yield signalled(f"{name} as it starts", "until [ -d runs ]; do sleep 0.02; done", kill, expects="either")
    yield signalled("TERM twice", "await 1", "kill -TERM $pid; sleep 0.2; kill -TERM $pid", expects="either")
    yield signalled("HUP, then the terminal is gone", "exec >&-; await 1", "kill -HUP $pid")
    yield Case(
        "signal: HUP under nohup",
        "done",
        "wrap=nohup; background --set run.steps=6 & pid=$!; await 1; kill -HUP $pid; wait $pid",
        6,
    )
    yield signalled(
        "STOP for three seconds", "await 1", "kill -STOP $pid; sleep 3; kill -CONT $pid; sleep 1; kill $pid"
    )
    yield signalled("PIPE and WINCH", "await 1", "kill -PIPE $pid; kill -WINCH $pid; sleep 1; kill $pid")
    yield Case(
        "signal: KILL, then resume",
        "done",
        "background --set run.steps=9 & pid=$!; await 2; kill -KILL $pid; wait $pid; sleep 2; resume runs/latest",
        9,
    )


def inputs() -> Iterator[Case]:
    """Prompts, models and recipes."""
    for name in ("rows.jsonl", "rows.parquet"):
        yield dry(f"{name} is a FIFO", f"mkfifo {name};", PROMPTS.format(name), expects="refused")
        yield dry(f"{name} is /dev/zero", f"ln -s /dev/zero {name};", PROMPTS.format(name), expects="refused")
        yield dry(f"{name} is a directory", f"mkdir {name};", PROMPTS.format(name), expects="refused")
        yield dry(f"{name} links to itself", f"ln -s {name} {name};", PROMPTS.format(name), expects="refused")
        yield dry(f"{name} is empty", f"touch {name};", PROMPTS.format(name), expects="refused")
    made = "{ printf '\\xef\\xbb\\xbf'; sed 's/$/\\r/' " + str(RECIPE.parent / "train.jsonl") + "; } > rows.jsonl;"
    yield dry("prompts with a byte order mark and CRLF", made, PROMPTS.format("rows.jsonl"))
    in_place = 'printf \'{"prompt": "5 4"   \' | dd of=rows.jsonl conv=notrunc status=none'
    yield Case("prompts are edited under the run", "refused", ROWS + EDIT.format(in_place))
    yield Case("prompts are truncated under the run", "refused", ROWS + EDIT.format(": > rows.jsonl"))
    yield Case("prompts are touched under the run", "done", ROWS + EDIT.format("touch -d 2001-01-01 rows.jsonl"), 6)
    yield Case("prompts are deleted under the run", "done", ROWS + EDIT.format("rm rows.jsonl"), 6)
    for setting in (
        "engines.count=1000000",
        "training.ranks=1000000",
        "rollout.group_size=100000000",
        "rollout.prompts_per_batch=1000000000",
        "rollout.max_staleness=1000000000",
        "evaluation.samples=1000000000",
        "reward_limits.advanced.processes=1000000000",
        "'engines.cores=[\"3-1\"]'",
        "'engines.cores=[\"0-99999999999\"]'",
    ):
        yield dry(setting, "", f"--set {setting}", expects="refused")
    recipe = "cd $ROOT; RECIPE=$ROOT/recipe.toml; given+=(--set model.path=" + str(RECIPE.parent / "model")
    recipe += " --set prompts.train=" + str(RECIPE.parent / "train.jsonl") + ");"
    yield dry("a recipe with a byte order mark", f"sed '1s/^/\\xef\\xbb\\xbf/' {RECIPE} > recipe.toml; {recipe}")
    yield dry("a recipe with CRLF", f"sed 's/$/\\r/' {RECIPE} > recipe.toml; {recipe}")
    yield dry("a recipe in UTF-16", f"iconv -t UTF-16 {RECIPE} > recipe.toml; {recipe}", expects="refused")
    yield dry("a recipe from a pipe", f"{recipe} cat {RECIPE} > kept.toml; exec 8< <(cat kept.toml); RECIPE=/dev/fd/8;")
    poison = (
        "from safetensors.torch import load_file, save_file; f='model/model.safetensors'; t=load_file(f); "
        "next(iter(t.values())).view(-1)[3] = float('nan'); save_file(t, f, {'format': 'pt'})"
    )
    broken = f'cp -a {RECIPE.parent}/model .; "$python" -c "{poison}";'
    yield whole("a weight is NaN", broken, "--set model.path=$ROOT/model", expects="refused")


def cases() -> list[Case]:
    """All of them, grouped by kind."""
    kinds = (screens, limits, environments, directories, systems, damaged, signals, inputs)
    return [case for kind in kinds for case in kind()]


def failures(case: Case, root: Path, base: Path) -> list[str]:
    """Run ``case`` in ``root``; what was wrong."""
    (root / "reward.py").write_text(REWARD)
    settings = SETTINGS | {"rewards.0.function": f"{root / 'reward.py'}:reward"}
    python, given = shlex.quote(sys.executable), shlex.join(flags(settings))
    prelude = PRELUDE.format(root=shlex.quote(str(root)), base=base, recipe=RECIPE, python=python, given=given)
    script = prelude + case.script
    if case.script.startswith("#unshare "):
        options = case.script.partition("\n")[0].removeprefix("#unshare ")
        script = f"exec unshare {options} bash -c {shlex.quote(script)}"
    out, err = root / "out.txt", root / "err.txt"
    command = [sys.executable, "-m", "campaigns.hostile.real_runs", script, str(out), str(err), str(LIMIT_S)]
    code, *left = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    text, complaint = out.read_text(errors="replace"), err.read_text(errors="replace")
    found = [f"left running: {process}" for process in left]
    found += [] if "Traceback" not in text + complaint else ["a traceback"]
    done, said = code == "0", "error: " in complaint or case.script.endswith("2>&-")
    if case.expects == "done" and not done:
        found.append(f"exit code {code}")
    elif case.expects == "full" and not (done or (code == "1" and any(words in complaint + text for words in FULL))):
        found.append(f"exit code {code}, and the disk is not named")
    elif case.expects == "refused" and (done or not said or code not in ("1", "2")):
        found.append(f"exit code {code}, {'a' if said else 'no'} sentence")
    elif code not in ("0", "129", "130", "143") and not (said and code in ("1", "2")):
        found.append(f"exit code {code}, no sentence")
    if done and case.steps is not None and case.expects == "done":
        found += wrong_steps(root / "runs", case.steps)
    found += [f"a reward of {reward}" for reward in rewards_below(root)]
    return [*found, *complaint.strip().splitlines()[-3:]] if found else []


def wrong_steps(runs: Path, steps: int) -> list[str]:
    """Whether another number of steps was recorded than ``steps``."""
    found = {path.resolve() for path in runs.glob("*/metrics.jsonl")}
    if len(found) != 1:
        return [f"{len(found)} files of metrics"]
    [metrics] = found
    seen = [line["step"] for line in map(json.loads, metrics.read_text().splitlines()) if line["kind"] == "step"]
    return [] if seen == list(range(1, steps + 1)) else [f"recorded steps {seen}"]


def rewards_below(root: Path) -> list[float]:
    """Rewards in traces that the function never returns."""
    traces = {path.resolve() for path in root.glob("**/trace.jsonl") if path.is_file()}
    lines = (json.loads(line) for path in traces for line in path.read_text().splitlines() if line.endswith("}"))
    return [line["reward"] for line in lines if line.get("reward") is not None and line["reward"] < LEAST_REWARD]


def run(out: Callable[[str], None], words: Sequence[str] = ()) -> int:
    """Run the cases (with ``words``: those that have one of them in their names). How many failed."""
    chosen = [case for case in cases() if not words or any(word in case.name for word in words)]
    if os.getuid() != 0:
        skipped = [case for case in chosen if case.script.startswith("#unshare")]
        chosen = [case for case in chosen if case not in skipped]
        out(f"skipped without root: {len(skipped)}")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="odd") as directory:
        root = Path(directory)
        (root / "base").mkdir()
        made = Case("the run that is resumed", "done", "train", 2)
        if wrong := failures(made, root / "base", root):
            out(f"FAILED {made.name}: {'; '.join(wrong)}")
            return 1
        [base] = (path for path in (root / "base" / "runs").iterdir() if not path.is_symlink())
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for case, wrong, seconds in pool.map(partial(_timed, root=root, base=base), enumerate(chosen)):
                failed += bool(wrong)
                out("\n    ".join([f"{'FAILED' if wrong else 'passed'} {seconds:5.1f} s  {case.name}", *wrong]))
    out(f"{len(chosen)} odd surroundings, {failed} failed")
    return failed


def _timed(numbered: tuple[int, Case], root: Path, base: Path) -> tuple[Case, list[str], float]:
    number, case = numbered
    place, began = root / str(number), time.monotonic()
    place.mkdir()
    wrong = failures(case, place, base)
    shutil.rmtree(place, ignore_errors=True)
    return case, wrong, time.monotonic() - began
