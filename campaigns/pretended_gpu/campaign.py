"""Parts of a trainer on a pretended GPU: what a GPU refuses is refused, and values are those of the CPU.

    python -m campaigns pretended_gpu [NAME ...] [--cards H100,H100]
    python -m campaigns pretended_gpu [NAME ...] --plant      # faults of devices, which the cases must see
    python -m campaigns pretended_gpu --cards T4 --command train RECIPE --dry-run

A case is tests of the product, run where torch has the cards. ``--plant`` changes one line of the product in a copy of
the last commit. ``--command`` runs streamrl where NVML lists the cards: with the CPU builds, what is planned and placed
is that of the cards, while the trial of the model is that of a CPU."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from campaigns.planted_copy import ROOT, copy_of_the_tree, planted
from campaigns.pretended_gpu.cards import VARIABLE, cards_of
from campaigns.pretended_gpu.wheel import vllm_for_cuda

LIMIT_S = 900
DEFAULT_CARDS = "H100,H100"


class Fault(NamedTuple):
    """In ``line``, which ``file`` (below ``streamrl/``) has once, ``part`` becomes ``instead``."""

    file: str
    line: str
    part: str
    instead: str = ""

    @property
    def planted(self) -> str:
        """The line with the fault."""
        return self.line.replace(self.part, self.instead)


class Case(NamedTuple):
    """``tests``: arguments of pytest. ``precision``: of trainers that ask for none; empty: torch has no cards, and the
    tests pretend them themselves. ``wheel``: vLLM is the Python of its CUDA wheel, which is downloaded once."""

    tests: str
    fault: Fault
    precision: str = "float32"
    wheel: bool = False


_EXACT = "not arrival_order and not ratio_is_one"  # of float32
_PACKING = "learning/batches/packing.py"
_ATTENTION = "learning/model/attention.py"
_OPTIMIZER = "learning/state/optimizer.py"
_OWN_TESTS = "tests/campaigns/test_pretended_gpu.py"

CASES = {
    "trainer": Case(
        "tests/learning/test_trainer.py",
        Fault(_PACKING, "torch.from_numpy(laid.predictors_N).to(device)", ".to(device)"),
    ),
    "flash kernel": Case(
        f"tests/learning/test_trainer.py -k '{_EXACT}'",
        Fault(_ATTENTION, ".astype(np.int32)).to(device)", "int32", "int64"),
        "bfloat16",
    ),
    "packed rows": Case(
        "tests/gpu/test_packed_rows.py -k cuda",
        Fault(_ATTENTION, "return torch.from_numpy(values).to(device)", ".to(device)"),
        "bfloat16",
    ),
    "checkpoints": Case(
        "tests/learning/state/test_checkpoint.py tests/learning/test_trainer.py "
        "-k 'checkpoint or hugging_face or resum'",
        Fault(_OPTIMIZER, "moment.to(self._state[name].device)", ".to(self._state[name].device)", ".cpu()"),
    ),
    "optimizers": Case(
        f"{_OWN_TESTS} -k 'alone and (offloaded or checkpointing)'",
        Fault(_OPTIMIZER, "dtype=torch.float32, device=masters.device)", ", device=masters.device"),
        "",
    ),
    "LoRA": Case(
        f"{_OWN_TESTS} -k 'alone and (lora or adapter)'",
        Fault("learning/state/unmerged.py", "dtype=torch.float32, device=device, requires_grad", "device=device, "),
        "",
    ),
    "critic": Case(
        "tests/learning/model/test_critic.py",
        Fault("learning/model/critic.py", "nn.Linear(hidden, 1, device=device)", ", device=device"),
    ),
    "objectives": Case(
        "tests/learning/objective -m 'not long'", Fault(_PACKING, "np.concatenate(present)).to(device)", ".to(device)")
    ),
    "published weights": Case(
        "tests/gpu/test_weights_on_device.py -k frames",
        Fault("weights/publish/torch_tensors.py", "astype(np.int16)).to(base.device)", ".to(base.device)"),
    ),
    "weights of engines": Case(
        "tests/gpu/test_weights_on_device.py -k live",
        Fault("weights/vllm/live_weights.py", "element_size())).to(storage.device)", ".to(storage.device)"),
    ),
    "two ranks": Case(
        f"{_OWN_TESTS} -k ranks",
        Fault(
            "learning/process_group.py", "torch.tensor(values, dtype=torch.float64, device=device)", ", device=device"
        ),
        "",
    ),
    "contract with vLLM": Case(
        "tests/engines/vllm/test_vllm_contract.py",
        Fault("weights/vllm/adapter.py", "manager.activate_adapter(ADAPTER_ID)", "activate_adapter", "activate_it"),
        "",
        wheel=True,
    ),
    "placement": Case(
        f"{_OWN_TESTS} -k dry_run",
        Fault("engines/vllm/visible_gpus.py", "nvml.nvmlDeviceGetMemoryInfo(handle).total", ".total", ".used"),
        "",
    ),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Arguments of ``run``."""
    command.add_argument("names", nargs="*", metavar="NAME", help=f"cases; all where none is named: {', '.join(CASES)}")
    command.add_argument("--cards", default=DEFAULT_CARDS, help="NAME:GiB:MAJOR.MINOR, or T4, 4090, A100-40, H100, ...")
    command.add_argument("--plant", action="store_true", help="plant the fault of each case, which must be seen")
    command.add_argument("--command", nargs=argparse.REMAINDER, help="streamrl with these arguments, on the cards")
    command.set_defaults(work=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the cases that are named; 1 where one failed, or where a planted fault was not seen."""
    if arguments.command:
        return run_command(arguments.cards, arguments.command)
    if unknown := [name for name in arguments.names if name not in CASES]:
        raise SystemExit(f"no case has the name {unknown[0]!r}: {', '.join(CASES)}")
    chosen = arguments.names or list(CASES)
    with copy_of_the_tree() if arguments.plant else nullcontext(ROOT) as tree:
        wrong = [name for name in chosen if not _as_it_should(name, tree, arguments.cards, plants=arguments.plant)]
    print(f"{len(chosen)} cases on {arguments.cards}: {len(wrong)} {'not seen' if arguments.plant else 'failed'}")
    return int(bool(wrong))


def run_command(cards: str, words: list[str]) -> int:
    """Run streamrl in a process that finds the cards."""
    from campaigns.pretended_gpu.driver import variables

    command = [sys.executable, "-m", "streamrl", *words]
    return subprocess.run(command, env=os.environ | variables(cards_of(cards)), check=False).returncode


def _as_it_should(name: str, tree: Path, cards: str, *, plants: bool) -> bool:
    """Run one case and print its row. ``plants``: with its fault in ``tree``, which must be seen."""
    case = CASES[name]
    fault = case.fault
    began = time.monotonic()
    with planted(tree, fault.file, fault.line, fault.planted) if plants else nullcontext():
        code, output = _tests(case, tree, cards)
    seconds = time.monotonic() - began
    refused = re.findall(r"^refused: (.*)$", output, re.MULTILINE)
    counts = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|skipped)[^=\n]*?) in ", output, re.MULTILINE)
    counted = counts[-1] if counts else f"exit code {code}"
    good = (code == 1) if plants else (code == 0)
    said = "" if good and not plants else next(iter(refused), _first_error(output))
    print(f"{name:<19} {'ok' if good else 'FAILED':<7}{seconds:4.0f} s  {counted:<32} {said[:150]}".rstrip())
    if not (good or plants):
        print(*re.findall(r"^FAILED .*$", output, re.MULTILINE), sep="\n")
    sys.stdout.flush()
    return good


def _first_error(output: str) -> str:
    found = re.search(r"^E +(.*)$", output, re.MULTILINE)
    return found[1] if found else output.strip()[-150:]


def _tests(case: Case, tree: Path, cards: str) -> tuple[int, str]:
    """Exit code of pytest and what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *shlex.split(case.tests)]
    changes = {"PYTHONPATH": str(tree), "STREAMRL_TESTS_SPAWN": "1"}  # else the processor time of a test is limited
    if case.precision:
        command += ["-p", "campaigns.pretended_gpu.plugin"]
        changes |= {VARIABLE: ",".join(map(str, cards_of(cards))), "PRETENDED_DTYPE": case.precision}
    if case.wheel:
        changes["PYTHONPATH"] = f"{vllm_for_cuda()}:{tree}"
    done = subprocess.run(
        command, cwd=tree, env=os.environ | changes, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    return done.returncode, done.stdout + done.stderr
