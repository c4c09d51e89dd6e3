"""``streamrl init FOLDER``: writes a folder that trains, or with ``--from`` a recipe from settings of another system.
Runs in the command's own process; rows and models are made by programs in child processes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from streamrl.base.atomic_files import new_directory
from streamrl.base.errors import InputError, RecipeError
from streamrl.base.types import JsonMapping, TextsByName
from streamrl.cli.command import Argument, Command, print_json
from streamrl.cli.dialects.recorded_script import translate_script
from streamrl.cli.dialects.setting_files import read_settings
from streamrl.cli.dialects.translation import translated
from streamrl.cli.init.folders import template, write_templates
from streamrl.cli.init.questions import ask, choose
from streamrl.cli.init.start_models import MODEL_FOLDER, MODELS, SMOLLM2, TINY, ModelSettings, find_model, make_model
from streamrl.cli.init.tasks import GYM, HELD_OUT, QUESTION, TASKS, TRAIN, WARM_UP, find_task, write_corpus

_CHAT_TOKENS = 64
"""Approximate number of tokens that a chat template adds to a prompt."""
_MAKE_ROWS = "make_rows.py"
_HUB = '# {} = "hf:openai/gsm8k?config=main&split={}&prompt=question&chat=true"  # GSM8K, for a pretrained model\n'


class Init(Command, frozen=True, kw_only=True):
    """Write a folder that trains: recipe, reward with its test, prompts, README, and a model where one is to be made.
    What no flag says is asked on a terminal."""

    folder: Annotated[Path, Argument("a folder that is not there yet", metavar="FOLDER", positional=True)]
    task: Annotated[str, Argument(f"{', '.join(TASKS)} or {GYM}:NAME", metavar="TASK")] = ""
    model: Annotated[str, Argument(f"{TINY} ({MODELS[TINY]}), {SMOLLM2}, a directory, a name of the Hub")] = ""
    corpus: Annotated[Path | None, Argument("rows of your own (JSON, CSV, parquet), or a text", "FILE")] = None
    source: Annotated[
        str, Argument("a script of TRL, which is run, or settings of TRL, verl, prime-rl or AReaL", "FILE", "--from")
    ] = ""
    warm_up_steps: Annotated[int, Argument(f"of --model {TINY}, at most (600)", metavar="N")] = 600

    def run(self) -> int:
        """Write the folder, and print the next commands."""
        if self.source:
            return self._translate()
        task_name, model, corpus = self._answers()
        kind, gym_task = find_task(task_name)
        settings = find_model(model)
        if self.warm_up_steps < 1:
            raise RecipeError(f"--warm-up-steps {self.warm_up_steps} must be above 0: correct it")
        if gym_task and corpus:
            raise RecipeError(f"--corpus: the rows of {GYM} are made by its task: leave it out, or take --task own")
        if kind == "judge" and corpus and model == TINY:
            raise RecipeError("--corpus: a tiny model has not learnt to judge these rows: name a --model that can")
        values = _values(self.folder.absolute().name, kind, gym_task, settings)
        with new_directory(self.folder) as partial:
            corpus_text = ""
            if corpus:
                corpus_text = write_corpus(corpus, partial, TASKS[kind], imitated=model == TINY)
            else:
                _make_rows(partial, kind, values)
            rows = [json.loads(line) for line in (partial / WARM_UP).read_bytes().splitlines()]
            model_figures = self._make_model(model, partial, TASKS[kind].until)
            values |= _lengths(rows, settings)
            values["rewards"] = template(f"{kind}/rewards.toml.part", values)
            for directory in ("any", kind, *TASKS[kind].templates):
                write_templates(partial, directory, values)
            files = sorted(path.name for path in partial.iterdir())
        self._report(files, model_figures, corpus_text)
        return 0

    def _translate(self) -> int:
        """Write a recipe from the settings of another system, and print the outcome of each setting."""
        other_flags = {"--task": self.task, "--model": self.model, "--corpus": self.corpus}
        if conflicts := [name for name, value in other_flags.items() if value]:
            text = f"{', '.join(conflicts)}: --from says it: leave it out, and change the recipe that is written"
            raise RecipeError(text, outcome="nothing was written")
        script, _, words = self.source.partition(" ")
        with new_directory(self.folder) as partial:
            if script.endswith(".py") and Path(script).is_file():
                translation = translate_script(Path(script), shlex.split(words), partial)
            else:
                translation = translated(read_settings(Path(self.source)))
            (partial / "recipe.toml").write_text(translation.recipe, encoding="utf-8")
            files = sorted(path.name for path in partial.iterdir())
        commands = [
            f"cd {shlex.quote(str(self.folder))}",
            "streamrl train recipe.toml --dry-run",
            "streamrl try recipe.toml",
        ]
        if self.json:
            settings = [
                {"key": setting.key, "outcome": setting.outcome, "here": setting.here}
                for setting in translation.settings
            ]
            result = {"folder": str(self.folder.absolute()), "files": files, "settings": settings}
            print_json({**result, "system": translation.dialect, "next": commands})
        else:
            lines = [*translation.lines(), "", f"{self.folder}: {', '.join(files)}", "", "next:"]
            print("\n".join(lines), *commands, sep="\n  ")
        return 0

    def _answers(self) -> tuple[str, str, Path | None]:
        """Return task, model and corpus; ask for missing flags where there is a terminal. Raises ``RecipeError``."""
        task = self.task
        model = self.model
        corpus = self.corpus
        interactive = sys.stdin.isatty() and sys.stdout.isatty() and not self.json
        if not task and not interactive:
            raise RecipeError(f"--task is not given: name one of {', '.join(TASKS)}, {GYM}:NAME")
        if not task:
            task = choose("What is the task?", {name: entry.title for name, entry in TASKS.items()}, f"{GYM}:NAME")
            find_task(task)
            if task == "own" and corpus is None:
                file = ask("A file with rows of your own (JSON objects with prompt and answer); Enter for an example: ")
                corpus = Path(file).expanduser() if file else None
        if not model and interactive and not self.task:
            model = choose("Which model learns it?", MODELS, "a directory in Hugging Face format, or a name of the Hub")
        return task, model or TINY, corpus

    def _make_model(self, model: str, folder: Path, until: float) -> JsonMapping:
        if model == TINY:
            limits = ("--steps", str(self.warm_up_steps), "--until", str(until))
            figures = make_model("warm_up", str(folder / WARM_UP), str(folder / MODEL_FOLDER), *limits)
            if until and not figures["right"]:
                print("the model writes no right completion yet: give more --warm-up-steps", file=sys.stderr)
            return figures
        (folder / WARM_UP).unlink()
        if model == SMOLLM2:
            return make_model("packaged", str(folder / MODEL_FOLDER))
        return {}

    def _report(self, files: list[str], model_figures: JsonMapping, corpus_text: str) -> None:
        test = "pytest" if find_spec("pytest") else "pip install pytest && pytest"
        commands = [f"cd {shlex.quote(str(self.folder))}", test, "streamrl train recipe.toml --dry-run"]
        commands += ["streamrl try recipe.toml", "streamrl train recipe.toml"]
        if self.json:
            result = {"folder": str(self.folder.absolute()), "files": files, "corpus": corpus_text}
            print_json({**result, "model": model_figures, "next": commands})
        else:
            print(f"{self.folder}: {', '.join(files)}")
            if corpus_text:
                print(f"{self.corpus}: {corpus_text}")
            print("\nnext:", *commands, sep="\n  ")


def _make_rows(folder: Path, kind: str, values: Mapping[str, object]) -> None:
    """Write and run the program that makes the rows of a task. It stays in the folder. Raises ``StreamRLError``."""
    program = template(f"{kind}/rows.py.part", values)
    if kind == "judge":
        program += template("any/write_rows.py.part", {"further": " + judged(shown)"})
    elif kind != GYM:
        program += template("any/write_rows.py.part", {"further": ""})
    (folder / _MAKE_ROWS).write_text(program, encoding="utf-8")
    process = subprocess.run([sys.executable, _MAKE_ROWS], cwd=folder, stderr=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        raise InputError(f"no rows were made: {process.stderr.strip().splitlines()[-1].rpartition('Error: ')[2]}")


def _values(name: str, kind: str, gym_task: str, settings: ModelSettings) -> dict[str, object]:
    """Return the values of the templates' names that do not depend on the rows."""
    train = TRAIN
    held_out = HELD_OUT
    if gym_task:
        separator = "&" if "?" in gym_task else "?"
        task = f"reasoning_gym:{gym_task}{separator}size"
        train = f"{task}=1024"
        held_out = f"{task}=64&seed=1000000"
    if settings.chat:
        separator = "&" if gym_task else "?"
        train = f"{train}{separator}chat=true"
        held_out = f"{held_out}{separator}chat=true"
    title = TASKS[kind].title
    hub_train = hub_held_out = ""
    if kind == "math":
        hub_train = _HUB.format("train", "train")
        hub_held_out = _HUB.format("prompts", "test")
    return {
        "title": title[0].upper() + title[1:],
        "name": re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40] or kind,
        "steps": settings.steps,
        "model": json.dumps(settings.path, ensure_ascii=False)[1:-1],
        "model_note": settings.note,
        "eval_model": shlex.quote(settings.path),
        "train": train,
        "held_out": held_out,
        "held_out_note": "made of other seeds" if gym_task else "not trained on",
        "hub_train": hub_train,
        "hub_held_out": hub_held_out,
        "prompts_per_batch": settings.prompts_per_batch,
        "temperature": settings.temperature,
        "learning_rate": settings.learning_rate,
        "question": QUESTION,
        "judge_chat": str(settings.chat).lower(),
        "rows": "recipe.toml names the task" if gym_task else f"{TRAIN} and {HELD_OUT} are its rows",
    }


def _lengths(rows: list[TextsByName], settings: ModelSettings) -> dict[str, object]:
    """Return token limits for ``rows``, whose characters bound the tokens of a prompt and of an answer."""
    prompt = max(len(row["prompt"]) for row in rows)
    completion = max(len(row["completion"]) for row in rows)
    # Five quarters of the longest answer, rounded up to a multiple of 16, plus 16.
    max_tokens = max(-(-completion * 5 // 4 // 16) * 16 + 16, settings.least_tokens)
    return {"max_tokens": max_tokens, "max_model_len": -(-(prompt + max_tokens + _CHAT_TOKENS) // 64) * 64}
