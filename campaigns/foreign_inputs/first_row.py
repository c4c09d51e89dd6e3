"""Rewards of strangers, called by the dry run for the first row: in the forms of TRL, verl and of notebooks, and with
the mistakes of a first attempt. A right one has no problem, and no note; a wrong one is named with the reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from campaigns.front_door.folders import DEMO_MODEL
from streamrl.prepare.called_rewards import call_rewards
from streamrl.pretrained.tokenizer import Tokenizer, load_tokenizer
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.run.prompts.prompt_rows import read_prompt

ROW = {"prompt": "12:", "answer": "12", "data_source": "sort", "reward_model": {"ground_truth": "12"}, "none": None}


@cache
def _tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO_MODEL)


def _called(code: str, problem: str, path: Path, *, note: str = "", **reward: Any) -> str:
    (path / "mine.py").write_text(code)
    table = {"model": {"path": str(DEMO_MODEL)}, "prompts": {"train": "t.jsonl"}}
    table["rewards"] = [{"function": f"{path}/mine.py:f", "timeout_s": 2.0, **reward}]  # type: ignore[assignment]
    problems, notes = call_rewards(load_recipe(table), read_prompt(ROW, 1, _tokenizer()), _tokenizer())
    for said, words in ((problems, problem), (notes, note)):
        if bool(said) != bool(words) or not all(words in line and "\n" not in line for line in said):
            return f"{said} in place of {words!r}"
    return ""


VARIANTS: dict[str, Callable[[Path], str]] = {
    "of TRL": partial(_called, "def f(completions, answer, **k): return [1.0 for c in completions]", ""),
    "of TRL, with prompts": partial(_called, "def f(prompts, completions, **k): return [0.5 for c in completions]", ""),
    "of verl": partial(_called, "def f(data_source, solution_str, ground_truth, extra_info=None): return 1.0", ""),
    "of verl, a mapping": partial(
        _called, "def f(data_source, solution_str, ground_truth, extra_info=None): return {'score': 1.0}", ""
    ),
    "a coroutine": partial(_called, "async def f(completion, **k): return 0", ""),
    "a bool": partial(_called, "def f(completion, *, answer): return answer in completion", ""),
    "a number of NumPy": partial(_called, "import numpy\ndef f(completion, **k): return numpy.float32(1)", ""),
    "a tensor": partial(_called, "import torch\ndef f(completion, **k): return torch.tensor(1.0)", "", memory_mib=4096),
    "text": partial(_called, "def f(completion, **k): return '1'", "wrong_type"),
    "no return": partial(_called, "def f(completion, **k): print(1)", "every reward function returned None"),
    "NaN": partial(_called, "def f(completion, **k): return float('nan')", "not_finite"),
    "one value for a group": partial(_called, "def f(completions, **k): return 1.0", "wrong_type"),
    "a value too few": partial(_called, "def f(completions, **k): return [1.0] * (len(completions) - 1)", "wrong_type"),
    "a null column": partial(_called, "def f(completion, *, none): return none + 1", "TypeError"),
    "a name that is none": partial(_called, "def f(completion, **k): return scores[completion]", "NameError"),
    "an import inside": partial(_called, "def f(completion, **k):\n import nosuch\n return 1", "ModuleNotFoundError"),
    "an endless loop": partial(_called, "def f(completion, **k):\n while True: pass", "timed_out"),
    "sleep": partial(_called, "import time\ndef f(completion, **k): time.sleep(9)", "timed_out"),
    "exit": partial(_called, "import sys\ndef f(completion, **k): sys.exit(3)", "SystemExit"),
    "a crash": partial(_called, "import os\ndef f(completion, **k): os.abort()", "raised"),
    "no answer in the text": partial(
        _called, "import re\ndef f(completion, **k): return float(re.search('1', completion)[0])", "", note="TypeError"
    ),
    "the first letter": partial(
        _called, "def f(completion, **k): return completion[0] == '1'", "", note="an empty completion"
    ),
    "an empty completion alone": partial(
        _called, "def f(completion, **k): return 1 / (not completion)", "", note="the completion '12'"
    ),
}  # fmt: skip
