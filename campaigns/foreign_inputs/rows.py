"""Files of rows as people have them, read by ``prompts.train`` and by ``init --corpus``: both give the rows that pandas
or json gives, or refuse the file; and what ``init`` says that it read is counted again."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas

from campaigns.front_door.folders import DEMO_MODEL
from streamrl.cli.main import main
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.run.prompts.open_prompts import check_prompts, open_rows
from streamrl.run.prompts.prompt_spec import read_spec

ROWS = [{"prompt": f"{n} and {n + 1} make: ", "answer": f"{2 * n + 1} in all"} for n in range(16)]
ODD = [row | {"prompt": f"{row['prompt']}\u2028\x85\u00e9\U0001f642"} for row in ROWS]
DOUBLE = [*ROWS, *ROWS[:4]]


def _lines(rows: Sequence[Any], end: str = "\n", **how: Any) -> bytes:
    return "".join(json.dumps(row, **how) + end for row in rows).encode()


def _csv(rows: Sequence[dict[str, Any]], separator: str = ",", **how: Any) -> bytes:
    text: str = pandas.DataFrame(rows).to_csv(index=False, sep=separator, **how)
    return text.encode()


def _init(path: Path, name: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, words and rows of ``init --corpus``."""
    before = Path.cwd()
    said = io.StringIO()
    os.chdir(path)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(["init", "new", "--task", "own", "--model", str(DEMO_MODEL), "--corpus", name])
    finally:
        os.chdir(before)
    files = [path / "new" / file for file in ("train.jsonl", "held_out.jsonl")]
    made = [json.loads(line) for file in files if file.is_file() for line in file.read_bytes().splitlines()]
    return code, said.getvalue(), made


def _read(name: str, content: bytes, rows: Sequence[dict[str, Any]], path: Path) -> str:
    (path / name).write_bytes(content)
    store = open_rows(read_spec(f"{path}/{name}"))
    found = [store.row(index) for index in range(store.size)]
    if found != list(rows):
        return f"prompts.train has {found[:2]}"
    different = {row["prompt"]: row for row in rows}
    code, said, made = _init(path, name)
    count = len(different) // 8
    words = f"{len(different) - count} to train, {count} held out, {len(rows) - len(different)} double"
    if code or words not in said:
        return f"init: {code}, {said[-200:]}"
    return "" if {row["prompt"]: row for row in made} == different else f"init has {made[:2]}"


def _refused(name: str, content: bytes, words: str, path: Path) -> str:
    (path / name).write_bytes(content)
    code, said, made = _init(path, name)
    if not code or made or words not in said or "Traceback" in said:
        return f"init: {code}, {said[-200:]}"
    if name.endswith(".txt") or check_prompts(f"{path}/{name}", load_tokenizer(DEMO_MODEL), {}):
        return ""
    return "prompts.train takes it"


NUMBERS = [{"prompt": row["prompt"], "answer": n} for n, row in enumerate(ROWS)]
VARIANTS: dict[str, Callable[[Path], str]] = {
    "JSON lines": partial(_read, "r.jsonl", _lines(ROWS), ROWS),
    "CRLF": partial(_read, "r.jsonl", _lines(ROWS, "\r\n"), ROWS),
    "line separators in texts": partial(_read, "r.jsonl", _lines(ODD, ensure_ascii=False), ODD),
    "a byte order mark": partial(_read, "r.ndjson", b"\xef\xbb\xbf" + _lines(ROWS), ROWS),
    "an array in lines": partial(_read, "r.json", json.dumps(ROWS, indent=2).encode(), ROWS),
    "an array with a byte order mark": partial(_read, "r.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode(), ROWS),
    "an array in a .jsonl": partial(_read, "r.jsonl", json.dumps(ROWS).encode(), ROWS),
    "lines in a .json": partial(_read, "r.json", _lines(ROWS), ROWS),
    "rows twice": partial(_read, "r.jsonl", _lines(DOUBLE), DOUBLE),
    "CSV": partial(_read, "r.csv", _csv(ROWS), ROWS),
    "CSV with all in quotes": partial(_read, "r.csv", _csv(ODD, quoting=1), ODD),
    "CSV of Excel": partial(_read, "r.csv", b"\xef\xbb\xbf" + _csv(ROWS, lineterminator="\r\n"), ROWS),
    "CSV with numbers": partial(_read, "r.csv", _csv(NUMBERS), NUMBERS),
    "CSV with lines in values": partial(
        _read, "r.csv", _csv([row | {"answer": "a\nb"} for row in ROWS]), [row | {"answer": "a\nb"} for row in ROWS]
    ),
    "TSV": partial(_read, "r.tsv", _csv(ROWS, "\t"), ROWS),
    "CSV with semicolons": partial(_refused, "r.csv", _csv(ROWS, ";"), 'no text "prompt"'),
    "ragged CSV": partial(_refused, "r.csv", _csv(ROWS) + b"a,b,c\n", "Expected 2 columns, got 3"),
    "CSV in a text": partial(_refused, "r.txt", _csv(ROWS), "names columns (prompt,answer)"),
    "Latin-1": partial(_refused, "r.csv", "prompt,answer\ncaf\u00e9,1\n".encode("latin-1"), "r.csv cannot be read"),
    "an object of lists": partial(_refused, "r.json", json.dumps({"data": ROWS}).encode(), 'has no text "prompt"'),
    "an array that is cut": partial(_refused, "r.json", json.dumps(ROWS).encode()[:-5], "begins a JSON array"),
    "gzip": partial(_refused, "r.jsonl", b"\x1f\x8b\x08", "the file is compressed"),
    "a pointer of git-lfs": partial(_refused, "r.csv", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
}  # fmt: skip
