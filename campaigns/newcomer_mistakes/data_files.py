"""Files of prompts."""

from __future__ import annotations

import json

from campaigns.newcomer_mistakes.mistake import Mistake, each, edited, recipe, removed, written

ROWS = [{"prompt": f"{n}1:", "answer": f"1{n}"} for n in range(2, 10)]
TEMPLATE = 'chat template: put its chat_template.jinja there, or give prompts as text in the column "prompt"'


def _lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _train(content: str | bytes, *said: str, name: str = "train.jsonl") -> Mistake:
    """Training rows of this content; a file by another name is named in the recipe."""
    return Mistake(
        each(written(name, content), edited("recipe.toml", '"train.jsonl"', f'"{name}"')),
        ("prompts.train: prompts ", name, *said),
    )


def _spec(new: str, *said: str) -> Mistake:
    """``prompts.train`` as the recipe has it."""
    return recipe('"train.jsonl"', f'"{new}"', *said)


MISTAKES: dict[str, Mistake] = {
    "a file that is not there": _spec("trian.jsonl", "prompts.train:", "trian.jsonl", "correct the path"),
    "a folder of nothing": Mistake(
        each(written("data/readme", ""), edited("recipe.toml", '"train.jsonl"', '"data"')),
        ("prompts.train:", "data is no dataset directory", "correct the path"),
    ),
    "an empty file": _train("", "is empty", "add rows"),
    "only empty lines": _train("\n\n\n", "is empty", "add rows"),
    "rows without a prompt": _train(
        _lines(*({"question": "1", "answer": "2"} for _ in range(8))), "line 1", "(it has question, answer)", "?prompt="
    ),
    "one row without a prompt": _train(_lines(*ROWS, {"answer": "2"}), "line 9", 'no column "prompt"', "add one"),
    "rows without the column of the reward": _train(
        _lines(*({"prompt": row["prompt"]} for row in ROWS)), "line 1", '"answer"', "add it (so with 7 of the other 7"
    ),
    "a prompt of null": _train(_lines(*ROWS, {"prompt": None, "answer": "1"}), "line 9", "null", "remove the row"),
    "an empty prompt": _train(_lines(*ROWS, {"prompt": "", "answer": "1"}), "line 9", "empty prompt", "remove the row"),
    "a prompt that is a number": _train(_lines(*ROWS, {"prompt": 12, "answer": "1"}), "line 9", "int", "must be text"),
    "a prompt that is an object": _train(
        _lines(*ROWS, {"prompt": {"text": "1"}, "answer": "1"}), "line 9", "dict", "must be text"
    ),
    "a line that is cut": _train(_lines(*ROWS) + '{"prompt": "1', "line 9", "truncated", "correct it"),
    "single quotes of Python": _train("{'prompt': '12:', 'answer': '12'}\n" * 8, "line 1", "not a JSON", "correct it"),
    "lines that are texts": _train("first:\nsecond:\n", "line 1", "not a JSON object", "name the file by its format"),
    "lists for rows": _train('["12:", "12"]\n' * 8, "line 1", "begins a JSON array", "one a line"),
    "a key twice in a row": _train(
        _lines(*ROWS) + '{"prompt": "1:", "prompt": "2:", "answer": "2"}\n', "line 9", '"prompt" 2 times', "leave one"
    ),
    "a comma at the end": _train('{"prompt": "12:", "answer": "12",}\n' * 8, "line 1", "trailing comma", "correct it"),
    "NaN": _train('{"prompt": "12:", "answer": NaN}\n' * 8, "line 1", "byte 28", "correct it"),
    "Latin-1": _train('{"prompt": "\u00e9", "answer": "1"}\n'.encode("latin-1") * 8, "line 1", "0xe9", "correct it"),
    "UTF-16": _train(_lines(*ROWS).encode("utf-16"), "line 1", "UTF-16", "save it as UTF-8"),
    "gzip": _train(b"\x1f\x8b\x08\x00" + b"0" * 40, "line 1", "compressed", "unpack it"),
    "a pointer of git-lfs": _train(
        "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 12\n", "line 1", "pointer", "git lfs pull"
    ),
    "a page in place of the file": _train(
        "<!DOCTYPE html><html><body>404</body></html>\n", "line 1", "web page", "download the file itself"
    ),
    "a spreadsheet": _train(b"PK\x03\x04", "is neither a .jsonl, .json, .csv, .parquet", name="train.xlsx"),
    "a pickle": _train(b"\x80\x04", "is neither a .jsonl, .json, .csv, .parquet", name="train.pkl"),
    "a text": _train("12:\n", "is neither a .jsonl, .json, .csv, .parquet", name="train.txt"),
    "CSV by another name": _train("prompt,answer\n12:,12\n", "line 1", "not a JSON object", "such as .csv"),
    "CSV with semicolons": _train("prompt;answer\n12:;12\n", "prompt;answer", "write it with commas", name="train.csv"),
    "a parquet that is none": _train(_lines(*ROWS), "cannot be read", "correct", name="train.parquet"),
    "an array that is cut": _train(json.dumps(ROWS)[:-4], "truncated", "correct it", name="train.json"),
    "an object of rows": _train(json.dumps({"data": ROWS}), "(it has data)", "add one", name="train.json"),
    "chats for a model without a template": _train(
        _lines(*({"prompt": [{"role": "user", "content": "1"}], "answer": "1"} for _ in range(8))), "line 1", TEMPLATE
    ),
    "a chat without roles": _train(
        _lines(*({"messages": [{"text": "1"}], "answer": "1"} for _ in range(8))), "line 1", "message 1", '"user"'
    ),
    "texts as chats, without a template": _spec("train.jsonl?chat=true", "prompts.train:", "line 1", TEMPLATE),
    "a misspelt option": _spec("train.jsonl?limt=8", "prompts.train:", '"limt"', '"limit"?'),
    "a limit of none": _spec("train.jsonl?limit=0", "prompts.train:", "limit = 0", "correct it"),
    "a column that is not there": _spec("train.jsonl?prompt=question", "prompts.train:", '"question"', "correct it"),
    "an address": _spec("https://example.com/train.jsonl", "recipe.toml:9: prompts.train:", "download the file"),
    "a name of the Hub without hf:": _spec("openai/gsm8k", "prompts.train:", "openai/gsm8k", '"hf:owner/name"'),
    "an iterator that is not there": _spec("task.py:rows", "prompts.train:", 'no "rows"', "correct the name"),
    "a list of files": recipe('"train.jsonl"', '["train.jsonl"]', "recipe.toml:9: prompts.train:", "must be a string"),
    "a prompt that does not fit": _train(
        _lines(*ROWS, {"prompt": "1" * 200 + ":", "answer": "1"}), "line 9", "202 tokens", "shorten it"
    ),
    "no held-out file": Mistake(
        removed("held_out.jsonl"), ("evaluation.prompts:", "held_out.jsonl cannot be read", "correct the path")
    ),
    "a held-out file without its column": Mistake(
        written("held_out.jsonl", _lines(*({"prompt": "1:"} for _ in range(4)))),
        ("evaluation.prompts:", "held_out.jsonl, line 1", '"answer"', "add it"),
    ),
}  # fmt: skip
