"""``streamrl init FOLDER``."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from streamrl.base.atomic_files import new_directory
from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.cli.command import Argument, Command, print_json
from streamrl.cli.dialects.translation import translate
from streamrl.cli.start.folders import template, write_templates
from streamrl.cli.start.models import MADE, MODELS, SMOLLM2, TINY, ModelSettings, find_model, make_model
from streamrl.cli.start.questions import ask, choose
from streamrl.cli.start.tasks import GYM, HELD_OUT, QUESTION, TASKS, TRAIN, WARM_UP, find_task, write_corpus

_CHAT_TOKENS = 64
"""Tokens of a chat template around a prompt, roughly."""
_MAKE_ROWS = "make_rows.py"
_HUB = '# {} = "hf:openai/gsm8k?config=main&split={}&prompt=question&chat=true"  # GSM8K, for a pretrained model\n'


class Init(Command, frozen=True, kw_only=True):
    """Write a folder that trains: recipe, reward with its test, prompts, README, and a model where one is to be made.
    What no flag says is asked on a terminal."""

    folder: Annotated[Path, Argument("a folder that is not there yet", metavar="FOLDER", positional=True)]
    task: Annotated[str, Argument(f"{', '.join(TASKS)} or {GYM}:NAME", metavar="TASK")] = ""
    model: Annotated[str, Argument(f"{TINY} ({MODELS[TINY]}), {SMOLLM2}, a directory, a name of the Hub")] = ""
    corpus: Annotated[Path | None, Argument("rows of your own: JSONL with prompt and answer, or text", "FILE")] = None
    source: Annotated[
        str, Argument("settings of TRL, verl, prime-rl or AReaL: a file of theirs, or a command line", "FILE", "--from")
    ] = ""
    warm_up_steps: Annotated[int, Argument(f"of --model {TINY}, at most (600)", metavar="N")] = 600

    def run(self) -> int:
        """Write it, and print what to do next."""
        if self.source:
            return self._translate()
        task_name, model, corpus = self._answers()
        kind, of_gym = find_task(task_name)
        settings = find_model(model)
        if self.warm_up_steps < 1:
            raise RecipeError(f"--warm-up-steps {self.warm_up_steps} must be above 0: correct it")
        if of_gym and corpus:
            raise RecipeError(f"--corpus: the rows of {GYM} are made by its task: leave it out, or take --task own")
        if kind == "judge" and corpus and model == TINY:
            raise RecipeError("--corpus: a tiny model has not learnt to judge these rows: name a --model that can")
        values = _values(self.folder.absolute().name, kind, of_gym, settings)
        with new_directory(self.folder) as partial:
            if corpus:
                write_corpus(corpus, partial, TASKS[kind], imitated=model == TINY)
            else:
                _make_rows(partial, kind, values)
            shown = [json.loads(line) for line in (partial / WARM_UP).read_text(encoding="utf-8").splitlines()]
            made = self._make_model(model, partial, TASKS[kind].until)
            values |= _lengths(shown, settings)
            values["rewards"] = template(f"{kind}/rewards.toml.part", values)
            for directory in ("any", kind, *TASKS[kind].templates):
                write_templates(partial, directory, values)
            files = sorted(path.name for path in partial.iterdir())
        self._report(files, made)
        return 0

    def _translate(self) -> int:
        """Write a recipe of the settings of another system, and print what became of each of them."""
        given = {"--task": self.task, "--model": self.model, "--corpus": self.corpus}
        if named := [name for name, value in given.items() if value]:
            text = f"{', '.join(named)}: --from says it: leave it out, and change the recipe that is written"
            raise RecipeError(text, outcome="nothing was written")
        made = translate(self.source)
        files = {"recipe.toml": made.recipe, **made.files}
        with new_directory(self.folder) as partial:
            for name, text in files.items():
                (partial / name).write_text(text, encoding="utf-8")
        commands = [
            f"cd {shlex.quote(str(self.folder))}",
            "streamrl train recipe.toml --dry-run",
            "streamrl try recipe.toml",
        ]
        if self.json:
            settings = [{"key": one.key, "outcome": one.outcome, "here": one.here} for one in made.settings]
            shown = {"folder": str(self.folder.absolute()), "files": sorted(files), "settings": settings}
            print_json({**shown, "system": made.dialect, "next": commands})
        else:
            print(
                "\n".join([*made.lines(), "", f"{self.folder}: {', '.join(files)}", "", "next:"]), *commands, sep="\n  "
            )
        return 0

    def _answers(self) -> tuple[str, str, Path | None]:
        """Task, model and corpus; what no flag says is asked where there is a terminal. Raises ``RecipeError``."""
        task = self.task
        model = self.model
        corpus = self.corpus
        asks = sys.stdin.isatty() and sys.stdout.isatty() and not self.json
        if not task and not asks:
            raise RecipeError(f"--task is not given: name one of {', '.join(TASKS)}, {GYM}:NAME")
        if not task:
            task = choose("What is the task?", {name: one.title for name, one in TASKS.items()}, f"{GYM}:NAME")
            find_task(task)
            if task == "own" and corpus is None:
                file = ask("A file with rows of your own (JSON objects with prompt and answer); Enter for an example: ")
                corpus = Path(file).expanduser() if file else None
        if not model and asks and not self.task:
            model = choose("Which model learns it?", MODELS, "a directory in Hugging Face format, or a name of the Hub")
        return task, model or TINY, corpus

    def _make_model(self, model: str, folder: Path, until: float) -> Mapping[str, Any]:
        if model == TINY:
            limits = ("--steps", str(self.warm_up_steps), "--until", str(until))
            made = make_model("warm_up", str(folder / WARM_UP), str(folder / MADE), *limits)
            if until and not made["right"]:
                print("the model writes no right completion yet: give more --warm-up-steps", file=sys.stderr)
            return made
        (folder / WARM_UP).unlink()
        return make_model("packaged", str(folder / MADE)) if model == SMOLLM2 else {}

    def _report(self, files: list[str], made: Mapping[str, Any]) -> None:
        commands = [f"cd {shlex.quote(str(self.folder))}", "pytest", "streamrl train recipe.toml --dry-run"]
        commands += ["streamrl try recipe.toml", "streamrl train recipe.toml"]
        if self.json:
            print_json({"folder": str(self.folder.absolute()), "files": files, "model": made, "next": commands})
        else:
            print(f"{self.folder}: {', '.join(files)}")
            print("\nnext:", *commands, sep="\n  ")


def _make_rows(folder: Path, kind: str, values: Mapping[str, object]) -> None:
    """Write and run the program that makes the rows of a task, which is then the user's. Raises ``StreamRLError``."""
    further = " + judged(shown)" if kind == "judge" else ""
    tail = "" if kind == GYM else template("any/write_rows.py.part", {"further": further})
    (folder / _MAKE_ROWS).write_text(template(f"{kind}/rows.py.part", values) + tail, encoding="utf-8")
    done = subprocess.run([sys.executable, _MAKE_ROWS], cwd=folder, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise StreamRLError(f"no rows were made: {done.stderr.strip().splitlines()[-1].rpartition('Error: ')[2]}")


def _values(name: str, kind: str, of_gym: str, settings: ModelSettings) -> dict[str, object]:
    """The names in the templates that do not depend on the rows."""
    train = TRAIN
    held_out = HELD_OUT
    if of_gym:
        task = f"reasoning_gym:{of_gym}{'&' if '?' in of_gym else '?'}size"
        train = f"{task}=1024"
        held_out = f"{task}=64&seed=1000000"
    if settings.chat:
        train, held_out = (f"{spec}{'&' if of_gym else '?'}chat=true" for spec in (train, held_out))
    title = TASKS[kind].title
    return {
        "title": title[0].upper() + title[1:],
        "name": re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40] or kind,
        "steps": settings.steps,
        "model": json.dumps(settings.path, ensure_ascii=False)[1:-1],
        "model_note": settings.note,
        "eval_model": shlex.quote(settings.path),
        "train": train,
        "held_out": held_out,
        "held_out_note": "made of other seeds" if of_gym else "not trained on",
        "hub_train": _HUB.format("train", "train") if kind == "math" else "",
        "hub_held_out": _HUB.format("prompts", "test") if kind == "math" else "",
        "prompts_per_batch": settings.prompts_per_batch,
        "temperature": settings.temperature,
        "learning_rate": settings.learning_rate,
        "question": QUESTION,
        "judge_chat": str(settings.chat).lower(),
        "rows": "recipe.toml names the task" if of_gym else f"{TRAIN} and {HELD_OUT} are its rows",
    }


def _lengths(shown: list[dict[str, str]], settings: ModelSettings) -> dict[str, object]:
    """Limits for rows such as ``shown``: characters bound the tokens of a prompt and of an answer."""
    prompt, completion = (max(len(row[key]) for row in shown) for key in ("prompt", "completion"))
    most = max(-(-completion * 5 // 4 // 16) * 16 + 16, settings.least_tokens)
    return {"max_tokens": most, "max_model_len": -(-(prompt + most + _CHAT_TOKENS) // 64) * 64}
